"""Other people's criteria: each on values worked out by hand, what it holds for, and what it is known not to see."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from conformance.catalogue.load import functions
from references.criteria import CRITERIA, calc_diff, calc_diff_product, cosine_distance, criteria
from references.criteria_data import DUAL_LIMITS, OWN, level_of, own_of
from references.formats import codec

NAN, INF = float("nan"), float("inf")
NAMES = [c.name for c in CRITERIA]
MODULES = ("deepgemm", "deepep", "deepselect", "flashmla", "tilekernels")


def told(observed: Any, golden: Any, fmt: str = "fp32", **kw: Any) -> dict[str, dict[str, Any]]:
    """Every criterion's answer, with warnings as errors and the answer as strict JSON would carry it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = criteria(np.asarray(observed, float), np.asarray(golden, float), fmt, **kw)
    return json.loads(json.dumps(out, allow_nan=False))


# --- by hand ----------------------------------------------------------------------------------------------

BY_HAND: list[tuple[str, str, list[float], list[float], dict[str, Any]]] = [
    # |d|^2 = 1, |x|^2 + |y|^2 = 9 + 4
    ("calc_diff", "fp32", [3.0, 0.0], [2.0, 0.0], {"value": 1 / 13, "holds": False}),
    ("calc_diff", "fp32", [1.0, 1.0], [1.0, 1.0], {"value": 0.0, "limit": 1e-3, "holds": True}),
    ("calc_diff", "fp32", [0.0, -0.0], [0.0, 0.0], {"value": 0.0, "holds": True}),
    ("calc_diff", "fp32", [1.0], [0.0], {"value": 1.0, "holds": False}),
    ("calc_diff", "fp32", [1.0], [-1.0], {"value": 2.0, "holds": False}),
    ("calc_diff_product", "fp32", [3.0, 0.0], [2.0, 0.0], {"value": 1 - 12 / 13, "holds": False}),
    # 1.02 is inside 1e-2 + 1e-2, 1.03 is not
    ("allclose", "fp32", [1.02 - 1e-9, 1.03], [1.0, 1.0], {"value": 0.5, "holds": False}),
    ("allclose", "fp32", [1.02 - 1e-9, -1.0], [1.0, -1.0], {"value": 0.0, "holds": True}),
    ("torch_close", "bf16", [1.0078125], [1.0], {"value": 0.0, "holds": True}),
    ("torch_close", "fp32", [1.0 + 2.0**-19], [1.0], {"value": 0.0, "holds": True}),
    ("torch_close", "fp32", [1.0 + 2.0**-16], [1.0], {"value": 1.0, "holds": False}),
    # one wrong of 1000 is as much as FP16 may have; two are too many
    ("double_thousandth", "fp16", [9.0] + [1.0] * 999, [1.0] * 1000, {"value": 1e-3, "holds": True}),
    ("double_thousandth", "fp16", [9.0] * 2 + [1.0] * 998, [1.0] * 1000, {"value": 2e-3, "holds": False}),
    # small in absolute terms: the relative share alone does not make it fail
    ("double_thousandth", "fp16", [2e-4], [1e-4], {"absolute": 0.0, "relative": 1.0, "holds": True}),
    # the golden value is rounded first: 1 + 2^-8 is between 1 and 1 + 2^-7
    ("double_thousandth", "bf16", [1.0], [1.0 + 2.0**-8], {"value": 0.0, "relative": 0.0, "holds": True}),
    ("mere", "fp32", [1.5, 2.0], [1.0, 2.0], {"value": 0.25 / (1 + 1e-7), "limit": 2.0**-13, "holds": False}),
    ("mare", "fp32", [1.5, 2.0], [1.0, 2.0], {"value": 0.5 / (1 + 1e-7), "limit": 10 * 2.0**-13, "holds": False}),
    ("mere", "bf16", [1.0 + 2.0**-8], [1.0], {"limit": 2.0**-7, "holds": True}),
    ("mere", "bf16", [1.0 + 2.0**-6], [1.0], {"holds": False}),
    ("mare", "bf16", [1.0 + 2.0**-4], [1.0], {"holds": True}),
    ("mare", "bf16", [1.0 + 2.0**-3], [1.0], {"holds": False}),
    # 99 of 100 inside is enough, as long as the last one is below max(0.1, 32 ulp)
    ("mixed_tolerance", "fp16", [1.05] + [1.0] * 99, [1.0] * 100, {"value": 0.99, "holds": True}),
    ("mixed_tolerance", "fp16", [1.05] * 2 + [1.0] * 98, [1.0] * 100, {"value": 0.98, "holds": False}),
    ("mixed_tolerance", "fp16", [1.5] + [1.0] * 99, [1.0] * 100, {"max_absolute_limit": 0.1, "holds": False}),
    ("mixed_tolerance", "fp16", [1024.0], [1024.0], {"max_absolute_limit": 32.0, "holds": True}),
    ("cosine", "fp32", [1.0, 0.0], [1.0, 1.0], {"value": 1 - math.sqrt(0.5), "holds": False}),
    ("cosine", "fp32", [3.0, 4.0], [30.0, 40.0], {"value": 0.0, "holds": True}),
    ("cosine", "fp32", [0.0, 0.0], [0.0, 0.0], {"value": 0.0, "holds": True}),
    ("cosine", "fp32", [0.0, 0.0], [0.0, 1.0], {"value": 1.0, "holds": False}),
    ("max_absolute", "fp32", [1.0, -2.0], [1.5, -4.0], {"value": 2.0, "limit": None, "holds": None}),
    ("max_relative", "fp32", [1.0, -2.0], [2.0, -4.0], {"value": 0.5}),
    ("max_relative", "fp32", [0.0, 1.0], [0.0, 1.0], {"value": 0.0}),
    ("max_relative", "fp32", [1e-30], [0.0], {"value": "inf"}),
    # bf16 near 1 has an ulp of 2^-7, below 1 half of it; subnormals have 2^-133
    ("ulp", "bf16", [1.0 + 2.0**-6, 1.0], [1.0, 1.0], {"value": 2.0, "p50": 0.0, "p99": 2.0}),
    ("ulp", "bf16", [0.75 + 2.0**-8], [0.75], {"value": 1.0}),
    ("ulp", "bf16", [3 * 2.0**-133], [2.0**-133], {"value": 2.0}),
    ("ulp", "e4m3", [448.0], [416.0], {"value": 1.0}),
    ("bias_ulp", "bf16", [1.0 + 2.0**-7, 1.0 - 2.0**-6], [1.0, 1.0], {"value": -0.5}),
    ("bias_ulp", "bf16", [1.0, -1.0], [1.0 + 2.0**-8, -1.0 - 2.0**-8], {"value": 0.0, "outward": -0.5}),
    ("sign_balance", "fp32", [0.0, 1.0, 1.0, 1.0], [1.0] * 4, {"value": 1 / 4 + 3 / 8 - 0.5, "limit": 5.0}),
    ("sign_balance", "bf16", [1.0] * 1000, [1.0 + 2.0**-10] * 1000, {"value": 0.5, "holds": False}),
    ("correctly_rounded", "bf16", [1.0, 1.0078125], [1.0 + 2.0**-9, 1.0], {"value": 0.5}),
    ("correctly_rounded", "fp32", [-0.0, NAN, INF], [0.0, NAN, 1e39], {"value": 1.0}),
]


