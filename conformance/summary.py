"""The end of a run: a summary that fits a screen, and the matrix beside it."""

from __future__ import annotations

import datetime
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from conformance.collect import ops
from conformance.foreign import BadLine
from conformance.progress import bad_line, duration
from conformance.results import Record
from conformance.waivers import unmatched
from reports.matrix import write_all
from reports.speed import PAGE
from reports.speed_data import Timed, figure, share_text, time_text, timed_in, word

SHOWN_FAILURES = 12
SHOWN_TIMES = 20
PHASES = ("draw", "oracle", "compile", "run", "compare")


def write_summary(reporter: Any, run_dir: Path, records: Mapping[str, Record], bad: Iterable[BadLine],
                  waivers: Iterable[Any]) -> None:
    """Print the verdict, the findings that count, where the time went, and where the matrix is."""
    line = reporter.write_line
    reporter.section("conformance")
    for b in list(bad)[:5]:
        line(bad_line(b))
    try:
        text = write_all([run_dir], run_dir / "matrix", [op.name for op in ops()])
    except OSError as e:
        text = f"the matrix could not be written: {e}; conformance matrix {run_dir} tries again"
    findings = [r for r in records.values() if r.verdict == "nonconforming"]
    alike = alike_findings(findings)
    for r, more in alike[:SHOWN_FAILURES]:
        line(f"{r.status:8} {r.reason or '':14} {r.id}")
        if r.expectation != "none":
            line(f"         {r.expectation}")
        if more:
            line(f"         and {more} more of this op and check that end so")
    if len(alike) > SHOWN_FAILURES:
        left = sum(1 + more for _, more in alike[SHOWN_FAILURES:])
        line(f"... and {left} more, of {len(alike) - SHOWN_FAILURES} other kinds")
    if findings:
        line("the first again: " + shlex.join(findings[0].replay))
    unsure = [r for r in records.values() if r.verdict == "inconclusive"]
    for r in unsure[:SHOWN_FAILURES // 2]:
        line(f"{r.status:8} {r.id}: {r.message.splitlines()[0][:120] if r.message else ''}")
    idle = [w.id for w in unmatched(tuple(waivers), records.values(), datetime.date.today())]
    if idle:
        line(f"waivers that named no case of this run: {', '.join(idle[:5])}")
    times = timed_in(records.values())
    for row in time_rows(times):
        line(row)
    if not times:
        line(where_time_went(records.values()))
    line(text)
    if times:
        line(f"the times, their intervals and rooflines: {run_dir / 'matrix' / 'html' / PAGE}")


def time_rows(times: Sequence[Timed]) -> list[str]:
    """A line a timed case, the furthest from the roofline first."""
    rows = [(t, figure(t.perf, "fraction_roofline")) for t in times]
    rows.sort(key=lambda r: r[1] or 0.0)
    table = [(t.label, time_text(t.time_s), share_text(roof), word(t.perf, "verdict"), "unstable" if t.unstable else "")
             for t, roof in rows[:SHOWN_TIMES]]
    text = tabulate(table, ("timed", "a call", "of the roofline", "", ""), tablefmt="plain") if table else ""
    more = [f"... and {len(rows) - SHOWN_TIMES} more"] if len(rows) > SHOWN_TIMES else []
    return text.splitlines() + more


def alike_findings(findings: Iterable[Record]) -> list[tuple[Record, int]]:
    """The first finding of each op, check and kind, with how many more there are of it; the most frequent first."""
    groups: dict[tuple[str | None, ...], list[Record]] = {}
    for r in findings:
        groups.setdefault((r.op, r.check, r.status, r.reason, r.expectation), []).append(r)
    return [(g[0], len(g) - 1) for g in sorted(groups.values(), key=len, reverse=True)]


def where_time_went(records: Iterable[Record]) -> str:
    """The workers' summed seconds by phase, passing cases only, start-up apart."""
    spent: Counter[str] = Counter()
    total = 0.0
    for r in records:
        if r.status == "pass" and r.finished:
            total += r.finished - r.started
            spent.update(r.duration_s)
    start = spent.pop("start", 0.0)
    total -= start + spent["wait"] + spent["recover"]
    named = sum(spent[p] for p in PHASES)
    share = (total - named) / total if total > 0 else 0.0
    parts = ", ".join(f"{p} {duration(spent[p])}" for p in PHASES)
    return f"time in passing cases: {parts}; other {share:.0%}; start-up of processes {duration(start)}"
