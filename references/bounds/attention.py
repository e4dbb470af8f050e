"""Softmax attention: O = softmax(S) V and lse = max + ln(sum), for any blocking and split of the keys.

First-order perturbation of the documented formula: an error d_j of score j moves O by w_j d_j (v_j - O); rounding
P_j moves it by u w_j v_j; sums over keys add as `basic.gamma`. Masked keys carry weight 0 and finite V.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from references.bounds.basic import gamma
from references.bounds.constants import PROBABILITIES, SPREAD_SCORES, SPREAD_WEIGHTS, U32

Array = np.ndarray

EXP_RELATIVE = 2.0**-20
"""exp of a fp32 difference: 2**-22 of the function, doubled for each of two factors of a rescaled block."""


def score_error(scores: Array, d: int, spread: Array, *, exp_relative: float = EXP_RELATIVE,
                score_rounding: ArrayLike = 0.0) -> Array:
    """Error of every score that exp sees, with exp's own relative error added; [..., queries, keys].

    scores: scaled and masked, -inf where masked. d: length of the dot products. spread: bound of their partial
    sums above |score|: scale * sqrt((q*q) @ (k*k)) where the data are random (counted 3 times), a third of
    scale * |q| @ |k| where they are not. score_rounding: what a declared storage of the scores adds.
    """
    unmasked = np.isfinite(scores)
    size = np.where(unmasked, np.abs(scores), 0.0)
    largest = size.max(axis=-1, keepdims=True, initial=0.0)
    error = gamma(d, U32) * (size + SPREAD_SCORES * spread) + U32 * (4 * size + 3 * largest)
    return np.where(unmasked, error + exp_relative + score_rounding, 0.0)


def _relative(score_error: Array) -> Array:
    """What an error of the score does to exp and, through the sum, to a weight: d to first order, and no less."""
    return np.expm1(np.minimum(2 * score_error, 600.0)) / 2


def output(
    weights: Array, v: Array, o: Array, score_error: Array, *, p: str = "bf16", blocks: int = 1,
    random_v: bool = False, l_from: str = "fp32",
) -> Array:
    """Error of O before it is rounded to the output format; [..., queries, width].

    weights [..., queries, keys] sum to 1 (or are all 0 in an empty row); v [..., keys, width]; o = weights @ v.
    p: format of P, a row of `constants.PROBABILITIES`. l_from: `fp32`, or `rounded` where the denominator sums
    rounded P. blocks: key blocks, each rescaling the sums. random_v: V is independent of the weights, so rounding
    errors of P average out (6 standard deviations, Hoeffding); otherwise they may all agree.
    """
    row = PROBABILITIES[p]
    size_v, size_o = np.abs(v), np.abs(o)
    keys = weights.shape[-1]
    moved = weights * _relative(score_error)
    by_scores = moved @ size_v + moved.sum(axis=-1, keepdims=True) * size_o
    absolute = weights @ size_v
    rescaling = 4 * blocks * U32 * absolute + row.absolute * ((weights > 0).astype(np.float64) @ size_v)
    sums = gamma(keys, U32)
    worst = row.u * (absolute + (size_o if l_from == "rounded" else 0.0)) + sums * (absolute + size_o)
    if random_v:
        square = weights * weights
        deviation = square @ (v * v) - 2 * o * (square @ v) + o * o * square.sum(axis=-1, keepdims=True)
        deviation = np.sqrt(np.maximum(deviation, 0.0))
        likely = row.u * (size_o + SPREAD_WEIGHTS * deviation) + sums * (size_o + SPREAD_SCORES * deviation)
        worst = np.minimum(worst, likely)
    return by_scores + worst + rescaling


def lse(weights: Array, lse_value: Array, largest: Array, score_error: Array, *, p: str = "bf16",
        l_from: str = "fp32") -> Array:
    """Error of the natural log-sum-exp stored in fp32; [..., queries].

    lse_value, largest (the row's largest score): [..., queries]; rows without keys have no finite value, and the
    bound is 0 there. In base 2, divide value and bound by ln 2 and add `basic.rounding`.
    """
    keys = weights.shape[-1]
    # the documented infinity of an empty row is exact
    finite = np.isfinite(lse_value) & np.isfinite(largest)
    size = np.where(finite, np.abs(lse_value), 0.0) + np.where(finite, np.abs(largest), 0.0)
    error = (weights * _relative(score_error)).sum(axis=-1) + gamma(keys, U32) + 4 * U32 * size + 2.0**-22
    if l_from == "rounded":
        error = error + PROBABILITIES[p].u
    return np.where(finite, error, 0.0)


def with_sink(o: Array, error: Array, lse_value: Array, lse_error: Array, sink: ArrayLike) -> Array:
    """Error of O / (1 + exp(sink - lse)) before its rounding; o, error without the sink.

    o, error [..., queries, width]; lse_value, lse_error, sink [..., queries]. The factor f changes with lse by
    f (1 - f); its own fp32 evaluation costs `EXP_RELATIVE` and four roundings.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        f = 1 / (1 + np.exp(np.asarray(sink, np.float64) - lse_value))
        shift = lse_error + U32 * (np.abs(sink) + np.abs(lse_value)) + EXP_RELATIVE
    f = np.where(np.isnan(f), 0.0, f)
    moved = np.where((f > 0) & (f < 1), f * (1 - f) * np.where(np.isfinite(shift), shift, 0.0), 0.0) + 4 * U32 * f
    return f[..., None] * error + np.abs(o) * moved[..., None]


def split_partials(split_weights: Array, partial_rounding: Array) -> Array:
    """What storing the O of every split in a narrow format adds: sum of weight * half ulp (declared only).

    split_weights [splits, ..., queries], summing to 1; partial_rounding [splits, ..., queries, width].
    """
    return (split_weights[..., None] * partial_rounding).sum(axis=0)