def agrees(entry: Mapping[str, Any], want: Mapping[str, Any]) -> bool:
    return all(entry[k] == v if isinstance(v, (bool, str, type(None))) else entry[k] == pytest.approx(v, rel=1e-12)
               for k, v in want.items())


@pytest.mark.parametrize(("name", "fmt", "observed", "golden", "want"), BY_HAND)
def test_by_hand(name: str, fmt: str, observed: list[float], golden: list[float], want: dict[str, Any]) -> None:
    entry = told(observed, golden, fmt)[name]
    assert agrees(entry, want), entry


# --- what holds and what does not -------------------------------------------------------------------------

LIMITED = ("calc_diff", "allclose", "torch_close", "double_thousandth", "mere", "mare", "mixed_tolerance", "cosine")

HOLDS: list[tuple[str, str, list[float], list[float], tuple[str, ...]]] = [
    # what, format, observed, golden, the criteria that must not hold; all others must
    ("equal", "fp32", [1.0, -2.0], [1.0, -2.0], ()),
    ("signs of zeros", "fp32", [-0.0, 0.0, 1.0], [0.0, -0.0, 1.0], ()),
    ("subnormals flushed", "fp32", [0.0, 1.0], [1e-40, 1.0], ()),
    ("all subnormal and flushed", "bf16", [0.0], [2.0**-133], ("calc_diff", "cosine")),
    ("NaN in both", "fp32", [NAN, 1.0], [NAN, 1.0], ("calc_diff", "torch_close", "double_thousandth", "cosine")),
    ("NaN swallowed", "fp32", [0.0, 1.0], [NAN, 1.0], LIMITED),
    ("NaN out of nowhere", "fp32", [NAN, 1.0], [0.0, 1.0], LIMITED),
    ("infinity in both", "fp32", [INF, 1.0], [INF, 1.0], ("calc_diff", "double_thousandth", "cosine")),
    ("infinity of the other sign", "fp32", [-INF, 1.0], [INF, 1.0], LIMITED),
    ("finite for an infinity", "fp32", [3e38, 1.0], [INF, 1.0], LIMITED),
    ("overflow of the format", "fp32", [INF, 1.0], [1e39, 1.0],
     ("calc_diff", "allclose", "torch_close", "double_thousandth", "mere", "mare", "cosine")),
    ("infinity out of nowhere", "fp32", [INF, 1.0], [1.0, 1.0], LIMITED),
    ("all wrong", "bf16", [1.0, 2.0], [-1.0, -2.0], LIMITED),
    ("a scale of 2", "fp16", [2.0, 4.0], [1.0, 2.0], tuple(n for n in LIMITED if n != "cosine")),
    ("zeros for ones", "fp32", [0.0] * 4, [1.0] * 4, LIMITED),
]


