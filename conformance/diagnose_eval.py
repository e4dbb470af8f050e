"""How well failures are diagnosed: settings that no table has, and each kind left out once.

    python -m conformance.diagnose_eval deepgemm deepselect

A setting breaks problems of its op until one fails; that one is made small as a run does it. Both are the evidence,
and what the broken backend gives where the diagnosis asks for more.
`first`: the kind that is at work is named first. `certain`: one is named for certain; `wrong`: another one. `alarms`:
with the family of that kind left out another one is named for certain, which must not be.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from conformance.bench import bench_of
from conformance.catalogue.load import MODULES
from conformance.collect import cases_at
from conformance.engine import draw
from conformance.engine.attempt import Attempt, Attempts, Bench, Clock
from conformance.engine.clock import monotonic
from conformance.engine.diagnose import Further, diagnose
from conformance.engine.effort import EFFORTS
from conformance.engine.evidence import Evidence, evidence_of
from conformance.engine.executor import ArenaPool
from conformance.engine.kinds import family_of, has_parameters, kind_of, kinds_of, parse, text
from conformance.engine.rig import SETTABLE
from conformance.engine.shrink import Shrinker
from conformance.engine.told import Diagnosis
from conformance.model import Case, Op, Problem

ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "tiles": {"tile_m": "24", "tile_n": "40", "tile_k": "72"},
    "places": {"tile_m": "48", "tile_n": "104", "tile_k": "136", "drop_tile": "1", "double_tile": "1",
               "stale_tile": "2", "mask_shift": "2", "scale_shift": "2", "split_k": "3"},
    "off grid": {"tile_m": "20", "tile_n": "50", "tile_k": "100"},
}
"""parameters that no row of a table has; `off grid` are sizes that a diagnosis does not try either"""
TILES = ("tile_m", "tile_n", "tile_k")
MOST_PROBLEMS = 60
SHRINK_S = 1.5
MOST_EXPLICIT = 8


@dataclass
class Tally:
    """What came of the settings of one kind of change in one module."""

    tried: int = 0
    first: int = 0
    certain: int = 0
    wrong: int = 0
    silent: int = 0
    alarms: int = 0
    seconds: list[float] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)


def moved(knobs: str, where: Mapping[str, str]) -> str:
    """The knobs of a row with other parameters."""
    own = parse(knobs)
    return text({**own, **{k: v for k, v in where.items() if k in own or k in TILES}})


def broken(bench: Bench, op: Op, level: str, seed: int) -> tuple[Case, Attempts, Attempt, Evidence] | None:
    """The first problem of the op that fails with the bench's settings, within a few dozen."""
    cases = [c for c in cases_at(level, (op.module,)) if c.op.name == op.name and c.check == "values"]
    step = next(s for s in range(len(cases) * 5 // 8 + 1, 2 * len(cases) + 2) if math.gcd(s, len(cases)) == 1)
    tried = 0
    for i in range(len(cases)):
        case = cases[i * step % len(cases)]
        problems = [*draw.explicit(case, seed)[:2], *draw.first_chunk(case, seed)[0][:4]]
        attempts = Attempts(bench, op, Clock())
        for problem in (p for p in problems if EFFORTS[level].admits(op, p)):
            attempt = attempts.run(problem, fresh=True)
            tried += 1
            if attempt.worst is not None and (found := evidence_of(attempt, attempt.worst)) is not None:
                if _right(bench, op, problem):
                    return case, attempts, attempt, found
                break  # a waived failure of this variant, which hides what the setting does
        attempts.close()
        if tried >= MOST_PROBLEMS:
            return None
    return None


def _right(bench: Bench, op: Op, problem: Problem) -> bool:
    """Whether the kernels as they are get it right."""
    with_fault, bench.launcher.options = bench.launcher.options, {}
    attempts = Attempts(replace(bench, pool=ArenaPool()), op, Clock())
    try:
        return attempts.run(problem, fresh=True).worst is None
    finally:
        attempts.close()
        bench.launcher.options = with_fault


def small(op: Op, attempts: Attempts, attempt: Attempt) -> Evidence | None:
    """The evidence of the failure made small."""
    worst = attempt.worst
    assert worst is not None

    def fails(p: Problem) -> bool:
        found = attempts.run(p, fresh=True, shrinking=True).worst
        return found is not None and found.bug == worst.bug

    least = Shrinker(op, fails, attempt.problem, monotonic() + SHRINK_S, lambda: attempts.deaths).run()
    again = attempts.run(least, fresh=True)
    return evidence_of(again, again.worst) if again.worst is not None else None


def further(bench: Bench, case: Case, knobs: str, failed: Problem, level: str, seed: int) -> Further:
    """More problems of the case, the largest first, and the broken backend to ask."""
    problems = [p for p in (*draw.first_chunk(case, seed)[0], *draw.explicit(case, seed)[:MOST_EXPLICIT])
                if p != failed and EFFORTS[level].admits(case.op, p)]

    def ask(problem: Problem) -> Evidence | None:
        # What is asked runs in arenas and a process of its own, so as not to disturb the diagnosis.
        apart = replace(bench, pool=ArenaPool())
        with_fault, bench.launcher.options = bench.launcher.options, {"knobs": knobs}
        attempts = Attempts(apart, case.op, Clock())
        try:
            attempt = attempts.run(problem, fresh=True)
            return evidence_of(attempt, attempt.worst)
        finally:
            attempts.close()
            bench.launcher.options = with_fault

    problems.sort(key=lambda p: -draw.work(case.op, p))
    return Further(problems, ask, bench.description.requirements)


def evaluate(module: str, tallies: dict[str, Tally], level: str, seed: int, only: str, limit_s: float) -> None:
    """Every row of a module's table, moved elsewhere."""
    with bench_of(SETTABLE, {}) as bench:
        for op in {c.op.name: c.op for c in cases_at(level, (module,))}.values():
            done: Counter[str] = Counter()
            for row in kinds_of(op.name):
                kind = kind_of(row["knobs"])
                places = list(ELSEWHERE)[: None if has_parameters(row["knobs"]) else 1]
                for where, change in ((w, ELSEWHERE[w]) for w in places):
                    knobs = moved(row["knobs"], change)
                    done[knobs] += 1
                    if only in f"{op.name} {row['name']}" and done[knobs] == 1:
                        one(bench, op, row, kind, knobs, tallies[where], level, seed, limit_s)


def one(bench: Bench, op: Op, row: Mapping[str, Any], kind: str, knobs: str, tally: Tally, level: str, seed: int,
        limit_s: float) -> None:
    bench.launcher.options = {"knobs": knobs}
    found = broken(bench, op, level, seed)
    if found is None:
        return
    case, attempts, attempt, first = found
    least = small(op, attempts, attempt)
    attempts.close()
    bench.launcher.options = {}
    evidence = [e for e in (least, first) if e is not None]
    more = further(bench, case, knobs, attempt.problem, level, seed)
    told = diagnose(op, evidence, lambda: bench, further=more, limit_s=limit_s)
    without = diagnose(op, evidence, lambda: bench, further=more, limit_s=limit_s, without=family_of(knobs))
    tally.tried += 1
    if told is None:
        tally.silent += 1
    else:
        tally.first += _named(told) == kind
        tally.certain += told.certain
        tally.wrong += told.certain and told.matches[0].kind != family_of(knobs)
        tally.seconds.append(told.seconds)
    alarm = without is not None and without.certain
    tally.alarms += alarm
    if told is None or _named(told) != kind or alarm:
        name = f"{op.name} {row['name']} {knobs} {dict(evidence[0].example.problem.sizes)}"
        said = f"{name}\n    {_said(told)}" + (f"\n    left out: {_said(without)}" if alarm else "")
        tally.missed.append(said)
    sys.stderr.write(f"{case.id} {row['name']} {knobs}: {_said(told)} [{told.seconds if told else 0:.1f} s]"
                     f"{' ALARM' if alarm else ''}\n")


def _named(found: Diagnosis) -> str:
    return kind_of(found.known[0].knobs) if found.known else ""


def _said(found: Diagnosis | None) -> str:
    return "nothing" if found is None else found.sentence()


def rows(tallies: Mapping[str, Tally]) -> Iterator[str]:
    """The table, a line each."""
    heads = (f"{h:>8}" for h in ("tried", "first", "certain", "wrong", "silent", "alarms", "median s", "most s"))
    yield " ".join((f"{'settings':10}", *heads))
    for name, t in tallies.items():
        s = sorted(t.seconds) or [0.0]
        counts = "".join(f" {n:8}" for n in (t.tried, t.first, t.certain, t.wrong, t.silent, t.alarms))
        yield f"{name:10}{counts} {s[len(s) // 2]:8.2f} {s[-1]:8.2f}"


def main() -> int:
    """Evaluate the modules named, or all; prints the table and what went wrong."""
    parser = argparse.ArgumentParser(prog="python -m conformance.diagnose_eval", description=__doc__)
    parser.add_argument("modules", nargs="*", default=MODULES)
    parser.add_argument("--level", default="core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="rows whose op and name contain this")
    parser.add_argument("--limit-s", type=float, default=10.0, help="for one diagnosis; a run gives it less")
    args = parser.parse_args()
    total = {name: Tally() for name in ELSEWHERE}
    with contextlib.suppress(KeyboardInterrupt):
        for module in args.modules:
            evaluate(module, total, args.level, args.seed, args.only, args.limit_s)
    print("\n".join(rows(total)))
    for name, t in total.items():
        print(f"\nnot named first, or an alarm ({name}):", *t.missed, sep="\n  ")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
