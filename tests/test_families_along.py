"""Families work along the axis that an op sums over."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.engine.arrays import Draw
from conformance.engine.families import FAMILIES, make
from conformance.model import Problem, Variant
from references.formats import codec


def draw(shape: tuple[int, ...], along: int, position: int = 0, seed: int = 5, out: str = "bf16") -> Draw:
    problem = Problem("x", Variant({"out": out}), {}, {}, "normal", seed)
    return Draw("a", position, shape, "bf16", problem, seed + position, along=along)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (2, 3, 4), (0, 3), (7,)])
def test_another_axis_is_the_same_data_turned(family: str, shape: tuple[int, ...]) -> None:
    turned = shape if len(shape) < 2 else (*shape[:-2], shape[-1], shape[-2])
    want = make(draw(turned, -1), family)
    got = make(draw(shape, -2 if len(shape) > 1 else -1), family)
    assert got.shape == shape
    np.testing.assert_array_equal(codec.bits(got), codec.bits(want if len(shape) < 2 else np.swapaxes(want, -1, -2)))


def test_one_hot_has_one_element_a_line() -> None:
    x = codec.decode(make(draw((6, 9), -2), "one_hot"), "bf16")
    np.testing.assert_array_equal(x.sum(axis=0), np.ones(9))


@pytest.mark.parametrize(("along_a", "along_b"), [(-1, -1), (-2, -1), (-1, -2), (-2, -2)])
def test_exact_products_cancel_along_k_in_any_layout(along_a: int, along_b: int) -> None:
    m, n, k = 12, 10, 64
    a, b = (codec.decode(make(draw((rows, k) if along == -1 else (k, rows), along, position), "exact"), "bf16")
            for position, rows, along in ((0, m, along_a), (1, n, along_b)))
    a, b = a if along_a == -1 else a.T, b if along_b == -1 else b.T
    c = a @ b.T
    assert np.abs(c).max() < 256
    assert (np.abs(a) @ np.abs(b).T).min() > 4 * np.abs(c).max()
    # leaving out one column moves every element by at least 1
    for column in range(k):
        assert (np.abs(c - (c - np.outer(a[:, column], b[:, column]))) >= 1).all()
