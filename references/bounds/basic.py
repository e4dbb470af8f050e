"""Rounding once, summing, multiplying: what every other bound is built from.

All bounds are componentwise, float64, and admit every order, block and split of the documented operation
(Higham 2002, chapters 3 and 4). `u` is a unit roundoff, `magnitude` a bound of the sum of |terms|.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from references.bounds.constants import ACCUMULATORS, FLUSH_FP32, FUNCTIONS, SPREAD_SCORES, U32, UNIT_ROUNDOFF
from references.formats import codec

Array = np.ndarray


def gamma(n: ArrayLike, u: float) -> Array:
    """n u / (1 - n u): the relative growth of n roundings in a row (Higham (3.1)).

    n: int or array. Raises ValueError where n u >= 1, where no bound exists.
    """
    grown = np.asarray(n, np.float64) * u
    if np.any(grown >= 1):
        msg = f"{np.max(n)} roundings of unit {u} have no bound"
        raise ValueError(msg)
    return grown / (1 - grown)


def rounding(value: ArrayLike, fmt: str, error: ArrayLike = 0.0) -> Array:
    """Largest error of one rounding to nearest, in `fmt`, of any number within `error` of value.

    Half an ulp at |value| + error, so a number that may lie across a binade edge counts with the wider
    binade; the exponent is never below that of the smallest normal number. Past the largest finite number the
    exponent goes on, as `expected.Within` needs it. A fp64 result is never below half of 2**-1074: there it is 0.
    """
    return codec.half_ulp(np.abs(np.asarray(value, np.float64)) + error, fmt)


def rounded(value: ArrayLike, error: ArrayLike, fmt: str) -> Array:
    """Bound of a result that was computed to within `error` and then rounded once to `fmt`."""
    return np.asarray(error + rounding(value, fmt, error))


def magnitude(abs_product: ArrayLike, value: ArrayLike | None = None, square_product: ArrayLike | None = None) -> Array:
    """Bound of every partial sum: sum|p|, or for terms in random order also |sum p| + 3 sqrt(sum p**2).

    abs_product = |A| @ |B|. Give value = A @ B and square_product = (A*A) @ (B*B) only where the order of the
    summed index is exchangeable (independent data, or randomly permuted jointly): the second form then holds
    in any data-independent order but for a probability of 2 exp(-18) an element (Brownian bridge).
    """
    if value is None or square_product is None:
        return np.asarray(abs_product, np.float64)
    return np.minimum(abs_product, np.abs(value) + SPREAD_SCORES * np.sqrt(square_product))


def dot(
    abs_product: ArrayLike, k: ArrayLike, accumulator: str = "fp32", *, exact_products: bool = True, splits: int = 1,
    partial: str | None = None, partial_magnitude: ArrayLike | None = None, flush: bool = False,
) -> Array:
    """Error of a sum of k products before it is rounded to the output.

    abs_product: `magnitude` of the sum; further addends (bias, an accumulated C) count in it and in k.
    k: how many terms; int or an array for groups of different length. 0 gives 0.
    accumulator: a row of `constants.ACCUMULATORS`.
    exact_products: True for inputs of at most 11 significand bits; otherwise each product is rounded too.
    splits, partial: into how many partial sums, and the declared format they are stored in; None is that of the
        accumulator, which costs nothing more, in any number. partial_magnitude: the sum of |partial sums| where
        the split is known; abs_product otherwise.
    flush: subnormals are declared to be flushed.
    Raises KeyError for an unknown accumulator or format, ValueError where k is too long for a bound.
    """
    row = ACCUMULATORS[accumulator]
    roundings = np.where(np.asarray(k) > 0, np.asarray(k) + (0 if exact_products else 1), 0)
    tiny = np.asarray(k) * (FLUSH_FP32 if flush else row.underflow)
    error = row.factor * gamma(roundings, row.u) * np.asarray(abs_product, np.float64) + tiny
    if partial is not None and splits > 1 and UNIT_ROUNDOFF[partial] > row.u:
        stored = error + (abs_product if partial_magnitude is None else np.asarray(partial_magnitude))
        error = error + UNIT_ROUNDOFF[partial] * stored + splits * codec.min_subnormal(partial) / 2
    return np.asarray(error)


def converted_inputs(
    abs_product: ArrayLike, conversion: str, value: ArrayLike | None = None, square_product: ArrayLike | None = None,
    *, abs_sums: ArrayLike = 0.0, k: ArrayLike = 0,
) -> Array:
    """What rounding both inputs of a product to tf32 or hf32 adds (declared conversions only).

    (2u + u**2) sum|p|; with value and square_product, as in `magnitude`, 4u sqrt(sum p**2) + 2u |sum p|.
    Below the smallest normal number a conversion errs by up to s, u times that number: abs_sums = sum|a| + sum|b| of
    each result and its length k add s abs_sums + k s**2.
    """
    u = UNIT_ROUNDOFF[conversion]
    s = u * FLUSH_FP32
    tiny = s * np.asarray(abs_sums, np.float64) + np.asarray(k, np.float64) * s * s
    hard = (2 * u + u * u) * np.asarray(abs_product, np.float64)
    if value is None or square_product is None:
        return hard + tiny
    return np.minimum(hard, 4 * u * np.sqrt(square_product) + 2 * u * np.abs(value)) + tiny


def function(name: str, x: ArrayLike = 0.0) -> Array:
    """Relative error of a fp32 elementary function at x, a row of `constants.FUNCTIONS`."""
    row = FUNCTIONS[name]
    return np.asarray((row.ulps + row.ulps_per_x * np.abs(x)) * 2 * U32)


def elementwise(value: ArrayLike, fmt: str, *, operations: int = 1, relative: ArrayLike = 0.0) -> Array:
    """A chain of fp32 multiplications, divisions and functions without cancellation, rounded once to `fmt`.

    operations: fp32 roundings on the way; relative: further relative error, such as `function("exp", x)`.
    """
    size = np.abs(np.asarray(value, np.float64))
    return rounded(value, size * (gamma(operations, U32) + relative), fmt)
