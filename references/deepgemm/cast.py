"""The FP8 quantisers of DeepGEMM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from references.expected import Expected, Inputs, Problem
from references.tilekernels.arguments import argument
from references.tilekernels.blockcast import Recipe, block_cast

_SMALLEST_AMAX = 1e-4
_ONE_AS_E8M0 = 127


def per_token_cast_to_fp8(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[Any, Expected]:
    """`deepgemm.per_token_cast_to_fp8`: e4m3 codes of x (m, n) and a scale for each gran_k columns of a row.

    Documented: a = max(amax, 1e-4); sf = a / 448, with use_ue8m0 rounded up to a power of two (exponent byte
    1..254); code = e4m3(x * (1 / sf)); columns behind n count as zeros; unused slots of a packed word hold 1.0.
    NaN and infinity are not treated, so the formula says what comes of them: a block with NaN has scale NaN and
    all codes NaN, one with infinity has scale infinity, zeros, and NaN at the infinity; a power-of-two scale is
    then 2**127. An infinity times a finite factor may saturate or become NaN. The sign of a zero code is free.

    Variant: scale (fp32, pow2, packed). Argument (default): gran_k (128). Inputs: x (m, n), bf16 or fp32.
    Returns one Joint over ("data", "sf"): data e4m3 (m, n); sf fp32 (m, ceil(n / gran_k)), or e8m0x4 codes
    (m, the same rounded up to a multiple of 4).
    """
    recipe = Recipe(
        "e4m3", argument(problem, "gran_k", 128), problem.variant.scale, _SMALLEST_AMAX,
        signed_zero=False, padding=_ONE_AS_E8M0, nonfinite=True,
    )
    return block_cast(inputs.real("x"), recipe)
