"""Sums of products D[i,j] = sum_k a[i,k] b[j,k] (+ C): exact value, and how far a legal kernel may be from it.

Bound: any order, tiling, split or fusion of n terms in fp32 errs by at most gamma_n sum|terms| (Higham, Accuracy
and Stability of Numerical Algorithms, 2nd ed., ch. 3), plus one smallest subnormal for each term.
Where all terms are multiples of one power of two and their magnitudes add up to less than 2**24 of it, every partial
sum is exact in any order; only the last rounding is left, and the result must be right bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from references.bounds.basic import dot, magnitude, rounded
from references.bounds.constants import FLUSH_FP32, RANDOM_FAMILIES
from references.bounds.profile import resolve
from references.bounds.scatter import scatter
from references.expected import Array, Within
from references.formats import codec
from references.tilekernels.arguments import flushes

EXACT = 2.0**24
"""fp32 holds every smaller whole number of units; so does a matrix unit that truncates what it aligns"""

_ONE_SIGN = 2.0**-40
"""share of the magnitudes that float64 sums may mistake for terms of the other sign: 2**13 terms, 2**-53 each"""
_FRACTION_F64 = np.int64((1 << 52) - 1)


@dataclass(frozen=True)
class Sums:
    """What is known of each sum. All arrays float64 of the output's shape.

    value: the exact sum (special values as IEEE has them); finite: the same with NaN and infinities as zeros.
    size: sum of the finite terms' magnitudes; partials: no partial sum in a legal order is larger.
    unit: a power of two of which every finite term is a multiple. terms: how many there are.
    extra: error beside the roundings of the running sum; where it is not 0 no bit is promised.
    """

    value: Array
    finite: Array
    size: Array
    partials: Array
    unit: Array
    terms: int
    extra: Array | float = 0.0
    stored: Array | float = 0.0
    """largest error of a further rounding to nearest that the sum goes through"""
    random: bool = False
    """terms are independent: errors scatter"""

    def plus(self, c: Array) -> Sums:
        """One more term, c."""
        known = _finite(c)
        with np.errstate(invalid="ignore"):
            value = self.value + c
        return replace(
            self, value=value, finite=self.finite + known, size=self.size + np.abs(known),
            partials=self.partials + np.abs(known), unit=np.minimum(self.unit, lowest_bit(known)), terms=self.terms + 1,
        )

    def scaled(self, exactly: Array, roundings: int) -> Sums:
        """The terms carry factors applied with so many roundings; exactly: where these round nothing."""
        return replace(self, unit=np.where(exactly, self.unit, 0.0), terms=self.terms + roundings)

    def times(self, factor: float) -> Sums:
        """Every term times one factor, which rounds once."""
        with np.errstate(invalid="ignore"):
            value = self.value * factor
        size = abs(factor)
        exactly = size == 0 or lowest_bit(np.array(size)) == size
        return replace(
            self, value=value, finite=self.finite * factor, size=self.size * size, partials=self.partials * size,
            unit=self.unit * (size or np.inf) if exactly else np.zeros_like(self.unit), terms=self.terms + 1,
            extra=self.extra * size, stored=self.stored * size,
        )

    def rounded(self, stored: Array) -> Sums:
        """The same, stored to nearest on the way, which errs by so much."""
        return replace(self, stored=self.stored + stored)

    def erring(self, extra: Array | float) -> Sums:
        """The same with so much more error."""
        return replace(self, extra=self.extra + extra)


def lowest_bit(x: Array) -> Array:
    """The largest power of two of which x (finite, no float64 subnormal) is a multiple; inf for zero."""
    raw = np.ascontiguousarray(x).view(np.int64)
    significand = (raw & _FRACTION_F64) | np.int64(1 << 52)
    exponent = ((raw >> 52) & 0x7FF).astype(np.int32) - 1075
    return np.where(x == 0, np.inf, np.ldexp((significand & -significand).astype(np.float64), exponent))


def products(a: Array, b: Array, profile: Mapping[str, Any], family: str) -> Sums:
    """Sums over k of a[i,k] b[j,k]; a (m, k), b (n, k) float64, products exact or rounded once in float64.

    Infinite and NaN factors by IEEE rules. With `subnormals` other than "keep" in the profile, factors,
    products and sums below 2**-126 may count as zero. Of a random data family partial sums are bounded by chance.
    """
    known_a, known_b = _finite(a), _finite(b)
    finite = known_a @ known_b.T
    abs_a, abs_b = np.abs(known_a), np.abs(known_b)
    size = abs_a @ abs_b.T
    unit_a = lowest_bit(known_a).min(axis=1, initial=np.inf)
    unit_b = lowest_bit(known_b).min(axis=1, initial=np.inf)
    value = finite
    if known_a is not a or known_b is not b:
        value = _special(a, b, finite)
    partials = size
    if family in RANDOM_FAMILIES:
        partials = magnitude(size, finite, np.square(known_a) @ np.square(known_b).T)
    sums = Sums(value, finite, size, partials, np.multiply.outer(unit_a, unit_b), a.shape[1],
                random=family in RANDOM_FAMILIES)
    if not flushes(profile):
        return sums
    low_a, low_b = np.where(abs_a < FLUSH_FP32, abs_a, 0), np.where(abs_b < FLUSH_FP32, abs_b, 0)
    lost = low_a @ abs_b.T + abs_a @ low_b.T + (sums.terms + 1) * FLUSH_FP32
    normal = np.minimum.outer(unit_a, unit_b) >= FLUSH_FP32
    return sums.erring(np.where(normal & (sums.unit >= FLUSH_FP32), 0, lost))


def _finite(x: Array) -> Array:
    """x itself where all is finite, else a copy with zeros for what is not."""
    good = np.isfinite(x)
    return x if good.all() else np.where(good, x, 0.0)


def _special(a: Array, b: Array, finite: Array) -> Array:
    """Puts NaN and infinities where the factors bring them: inf * 0 and inf - inf are NaN."""
    inf_a, inf_b = np.isinf(a), np.isinf(b)
    sign_a, sign_b = np.nan_to_num(np.sign(a)), np.nan_to_num(np.sign(b))
    nonzero_a, nonzero_b = np.abs(sign_a), np.abs(sign_b)
    # Infinite products, counted (count) and by sign (net); those of a zero and an infinity (invalid).
    rest = ~inf_a
    count = inf_a @ nonzero_b.T + (nonzero_a * rest) @ inf_b.T
    net = (inf_a * sign_a) @ sign_b.T + (sign_a * rest) @ (inf_b * sign_b).T
    invalid = inf_a @ (b == 0).T.astype(np.float64) + (a == 0) @ inf_b.T.astype(np.float64)
    value = np.where(count > 0, np.copysign(np.inf, net), finite)
    value[(invalid > 0) | (np.abs(net) < count)] = np.nan
    value[np.isnan(a).any(axis=1), :] = np.nan
    value[:, np.isnan(b).any(axis=1)] = np.nan
    return value


def within(sums: Sums, out: str, profile: Mapping[str, Any], unspecified: Array | None = None) -> Within:
    """The allowed results in format `out` (fp32, or one rounding to a narrower format).

    Where partial sums may pass the largest fp32 number in one order and not in another, nothing is promised.
    """
    partial = resolve(profile)["partial"]
    beside = sums.extra + sums.stored
    exact = (sums.size < EXACT * sums.unit) & (sums.unit >= codec.min_subnormal("fp32")) & (beside == 0)
    exact &= partial == "fp32"
    acc = dot(sums.partials, sums.terms, splits=2, partial=partial) + beside
    typical = None
    if sums.random and out != "fp32" and partial == "fp32":
        typical = scatter(sums.finite, dot(sums.partials, sums.terms), sums.extra, out, sums.stored)
    acc = np.where(exact, 0.0, acc)
    value, bound = sums.value, acc
    if out != "fp32":
        with np.errstate(invalid="ignore"):
            bound = np.where(exact, 0.0, rounded(value, acc, out))
        if exact.any():
            value = np.where(exact & np.isfinite(value), codec.round_to(value, out), value)
    return Within(value, bound, either(unspecified, _order_decides_overflow(sums, acc)), typical)


def either(one: Array | None, other: Array | None) -> Array | None:
    """Where one mask or the other is True; None stands for nowhere."""
    if one is None or other is None:
        return other if one is None else one
    return one | other


def may_overflow(sums: Sums) -> Array | None:
    """Where a partial sum may pass the largest fp32 number; a factor that comes later does not bring it back."""
    over = sums.size + dot(sums.size, sums.terms) >= codec.overflow_threshold("fp32")
    return over if over.any() else None


def _order_decides_overflow(sums: Sums, acc: Array) -> Array | None:
    limit = codec.overflow_threshold("fp32")
    if not np.any(sums.size + acc >= limit):
        return None
    up, down = (sums.size + sums.finite) / 2, (sums.size - sums.finite) / 2
    reach_up, reach_down = up + acc >= limit, down + acc >= limit
    settled = (sums.finite - acc >= limit) & ~reach_down
    settled |= (-sums.finite - acc >= limit) & ~reach_up
    one_sign = np.minimum(up, down) <= _ONE_SIGN * sums.size
    return (reach_up | reach_down) & ~settled & ~(one_sign & np.isfinite(sums.value))
