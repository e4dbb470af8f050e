"""Rotary embedding of TileKernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from references.bounds.basic import gamma, rounded
from references.bounds.constants import U32
from references.expected import Array, Expected, Inputs, Problem, Within
from references.formats import codec
from references.tilekernels.arguments import argument, underflow


def apply_rotary(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[Any, Expected]:
    """`tilekernels.transform.apply_rotary`, in place on query and key: pairs (x, y) turned by a row of the table.

    (x, y) -> (x cos - y sin, x sin + y cos) in fp32 with or without FMA, rounded once; conjugate takes -sin. Pairs
    are (i, i + D/2), interleaved (2i, 2i + 1). The row is seqlen_offset + positions, or + the token's index in
    its sequence; its first D/2 columns are cosines, the others sines. Where a product or sum may overflow fp32,
    nothing is promised.

    Arguments (default): interleaved, conjugate (False), seqlen_offset (0).
    Inputs: query (T, heads, D) or (B, S, heads, D) bf16 or fp32, as before the call; key alike, or not;
    cos_sin_cache (rows, D) fp32; positions (T,) or (B, S) int32 or int64, or not. Outputs: query, and key if given.
    Raises IndexError where a position lies outside the table.
    """
    names = [name for name in ("query", "key") if name in inputs]
    table = inputs.real("cos_sin_cache")
    expected: dict[Any, Expected] = {}
    for name in names:
        x = inputs.real(name)
        row = inputs.codes("positions").astype(np.int64) if "positions" in inputs else np.arange(x.shape[-3])
        angles = table[argument(problem, "seqlen_offset", 0) + row][..., None, :]
        half = x.shape[-1] // 2
        cos, sin = angles[..., :half], angles[..., half:]
        if argument(problem, "conjugate", False):
            sin = -sin
        pair = (slice(0, None, 2), slice(1, None, 2)) if argument(problem, "interleaved", False) else (
            slice(0, half), slice(half, None))
        first, second = x[..., pair[0]], x[..., pair[1]]
        value, size = np.empty_like(x), np.empty_like(x)
        with np.errstate(over="ignore", invalid="ignore"):
            for at, products in ((pair[0], (first * cos, -second * sin)), (pair[1], (first * sin, second * cos))):
                value[..., at] = products[0] + products[1]
                size[..., at] = np.abs(products[0]) + np.abs(products[1])
        expected[name] = _rounded(value, size, inputs.format(name), underflow(profile))
    return expected


def _rounded(value: Array, size: Array, fmt: str, tiny: float) -> Within:
    """Two products and a sum in fp32, then one rounding; size: the magnitudes of the products."""
    with np.errstate(invalid="ignore"):
        bound = gamma(2, U32) * size + 3 * tiny
        if fmt != "fp32":
            bound = rounded(value, bound, fmt)
        free = np.isfinite(size) & (size + bound >= codec.overflow_threshold("fp32"))
    return Within(value, bound, free if free.any() else None)
