"""What TileLang's cases share: formats, and data that show one kind of fault each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from conformance.engine.arrays import Draw, words
from conformance.engine.families import make
from conformance.model import Variant
from conformance.protocol import FORMATS
from references.formats import codec
from references.formats.spec import float_spec

FLOATS = ("fp32", "fp16", "bf16", "fp64")
FP8 = ("e4m3", "e5m2")
INTS = ("int32", "int8", "uint8", "int16", "int64")
FAMILIES = ("normal", "integers", "positive", "ill_scaled", "constant", "powers", "zeros", "subnormal", "near_overflow",
            "infinities", "all_bits")
"""families without NaN, which has variants of its own where its rule is not the same everywhere"""
BIT_FAMILIES = (*FAMILIES, "nans")

REFUSED = ("ValueError", "TypeError", "RuntimeError")
"""what the host checks of a compiled program end in"""


def is_float(v: Variant) -> bool:
    return float_spec(v.dtype) is not None


def differs_by_data(v: Variant) -> bool:
    """Variants that compile to the same program as their plain sister."""
    return v.get("data", "plain") != "plain"


def _put(d: Draw, codes: np.ndarray, where: np.ndarray) -> np.ndarray:
    """NaN of either sign at the marked places."""
    spec = float_spec(d.format)
    assert spec is not None
    bits = codec.bits(codes).copy()
    sign = d.integers(0, 1, salt=41).astype(bits.dtype) * bits.dtype.type(spec.sign_bit)
    return np.where(where, bits.dtype.type(spec.nan_code) | sign, bits).view(FORMATS[d.format].codes)


def _rare_bits(d: Draw, extent: int) -> np.ndarray:
    """One bit in about one element a line, so that `and` and `or` of a line depend on every one of them."""
    dtype = np.dtype(FORMATS[d.format].codes)
    bit = np.left_shift(np.int64(1), d.integers(0, 8 * dtype.itemsize - 1, salt=83))
    rare = np.where(d.integers(0, extent, salt=79) == 0, bit, 0)
    return (rare if d.problem.variant.kind == "bitor" else ~rare).astype(dtype)


def reduced(axis: Callable[[Variant], int]) -> Callable[[Draw], np.ndarray]:
    """What is reduced along an axis; with data=nan one NaN in the first and about half of the other lines."""

    def array(d: Draw) -> np.ndarray:
        along = axis(d.problem.variant)
        if d.problem.variant.kind in ("bitand", "bitor") and d.problem.family not in ("all_bits", "constant"):
            return _rare_bits(d, d.shape[along])
        codes = make(replace(d, along=along), d.problem.family)
        if not differs_by_data(d.problem.variant) or not codes.size:
            return codes
        lines, extent = codes.shape[1 - along], codes.shape[along]
        w = d.words(43, lines)
        hit = (w & np.uint64(1)).astype(bool) | (np.arange(lines) == 0)
        at = ((w >> np.uint64(1)) % np.uint64(extent)).astype(np.int64)
        marked = (np.arange(extent)[:, None] == at) & hit
        return _put(d, codes, marked if along == 0 else marked.T)

    return array


def nans_in_operand(d: Draw) -> np.ndarray:
    """With data=nan: NaN in a, in b, in both or in neither, by turns and at random."""
    second = d.name == "b"
    codes = make(replace(d, position=int(second)), d.problem.family)
    if not differs_by_data(d.problem.variant):
        return codes
    kind = np.where(np.arange(d.n) < 3, np.arange(d.n), words(d.problem.seed, d.n) % np.uint64(4))
    return _put(d, codes, (kind == (2 if second else 1)) | (kind == 3))


def divisor(d: Draw) -> np.ndarray:
    """The second operand; for integers one that C defines: no zero to divide by, no shift beyond the width."""
    codes, name = nans_in_operand(d), d.problem.variant.function
    if float_spec(d.format) is not None:
        return codes
    if name in ("shl", "shr"):
        return (codes & (8 * codes.itemsize - 1)).astype(codes.dtype)
    if name.endswith(("div", "mod")):
        # The most negative number over -1 ends a process on x86 as zero does.
        lowest = d.arrays["a"] == np.iinfo(codes.dtype).min
        return np.where((codes == 0) | (lowest & (codes.astype(np.int64) == -1)), 1, codes).astype(codes.dtype)
    return codes


_TELLING = (0.0, -0.0, np.inf, -np.inf, np.nan, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 1.0, -1.0, 0.49999997, 1e-40, 100.5,
            8388609.0)


def telling_arguments(d: Draw) -> np.ndarray:
    """Of functions: in every second problem a third of the elements are zeros, ties, infinities, NaN and the like."""
    codes = make(d, d.problem.family)
    if d.problem.seed % 2 or not d.n:
        return codes
    pick = d.integers(0, 3 * len(_TELLING) - 1, salt=47)
    with np.errstate(over="ignore"):
        table = codec.encode(np.array(_TELLING), d.format)
    return np.where(pick < len(table), table[pick % len(table)], codes)


def ties_of_out(d: Draw) -> np.ndarray:
    """With data=ties: half-way points between numbers of the narrower format `out`, and their next neighbours."""
    if not differs_by_data(d.problem.variant):
        return make(d, d.problem.family)
    out = d.problem.variant.out
    spec = float_spec(out)
    assert spec is not None
    # Half of them in the middle of the range, the others at all exponents.
    one = int(codec.bits(codec.encode(np.array([1.0]), out))[0])
    low = np.where(d.integers(0, 1, salt=53) == 0, one, 0)
    code = low + (d.uniform(salt=59) * (spec.max_code - low)).astype(np.int64)
    unsigned = codec.bits(np.zeros(1, FORMATS[out].codes)).dtype
    below, above = (codec.decode((code + i).astype(unsigned).view(FORMATS[out].codes), out) for i in (0, 1))
    half = np.where(np.isfinite(above), below / 2 + above / 2, codec.overflow_threshold(out))
    sign = 1.0 - 2.0 * d.integers(0, 1, salt=61)
    with np.errstate(over="ignore"):
        codes = codec.encode(half * sign, d.format)
    bits = codec.bits(codes)
    step = d.integers(-1, 1, salt=67).astype(bits.dtype)
    moved = np.where(np.isfinite(codec.decode(codes, d.format)) & (half > 0), bits + step, bits)
    return np.ascontiguousarray(moved.astype(bits.dtype)).view(FORMATS[d.format].codes)


def indices(size: str) -> Callable[[Draw], np.ndarray]:
    """Indices into an axis: at random, many alike, at both ends, and outside by one and by far."""

    def array(d: Draw) -> np.ndarray:
        n = d.sizes[size]
        far = (-1, n, n + 1, -n, 2**30, -(2**31), 2**31 - 1)
        # What a 32-bit index would bring back inside.
        wide = (2**32, 2**32 + 1, -(2**32), 2**40) if d.format == "int64" else ()
        points = np.array((0, max(n - 1, 0), *far, *wide))
        inside = d.integers(0, max(n - 1, 0), salt=71) // (1 + d.seed % 3 * 4)
        pick = d.integers(0, 4 * len(points) - 1, salt=73)
        return np.where(pick < len(points), points[pick % len(points)], inside).astype(FORMATS[d.format].codes)

    return array
