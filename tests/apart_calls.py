"""Calls that the faults and variants written apart are tried on, made up by hand and no cases of the suite."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from adapters.cpu import deepep, deepgemm, deepselect, flashmla, tilekernels
from adapters.cpu.apart.row import Row
from adapters.cpu.kernels.knobs import Knobs

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
INF, NAN = math.inf, math.nan
Calls = list[dict[str, Any]]


class StandIn:
    """What a true method does, in torch: TileLang's programs need a compiler, a ring needs two ranks."""

    def gemm(self, a: Any, b: Any, c: Any, transpose_a: bool = False, transpose_b: bool = False, init: str = "clear",
             tile_m: int = 64, tile_n: int = 64, tile_k: int = 32) -> None:
        a, b = (a.T if transpose_a else a).double(), (b.T if transpose_b else b).double()
        c.copy_(a @ b + (c.double() if init == "c" else 0))

    def reduce(self, x: Any, out: Any, kind: str, dim: int = 1, clear: bool = True) -> None:
        out.copy_(x.abs().amax(dim) if kind == "absmax" else x.sum(dim))

    def gather(self, x: Any, index: Any, out: Any) -> None:
        inside = (index >= 0) & (index < len(x))
        out.copy_(torch.where(inside, x[index.clamp(0, len(x) - 1)], 0))

    def atomic_add(self, x: Any, index: Any, out: Any) -> None:
        inside = (index >= 0) & (index < len(out))
        out.index_add_(0, index[inside], x[inside])

    def cast(self, x: Any, out: Any) -> None:
        out.copy_(x)

    def clamp(self, x: Any, out: Any, low: float, high: float) -> None:
        out.copy_(x.clamp(low, high))

    def elementwise(self, x: Any, out: Any, function: str, tile: int = 128) -> None:
        out.copy_(getattr(torch, function)(x))

    def arithmetic(self, a: Any, b: Any, out: Any, function: str) -> None:
        out.copy_(torch.remainder(a, b))

    def copy(self, x: Any, out: Any, fill: float | None = None) -> None:
        out.fill_(fill or 0)
        out[: len(x), : x.shape[1]] = x

    def transpose(self, x: Any) -> Any:
        return x.T.contiguous()

    def PPBuffer__recv(self, buffer: Any, x: Any, src_rank_idx: int) -> None:
        x.copy_(torch.arange(x.numel(), dtype=x.dtype).view(x.shape))


def adapter(row: Row) -> Any:
    if row.module == "tilelang" or row.method.startswith("PPBuffer"):
        return StandIn()
    modules = {"deepselect": deepselect, "deepgemm": deepgemm, "tilekernels": tilekernels, "flashmla": flashmla,
               "deepep": deepep}
    return modules[row.module].Adapter(SimpleNamespace(knobs=Knobs(), group=None))


