"""Row-wise quantisation to E4M3 and E2M1 with block scales, and the packing of codes and exponents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from adapters.cpu.kernels import tile_io
from adapters.cpu.kernels.knobs import Knobs

KERNELS = {
    "cast_rows": ("tile_m", "drop_tail", "scale_shift", "skip_scale", *tile_io.KNOBS),
    "pack_exponents": ("fault",),
    "unpack_exponents": ("fault",),
}
"""Kernel to the knobs it obeys. flush_subnormals: also codes below the format's smallest normal number."""

FAULTS = {
    "signed_amax": "the largest value of a block is taken instead of the largest magnitude",
    "bf16_amax": "the largest magnitude is formed in BF16",
    "no_clamp": "the largest magnitude of a block is not clamped from below",
    "floor_scale": "a power-of-two scale is rounded down instead of up",
    "log2_exponent": "a scale is rounded up to a power of two by an FP32 logarithm, which misses a hair above one",
    "double_gran": "one scale is formed over two neighbouring blocks",
    "first_row_scales": "all rows of a tile are multiplied by the scales of its first row",
    "ties_away": "ties are rounded away from zero",
    "overflow_nan": "E4M3 values past the largest number become NaN instead of saturating",
    "swapped_nibbles": "the even column of a pair is stored in the high nibble",
    "swapped_bytes": "four exponents are packed highest byte first",
    "byte_0_is_zero": "an exponent byte of 0 is read as 0 instead of 2^-127",
    "bias_126": "an exponent byte is read as 2^(byte - 126)",
}
"""Faults that only these kernels know (`Knobs.fault`)."""

LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
"""largest number of each format"""

_SMALLEST_NORMAL = {"e4m3": 2.0**-6, "e2m1": 1.0}
_E4M3_NAN = 0x7F
_SIGN = {"e4m3": 0x80, "e2m1": 0x08}
_E4M3_OVERFLOW = 464.0
"""rounds to 448 up to here, midway to the first number there is no code for"""
_BYTE_SHIFTS = 8 * torch.arange(4, dtype=torch.int32)


@dataclass(frozen=True)
class Recipe:
    """How a block of `gran` neighbouring columns gets its scale.

    fmt: e4m3 | e2m1. scale: fp32 | power_of_two (rounded up) | e4m3.
    clamp: smallest magnitude that counts. multiplier: ratio (largest / amax) or
    reciprocal (1 / scale); other scales than fp32 always use the reciprocal.
    """

    fmt: str
    gran: int
    scale: str = "fp32"
    clamp: float = 1e-4
    multiplier: str = "ratio"


