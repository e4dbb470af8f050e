"""The expectation of a product that is too large to be computed in float64 element by element."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from references.expected import Expected, Judgement
from references.formats import codec
from references.large.projection import examine, project
from references.large.sampling import check_sampled, sample_plan

Array = np.ndarray

LARGE = 2**36
"""products a b of C from which on all of them are not computed: half a minute on one core. No level draws as many, so
what a level draws is judged element by element"""
EXAMINED = 2**32
"""products that are computed to tell which elements of wrong rows and columns are wrong"""
TILE = (128, 128)
"""edges of output tiles that the sample looks beside; those of most kernels are multiples or halves"""
AT_RANDOM = 16
"""rows, columns and tiles beside them"""


@dataclass(frozen=True)
class LargeProduct(Expected):
    """C = A B^T, codes a [m, k], b [n, k] in `fmt`, finite.

    exact: the operands are those of `large.exact`: every element is checked, by projections. Otherwise first and last
    rows and columns, those beside edges of tiles, and random rows, columns and tiles are judged by the bound of a dense
    product; `sampling.smallest_detectable` tells what that finds. exchangeable: the data are random along k.
    seed: of sample and projections.
    """

    a: Array
    b: Array
    fmt: str
    exact: bool
    seed: int
    exchangeable: bool = False

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return len(self.a), len(self.b)

    @property
    def unspecified(self) -> Array | None:
        """True for what no sample looks at, so that it is not counted as judged."""
        if self.exact:
            return None
        plan = sample_plan(*self.shape, TILE, self.seed, AT_RANDOM)
        unseen = np.ones(self.shape, bool)
        unseen[plan.rows], unseen[:, plan.columns] = False, False
        for rows, columns in plan.spans():
            unseen[np.ix_(rows, columns)] = False
        return unseen

    def judge(self, codes: Array, fmt: str) -> Judgement:
        bad = np.zeros(self.shape, bool)
        if not self.exact:
            plan = sample_plan(*self.shape, TILE, self.seed, AT_RANDOM)
            found = check_sampled(self.a, self.b, codes, plan, out=fmt, a_format=self.fmt, b_format=self.fmt,
                                  exchangeable=self.exchangeable)
            bad[found.wrong[:, 0], found.wrong[:, 1]] = True
            if self._can_not_overflow(fmt):
                bad |= ~np.isfinite(codec.decode(codes, fmt))
            return Judgement(bad)
        found = project(self.a, self.b, codes, out=fmt, seed=self.seed, a_format=self.fmt, b_format=self.fmt)
        if found.ok:
            return Judgement(bad)
        place = np.ix_(found.rows, found.columns)
        if len(found.rows) * len(found.columns) * self.a.shape[1] > EXAMINED:
            bad[place] = True  # which of them are wrong would take the whole product
            return Judgement(bad, note="of these rows and columns each holds a wrong element")
        bad[place] = codec.decode(codes[place], fmt) != examine(
            self.a, self.b, found, a_format=self.fmt, b_format=self.fmt)
        return Judgement(bad, note="" if bad.any() else "projections of the result differ from those of the operands")

    def _can_not_overflow(self, fmt: str) -> bool:
        """Whether no sum, however it is ordered, comes near the largest number: k times the largest product."""
        largest = [float(np.max(np.abs(codec.decode(x, self.fmt)), initial=0)) for x in (self.a, self.b)]
        return 2 * largest[0] * largest[1] * self.a.shape[1] < codec.max_finite(fmt)
