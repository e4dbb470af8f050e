"""Codes to values and back, for every format of `conformance.protocol.FORMATS` and of `spec.FLOATS`.

Codes are what NumPy holds: fp16, fp32, fp64, integers and bool are themselves, every other format is an
unsigned integer array, one code an element (also of the packed formats). `e2m1`, `e5m6` and `e8m0` name single codes.
Rounding is done once, from float64, with integer and exact float steps, so it is the same on every machine.
What does not fit a row of the table has a file of its own: `stochastic`, `cut_e5m6`, `hif8`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import inf

import numpy as np
from numpy.typing import DTypeLike

from references.formats.packing import pack, unpack
from references.formats.spec import CODE_DTYPES, FloatSpec, float_spec

__all__ = ["bits", "decode", "default_overflow", "encode", "half_ulp", "is_nan", "max_finite", "min_subnormal",
           "overflow_threshold", "pack", "round_to", "storage", "ulp", "unpack"]

Array = np.ndarray

ROUNDINGS = ("nearest_even", "toward_zero", "up")
OVERFLOWS = ("inf", "nan", "saturate")

_UNSIGNED = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}
_ABS_F64 = np.uint64(0x7FFFFFFFFFFFFFFF)
_EXPONENT_F64 = np.uint64(0x7FF0000000000000)
_CHUNK = 1 << 15
"""elements worked on at once: their temporaries stay in the second-level cache"""


# --- codes ------------------------------------------------------------------------------------------------

def storage(fmt: str) -> np.dtype:
    """NumPy dtype that holds the codes. Raises KeyError for an unknown format."""
    float_spec(fmt)
    return CODE_DTYPES[fmt]


def bits(codes: Array) -> Array:
    """Unsigned integers of the same size and shape on the same memory; any dtype of 1, 2, 4 or 8 bytes.

    Raises TypeError for other item sizes.
    """
    codes = np.asarray(codes)
    unsigned = _UNSIGNED.get(codes.dtype.itemsize)
    if unsigned is None or codes.dtype.hasobject:
        msg = f"no unsigned integer has the size of {codes.dtype}"
        raise TypeError(msg)
    return codes.view(unsigned)


def is_nan(codes: Array, fmt: str) -> Array:
    """bool, True where the code is a NaN of the format (of e8m0 the code 255)."""
    spec = float_spec(fmt)
    codes = np.asarray(codes)
    if spec is None or spec.nan_code is None:
        return np.zeros(codes.shape, bool)
    if spec.native:
        return np.asarray(np.isnan(codes))
    last = spec.max_code if spec.inf_code is None else spec.inf_code
    dtype = CODE_DTYPES[fmt].type
    if spec.sign_bit:
        codes = codes & dtype(spec.sign_bit - 1)
    return np.asarray(codes > dtype(last))


# --- codes to values --------------------------------------------------------------------------------------

def decode(codes: Array, fmt: str) -> Array:
    """float64 values of the codes, exact; integers and bool come back as they are.

    Raises TypeError where the dtype is not the format's own, ValueError for a code with more bits than the
    format has (e2m1 4, e5m6 12, tf32 19), KeyError for an unknown format.
    """
    spec = float_spec(fmt)
    codes = np.asarray(codes)
    if codes.dtype != CODE_DTYPES[fmt]:
        msg = f"codes of {fmt} are {CODE_DTYPES[fmt]}, got {codes.dtype}"
        raise TypeError(msg)
    if spec is None:
        return codes
    if spec.native:
        with np.errstate(invalid="ignore"):
            return codes.astype(np.float64)
    table = _decode_table(spec.name)
    if table.size < 1 << 8 * codes.itemsize and codes.size and codes.max() >= table.size:
        msg = f"{fmt} has {table.size} codes, got {int(codes.max())}"
        raise ValueError(msg)
    return _chunked(table.take, codes, np.float64)


def _chunked(function: Callable[[Array], Array], a: Array, dtype: DTypeLike) -> Array:
    """An elementwise function, applied in pieces that stay in the cache."""
    if a.size <= _CHUNK:
        return np.asarray(function(a))
    flat, out = np.ascontiguousarray(a).reshape(-1), np.empty(a.size, dtype)
    for i in range(0, a.size, _CHUNK):
        out[i : i + _CHUNK] = function(flat[i : i + _CHUNK])
    return out.reshape(a.shape)


@cache
def _decode_table(name: str) -> Array:
    """Value of every code, float64: as many as the format has, 2**4 of e2m1 to 2**19 of tf32."""
    spec = float_spec(name)
    if spec.sign_bit == 0:
        table = np.ldexp(1.0, np.arange(256) + spec.emin)
        table[spec.nan_code] = np.nan
    else:
        magnitude = np.arange(spec.sign_bit)
        field = magnitude >> (spec.p - 1)
        fraction = magnitude & ((1 << (spec.p - 1)) - 1)
        significand = np.where(field > 0, fraction + (1 << (spec.p - 1)), fraction)
        half = np.ldexp(significand.astype(np.float64), np.maximum(field, 1) - 1 + spec.emin - (spec.p - 1))
        half[magnitude > spec.max_code] = np.nan
        if spec.inf_code is not None:
            half[spec.inf_code] = np.inf
        table = np.concatenate([half, np.negative(half)])
    table.setflags(write=False)
    return table


# --- values to codes --------------------------------------------------------------------------------------

def default_overflow(fmt: str) -> str:
    """inf where the format has one; nan for e8m0; saturate for the other formats without infinity."""
    spec = float_spec(fmt)
    if spec is None or (spec.inf_code is None and spec.sign_bit):
        return "saturate"
    return "nan" if spec.inf_code is None else "inf"


def encode(values: Array, fmt: str, *, rounding: str = "nearest_even", overflow: str | None = None) -> Array:
    """Codes of float64 values, rounded exactly once; the dtype is the format's.

    rounding: nearest_even; toward_zero (a finite value then never overflows, as IEEE 754 has it); up, which is
        of e8m0 only: the next power of two that is not smaller.
    overflow: what infinities, and values that round past the largest finite number, become: inf, nan or
        saturate (the largest finite number, with the sign); None is `default_overflow`.

    Zeros keep their sign where the format has one, NaN becomes the quiet NaN of the same sign.
    e2m1 has no NaN: it becomes +6, as in PTX's saturating conversion.
    e8m0: what rounds below 2**-127, zeros too, becomes 2**-127; negative values and NaN become NaN; a tie goes to the
    larger number, as IEEE 754 has it for a significand of one digit, which is never even.
    Integer formats round, then saturate; bool is `values != 0`.
    Raises ValueError for a rounding or overflow the format does not have, and for NaN to an integer format.
    """
    spec = float_spec(fmt)
    overflow = default_overflow(fmt) if overflow is None else overflow
    _check_modes(spec, fmt, rounding, overflow)
    values = np.asarray(values, np.float64)
    if spec is None:
        return _encode_integer(values, fmt, rounding)
    if spec.native:
        return _encode_native(values, fmt, spec, rounding, overflow)
    dtype = CODE_DTYPES[fmt]
    return _chunked(lambda piece: _encode_small(piece, spec, dtype, rounding, overflow), values, dtype)


def round_to(values: Array, fmt: str, *, rounding: str = "nearest_even", overflow: str | None = None) -> Array:
    """float64 values as the format would hold them: `decode(encode(values))`."""
    return decode(encode(values, fmt, rounding=rounding, overflow=overflow), fmt).astype(np.float64, copy=False)


def _check_modes(spec: FloatSpec | None, fmt: str, rounding: str, overflow: str) -> None:
    no_such_rounding = rounding not in ROUNDINGS or (rounding == "up" and (spec is None or spec.sign_bit))
    lacks = {"inf": spec is None or spec.inf_code is None, "nan": spec is None or spec.nan_code is None}
    if no_such_rounding or overflow not in OVERFLOWS or lacks.get(overflow, False):
        msg = f"{fmt} can't be rounded {rounding!r} with overflow {overflow!r}"
        raise ValueError(msg)


def _encode_small(values: Array, spec: FloatSpec, dtype: np.dtype, rounding: str, overflow: str) -> Array:
    """Codes of a format of fewer bits than fp32.

    With e the exponent of |x|, at least emin, and ulp = 2**(e - p + 1): |x| + 2**52 ulp is a float64 whose
    unit is ulp, so the addition rounds |x| to a multiple of ulp, ties to even, and its low bits are that
    multiple. The code is the multiple plus the exponent field, which absorbs a carry into the next binade.
    """
    raw = bits(values)
    ceiling = 2.0 ** (spec.emax + 2)  # keeps the sum finite; everything from here on overflows anyway
    magnitude = np.fmin(np.abs(values), ceiling)
    exponent = np.bitwise_and(bits(magnitude), _EXPONENT_F64)
    lowest = (spec.emin + 1023) << 52
    exponent = np.maximum(exponent, np.uint64(lowest))
    unit_bits = exponent + np.uint64((53 - spec.p) << 52)
    unit = unit_bits.view(np.float64)
    summed = magnitude + unit
    multiple = bits(summed) - unit_bits
    if rounding != "nearest_even":
        rounded = summed - unit
        if rounding == "toward_zero":
            multiple -= rounded > magnitude
        else:
            multiple += rounded < magnitude
    code = multiple + ((exponent - np.uint64(lowest)) >> np.uint64(53 - spec.p))

    nan = np.isnan(values)
    if spec.sign_bit == 0:  # e8m0: the multiple is 1 or 2, and 0 below the smallest number, which is code 0
        code = np.maximum(code, np.uint64(1)) - np.uint64(1)
        nan |= values < 0
    largest = np.uint64(spec.max_code)
    overflowed = np.isinf(values) if rounding == "toward_zero" else code > largest
    beyond = {"inf": spec.inf_code, "nan": spec.nan_code, "saturate": spec.max_code}[overflow]
    code = np.where(overflowed, np.uint64(beyond), np.minimum(code, largest))
    if spec.sign_bit:
        code = code | ((raw >> np.uint64(63)) << np.uint64(spec.sign_bit.bit_length() - 1))
    if nan.any():
        code = np.where(nan, _nan_codes(raw, spec), code)
    return np.asarray(code).astype(dtype)


def _nan_codes(raw: Array, spec: FloatSpec) -> Array:
    if spec.nan_code is None:
        return np.full(raw.shape, spec.max_code, np.uint64)
    if spec.sign_bit == 0:
        return np.full(raw.shape, spec.nan_code, np.uint64)
    return np.uint64(spec.nan_code) | ((raw >> np.uint64(63)) << np.uint64(spec.sign_bit.bit_length() - 1))


def _encode_native(values: Array, fmt: str, spec: FloatSpec, rounding: str, overflow: str) -> Array:
    """fp16, fp32, fp64: NumPy's own conversion from float64 rounds once, to nearest even."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        codes = np.asarray(values.astype(CODE_DTYPES[fmt]))
        if rounding == "toward_zero":
            past = np.isfinite(values) & (np.abs(codes.astype(np.float64)) > np.abs(values))
            codes = np.where(past, np.nextafter(codes, codes.dtype.type(0)), codes)
    if overflow == "inf":
        return codes
    largest = codes.dtype.type(max_finite(fmt))
    instead = np.nan if overflow == "nan" else largest
    return np.where(np.isinf(codes), np.copysign(codes.dtype.type(instead), codes), codes)


