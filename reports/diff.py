"""What changed between two runs: cases by verdict, and the same problems bit by bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from conformance.engine.timing_stats import change
from conformance.results import (
    EXIT_CONFORMING,
    EXIT_INCONCLUSIVE,
    EXIT_NONCONFORMING,
    EXIT_NOTHING_RUN,
    BadLine,
    Record,
    Verdict,
    error_over_bound,
)
from reports.fold import executed
from reports.load import LoadedRun, load_runs, read_problems
from reports.markup import md, md_code
from reports.speed_data import time_text, timed_in, word

TITLES = {
    "broken": "Broken: conformed, does not any more",
    "lost": "Lost: ran in A, not in B",
    "unwaived": "No longer waived: nonconforming in both, a waiver covered it in A",
    "unclear": "Unclear: had a verdict, has none now",
    "changed": "Still nonconforming, in another way",
    "doubled": "Error over bound at least doubled",
    "slower": "Slower, beyond what noise explains",
    "faster": "Faster, beyond what noise explains",
    "bits": "Same problem, other bits",
    "inputs": "Same problem, other inputs (the two runs can't be compared there)",
    "fixed": "Fixed",
    "added": "Added: runs in B, did not in A",
}
"""Every kind of change, what is worst first."""

_BAD = (Verdict.NONCONFORMING, Verdict.WAIVED)


@dataclass
class Diff:
    """Changes by kind: (case id, sentence). `shared` counts the cases that ran in both."""

    a: LoadedRun
    b: LoadedRun
    shared: int = 0
    problems: int = 0
    """executed problems whose bits both runs hold"""
    changes: dict[str, list[tuple[str, str]]] = field(default_factory=lambda: {kind: [] for kind in TITLES})
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """1 if something broke, was lost or is no longer waived; else 6 if a verdict was lost or B edited; 5 if
        nothing ran in both; else 0."""
        if any(self.changes[kind] for kind in ("broken", "lost", "unwaived")):
            return EXIT_NONCONFORMING
        if self.changes["unclear"] or self.b.edited:
            return EXIT_INCONCLUSIVE
        return EXIT_CONFORMING if self.shared else EXIT_NOTHING_RUN

    def headline(self) -> str:
        counts = [f"{len(rows)} {kind}" for kind, rows in self.changes.items() if rows]
        return f"{self.a.label} -> {self.b.label}: {', '.join(counts) or 'no change'} ({self.shared} cases in both)"


def diff_runs(a: LoadedRun, b: LoadedRun) -> Diff:
    diff = Diff(a, b)
    before, after = ({r.id: r for r in run.records} for run in (a, b))
    for case in sorted(before.keys() | after.keys()):
        kind, sentence = _change(before.get(case), after.get(case))
        diff.shared += kind != "" and kind not in ("lost", "added")
        if kind in diff.changes:
            diff.changes[kind].append((case, sentence))
        if kind == "same":
            _compare_errors(diff, before[case], after[case])
            _compare_times(diff, before[case], after[case])
    _compare_bits(diff)
    diff.notes = [f"{run.label}: {note}" for run in (a, b) for note in run.notes] + diff.notes
    return diff


def _change(a: Record | None, b: Record | None) -> tuple[str, str]:
    """(kind, sentence); the kind is `same` where nothing changed and empty where neither ran."""
    ran_a, ran_b = (r is not None and executed(r) for r in (a, b))
    if not ran_a and not ran_b:
        return "", ""
    if not ran_b:
        return "lost", f"was {_words(a)}, now {_words(b)}"
    if not ran_a:
        return "added", _words(b)
    sentence = f"was {_words(a)}, now {_words(b)}"
    was_bad, is_bad = a.verdict in _BAD, b.verdict in _BAD
    if is_bad and not was_bad:
        return "broken", sentence
    if a.verdict != Verdict.INCONCLUSIVE and b.verdict == Verdict.INCONCLUSIVE:
        return "unclear", sentence
    if was_bad and not is_bad:
        return "fixed", sentence
    if is_bad and (a.verdict, a.status, a.reason, a.phase) != (b.verdict, b.status, b.reason, b.phase):
        if a.verdict == Verdict.WAIVED and b.verdict == Verdict.NONCONFORMING:
            alike = (a.status, a.reason, a.phase) == (b.status, b.reason, b.phase)
            return "unwaived" if alike else "broken", sentence
        return "changed", sentence
    return "same", ""


def _words(r: Record | None) -> str:
    if r is None:
        return "absent"
    words = [
        r.status,
        r.reason,
        f"in {r.phase}" if r.phase else None,
        None if r.expectation == "none" else r.expectation,
    ]
    return " ".join(w for w in words if w)


def _compare_errors(diff: Diff, a: Record, b: Record) -> None:
    """A worst error that doubled is told from an eighth of the bound on: below that it is noise of the draw."""
    old, new = error_over_bound(a), error_over_bound(b)
    if old is not None and new is not None and new >= 2 * old and new >= 1 / 8 and new != old:
        diff.changes["doubled"].append((a.id, f"{old:.3g} -> {new:.3g} x bound"))


def _compare_times(diff: Diff, a: Record, b: Record) -> None:
    """Block medians of both runs, where both timed the same case by the same clock."""
    one, two = timed_in([a]), timed_in([b])
    if not one or not two or word(one[0].perf, "clock") != word(two[0].perf, "clock"):
        return
    before, after = one[0].blocks_s, two[0].blocks_s
    if min(len(before), len(after)) < 2:
        return
    found = change(before, after)
    if found.slower or found.faster:
        kind = "slower" if found.slower else "faster"
        diff.changes[kind].append((a.id, f"{time_text(one[0].time_s)} -> {time_text(two[0].time_s)}, {found.ratio:.3f} "
                                         f"times [{found.low:.3f}, {found.high:.3f}]"))


def _compare_bits(diff: Diff) -> None:
    bad: list[BadLine] = []
    before, after = (read_problems(run.path, bad) for run in (diff.a, diff.b))
    diff.notes += [f"{b.file} line {b.line} left out: {b.why}" for b in bad]
    seen: Counter[str] = Counter()
    other: dict[str, Counter[str]] = {"bits": Counter(), "inputs": Counter()}
    for key in before.keys() & after.keys():
        one, two = before[key], after[key]
        if not (one.outputs and two.outputs):
            continue
        diff.problems += 1
        seen[one.id] += 1
        if one.inputs != two.inputs:
            other["inputs"][one.id] += 1
        elif one.outputs != two.outputs:
            other["bits"][one.id] += 1
    for kind, cases in other.items():
        diff.changes[kind] += [(case, f"{n} of {seen[case]} problems") for case, n in sorted(cases.items())]


def to_text(diff: Diff, most: int = 20) -> str:
    """For a terminal: the headline, then each kind with at most `most` of its cases."""
    lines = [diff.headline()]
    for kind, rows in diff.changes.items():
        if rows:
            lines += ["", f"{TITLES[kind]} ({len(rows)})"]
            lines += [f"  {case}: {sentence}" for case, sentence in rows[:most]]
            if len(rows) > most:
                lines.append(f"  ... and {len(rows) - most} more")
    if not diff.problems:
        lines += ["", "No executed problem is in both runs, so bits were not compared; repeat A's with --problems=A."]
    return "\n".join(lines + (["", *diff.notes] if diff.notes else []))


def to_markdown(diff: Diff) -> str:
    """All changes, each kind as a list."""
    parts = ["# Difference of two runs", md(diff.headline())]
    for kind, rows in diff.changes.items():
        if rows:
            parts += [f"## {TITLES[kind]} ({len(rows)})", "\n".join(f"- {md_code(c)}: {md(s)}" for c, s in rows)]
    if diff.notes:
        parts += ["## Notes", "\n".join(f"- {md(n)}" for n in diff.notes)]
    return "\n\n".join(parts) + "\n"


def compare(run_a: Path, run_b: Path, *, markdown: bool = False) -> tuple[str, int]:
    """(text, exit code) of B against A. Raises FileNotFoundError for a path that is no run directory."""
    diff = diff_runs(*load_runs([Path(run_a), Path(run_b)]))
    return (to_markdown if markdown else to_text)(diff), diff.exit_code
