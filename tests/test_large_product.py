"""Products that the oracle does not compute are judged all the same."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from conformance.model import Variant
from references.deepgemm import gemm
from references.expected import Inputs, Within
from references.formats import codec
from references.large import product
from references.large.exact import exact_operands, exact_product
from references.large.product import LargeProduct

M, N, K = 160, 300, 96


def inputs(family: str, seed: int = 3) -> Inputs:
    if family == "exact":
        a, b = exact_operands(M, N, K, "bf16", seed)
    else:
        rng = np.random.default_rng(seed)
        a, b = (codec.encode(rng.standard_normal(s), "bf16") for s in ((M, K), (N, K)))
    return Inputs({"a": a, "b": b}, {"a": "bf16", "b": "bf16"})


def expected(family: str, given: Inputs, monkeypatch: pytest.MonkeyPatch, c: str = "none",
             profile: dict[str, str] | None = None, **values: float) -> object:
    monkeypatch.setattr(gemm, "LARGE", 2**10)
    problem = SimpleNamespace(variant=Variant({"out": "bf16", "c": c}), family=family, values=values, sizes={}, seed=3)
    return gemm.bf16_gemm_nt(problem, given, profile or {})["d"]


def right(family: str, given: Inputs) -> np.ndarray:
    if family == "exact":
        return exact_product(M, N, K, "bf16", 3)
    return codec.encode(given.real("a") @ given.real("b").T, "bf16")


@pytest.mark.parametrize("family", ["exact", "normal", "positive"])
def test_right_products_pass(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(family)
    want = expected(family, given, monkeypatch)
    assert isinstance(want, LargeProduct)
    assert want.shape == (M, N)
    assert want.judge(right(family, given), "bf16").ok


@pytest.mark.parametrize("seed", range(8))
def test_any_wrong_element_of_exact_data_is_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs("exact")
    codes = right("exact", given)
    rng = np.random.default_rng(seed)
    i, j = int(rng.integers(M)), int(rng.integers(N))
    codes[i, j] ^= 1 << int(rng.integers(16))
    changed = codec.decode(codes, "bf16") != codec.decode(right("exact", given), "bf16")
    judged = expected("exact", given, monkeypatch).judge(codes, "bf16")
    np.testing.assert_array_equal(judged.bad, changed)
    assert judged.ok is not changed.any()


@pytest.mark.parametrize("place", [(0, 0), (M - 1, N - 1), (127, 5), (128, 200), (70, 255), (3, 256)])
def test_wrong_elements_beside_edges_are_found_in_any_data(place: tuple[int, int],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs("normal")
    codes = right("normal", given)
    codes[place] ^= 0x80
    judged = expected("normal", given, monkeypatch).judge(codes, "bf16")
    assert judged.bad[place]
    assert judged.bad.sum() == 1


def test_everything_wrong_takes_no_whole_product(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs("exact")
    want = expected("exact", given, monkeypatch)
    monkeypatch.setattr(product, "EXAMINED", 2**10)
    judged = want.judge(codec.encode(np.zeros((M, N)), "bf16"), "bf16")
    assert judged.bad.mean() > 0.99
    assert "each holds a wrong element" in judged.note


@pytest.mark.parametrize(("c", "profile", "values"), [
    ("apart", {}, {}), ("none", {"subnormals": "flush"}, {}), ("none", {"partial": "bf16"}, {}),
    ("none", {}, {"alpha": 2.0})])
def test_the_rest_is_computed(c: str, profile: dict[str, str], values: dict[str, float],
                              monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs("normal")
    if c != "none":
        codes = codec.encode(np.zeros((M, N)), "bf16")
        given = Inputs({"a": given.codes("a"), "b": given.codes("b"), "c": codes},
                       {"a": "bf16", "b": "bf16", "c": "bf16"})
    assert isinstance(expected("normal", given, monkeypatch, c, profile, **values), Within)


def test_special_values_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs("normal")
    given.codes("a")[0, 0] = 0x7FC0
    assert isinstance(expected("nans", given, monkeypatch), Within)


def test_what_is_not_finite_is_found_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "AT_RANDOM", 0)
    given = inputs("normal")
    want = expected("normal", given, monkeypatch)
    unseen = np.argwhere(want.unspecified)
    assert 0 < len(unseen) < M * N
    for place, code in zip(map(tuple, unseen[:: len(unseen) // 4]), (0x7FC0, 0x7F80, 0xFF80, 0xFFC1), strict=False):
        codes = right("normal", given)
        codes[place] = code
        np.testing.assert_array_equal(np.argwhere(want.judge(codes, "bf16").bad), [place])


def test_only_what_is_looked_at_counts_as_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "AT_RANDOM", 0)
    given = inputs("normal")
    want = expected("normal", given, monkeypatch)
    wrong = right("normal", given) ^ np.uint16(0x80)
    np.testing.assert_array_equal(want.judge(wrong, "bf16").bad, ~want.unspecified)
    assert expected("exact", inputs("exact"), monkeypatch).unspecified is None