def _encode_integer(values: Array, fmt: str, rounding: str) -> Array:
    dtype = CODE_DTYPES[fmt]
    if dtype == np.bool_:
        return np.asarray(values != 0)
    if np.isnan(values).any():
        msg = f"NaN has no code in {fmt}"
        raise ValueError(msg)
    whole = np.rint(values) if rounding == "nearest_even" else np.trunc(values)
    limits = np.iinfo(dtype)
    # float(limits.max) of int64 is 2**63, one too many for the cast: such values are set afterwards
    inside = np.asarray(np.clip(whole, float(limits.min), np.nextafter(float(limits.max) + 1.0, 0.0))).astype(dtype)
    return np.where(whole >= float(limits.max), dtype.type(limits.max), inside)


# --- limits and units -------------------------------------------------------------------------------------

def max_finite(fmt: str) -> float:
    """Largest finite number of the format (of int64 2**63, the nearest float64)."""
    spec = float_spec(fmt)
    if spec is None:
        return 1.0 if fmt == "bool" else float(np.iinfo(CODE_DTYPES[fmt]).max)
    if spec.native:
        return float(np.finfo(CODE_DTYPES[fmt]).max)
    return float(_decode_table(spec.name)[spec.max_code])


def has_infinity(fmt: str) -> bool:
    spec = float_spec(fmt)
    return spec is not None and spec.inf_code is not None


