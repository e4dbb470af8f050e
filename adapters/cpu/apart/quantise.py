"""Block quantisation to e4m3 and e2m1, written from the documented rule with each step open to change."""

from __future__ import annotations

from collections.abc import Callable

import torch

LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
GRIDS = {
    "e4m3": torch.tensor([(m + 8 * (e > 0)) * 2.0 ** (max(e, 1) - 10) for e in range(16) for m in range(8)][:127],
                         dtype=torch.float64),
    "e2m1": torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64),
}
"""magnitudes by code; code and index are one"""
SIGN = {"e4m3": 128, "e2m1": 8}


def blocks(x: torch.Tensor, width: int) -> torch.Tensor:
    """fp32 [rows, groups, width] of x [rows, columns], the last group padded with zeros."""
    pad = -x.shape[1] % width
    return torch.nn.functional.pad(x.float(), (0, pad)).view(len(x), -1, width)


def exponent_up(a: torch.Tensor) -> torch.Tensor:
    """Biased exponent byte of the least power of two that is not under a; a fp32, normal and positive. int64."""
    bits = a.view(torch.int32).long()
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(1, 254)


def power(byte: torch.Tensor) -> torch.Tensor:
    """fp32 power of two of a biased exponent."""
    return torch.ldexp(torch.ones(byte.shape, dtype=torch.float64), byte - 127).float()


def nearest(x: torch.Tensor, fmt: str, *, away: torch.Tensor | bool = False) -> torch.Tensor:
    """uint8 codes of x: to nearest, ties to the even code or, where `away`, away from zero. NaN gives 0x7F."""
    grid, size = GRIDS[fmt], x.double().abs()
    middle = (grid[1:] + grid[:-1]) / 2
    low = torch.bucketize(size, middle)
    at = middle[low.clamp(max=len(middle) - 1)]
    up = (size == at) & (low < len(middle)) & ((low % 2 == 1) | away)
    code = low + up + torch.where(x.signbit(), SIGN[fmt], 0)
    return torch.where(x.isnan(), 127, code).to(torch.uint8)


def quantised(
    x: torch.Tensor, fmt: str, width: int, mode: str, floor: float, *,
    amax: Callable[[torch.Tensor], torch.Tensor] = lambda b: b.abs().amax(-1),
    byte: Callable[[torch.Tensor], torch.Tensor] = exponent_up,
    away: Callable[[torch.Tensor], torch.Tensor | bool] = lambda v: False,
    reciprocal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes uint8 [rows, columns], scales fp32 [rows, groups], exponent bytes int64 [rows, groups]).

    mode: `plain`, `round` or `e4m3`, the kind of scale. floor: least amax. reciprocal: the multiplier is 1 over the
    scale in plain mode too.
    """
    parts = blocks(x, width)
    top = LARGEST[fmt]
    a = amax(parts).clamp(min=floor)
    scale = a / top
    exponents = byte(scale)
    if mode == "round":
        scale = power(exponents)
        factor = 1 / scale
    elif mode == "e4m3":
        scale = GRIDS["e4m3"][nearest(scale, "e4m3").long()].float()
        factor = 1 / scale
    else:
        # One division, rounded once: `top / a` would take the reciprocal first.
        factor = 1 / scale if reciprocal else torch.full_like(a, top) / a
    scaled = parts * factor[..., None]
    codes = nearest(scaled.clamp(-top, top), fmt, away=away(scaled))
    return codes.view(len(x), -1)[:, : x.shape[1]], scale, exponents


def words(exponents: torch.Tensor, missing: int) -> torch.Tensor:
    """int32 [rows, ceil(groups / 4)]: four exponent bytes a word, lowest first, `missing` in unused places."""
    padded = torch.nn.functional.pad(exponents, (0, -exponents.shape[1] % 4), value=missing)
    return padded.to(torch.uint8).contiguous().view(torch.int32)
