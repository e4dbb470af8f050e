"""Data families: each makes one kind of fault visible.

A family is `family(draw) -> values` (float64, rounded once to the format) or, where it is
about bit patterns, codes. Later arrays of an op (position 1, 2, ...) may follow another
rule than the first, so that products meet: see `cancellation` and `one_hot`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from conformance.engine.arrays import Draw, encode
from conformance.protocol import FORMATS
from references.formats import codec
from references.formats.spec import float_spec
from references.large.exact import exact_rows

Family = Callable[[Draw], np.ndarray]


def _is_float(fmt: str) -> bool:
    return not fmt.startswith(("int", "uint", "bool"))


def normal(d: Draw) -> np.ndarray:
    """N(0, 1); for integer formats uniform over their range, at most 127."""
    return d.normal() if _is_float(d.format) else d.integers(*_integer_range(d.format))


def _integer_range(fmt: str) -> tuple[int, int]:
    info = np.iinfo(np.dtype(FORMATS[fmt].codes))
    return max(info.min, -128), min(info.max, 127)


def integers(d: Draw) -> np.ndarray:
    """Small integers coded by position: sums are exact, and an element out of place shows."""
    index = np.arange(d.n, dtype=np.int64).reshape(d.shape)
    along = np.indices(d.shape, sparse=True)[-1] if d.shape else 0
    return ((index * 7 + along * 3 + d.seed % 13) % 9 - 4).astype(np.float64)


def positive(d: Draw) -> np.ndarray:
    """All of one sign: errors of one direction add up instead of averaging out."""
    return 0.5 + d.uniform() if _is_float(d.format) else d.integers(1, _integer_range(d.format)[1])


def ill_scaled(d: Draw) -> np.ndarray:
    """Rows of very different size: a wrong row or scale can't hide behind a large one."""
    rows = np.arange(d.shape[0] if d.shape else 1, dtype=np.int64)
    exponent = ((rows * 5 + d.seed % 7) % 17 - 8).reshape((-1,) + (1,) * (max(len(d.shape), 1) - 1))
    return d.normal() * np.ldexp(1.0, exponent).reshape(exponent.shape) if d.shape else d.normal()


def cancellation(d: Draw) -> np.ndarray:
    """Neighbours along the last axis cancel: in the first array by sign, in the others they agree."""
    x = d.normal()
    if not d.shape or d.shape[-1] < 2:
        return x
    even = d.shape[-1] // 2 * 2
    sign = -1.0 if d.position == 0 else 1.0
    x[..., 1:even:2] = sign * x[..., 0:even:2] * (1.0 + (2.0**-6 if d.position == 0 else 0.0))
    return x


def one_hot(d: Draw) -> np.ndarray:
    """One element a row: each product of the result can be told. Later arrays are coded by position."""
    if d.position or not d.shape or not d.shape[-1]:
        return integers(d)
    x = np.zeros(d.shape)
    rows = x.reshape(-1, d.shape[-1])
    at = (d.words(3, len(rows)) % np.uint64(d.shape[-1])).astype(np.int64)
    rows[np.arange(len(rows)), at] = 1.0
    return x


def exact(d: Draw) -> np.ndarray:
    """Whole numbers whose products cancel: fp32 sums are exact in any order, and leaving out any column shows."""
    if d.position > 1 or len(d.shape) < 2:
        return integers(d)
    rows = math.prod(d.shape[:-1])
    out = d.problem.variant.get("out", "bf16")
    return exact_rows("ab"[d.position], range(rows), d.shape[-1], out, d.problem.seed).reshape(d.shape)


def powers(d: Draw) -> np.ndarray:
    """Signed powers of two: scaling is exact, a wrong exponent shows."""
    sign = 1.0 - 2.0 * d.integers(0, 1, salt=5)
    return sign * np.ldexp(1.0, d.integers(-6, 6))


def zeros(d: Draw) -> np.ndarray:
    """Zeros of both signs with a few ordinary values, or negative zeros among negative numbers."""
    kind = d.integers(0, 7, salt=7)
    if d.seed % 3 == 0:
        return np.where(kind % 2 == 0, -np.abs(d.normal()), -0.0)
    return np.where(kind == 0, d.normal(), np.where(kind % 2 == 1, 0.0, -0.0))


def zero_signs(d: Draw) -> np.ndarray:
    """Zeros of both signs in every row, and nothing above them: they are equal, whatever their bits."""
    kind = d.integers(0, 7, salt=43)
    return np.where(kind < 2, -np.abs(d.normal()), np.where(kind % 2 == 1, 0.0, -0.0))