@pytest.mark.parametrize(("what", "fmt", "observed", "golden", "broken"), HOLDS, ids=[r[0] for r in HOLDS])
def test_holds(what: str, fmt: str, observed: list[float], golden: list[float], broken: tuple[str, ...]) -> None:
    out = told(observed, golden, fmt)
    assert {n for n in LIMITED if not out[n]["holds"]} == set(broken)


@pytest.mark.parametrize("fmt", ["fp64", "fp32", "fp16", "bf16", "e4m3", "e5m2", "e2m1x2_lo", "e8m0", "int32", "bool"])
@pytest.mark.parametrize("values", [[], [0.0] * 5, [NAN] * 3, [INF, -INF], [1.0]])
def test_odd_arrays_give_plain_answers(fmt: str, values: list[float]) -> None:
    """No warning, no exception, strict JSON; without an element nothing is claimed."""
    out = told(values, values, fmt, reference=np.asarray(values), low_precision=np.asarray(values), module="tilelang")
    assert "max_absolute" in out
    if not values:
        assert all(e == {"value": None, "limit": None, "holds": None} for e in out.values())


def test_all_nan() -> None:
    out = told([NAN] * 3, [NAN] * 3)
    assert out["calc_diff"] == {"value": "nan", "limit": 1e-3, "holds": False}
    assert out["mere"]["value"] is None
    assert out["mere"]["holds"] is True
    assert out["ulp"]["value"] is None


def test_huge_and_tiny_values_neither_overflow_nor_vanish() -> None:
    for scale in (1e200, 1e-200, 5e-324):
        x, y = np.array([3.0, 0.0]) * scale, np.array([2.0, 0.0]) * scale
        assert calc_diff(x, y) == pytest.approx(1 / 13, rel=1e-12)
        assert calc_diff_product(x, y) == pytest.approx(1 / 13, rel=1e-12)
        assert cosine_distance(x, y) == 0.0
    assert cosine_distance(np.array([1e200]), np.array([1e-200])) == 0.0


def test_small_differences_do_not_cancel() -> None:
    x = np.ones(1000)
    assert calc_diff(x, x * (1 + 1e-10)) == pytest.approx(0.5e-20, rel=1e-5)
    assert abs(calc_diff_product(x, x * (1 + 1e-10))) < 1e-14  # nothing but its own rounding
    assert cosine_distance(x, x * 3) < 1e-28


