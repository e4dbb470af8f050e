"""How a blocked kernel cuts rows, reads a tile as FP32 and stores one in the output format."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from adapters.cpu.kernels.knobs import Knobs

KNOBS = ("output_rounding", "overflow", "flush_subnormals", "nan_to", "fault")
"""What `load`, `store` and `row_tiles` obey, and with them every kernel that uses them."""

FAULTS = {
    "fp16_inputs": "BF16 operands are read through FP16, which has more digits and a smaller range",
    "floor_grid": "the grid is rows // tile_m, so the rows behind the last full tile are never written",
}

SMALLEST_NORMAL = 2.0**-126
"""of FP32 and of BF16"""

_BF16_BITS_OF_FP32 = -0x10000
"""int32 mask that cuts an FP32 pattern to its BF16 half"""


def tiles(length: int, size: int) -> Iterator[slice]:
    """Slices of `size` that cover 0..length; the last may be shorter."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def row_tiles(rows: int, knobs: Knobs) -> Iterator[slice]:
    """Tiles of `knobs.tile_m` over the rows of an output."""
    if knobs.fault == "floor_grid":
        rows -= rows % knobs.tile_m
    return tiles(rows, knobs.tile_m)


def load(x: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    """x as FP32; an FP32 tensor comes back as itself, so never write into the result."""
    if knobs.fault == "fp16_inputs" and x.dtype == torch.bfloat16:
        x = x.half()
    x = x.float()
    if knobs.nan_to is not None:
        x = torch.where(x.isnan(), knobs.nan_to, x)
    return flush(x) if knobs.flush_subnormals else x


def store(out: torch.Tensor, value: torch.Tensor, knobs: Knobs) -> None:
    """Rounds FP32 `value` once into `out` (BF16, FP16 or FP32), which may be any strided view."""
    if knobs.flush_subnormals:
        value = flush(value)
    if knobs.output_rounding == "toward_zero" and out.dtype == torch.bfloat16:
        cut = (value.view(torch.int32) & _BF16_BITS_OF_FP32).view(torch.float32)
        value = torch.where(value.isnan(), value, cut)
    if knobs.overflow == "saturate":
        largest = torch.finfo(out.dtype).max
        value = value.nan_to_num(nan=0.0, posinf=largest, neginf=-largest).clamp(-largest, largest)
    out.copy_(value)


def flush(x: torch.Tensor) -> torch.Tensor:
    """Zero, of the same sign, for every FP32 number below the smallest normal one."""
    return torch.where(x.abs() < SMALLEST_NORMAL, x * 0.0, x)


def through(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """FP32 values rounded through `fmt` (fp32 | bf16 | fp16) and back."""
    if fmt == "fp32":
        return x
    return x.to({"bf16": torch.bfloat16, "fp16": torch.float16}[fmt]).float()
