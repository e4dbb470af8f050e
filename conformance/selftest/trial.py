"""One row of the library tried: the engine runs its cases until one of them fails, or all have passed.

A fault counts as killed when a case ends nonconforming with a reason that the row names; of faults planted by the
engine the evidence must stand too. A correct variant is right when every case passes.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from conformance import waivers
from conformance.bench import bench_of
from conformance.collect import cases_at
from conformance.engine.attempt import Attempt, Bench
from conformance.engine.effort import EFFORTS, Config
from conformance.engine.run import run_case
from conformance.model import Case
from conformance.results import Record
from conformance.selftest.library import ANY, Row
from conformance.selftest.rules import Rules

MOST_CASES = 60
"""cases tried for one fault, twice as many as for one correct variant"""
COMPARED_CASES = 12
"""cases that other rules see of each row, and ours beside them, without an end at the first failure"""
HANG_TIMEOUT_S = 3.0
CONFORMING = ("pass", "unsupported")


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
    """All cases in long steps, from a place that differs from row to row, so that variants are spread."""
    n = len(cases)
    step = next((s for s in range(n * 5 // 8, n) if math.gcd(s, n) == 1), 1)
    return [cases[(turn * 7 + i * step) % n] for i in range(n)]


_BENCH: dict[str, Bench] = {}


def bench(backend: str) -> Bench:
    """This process's bench on a backend, started once: settings and faults are given at each fork."""
    if backend not in _BENCH:
        stack = contextlib.ExitStack()
        _BENCH[backend] = stack.enter_context(bench_of(backend, {}))
        atexit.register(stack.close)
    return _BENCH[backend]


def cases_of(row: Row, level: str) -> list[Case]:
    """The cases that may kill a fault: those of its check; for a correct variant all of its op."""
    mine = (c for c in cases_at(level, (row.module,)) if c.op.name == row.op)
    return [c for c in mine if (c.check == row.check or not row.fault) and not waivers.is_known(c.id)]


def configured(row: Row, level: str, seed: int, folder: Path, watch: Callable[[Attempt], None] | None = None) -> Config:
    """A run of single cases on the backend with the row's settings."""
    base = bench(row.backend)
    limit = HANG_TIMEOUT_S if row.inject == "hang" else base.case_timeout_s
    mine = replace(base, profile={**base.profile, **dict(row.profile)}, case_timeout_s=limit)
    for launcher in (mine.launcher, mine.debug_launcher):
        launcher.options, launcher.inject = dict(row.options), row.inject
    return Config(mine, replace(EFFORTS[level], shrink_s=0.0), seed, folder, row.backend, confirm=bool(row.inject),
                  watch=watch)


def try_row(row: Row, level: str, seed: int, turn: int, compare: bool = False) -> Caught:
    """Run the row's cases until it is caught; many of them for a correct variant."""
    started = time.monotonic()
    tried, problems, comparisons, kept = 0, 0, 0, True
    killer: Record | None = None
    seen: Counter[str] = Counter()
    cases = interleaved(cases_of(row, level), turn)
    with TemporaryDirectory(prefix="selftest-") as folder:
        config = configured(row, level, seed, Path(folder))
        for case in itertools.islice(cases, MOST_CASES if row.fault else MOST_CASES // 2):
            record = run_case(case, config)
            tried += 1
            problems += record.examples.get("executed", 0)
            comparisons += sum(int(n.get("elements", 0)) for n in record.numerics.values())
            if record.status in CONFORMING:
                continue
            seen[record.reason or record.status] += 1
            if not row.fault or row.reasons == ANY or {record.status, record.reason} & set(row.reasons):
                killer = record
                kept = not row.inject or _stands(Path(folder), record)
                break
    return Caught(row, seed, _outcome(row, killer, kept, seen, problems), tried, problems, comparisons,
                  time.monotonic() - started, ", ".join(seen), killer.id if killer else "", _margin(killer),
                  killer.message if killer else "", compared(row, level, seed, turn) if compare else Rules())


def compared(row: Row, level: str, seed: int, turn: int) -> Rules:
    """What other rules say of a fixed set of this row's problems, and ours of the same."""
    rules = Rules()
    if row.check != "values" or row.inject:
        return rules
    cases = [c for c in interleaved(cases_of(row, level), turn) if c.check == "values"]
    with TemporaryDirectory(prefix="selftest-") as folder:
        config = configured(row, level, seed, Path(folder), rules.look)
        for case in itertools.islice(cases, COMPARED_CASES):
            run_case(case, config)
    return rules


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