# --- with further arrays ----------------------------------------------------------------------------------

def test_flash_attention_measures_against_a_plain_program() -> None:
    """bf16 near 1 has steps of 2^-7; 1 + 0.3 - 0.3 comes back as 1, so the limit is twice the plain error."""
    golden = np.array([1.0, 1.0])
    plain = np.array([1.0 + 2.0**-7, 1.0])
    noise = codec.round_to(codec.round_to(golden + 0.3, "bf16") - 0.3, "bf16") - golden
    limit = 2 * 2.0**-7 + 2 * np.abs(noise).max()
    for steps, holds in ((0, True), (2, True), (limit / 2.0**-7 + 1, False)):
        entry = told([1.0 + steps * 2.0**-7, 1.0], golden, "bf16", low_precision=plain)["flash_attention"]
        assert entry == {"value": steps * 2.0**-7, "limit": limit, "holds": holds}
    assert told([NAN, 1.0], golden, "bf16", low_precision=plain)["flash_attention"]["holds"] is False
    assert "flash_attention" not in told(plain, golden, "bf16")


@pytest.mark.parametrize(("op", "level"), [("deepgemm.bf16_gemm_nt", "L2"), ("deepgemm.per_token_cast_to_fp8", "L0"),
                                           ("flashmla.flash_mla_sparse_fwd", "L1"), ("tilelang.reduce", "L2"),
                                           ("tilekernels.quant.norm_forward", "L2"), ("", "L0")])
def test_level(op: str, level: str) -> None:
    assert level_of(op) == level


@pytest.mark.parametrize(("factor", "best"), [(1.0, "L2"), (1.2, "L2"), (1.4, "L1"), (1.9, "L0"), (2.1, "none")])
def test_dual_benchmark_ratios(factor: float, best: str) -> None:
    golden = np.linspace(1.0, 2.0, 64)
    error = np.where(np.arange(64) % 2, 1e-3, -1e-3)
    out = told(golden + factor * (1 - 1e-9) * error, golden, op="tilelang.gemm", reference=golden + error)
    entry = out["dual_benchmark"]
    assert (entry["level"], entry["best_level"]) == ("L2", best)
    assert [entry[k] for k in ("mare", "mere", "rmse")] == pytest.approx([factor] * 3, rel=1e-6)
    assert entry["value"] == pytest.approx(factor / 1.2, rel=1e-6)
    assert entry["holds"] is (best == "L2")


def test_dual_benchmark_at_its_edges() -> None:
    one, off = np.ones(4), np.ones(4) + 1e-3
    assert told(one, one, reference=one)["dual_benchmark"]["value"] == 0.0
    assert told(off, one, reference=one)["dual_benchmark"]["value"] == "inf"
    assert told([NAN, 1, 1, 1], one, reference=off)["dual_benchmark"]["holds"] is False
    assert told([NAN] * 4, one, reference=off)["dual_benchmark"]["holds"] is False
    assert told([NAN] * 4, [NAN] * 4, reference=off)["dual_benchmark"]["holds"] is None
    # what the reference run has no number for is left out on both sides
    assert told([9, 1, 1, 1], one, reference=[NAN, *off[1:]])["dual_benchmark"]["mare"] == 0.0
    assert {k: v["rmse"] for k, v in DUAL_LIMITS.items()} == {"L0": 2.0, "L1": 1.5, "L2": 1.2}


# --- the modules' own -------------------------------------------------------------------------------------

def own(observed: Any, golden: Any, fmt: str, op: str, output: str) -> dict[str, Any]:
    return told(observed, golden, fmt, op=op, output=output)["own"]


