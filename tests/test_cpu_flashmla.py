"""The cpu backend's FlashMLA against a plain float64 formula, with every seeded fault and variant."""

from __future__ import annotations

from functools import cache as remember
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adapters.cpu.flashmla import Adapter
from adapters.cpu.kernels.knobs import Knobs
from conformance.catalogue.load import read_toml
from conformance.results import REASONS

TABLE = read_toml(Path(__file__).parents[1] / "cases/flashmla/faults.toml")
D = 512
SINKS = torch.linspace(-3, 6, 64).index_fill(0, torch.tensor([0, 63]), float("inf"))
SINKS[0] = -SINKS[0]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def adapter(knobs: str = "") -> Adapter:
    return Adapter(SimpleNamespace(knobs=Knobs.parse(knobs)))


# ---- inputs ---------------------------------------------------------------------------------------------------------


def normal(*shape: int, seed: int = 0, size: float = 0.3) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape) * size, dtype=torch.bfloat16)


def ints(values) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.int32)


def lists(*shape: int, among: int, seed: int = 1) -> torch.Tensor:
    """Index lists with repetitions."""
    return ints(np.random.default_rng(seed).integers(1, among - 1, shape))


def cache(blocks: int, page: int, row_bytes=528, *, scales=(121, 128), hostile=True, seed=2) -> torch.Tensor:
    """Random codes and scales in pages with NaN between them; so are token 0 and the last, which no list names."""
    rng = np.random.default_rng(seed)
    wide = np.full((blocks, page + 1, 1, row_bytes), 0x7F, np.uint8)
    data = rng.integers(0, 256, (blocks, page, 1, row_bytes), np.uint8)
    if row_bytes == 528:
        data[..., :512] = np.where(data[..., :512] & 0x7F == 0x7F, 0, data[..., :512])
        data[..., :512] &= 0xBF  # below 2, so that logits stay moderate
        data[..., 512:] = rng.integers(*scales, data[..., 512:].shape)
    else:
        data[..., 256:] = rng.integers(0x08, 0x28, data[..., 256:].shape)
    if hostile:
        data[0, 0] = data[-1, -1] = 0x7F
    wide[:, :page] = data
    return torch.from_numpy(wide)[:, :page]


# ---- plain formula --------------------------------------------------------------------------------------------------


