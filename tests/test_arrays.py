"""Generators and data families: frozen, exact, and showing what they promise."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from conformance.engine.arrays import Draw, words
from conformance.engine.families import FAMILIES, make
from conformance.model import Problem, Variant
from references.formats import codec

FORMATS = ("bf16", "fp32", "fp16")
PROBLEM = Problem("m.f", Variant({}), {}, {}, "normal", 1)


def draw(fmt: str, shape: tuple[int, ...] = (6, 40), seed: int = 12345, position: int = 0) -> Draw:
    return Draw("a", position, shape, fmt, PROBLEM, seed)


def test_words_are_those_of_splitmix64() -> None:
    # Values of the published generator for seed 1.
    assert [int(w) for w in words(1, 3)] == [0x910A2DEC89025CC1, 0xBEEB8DA1658EEC67, 0xF893A2EEFB32555E]


def test_words_do_not_depend_on_how_many() -> None:
    assert np.array_equal(words(9, 100)[:7], words(9, 7))


def test_normal_has_mean_0_and_deviation_1() -> None:
    x = draw("fp32", (400, 500)).normal()
    assert abs(x.mean()) < 0.01
    assert abs(x.std() - 1) < 0.01
    assert 3 < np.abs(x).max() < 7


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("fmt", FORMATS)
def test_family_gives_codes_and_is_the_same_again(family: str, fmt: str) -> None:
    one, two = make(draw(fmt), family), make(draw(fmt), family)
    assert one.shape == (6, 40)
    assert codec.bits(one).tobytes() == codec.bits(two).tobytes()
    assert one.dtype == two.dtype
    nan = codec.is_nan(one, fmt)
    assert nan.any() == (family == "nans")


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (1, 1), (5,), (2, 3, 4)])
def test_family_takes_any_shape(family: str, shape: tuple[int, ...]) -> None:
    assert make(draw("bf16", shape), family).shape == shape


def test_frozen_bits() -> None:
    """Published problems must rebuild the same bits for ever: a change here breaks every kept problem."""
    h = hashlib.sha256()
    for family in ("normal", "integers", "ill_scaled", "zeros", "nans", "powers"):
        h.update(codec.bits(make(draw("bf16"), family)).tobytes())
    assert h.hexdigest() == "2be9904dd8e41e9655802ccfc2fe2bb806e65c071982ab3c29fbf12b45408f96"


def test_wide_arrays_leave_the_range_of_fp16_and_their_products_stay_near_1() -> None:
    for seed in (0, 1):
        problem = replace(PROBLEM, seed=seed)
        a, b = (codec.decode(make(replace(draw("bf16", position=n), problem=problem), "wide"), "bf16") for n in (0, 1))
        assert np.median(np.abs(a)) > 2.0**17 if seed == 0 else np.median(np.abs(a)) < 2.0**-25
        assert 2.0**-3 < np.abs(a).std() * np.abs(b).std() < 8


def test_cancellation_cancels() -> None:
    a = codec.decode(make(draw("fp32"), "cancellation"), "fp32")
    b = codec.decode(make(draw("fp32", seed=99, position=1), "cancellation"), "fp32")
    assert np.median(np.abs((a * b).sum(1)) / (np.abs(a) * np.abs(b)).sum(1)) < 0.05


def test_one_hot_rows_have_one_element() -> None:
    a = codec.decode(make(draw("fp32"), "one_hot"), "fp32")
    assert (np.count_nonzero(a, axis=1) == 1).all()


def test_nans_hit_the_first_row_in_both_signs_over_seeds() -> None:
    seen = set()
    for seed in range(40):
        codes = make(draw("bf16", seed=seed), "nans")
        assert codec.is_nan(codes, "bf16")[0].any()
        seen |= set(codec.bits(codes)[codec.is_nan(codes, "bf16")].tolist())
    assert {0x7FC0, 0xFFC0} <= seen


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("k", [1, 8, 584])
def test_overflow_rows_sum_below_at_and_past_the_range(fmt: str, k: int) -> None:
    a, b = (codec.decode(make(draw(fmt, (64, k), seed=7 + n, position=n), "overflow"), fmt) for n in (0, 1))
    sums = np.abs(a @ b.T) / codec.overflow_threshold(fmt)
    assert (sums < 0.9).mean() > 0.1
    assert (sums > 1.1).mean() > 0.1
    assert (np.abs(sums - 1) < 0.05).any()
    if k > 1:  # past what rounds to the largest number, but below the power of two behind it
        behind = 2.0 ** np.ceil(np.log2(codec.max_finite(fmt))) / codec.overflow_threshold(fmt)
        assert ((sums > 1) & (sums < behind)).mean() > 0.2
    assert np.array_equal(np.abs(a @ b.T), np.abs(a) @ np.abs(b).T)  # of one sign, so that no order matters


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
def test_scale_edges_lie_at_and_a_step_beside_powers_of_two(fmt: str) -> None:
    x = codec.decode(make(draw(fmt, (400, 128)), "scale_edges"), fmt)
    largest = np.abs(x).reshape(400, 8, 16).max(axis=2)
    assert (largest == largest[:, :1]).all()  # every group of 16, 32, 64 or 128 columns turns at the same power
    step = 2.0 ** (1 - {"bf16": 8, "fp32": 24}[fmt])
    beside = {m: largest[:, 0] / m for m in (448.0, 6.0)}
    exponents = set()
    for scaled in beside.values():
        fraction = np.exp2(np.log2(scaled) - np.round(np.log2(scaled)))
        near = np.abs(fraction - 1) < 3 * step
        assert (fraction[near] == 1).any()
        assert (fraction[near] > 1).any()
        assert (fraction[near] < 1).any()
        exponents |= set(np.round(np.log2(scaled[near])).astype(int))
    assert min(exponents) < -15
    assert max(exponents) > 15