@pytest.mark.parametrize(("op", "output", "fmt", "good", "bad", "golden"), [
    ("deepgemm.bf16_gemm_nt", "d", "bf16", [1.004], [1.005], [1.0]),  # 1e-5 is 0.45 %
    ("deepgemm.m_grouped_bf16_gemm_nt_contiguous", "d", "bf16", [1.004], [1.005], [1.0]),
    ("deepgemm.fp8_gemm_nt", "d", "bf16", [1.04], [1.05], [1.0]),  # 1e-3 is 4.5 %
    ("tilekernels.transform.apply_rotary", "x", "bf16", [1.0001], [1.0002], [1.0]),
    ("tilekernels.quant.norm_forward", "rstd", "fp32", [1 + 2e-6], [1 + 3e-6], [1.0]),
    ("tilekernels.quant.norm_forward", "out", "bf16", [1.0078125], [1.03125], [1.0]),
    ("tilekernels.quant.per_token_cast", "data", "e4m3", [1.0], [1.125], [1.0]),
    ("tilekernels.moe.topk_gate", "topk_idx", "int64", [3.0], [4.0], [3.0]),
    ("deepep.EPBuffer.combine", "combine/combined_x@1", "bf16", [1.004], [1.02], [1.0]),
    ("deepep.EPBuffer.dispatch", "recv_x", "bf16", [1.0], [1.0078125], [1.0]),
    ("deepselect.topk", "values", "fp32", [1.0], [1 + 2.0**-23], [1.0]),
    ("flashmla.flash_mla_sparse_fwd", "out", "bf16", [1.004], [1.005], [1.0]),  # the cosine decides
    ("flashmla.flash_mla_sparse_fwd", "out", "bf16", [7e-4], [9e-4], [0.0]),  # absolute or relative
    ("flashmla.flash_mla_sparse_fwd", "lse", "fp32", [1 + 2.9e-5], [1 + 3.2e-5], [1.0]),
    ("flashmla.flash_mla_sparse_fwd", "lse", "fp32", [INF, 1.0], [INF, NAN], [INF, 1.0]),
    ("flashmla.flash_mla_with_kvcache", "softmax_lse", "fp32", [1 + 1e-4], [1 + 1.3e-4], [1.0]),
    ("tilelang.gemm", "c", "fp32", [9.0] + [1.0] * 99, [9.0] * 2 + [1.0] * 98, [1.0] * 100),
])
def test_own_criterion(op: str, output: str, fmt: str, good: list[float], bad: list[float],
                       golden: list[float]) -> None:
    assert own(good, golden, fmt, op, output)["holds"] is True
    assert own(bad, golden, fmt, op, output)["holds"] is False


def test_own_needs_a_limit_upstream() -> None:
    assert "own" not in told([1.0], [1.0], op="deepgemm.per_token_cast_to_fp8")
    assert "own" not in told([1.0], [1.0])
    assert own_of("flashmla.flash_mla_sparse_fwd", "") == own_of("flashmla.flash_mla_sparse_fwd", "out")
    assert told([1.0], [1.0], module="deepgemm", op="bf16_gemm_nt") == told([1.0], [1.0], op="deepgemm.bf16_gemm_nt")


def test_every_row_is_reached_by_a_public_function() -> None:
    """A row whose pattern fits nothing is a misspelling; one behind a wider row is never used."""
    names = [f.name for module in MODULES for f in functions(module)]
    outputs = ("out", "lse", "softmax_lse", "max_logits", "rstd", "weight_grad", "col_sumsq", "combined_x",
               "combined_topk_weights", "topk_weights", "d")
    used = {own_of(name, output) for name in [*names, "tilelang.gemm"] for output in outputs}
    assert [row for row in OWN if row not in used] == []


# --- what they can't see ----------------------------------------------------------------------------------

def normal(n: int = 10_000) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(7)).standard_normal(n)


BLIND = [
    # what is wrong, the criteria that hold all the same, those that do not
    ("one element of 10000", lambda g: np.where(np.arange(g.size) == 17, g + 2.0, g),
     ("calc_diff", "double_thousandth", "mere", "cosine"), ("allclose", "mare", "mixed_tolerance")),
    ("truncating cast", lambda g: codec.round_to(g, "bf16", rounding="toward_zero"),
     ("calc_diff", "allclose", "torch_close", "mere", "mare", "mixed_tolerance", "cosine", "sign_balance"),
     ("double_thousandth",)),
    ("1 % too large", lambda g: g * 1.009,
     ("calc_diff", "allclose", "torch_close", "mare", "mixed_tolerance", "cosine"), ("double_thousandth",)),
    ("twice as large", lambda g: 2 * g, ("cosine",), ("calc_diff", "allclose", "mere")),
    ("rounded through FP8", lambda g: codec.round_to(g, "e4m3"), ("calc_diff", "cosine"),
     ("allclose", "mixed_tolerance")),
]


