"""Casts to e4m3 and e2m1 with one scale for each `width` columns of a row: what codes and scales may be.

The scale follows from the largest magnitude of the block, which is exact in any order, so only a handful of
scales is possible. The codes are judged against the scale the kernel itself wrote: a wrong scale is then one
fault, not a row of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from references.bounds import quantise
from references.expected import Array, Joint, Judgement, OneOf
from references.formats import codec

DATA, SCALE = "data", "sf"
"""names of the two outputs"""

_PACK = 4
"""scales in one packed word"""


@dataclass(frozen=True)
class Recipe:
    """One documented cast.

    data: e4m3 or e2m1. width: columns that share a scale.
    scale: fp32; pow2 (rounded up to a power of two, kept as fp32); packed (the same as exponent bytes); e4m3.
    smallest: the largest magnitude of a block counts as at least this.
    signed_zero: the sign of a zero code is documented.
    padding: byte in the unused slots of the last packed word, None where unspecified: these are then no part of `sf`.
    nonfinite: False where nothing is promised for a block that holds NaN or infinity.
    """

    data: str
    width: int
    scale: str
    smallest: float
    signed_zero: bool
    padding: int | None
    nonfinite: bool

    @property
    def data_format(self) -> str:
        return "e2m1x2_lo" if self.data == "e2m1" else self.data

    @property
    def scale_format(self) -> str:
        return {"fp32": "fp32", "pow2": "fp32", "packed": "e8m0x4", "e4m3": "e4m3"}[self.scale]


def block_cast(x: Array, recipe: Recipe, factor: Array | None = None) -> dict[tuple[str, str], Joint]:
    """Codes (rows, columns) and scales (rows, ceil(columns / width)) of x, float64 values of bf16 or fp32 numbers.

    factor: of an x that is quantised itself the scale of each element, float64 (rows, columns); the value is then
    x * factor rounded to fp32, and codes may also come from x * (factor * (1 / s)) or x * (factor * (M / a)).

    Of packed scales with a documented padding the last axis is filled up to a multiple of 4.
    Allowed scales: a / M and a * (1 / M) in fp32, a = the block's largest magnitude, M the format's largest
    number; rounded as the recipe says. Allowed codes, s the scale observed: x * (1 / s), x / s and, for unrounded
    fp32 scales, x * (M / a), each in fp32, clipped to +-M and rounded to nearest even.
    Returns one Joint over ("data", "sf").
    """
    with np.errstate(over="ignore", invalid="ignore"):
        raw = x.astype(np.float32)
        x = raw if factor is None else raw * factor.astype(np.float32)
    rows, columns = x.shape
    blocks = -(-columns // recipe.width)
    padded = np.zeros((rows, blocks * recipe.width), np.float32)
    np.abs(x, out=padded[:, :columns])
    amax = padded.reshape(rows, blocks, recipe.width).max(axis=2, initial=0)
    odd = ~np.isfinite(amax)
    amax = np.maximum(amax, np.float32(recipe.smallest))
    scales = _scales(amax, recipe)
    free = np.zeros_like(odd) if recipe.nonfinite else odd
    scale_free = free
    if recipe.scale == "packed" and recipe.padding is not None:
        unused = ((0, 0), (0, -blocks % _PACK))
        scales = tuple(np.pad(s, unused, constant_values=recipe.padding) for s in scales)
        scale_free = np.pad(free, unused)

    def spread(per_block: Array) -> Array:
        return np.repeat(per_block, recipe.width, axis=1)[:, :columns]

    def check(got: Mapping[str, Array]) -> dict[str, Judgement]:
        on_scale = OneOf(scales, scale_free).judge(got[SCALE], recipe.scale_format)
        observed, fallback = (_as_float32(s[:, :blocks], recipe) for s in (got[SCALE], scales[0]))
        usable = (np.isfinite(observed) & (observed > 0)) | ~np.isfinite(fallback)
        scale = spread(np.where(usable, observed, fallback))
        unrounded = spread(amax) if recipe.scale == "fp32" else None
        allowed = quantise.codes(x, scale, recipe.data_format, unrounded)
        if factor is not None:
            allowed += _codes_by_one_factor(raw, factor.astype(np.float32), scale, unrounded, recipe)
        return {DATA: _judge_codes(x, allowed, got[DATA], recipe, spread(free)), SCALE: on_scale}

    return {(DATA, SCALE): Joint({DATA: (rows, columns), SCALE: scales[0].shape}, check)}


def _scales(amax: Array, recipe: Recipe) -> tuple[Array, ...]:
    """Codes of every scale the recipe allows, (rows, blocks)."""
    plain = quantise.scales(amax, recipe.data)
    if recipe.scale == "fp32":
        return plain
    if recipe.scale == "e4m3":
        return tuple(codec.encode(s, "e4m3", overflow="saturate") for s in plain)
    exponents = tuple(_exponent_up(s) for s in plain)
    if recipe.scale == "packed":
        return exponents
    return tuple((e.astype(np.uint32) << np.uint32(23)).view(np.float32) for e in exponents)


def _exponent_up(s: Array) -> Array:
    """Biased exponent of the next power of two, uint8 in 1..254, as the documented bit trick has it also for NaN."""
    raw = s.view(np.uint32)
    exponent = ((raw >> np.uint32(23)) & np.uint32(0xFF)) + ((raw & np.uint32(0x7FFFFF)) != 0)
    return np.clip(exponent, 1, 254).astype(np.uint8)


def _as_float32(codes: Array, recipe: Recipe) -> Array:
    return codec.decode(np.ascontiguousarray(codes), recipe.scale_format).astype(np.float32)


def _codes_by_one_factor(
    x: Array, factor: Array, scale: Array, amax: Array | None, recipe: Recipe
) -> tuple[Array, ...]:
    """Codes of x * f, f the product of both scalings."""
    with np.errstate(all="ignore"):
        multipliers = [np.float32(1) / scale]
        if amax is not None:
            multipliers.append(np.float32(codec.max_finite(recipe.data)) / amax)
        products = [x * (factor * m) for m in multipliers]
    return tuple(codec.encode(p, recipe.data_format, overflow="saturate") for p in products)


def _judge_codes(x: Array, allowed: tuple[Array, ...], codes: Array, recipe: Recipe, free: Array) -> Judgement:
    fmt = recipe.data_format
    verdict = OneOf(allowed, free).judge(codes, fmt)
    if verdict.ok:
        return verdict
    fine = codec.is_nan(codes, fmt) & np.isinf(x) & np.isfinite(codec.decode(allowed[0], fmt))  # or it saturates
    if not recipe.signed_zero:
        value = codec.decode(codes, fmt)
        fine |= (value == 0) & np.logical_or.reduce([codec.decode(c, fmt) == 0 for c in allowed])
    return Judgement(verdict.bad & ~fine, verdict.expected, None, verdict.reason)
