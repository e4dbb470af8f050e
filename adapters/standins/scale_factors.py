"""Scale factors as deep_gemm takes them, by architecture. Sections are those of dossiers/deepgemm.md."""

from __future__ import annotations

from typing import Any

import torch

from adapters.standins.arch import Arch
from adapters.standins.checks import align, ceil_div, exponents, host


def recipe_of(arch: Arch, sfb: torch.Tensor, recipe: Any, recipe_a: Any, recipe_b: Any) -> tuple[int, int, int]:
    """(gran_m, gran_n, gran_k) of a call: 2.1. RuntimeError for a mixture or for half a recipe."""
    host((recipe_a is None) == (recipe_b is None), "recipe_a and recipe_b go together")
    host(recipe is None or recipe_a is None, "recipe excludes recipe_a and recipe_b")
    if recipe_a is not None:
        host(len(recipe_a) == 2 and len(recipe_b) == 2, "recipe_a and recipe_b have two numbers")
        host(recipe_a[1] == recipe_b[1], "gran_k of a and of b")
        return recipe_a[0], recipe_b[0], recipe_a[1]
    if recipe is None:
        packed = sfb.dtype == torch.int32 and arch.name == "sm100"
        return (1, 1, 128) if packed else (1, 128, 128)
    host(len(recipe) == 3, "recipe has three numbers")
    return tuple(recipe)


def as_fp32(
    rig: Any, name: str, sf: torch.Tensor, mn: int, k: int, gran_mn: int, gran_k: int, disable_cast: bool
) -> torch.Tensor:
    """fp32 [ceil(mn / gran_mn), ceil(k / gran_k)] of scales in a form that the architecture takes.

    SM90: FP32. SM100: FP32 powers of two (anything else traps), or int32 of four exponents, along mn.
    Ascend: FP32 powers of two, or int16 of two exponents (2.9). RuntimeError for any other form.
    """
    arch: Arch = rig.arch
    rows, blocks = ceil_div(mn, gran_mn), ceil_div(k, gran_k)
    if sf.dtype == torch.float32:
        host(tuple(sf.shape) == (rows, blocks), f"scales of {name}: {tuple(sf.shape)}, expected {(rows, blocks)}")
        host(1 in sf.stride() or min(sf.shape) <= 1, f"scales of {name} must be contiguous along an axis")
        if arch.name != "sm90":
            host(not disable_cast, "Unsupported architecture or scaling factor types")
            if not exponents(sf).all():
                rig.device.trap(f"unspecified launch failure: scales of {name}: no power of two")
        return sf
    packing = {("sm100", torch.int32): 4, ("ascend950", torch.int16): 2}.get((arch.name, sf.dtype), 0)
    host(packing > 0, f"Unsupported architecture or scaling factor types: {sf.dtype} on {arch.name}")
    words = ceil_div(k, gran_k * packing)
    if arch.is_ascend:
        host(gran_mn in (1, 32) and tuple(sf.shape) == (rows, words), f"scales of {name}: {tuple(sf.shape)}")
    else:
        host(gran_mn == 1, f"Unknown SF transformation: packed scales for {gran_mn} rows")
        host(tuple(sf.shape) == (mn, words), f"scales of {name}: {tuple(sf.shape)}, expected {(mn, words)}")
        host(sf.stride(0) == 1 or mn == 1, f"scales of {name} must be contiguous along mn")
        host(words <= 1 or (sf.stride(1) >= align(mn, 4) and sf.stride(1) % 4 == 0),
             f"scales of {name} have a pitch of {sf.stride(1)}")
    return unpacked(sf, packing)[:, :blocks]


def unpacked(words: torch.Tensor, packing: int) -> torch.Tensor:
    """fp32 [rows, packing * words] of exponent bytes, lowest byte first; byte 0 is 2**-127, byte 255 NaN."""
    # A copy in any case: with one word a row, "contiguous" rows may still have a last stride that no view accepts.
    copy = words.clone(memory_format=torch.contiguous_format)
    flat = copy.view(torch.uint8).reshape(words.shape[0], words.shape[1] * packing).int()
    bits = torch.where(flat == 0, 0x00400000, torch.where(flat == 255, 0x7FC00000, flat << 23))
    return bits.int().view(torch.float32)
