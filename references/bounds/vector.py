"""Row-wise and element-wise operations: norms, gates, rotary embedding, weighted sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from references.bounds.basic import function, gamma, rounded, rounding
from references.bounds.constants import FLUSH_FP32, U32

Array = np.ndarray


def softmax(weights: ArrayLike, below_max: ArrayLike, n: int, out: str = "fp32") -> Array:
    """exp(x - max) / sum over n elements. below_max = max - x, >= 0, as are the weights; same shape.

    x - max is rounded once, which exp turns into a relative error; the sum costs n, the division 2.5 ulp.
    """
    weights, below_max = np.asarray(weights, np.float64), np.asarray(below_max, np.float64)
    far = np.where(np.isfinite(below_max), below_max, 0.0)
    relative = gamma(n + 8, U32) + function("exp", far) + U32 * far
    return rounded(weights, weights * relative + FLUSH_FP32, out)


def sigmoid_relative(x: ArrayLike) -> Array:
    """Relative error of 1 / (1 + exp(-x)): exp counts by its share of the sum; one addition, one division."""
    x = np.clip(np.asarray(x, np.float64), -700.0, 700.0)  # beyond, sigmoid is 0 or 1 in any format
    share = 1 / (1 + np.exp(x))
    return share * function("exp", x) + function("divide") + U32


def sigmoid(value: ArrayLike, x: ArrayLike, out: str = "fp32") -> Array:
    """1 / (1 + exp(-x)), rounded once to `out`."""
    return rounded(value, np.abs(value) * sigmoid_relative(x) + FLUSH_FP32, out)


def softplus_sqrt(value: ArrayLike, x: ArrayLike, out: str = "fp32", *, log1p: bool = True) -> Array:
    """sqrt(log1p(exp(x))), the gate of sqrt-softplus routing.

    An error of exp(x) passes to the logarithm weighed by sigmoid(x). Where the formula is log(1 + exp(x)), log1p
    False, the sum is only good to one fp32 unit of 1, which is everything where exp(x) is small.
    """
    x = np.asarray(x, np.float64)
    plus = np.logaddexp(0.0, x)
    sigma = 1 / (1 + np.exp(-np.clip(x, -700.0, 700.0)))
    error = sigma * function("exp", x) + 2 * U32 * (plus if log1p else 1.0) + plus * function("log") + FLUSH_FP32
    lowest = np.sqrt(np.maximum(plus - error, 0.0))
    return rounded(value, np.sqrt(plus) - lowest + np.abs(value) * function("sqrt"), out)


def normalised(value: ArrayLike, k: int, relative: ArrayLike = 0.0, out: str = "fp32") -> Array:
    """y_i / sum of k positive y (times a factor); relative: error that each y had already."""
    return rounded(value, np.abs(value) * (gamma(k + 4, U32) + 2 * np.asarray(relative)), out)


def rms_norm(value: ArrayLike, n: int, out: str, *, operations: int = 8) -> Array:
    """x * rsqrt(mean(x**2) + eps) * weight over n elements: no cancellation, and the root halves the sum's error."""
    return rounded(value, np.abs(value) * gamma(n / 2 + operations, U32), out)


def rms_norm_of_product(
    value: ArrayLike, product_error: ArrayLike, rstd: ArrayLike, n: int, out: str = "fp32"
) -> Array:
    """A matrix product times rsqrt(mean square), as the mHC prenorm has it; product_error: `basic.dot`."""
    error = np.asarray(rstd) * product_error + np.abs(value) * gamma(n / 2 + 8, U32)
    return rounded(value, error, out)


def rope(value: ArrayLike, magnitude: ArrayLike, out: str) -> Array:
    """a cos - b sin with the table that the op received; magnitude = |a cos| + |b sin|."""
    return rounded(value, 4 * U32 * np.asarray(magnitude), out)


def combine(
    value: ArrayLike, magnitude: ArrayLike, k: ArrayLike, out: str, hops: Sequence[tuple[ArrayLike, str]] = ()
) -> Array:
    """Weighted sum of k rows; magnitude = sum|w y|.

    hops: for each declared intermediate storage the partial sums that pass it, [parts, *shape of value], and its
    format; each is rounded once.
    """
    error = gamma(np.asarray(k) + 2, U32) * np.asarray(magnitude, np.float64)
    for partials, fmt in hops:
        error = error + rounding(partials, fmt, error).sum(axis=0)
    return rounded(value, error, out)


def swiglu(value: ArrayLike, gate: ArrayLike, out: str, *, operations: int = 4) -> Array:
    """gate * sigmoid(gate) * up (* weight), rounded once; gate after any clamp.

    Where exp(-gate) overflows, below about -88, sigmoid may be flushed to 0 before the factors enlarge it.
    """
    size = np.abs(np.asarray(value, np.float64))
    factors = size * (1 + np.exp(-np.clip(np.asarray(gate, np.float64), -700.0, 0.0)))
    relative = gamma(operations, U32) + sigmoid_relative(gate)
    return rounded(value, size * relative + FLUSH_FP32 * (1 + factors), out)


def sinkhorn(value: ArrayLike, largest_input: ArrayLike, n: int, iterations: int, out: str = "fp32") -> Array:
    """Alternating row and column normalisation of exp(x) over n entries; a contraction, so errors don't compound."""
    relative = gamma(2 * iterations * (n + 3), U32) + 8 * U32 * np.abs(largest_input) + 2.0**-22
    return rounded(value, np.abs(value) * relative, out)
