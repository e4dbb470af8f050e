"""Statistics of errors: what correct kernels show on random data, and what wrong ones can't hide."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conformance.model import Variant
from references.bounds.scatter import scatter
from references.deepgemm.gemm import bf16_gemm_nt
from references.expected import Inputs, Within
from references.flashmla.sparse import flash_mla_sparse_fwd
from references.formats import codec
from references.typical import Typical

SEEDS = range(20)


def gemm_operands(seed: int, m: int = 64, n: int = 64, k: int = 1024) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(codec.encode(rng.standard_normal(shape), "bf16") for shape in ((m, k), (n, k)))


def gemm_expected(a: np.ndarray, b: np.ndarray, family: str = "normal") -> Within:
    problem = SimpleNamespace(variant=Variant({"out": "bf16", "c": "none"}), family=family, values={}, sizes={})
    return bf16_gemm_nt(problem, Inputs({"a": a, "b": b}, {"a": "bf16", "b": "bf16"}), {})["d"]


def fp32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return codec.decode(a, "bf16").astype(np.float32) @ codec.decode(b, "bf16").astype(np.float32).T


def stored(x: np.ndarray, **how: Any) -> np.ndarray:
    return codec.encode(x.astype(np.float64), "bf16", **how)


def in_blocks(a: np.ndarray, b: np.ndarray, fmt: str = "fp32", block: int = 64) -> np.ndarray:
    """Accumulated over blocks of k, the running sum kept in fmt."""
    total = np.zeros((len(a), len(b)))
    for k in range(0, a.shape[1], block):
        total = codec.round_to(total + fp32(a[:, k : k + block], b[:, k : k + block]), fmt)
    return total


def one_block(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A block of 16 x 16 that is 0.6 % too large."""
    d = fp32(a, b)
    d[16:32, 32:48] *= np.float32(1.006)
    return stored(d)


RIGHT: dict[str, Callable[..., np.ndarray]] = {
    "one product": lambda a, b: stored(fp32(a, b)),
    "in blocks": lambda a, b: stored(in_blocks(a, b)),
    "backwards": lambda a, b: stored(fp32(a[:, ::-1].copy(), b[:, ::-1].copy())),
    "exact": lambda a, b: stored(codec.decode(a, "bf16") @ codec.decode(b, "bf16").T),
}
WRONG: dict[str, tuple[Callable[..., np.ndarray], str]] = {
    "output cut": (lambda a, b: stored(fp32(a, b), rounding="toward_zero"), "average"),
    "all too large by 0.3 %": (lambda a, b: stored(fp32(a, b) * np.float32(1.003)), "average"),
    "one block too large": (one_block, "block of 16 x 16 [1, 2]"),
    "rounded through fp16": (lambda a, b: stored(codec.round_to(in_blocks(a, b, "fp16", 16), "fp16")), "together"),
}


def in_bounds(w: Within) -> Within:
    """With bounds so wide that only statistics are left."""
    return Within(w.value, np.full(w.value.shape, 1e30), w.unspecified, w.typical)