@pytest.mark.parametrize(("what", "fault", "passed", "caught"), BLIND, ids=[r[0] for r in BLIND])
def test_known_blindness(what: str, fault: Any, passed: tuple[str, ...], caught: tuple[str, ...]) -> None:
    golden = normal()
    out = told(codec.round_to(fault(golden), "bf16"), golden, "bf16")
    assert {n: out[n]["holds"] for n in (*passed, *caught)} == {n: n in passed for n in (*passed, *caught)}


def test_correct_kernels_are_refused_by_some() -> None:
    """Where sums cancel, an FP32 result one rounding of its terms away is relatively far off."""
    big = normal()
    exact = big + 1e-6 * normal()[::-1] - big
    observed = codec.round_to(codec.round_to(big + 1e-6 * normal()[::-1], "fp32") - codec.round_to(big, "fp32"), "fp32")
    out = told(observed, exact)
    assert not out["mere"]["holds"]
    assert not out["mare"]["holds"]
    assert out["allclose"]["holds"]


def test_a_correct_rounding_holds_everywhere() -> None:
    """On ordinary data; so that a criterion which always fails would show."""
    golden = normal()
    for fmt in ("fp32", "fp16", "bf16"):
        out = told(codec.round_to(golden, fmt), golden, fmt)
        assert [n for n, e in out.items() if e["holds"] is False] == []
        assert out["correctly_rounded"]["value"] == 1.0
        assert out["ulp"]["value"] <= 0.5


# --- the entry point --------------------------------------------------------------------------------------

def test_unspecified_elements_are_left_out() -> None:
    observed, golden = np.array([[NAN, 1.0], [9.0, 2.0]]), np.array([[1.0, 1.0], [1.0, 2.0]])
    out = told(observed, golden, unspecified=np.array([[True, False], [True, False]]))
    assert out == told([1.0, 2.0], [1.0, 2.0])
    assert told(observed, golden, unspecified=True)["calc_diff"]["holds"] is None
    assert told(observed, golden, unspecified=[True, False]) == out  # broadcast along rows


def test_shapes_and_formats_are_checked() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        criteria(np.ones(2), np.ones(3), "fp32")
    with pytest.raises(ValueError, match="reference"):
        criteria(np.ones(2), np.ones(2), "fp32", reference=np.ones((2, 1)))
    with pytest.raises(KeyError):
        criteria(np.ones(2), np.ones(2), "fp12")


def test_inputs_stay_as_they_were() -> None:
    observed, golden = np.array([[1.0, NAN], [INF, 2.0]]).T, np.array([[1.0, 2.0], [INF, 2.0]]).T
    before = observed.copy(), golden.copy()
    told(observed, golden, op="flashmla.flash_mla_sparse_fwd", reference=golden, low_precision=golden)
    assert np.array_equal(observed, before[0], equal_nan=True)
    assert np.array_equal(golden, before[1], equal_nan=True)


def test_names_and_brief() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert all(c.source for c in CRITERIA)
    everything = told([1.0], [1.0], op="tilelang.gemm", reference=np.ones(1), low_precision=np.ones(1))
    assert list(everything) == NAMES
    brief = told([1.0], [1.0], op="tilelang.gemm", brief=True)
    assert list(brief) == [c.name for c in CRITERIA if c.brief]
    assert brief == {n: everything[n] for n in brief}


def test_brief_is_cheap() -> None:
    """Some 70 us for 1000 elements; the limit leaves room for a slow or busy machine."""
    golden = normal(1000)
    observed = codec.round_to(golden, "bf16")
    best = min(_seconds(lambda: criteria(observed, golden, "bf16", op="tilelang.gemm", brief=True)) for _ in range(50))
    assert best < 1e-3


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
