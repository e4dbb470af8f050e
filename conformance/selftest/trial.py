"""Rows of the library tried: the engine runs their cases until one of them fails, or enough have passed.

A fault counts as killed when a case ends nonconforming with a reason that the row names; of faults planted by the
engine the evidence must stand too. A correct variant is right when every case passes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from conformance import waivers
from conformance.bench import bench_of
from conformance.collect import cases_at
from conformance.engine.attempt import Attempt, Bench
from conformance.engine.effort import EFFORTS, Config
from conformance.engine.recall import Recall
from conformance.engine.run import run_case
from conformance.model import Case
from conformance.results import Record
from conformance.selftest.library import ANY, Row
from conformance.selftest.rules import Rules

FEW = 3
"""problems of a case that a fault meets where it does not meet all of them"""
PASSES = ((0, 0, False), (0, 24, True), (0, 12, False), (24, math.inf, True), (12, 24, False))
"""the cases that a fault meets: from, to, and whether only `FEW` problems of each: what it needs may be a setting, or a
size or family that comes late. From 0 to 0: the one that killed it at another seed"""
VARIANT_CASES = {"values": 1, "other": 1}
"""that a correct variant meets whole, by check, other ones at each seed; one that ran no problem does not count"""
TURN = 4
"""cases by which a seed begins after the one before"""
COMPARED_CASES, COMPARED = 6, 8
"""cases and problems of each that other rules see of each row, and ours beside them, without an end at a failure"""
HANG_TIMEOUT_S = 3.0
CONFORMING = ("pass", "unsupported")
NO_VERDICT = ("error", "mistrusted", "skipped", "not_run")
"""statuses that are about the suite, or about too few problems: they kill nothing"""


@dataclass(frozen=True)
class Caught:
    """What came of one row with one seed."""

    row: Row
    seed: int
    outcome: str
    """killed | survived | wrong reason | no evidence | right | false alarm | not run"""
    cases: int
    problems: int
    comparisons: int
    """elements judged"""
    seconds: float
    seen: str
    case: str = ""
    margin: float | None = None
    """of a kill by a bound: the worst error over it"""
    message: str = ""
    rules: Rules = field(default_factory=Rules)

    @property
    def good(self) -> bool:
        return self.outcome in ("killed", "right")


def interleaved(cases: list[Case], turn: int) -> list[Case]:
    """All cases in long steps, from a place that differs from turn to turn, so that variants are spread."""
    n = len(cases)
    step = next((s for s in range(n * 5 // 8, n) if math.gcd(s, n) == 1), 1)
    return [cases[(turn * TURN + i) * step % n] for i in range(n)]


_BENCH: dict[str, Bench] = {}
RECALL = Recall()
"""of this process: rows of an op are tried on the same problems, one case after the other"""


def bench(backend: str) -> Bench:
    """This process's bench on a backend, started once: settings and faults are given at each fork."""
    if backend not in _BENCH:
        stack = contextlib.ExitStack()
        _BENCH[backend] = replace(stack.enter_context(bench_of(backend, {})), recall=RECALL)
        atexit.register(stack.close)
    return _BENCH[backend]


def configured(row: Row, level: str, seed: int, folder: Path, *, few: int | None = None,
               watch: Callable[[Attempt], None] | None = None) -> Config:
    """A run of single cases on the backend with the row's settings; `few`: problems a case, fewer than the level's."""
    base = bench(row.backend)
    limit = HANG_TIMEOUT_S if row.inject == "hang" else base.case_timeout_s
    mine = replace(base, profile={**base.profile, **dict(row.profile)}, case_timeout_s=limit)
    for launcher in (mine.launcher, mine.debug_launcher):
        launcher.options, launcher.inject = dict(row.options), row.inject
    usual = EFFORTS[level]
    effort = replace(usual, shrink_s=0.0).with_examples(few and min(few, usual.examples))
    return Config(mine, effort, seed, folder, row.backend, confirm=bool(row.inject), watch=watch, criteria=False)


