"""Standard deviations of a correct kernel's errors on random data: `typical.Typical` of sums and of attention.

A rounding to nearest errs by anything up to half an ulp alike, so by half an ulp / sqrt(3) in the root mean square.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from references.bounds.basic import rounding
from references.bounds.constants import STATISTICS, ProbabilityFormat
from references.typical import SIGMAS, Typical

Array = np.ndarray

ACCUMULATION, EXTRA, OTHER = (STATISTICS[name].value for name in ("accumulation", "extra", "other"))
WEIGHT_ROUNDING, SQUARE_SPREAD = STATISTICS["weight_rounding"].value, STATISTICS["square_spread"].value
NEARLY_ALL = STATISTICS["nearly_all"].value
ATTENTION_RMS = STATISTICS["attention_rms"].value


def scatter(value: ArrayLike, accumulation: ArrayLike, extra: ArrayLike, out: str, stored: ArrayLike = 0.0) -> Typical:
    """Of a sum that is rounded to `out` once, from the largest errors of its accumulation and of all else.

    value: float64 of the output's shape; accumulation, extra and stored broadcast to it. stored: largest error of a
    further rounding to nearest on the way, independent of the last one.
    """
    value = np.asarray(value, np.float64)
    within = ACCUMULATION * np.asarray(accumulation) + EXTRA * np.asarray(extra)
    deviation = np.sqrt((rounding(value, out) ** 2 + np.square(stored)) / 3 + within**2)
    return Typical(deviation, ACCUMULATION * np.asarray(accumulation) + np.asarray(extra))


def product_scatter(value: ArrayLike, common: ArrayLike, each: ArrayLike, out: str) -> Typical:
    """Of products that share a factor with errors of one direction, rounded to `out` once.

    value: float64 of the output's shape. common: relative error of the shared factor; each: largest relative error of
    the operations on single elements, whose roundings are independent but whose functions may err in one direction.
    Both broadcast to value. No common factor beyond these is allowed.
    """
    value = np.abs(np.asarray(value, np.float64))
    drift = (np.asarray(common) + np.asarray(each)) * value
    deviation = np.sqrt((rounding(value, out) ** 2 + (np.asarray(each) * value) ** 2) / 3 + (common * value) ** 2)
    return Typical(deviation, drift, least_factor=0.0)


@dataclass(frozen=True)
class AttentionScatter:
    """Of one token's heads: what `attention_typical` needs of it.

    deviation [h, d]; rows [h], limits of each head's root mean square; sums: of all heads.
    """

    deviation: Array
    rows: Array
    sums: Array
    """elements; share of P in their variance; sums of A, A**2, V, V**2; variance of <error, out>"""


def attention_scatter(weights: Array, v: Array, out: Array, other: Array, p: ProbabilityFormat, fmt: str, *,
                      repeats: int = 1, factor: ArrayLike = 1.0) -> AttentionScatter:
    """out = factor * weights @ v with weights rounded to nearest in the format p, and the result stored in `fmt`.

    weights [h, n] summing to 1, v [n, d] random and independent of the roundings, out [h, d], factor [h, 1] of a sink.
    other [h, d]: largest error of all else (scores, exponentials, sums), 6 standard deviations or more.
    repeats: how often a row may stand in the list: its weights round alike.

    The error is sum_j w_j delta_j v_j, the same delta_j in all d elements of a head: A_j = w_j**2 |v_j|**2 is what
    each adds to the head's sum of squares, V_d = sum_j w_j**2 v_jd**2 what each element has of it. A sum of squares
    has 6 standard deviations of sqrt(sum A**2) from the deltas, and of sqrt(2 sum V**2) from products of two of them.
    Weights too small for p err by up to p.absolute each. Where one row has nearly all the weight, out is that row and a
    little: its rounding is no chance, and may be half an ulp everywhere.
    """
    square = (weights * factor) ** 2 * repeats
    size = (WEIGHT_ROUNDING * p.u) ** 2
    by_weights = size * (square @ (v * v))
    alone = weights.max(axis=1, keepdims=True, initial=0) * repeats > 1 - NEARLY_ALL
    by_small = (p.absolute * factor) ** 2 * repeats * (v * v).sum(axis=0)
    rest = rounding(out, fmt) ** 2 / np.where(alone, 1.0, 3.0) + (OTHER * other) ** 2 + by_small
    variance = by_weights + rest
    each = np.divide(1.0, variance, out=np.zeros_like(variance), where=variance > 0)
    a, share = size * square * (each @ (v * v).T), by_weights * each
    moments = np.stack([np.full(len(out), out.shape[1], np.float64), share.sum(axis=1), a.sum(axis=1),
                        (a * a).sum(axis=1), share.sum(axis=1), (share * share).sum(axis=1)])
    along = size * (square * (out @ v.T) ** 2).sum() + (rest * out * out).sum()
    return AttentionScatter(np.sqrt(variance), _limit(moments), np.append(moments.sum(axis=1), along))


def _limit(moments: Array) -> Array:
    """Limit of a root mean square from the moments of `AttentionScatter.sums`; along the first axis."""
    n, share, a, a2, v, v2 = moments
    some = (a > 0) & (v > 0)
    a, v = np.where(some, a, 1.0), np.where(some, v, 1.0)
    more = SIGMAS * (SQUARE_SPREAD * np.sqrt(a2) / a + np.sqrt(2 * v2) / v)
    return ATTENTION_RMS * np.sqrt(1 + np.where(some, share / np.maximum(n, 1) * more, 0.0))


def attention_typical(tokens: Sequence[AttentionScatter | None], out: Array) -> Typical | None:
    """Of all tokens together; out [tokens, h, d]; None for a token that is empty or unspecified."""
    known = [t for t in tokens if t is not None]
    if not known:
        return None
    nothing, no_row = np.zeros(out.shape[1:]), np.full(out.shape[1:-1], ATTENTION_RMS)
    deviation = np.stack([nothing if t is None else t.deviation for t in tokens])
    rows = np.stack([no_row if t is None else t.rows for t in tokens])
    total = np.sum([t.sums for t in known], axis=0)
    looked_at = np.where(deviation > 0, out, 0.0)
    power = float((looked_at * looked_at).sum())
    spread = np.sqrt(total[-1]) / power if power > 0 else np.inf
    return Typical(deviation, None, float(_limit(total[:-1])), float(spread), rows)
