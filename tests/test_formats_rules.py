"""Rounding and overflow rules: stochastic rounding, and wrong encoders, each of which must be seen to differ."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from test_formats import LAYOUTS, SIGNED, WITH_INFINITY, as_codes, numbers_of, ties, value_of

from references.formats import codec
from references.formats.spec import CODE_DTYPES
from references.formats.stochastic import encode_stochastic

Array = np.ndarray

# --- stochastic -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fmt", SIGNED)
def test_at_every_tie_one_random_bit_decides(fmt):
    """One bit takes part: half or more of a step goes up with a 1, and nothing does with a 0."""
    layout = LAYOUTS[fmt]
    x, low, place = ties(fmt)
    for bit in (0, 1):
        index = np.minimum(low + (bit & (place >= 2)), layout.finite - 1)
        for sign, flip in ((1, 0), (-1, layout.sign_bit)):
            got = encode_stochastic(sign * x, fmt, np.uint32(bit), n_bits=1, overflow="saturate")
            assert got.dtype == CODE_DTYPES[fmt]
            np.testing.assert_array_equal(codec.bits(got), index | flip)


@pytest.mark.parametrize("fmt", SIGNED)
def test_stochastic_rounding_is_the_carry_of_an_exact_sum(fmt):
    layout, rng = LAYOUTS[fmt], np.random.default_rng(3)
    numbers = numbers_of(fmt)
    low = np.concatenate([[0, layout.finite - 1], rng.integers(0, layout.finite, 200)])
    x = numbers[low] + rng.random(len(low)) * (numbers[low + 1] - numbers[low])
    x = np.where(x < numbers[low + 1], x, numbers[low])
    for n_bits in (1, 7, 16, 32):
        random = rng.integers(0, 1 << n_bits, len(x), dtype=np.uint64)
        due = []
        for v, i, r in zip(x, low, random, strict=True):
            step = value_of(layout, int(i) + 1) - value_of(layout, int(i))
            part = (Fraction(v) - value_of(layout, int(i))) / step
            due.append(min(int(i) + (int(part * 2**n_bits) + int(r) >= 2**n_bits), layout.finite - 1))
        got = encode_stochastic(x, fmt, random, n_bits=n_bits, overflow="saturate")
        np.testing.assert_array_equal(codec.bits(got), due)


def test_bf16_from_fp32_is_the_sum_of_pattern_and_random_bits_cut_off():
    """With 16 bits nothing is lost: an integer addition to the fp32 pattern. Every exponent, both signs."""
    rng = np.random.default_rng(5)
    pattern = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    pattern = pattern[(pattern & 0x7F800000) != 0x7F800000]
    random = rng.integers(0, 1 << 16, len(pattern), dtype=np.uint32)
    got = encode_stochastic(pattern.view(np.float32), "bf16", random, n_bits=16)
    np.testing.assert_array_equal(got, (pattern + random) >> 16)


def test_of_all_random_numbers_as_many_round_up_as_the_fraction_says():
    for steps in (0, 1, 77, 128, 255):
        x = 1.0 + (steps / 256) * 2.0**-3
        got = codec.decode(encode_stochastic(np.float64(x), "e4m3", np.arange(256), n_bits=8), "e4m3")
        assert set(got) <= {1.0, 1.125}
        assert np.count_nonzero(got == 1.125) == steps
        assert got.mean() == x  # without bias


@pytest.mark.parametrize("fmt", SIGNED)
def test_what_the_format_holds_stays_whatever_the_random_bits(fmt):
    numbers = numbers_of(fmt)[:-1]
    codes = as_codes(np.arange(len(numbers)), fmt)
    for r in (0, 1, 0xFFFF):
        np.testing.assert_array_equal(encode_stochastic(numbers, fmt, np.int64(r), n_bits=16), codes)
        odd = np.array([np.inf, -np.inf, np.nan, -0.0])
        np.testing.assert_array_equal(codec.bits(encode_stochastic(odd, fmt, np.int64(r), n_bits=16)),
                                      codec.bits(codec.encode(odd, fmt)))


@pytest.mark.parametrize(("value", "fmt", "overflow", "random", "code"), [
    (464.0, "e4m3", None, 0xFF, 0x7E), (464.0, "e4m3", "nan", 0x7F, 0x7E), (464.0, "e4m3", "nan", 0x80, 0x7F),
    (-1e9, "e4m3", "nan", 0, 0xFF), (-1e9, "e4m3", None, 0, 0xFE), (7.9, "e2m1", None, 0xFF, 0x7),
    (65536.0, "e5m2", None, 0, 0x7C), (65536.0, "e5m2", "saturate", 0xFF, 0x7B), (57344.0, "e5m2", None, 0xFF, 0x7B),
    (60000.0, "e5m2", None, 0, 0x7B), (60000.0, "e5m2", None, 0xFF, 0x7C), (-60000.0, "e5m2", "nan", 0xFF, 0xFE),
    (1e39, "fp32", None, 0, 0x7F800000), (1.0 + 2.0**-24, "fp32", None, 0x7F, 0x3F800000),
    (1.0 + 2.0**-24, "fp32", None, 0x80, 0x3F800001), (-1e5, "fp16", "saturate", 0, 0xFBFF),
    (1.0 + 2.0**-11, "tf32", None, 0x80, 0x1FC01), (1.0 / 3.0, "fp64", None, 0xFF, 0x3FD5555555555555),
])
def test_edges_of_stochastic_rounding(value, fmt, overflow, random, code):
    got = encode_stochastic(np.full((2, 3), value), fmt, np.uint8(random), n_bits=8, overflow=overflow)
    assert got.shape == (2, 3)
    assert got.dtype == CODE_DTYPES[fmt]
    assert np.all(codec.bits(got) == code), codec.bits(got)


@pytest.mark.parametrize(("fmt", "random", "options", "said"), [
    ("e8m0", 0, {"n_bits": 8}, "e8m0"), ("int8", 0, {"n_bits": 8}, "int8"), ("bf16", 256, {"n_bits": 8}, "0 to"),
    ("bf16", -1, {"n_bits": 8}, "0 to"), ("bf16", 0.5, {"n_bits": 8}, "float64"),
    ("bf16", 0, {"n_bits": 0}, "n_bits=0"), ("bf16", 0, {"n_bits": 33}, "n_bits=33"),
    ("e4m3", 0, {"n_bits": 8, "overflow": "inf"}, "e4m3"),
])
def test_misuse_of_stochastic_rounding_is_refused(fmt, random, options, said):
    with pytest.raises(ValueError, match=said):
        encode_stochastic(np.ones(3), fmt, np.array(random), **options)


# --- wrong encoders ---------------------------------------------------------------------------------------

def probes(fmt: str) -> Array:
    """Every tie and its neighbours, both signs, and what lies beyond the numbers."""
    x = ties(fmt)[0]
    beyond = numbers_of(fmt)[-1] * np.array([1.0, 1.5, 2.0, 4.0])
    return np.concatenate([x, -x, beyond, -beyond, [np.inf, -np.inf]])


def by_search(x: Array, fmt: str, goes_up: Callable[[Array, Array], Array], beyond: int) -> Array:
    """Codes by a search among the numbers: what goes up is told by the part of a step [0, 1) and the lower index."""
    layout, numbers = LAYOUTS[fmt], numbers_of(fmt)
    size = np.minimum(np.abs(x), numbers[-1])
    low = np.minimum(np.searchsorted(numbers, size, side="right") - 1, layout.finite - 1)
    part = (size - numbers[low]) / (numbers[low + 1] - numbers[low])
    index = low + goes_up(part, low)
    return np.where(index == layout.finite, beyond, index) | np.where(np.signbit(x), layout.sign_bit, 0)


def up_even(part: Array, low: Array) -> Array:
    return (part > 0.5) | ((part == 0.5) & (low % 2 == 1))


def last(fmt: str) -> int:
    return LAYOUTS[fmt].finite - 1


def no_subnormals(x: Array, fmt: str) -> Array:
    smallest = numbers_of(fmt)[1 << LAYOUTS[fmt].fraction_bits]
    return np.where(np.abs(x) < smallest, np.copysign(0.0, x), x)


WRONG = {
    "truncates": lambda x, f: by_search(x, f, lambda part, low: part >= 1, last(f)),
    "ties away from zero": lambda x, f: by_search(x, f, lambda part, low: part >= 0.5, last(f)),
    "ties towards zero": lambda x, f: by_search(x, f, lambda part, low: part > 0.5, last(f)),
    "ties to odd": lambda x, f: by_search(x, f, lambda p, low: (p > 0.5) | ((p == 0.5) & (low % 2 == 0)), last(f)),
    "always away from zero": lambda x, f: by_search(x, f, lambda part, low: part > 0, last(f)),
    "rounds through fp32": lambda x, f: by_search(np.float64(np.float32(x)), f, up_even, last(f)),
    "flushes subnormals": lambda x, f: by_search(no_subnormals(x, f), f, up_even, last(f)),
    "drops the sign of zero": lambda x, f: by_search(x + 0.0, f, up_even, last(f)),
    "ignores the sign": lambda x, f: by_search(np.abs(x), f, up_even, last(f)),
    "wraps at overflow": lambda x, f: by_search(x, f, up_even, 0),
}


@pytest.mark.parametrize("fmt", SIGNED)
def test_a_right_encoder_passes_where_each_wrong_one_is_seen(fmt):
    x = probes(fmt)
    right = codec.bits(codec.encode(x, fmt, overflow="saturate"))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(by_search(x, fmt, up_even, last(fmt)), right)
        missed = [name for name, wrong in WRONG.items() if np.array_equal(wrong(x, fmt), right)]
    assert missed == []


@pytest.mark.parametrize("fmt", [f for f in SIGNED if f != "e2m1"])
def test_each_overflow_rule_is_told_from_the_others(fmt):
    """Saturating where NaN or infinity is due, and the other way round, shows in the codes of what lies beyond."""
    x, layout = probes(fmt), LAYOUTS[fmt]
    beyond = {"saturate": last(fmt), "nan": layout.nan} | ({"inf": layout.infinity} if fmt in WITH_INFINITY else {})
    got = {o: codec.bits(codec.encode(x, fmt, overflow=o)) for o in beyond}
    inside = np.abs(x) <= numbers_of(fmt)[-2]
    for o, code in beyond.items():
        np.testing.assert_array_equal(got[o], by_search(x, fmt, up_even, code))
        for other in set(beyond) - {o}:
            assert np.any(got[o] != got[other])
            np.testing.assert_array_equal(got[o][inside], got[other][inside])


@pytest.mark.parametrize("fmt", SIGNED)
def test_truncation_is_told_from_rounding_that_overflows(fmt):
    """Toward zero a finite value stays finite, so only infinities take the overflow rule."""
    x, layout = probes(fmt), LAYOUTS[fmt]
    beyond = layout.infinity or layout.nan or last(fmt)
    right = codec.bits(codec.encode(x, fmt, rounding="toward_zero", overflow="inf" if layout.infinity else
                                    "nan" if layout.nan else "saturate"))
    cut = by_search(np.where(np.isinf(x), x, np.clip(x, -numbers_of(fmt)[-2], numbers_of(fmt)[-2])), fmt,
                    lambda part, low: part >= 1, beyond)
    np.testing.assert_array_equal(cut, right)
    assert np.any(by_search(x, fmt, up_even, beyond) != right)
