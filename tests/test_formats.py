"""Every code of every format of up to 16 bits, every tie between neighbours, against exact rationals."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest

from conformance.protocol import FORMATS
from references.formats import codec
from references.formats.spec import CODE_DTYPES, FLOATS, INTEGERS

Array = np.ndarray


@dataclass(frozen=True)
class Layout:
    """A format as its standard writes it down: field widths and bias, not the constants of `spec.py`."""

    exponent_bits: int
    fraction_bits: int
    bias: int
    finite: int
    """how many non-negative codes are finite"""
    infinity: int | None
    nan: int | None
    """the quiet NaN"""

    @property
    def sign_bit(self) -> int:
        return 1 << (self.exponent_bits + self.fraction_bits)


LAYOUTS = {
    "fp16": Layout(5, 10, 15, 31 << 10, 0x7C00, 0x7E00),
    "bf16": Layout(8, 7, 127, 255 << 7, 0x7F80, 0x7FC0),
    "e4m3": Layout(4, 3, 7, 127, None, 0x7F),
    "e5m2": Layout(5, 2, 15, 31 << 2, 0x7C, 0x7E),
    "e5m6": Layout(5, 6, 15, 31 << 6, 0x7C0, 0x7E0),
    "e2m1": Layout(2, 1, 1, 8, None, None),
}
SIGNED = sorted(LAYOUTS)
WITH_INFINITY = tuple(f for f in SIGNED if LAYOUTS[f].infinity is not None)
SMALL = (*SIGNED, "e8m0")


def value_of(layout: Layout, code: int) -> Fraction:
    """Value of a non-negative finite code, exact."""
    field, fraction = divmod(code, 1 << layout.fraction_bits)
    significand = fraction + ((1 << layout.fraction_bits) if field else 0)
    return Fraction(significand) * Fraction(2) ** (max(field, 1) - layout.bias - layout.fraction_bits)


def finite_codes(fmt: str) -> Array:
    """Non-negative finite codes in the dtype of the codes."""
    return as_codes(np.arange(LAYOUTS[fmt].finite), fmt)


def all_codes(fmt: str) -> Array:
    """Every code of a small format."""
    return as_codes(np.arange(2 * LAYOUTS[fmt].sign_bit if fmt in LAYOUTS else 256), fmt)


def as_codes(raw: Array, fmt: str) -> Array:
    dtype = CODE_DTYPES[fmt]
    return raw.astype(f"u{dtype.itemsize}").view(dtype)


def numbers_of(fmt: str) -> Array:
    """The non-negative finite numbers of a format and the one that would follow, float64, from the layout alone."""
    layout = LAYOUTS[fmt]
    raw = np.arange(layout.finite + 1)
    field, fraction = raw >> layout.fraction_bits, raw & ((1 << layout.fraction_bits) - 1)
    significand = fraction + np.where(field > 0, 1 << layout.fraction_bits, 0)
    return np.ldexp(significand.astype(float), np.maximum(field, 1) - layout.bias - layout.fraction_bits)


def ties(fmt: str) -> tuple[Array, Array, Array]:
    """Every midpoint between neighbours, one float64 to either side of it, and the lower number itself.

    Returns values float64 [4 * finite], the index of the lower neighbour, and by where in the step the value lies:
    0 on the number, 1 below the midpoint, 2 on it, 3 above.
    """
    numbers = numbers_of(fmt)
    middle = (numbers[:-1] + numbers[1:]) / 2
    x = np.concatenate([numbers[:-1], np.nextafter(middle, 0), middle, np.nextafter(middle, np.inf)])
    return x, np.tile(np.arange(len(middle)), 4), np.repeat(np.arange(4), len(middle))


# --- decoding ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fmt", SIGNED)
def test_every_finite_code_has_its_rational_value(fmt):
    layout = LAYOUTS[fmt]
    codes = finite_codes(fmt)
    got = codec.decode(codes, fmt)
    assert [Fraction(v) for v in got] == [value_of(layout, c) for c in range(layout.finite)]
    negative = as_codes(codec.bits(codes) | FLOATS[fmt].sign_bit, fmt)
    np.testing.assert_array_equal(codec.decode(negative, fmt), -got)
    assert np.signbit(codec.decode(negative, fmt)).all()
    np.testing.assert_array_equal(numbers_of(fmt)[:-1], got)


@pytest.mark.parametrize("fmt", SIGNED)
def test_every_other_code_is_infinity_or_nan(fmt):
    layout, codes = LAYOUTS[fmt], all_codes(fmt)
    magnitude = codec.bits(codes) & (layout.sign_bit - 1)
    infinite = magnitude == layout.infinity
    got = codec.decode(codes, fmt)
    np.testing.assert_array_equal(np.isinf(got), infinite)
    np.testing.assert_array_equal(np.isnan(got), (magnitude >= layout.finite) & ~infinite)
    np.testing.assert_array_equal(np.isnan(got), codec.is_nan(codes, fmt))
    np.testing.assert_array_equal(got[infinite], [np.inf, -np.inf][: infinite.sum()])


@pytest.mark.parametrize("fmt", SMALL)
def test_every_number_survives_the_round_trip(fmt):
    codes = all_codes(fmt)
    keep = ~codec.is_nan(codes, fmt)
    for rounding in ("nearest_even", "toward_zero"):
        again = codec.encode(codec.decode(codes, fmt), fmt, rounding=rounding)
        np.testing.assert_array_equal(codec.bits(again)[keep], codec.bits(codes)[keep])
        assert codec.is_nan(again, fmt)[~keep].all()


@pytest.mark.parametrize("fmt", ["bool", *sorted(INTEGERS)])
def test_integers_and_bool_decode_to_themselves(fmt):
    codes = np.array([0, 1, 0], CODE_DTYPES[fmt])
    assert codec.decode(codes, fmt) is codes
    assert not codec.is_nan(codes, fmt).any()


# --- encoding ---------------------------------------------------------------------------------------------

def nearest_even(numbers: list[Fraction], x: Fraction) -> int:
    """Index of the number that x >= 0 rounds to; the last one stands for all beyond."""
    i = bisect.bisect_right(numbers, x) - 1
    if i == len(numbers) - 1:
        return i
    below, above = x - numbers[i], numbers[i + 1] - x
    return i if (below, i % 2) < (above, (i + 1) % 2) else i + 1


@pytest.mark.parametrize("fmt", SIGNED)
def test_the_ties_are_exact_midpoints_of_neighbours(fmt):
    layout = LAYOUTS[fmt]
    x, low, place = ties(fmt)
    for v, i in zip(x[place == 2], low[place == 2], strict=True):
        assert 2 * Fraction(v) == value_of(layout, int(i)) + value_of(layout, int(i) + 1)
    numbers = numbers_of(fmt)
    assert np.all((x >= numbers[low]) & (x < numbers[low + 1]))


OVERFLOWS = [(f, o) for f in SIGNED for o in ("saturate", "inf", "nan")
             if o == "saturate" or getattr(LAYOUTS[f], {"inf": "infinity"}.get(o, o)) is not None]


@pytest.mark.parametrize(("fmt", "overflow"), OVERFLOWS)
def test_every_tie_and_its_neighbours_by_each_rule(fmt, overflow):
    """The last tie is the one to the number that would follow: where overflow begins."""
    layout = LAYOUTS[fmt]
    x, low, place = ties(fmt)
    beyond = {"saturate": layout.finite - 1, "inf": layout.infinity, "nan": layout.nan}[overflow]
    near = low + ((place == 3) | ((place == 2) & (low % 2 == 1)))
    for rounding, index in (("nearest_even", near), ("toward_zero", low)):
        due = np.where(index == layout.finite, beyond, index)
        for sign, flip in ((1, 0), (-1, layout.sign_bit)):
            got = codec.encode(sign * x, fmt, rounding=rounding, overflow=overflow)
            np.testing.assert_array_equal(codec.bits(got), due | flip)


@pytest.mark.parametrize("fmt", SIGNED)
def test_random_values_round_as_rationals_do(fmt):
    layout, rng = LAYOUTS[fmt], np.random.default_rng(7)
    numbers = [value_of(layout, c) for c in range(layout.finite)]
    low, high = np.log2(codec.min_subnormal(fmt)) - 3, np.log2(codec.max_finite(fmt)) - 1
    x = np.exp2(rng.uniform(low, high, 1500)) * rng.choice([-1, 1], 1500)
    near = [nearest_even(numbers, abs(Fraction(v))) for v in x]
    down = [bisect.bisect_right(numbers, abs(Fraction(v))) - 1 for v in x]
    flip = np.where(x < 0, layout.sign_bit, 0)
    np.testing.assert_array_equal(codec.bits(codec.encode(x, fmt)), near | flip)
    np.testing.assert_array_equal(codec.bits(codec.encode(x, fmt, rounding="toward_zero")), down | flip)


@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero", "up"])
def test_every_tie_of_e8m0_by_each_rule(rounding):
    """A tie goes to the larger: no significand is even. Past 2**127 comes NaN, or with saturation 2**127 again."""
    codes = np.arange(255)
    low = np.ldexp(1.0, codes - 127)
    for x, place in ((low, 0), (np.nextafter(low, 9e99), 1), (np.nextafter(1.5 * low, 0), 1), (1.5 * low, 2),
                     (np.nextafter(1.5 * low, 9e99), 3), (np.nextafter(2 * low, 0), 3)):
        higher = {"toward_zero": codes < 0, "up": codes * 0 + place > 0,
                  "nearest_even": codes * 0 + place >= 2}[rounding]
        for overflow, beyond in (("nan", 255), ("saturate", 254)):
            got = codec.encode(x, "e8m0", rounding=rounding, overflow=overflow)
            np.testing.assert_array_equal(got, np.where(codes + higher == 255, beyond, codes + higher))


def test_double_rounding_through_fp32_is_avoided():
    """Just above a bf16 tie by less than half an fp32 ulp: via fp32 this would go down to even."""
    x = 1 + 2.0**-8 + 2.0**-40
    assert np.float32(x) == 1 + 2.0**-8
    assert codec.round_to(np.float64(x), "bf16") == 1 + 2.0**-7


ENCODE_EDGES = [
    # value, format, options, code
    (464.0, "e4m3", {"overflow": "nan"}, 0x7E),
    (np.nextafter(464.0, 500), "e4m3", {"overflow": "nan"}, 0x7F),
    (-1e30, "e4m3", {"overflow": "nan"}, 0xFF),
    (465.0, "e4m3", {}, 0x7E),
    (-np.inf, "e4m3", {}, 0xFE),
    (np.inf, "e4m3", {"overflow": "nan"}, 0x7F),
    (470.0, "e4m3", {"overflow": "nan", "rounding": "toward_zero"}, 0x7E),
    (np.inf, "e4m3", {"overflow": "nan", "rounding": "toward_zero"}, 0x7F),
    (2.0**-10, "e4m3", {}, 0x00),
    (1.5 * 2.0**-9, "e4m3", {}, 0x02),
    (-(2.0**-11), "e4m3", {}, 0x80),
    (61440.0, "e5m2", {}, 0x7C),
    (np.nextafter(61440.0, 0), "e5m2", {}, 0x7B),
    (1e9, "e5m2", {"overflow": "saturate"}, 0x7B),
    (np.inf, "e5m2", {"overflow": "saturate"}, 0x7B),
    (-1e9, "e5m2", {"overflow": "nan"}, 0xFE),
    (1e9, "e5m2", {"rounding": "toward_zero"}, 0x7B),
    (np.inf, "e5m2", {"rounding": "toward_zero"}, 0x7C),
    (np.inf, "bf16", {}, 0x7F80),
    (-np.inf, "bf16", {"overflow": "nan"}, 0xFFC0),
    (1e300, "bf16", {}, 0x7F80),
    (5e-324, "bf16", {}, 0x0000),
    (-5e-324, "bf16", {}, 0x8000),
    (2.0**-134, "bf16", {}, 0x0000),
    (np.nextafter(2.0**-134, 1), "bf16", {}, 0x0001),
    (2.0**-126 * (1 - 2.0**-9), "bf16", {}, 0x0080),
    (6.1, "e2m1", {}, 0x7),
    (-np.inf, "e2m1", {}, 0xF),
    (np.nan, "e2m1", {}, 0x7),
    (0.25, "e2m1", {}, 0x0),
    (0.75, "e2m1", {}, 0x2),
    (1.25, "e2m1", {}, 0x2),
    (1.75, "e2m1", {}, 0x4),
    (2.5, "e2m1", {}, 0x4),
    (3.5, "e2m1", {}, 0x6),
    (5.0, "e2m1", {}, 0x6),
    (-0.2, "e2m1", {}, 0x8),
    (65279.9, "e5m6", {}, 0x7BF),
    (65280.0, "e5m6", {}, 0x7C0),
    (-1e9, "e5m6", {"overflow": "saturate"}, 0xFBF),
    (-np.inf, "e5m6", {"overflow": "nan"}, 0xFE0),
    (2.0**-21, "e5m6", {}, 0x000),
    (2.0**-14 * (1 - 2.0**-7), "e5m6", {}, 0x040),
    (1.0, "e8m0", {}, 127),
    (1.0, "e8m0", {"rounding": "up"}, 127),
    (np.nextafter(1.0, 2), "e8m0", {"rounding": "up"}, 128),
    (np.nextafter(2.0, 0), "e8m0", {"rounding": "toward_zero"}, 127),
    (1.5, "e8m0", {}, 128),
    (np.nextafter(1.5, 0), "e8m0", {}, 127),
    (0.0, "e8m0", {}, 0),
    (-0.0, "e8m0", {"rounding": "up"}, 0),
    (2.0**-127, "e8m0", {}, 0),
    (2.0**-200, "e8m0", {}, 0),
    (1.5 * 2.0**-127, "e8m0", {"rounding": "up"}, 1),
    (-1.0, "e8m0", {}, 255),
    (np.nan, "e8m0", {}, 255),
    (np.inf, "e8m0", {}, 255),
    (np.inf, "e8m0", {"overflow": "saturate"}, 254),
    (2.0**127, "e8m0", {"rounding": "up"}, 254),
    (1.2 * 2.0**127, "e8m0", {"rounding": "up"}, 255),
    (1.2 * 2.0**127, "e8m0", {"rounding": "up", "overflow": "saturate"}, 254),
    (1.2 * 2.0**127, "e8m0", {"rounding": "toward_zero"}, 254),
    (65520.0, "fp16", {}, 0x7C00),
    (65519.0, "fp16", {}, 0x7BFF),
    (1e9, "fp16", {"overflow": "saturate"}, 0x7BFF),
    (-np.inf, "fp16", {"overflow": "saturate"}, 0xFBFF),
    (1e9, "fp16", {"rounding": "toward_zero"}, 0x7BFF),
    (2.0**-25, "fp16", {}, 0x0000),
    (1.0 - 2.0**-30, "fp32", {"rounding": "toward_zero"}, 0x3F7FFFFF),
    (1.0 - 2.0**-30, "fp32", {}, 0x3F800000),
    (-1e39, "fp32", {}, 0xFF800000),
    (-1e39, "fp32", {"overflow": "saturate"}, 0xFF7FFFFF),
    (1e39, "fp32", {"overflow": "nan"}, 0x7FC00000),
    (-0.0, "fp32", {}, 0x80000000),
    (2.5, "int32", {}, 2),
    (3.5, "int32", {}, 4),
    (-3.7, "int8", {"rounding": "toward_zero"}, 0xFD),
    (300.0, "int8", {}, 127),
    (-300.0, "uint8", {}, 0),
    (1e30, "int64", {}, 2**63 - 1),
    (-1e30, "int64", {}, 2**63),
    (1e10, "int32", {}, 2**31 - 1),
    (np.inf, "uint32", {}, 2**32 - 1),
    (0.5, "bool", {}, 1),
    (0.0, "bool", {}, 0),
]


@pytest.mark.parametrize(("value", "fmt", "options", "code"), ENCODE_EDGES)
def test_edges_of_encoding(value, fmt, options, code):
    for shaped in (np.float64(value), np.full((2, 3), value), np.full(40000, value)):
        got = codec.encode(shaped, fmt, **options)
        assert got.dtype == CODE_DTYPES[fmt]
        assert got.shape == np.shape(shaped)
        assert np.all(codec.bits(got) == code), (codec.bits(got).flat[0], code)


@pytest.mark.parametrize("fmt", [f for f in (*SIGNED, "fp32", "fp64") if f != "e2m1"])
def test_nan_stays_nan_with_its_sign_whatever_the_payload(fmt):
    payloads = np.array([0x7FF8000000000000, 0x7FF0000000000001, 0xFFF8000000000000, 0xFFFFFFFFFFFFFFFF], np.uint64)
    for options in ({}, {"rounding": "toward_zero"}, {"overflow": "saturate"}):
        got = codec.encode(payloads.view(np.float64), fmt, **options)
        assert codec.is_nan(got, fmt).all()
        sign = codec.bits(got) & FLOATS[fmt].sign_bit
        np.testing.assert_array_equal(sign != 0, [False, False, True, True])


@pytest.mark.parametrize(
    ("fmt", "options"),
    [("bf16", {"rounding": "up"}), ("e4m3", {"overflow": "inf"}), ("e2m1", {"overflow": "nan"}),
     ("int8", {"overflow": "inf"}), ("bf16", {"rounding": "odd"}), ("bf16", {"overflow": "wrap"})],
)
def test_modes_a_format_lacks_are_refused(fmt, options):
    with pytest.raises(ValueError, match=fmt):
        codec.encode(np.ones(3), fmt, **options)


def test_misuse_is_named():
    with pytest.raises(ValueError, match="NaN has no code"):
        codec.encode(np.array([np.nan]), "int32")
    with pytest.raises(ValueError, match="16 codes, got 16"):
        codec.decode(np.array([16], np.uint8), "e2m1")
    with pytest.raises(ValueError, match="4096 codes, got 4096"):
        codec.decode(np.array([4096], np.uint16), "e5m6")
    with pytest.raises(TypeError, match="uint16"):
        codec.decode(np.zeros(3), "bf16")
    with pytest.raises(KeyError, match="unknown format 'fp12'"):
        codec.decode(np.zeros(3), "fp12")


def test_every_format_of_the_protocol_is_known():
    for fmt in FORMATS:
        codes = np.zeros((2, 0), CODE_DTYPES[fmt])
        assert codec.decode(codes, fmt).shape == (2, 0)
        assert codec.encode(np.ones((2, 4)), fmt).dtype == FORMATS[fmt].codes


# --- views, limits, units ---------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["bool", "i1", "u1", "i2", "u2", "f2", "i4", "u4", "f4", "i8", "u8", "f8"])
def test_bits_of_any_shape_is_a_view_of_the_same_bytes(dtype):
    base = np.arange(24).astype(dtype).reshape(4, 6)
    for a in (base, base[::2, 1::3], base.T, base[1, 1], np.asarray(base[0, 0]), base[:0], np.zeros((3, 0), dtype)):
        got = codec.bits(a)
        assert got.shape == a.shape
        assert got.dtype == f"u{base.itemsize}"
        assert got.tobytes() == a.tobytes()
    assert np.shares_memory(codec.bits(base[::2]), base)


def test_bits_refuses_what_has_no_unsigned_twin():
    with pytest.raises(TypeError, match="complex128"):
        codec.bits(np.zeros(2, complex))


@pytest.mark.parametrize("fmt", SMALL)
def test_limits_are_those_of_the_codes(fmt):
    values = codec.decode(all_codes(fmt), fmt)
    finite = values[np.isfinite(values)]
    assert codec.max_finite(fmt) == finite.max()
    assert codec.min_subnormal(fmt) == finite[finite > 0].min()


def test_the_overflow_threshold_is_the_first_to_become_infinite():
    for fmt in (*WITH_INFINITY, "fp32"):
        t = codec.overflow_threshold(fmt)
        assert np.isinf(codec.round_to(np.float64(t), fmt))
        assert codec.round_to(np.nextafter(np.float64(t), 0), fmt) == codec.max_finite(fmt)
    for fmt in ("e4m3", "e2m1x2_lo", "e8m0", "fp64", "int32", "bool"):
        assert codec.overflow_threshold(fmt) == np.inf


@pytest.mark.parametrize("fmt", SIGNED)
def test_ulp_is_the_gap_to_the_next_number(fmt):
    numbers = codec.decode(finite_codes(fmt), fmt)
    gaps = np.diff(numbers)
    np.testing.assert_array_equal(codec.ulp(numbers[:-1], fmt), gaps)
    np.testing.assert_array_equal(codec.ulp(-np.nextafter(numbers[1:], 0), fmt), gaps)
    np.testing.assert_array_equal(codec.half_ulp(numbers[:-1] + gaps / 4, fmt), gaps / 2)


def test_ulp_of_what_is_no_number_of_the_format():
    np.testing.assert_array_equal(codec.ulp(np.array([np.inf, -np.inf, np.nan]), "bf16"), [np.inf, np.inf, np.nan])
    assert codec.ulp(np.float64(1e300), "e4m3") == 2.0 ** (np.frexp(1e300)[1] - 4)
    np.testing.assert_array_equal(codec.ulp(np.array([1.0, 0.0, np.inf]), "fp64"), [2.0**-52, 5e-324, np.inf])
    np.testing.assert_array_equal(codec.half_ulp(np.array([3, -7]), "int32"), [0.5, 0.5])
