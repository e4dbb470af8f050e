"""Declared units and conversions: a kernel that computes as its profile says is right, one that does less is not."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adapters.cpu.kernels.accumulators import unit_of
from conformance.model import Variant
from references.deepgemm.gemm import bf16_gemm_nt
from references.expected import Inputs, Within
from references.formats import codec
from references.tilelang import gemm as tilelang

TF32_DROPPED = 13
"""bits of an fp32 number that tf32 has not"""


def expected(a: np.ndarray, b: np.ndarray, fmt: str, profile: dict[str, str], family: str = "normal",
             out: str = "fp32") -> Within:
    variant = Variant({"out": out, "transpose_a": "no", "transpose_b": "no", "init": "clear"})
    problem = SimpleNamespace(variant=variant, family=family, values={}, sizes={}, seed=0)
    return tilelang.gemm(problem, Inputs({"a": a, "b": b}, {"a": fmt, "b": fmt}), profile)["c"]


def tf32(x: np.ndarray) -> np.ndarray:
    """fp32 numbers cut to tf32's bits."""
    cut = x.view(np.uint32) & np.uint32(0xFFFFFFFF << TF32_DROPPED & 0xFFFFFFFF)
    return cut.view(np.float32).astype(np.float64)


@pytest.mark.parametrize("scale", [1.0, 2.0**-120, 2.0**-134, 2.0**-149])
def test_a_declared_conversion_holds_below_the_normal_range(scale: float) -> None:
    rng = np.random.default_rng(1)
    a = (rng.integers(-6, 7, (8, 40)) * scale).astype(np.float32)
    b = rng.standard_normal((40, 8)).astype(np.float32)
    got = (tf32(a) @ tf32(b)).astype(np.float32)
    assert expected(a, b, "fp32", {"input_conversion": "tf32_trunc"}).judge(got, "fp32").ok
    if scale < 2.0**-130:
        assert not expected(a, b, "fp32", {}).judge(got, "fp32").ok


def unit_sum(a: np.ndarray, b: np.ndarray, name: str, block: int) -> np.ndarray:
    unit = unit_of(name, fp8=True)
    total = None
    left, right = (torch.tensor(codec.decode(x, "e4m3"), dtype=torch.float32) for x in (a, b))
    for k in range(0, a.shape[1], block):
        total = unit.add(total, left[:, k : k + block], right[k : k + block])
    return total.numpy()


@pytest.mark.parametrize(("name", "block"), [("hopper_unpromoted", 512), ("hopper", 128), ("hopper", 64)])
@pytest.mark.parametrize("family", ["normal", "positive"])
def test_fp8_units_of_14_bits_hold_where_they_are_declared(name: str, block: int, family: str) -> None:
    rng = np.random.default_rng(2)
    a, b = (codec.encode(np.abs(x) if family == "positive" else x, "e4m3")
            for x in (rng.standard_normal((16, 512)), rng.standard_normal((512, 16))))
    got = unit_sum(a, b, name, block).astype(np.float32)
    assert expected(a, b, "e4m3", {"accumulator": "fp8_tc14_promoted"}, family).judge(got, "fp32").ok
    if name == "hopper_unpromoted":
        assert not expected(a, b, "e4m3", {}, family).judge(got, "fp32").ok


def test_a_tie_goes_one_way_where_nothing_else_rounds() -> None:
    a, b = codec.encode(np.array([[257.0 / 256, 1.0, 0.0]]), "fp32"), codec.encode(np.eye(3)[:, :1], "fp32")
    want = expected(a, b, "fp32", {}, "integers", out="bf16")
    assert want.judge(codec.encode(np.array([[1.0]]), "bf16"), "bf16").ok
    assert not want.judge(codec.encode(np.array([[1.0078125]]), "bf16"), "bf16").ok


def product_then_c(seed: int, rounding: str, k: int) -> tuple[Within, np.ndarray]:
    rng = np.random.default_rng(seed)
    a, b, c = (codec.encode(rng.standard_normal(s), "bf16") for s in ((64, k), (64, k), (64, 64)))
    problem = SimpleNamespace(variant=Variant({"out": "bf16", "c": "apart"}), family="normal", values={}, sizes={})
    given = Inputs({"a": a, "b": b, "c": c}, dict.fromkeys("abc", "bf16"))
    product = codec.round_to(codec.decode(a, "bf16") @ codec.decode(b, "bf16").T, "bf16", rounding=rounding)
    want = bf16_gemm_nt(problem, given, {"c_added": "after_rounding"})["d"]
    return want, codec.encode(product + codec.decode(c, "bf16"), "bf16")


@pytest.mark.parametrize("k", [64, 576, 2048])
def test_a_product_rounded_before_c_is_right_where_it_is_declared(k: int) -> None:
    for seed in range(8):
        want, got = product_then_c(seed, "nearest_even", k)
        assert want.judge(got, "bf16").ok, want.judge(got, "bf16").note


def test_a_product_cut_before_c_shows_together() -> None:
    for seed in range(4):
        want, got = product_then_c(seed, "toward_zero", 64)
        wide = Within(want.value, np.full(want.value.shape, 1e30), want.unspecified, want.typical)
        assert wide.judge(got, "bf16").by_chance