def constant(d: Draw) -> np.ndarray:
    """One value everywhere."""
    return np.full(d.shape, 1.0 + (d.seed % 5) * 0.25)


def two_valued(d: Draw) -> np.ndarray:
    """Two values: whatever has to choose meets ties everywhere."""
    return 1.0 + d.integers(0, 1)


def few_valued(d: Draw) -> np.ndarray:
    """Eight neighbouring values of the format around 1: ties, and differences of one bit."""
    return _near(d, 1.0, 8)


def _near(d: Draw, value: float, count: int) -> np.ndarray:
    start = int(codec.bits(encode(np.array([value]), d.format))[0])
    codes = (d.integers(0, count - 1, salt=11) + start).astype(codec.bits(np.zeros(1, FORMATS[d.format].codes)).dtype)
    return codes.view(FORMATS[d.format].codes)


def ascending(d: Draw) -> np.ndarray:
    """Rising along the last axis: every block beats the one before."""
    n = d.shape[-1] if d.shape else 1
    return np.broadcast_to(np.arange(n) * (4.0 / max(n, 1)) - 2.0, d.shape) + d.uniform() * (1.0 / max(n, 1))


def descending(d: Draw) -> np.ndarray:
    """Falling along the last axis."""
    return -ascending(d)


def sawtooth(d: Draw) -> np.ndarray:
    """Rising within blocks of 64 along the last axis, all blocks alike but for noise."""
    n = d.shape[-1] if d.shape else 1
    return np.broadcast_to(np.arange(n) % 64 / 64.0, d.shape) + d.uniform() * 2.0**-7


def tail_max(d: Draw) -> np.ndarray:
    """What counts stands in the last few elements of each row."""
    n = d.shape[-1] if d.shape else 1
    return d.normal() + np.where(np.arange(n) >= n - 1 - d.seed % 4, 16.0, 0.0)


def subnormal(d: Draw) -> np.ndarray:
    """Subnormal numbers of both signs, zeros among them."""
    step = codec.min_subnormal(d.format)
    return d.integers(-6, 6) * step


def subnormal_products(d: Draw) -> np.ndarray:
    """Subnormal numbers times powers of two: what is flushed shows, where products of subnormals would vanish."""
    return powers(d) if d.position == 1 else subnormal(d)


def wide_exponent(d: Draw) -> int:
    """The power of two around which a `wide` array lies: up for the first one and down for the later ones, or reversed.

    For BF16 and FP32 2**38: far beyond FP16, while products of two arrays stay near 1 and squares below 2**80.
    """
    exponent = int(0.3 * float_spec(d.format).emax) if _is_float(d.format) else 0
    return exponent if (d.position == 0) == (d.problem.seed % 2 == 0) else -exponent


def wide(d: Draw) -> np.ndarray:
    """Normal numbers, the whole array far from 1: what goes through a format of a smaller range on the way is lost."""
    return d.normal() * 2.0 ** wide_exponent(d) if _is_float(d.format) else normal(d)


def near_overflow(d: Draw) -> np.ndarray:
    """The largest finite number and what is just below."""
    top = codec.max_finite(d.format)
    return (1.0 - 2.0 * d.integers(0, 1, salt=13)) * top * (1.0 - 0.125 * d.integers(0, 3))


