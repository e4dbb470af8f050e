"""Writes `cases/levels/core.json`, the checked-in core level: python -m conformance.core_level

Every case of the full level whose variant the op's `core` admits, with a few size assignments
each: the numbers that decide code paths, as far as they fit the level's work, dealt out over an
op's cases so that each number occurs in several of them. An op with few cases shows more in each.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from conformance.collect import CORE, all_cases, default_sizes
from conformance.engine.draw import values_of
from conformance.engine.effort import EFFORTS
from conformance.engine.variants import in_core
from conformance.model import Case, Problem

USUAL, MOST = 4, 16
"""assignments a case, and of an op whose cases are too few for all of its numbers or families"""
FEW = 8
"""cases of an op that are too few for its families to come round"""


def fitting(case: Case, assignments: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that the op's contract and the level's work admit."""
    out = []
    for assignment in assignments:
        sizes = {**case.op.sample, **case.op.beside(assignment), **assignment}
        values = {name: choices[0] for name, choices in values_of(case.op, case.variant)}
        p = Problem(case.op.name, case.variant, sizes, values, case.op.families[0], 0)
        if case.op.fits(p) and EFFORTS["core"].admits(case.op, p):
            out.append(assignment)
    return out


def share(case: Case, assignments: int, cases: int) -> int:
    """How many assignments a case shows of an op with so many cases."""
    if case.check != "values":
        return USUAL
    families = len(case.op.families) if cases <= FEW else 0
    return min(max(-(-assignments // cases), families, USUAL), MOST)


def rows() -> list[dict[str, Any]]:
    """A row a case; an op's assignments go round its cases."""
    chosen = [c for c in all_cases() if in_core(c)]
    of_op = Counter((c.op.name, c.check) for c in chosen)
    turn: dict[tuple[str, str], int] = {}
    out = []
    for case in chosen:
        row: dict[str, Any] = {"op": case.op.name, "variant": dict(case.variant), "check": case.check}
        usable = fitting(case, default_sizes(case))
        if usable:
            key = (case.op.name, case.check)
            n, start = min(share(case, len(usable), of_op[key]), len(usable)), turn.get(key, 0)
            turn[key] = start + n
            always = fitting(case, case.op.everywhere)
            dealt = [usable[(start + i) % len(usable)] for i in range(n)]
            row["sizes"] = [*always, *(a for a in dealt if a not in always)]
        out.append(row)
    return out


def main() -> None:
    lines = ",\n".join("  " + json.dumps(r) for r in rows())
    CORE.write_text('{"cases": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()