class Trial:
    """One row under way: it meets case after case until it is caught, or has seen enough."""

    def __init__(self, row: Row, level: str, seed: int, *, compare: bool = False, killed_by: str = "") -> None:
        self.row, self.level, self.seed, self.killed_by = row, level, seed, killed_by
        self.cases, self.problems, self.comparisons, self.seconds, self.kept = 0, 0, 0, 0.0, True
        self.killer: Record | None = None
        self.seen: Counter[str] = Counter()
        self.rules = Rules()
        self.places: dict[str, int] = {}
        """of the cases, in the order in which they come"""
        self.to_compare = COMPARED_CASES if compare and row.check == "values" and not row.inject else 0
        self.left = {} if row.fault else dict(VARIANT_CASES)
        """cases that a variant is still to meet, by check"""

    @property
    def tries(self) -> bool:
        """Whether more cases are wanted."""
        return self.killer is None and (self.row.fault or any(self.left.values()))

    def order(self, cases: list[Case]) -> None:
        """Take the cases that can tell something: for a fault those of its check."""
        mine = [c.id for c in cases if c.check == self.row.check or not self.row.fault]
        self.places = {case: n for n, case in enumerate(mine)}

    def meet(self, case: Case, first: int, last: float, *, few: bool) -> None:
        """Try a case that is among the first .. last of this row, in part or whole; other rules look at any.

        With nothing between first and last only the case that killed the row before.
        """
        begun = time.monotonic()
        mine = first <= self.places.get(case.id, -1) < last or (first == last and case.id == self.killed_by)
        kind = case.check if case.check in VARIANT_CASES else "other"
        mine &= self.row.fault or self.left[kind] > 0
        with TemporaryDirectory(prefix="selftest-") as folder:
            if self.to_compare and first < last and case.check == "values":
                self.to_compare -= 1
                run_case(case, configured(self.row, self.level, self.seed, Path(folder), few=COMPARED,
                                          watch=self.rules.look))
            if mine and self.tries:
                ran = self._try(case, Path(folder), FEW if few and self.row.fault else None)
                if ran and not self.row.fault:
                    self.left[kind] -= 1
        self.seconds += time.monotonic() - begun

    def _try(self, case: Case, folder: Path, few: int | None) -> bool:
        """Run one case; whether it ran any problem."""
        row, record = self.row, run_case(case, configured(self.row, self.level, self.seed, folder, few=few))
        self.cases += 1
        self.problems += record.examples.get("executed", 0)
        self.comparisons += sum(int(n.get("elements", 0)) for n in record.numerics.values())
        ran = record.examples.get("executed", 0) > 0
        if record.status in CONFORMING:
            return ran
        self.seen[record.reason or record.status] += 1
        named = {record.status, record.reason} & set(row.reasons) or (
            row.reasons == ANY and record.status not in NO_VERDICT)
        if not row.fault or named:
            self.killer = record
            self.kept = not row.inject or _stands(folder, record)
        return ran

    def caught(self) -> Caught:
        """What came of it."""
        killer = self.killer
        return Caught(self.row, self.seed, _outcome(self.row, killer, self.kept, self.seen, self.problems), self.cases,
                      self.problems, self.comparisons, self.seconds, ", ".join(self.seen), killer.id if killer else "",
                      _margin(killer), killer.message if killer else "", self.rules)


def try_rows(rows: Sequence[Row], level: str, seed: int, *, compare: bool = False,
             killed_by: Sequence[str] = ()) -> Iterator[Caught]:
    """Try rows of one op side by side, a case at a time: what a problem is and must give is worked out once for all.

    killed_by: of each row the case that killed it at another seed, or "". Each row is told of as it ends.
    """
    killers = killed_by or [""] * len(rows)
    trials = [Trial(row, level, seed, compare=compare, killed_by=killer)
              for row, killer in zip(rows, killers, strict=True)]
    (op,) = {row.op for row in rows}
    cases = [c for c in cases_at(level, (rows[0].module,)) if c.op.name == op and not waivers.is_known(c.id)]
    cases = interleaved(cases, seed)
    for trial in trials:
        trial.order(cases)
    for first, last, few in PASSES:
        for case in cases:
            if first == last and not any(case.id == t.killed_by for t in trials):
                continue
            for trial in trials:
                trial.meet(case, first, last, few=few)
            RECALL.forget()
            ended = [t for t in trials if not t.to_compare and not t.tries]
            yield from (t.caught() for t in ended)
            trials = [t for t in trials if t not in ended]
            if not trials:
                return
        for trial in trials if first < last else ():
            trial.to_compare = 0
    yield from (t.caught() for t in trials)


def _outcome(row: Row, killer: Record | None, kept: bool, seen: Counter[str], problems: int) -> str:
    if not row.fault:
        return "false alarm" if seen else "right" if problems else "not run"
    if killer is not None and killer.status in ("error", "mistrusted", "skipped", "not_run"):
        return "wrong reason"
    if killer is not None:
        return "killed" if kept else "no evidence"
    return "wrong reason" if seen else "survived" if problems else "not run"


def _margin(record: Record | None) -> float | None:
    ratios = [float(n["worst_ratio"]) for n in (record.numerics.values() if record else ()) if "worst_ratio" in n]
    return max(ratios) if ratios and record is not None and record.reason in ("numeric", "nonfinite") else None


def _stands(run_dir: Path, record: Record) -> bool:
    """Whether the evidence of a failure was kept whole: its problem, and the call with all that went into it."""
    folder = run_dir / (record.artifacts or "nowhere")
    if not all((folder / name).is_file() for name in ("problem.json", "call.json", "reproduce.py")):
        return False
    call = json.loads((folder / "call.json").read_text())
    return all((folder / f"buffer.{rank}.{i}.npy").is_file()
               for rank, plan in enumerate(call["ranks"]) for i in range(len(plan["buffers"])))