def overflow(d: Draw) -> np.ndarray:
    """Rows of one sign whose products add up to about the largest finite number of the format: below, at and past it.

    Every second row of the later operand gives sums between the largest number and the power of two behind it, which
    FP32 holds where it is the accumulator, and which round to infinity. A factor `alpha` above 1 counts; what one below
    1 leaves of a sum past the range is not promised.
    """
    if not _is_float(d.format):
        return normal(d)
    spec = float_spec(d.format)
    top = spec.emax + 1
    if d.position > 1 or not d.shape:
        return d.normal() * 2.0 ** (top - 12)
    row = replace(d, shape=(*d.shape[:-1], 1))
    if d.position == 0:
        return np.broadcast_to(1.0 - 2.0 * row.integers(0, 1, salt=5), d.shape) * 2.0 ** (top // 2)
    share = 0.5 + d.uniform()
    total = np.where(row.integers(0, 1, salt=7) == 0, 1.0 - 2.0 ** -(spec.p + 2), 0.5 + row.uniform(salt=3))
    factor = max(1.0, abs(d.problem.values.get("alpha") or 1.0))
    return share / share.sum(axis=-1, keepdims=True) * total / factor * 2.0 ** (top - top // 2)


def scale_edges(d: Draw) -> np.ndarray:
    """Each 16 columns' largest element at, or a few steps of the format beside, 448 or 6 times a power of two.

    Where a scale is the largest element over the largest code, rounded up to a power of two, it turns there. A row
    keeps its power, from 2**-20 to 2**20 as far as the format goes, so that wider groups turn too.
    """
    spec = float_spec(d.format) if _is_float(d.format) else None
    lowest, highest = (max(-20, spec.emin - 2), min(20, spec.emax - 8)) if spec else (0, -1)
    if lowest > highest or not d.shape:
        return normal(d)
    row = replace(d, shape=(*d.shape[:-1], 1))
    top = np.ldexp(np.where(row.integers(0, 1, salt=29) == 0, 448.0, 6.0), row.integers(lowest, highest, salt=31))
    step = 2.0 ** (1 - spec.p)
    top = top * (1.0 + step * row.integers(-2, 2, salt=37))
    x = top * (1.0 - d.uniform()) * (1.0 - 2.0 * d.integers(0, 1, salt=41))
    at = np.arange(d.shape[-1]) % SCALED == d.seed % SCALED
    return np.where(at, np.copysign(top, x), x)


SCALED = 16
"""columns of the narrowest group that shares a scale"""


def infinities(d: Draw) -> np.ndarray:
    """Ordinary values with a few infinities of both signs."""
    kind = d.integers(0, 15, salt=17)
    return np.where(kind == 0, np.inf, np.where(kind == 1, -np.inf, d.normal()))


def nans(d: Draw) -> np.ndarray:
    """Ordinary values; in the first and about half of the other rows one NaN, of either sign, quiet or signalling."""
    codes = encode(d.normal(), d.format)
    if not d.shape or not d.shape[-1] or d.format not in _NANS:
        return codes
    rows = codec.bits(codes).reshape(-1, d.shape[-1])
    w = d.words(19, len(rows))
    patterns = np.array(_NANS[d.format], rows.dtype)
    hit = np.flatnonzero((w & np.uint64(1)).astype(bool) | (np.arange(len(rows)) == 0))
    at = ((w >> np.uint64(1)) % np.uint64(d.shape[-1])).astype(np.int64)
    rows[hit, at[hit]] = patterns[((w >> np.uint64(40)) % np.uint64(len(patterns))).astype(np.int64)[hit]]
    return rows.reshape(d.shape).view(FORMATS[d.format].codes)


_NANS: dict[str, tuple[int, ...]] = {
    "fp32": (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF), "fp16": (0x7E00, 0xFE00, 0x7C01, 0xFFFF),
    "bf16": (0x7FC0, 0xFFC0, 0x7F81, 0xFFFF), "e4m3": (0x7F, 0xFF), "e5m2": (0x7E, 0xFE, 0x7D, 0xFF),
    "fp64": (0x7FF8000000000000, 0xFFF8000000000000),
}
"""NaN codes of the formats that have them"""


def all_bits(d: Draw) -> np.ndarray:
    """Every finite bit pattern and both infinities alike."""
    unsigned = codec.bits(np.zeros(1, FORMATS[d.format].codes)).dtype
    raw = d.words(23).astype(unsigned).reshape(d.shape).view(FORMATS[d.format].codes)
    if d.format in ("e2m1x2_lo", "e2m1"):
        return raw & np.uint8(15)
    return np.where(codec.is_nan(raw, d.format), np.zeros((), raw.dtype), raw)


FAMILIES: dict[str, Family] = {
    f.__name__: f
    for f in (
        normal, integers, positive, ill_scaled, cancellation, one_hot, exact, powers, zeros, zero_signs, constant,
        two_valued, few_valued, ascending, descending, sawtooth, tail_max, subnormal, subnormal_products, wide,
        near_overflow, overflow, scale_edges, infinities, nans, all_bits,
    )
}


def make(d: Draw, family: str) -> np.ndarray:
    """Codes of one array. Raises KeyError for an unknown family."""
    axes = len(d.shape)
    if axes > 1 and d.along % axes != axes - 1:
        shape = list(d.shape)
        shape[d.along], shape[-1] = shape[-1], shape[d.along]
        codes = make(replace(d, shape=tuple(shape), along=-1), family)
        return np.ascontiguousarray(np.swapaxes(codes, d.along, -1))
    values = FAMILIES[family](d)
    if values.dtype == np.dtype(FORMATS[d.format].codes) and values.dtype != np.float64:
        return np.ascontiguousarray(values)
    return encode(values.astype(np.float64), d.format)