def noise(*shape: int, dtype: torch.dtype = BF16, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def numbers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x in rows of a multiple of 1024 bytes, poison behind each."""
    unit = 1024 // x.element_size()
    wide = torch.full((len(x), -(-x.shape[1] // unit) * unit), INF, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def topk(a: Any) -> Calls:
    def call(x: torch.Tensor, k: int, **more: Any) -> dict[str, Any]:
        return {"input": aligned(x), "topk": k, "abort_when_nan_found": False, **more}

    first_best = -noise(3, 300).abs() - 1
    first_best[:, 0] = -0.5
    beyond = noise(3, 64, dtype=FP32)
    beyond[[0, 1, 2], [20, 30, 25]] = 100.0
    tail_best = noise(2, 37, dtype=FP32)
    tail_best[:, 36] = 50.0
    broken = noise(3, 40, dtype=FP32)
    broken[1, 3], broken[2, 4] = -NAN, NAN
    broken[1, 3] = torch.tensor(-4194304, dtype=torch.int32).view(FP32)
    offset = i32(2**31 - 3, 5, -7)
    zeros = torch.zeros(2, 40, dtype=FP32)
    zeros[:, ::2] = -0.0
    own = torch.full((3, 24), 9, dtype=torch.int32)[:, :5]
    return [
        call(noise(3, 37, dtype=FP32), 5, sorted=True, end=i32(4, 20, 37), output_idx_offset=offset),
        call(noise(3, 37, dtype=FP32, seed=1), 5, sorted=True, end=i32(2, 30, 9), output_idx_offset=offset),
        call(tail_best, 4),
        call(first_best, 7, return_value=False, indices_type=torch.int32),
        call(torch.zeros(2, 33, dtype=FP32), 4),
        call(torch.arange(12288, dtype=FP32)[None], 64),
        call(noise(2, 50, dtype=FP32, size=1e-39), 6),
        call(noise(3, 30), 10, end=i32(0, 9, 3), output_idx_offset=i32(1, 2, 3), value_oob_fill_value=0.1),
        call(noise(1, 2000, dtype=FP32), 1500, sorted_index=True),
        call(beyond, 5, end=i32(20, 30, 25)),
        call(noise(3, 40, dtype=FP32), 5, indices_type=torch.int32, output_idx=own),
        call(broken, 5, output_idx_offset=i32(1, 2, 3)),
        call(zeros, 5),
    ]


def dense(a: Any) -> Calls:
    def call(m: int, n: int, k: int, d: torch.dtype = BF16, *, seed: int = 0, **more: Any) -> dict[str, Any]:
        out = torch.full((m, n), 768.0, dtype=d)
        return {"a": noise(m, k, seed=seed), "b": noise(n, k, seed=seed + 50), "d": out, **more}

    huge, odd = call(8, 8, 16), call(70, 72, 200)
    huge["a"], huge["b"] = torch.full((8, 16), 3e38, dtype=BF16), huge["b"].abs()
    odd["a"][3, 4] = NAN
    wide = {**call(70, 72, 200), "d": torch.full((70, 96), 768.0, dtype=BF16)[:, :72]}
    turned = call(70, 72, 200)
    turned["b"] = turned["b"].T.contiguous().T
    same = call(70, 72, 136, FP32, alpha=0.7)
    return [
        call(200, 72, 200, c=noise(200, 72), alpha=0.7), call(200, 72, 200, FP32, compiled_dims="mn"),
        call(70, 72, 520, seed=1), call(70, 72, 520, seed=2), huge, odd, wide, turned, {**same, "c": same["d"]},
    ]


def codes(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    raw = numbers(0, 256, rows, columns, dtype=torch.uint8, seed=seed)
    return torch.where((raw & 0x7F) == 0x7F, raw - 1, raw).view(E4M3)


def packed(rows: int, groups: int, low: int = 118, high: int = 137, seed: int = 0) -> torch.Tensor:
    """int32 [rows, words], packed along columns of a padded column-major tensor."""
    words = -(-groups // 4)
    raw = numbers(low, high, words, -(-rows // 4) * 4, 4, dtype=torch.uint8, seed=seed).view(torch.int32)[..., 0]
    return raw.T[:rows]


def scaled(a: Any) -> Calls:
    m, n, k = 131, 136, 528
    sa, sb = (torch.exp2(numbers(-4, 5, *shape, dtype=FP32, seed=s)) for shape, s in (((m, 5), 1), ((2, 5), 2)))

    def out() -> dict[str, Any]:
        return {"d": torch.zeros(m, n, dtype=BF16)}

    plain = {"a": (codes(m, k), sa), "b": (codes(n, k, 1), sb)}
    rough = {**plain, "b": (codes(n, k, 1), sb * 1.2345)}
    words = {"a": (codes(m, k), packed(m, 5)), "b": (codes(n, k, 1), packed(n, 5, seed=3)), "recipe": (1, 1, 128)}
    half = (numbers(-128, 128, n, k // 2, dtype=torch.int8), packed(n, 17, seed=4))
    summed = {**words, "d": noise(m, n, dtype=FP32), "alpha": 0.5}
    return [
        {**plain, **out()}, {**rough, **out()}, {**summed, "c": summed["d"]},
        {**words, "d": torch.zeros(m, n, dtype=FP32)},
        {"a": (codes(m, k), packed(m, 17, seed=5)), "b": half, "recipe": (1, 1, 32), **out()},
    ]


def grouped(a: Any) -> Calls:
    x = noise(256, 640)
    x[100:128] = NAN
    labels = torch.tensor([0] * 100 + [-1] * 28 + [2] * 128, dtype=torch.int32)
    ends = {"use_psum_layout": True, "expected_m_for_psum_layout": 32, "grouped_layout": i32(100, 100, 256)}
    both = {"a": x, "b": noise(3, 72, 640, seed=1)}
    return [{**both, "d": torch.full((256, 72), 768.0, dtype=BF16), "grouped_layout": labels},
            {**both, "a": x.nan_to_num(0), "d": torch.full((256, 72), 768.0, dtype=BF16), **ends}]


def telling(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """A zero row, ties of either format once scaled, maxima of either sign, an exact power, and noise."""
    x = noise(rows, columns, dtype=FP32)
    x[0] = 0
    x[1] = 0.5
    x[1, ::3], x[1, 0] = -2.5, 6.0
    x[2], x[3] = -17.0, 17.0
    x[2, 1], x[3, 2] = 448.0, -448.0
    x[4] *= 1e-6
    x[5, ::7] = -1e-12
    if dtype == FP32:
        x[6, 5], x[7, 5] = (top * 1024 * (1 + 2.0**-22) for top in (448, 6))
    return x.to(dtype)


def own_cast(a: Any) -> Calls:
    return [{"x": telling(12, 200, dtype), "use_ue8m0": up, "use_packed_ue8m0": both}
            for dtype in (BF16, FP32) for up, both in ((False, False), (True, False), (True, True))]


def token_cast(a: Any) -> Calls:
    modes: Calls = [{}, {"round_sf": True}, {"round_sf": True, "use_packed_ue8m0": True}, {"use_e4m3_sf": True},
                    {"use_tma_aligned_col_major_sf": True}]
    out = [{"x": telling(35, width, dtype), "fmt": fmt, "num_per_channels": group, **mode}
           for width, group, dtype in ((192, 128, BF16), (576, 64, FP32)) for fmt in ("e4m3", "e2m1") for mode in modes]
    sf = torch.exp2(numbers(-3, 4, 35, 6, dtype=FP32))
    given = (torch.full((35, 192), 768.0).to(E4M3), torch.zeros(35, 2))
    return [*out, {"x": (codes(35, 192), sf), "fmt": "e4m3", "num_per_channels": 64, "x_block_size": (1, 32)},
            {"x": telling(35, 192, BF16), "fmt": "e4m3", "num_per_channels": 128, "out": given}]


def gate(a: Any) -> Calls:
    ties = torch.zeros(5, 70)
    zeros = torch.zeros(3, 9)
    zeros[:, ::2] = -0.0
    tail = noise(5, 6, dtype=FP32)
    tail[:, 5] = 9.0
    return [{"scores": ties, "num_topk": 3}, {"scores": zeros, "num_topk": 9}, {"scores": tail, "num_topk": 2},
            {"scores": -noise(4, 40, dtype=FP32).abs(), "num_topk": 5},
            {"scores": 1 + noise(5, 64, dtype=FP32, size=1e-4), "num_topk": 8}]


def norm(a: Any) -> Calls:
    def call(*shape: int, dtype: torch.dtype = BF16, size: float = 1, eps: float = 1e-6, **more: Any) -> dict[str, Any]:
        weight = {"weight": noise(shape[-1], dtype=dtype, seed=9)}
        return {"x": noise(*shape, dtype=dtype, size=size), "eps": eps, "with_rstd": True, **weight, **more}

    return [call(5, 208), call(5, 208, dtype=FP32, eps=0.5), call(4, 256, dtype=FP32, size=1e-3),
            call(2, 3, 128, out_scale=0.7), call(3, 128, weight=None, out_scale=0.7),
            call(5, 144, residual=noise(5, 144, seed=3), residual_out=torch.full((5, 144), 768.0, dtype=BF16))]


def rotary(a: Any) -> Calls:
    angles = torch.arange(64)[:, None] * (0.7 ** torch.arange(64))[None]
    table = torch.cat([angles.cos(), angles.sin()], 1)
    narrow = torch.cat([angles[:, :32].cos(), angles[:, :32].sin()], 1)
    wide = noise(6, 3, 96, dtype=FP32)[..., :64]
    return [
        {"query": noise(6, 3, 64), "cos_sin_cache": narrow, "key": noise(6, 5, 64, seed=1), "conjugate": True},
        {"query": noise(2, 5, 2, 128), "cos_sin_cache": table, "interleaved": True},
        {"query": wide, "cos_sin_cache": narrow, "positions": torch.tensor([3, 63, 0, 9, 9, 40])},
        {"query": noise(6, 3, 64, dtype=FP32), "cos_sin_cache": narrow, "positions": i32(3, 5, 0, 9, 9, 40),
         "seqlen_offset": 7},
    ]


def momentum(a: Any) -> Calls:
    return [{"grad": noise(512, dtype=g), "momentum_buffer": noise(512, dtype=b, seed=1), "beta1": 0.9, "nesterov": n}
            for g, b, n in ((BF16, BF16, True), (FP32, FP32, False))]


def step(a: Any) -> Calls:
    return [{"matrix": noise(5, 512, dtype=FP32, size=s), "row_scale": noise(5, dtype=FP32, seed=1).abs() + 0.1,
             "col_scale": noise(512, dtype=FP32, seed=2).abs() + 0.1, "eps": 1e-3} for s in (1.0, 1e-4)]


def prefill(a: Any) -> Calls:
    def call(heads: int, topk: int, **more: Any) -> dict[str, Any]:
        return {"q": noise(3, heads, 512, size=0.3), "kv": noise(200, 1, 512, seed=1, size=0.3),
                "indices": numbers(0, 200, 3, 1, topk), "sm_scale": 512**-0.5, **more}

    listed = numbers(0, 200, 3, 1, 192, seed=5)
    listed[0, 0, :4] = i32(200, -(2**31), -(2**31) + 7, -1)
    listed[1] = -1
    sinks = torch.cat([noise(126, dtype=FP32, seed=7), torch.tensor([INF, -INF])])
    negative = call(64, 128)
    negative["kv"] = -noise(200, 1, 512, seed=1).abs()
    negative["q"] = noise(3, 64, 512, seed=2).abs()
    late = call(64, 128, sm_scale=2.0)
    late["indices"][..., -1] = 7
    late["kv"][7] *= 3
    return [call(64, 192, topk_length=i32(65, 192, 1)), call(128, 128, attn_sink=sinks), call(64, 192, indices=listed),
            negative, late]


def cache(blocks: int, page: int, row_bytes: int, seed: int) -> torch.Tensor:
    raw = numbers(0, 256, blocks, page, 1, row_bytes, dtype=torch.uint8, seed=seed)
    data = 512 if row_bytes == 528 else 256
    if row_bytes == 528:
        raw[..., :data] = torch.where((raw[..., :data] & 0x7F) == 0x7F, 0, raw[..., :data] & 0xBF)
        raw[..., data:] = numbers(118, 130, blocks, page, 1, 16, seed=seed + 1).to(torch.uint8)
    else:
        raw[..., data:] = numbers(0, 40, blocks, page, 1, 32, seed=seed + 1).to(torch.uint8)
    return raw


def decode(a: Any) -> Calls:
    def call(topk: int, tokens: int = 1, *, seed: int = 0, **more: Any) -> dict[str, Any]:
        lists = numbers(0, 100, 2, tokens, topk, seed=seed)
        lists[:, :, ::5] = -1
        return {"q": noise(2, tokens, 64, 512, size=0.02), "k_cache": cache(20, 5, 528, 1), "block_table": None,
                "cache_seqlens": None, "head_dim_v": 512, "indices": lists,
                "tile_scheduler_metadata": a.get_mla_metadata()[0], **more}

    extra = {"extra_k_cache": cache(9, 7, 288, 4), "extra_indices_in_kvcache": numbers(0, 63, 2, 1, 256, seed=6),
             "extra_topk_length": i32(250, 70)}
    small = {"k_cache": cache(20, 5, 528, 1)}
    small["k_cache"][..., 512:] = numbers(118, 126, 20, 5, 1, 16).to(torch.uint8)
    return [call(192, 2, topk_length=i32(0, 129)), call(192, 2, topk_length=i32(100, 190), seed=1),
            call(64, seed=2, **extra, **small), call(704, seed=3, attn_sink=noise(64, dtype=FP32), **small)]


SIZE = {"num_max_tokens_per_rank": 8, "hidden": 768, "num_topk": 3}


def routed(expert_alignment: int = 4) -> dict[str, Any]:
    ids = torch.tensor([[0, 3, -1], [2, -1, 5], [-1, -1, -1], [7, 6, 1], [0, 1, 2]])
    return {"topk_idx": ids, "topk_weights": noise(5, 3, dtype=FP32).abs() + 0.1, "num_experts": 8,
            "expert_alignment": expert_alignment}


def dispatch(a: Any) -> Calls:
    x = noise(5, 768)
    x[1, 3] = torch.tensor(0x7FA1, dtype=torch.int16).view(BF16)
    both = (codes(5, 768), noise(5, 6, dtype=FP32))
    stats = torch.ones(8, dtype=torch.int32)
    return [{"buffer": a.EPBuffer(**SIZE), **routed(), **more} for more in (
        {"x": x, "cumulative_local_expert_recv_stats": stats}, {"x": both}, {"x": x, "do_cpu_sync": False},
        {"x": x, "do_expand": True}, {"x": x, "do_expand": True, "do_zero_padding": True},
        {"x": x, "async_with_compute_stream": True, "defer_epilogue": True})]


def combine(a: Any) -> Calls:
    out = []
    for bias in (noise(5, 768, seed=2), (noise(5, 768, seed=2), noise(5, 768, seed=3))):
        buffer = a.EPBuffer(**SIZE)
        x, _, weights, handle, _ = a.EPBuffer__dispatch(buffer=buffer, x=noise(5, 768), **routed())
        out.append({"buffer": buffer, "x": x, "handle": handle, "topk_weights": weights, "bias": bias})
    buffer = a.EPBuffer(**SIZE, allow_multiple_reduction=False)
    x, _, _, handle, _ = a.EPBuffer__dispatch(buffer=buffer, x=noise(5, 768), do_expand=True, **routed())
    y = x.float() * torch.linspace(0.3, 1.7, len(x))[:, None]
    return [*out, {"buffer": buffer, "x": y.nan_to_num(0).bfloat16(), "handle": handle, "bias": noise(5, 768, seed=2)}]


def ring(a: Any) -> Calls:
    return [{"buffer": None, "x": torch.zeros(24, dtype=FP32), "src_rank_idx": 0}]


def gemm(a: Any) -> Calls:
    return [{"a": noise(40, 70, dtype=FP32), "b": noise(70, 70, dtype=FP32, seed=1), "c": noise(40, 70, dtype=FP32),
             "init": init} for init in ("clear", "c")]


CALLS: dict[str, Callable[[Any], Calls]] = {
    "deepselect.topk": topk, "deepselect.get_stride_requirement": lambda a: [{}],
    "deepgemm.bf16_gemm_nt": dense, "deepgemm.fp8_gemm_nt": scaled,
    "deepgemm.m_grouped_bf16_gemm_nt_contiguous": grouped, "deepgemm.per_token_cast_to_fp8": own_cast,
    "tilekernels.quant.per_token_cast": token_cast, "tilekernels.moe.topk_gate": gate,
    "tilekernels.quant.norm_forward": norm, "tilekernels.transform.apply_rotary": rotary,
    "tilekernels.engram.engram_sinkhorn_momentum_update": momentum, "tilekernels.engram.engram_sinkhorn_step": step,
    "flashmla.flash_mla_sparse_fwd": prefill, "flashmla.flash_mla_with_kvcache": decode,
    "flashmla.get_mla_metadata": lambda a: [{}, {}],
    "deepep.EPBuffer.dispatch": dispatch, "deepep.EPBuffer.combine": combine, "deepep.PPBuffer.recv": ring,
    "tilelang.gemm": gemm,
    "tilelang.reduce": lambda a: [
        {"x": -torch.arange(1.0, 71)[None], "out": torch.zeros(1), "kind": kind} for kind in ("absmax", "sum")],
    "tilelang.gather": lambda a: [{"x": torch.arange(9.0), "index": i32(-1, 3, 9).long(), "out": torch.zeros(3)}],
    "tilelang.atomic_add": lambda a: [{"x": torch.ones(3), "index": i32(1, 4, 0).long(), "out": torch.zeros(4)}],
    "tilelang.cast": lambda a: [{"x": torch.tensor([1e-6, 1.0]), "out": torch.zeros(2, dtype=torch.float16)}],
    "tilelang.clamp": lambda a: [{"x": torch.tensor([NAN, 3.0]), "out": torch.zeros(2), "low": -1.0, "high": 1.0}],
    "tilelang.elementwise": lambda a: [{"x": noise(200, dtype=FP32), "out": torch.zeros(200), "function": "exp"}],
    "tilelang.arithmetic": lambda a: [
        {"a": i32(-6, 7), "b": i32(3, 3), "out": i32(0, 0), "function": "floormod"}],
    "tilelang.copy": lambda a: [{"x": noise(3, 3, dtype=FP32), "out": torch.zeros(5, 5), "fill": 2.0}],
    "tilelang.transpose": lambda a: [{"x": noise(33, 65, dtype=FP32)}],
}
