"""Formats and rules outside the table of small formats: tf32, HiF8, and the cast to e5m6 of TileKernels."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from test_formats import LAYOUTS, numbers_of, ties

from references.formats import codec, hif8
from references.formats.cut_e5m6 import encode_cut
from references.formats.spec import FLOATS

Array = np.ndarray

# --- tf32 -------------------------------------------------------------------------------------------------

TF32_INF = 255 << 10


def as_fp32(codes: Array) -> Array:
    """tf32 codes as fp32 patterns: the upper 19 bits."""
    return (codes.astype(np.uint32) << np.uint32(13)).view(np.float32)


def widened(x: Array) -> Array:
    """float64 of the same values; signalling NaNs, which some machines report, are no error here."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64)


def test_every_tf32_code_is_the_upper_19_bits_of_an_fp32():
    codes = np.arange(1 << 19, dtype=np.uint32)
    want = widened(as_fp32(codes))
    got = codec.decode(codes, "tf32")
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(codec.is_nan(codes, "tf32"), np.isnan(want))
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number])
    for rounding in ("nearest_even", "toward_zero"):
        again = codec.encode(got, "tf32", rounding=rounding)
        np.testing.assert_array_equal(again[number], codes[number])
        assert codec.is_nan(again[~number], "tf32").all()


def test_every_tf32_tie_and_its_neighbours():
    """A tie is the fp32 pattern halfway between: bit 12 alone. In float64, one step to each side of it."""
    codes = np.arange(TF32_INF, dtype=np.uint32)
    numbers = as_fp32(codes).astype(np.float64)
    tie = ((codes << np.uint32(13)) | np.uint32(1 << 12)).view(np.float32).astype(np.float64)
    for x, near in ((tie, codes + (codes & 1)), (np.nextafter(tie, 0), codes), (np.nextafter(tie, np.inf), codes + 1)):
        assert np.all(x > numbers)
        for sign, flip in ((1, 0), (-1, 1 << 18)):
            np.testing.assert_array_equal(codec.encode(sign * x, "tf32"), near | flip)
            np.testing.assert_array_equal(codec.encode(sign * x, "tf32", rounding="toward_zero"), codes | flip)
            np.testing.assert_array_equal(codec.encode(sign * x, "tf32", overflow="saturate"),
                                          np.minimum(near, TF32_INF - 1) | flip)


def test_tf32_from_fp32_is_an_integer_addition_to_the_pattern():
    """Nearest even by the well-known sum on the pattern, truncation by a shift: random fp32, of every exponent."""
    pattern = np.random.default_rng(2).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    pattern = pattern[(pattern & 0x7F800000) != 0x7F800000]
    x = pattern.view(np.float32)
    odd = (pattern >> np.uint32(13)) & np.uint32(1)
    near = (pattern + np.uint32(0xFFF) + odd) >> np.uint32(13)
    np.testing.assert_array_equal(codec.encode(x, "tf32"), near)
    np.testing.assert_array_equal(codec.encode(x, "tf32", rounding="toward_zero"), pattern >> np.uint32(13))
    away = (pattern + np.uint32(0x1000)) >> np.uint32(13)
    assert np.any(away != near)  # ties away from zero, another rule of this conversion, would be seen


@pytest.mark.parametrize(("value", "options", "code"), [
    (np.inf, {}, TF32_INF), (-np.inf, {"overflow": "saturate"}, 0x40000 | (TF32_INF - 1)), (np.nan, {}, 0x3FE00),
    (1e39, {}, TF32_INF), (1e39, {"overflow": "nan"}, 0x3FE00), (1e39, {"rounding": "toward_zero"}, TF32_INF - 1),
    (-0.0, {}, 0x40000), (1.0, {}, 0x1FC00), (2.0**-136, {}, 1), (2.0**-137, {}, 0),
    (np.nextafter(2.0**-137, 1), {}, 1),
])
def test_edges_of_tf32(value, options, code):
    assert codec.encode(np.float64(value), "tf32", **options) == code


def test_limits_of_tf32():
    assert codec.max_finite("tf32") == 2.0**127 * (2 - 2.0**-10)
    assert codec.min_subnormal("tf32") == 2.0**-136
    assert codec.overflow_threshold("tf32") == 2.0**127 * (2 - 2.0**-11)
    assert codec.ulp(np.float64(1.0), "tf32") == 2.0**-10
    with pytest.raises(ValueError, match="524288 codes, got 524288"):
        codec.decode(np.array([1 << 19], np.uint32), "tf32")


# --- HiF8 -------------------------------------------------------------------------------------------------

HIF8_ROWS = [
    # how a code begins, exponents in the order of the codes, bits of the fraction: the paper's table of dot fields
    ("0001", [0], 3),
    ("001", [1, -1], 3),
    ("01", [2, 3, -2, -3], 3),
    ("10", [4, 5, 6, 7, -4, -5, -6, -7], 2),
    ("11", [8, 9, 10, 11, 12, 13, 14, 15, -8, -9, -10, -11, -12, -13, -14, -15], 1),
]