def cast_rows(
    x: torch.Tensor, recipe: Recipe, codes: torch.Tensor, scales: torch.Tensor, knobs: Knobs,
    x_scales: torch.Tensor | None = None,
) -> None:
    """Quantises x in place of `codes` and `scales`.

    x: [t, h], bf16 or fp32. codes: e4m3 [t, h], or int8 [t, h / 2] for e2m1, low nibble
    first. scales: fp32 [t, ceil(h / gran)], what a code is to be multiplied with.
    x_scales: fp32 [t, h], factors of an x that was quantised before; scale and codes are
    formed from x * x_scales.
    """
    h = x.shape[1]
    groups = -(-h // recipe.gran)
    for rows in tile_io.row_tiles(x.shape[0], knobs):
        tile = _blocks(tile_io.load(x[rows], knobs), groups, recipe.gran)
        if x_scales is not None:
            # Not x * (x_scales * multiplier): in a block of zeros that product can overflow, and 0 * inf is NaN.
            tile = tile * _blocks(x_scales[rows], groups, recipe.gran)
        scale, multiplier = _scale(tile, h, recipe, knobs)
        scaled = (tile * multiplier).flatten(1)[:, :h]
        scales[rows] = scale
        codes[rows] = _pack_codes(_round(scaled, recipe.fmt, knobs), recipe.fmt, knobs)


def _blocks(x: torch.Tensor, groups: int, gran: int) -> torch.Tensor:
    """[t, h] as [t, groups, gran], zeros behind h."""
    padding = groups * gran - x.shape[1]
    if padding:
        x = torch.nn.functional.pad(x, (0, padding))
    return x.reshape(x.shape[0], groups, gran)


def _scale(x: torch.Tensor, h: int, recipe: Recipe, knobs: Knobs) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored scale [t, groups] and multiplier [t, groups, 1] of every block of x [t, groups, gran]."""
    amax = _amax(x, h, recipe.gran, knobs)
    if knobs.fault != "no_clamp":
        amax = amax.clamp(min=recipe.clamp)
    largest = torch.full_like(amax, LARGEST[recipe.fmt])
    scale = amax / largest
    if recipe.scale == "power_of_two":
        if knobs.fault == "log2_exponent":
            scale = torch.exp2(scale.log2().ceil())
        scale = _power_of_two(scale, up=knobs.fault != "floor_scale")
    elif recipe.scale == "e4m3":
        scale = scale.clamp(max=LARGEST["e4m3"]).to(torch.float8_e4m3fn).float()
    exact_ratio = recipe.scale == "fp32" and recipe.multiplier == "ratio"
    multiplier = largest / amax if exact_ratio else scale.reciprocal()
    if knobs.skip_scale:
        multiplier = torch.ones_like(multiplier)
    if knobs.fault == "first_row_scales":
        multiplier = multiplier[:1].expand_as(multiplier)
    return scale.roll(-knobs.scale_shift, 1), multiplier.unsqueeze(2)


def _amax(x: torch.Tensor, h: int, gran: int, knobs: Knobs) -> torch.Tensor:
    """Largest magnitude [t, groups]."""
    amax = x.amax(2) if knobs.fault == "signed_amax" else x.abs().amax(2)
    if knobs.fault == "bf16_amax":
        amax = tile_io.through(amax, "bf16")
    if knobs.drop_tail and h % gran:
        amax[:, -1] = 0.0
    if knobs.fault == "double_gran":
        pair = torch.arange(amax.shape[1]) // 2 * 2
        amax = torch.maximum(amax[:, pair], amax[:, (pair + 1).clamp(max=amax.shape[1] - 1)])
    return amax


def _power_of_two(x: torch.Tensor, up: bool) -> torch.Tensor:
    """The next power of two at or above positive x (or at or below), exponent field kept in 1..254."""
    bits = x.view(torch.int32)
    exponent = bits >> 23
    if up:
        exponent = exponent + ((bits & 0x7FFFFF) != 0)
    return (exponent.clamp(1, 254).to(torch.int32) << 23).view(torch.float32)


def _round(x: torch.Tensor, fmt: str, knobs: Knobs) -> torch.Tensor:
    """uint8 codes of x, saturating, one code a byte; ties to the even code."""
    if knobs.flush_subnormals:
        x = torch.where(x.abs() < _SMALLEST_NORMAL[fmt], x * 0.0, x)
    rule = "ties_away" if knobs.fault == "ties_away" else knobs.output_rounding
    largest = LARGEST[fmt]
    if fmt == "e4m3" and rule == "nearest_even":
        codes = x.clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        magnitude = x.abs()
        codes = torch.bucketize(magnitude.contiguous(), _thresholds(fmt, rule), out_int32=True).to(torch.uint8)
        if fmt == "e4m3":
            codes = torch.where(magnitude.isnan(), _E4M3_NAN, codes)
        codes = codes | (x.signbit().to(torch.uint8) * _SIGN[fmt])
    if knobs.fault == "overflow_nan" and fmt == "e4m3":
        codes = torch.where(x.abs() > _E4M3_OVERFLOW, codes | _E4M3_NAN, codes)
    return codes


@cache
def _magnitudes(fmt: str) -> torch.Tensor:
    """FP32 value of every non-negative finite code, in order."""
    if fmt == "e2m1":
        return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.arange(_E4M3_NAN, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@cache
def _thresholds(fmt: str, rule: str) -> torch.Tensor:
    """Code i holds for threshold[i - 1] < |x| <= threshold[i]."""
    values = _magnitudes(fmt)
    if rule == "toward_zero":
        return torch.nextafter(values[1:], torch.tensor(0.0))
    middle = (values[1:] + values[:-1]) / 2
    upper_wins = torch.ones(len(middle), dtype=torch.bool)
    if rule == "nearest_even":
        upper_wins[::2] = False  # between codes 0|1, 2|3, .. the lower one is even
    return torch.where(upper_wins, torch.nextafter(middle, torch.tensor(0.0)), middle)


def _pack_codes(codes: torch.Tensor, fmt: str, knobs: Knobs) -> torch.Tensor:
    if fmt == "e4m3":
        return codes.view(torch.float8_e4m3fn)
    low, high = codes[:, 0::2], codes[:, 1::2]
    if knobs.fault == "swapped_nibbles":
        low, high = high, low
    return (low | (high << 4)).view(torch.int8)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """FP32 [rows, 2 * columns] of packed E2M1 bytes, low nibble first."""
    byte = packed.view(torch.uint8)
    codes = torch.stack((byte & 0xF, byte >> 4), 2).flatten(1).int()
    values = _magnitudes("e2m1")
    return torch.cat((values, -values))[codes]


def pack_exponents(scales: torch.Tensor, missing: float, knobs: Knobs) -> torch.Tensor:
    """int32 [t, ceil(groups / 4)] of power-of-two FP32 scales [t, groups], lowest byte first.

    Bytes behind the last group hold the exponent of `missing` (0.0: byte 0).
    """
    padding = -scales.shape[1] % 4
    if padding:
        scales = torch.nn.functional.pad(scales, (0, padding), value=missing)
    exponents = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    if knobs.fault == "swapped_bytes":
        exponents = exponents.reshape(-1, 4).flip(1).reshape_as(exponents)
    return exponents.view(torch.int32)


def unpack_exponents(words: torch.Tensor, groups: int, knobs: Knobs) -> torch.Tensor:
    """FP32 [rows, groups] of packed exponents: 2^(byte - 127), byte 0 is 2^-127, byte 255 NaN."""
    # by shifts: a single word counts as contiguous whatever its stride, and can't be viewed as bytes then
    exponents = ((words.unsqueeze(2) >> _BYTE_SHIFTS) & 0xFF).to(torch.uint8).flatten(1)
    if knobs.fault == "swapped_bytes":
        exponents = exponents.reshape(-1, 4).flip(1).reshape_as(exponents)
    scales = exponents[:, :groups].contiguous().view(torch.float8_e8m0fnu).float()
    if knobs.fault == "byte_0_is_zero":
        scales = scales.masked_fill(exponents[:, :groups] == 0, 0)
    return scales * 2.0 if knobs.fault == "bias_126" else scales
