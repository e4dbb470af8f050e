"""Packages that write down how they are called, and a backend that calls the chips' adapters on host tensors."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from adapters.ascend.backend import AscendBackend
from adapters.nvidia.backend import NvidiaBackend
from adapters.standins.signatures import parsed
from conformance.protocol import Group


class Recorder:
    """Calls in order: (name, positional arguments, keyword arguments)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def function(self, name: str, parameters: str = "*args, **kwargs", answer: Any = None) -> Any:
        """A function of this signature that writes its call down and gives `answer`, called if it can be."""
        def told(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.calls.append((name, args, kwargs))
            return answer(*args, **kwargs) if callable(answer) else answer

        # A signature of its own, so that a wrong argument name is refused and `inspect` sees what it would see.
        signature = parsed(f"({parameters})")

        def made(*args: Any, **kwargs: Any) -> Any:
            signature.bind(*args, **kwargs)
            return told(args, kwargs)

        made.__name__ = made.__qualname__ = name.rpartition(".")[2]
        made.__signature__ = signature  # type: ignore[attr-defined]
        return made


def module(name: str, **members: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(members)
    return made


@contextmanager
def installed(*modules: types.ModuleType) -> Iterator[None]:
    """These modules can be imported, instead of any of the same name."""
    before = {m.__name__: sys.modules.get(m.__name__) for m in modules}
    sys.modules.update({m.__name__: m for m in modules})
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = old


class NvidiaOnHost(NvidiaBackend):
    device_type, mask_variable, collective = "cpu", "", "gloo"


class AscendOnHost(AscendBackend):
    device_type, mask_variable, collective, plugin = "cpu", "", "gloo", ""


def backend(arch: str, group: Group | None = None, **options: str) -> NvidiaBackend | AscendBackend:
    cls: Any = AscendOnHost if arch.startswith("ascend") else NvidiaOnHost
    chosen: Mapping[str, str] = {"arch": arch, **options}
    return cls(device="0", options=chosen, group=group)


# Signatures as the packages publish them

GEMM = "a, b, d, c=None, compiled_dims='nk', alpha=None, epilogue=None"
FP8_GEMM = ("a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims='nk', disable_ue8m0_cast=False, "
            "alpha=None, epilogue=None")
GROUPED = ("a, b, d, grouped_layout, compiled_dims='nk', use_psum_layout=False, ensure_zero_padding=True, "
           "expected_m_for_psum_layout=None, epilogue=None")
TOPK = ("input, topk, sorted=False, begin=None, end=None, indices_type=None, sorted_index=False, hint=None, "
        "output_idx=None, output_idx_offset=None, idx_oob_fill_value=2147483647, value_oob_fill_value=float('-inf'), "
        "return_value=True, abort_when_nan_found=True")
DECODE = ("q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, "
          "softmax_scale=None, causal=False, is_fp8_kvcache=True, indices=None, attn_sink=None, extra_k_cache=None, "
          "extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, enable_batch_invariant=False")
CAST = ("x, fmt, num_per_channels, x_block_size=None, use_tma_aligned_col_major_sf=False, round_sf=False, "
        "use_packed_ue8m0=False, use_e4m3_sf=False, stochastic_cast=False, out=None")
DISPATCH = ("self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, num_experts=None, "
            "num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, previous_event=None, "
            "async_with_compute_stream=False, allocate_on_comm_stream=False, handle=None, do_handle_copy=False, "
            "do_cpu_sync=None, do_expand=False, do_zero_padding=False, use_tma_aligned_col_major_sf=False, "
            "defer_epilogue=False")
COMBINE = ("self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None, "
           "async_with_compute_stream=False, allocate_on_comm_stream=False, defer_epilogue=False")


def deep_gemm(r: Recorder, release: str = "2.8") -> types.ModuleType:
    alignment = [256 if release == "ascend-0.1" else 128]
    old = release == "2.6"
    cut = ", alpha=None, epilogue=None" if old else ""
    out = module(
        "deep_gemm",
        bf16_gemm_nt=r.function("bf16_gemm_nt", GEMM.replace(cut, "") if cut else GEMM),
        fp8_gemm_nt=r.function("fp8_gemm_nt", FP8_GEMM.replace(cut, "") if cut else FP8_GEMM),
        m_grouped_bf16_gemm_nt_contiguous=r.function("m_grouped_bf16_gemm_nt_contiguous", GROUPED),
        per_token_cast_to_fp8=r.function("per_token_cast_to_fp8",
                                         "x, use_ue8m0, gran_k=128, use_packed_ue8m0=False", ("codes", "scales")),
        get_mk_alignment_for_contiguous_layout=lambda: alignment[0],
        set_mk_alignment_for_contiguous_layout=lambda n: alignment.__setitem__(0, n),
    )
    if old:
        out.fp8_mqa_logits = r.function("fp8_mqa_logits")
    else:
        out.use_deterministic_algorithms = r.function("use_deterministic_algorithms", "enabled")
    if release == "ascend-0.1":
        out.get_npu_arch = lambda: "dav-3510"
    else:
        out.m_grouped_bf16_gemm_nt_masked = r.function("m_grouped_bf16_gemm_nt_masked")
    return out


def deep_select(r: Recorder, strides: tuple[int, int] = (1024, 32), parameters: str = TOPK) -> types.ModuleType:
    return module("deep_select", __version__="1.0.0", topk=r.function("topk", parameters, ("values", "indices")),
                  get_stride_requirement=r.function("get_stride_requirement", "", strides))


def flash_mla(r: Recorder, decode: str = DECODE, answer: Any = ("out", "lse")) -> types.ModuleType:
    return module("flash_mla", __version__="1.0.0",
                  get_mla_metadata=r.function("get_mla_metadata", "*args, **kwargs", ("metadata", None)),
                  flash_mla_with_kvcache=r.function("flash_mla_with_kvcache", decode, answer),
                  flash_mla_sparse_fwd=r.function("flash_mla_sparse_fwd",
                                                  "q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None",
                                                  ("out", "max", "lse")))


def tile_kernels(r: Recorder, release: str = "2.1", cast: Any = ("data", "sf")) -> tuple[types.ModuleType, ...]:
    if release == "1.0":
        parts = {"moe": module("tile_kernels.moe", topk_gate=r.function("moe.topk_gate", "scores, num_topk"),
                               top2_sum_gate=r.function("moe.top2_sum_gate")),
                 "quant": module("tile_kernels.quant", per_token_cast=r.function(
                     "quant.per_token_cast", CAST.replace(", use_e4m3_sf=False, stochastic_cast=False, out=None", ""),
                     cast))}
    else:
        parts = {
            "moe": module("tile_kernels.moe", topk_gate=r.function("moe.topk_gate", "scores, num_topk", "idx")),
            "quant": module("tile_kernels.quant", per_token_cast=r.function("quant.per_token_cast", CAST, cast),
                            norm_forward=r.function("quant.norm_forward", "x, weight, eps, residual=None, "
                                                    "out_scale=1.0, out=None, residual_out=None, with_rstd=False")),
            "transform": module("tile_kernels.transform", apply_rotary=r.function(
                "transform.apply_rotary", "query, cos_sin_cache, key=None, positions=None, interleaved=False, "
                "conjugate=False, seqlen_offset=0")),
            "engram": module(
                "tile_kernels.engram",
                engram_sinkhorn_momentum_update=r.function("engram.engram_sinkhorn_momentum_update",
                                                           "grad, momentum_buffer, beta1, nesterov=True"),
                engram_sinkhorn_step=r.function("engram.engram_sinkhorn_step", "matrix, row_scale, col_scale, eps"),
                engram_sinkhorn_step_reduce=r.function("engram.engram_sinkhorn_step_reduce",
                                                       "col_sumsq_partial, col_sumsq")),
        }
    return (module("tile_kernels", __version__=f"{release}.0", **parts), *parts.values())


def deep_ep(r: Recorder, generation: str = "2.5", dispatch: str = DISPATCH, ids: Any = None) -> types.ModuleType:
    import torch

    class Buffer:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            r.calls.append((type(self).__name__, args, kwargs))

        send = r.function("send", "self, x, dst_rank_idx, num_sms=None")
        recv = r.function("recv", "self, x, src_rank_idx, num_sms=None")
        combine = r.function("combine", COMBINE, ("x", None, "event"))

    made = type({"2.5": "EPBuffer", "2": "ElasticBuffer", "1": "Buffer"}[generation], (Buffer,),
                {"dispatch": r.function("dispatch", dispatch, ("x", "idx", "w", "handle", "event"))})
    members = {made.__name__: made}
    if generation == "2.5":
        members["PPBuffer"] = type("PPBuffer", (Buffer,), {})
    return module("deep_ep", __version__="2.1.0", topk_idx_t=ids or torch.int64, **members)