def small_float(codes: np.ndarray, exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    mantissa = (codes & (2**mantissa_bits - 1)).astype(np.float64)
    exponent = (codes >> mantissa_bits).astype(int) & (2**exponent_bits - 1)
    steps = 2.0**mantissa_bits
    normal_value = (1 + mantissa / steps) * 2.0 ** (exponent - bias)
    value = np.where(exponent == 0, mantissa / steps * 2.0 ** (1 - bias), normal_value)
    return np.where(codes >> (exponent_bits + mantissa_bits) & 1, -value, value)


@np.errstate(all="ignore")
def decoded(k_cache: torch.Tensor) -> np.ndarray:
    """float64 [slots, 512] of a cache."""
    raw = k_cache.view(torch.uint8).numpy()
    raw = raw.reshape(-1, raw.shape[-1])
    if raw.shape[1] == 528:
        value = np.where(raw[:, :512] & 0x7F == 0x7F, np.nan, small_float(raw[:, :512], 4, 3, 7))
        return value * np.repeat(2.0 ** (raw[:, 512:].astype(int) - 127), 32, 1)
    nibbles = np.stack((raw[:, :256] & 15, raw[:, :256] >> 4), 2).reshape(len(raw), 512)
    scale = np.where(raw[:, 256:] & 0x7F == 0x7F, np.nan, small_float(raw[:, 256:], 4, 3, 7))
    return small_float(nibbles, 2, 1, 1) * np.repeat(scale, 16, 1)


def plain(q, rows, scale, sink):
    """(out, lse, max) in float64 of one query [h, 512] over rows [n, 512]."""
    heads = q.shape[0]
    if not len(rows):
        return np.zeros((heads, D)), np.full(heads, np.inf), np.full(heads, -np.inf)
    z = q.double().numpy() @ rows.T * scale
    peak = z.max(1)
    lse = peak + np.log(np.exp(z - peak[:, None]).sum(1))
    out = np.exp(z - lse[:, None]) @ rows
    if sink is not None:
        with np.errstate(over="ignore"):
            out = out / (1 + np.exp(sink.double().numpy() - lse))[:, None]
    return out, lse, peak


def picked(table, slots, length):
    return table[[i for i in slots[:length].tolist() if 0 <= i < len(table)]]


def expected(op: str, call: dict):
    """Expected outputs, float64."""
    sink, lengths = call.get("attn_sink"), call.get("topk_length")
    if op == "prefill":
        table, idx = call["kv"][:, 0].double().numpy(), call["indices"][:, 0]
        rows = [plain(q, picked(table, idx[t], None if lengths is None else int(lengths[t])), call["sm_scale"], sink)
                for t, q in enumerate(call["q"])]
        out, lse, peak = (np.stack(x) for x in zip(*rows, strict=True))
        return out, peak, lse
    tables = [(decoded(call["k_cache"]), call["indices"], lengths)]
    if "extra_k_cache" in call:
        tables.append((decoded(call["extra_k_cache"]), call["extra_indices_in_kvcache"], call.get("extra_topk_length")))
    b, s_q, heads, _ = call["q"].shape
    out, lse = np.zeros((b, s_q, heads, D)), np.zeros((b, heads, s_q))
    scale = call.get("softmax_scale", D**-0.5)
    for i in range(b):
        for t in range(s_q):
            rows = np.concatenate([picked(x, idx[i, t], None if n is None else int(n[i])) for x, idx, n in tables])
            out[i, t], lse[i, :, t], _ = plain(call["q"][i, t], rows, scale, sink)
    return out, lse


def half_ulp_bf16(x: np.ndarray) -> np.ndarray:
    return np.ldexp(1.0, np.maximum(np.frexp(np.where(np.isfinite(x), x, 0))[1] - 9, -134))


def differences(got: torch.Tensor, want: np.ndarray, bound: np.ndarray) -> set[str]:
    g = got.double().numpy()
    if g.shape != want.shape:
        return {"shape"}
    finite = np.isfinite(want)
    with np.errstate(invalid="ignore"):
        same = (g == want) | (np.isnan(g) & np.isnan(want))
        off = np.where(finite & np.isfinite(g), np.abs(g - want) > bound, ~same)
    reasons = {"nonfinite"} if (off & ~(finite & np.isfinite(g))).any() else set()
    return reasons | ({"numeric"} if (off & finite & np.isfinite(g)).any() else set())


WEIGHTS = {"bf16": 2.0**-8, "fp16": 2.0**-11}


def wrong(want, got, knobs: str = "") -> set[str]:
    largest = np.abs(want[0]).max() if np.isfinite(want[0]).all() else 1.0
    size = max(float(largest), 2.0**-126)
    # fp32 work, and twice half an ulp of the weights where the variant rounds those
    slack = (2e-5 + sum(step for fmt, step in WEIGHTS.items() if f"softmax_weights={fmt}" in knobs)) * size
    reasons = differences(got[0], want[0], half_ulp_bf16(want[0]) + slack)
    for g, w in zip(got[1:], want[1:], strict=True):
        reasons |= differences(g, w, 2e-5 + 2e-6 * np.abs(w))
    return reasons


# ---- probes: sequences of calls in which faults show ----------------------------------------------------------------


def prefill(**change):
    kv = normal(200, 1, D, seed=3)
    kv[[0, -1]] = float("nan")
    call = {"q": normal(3, 64, D), "kv": kv, "indices": lists(3, 1, 192, among=200), "sm_scale": 1.0}
    return [("prefill", {**call, **change})]


def decode(**change):
    call = {"q": normal(2, 2, 64, D), "k_cache": cache(20, 5), "indices": lists(2, 2, 192, among=100)}
    return [("decode", {**call, **change})]


def extra(row_bytes=528, **change):
    idx = lists(2, 2, 64, among=63, seed=6)
    return decode(extra_k_cache=cache(9, 7, row_bytes, seed=5), extra_indices_in_kvcache=idx, **change)


def extra_longer():
    """Extra lists of 256, and their lengths, beside main ones of 192."""
    return decode(extra_k_cache=cache(9, 7, 528, seed=5), extra_indices_in_kvcache=lists(2, 2, 256, among=63, seed=6),
                  extra_topk_length=ints([256, 193]))


def invalid_prefill(**change):
    idx = lists(3, 1, 192, among=200)
    idx[:, :, ::5] = ints([-1, -(2**31), 200, 2**31 - 1])[torch.arange(39) % 4]
    idx[1] = -1
    return prefill(indices=idx, **change)


def invalid_decode(**change):
    idx = lists(2, 2, 192, among=100)
    idx[:, :, ::5] = -1
    idx[1, 0] = -1
    return decode(indices=idx, **change)


def one_token(values: torch.Tensor):
    idx = torch.full((3, 1, 192), -1, dtype=torch.int32)
    idx[:, 0, 70] = 2
    return prefill(kv=values, indices=idx)


def uniform():
    """q = 0: the mean of the rows, so that only the rounding of the output is left."""
    return prefill(q=torch.zeros(3, 64, D, dtype=torch.bfloat16))


def long_list(**change):
    return decode(q=normal(1, 1, 64, D), indices=lists(1, 1, 704, among=100), **change)


def twice():
    return decode() + decode(indices=lists(2, 2, 192, among=100, seed=9))


def refused_then_right():
    refused = {**decode()[0][1], "head_dim_v": 256}
    return [("refused", refused), *decode(q=normal(1, 2, 64, D), indices=lists(1, 2, 192, among=100))]


PROBES = {
    "prefill": prefill,
    "prefill_invalid": invalid_prefill,
    "prefill_invalid_benign": lambda: invalid_prefill(kv=normal(200, 1, D)),
    "prefill_lengths": lambda: prefill(topk_length=ints([0, 65, 191])),
    "prefill_sink": lambda: prefill(attn_sink=SINKS),
    "prefill_huge": lambda: prefill(sm_scale=60.0, kv=normal(200, 1, D, seed=3)),
    "prefill_one_token": lambda: one_token(normal(200, 1, D)),
    "prefill_subnormal": lambda: one_token(normal(200, 1, D, size=1e-39)),
    "prefill_uniform": uniform,
    "prefill_wide": lambda: prefill(q=normal(3, 64, D, size=2.0**20), kv=normal(200, 1, D, size=2.0**-20)),
    "prefill_strided": lambda: prefill(
        q=normal(3, 70, D + 8)[:, 3:67, :D], indices=lists(3, 2, 256, among=200)[:, :1, :192]
    ),
    "prefill_128": lambda: prefill(q=normal(2, 128, D), indices=lists(2, 1, 64, among=200)),
    "decode": decode,
    "decode_invalid": invalid_decode,
    "decode_benign": lambda: decode(k_cache=cache(20, 5, hostile=False)),
    "decode_invalid_benign": lambda: invalid_decode(k_cache=cache(20, 5, hostile=False)),
    "decode_lengths": lambda: decode(topk_length=ints([65, 130])),
    "decode_length_0": lambda: decode(topk_length=ints([0, 1])),
    "decode_sink": lambda: decode(attn_sink=SINKS, softmax_scale=0.03),
    "decode_scales": lambda: decode(k_cache=cache(20, 5, scales=(126, 131)), softmax_scale=0.01),
    "decode_page_1": lambda: decode(k_cache=cache(100, 1)),
    "decode_fp4": lambda: extra(288),
    "decode_extra": lambda: extra(topk_length=ints([0, 190]), extra_topk_length=ints([64, 3])),
    "decode_extra_longer": extra_longer,
    "decode_long": long_list,
    "decode_long_sink": lambda: long_list(attn_sink=SINKS),
    "decode_long_invariant": lambda: long_list(enable_batch_invariant=True),
    "decode_twice": twice,
    "decode_refused": refused_then_right,
}

SHOWS = {  # fault -> the probe in which it shows; those of one op only stand for that op
    "last_block_dropped": ("prefill", "decode"), "tail_dropped": ("prefill_lengths", "decode_lengths"),
    "block_doubled": ("prefill", "decode"), "stale_block": ("prefill", "decode"),
    "length_one_too_far": ("prefill_lengths", "decode_lengths"),
    "length_one_short": ("prefill_lengths", "decode_lengths"), "length_by_token": ("decode_lengths",),
    "neighbour_list": ("decode",), "neighbour_page": ("decode_benign",),
    "invalid_as_token_0": ("prefill_invalid_benign", "decode_invalid_benign"),
    "invalid_from_end": ("prefill_invalid_benign", "decode_invalid_benign"), "repeats_once": ("decode",),
    "scales_of_next_group": ("decode",), "scales_swapped": ("decode",), "scales_skipped": ("decode",),
    "signed_scale_byte": ("decode_scales",), "planar_cache": ("decode_benign",), "high_nibble_first": ("decode_fp4",),
    "subnormals_flushed": ("prefill_subnormal",), "read_through_fp16": ("prefill_wide",),
    "plain_combine_of_own_splits": ("decode_long",), "rope_omitted": ("prefill", "decode"),
    "default_scale_576": ("decode",), "logits_bf16": ("prefill", "decode"), "weights_fp8": ("prefill", "decode"),
    "accumulator_bf16": ("prefill", "decode"), "output_truncated": ("prefill_uniform", "decode"),
    "no_max": ("prefill_huge",), "no_rescale": ("prefill", "decode"), "lse_base2": ("prefill", "decode"),
    "lse_is_max": ("prefill", "decode"), "lse_not_transposed": ("decode",),
    "sink_ignored": ("prefill_sink", "decode_sink"), "sink_in_lse": ("prefill_sink", "decode_sink"),
    "sink_per_split": ("decode_long_sink",), "plain_combine": ("decode_long",), "partials_bf16": ("decode_long",),
    "empty_row_nan": ("prefill_invalid", "decode_invalid"),
    "empty_row_minus_inf": ("prefill_invalid", "decode_invalid"), "extra_ignored": ("decode_extra",),
    "extra_length_main": ("decode_extra",),
    "extra_length_capped": ("decode_extra_longer",), "metadata_stale": ("decode_twice",),
    "metadata_poisoned": ("decode_refused",), "output_not_rescaled": ("prefill", "decode"),
    "sum_not_rescaled": ("prefill", "decode"),
}
STATISTICAL = ("output_truncated_beside_bf16_weights", "weights_truncated", "scale_in_bf16", "coarse_exponential")
"""faults that lie within the bound of every element: `conformance selftest` tells whether all elements show them"""


def run(a: Adapter, op: str, call: dict, meta):
    if op == "prefill":
        return a.flash_mla_sparse_fwd(**call)
    base = {"block_table": None, "cache_seqlens": None, "head_dim_v": D, "tile_scheduler_metadata": meta}
    return a.flash_mla_with_kvcache(**{**base, **call})


@remember
def steps(probe: str) -> list:
    return [(op, call, None if op == "refused" else expected(op, call)) for op, call in PROBES[probe]()]


def outcome(probe: str, knobs: str = "") -> set[str]:
    a, reasons = adapter(knobs), set()
    meta, _ = a.get_mla_metadata()
    for op, call, want in steps(probe):
        if want is None:
            with pytest.raises(RuntimeError):
                run(a, op, call, meta)
            continue
        try:
            got = run(a, op, call, meta)
        except Exception:
            reasons.add("exception")
            continue
        reasons |= wrong(want, got, knobs)
    return reasons


@pytest.mark.parametrize("probe", PROBES)
def test_correct_backend(probe):
    assert outcome(probe) == set()


@pytest.mark.parametrize("row", TABLE["variant"], ids=lambda r: r["name"])
def test_variant_is_right(row):
    assert {p: bad for p in PROBES if (bad := outcome(p, row["knobs"]))} == {}


@pytest.mark.parametrize("row", TABLE["fault"], ids=lambda r: r["name"])
def test_fault_shows(row):
    reasons = {row["reason"]} if isinstance(row["reason"], str) else set(row["reason"])
    assert reasons <= set(REASONS)
    if row["name"] in STATISTICAL:
        (op, call), = prefill(sm_scale=0.03)
        plain, faulty = (run(adapter(knobs), op, call, None)[0] for knobs in ("", row["knobs"]))
        assert not torch.equal(plain, faulty)
        return
    for probe in SHOWS[row["name"]]:
        assert reasons & outcome(probe, row["knobs"]), probe


def test_one_token_is_copied():
    (_, call), = one_token(normal(200, 1, D))
    out, max_logits, lse = adapter().flash_mla_sparse_fwd(**call)
    assert torch.equal(out, call["kv"][2].expand(3, 64, D))
    assert torch.equal(max_logits, lse)


def test_variants_differ_from_the_default():
    (op, call), = decode()
    results = [run(a, op, call, a.get_mla_metadata()[0])[1] for a in map(adapter, ("", "split_k=4", "tile_n=24"))]
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_cache_dtypes_agree():
    (op, call), = decode()
    a = adapter()
    results = [run(a, op, {**call, "k_cache": call["k_cache"].view(d)}, a.get_mla_metadata()[0])
               for d in (torch.uint8, torch.int8, torch.float8_e4m3fn)]
    assert all(torch.equal(r[0], results[0][0]) and torch.equal(r[1], results[0][1]) for r in results)


def test_batch_invariance_and_layout():
    (op, call), = decode(enable_batch_invariant=True)
    a = adapter()
    out, lse = run(a, op, call, a.get_mla_metadata()[0])
    alone = {**call, "q": call["q"][1:], "indices": call["indices"][1:]}
    out1, lse1 = run(a, op, alone, a.get_mla_metadata()[0])
    assert torch.equal(out[1:], out1)
    assert torch.equal(lse[1:], lse1)
    assert out.is_contiguous()
    assert lse.shape == (2, 64, 2)
    assert lse.stride() == (128, 1, 64)


def test_metadata_life():
    a = adapter()
    meta, second = a.get_mla_metadata("anything", b=3)
    assert second is None
    assert not meta.have_initialized
    (op, call), = decode()
    run(a, op, call, meta)
    assert meta.have_initialized
    assert meta.config.topk == 192
    assert meta.num_splits is None
    with pytest.raises(AssertionError):
        run(a, op, {**call, "indices": lists(2, 2, 128, among=100)}, meta)
    fresh, _ = a.get_mla_metadata()
    run(a, *long_list()[0], fresh)
    assert fresh.num_splits.tolist() == [0, 2]


IDX = lists(2, 2, 64, among=60)
DECODE_MISUSE = {
    "num_splits": ({"num_splits": 1}, AssertionError),
    "causal": ({"causal": True}, AssertionError),
    "not_fp8": ({"is_fp8_kvcache": False}, AssertionError),
    "no_indices": ({"indices": None}, AssertionError),
    "no_metadata": ({"tile_scheduler_metadata": None}, AssertionError),
    "heads": ({"q": normal(2, 2, 32, D)}, RuntimeError),
    "head_dim": ({"q": normal(2, 2, 64, 576)}, RuntimeError),
    "d_v": ({"head_dim_v": 576}, RuntimeError),
    "q_dtype": ({"q": normal(2, 2, 64, D).half()}, RuntimeError),
    "q_dims": ({"q": normal(2, 64, D)}, RuntimeError),
    "old_cache": ({"k_cache": torch.zeros(4, 5, 1, 656, dtype=torch.uint8)}, RuntimeError),
    "fp4_main": ({"k_cache": cache(4, 5, 288)}, RuntimeError),
    "kv_heads": ({"k_cache": torch.zeros(4, 5, 2, 528, dtype=torch.uint8)}, RuntimeError),
    "cache_rows": ({"k_cache": torch.zeros(4, 5, 1, 544, dtype=torch.uint8)[..., :528]}, RuntimeError),
    "topk": ({"indices": lists(2, 2, 100, among=60)}, RuntimeError),
    "index_dtype": ({"indices": IDX.long()}, RuntimeError),
    "index_batch": ({"indices": IDX[:1]}, RuntimeError),
    "length_shape": ({"topk_length": ints([1, 2, 3])}, RuntimeError),
    "sink_dtype": ({"attn_sink": SINKS.double()}, RuntimeError),
    "extra_alone": ({"extra_k_cache": cache(4, 5)}, RuntimeError),
    "extra_list_alone": ({"extra_indices_in_kvcache": IDX}, RuntimeError),
    "extra_length_alone": ({"extra_topk_length": ints([1, 2])}, RuntimeError),
    "extra_topk": ({"extra_k_cache": cache(4, 5), "extra_indices_in_kvcache": IDX[..., :60]}, RuntimeError),
}
PREFILL_MISUSE = {
    "d_v": {"d_v": 256}, "kv_heads": {"kv": normal(200, 2, D)}, "kv_dtype": {"kv": normal(200, 1, D).float()},
    "topk_64": {"indices": lists(3, 1, 64, among=200)}, "topk_150": {"indices": lists(3, 1, 150, among=200)},
    "index_rows": {"indices": lists(2, 1, 192, among=200)}, "heads": {"q": normal(3, 16, D)},
    "last_stride": {"q": normal(3, D, 64).transpose(1, 2)}, "lengths": {"topk_length": torch.zeros(3)},
}


@pytest.mark.parametrize("name", DECODE_MISUSE)
def test_decode_misuse(name):
    change, error = DECODE_MISUSE[name]
    a = adapter()
    meta, _ = a.get_mla_metadata()
    (op, call, want), = steps("decode")
    with pytest.raises(error):
        run(a, op, {**call, **change}, meta)
    assert wrong(want, run(a, op, call, meta)) == set(), "the object of the refused call is still empty"


@pytest.mark.parametrize("name", PREFILL_MISUSE)
def test_prefill_misuse(name):
    (_, call), = prefill()
    with pytest.raises(RuntimeError):
        adapter().flash_mla_sparse_fwd(**{**call, **PREFILL_MISUSE[name]})


def test_inputs_are_left_alone():
    (op, call), = extra(attn_sink=SINKS.clone(), topk_length=ints([5, 9]))
    before = {k: v.clone() for k, v in call.items()}
    a = adapter()
    run(a, op, call, a.get_mla_metadata()[0])
    for name, t in call.items():
        same = t.view(torch.uint8) if t.dtype == torch.uint8 else t
        assert torch.equal(same, before[name]), name
