"""Problems that cross the tiles a backend declares: what goes wrong at a tile's end shows nowhere else.

They come beside the problems that all backends share, never instead of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from conformance.engine.draw import values_of
from conformance.identity import seed_of
from conformance.model import Case, Problem, Size

CHECKED = ("values",)
"""checks that get such problems"""


def past(size: Size, n: int) -> int:
    """The smallest legal number above n, or the largest legal one where there is none."""
    if size.step == 0:
        return min((p for p in size.points if p > n), default=max(size.points))
    return min((n // size.step + 1) * size.step, size.hi // size.step * size.step)


def problems(case: Case, tiles: Mapping[str, int], seed: int) -> list[Problem]:
    """One problem just past the first tile of every declared dimension, and one well inside the second.

    The plainest family and values, so that nothing but the tiles is special; other sizes are the sample's. A
    problem that the op's own contract rules out is left out.
    """
    op = case.op
    declared = {n: t for n, t in tiles.items() if n in op.sizes and not op.sizes[n].per_rank and t > 0}
    if case.check not in CHECKED or not declared:
        return []
    values = {name: choices[0] for name, choices in values_of(op, case.variant)}
    out: list[Problem] = []
    for i, reach in enumerate(({n: t for n, t in declared.items()}, {n: t + t // 2 for n, t in declared.items()})):
        crossing = {n: past(op.sizes[n], at) for n, at in reach.items()}
        sizes = {**{n: [s.lo] * op.ranks if s.per_rank else s.lo for n, s in op.sizes.items()}, **op.sample,
                 **crossing}
        problem = Problem(op.name, case.variant, sizes, values, op.families[0], seed_of(seed, case.id, "tiles", i))
        if op.fits(problem) and all(p.sizes != sizes for p in out):
            out.append(problem)
    return out
