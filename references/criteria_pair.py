"""Observed and golden side by side, and the distances that several of other people's criteria are made of."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from references.formats import codec
from references.formats.spec import FLOATS

Array = np.ndarray


def same(a: Array, b: Array) -> Array:
    """Equal values, NaN equal to NaN, zeros of either sign."""
    return (a == b) | (np.isnan(a) & np.isnan(b))


def _in_range(x: Array, y: Array) -> tuple[Array, Array]:
    """Both scaled by one power of two where their squares would overflow or vanish; what is not finite stays."""
    total = float(x @ x + y @ y)
    if 1e-250 < total < 1e300 or total != total:
        return x, y
    top = max(float(np.abs(x).max(initial=0.0)), float(np.abs(y).max(initial=0.0)))
    if top == 0.0 or not np.isfinite(top):
        return x, y
    shift = -int(np.frexp(top)[1])
    return np.ldexp(x, shift), np.ldexp(y, shift)


@np.errstate(all="ignore")
def calc_diff(x: Array, y: Array) -> float:
    """|x - y|**2 / (|x|**2 + |y|**2) of flat float64 arrays, about half the squared relative L2 error.

    Equal to DeepGEMM's 1 - 2 x.y / (x.x + y.y), without its cancellation near 1e-16. 0 where both are zero; NaN where
    anything is NaN or infinite, as there.
    """
    x, y = _in_range(x, y)
    d = x - y
    total = float(x @ x + y @ y)
    return float(d @ d) / total if total else 0.0


@np.errstate(all="ignore")
def calc_diff_product(x: Array, y: Array) -> float:
    """1 - 2 x.y / (x.x + y.y), as DeepGEMM and TileKernels write it; may be a few 1e-16 below zero."""
    x, y = _in_range(x, y)
    total = float(x @ x + y @ y)
    return 1.0 - 2.0 * float(x @ y) / total if total else 0.0


@np.errstate(all="ignore")
def cosine_distance(x: Array, y: Array) -> float:
    """1 - cos(x, y) as half the squared distance of the unit vectors; 0 of two zeros, 1 of one, NaN of NaN."""
    (x, _), (y, _) = _in_range(x, x), _in_range(y, y)
    a, b = float(x @ x) ** 0.5, float(y @ y) ** 0.5
    if a == 0.0 or b == 0.0:
        return 0.0 if a == b else float(np.nan if np.isnan(a + b) else 1.0)
    d = x / a - y / b
    return 0.5 * float(d @ d)


class Pair:
    """Observed and golden of one output, with the parts that several criteria need.

    observed, golden, low_precision, reference: flat float64 of one size, without the unspecified elements. `finite` is
    True where both sides are finite, None where that is everywhere. fmt: the output's format; op: `module.name`;
    output: as declared. low_precision: the result of a plain program in the output's own precision. reference: what
    another implementation gave for the same problem.
    """

    def __init__(self, observed: Array, golden: Array, fmt: str, *, op: str = "", output: str = "",
                 low_precision: Array | None = None, reference: Array | None = None) -> None:
        self.observed, self.golden, self.fmt, self.op, self.output = observed, golden, fmt, op, output
        self.low_precision, self.reference = low_precision, reference
        self.count = observed.size
        self.signed = observed - golden
        self.error = np.abs(self.signed)
        self.magnitude = np.abs(golden)
        self.finite: Array | None = None
        if not np.isfinite(self.signed @ self.signed):  # a sum of squares tells in one pass; rarely it overflows
            finite = np.isfinite(observed) & np.isfinite(golden)
            self.finite = None if finite.all() else finite

    def at_finite(self, a: Array) -> Array:
        """The elements of `a` where both sides are finite."""
        return a if self.finite is None else a[self.finite]

    @cached_property
    def calc_diff(self) -> float:
        return calc_diff(self.observed, self.golden)

    @cached_property
    def rounded(self) -> Array:
        """The golden value as the output's format holds it."""
        return codec.round_to(self.golden, self.fmt) if self.fmt in FLOATS else self.golden

    @cached_property
    def differing(self) -> int:
        """How many elements are NaN or infinite on one side and not the same on the other."""
        if self.finite is None:
            return 0
        return int(np.count_nonzero(~(self.finite | same(self.observed, self.golden))))

    @cached_property
    def ulp(self) -> Array:
        """Unit in the last place of the output's format at the golden value, where both sides are finite."""
        return codec.ulp(self.at_finite(self.golden), self.fmt)

    @cached_property
    def relative(self) -> Array:
        """|observed - golden| / (|golden| + 1e-7) where both sides are finite, as MERE and MARE have it."""
        return self.at_finite(self.error) / (self.at_finite(self.magnitude) + 1e-7)
