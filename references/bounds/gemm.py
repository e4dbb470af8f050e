"""Matrix products: dense, grouped, block-scaled; the bound of the stored result."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from references.bounds.basic import dot, gamma, rounded
from references.bounds.constants import ACCUMULATORS, SPREAD_SCORES, U32

Array = np.ndarray

TC14_UNIT = 2.0**-13
"""Last bit kept when a Hopper fp8 unit aligns its addends (Khattak and Mikaitis 2025)."""
TC14_SPREAD, TC14_BIAS = 6.0, 12.0
"""Chunk errors of a bit-accurate model, in units 2**-13 of the chunk's magnitude: at most 3.0 with random signs and
9.2 with one sign; doubled, and a third added, for other chunk contents (measured)."""


def dense(value: ArrayLike, magnitude: ArrayLike, k: ArrayLike, out: str, **kw: Any) -> Array:
    """D = A @ B (+ C), one rounding to `out`. Arguments as of `basic.dot`; the same for every group of a grouped one.

    value, magnitude: [..., m, n] float64. With C, |C| belongs to magnitude and 1 to k.
    """
    return rounded(value, dot(magnitude, k, **kw), out)


def block_scaled(
    value: ArrayLike, magnitude: ArrayLike, k: ArrayLike, out: str, *, block_k: int = 128, accumulator: str = "fp32",
    chunk_norm: ArrayLike | None = None, addends: int = 0,
) -> Array:
    """sum over chunks of (codes_a . codes_b) * scale_a * scale_b, rounded once to `out`.

    Each chunk costs two more roundings (scale times scale, times the sum); 4 are spare for other groupings. Scales
    whose product underflows in fp32 are outside of this bound.
    accumulator fp8_tc14_promoted needs chunk_norm, sqrt(sum over chunks of chunk_magnitude**2); see
    `tensor_core_14_bit`. addends: how many C were added; |C| then belongs to magnitude.
    Raises ValueError where chunk_norm is missing.
    """
    row = ACCUMULATORS[accumulator]
    blocks = -(-np.asarray(k) // block_k)
    terms = np.where(np.asarray(k) > 0, np.asarray(k) + 2 * blocks + 4, 0) + addends
    error = row.factor * gamma(terms, row.u) * np.asarray(magnitude, np.float64) + (blocks + addends) * row.underflow
    if accumulator == "fp8_tc14_promoted":
        if chunk_norm is None:
            msg = "the 14-bit accumulator is bounded by the magnitudes of the chunks; give chunk_norm"
            raise ValueError(msg)
        error = error + tensor_core_14_bit(value, chunk_norm)
    return rounded(value, error, out)


def chunk_magnitude(chunk_value: ArrayLike, chunk_square: ArrayLike) -> Array:
    """|sum of the chunk| + 3 sqrt(sum of its squared products): size of its partial sums, in random order."""
    return np.abs(chunk_value) + SPREAD_SCORES * np.sqrt(chunk_square)


def tensor_core_14_bit(value: ArrayLike, chunk_norm: ArrayLike) -> Array:
    """What a 14-bit accumulator adds that is promoted to fp32 after every chunk; data in random order."""
    return TC14_UNIT * (TC14_SPREAD * np.asarray(chunk_norm) + TC14_BIAS * np.abs(value))


def tensor_core_14_bit_any_data(products: Array, chunk: int = 128, width: int = 32) -> Array:
    """The same for any data, from the products themselves [..., k], in whatever order inside a chunk.

    Each instruction adds `width` products to the running sum, all cut at 2**-13 of the largest of them, which is at
    most the chunk's sum of |products|: a product loses itself or that cut; the sum is cut twice, aligned and stored.
    """
    k = products.shape[-1]
    error = np.zeros(products.shape[:-1])
    for start in range(0, k, chunk):
        size = np.abs(products[..., start : start + chunk])
        total = size.sum(axis=-1)
        cut = TC14_UNIT * total
        steps = -(-size.shape[-1] // width)
        error += np.minimum(size, cut[..., None]).sum(axis=-1) + 2 * steps * TC14_UNIT * total
    return error


def tensor_core_14_bit_unpromoted(magnitude: ArrayLike, partials: ArrayLike, k: int, width: int = 32) -> Array:
    """What a 14-bit accumulator adds whose sums stay in it to the end, for any data.

    magnitude: sum of |products|; partials: no partial sum is larger. Every instruction cuts its products, its sum and
    what it stores at 2**-13 of the largest addend, so at most at that of `partials`; a product loses itself at most.
    """
    cut = TC14_UNIT * np.asarray(partials, np.float64)
    return np.minimum(magnitude, k * cut) + 2 * -(-k // width) * cut


def integer_dequantised(value: ArrayLike, out: str) -> Array:
    """int8 product, accumulated exactly, times up to two fp32 scales: three fp32 roundings and the output's."""
    return rounded(value, 3 * U32 * np.abs(value), out)


def weighted_relu_logits(value: ArrayLike, weights: ArrayLike, relu: ArrayLike, head_error: ArrayLike,
                         out: str) -> Array:
    """sum over heads of w_h relu(q_h . k), the indexer's logits: ReLU does not enlarge errors.

    weights, relu, head_error: [..., heads, n] (weights broadcast), head_error = `dot` of q_h . k. value [..., n].
    """
    heads = np.shape(relu)[-2]
    size = np.abs(weights)
    error = (size * head_error).sum(axis=-2) * (1 + gamma(heads + 2, U32))
    return rounded(value, error + gamma(heads + 2, U32) * (size * np.abs(relu)).sum(axis=-2), out)