def test_every_hif8_code_has_the_value_of_the_published_table():
    want: dict[int, Fraction] = {m: Fraction(2) ** (m - 23) for m in range(1, 8)} | {0: Fraction(0)}
    for dot, exponents, bits in HIF8_ROWS:
        first = int(dot, 2) << (7 - len(dot))
        for i, e in enumerate(exponents):
            for f in range(1 << bits):
                want[first + (i << bits) + f] = (1 + Fraction(f, 1 << bits)) * Fraction(2) ** e
    assert sorted(want) == list(range(128))
    assert want.pop(hif8.INF_CODE) == max(want.values()) * Fraction(3, 2)  # infinity takes the place of the largest
    got = hif8.decode(np.arange(256, dtype=np.uint8))
    for code, value in want.items():
        assert Fraction(float(got[code])) == value
        if code:
            assert Fraction(float(got[code | hif8.SIGN_BIT])) == -value
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(got)), [hif8.NAN_CODE])
    np.testing.assert_array_equal(got[[hif8.INF_CODE, hif8.INF_CODE | hif8.SIGN_BIT]], [np.inf, -np.inf])
    assert not np.signbit(got[got == 0]).any()


def test_hif8_has_the_shape_that_its_abstract_tells():
    """7 exponents with 3 bits of fraction, 8 with 2, 16 with 1, then 7 powers of two: 38 binades; no value twice."""
    got = hif8.decode(np.arange(256, dtype=np.uint8))
    finite = got[np.isfinite(got)]
    assert len(set(finite)) == len(finite) == 253
    exponents, counts = np.unique(np.frexp(finite[finite > 0])[1] - 1, return_counts=True)
    np.testing.assert_array_equal(exponents, np.arange(-22, 16))
    by_width = dict(zip(*np.unique(counts, return_counts=True), strict=True))
    assert by_width == {8: 7, 4: 8, 2: 15, 1: 8}  # the last of the 16 has lost its upper half to infinity
    assert (finite.max(), finite[finite > 0].min()) == (2.0**15, 2.0**-22)


def test_hif8_codes_are_bytes():
    assert hif8.decode(np.full((2, 3), 0x08, np.uint8)).tolist() == [[1.0] * 3] * 2
    with pytest.raises(TypeError, match="int8"):
        hif8.decode(np.zeros(2, np.int8))


# --- TileKernels' cast to e5m6 ----------------------------------------------------------------------------

SMALLEST_NORMAL = np.float32(2.0**-14)


def test_e5m6_is_the_upper_12_bits_of_fp16():
    codes = np.arange(1 << 12, dtype=np.uint16)
    np.testing.assert_array_equal(codec.decode(codes, "e5m6"), widened((codes << np.uint16(4)).view(np.float16)))


def fp32_around_ties() -> Array:
    """Every e5m6 number and tie below 2**16 and one fp32 to each side, both signs."""
    x, _, place = ties("e5m6")
    x = x[(place == 0) | (place == 2)].astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(1e9))])
    return np.concatenate([x, -x])


def test_the_cut_is_nearest_even_for_normal_numbers():
    x = fp32_around_ties()
    normal = np.abs(x) >= SMALLEST_NORMAL
    np.testing.assert_array_equal(encode_cut(x[normal]), codec.encode(x[normal], "e5m6"))
    numbers = codec.decode(np.arange(0x7C0, dtype=np.uint16), "e5m6").astype(np.float32)
    np.testing.assert_array_equal(encode_cut(numbers[numbers >= SMALLEST_NORMAL]), np.arange(0x40, 0x7C0))


def test_the_cut_gives_one_of_the_two_neighbours_below_but_not_always_the_nearer():
    rng = np.random.default_rng(4)
    x = np.concatenate([fp32_around_ties(), (rng.random(20_000) * 2.0**-14).astype(np.float32)])
    x = x[np.abs(x) < SMALLEST_NORMAL]
    cut = encode_cut(x)
    down = codec.encode(x, "e5m6", rounding="toward_zero")
    assert set(np.unique(cut.astype(int) - down)) == {0, 1}
    assert np.any(cut != codec.encode(x, "e5m6"))


def test_the_cut_as_arithmetic_on_the_pattern():
    """Each step of the rule in exact arithmetic: the number towards zero, then the low 17 bits of the fp32 pattern."""
    layout, numbers = LAYOUTS["e5m6"], numbers_of("e5m6")
    x = np.concatenate([fp32_around_ties(), np.float32([0.0, -0.0, 2.0**-149, 2.0**-20, 3 * 2.0**-22, 65024, 65503])])
    low = np.searchsorted(numbers, np.abs(x), side="right") - 1
    due = []
    for v, i in zip(x, low, strict=True):
        tail = int(v.view(np.uint32)) % 2**17
        up = tail > 2**16 or (tail == 2**16 and i % 2 == 1)
        due.append((int(i) + up) | (layout.sign_bit if np.signbit(v) else 0))
    np.testing.assert_array_equal(encode_cut(x), due)


@pytest.mark.parametrize(("values", "error"), [
    (np.zeros(2), TypeError), (np.float32([65536]), ValueError), (np.float32([np.nan]), ValueError),
    (np.float32([-np.inf]), ValueError),
])
def test_what_the_cut_does_not_cover_is_refused(values, error):
    with pytest.raises(error, match=r"fp32|65536"):
        encode_cut(values)


def test_e5m6_has_the_largest_number_that_tilekernels_scales_to():
    assert codec.max_finite("e5m6") == 65024
    assert FLOATS["e5m6x8"] is FLOATS["e5m6"]