def min_subnormal(fmt: str) -> float:
    """Smallest positive number of the format; 1 for integers and bool."""
    spec = float_spec(fmt)
    return 1.0 if spec is None else spec.min_subnormal


def overflow_threshold(fmt: str) -> float:
    """Smallest magnitude that rounds to infinity (nearest even).

    inf for formats without infinity, for integers, and for fp64, whose threshold no float64 can express.
    """
    spec = float_spec(fmt)
    if spec is None or spec.inf_code is None or spec.name == "fp64":
        return inf
    return 2.0**spec.emax * (2.0 - spec.u)


def ulp(values: Array, fmt: str) -> Array:
    """Distance between neighbouring numbers of the format at |value|: 2**(max(e, emin) - p + 1), float64.

    The exponent range is open upwards, so that a bound stays meaningful past the largest finite number;
    infinite for infinities, NaN for NaN. Of integer formats 1. At a power of two: the larger, upper gap.
    """
    values = np.asarray(values, np.float64)
    spec = float_spec(fmt)
    if spec is None:
        return np.ones(values.shape)
    if spec.name == "fp64":
        with np.errstate(invalid="ignore"):
            return np.asarray(np.where(np.isinf(values), inf, np.spacing(np.abs(values))))
    return _chunked(lambda piece: _ulp(piece, spec), values, np.float64)


def _ulp(values: Array, spec: FloatSpec) -> Array:
    exponent = np.maximum(bits(values) & _EXPONENT_F64, np.uint64((spec.emin + 1023) << 52))
    unit = np.asarray(exponent - np.uint64((spec.p - 1) << 52)).view(np.float64)
    odd = exponent == _EXPONENT_F64
    return np.where(odd, np.abs(values), unit) if odd.any() else unit


def half_ulp(values: Array, fmt: str) -> Array:
    """Half of `ulp`: the largest error of one rounding to nearest of a value of this magnitude.

    Of fp64 it underflows to 0 below 2**-1021.
    """
    return np.asarray(0.5 * ulp(values, fmt))
