"""The sparse-attention oracles against plain loops, blocked single-precision kernels, and a table of faults."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from conformance.model import Problem, Variant
from references.expected import Inputs
from references.flashmla import attention, cache, sparse
from references.formats import codec

torch = pytest.importorskip("torch")

DIM = 512
HEADS = 3
NAN, INF = math.nan, math.inf
SCALE = DIM**-0.5


def bf16(x: Any) -> np.ndarray:
    return codec.encode(np.asarray(x, np.float64), "bf16")


def problem(family="normal", **values: Any) -> Problem:
    return Problem("flashmla.x", Variant({}), {}, values, family, 0)


# --- a blocked kernel, in torch's single precision ------------------------------------------------------------


def kernel(q, rows, scale, sink=None, *, block=64, splits=1, reverse=False, p="bfloat16", base2=True, threshold=0.0,
           fault=""):  # fmt: skip
    """Online softmax over one token's rows. Returns out [h, d] bf16 codes, top [h], lse [h], as NumPy.

    threshold: the running maximum is kept while it grows by no more.
    """
    q = torch.tensor(q, dtype=torch.float32)
    rows = torch.tensor(np.ascontiguousarray(rows), dtype=torch.float32)
    if fault == "drop_last":
        rows = rows[:-1]
    if fault == "wrong_scale":
        scale = 192**-0.5
    rows = rows.flip(0) if reverse else rows
    unit = math.log2(math.e) if base2 else 1.0
    power, log = (torch.exp2, torch.log2) if base2 else (torch.exp, torch.log)
    parts = []
    for part in torch.tensor_split(rows, splits):
        m = torch.full((len(q),), -1e30)
        top = torch.full((len(q),), -INF)
        total, out = torch.zeros(len(q)), torch.zeros(len(q), DIM)
        for r in part.split(block):
            z = q @ r.T * (scale * unit)
            if fault == "bf16_logits":
                z = z.bfloat16().float()
            top = torch.maximum(top, z.amax(1))
            new = torch.where(top > m + threshold, torch.maximum(m, top), m)
            shift = power(m - new)
            m = new
            prob = power(z - m[:, None])
            total = total * (1 if fault == "no_rescale_l" else shift) + prob.sum(1)
            prob = prob.to(getattr(torch, p)).float()
            kept = torch.ones_like(shift) if fault == "no_rescale_o" else shift
            out = out * kept[:, None] + prob @ (r.roll(1, 0) if fault == "v_shifted" else r)
            if fault == "bf16_out_sum":
                out = out.bfloat16().float()
        parts.append((m, total, out / total[:, None] if splits > 1 else out, top))
    if splits == 1:
        [(m, total, out, top)] = parts
        lse = m + log(total)
        scaled = out / total[:, None]
    else:
        lses = torch.stack([m + log(total) for m, total, _, _ in parts])
        top = torch.stack([t for *_, t in parts]).amax(0)
        high = lses.amax(0)
        lse = high + log(power(lses - high).sum(0))
        weights = torch.full_like(lses, 1 / splits) if fault == "even_merge" else power(lses - lse)
        scaled = (weights[:, :, None] * torch.stack([o for _, _, o, _ in parts])).sum(0)
    lse_natural = lse / unit
    if sink is not None and fault != "no_sink":
        scaled = scaled / (1 + torch.exp(torch.tensor(sink) - lse_natural))[:, None]
    if fault == "lse_base2":
        lse_natural = lse_natural * math.log2(math.e)
    if fault == "lse_is_max":
        lse_natural = top / unit
    if fault == "sink_in_lse":
        lse_natural = torch.logaddexp(lse_natural, torch.tensor(sink))
    codes = scaled.bfloat16().view(torch.int16).numpy().view(np.uint16)
    return codes, (top / unit).numpy(), lse_natural.numpy()


CORRECT = [
    {},
    {"reverse": True},
    {"block": 16, "base2": False},
    {"block": 96, "threshold": 6.0},
    {"splits": 2},
    {"splits": 5, "reverse": True, "block": 32},
    {"p": "float32"},
]


def family(name: str, rng: np.random.Generator, heads: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    q, kv = rng.standard_normal((heads, DIM)), rng.standard_normal((n, DIM))
    if name == "peaky":
        q *= 6
    elif name == "huge":
        q *= 40
    elif name == "rising":
        q, kv = np.abs(q), np.abs(kv) * np.linspace(0.1, 1, n)[:, None]
    elif name == "uniform":
        q *= 0
    elif name == "onehot":
        q = np.zeros((heads, DIM))
        q[:, 7] = 0.3
    elif name == "tied":
        kv = kv[rng.integers(0, 2, n) % n]
    elif name == "cancel":
        q[:, DIM // 2 :] = q[:, : DIM // 2]
        kv[:, DIM // 2 :] = -kv[:, : DIM // 2] * (1 + 2.0**-6)
    elif name == "small":
        q, kv = q * 2.0**-100, kv * 2.0**-100
    elif name == "mean4":
        kv += 4
    return codec.round_to(q, "bf16"), codec.round_to(kv, "bf16")


FAMILIES = ["normal", "peaky", "huge", "rising", "uniform", "onehot", "tied", "cancel", "small", "mean4"]


def prefill(q, kv, indices, *, sink=None, lengths=None, scale=SCALE, name="other", profile=None):
    """Expected of real arrays q [s, h, d], kv [n, d], indices [s, topk]."""
    arrays = {"q": bf16(q), "kv": bf16(kv)[:, None], "indices": np.asarray(indices, np.int32)[:, None]}
    formats = {"q": "bf16", "kv": "bf16", "indices": "int32"}
    if sink is not None:
        arrays["attn_sink"], formats["attn_sink"] = np.asarray(sink, np.float32), "fp32"
    if lengths is not None:
        arrays["topk_length"], formats["topk_length"] = np.asarray(lengths, np.int32), "int32"
    return sparse.flash_mla_sparse_fwd(problem(name, sm_scale=scale), Inputs(arrays, formats), profile or {})


def failing(expected, got) -> set[str]:
    formats = {"out": "bf16"}
    judged = {n: expected[n].judge(a, formats.get(n.rpartition("/")[2], "fp32")) for n, a in got.items()}
    return {n for n, j in judged.items() if not j.ok}


def run_prefill(q, kv, indices, sink=None, lengths=None, scale=SCALE, **knobs):
    """The kernel over every token; an empty list by the contract."""
    out, top, lse = [], [], []
    for t, entries in enumerate(indices):
        counted = entries[: len(entries) if lengths is None else lengths[t]]
        row = counted[(counted >= 0) & (counted < len(kv))]
        heads = q.shape[1]
        o, m, s = (kernel(q[t], kv[row], scale, sink, **knobs) if len(row) else
                   (np.zeros((heads, DIM), np.uint16), np.full(heads, -INF), np.full(heads, INF)))  # fmt: skip
        out.append(o)
        top.append(m)
        lse.append(s)
    tops, lses = (np.stack(a).astype(np.float32) for a in (top, lse))
    return {"out": np.stack(out), "max_logits": tops, "lse": lses}


# --- right answers --------------------------------------------------------------------------------------------


def test_value_is_the_documented_sum_by_plain_loops():
    rng = np.random.default_rng(1)
    q, kv = family("normal", rng, 2, 9)
    row = np.array([3, -1, 3, 8, 9, 0, 5], np.int32)
    sink = np.array([0.5, -1.0], np.float32)
    e = prefill(q[None], kv, row[None], sink=sink, lengths=[6])
    for h in range(2):
        entries = [3, 3, 8, 0]
        z = [SCALE * math.fsum(a * b for a, b in zip(q[h], kv[j], strict=True)) for j in entries]
        lse = math.log(math.fsum(math.exp(v) for v in z))
        factor = 1 / (1 + math.exp(float(sink[h]) - lse))
        assert e["max_logits"].value[0, h] == pytest.approx(max(z), rel=1e-13)
        assert e["lse"].value[0, h] == pytest.approx(lse, rel=1e-13)
        for d in (0, 17, 511):
            want = factor * math.fsum(math.exp(v - lse) * kv[j, d] for v, j in zip(z, entries, strict=True))
            assert e["out"].value[0, h, d] == pytest.approx(want, rel=1e-11, abs=1e-14)


@pytest.mark.parametrize("name", FAMILIES)
def test_correct_kernels_of_every_order_block_and_split_pass(name):
    rng = np.random.default_rng(FAMILIES.index(name))
    for n, knobs in ((1, {}), (200, None)):
        q, kv = family(name, rng, HEADS, n)
        indices = rng.integers(0, n, (1, n)).astype(np.int32)
        sink = np.array([0.3, -INF, INF], np.float32)
        e = prefill(q[None], kv, indices, sink=sink, name=name)
        assert not e["out"].unspecified.any()
        for one in CORRECT if knobs is None else [knobs]:
            got = run_prefill(q[None], kv, indices, sink, **one)
            assert failing(e, got) == set(), (n, one)


def test_bounds_are_tight_enough_to_matter():
    rng = np.random.default_rng(2)
    q, kv = family("normal", rng, 64, 640)
    indices = np.arange(640)[None]
    e = prefill(q[None], kv, indices, name="normal")
    got = run_prefill(q[None], kv, indices)
    j = e["out"].judge(got["out"], "bf16")
    assert 0.2 < j.ratio.max() <= 1
    assert np.median(e["out"].bound) < 0.03 * np.sqrt(np.mean(e["out"].value ** 2))
    assert e["lse"].bound.max() < 4e-4


def test_closed_forms():
    rng = np.random.default_rng(3)
    q, kv = family("normal", rng, HEADS, 64)
    one = prefill(q[None], kv, [[5]])
    assert failing(one, {"out": np.broadcast_to(bf16(kv[5]), (1, HEADS, DIM))}) == set()
    flat = prefill(0 * q[None], kv, [[1, 2, 3, 4]])
    np.testing.assert_allclose(flat["out"].value[0, 0], kv[1:5].mean(0), rtol=0, atol=1e-14)
    np.testing.assert_allclose(flat["lse"].value, math.log(4), rtol=1e-15)
    doubled = prefill(q[None], kv, [[7, 9, 7, 9]])
    single = prefill(q[None], kv, [[7, 9]])
    np.testing.assert_allclose(doubled["lse"].value, single["lse"].value + math.log(2), rtol=1e-14)
    quarter = prefill(q[None], kv, [[7, 9]], sink=(single["lse"].value[0] + math.log(3)).astype(np.float32))
    np.testing.assert_allclose(quarter["out"].value * 4, single["out"].value, rtol=1e-6)


# --- wrong answers --------------------------------------------------------------------------------------------

FAULTS = [
    # fault, family, outputs that show it
    ("drop_last", "normal", {"out", "lse"}),
    ("wrong_scale", "normal", {"out", "lse", "max_logits"}),
    ("lse_base2", "normal", {"lse"}),
    ("lse_is_max", "normal", {"lse"}),
    ("sink_in_lse", "normal", {"lse"}),
    ("no_sink", "normal", {"out"}),
    ("bf16_logits", "peaky", {"lse", "max_logits"}),
    ("no_rescale_l", "rising", {"lse"}),
    ("no_rescale_o", "rising", {"out"}),
    ("v_shifted", "normal", {"out"}),
    ("even_merge", "peaky", {"out"}),
    ("bf16_out_sum", "mean4", {"out"}),
    ("fp8_p", "normal", {"out"}),
]


@pytest.mark.parametrize(("fault", "name", "shown"), FAULTS)
def test_each_faulty_kernel_fails_where_it_should(fault, name, shown):
    rng = np.random.default_rng(4)
    q, kv = family(name, rng, 16, 256)
    indices = np.arange(256)[None]
    sink = rng.uniform(1, 8, 16).astype(np.float32)
    e = prefill(q[None], kv, indices, sink=sink, name=name)
    good = {"splits": 3} if fault == "even_merge" else {"block": 8 if fault == "bf16_out_sum" else 64}
    assert failing(e, run_prefill(q[None], kv, indices, sink, **good)) == set()
    bad = {"p": "float8_e4m3fn"} if fault == "fp8_p" else {"fault": fault}
    assert shown <= failing(e, run_prefill(q[None], kv, indices, sink, **good, **bad))


def test_fp8_p_passes_where_it_is_declared():
    rng = np.random.default_rng(4)
    q, kv = family("normal", rng, 16, 256)
    indices = np.arange(256)[None]
    e = prefill(q[None], kv, indices, name="normal", profile={"p": "e4m3"})
    assert failing(e, run_prefill(q[None], kv, indices, p="float8_e4m3fn")) == set()


def test_where_nothing_is_rounded_before_the_output_a_cut_output_fails():
    """Weights that are equal, or one alone, leave one rounding: the last."""
    rng = np.random.default_rng(16)
    q, kv = family("normal", rng, HEADS, 16)
    e = prefill(0 * q[None], kv, np.arange(16)[None])
    mean = kv.mean(0)
    right, cut = (np.broadcast_to(codec.encode(mean, "bf16", rounding=r), (1, HEADS, DIM))
                  for r in ("nearest_even", "toward_zero"))  # fmt: skip
    assert failing(e, {"out": right}) == set()
    assert failing(e, {"out": cut}) == {"out"}
    one = prefill(q[None], kv, [[3]])
    assert (one["out"].bound == 0).all(), "the row itself"


def test_subnormal_rows_are_kept_unless_a_flush_is_declared():
    rng = np.random.default_rng(17)
    q, kv = family("normal", rng, HEADS, 16)
    kv = codec.round_to(kv * 2.0**-128, "bf16")
    indices = np.arange(16)[None]
    got = run_prefill(q[None], np.where(np.abs(kv) < 2.0**-126, 0, kv), indices)
    assert failing(prefill(q[None], kv, indices), run_prefill(q[None], kv, indices)) == set()
    assert failing(prefill(q[None], kv, indices), got) == {"out"}
    assert failing(prefill(q[None], kv, indices, profile={"subnormals": "flush"}), got) == set()


def test_masks_lengths_and_repeats_count_exactly():
    rng = np.random.default_rng(5)
    q, kv = family("normal", rng, HEADS, 40)
    base = rng.integers(0, 40, (1, 64)).astype(np.int32)
    base[0, [0, 10, 63]] = [-1, 40, -(2**31)]
    right = prefill(q[None], kv, base, lengths=[50])
    good = run_prefill(q[None], kv, base, lengths=[50])
    assert failing(right, good) == set()
    mistakes = {
        "one too few": (base, [49]),
        "one too many": (base, [51]),
        "length ignored": (base, [64]),
        "index -1 read as row 0": (np.where(base == -1, 0, base), [50]),
        "index s_kv read as the last row": (np.where(base == 40, 39, base), [50]),
        "repeats counted once": (np.unique(base[:, :50])[None], [100]),
    }
    for name, (indices, lengths) in mistakes.items():
        assert failing(right, run_prefill(q[None], kv, indices, lengths=lengths)) >= {"out", "lse"}, name


def edit(name: str, value: float):
    def apply(got):
        got[name] = got[name].copy()
        got[name][0, 1] = value if name != "out" else bf16(value)

    return apply


def nudge(ulps: int):
    def apply(got):
        got["out"] = got["out"].copy()
        got["out"][0, 1, 100] += ulps

    return apply


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (edit("out", NAN), "out"),
        (edit("out", INF), "out"),
        (edit("lse", NAN), "lse"),
        (edit("lse", INF), "lse"),
        (edit("max_logits", -INF), "max_logits"),
        (edit("max_logits", NAN), "max_logits"),
        (nudge(40), "out"),
        (nudge(0x8000), "out"),
    ],
)
def test_one_wrong_element_is_found_and_named(change, shown):
    rng = np.random.default_rng(6)
    q, kv = family("normal", rng, HEADS, 64)
    indices = np.arange(64)[None]
    e, got = prefill(q[None], kv, indices), run_prefill(q[None], kv, indices)
    assert failing(e, got) == set()
    change(got)
    assert failing(e, got) == {shown}
    bad = e[shown].judge(got[shown], "bf16" if shown == "out" else "fp32").bad
    assert bad[0, 1].any()
    assert not bad[0, [0, 2]].any()


def test_empty_lists():
    rng = np.random.default_rng(7)
    q, kv = family("normal", rng, HEADS, 4)
    e = prefill(np.stack([q, q]), kv, [[-1, 4], [0, 1]], lengths=[2, 0], sink=[0.0, INF, -INF])
    zeros, plus, minus = np.zeros((2, HEADS, DIM), np.uint16), np.full((2, HEADS), INF), np.full((2, HEADS), -INF)
    assert failing(e, {"out": zeros, "lse": plus.astype(np.float32), "max_logits": minus.astype(np.float32)}) == set()
    assert failing(e, {"out": zeros | 0x8000}) == set(), "the sign of a zero is free"
    assert failing(e, {"lse": minus.astype(np.float32), "max_logits": plus.astype(np.float32)}) == {"lse", "max_logits"}
    assert failing(e, {"out": zeros + 1}) == {"out"}
    assert failing(e, {"lse": np.full((2, HEADS), NAN, np.float32)}) == {"lse"}
    assert prefill(q[:0][None], kv, [[0]])["out"].shape == (1, 0, DIM)


def test_nan_and_infinity_in_rows():
    rng = np.random.default_rng(8)
    q, kv = family("normal", rng, HEADS, 8)
    kv[3, 5] = NAN
    read, unread = prefill(q[None], kv, [[1, 2, 3]]), prefill(q[None], kv, [[1, 2, 4]])
    got = run_prefill(q[None], kv, np.array([[1, 2, 3]]))
    assert failing(read, {"out": got["out"], "lse": got["lse"]}) == set()
    assert np.isnan(read["out"].value).all()
    assert failing(read, {"lse": np.full((1, HEADS), INF, np.float32)}) == {"lse"}, "a NaN sum is no empty row"
    clean = run_prefill(q[None], kv, np.array([[1, 2, 4]]))
    assert failing(unread, clean) == set()
    assert failing(unread, got) == {"out", "lse", "max_logits"}
    behind = prefill(q[None], kv, [[1, 2, 3]], lengths=[2])
    assert behind["out"].unspecified.all(), "documented exception"
    kv[3, 5] = -INF * np.sign(q[0, 5])
    heads_down = np.sign(q[:, 5]) == np.sign(q[0, 5])
    e = prefill(q[None], kv, [[1, 2, 3]])
    got = run_prefill(q[None], kv, np.array([[1, 2, 3]]))
    assert failing(e, got) == set()
    shown = e["out"].value[0][heads_down]
    assert np.isnan(shown[:, 5]).all(), "a weight of 0 times an infinite value"
    assert np.isfinite(np.delete(shown, 5, axis=1)).all()


def test_bound_never_hides_a_dim_behind_another():
    rng = np.random.default_rng(9)
    q, kv = family("normal", rng, 1, 64)
    kv[:, 0] *= 2.0**40
    q[:, 0] = 0
    e = prefill(q[None], kv, np.arange(64)[None])
    assert e["out"].bound[0, 0, 1:].max() < 0.1


# --- decode ---------------------------------------------------------------------------------------------------


def cache_bytes(rng: np.random.Generator, blocks: int, page: int, nbytes: int = 528) -> np.ndarray:
    codes = rng.integers(0, 256, (blocks, page, 1, nbytes)).astype(np.uint8)
    if nbytes == 528:
        data = codes[..., :512]
        data[(data & 0x7F) == 0x7F] ^= 1
        codes[..., 512:] = rng.integers(118, 123, codes[..., 512:].shape)
    else:
        codes[..., 256:] = rng.integers(0x20, 0x38, codes[..., 256:].shape)
    return codes


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def plain_token(token: np.ndarray) -> list[float]:
    """One token by the written format, bit by bit."""
    values = []
    for d in range(DIM):
        if len(token) == 528:
            c, s = int(token[d]), int(token[512 + d // 32])
            values.append(plain_e4m3(c) * 2.0 ** (s - 127))
        else:
            c = int(token[d // 2]) >> (4 * (d % 2)) & 0xF
            values.append((-1 if c & 8 else 1) * E2M1[c & 7] * plain_e4m3(int(token[256 + d // 16])))
    return values


def plain_e4m3(c: int) -> float:
    exponent, fraction = c >> 3 & 0xF, c & 7
    size = fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
    return -size if c & 0x80 else size


@pytest.mark.parametrize("nbytes", [528, 288])
def test_cache_decoder_agrees_with_the_written_format_and_torch(nbytes):
    rng = np.random.default_rng(10)
    tokens = cache_bytes(rng, 1, 6, nbytes).reshape(6, nbytes)
    decoded = cache.decode_tokens(tokens)
    assert decoded.tolist() == [plain_token(t) for t in tokens]
    if nbytes == 528:
        data = torch.from_numpy(tokens[:, :512].copy()).view(torch.float8_e4m3fn).double().reshape(6, 16, 32)
        scale = torch.from_numpy(tokens[:, 512:].copy()).view(torch.float8_e8m0fnu).double()
        assert (data * scale[..., None]).reshape(6, 512).numpy().tolist() == decoded.tolist()


def test_cache_specials():
    token = np.zeros((1, 528), np.uint8)
    token[0, :512], token[0, 512:] = 0x38, 127
    token[0, [0, 1, 2]] = [0x7F, 0x80, 0x01]
    token[0, [513, 514, 515]] = [255, 0, 254]
    row = cache.decode_tokens(token)[0]
    assert np.isnan(row[0])
    assert row[1] == 0
    assert np.signbit(row[1])
    assert row[2] == 2.0**-9
    assert np.isnan(row[32:64]).all()
    assert (row[64:96] == 2.0**-127).all()
    assert (row[96:128] == 2.0**127).all()
    assert (cache.decode_tokens(token, 0xE0)[0, 32:64] == 2.0**97).all()
    with pytest.raises(ValueError, match="528 or 288"):
        cache.decode_tokens(np.zeros((1, 584), np.uint8))


def decode_inputs(rng, *, b=2, s_q=2, topk=64, extra=None, sink=False, lengths=None, extra_lengths=None, prefix=""):
    a: dict[str, np.ndarray] = {
        "q": bf16(rng.standard_normal((b, s_q, HEADS, DIM))),
        "k_cache": cache_bytes(rng, 5, 7),
        "indices": rng.integers(-1, 35, (b, s_q, topk)).astype(np.int32),
    }
    if sink:
        a["attn_sink"] = rng.standard_normal(HEADS).astype(np.float32)
    if lengths is not None:
        a["topk_length"] = np.asarray(lengths, np.int32)
    if extra:
        a["extra_k_cache"] = cache_bytes(rng, 3, 4, extra)
        a["extra_indices_in_kvcache"] = rng.integers(-1, 12, (b, s_q, 64)).astype(np.int32)
        if extra_lengths is not None:
            a["extra_topk_length"] = np.asarray(extra_lengths, np.int32)
    return {prefix + n: x for n, x in a.items()}


def wrap(arrays: dict[str, np.ndarray]) -> Inputs:
    names = {np.dtype("u2"): "bf16", np.dtype("u1"): "uint8", np.dtype("i4"): "int32", np.dtype("f4"): "fp32",
             np.dtype("i1"): "int8"}  # fmt: skip
    return Inputs(arrays, {n: names[a.dtype] for n, a in arrays.items()})


def run_decode(arrays, *, scale=SCALE, tokens=cache.decode_tokens, skip_extra=False, **knobs):
    q = codec.decode(arrays["q"], "bf16")
    b, s_q = q.shape[:2]
    out, lse = np.zeros((b, s_q, HEADS, DIM), np.uint16), np.full((b, HEADS, s_q), INF, np.float32)
    pairs = [("k_cache", "indices", "topk_length")]
    if "extra_k_cache" in arrays and not skip_extra:
        pairs.append(("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"))
    for i in range(b):
        for t in range(s_q):
            rows = []
            for store, index, length in pairs:
                row = arrays[index][i, t, : arrays[length][i] if length in arrays else None]
                rows.append(tokens(arrays[store].reshape(-1, arrays[store].shape[-1])[row[row >= 0]]))
            rows = np.concatenate(rows)
            if len(rows):
                out[i, t], _, lse[i, :, t] = kernel(q[i, t], rows, scale, arrays.get("attn_sink"), **knobs)
    return {"out": out, "softmax_lse": lse}


@pytest.mark.parametrize("extra", [None, 528, 288])
@pytest.mark.parametrize("sink", [False, True])
def test_decode_passes_correct_kernels(extra, sink):
    rng = np.random.default_rng(11)
    a = decode_inputs(rng, extra=extra, sink=sink, lengths=[0, 33], extra_lengths=[20, 0])
    e = sparse.flash_mla_with_kvcache(problem(), wrap(a), {})
    assert e["softmax_lse"].shape == (2, HEADS, 2)
    for knobs in CORRECT:
        assert failing(e, run_decode(a, **knobs)) == set(), knobs
    assert (e["softmax_lse"].value[0] == INF).all() == (extra is None)
    views = dict(a, k_cache=a["k_cache"].view(np.int8))
    again = sparse.flash_mla_with_kvcache(problem(), wrap(views), {})
    assert (again["out"].value == e["out"].value).all()


def test_decode_faults():
    rng = np.random.default_rng(12)
    a = decode_inputs(rng, extra=288, sink=True, lengths=[50, 33])
    e = sparse.flash_mla_with_kvcache(problem(), wrap(a), {})

    def tokens(change):
        def read(raw):
            raw = raw.copy()
            change(raw)
            return cache.decode_tokens(raw)

        return read

    def next_scale(raw):
        if raw.shape[1] == 528:
            raw[:, 512:] = np.roll(raw[:, 512:], 1, axis=1)

    def one_exponent(raw):
        if raw.shape[1] == 528:
            raw[:, 515] += 1

    def nibbles(raw):
        if raw.shape[1] == 288:
            raw[:, :256] = raw[:, :256] >> 4 | raw[:, :256] << 4

    def unscaled(raw):
        if raw.shape[1] == 528:
            raw[:, 512:] = 127

    data, scales = (a["k_cache"][..., part].reshape(5, -1) for part in (slice(512), slice(512, None)))
    planar = dict(a, k_cache=np.concatenate([data, scales], 1).reshape(5, 7, 1, 528))
    wrong = {
        "scale of the group before": run_decode(a, tokens=tokens(next_scale)),
        "one exponent": run_decode(a, tokens=tokens(one_exponent)),
        "nibble order": run_decode(a, tokens=tokens(nibbles)),
        "no scales": run_decode(a, tokens=tokens(unscaled)),
        "planar page": run_decode(planar, tokens=lambda raw: np.nan_to_num(cache.decode_tokens(raw))),
        "extra list left out": run_decode(a, skip_extra=True),
        "length of the other request": run_decode(dict(a, topk_length=a["topk_length"][::-1])),
        "sink added to lse": run_decode(a, fault="sink_in_lse"),
        "lse transposed": {"softmax_lse": run_decode(a)["softmax_lse"][:, ::-1].copy()},
    }
    assert failing(e, run_decode(a)) == set()
    for name, got in wrong.items():
        assert failing(e, got), name


def test_decode_rows_of_which_the_contract_is_silent():
    rng = np.random.default_rng(13)
    a = decode_inputs(rng, lengths=[10, 65])
    a["indices"][0, 0, 3], a["indices"][0, 1, 3], a["indices"][0, 1, 40] = -2, 4, 999
    free = sparse.flash_mla_with_kvcache(problem(), wrap(a), {})["out"].unspecified[..., 0, 0]
    assert free.tolist() == [[True, False], [True, True]], "wild index; only counted entries; length above topk"
    skipped = sparse.flash_mla_with_kvcache(problem(), wrap(a), {"invalid_index": "negative"})["out"].unspecified
    assert skipped[..., 0, 0].tolist() == [[False, False], [True, True]]
    a["topk_length"][:] = 64
    a["k_cache"][..., 512:] = 254
    assert sparse.flash_mla_with_kvcache(problem(), wrap(a), {})["out"].unspecified.all()


def test_nan_codes_poison_only_the_tokens_that_read_them():
    rng = np.random.default_rng(14)
    a = decode_inputs(rng, b=1, topk=4)
    a["indices"][:] = [[[0, 1, 2, -1], [3, 4, 5, -1]]]
    a["k_cache"][0, 4, 0, 77] = 0xFF
    e = sparse.flash_mla_with_kvcache(problem(), wrap(a), {})
    assert np.isnan(e["out"].value[0, 1]).all()
    assert np.isfinite(e["out"].value[0, 0]).all()
    assert failing(e, run_decode(a)) == set()


def test_one_metadata_object_serves_both_steps():
    rng = np.random.default_rng(15)
    first, second = decode_inputs(rng), decode_inputs(rng)
    arrays = {f"decode/{n}": x for n, x in first.items()} | {f"again/{n}": x for n, x in second.items()}
    e = sparse.get_mla_metadata(problem(softmax_scale=None, **{"again/softmax_scale": 0.125}), wrap(arrays), {})
    assert set(e) == {"decode/out", "decode/softmax_lse", "again/out", "again/softmax_lse"}
    right = run_decode(first), run_decode(second, scale=0.125)
    got = {f"{step}/{n}": x for step, run in zip(("decode", "again"), right, strict=True) for n, x in run.items()}
    assert failing(e, got) == set()
    assert failing(e, dict(got, **{"again/out": got["decode/out"]})) == {"again/out"}
    assert failing(e, {f"again/{n}": x for n, x in run_decode(second).items()}) == {"again/out", "again/softmax_lse"}


def test_rules_read_the_profile():
    assert attention.Rules.of({"p": "fp16", "l_from": "rounded"}) == attention.Rules("fp16", "rounded", False)
    with pytest.raises(ValueError, match="fp17"):
        attention.Rules.of({"p": "fp17"})


def test_the_largest_logit_owes_nothing_to_the_exponential() -> None:
    """Logits far below 1 are judged as closely as others: an error of exp is none of theirs."""
    rng = np.random.default_rng(8)
    q, kv = family("normal", rng, HEADS, 64)
    indices = np.arange(64)[None]
    e, got = prefill(q[None], kv, indices, scale=2.0**-18), run_prefill(q[None], kv, indices, scale=2.0**-18)
    assert failing(e, got) == set()
    got["max_logits"] = np.zeros_like(got["max_logits"])
    assert failing(e, got) == {"max_logits"}