@pytest.mark.parametrize("kernel", RIGHT)
def test_correct_products_pass(kernel: str) -> None:
    for seed in SEEDS:
        a, b = gemm_operands(seed, k=(1, 7, 64, 1024)[seed % 4], n=(64, 5, 33, 16)[seed // 4 % 4])
        judged = gemm_expected(a, b).judge(RIGHT[kernel](a, b), "bf16")
        assert judged.ok, f"seed {seed}: {judged.note}"
        assert judged.figures["rms"] < 1.1 + 4 / np.sqrt(2 * judged.bad.size)


@pytest.mark.parametrize("kernel", WRONG)
def test_wrong_products_are_seen(kernel: str) -> None:
    wrong, word = WRONG[kernel]
    for seed in range(5):
        a, b = gemm_operands(seed)
        judged = in_bounds(gemm_expected(a, b)).judge(wrong(a, b), "bf16")
        assert word in judged.note, f"seed {seed}: {judged.figures}"
        assert judged.by_chance
        assert not judged.bad.any()


def test_nothing_is_said_of_data_that_are_not_random() -> None:
    a, b = gemm_operands(0)
    assert gemm_expected(a, b, "positive").typical is None
    assert in_bounds(gemm_expected(a, b, "positive")).judge(stored(fp32(a, b), rounding="toward_zero"), "bf16").ok


def attention_problem(seed: int, topk: int = 128, s_q: int = 3, heads: int = 16, s_kv: int = 300,
                      repeated: bool = False) -> tuple[Any, Inputs]:
    rng = np.random.default_rng(seed)
    q, kv = (codec.encode(rng.standard_normal(s), "bf16") for s in ((s_q, heads, 512), (s_kv, 1, 512)))
    pick = rng.integers(0, 4 if repeated else s_kv, (s_q, 1, topk)) if repeated else np.stack(
        [rng.permutation(s_kv)[:topk] for _ in range(s_q)])[:, None]
    problem = SimpleNamespace(variant=Variant({}), family="normal", values={"sm_scale": 512**-0.5}, sizes={})
    return problem, Inputs({"q": q, "kv": kv, "indices": pick.astype(np.int32)},
                           {"q": "bf16", "kv": "bf16", "indices": "int32"})


def attention(inputs: Inputs, *, p: str = "bf16", scale: float = 512**-0.5, output: str = "nearest_even",
              logits: str = "fp32", out: str = "fp32", weights: str = "nearest_even", split: str = "fp32",
              from_rounded: bool = False) -> np.ndarray:
    q, kv, index = inputs.real("q"), inputs.real("kv")[:, 0], inputs.codes("indices")[:, 0]
    result = np.zeros(q.shape)
    for t, rows in enumerate(kv[i] for i in index):
        z = codec.round_to(scale * (q[t] @ rows.T), logits)
        e = np.exp(z - z.max(axis=1, keepdims=True))
        rounded = e if p == "fp32" else codec.round_to(e, p, rounding=weights)
        total = (rounded if from_rounded else e).sum(axis=1, keepdims=True)
        if out != "fp32":
            o = np.zeros(q[t].shape)
            for k in range(0, len(rows), 16):
                o = codec.round_to(o + rounded[:, k : k + 16] @ rows[k : k + 16], out)
            result[t] = o / total
        elif split != "fp32":
            half = len(rows) // 2
            parts = [codec.round_to(rounded[:, s] @ rows[s] / e[:, s].sum(axis=1, keepdims=True), split)
                     * e[:, s].sum(axis=1, keepdims=True) for s in (slice(0, half), slice(half, None))]
            result[t] = (parts[0] + parts[1]) / total
        else:
            result[t] = rounded @ rows / total
    return codec.encode(result, "bf16", rounding=output)


RIGHT_ATTENTION: dict[str, dict[str, Any]] = {
    "P in bf16": {}, "P in fp32": {"p": "fp32"}, "P in fp16": {"p": "fp16"}}
WRONG_ATTENTION: dict[str, dict[str, Any]] = {
    "output cut": {"output": "toward_zero"}, "P cut": {"weights": "toward_zero"}, "P in fp8": {"p": "e4m3"},
    "scale off by 0.3 %": {"scale": 512**-0.5 * 1.02}, "logits in bf16": {"logits": "bf16"},
    "O summed in bf16": {"out": "bf16"},
}


@pytest.mark.parametrize("kernel", RIGHT_ATTENTION)
def test_correct_attention_passes(kernel: str) -> None:
    for seed in range(12):
        problem, inputs = attention_problem(seed, topk=(1, 2, 5, 64)[seed % 4], s_q=1 + seed % 3, heads=8,
                                            repeated=seed % 5 == 4)
        judged = flash_mla_sparse_fwd(problem, inputs, {})["out"].judge(
            attention(inputs, **RIGHT_ATTENTION[kernel]), "bf16")
        assert judged.ok, f"seed {seed}: {judged.note}"
        assert "row_rms" in judged.figures


@pytest.mark.parametrize("p", ["fp16", "fp32"])
def test_peaky_rows_are_right_with_finer_weights(p: str) -> None:
    """One row has nearly all the weight, and a weight may be too small for the format: roundings are no chance then."""
    for seed in range(12):
        problem, inputs = attention_problem(seed, topk=96, s_q=2, heads=8, repeated=seed % 3 == 2)
        problem.values["sm_scale"] = (0.5, 0.2)[seed % 2]
        inputs.codes("kv")[:, :, ::5] = 0
        judged = flash_mla_sparse_fwd(problem, inputs, {"p": p})["out"].judge(
            attention(inputs, p=p, scale=problem.values["sm_scale"]), "bf16")
        assert judged.ok, f"seed {seed}: {judged.note}"


@pytest.mark.parametrize("kernel", WRONG_ATTENTION)
def test_wrong_attention_is_seen(kernel: str) -> None:
    for seed in range(3):
        problem, inputs = attention_problem(seed, topk=128, s_q=4)
        expected = flash_mla_sparse_fwd(problem, inputs, {})["out"]
        judged = in_bounds(expected).judge(attention(inputs, **WRONG_ATTENTION[kernel]), "bf16")
        assert judged.note, f"seed {seed}: {judged.figures}"


@pytest.mark.parametrize(("value", "error", "complains"), [
    (np.ones(0), np.ones(0), False),
    (np.array([np.nan, np.inf, 1.0]), np.array([0.0, 0.0, 0.0]), False),
    (np.zeros(100), np.zeros(100), False),
    (np.zeros(100), np.full(100, 1.6), True),
    (np.full(100, -0.0), np.full(100, 0.9), False),
    (np.full(100, 5e-324), np.zeros(100), False),
    (np.linspace(1, 2, 400), np.full(400, 0.4), True),
    (np.linspace(-2, -1, 400), np.full(400, 0.4), True),
    (np.linspace(1, 2, 400), np.tile([0.9, -0.9], 200), False),
    (np.linspace(1, 2, 400), np.r_[np.zeros(399), 40.0], True),
])
def test_edges(value: np.ndarray, error: np.ndarray, complains: bool) -> None:
    found = Typical(np.ones(value.shape)).judged(error, value, np.isfinite(value))[0]
    assert bool(found) == complains


def test_drift_is_allowed_where_it_is_declared() -> None:
    value, error = np.linspace(1, 2, 4000), np.full(4000, 0.4)
    assert Typical(np.ones(4000), 0.5).judged(error, value, np.ones(4000, bool))[0] == ""
    assert Typical(np.ones(4000), 0.1).judged(error, value, np.ones(4000, bool))[0] != ""


def test_the_model_of_a_rounding() -> None:
    """Half an ulp / sqrt(3), and the accumulation's share beside it."""
    t = scatter(np.array([1.0, 4.0]), np.array([0.0, 1.0]), 0.0, "bf16")
    np.testing.assert_allclose(t.deviation[0], 2.0**-8 / np.sqrt(3))
    np.testing.assert_allclose(t.deviation[1] ** 2, (2.0**-6 + 0.0) ** 2 / 3 + 0.09)
