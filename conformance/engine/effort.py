"""How much each level asks for, and what a worker needs for every case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conformance.engine.attempt import Attempt, Bench
from conformance.engine.draw import work
from conformance.engine.told import Diagnosis
from conformance.model import Case, Op, Problem

SHOWN = 4
"""times the work of other problems that the sizes of `Op.everywhere` may take"""


@dataclass(frozen=True)
class Effort:
    """How much a level asks for."""

    level: str
    examples: int
    """problems a case of check `values`"""
    max_work: float
    shrink_s: float
    beside: int = 0
    """problems a case of the other checks; 0: as many"""
    drawn: bool = True
    """whether drawn problems run too, or the explicit ones alone"""
    call_s: float = 20.0
    """how long a call may take where no option says otherwise"""

    def examples_of(self, check: str) -> int:
        return self.examples if check == "values" or not self.beside else min(self.examples, self.beside)

    def problems_of(self, case: Case) -> int:
        """How many problems a case tries; a core case of many sizes more than the level's, unless that was changed."""
        least = case.least if case.check == "values" and not self.redrawn else 0
        usual = max(self.examples_of(case.check), least)
        return min(usual, case.most) if case.most else usual

    def admits(self, op: Op, problem: Problem) -> bool:
        """Whether a problem is small enough; what every case of the op is to show may be somewhat larger."""
        shown = any(all(problem.sizes.get(n) == size for n, size in a.items()) for a in op.everywhere)
        return work(op, problem) <= self.max_work * (SHOWN if shown else 1)

    @property
    def redrawn(self) -> bool:
        """Whether it tries another number of problems than its level does."""
        usual = EFFORTS[self.level]
        return (self.examples, self.beside) != (usual.examples, usual.beside)

    def with_examples(self, n: int | None) -> Effort:
        """The same with that many problems a case of any check."""
        return self if n is None else replace(self, examples=n, beside=0)


EFFORTS = {
    e.level: e
    for e in (
        Effort("bringup", 4, 2.0**22, 30.0, drawn=False, call_s=300.0),
        Effort("core", 8, 1.6 * 2.0**20, 10.0, beside=4), Effort("full", 25, 2.0**24, 60.0),
        Effort("extended", 100, 2.0**30, 300.0),
    )
}


@dataclass
class Config:
    """What a worker needs for every case."""

    bench: Bench
    effort: Effort
    seed: int
    run_dir: Path
    backend: str
    options: dict[str, str] = field(default_factory=dict)
    log_problem: Callable[[dict[str, Any]], None] = lambda row: None
    fixed: dict[str, list[Problem]] | None = None
    """problems of a former run, by case id, instead of drawn ones"""
    confirm: bool = True
    """repeat a failure alone, make it small and keep it; without, its first finding is told"""
    keep_outputs: bool = False
    """write what came back of every problem of check `values`, for another run to compare with"""
    criteria: bool = True
    """also tell what other people's criteria say of every problem"""
    reference_run: Path | None = None
    """a run directory with such outputs"""
    diagnose: Callable[..., Diagnosis | None] | None = None
    """`conformance.diagnosis.Diagnoser`, or None: failures are not diagnosed"""
    watch: Callable[[Attempt], None] | None = None
    """sees every problem that ran; the case goes on after a failure and its record is no verdict"""
