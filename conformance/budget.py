"""A time budget: which cases still fit, and what is said of those that did not."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from conformance.collect import UsageError
from conformance.engine import clock
from conformance.model import Case
from conformance.results import Record

_SECONDS = {"s": 1 / 60, "sec": 1 / 60, "min": 1.0, "m": 1.0, "h": 60.0, "": 1.0}


def minutes(text: str) -> float:
    """`30`, `30min`, `1.5h` or `90s` in minutes. Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip())
    if not found or found[2] not in _SECONDS or float(found[1]) <= 0:
        msg = f"a time budget is a number of minutes above 0, or with a unit: 30min, 1.5h, 90s; got {text!r}"
        raise UsageError(msg)
    return float(found[1]) * _SECONDS[found[2]]


class Budget:
    """What is left of a run's time, and what cases of an op usually take. Without a deadline everything fits."""

    def __init__(self, deadline_s: float | None) -> None:
        self.deadline_s = deadline_s
        self.took_s: dict[str, list[float]] = defaultdict(list)

    def left_s(self) -> float:
        return float("inf") if self.deadline_s is None else self.deadline_s - clock.monotonic()

    def usual_s(self, case: Case) -> float:
        """The median of what cases of this op and check took here, else of this op, else 0."""
        of_check = self.took_s[f"{case.op.name}/{case.check}"]
        of_op = [s for key, took in self.took_s.items() if key.partition("/")[0] == case.op.name for s in took]
        return median(of_check or of_op or [0.0])

    def fits(self, case: Case) -> bool:
        """Whether the case may begin: there is time, and cases like it take no longer than what is left."""
        left = self.left_s()
        return left > 0 and self.usual_s(case) <= left

    def took(self, case: Case, seconds: float) -> None:
        self.took_s[f"{case.op.name}/{case.check}"].append(seconds)


def left_out(text: str) -> str:
    """What is said of a case for which there was no time."""
    return f"left out: the time budget of {text} was used up; --resume --run-dir goes on with what is left out"


def told(text: str, records: Iterable[Record]) -> str:
    """A sentence for the summary: how much of the selection the budget reached."""
    every = list(records)
    ran = [r for r in every if r.status not in ("not_run", "skipped", "unsupported")]
    missed = [r for r in every if r.status == "not_run"]
    ops, reached = {r.op for r in ran + missed}, {r.op for r in ran}
    checks = sorted({r.check for r in missed} - {r.check for r in ran})
    return (f"time budget of {text}: {len(ran)} of {len(ran) + len(missed)} cases run, most telling first, on "
            f"{len(reached)} of {len(ops)} ops; {len(missed)} left out (not_run)"
            + (f", none run of check {', '.join(checks)}" if checks else ""))
