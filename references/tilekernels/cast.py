"""The block casts of TileKernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from references.expected import Expected, Inputs, Problem
from references.tilekernels.arguments import argument
from references.tilekernels.blockcast import Recipe, block_cast

SMALLEST_AMAX = {
    ("e4m3", False): 1e-4,
    ("e2m1", False): 6 * 2.0**-126,
    ("e4m3", True): 448 * 2.0**-9,
    ("e2m1", True): 6 * 2.0**-9,
}
"""by data format and whether scales are e4m3"""


def per_token_cast(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[Any, Expected]:
    """`tilekernels.quant.per_token_cast` of x (T, H): codes, and a scale for each num_per_channels columns.

    Documented: a = max(amax, a smallest value by format); sf = a / M in fp32, M = 448 or 6; rounded up to a power
    of two (pow2, packed) or to e4m3, nearest even, saturating; code = nearest even of clip(x * factor, -M, M),
    where the factor is M / a for fp32 scales, else 1 / sf. The last block of a row may be short. Zeros keep their
    sign. Blocks that hold NaN or infinity are unspecified, and so are unused slots of a packed word, which are left
    out of sf.
    Of an x with scales of its own the value is x * x_scale in fp32, or both scalings are multiplied first.
    The layout of the scales (row- or column-major) does not change what they are.

    Variant: fmt (e4m3, e2m1); scale (fp32, pow2, packed, e4m3).
    Arguments (default): num_per_channels, x_block_size ((1, 32)), in a variant as 1x32.
    Inputs: x (T, H), bf16 or fp32; or e4m3 or e2m1x2_lo codes with x_scale, a scale (fp32, e8m0x4 or e4m3 codes) for
    each block of x_block_size; further columns of x_scale, which fill up a packed word, are not read.
    Returns one Joint over ("data", "sf"): data e4m3 or e2m1x2_lo codes (T, H); sf fp32, e4m3 or e8m0x4 codes
    (T, ceil(H / num_per_channels)).
    """
    fmt, scale = problem.variant.fmt, problem.variant.scale
    recipe = Recipe(
        fmt, argument(problem, "num_per_channels", 0), scale, SMALLEST_AMAX[fmt, scale == "e4m3"],
        signed_zero=True, padding=None, nonfinite=False,
    )
    x = inputs.real("x")
    if "x_scale" not in inputs:
        return block_cast(x, recipe)
    height, width = argument(problem, "x_block_size", (1, 32))
    factor = np.repeat(np.repeat(inputs.real("x_scale"), height, axis=0), width, axis=1)
    return block_cast(x, recipe, factor[: x.shape[0], : x.shape[1]])
