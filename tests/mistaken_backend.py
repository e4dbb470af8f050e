"""Rehearsed backends whose adapters make one mistake, named by the option `mistake`.

A mistake is planted where the adapter calls the vendor's package (`CALLS`: what it passes or takes
back is altered on the way), in what the adapter gives back (`RESULTS`), or in the backend itself.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from adapters.standins.backend import Rehearsed, RehearsedAscend950, RehearsedSM90, RehearsedSM100
from adapters.standins.loading import Binding, Rig
from adapters.standins.signatures import rows_of
from conformance.protocol import Group

Call = Callable[..., Any]


def renamed(old: str, new: str) -> Callable[[Call], Call]:
    """The argument is passed under another name."""
    return lambda f: lambda *a, **kw: f(*a, **{new if k == old else k: v for k, v in kw.items()})


def dropped(*names: str) -> Callable[[Call], Call]:
    return lambda f: lambda *a, **kw: f(*a, **{k: v for k, v in kw.items() if k not in names})


def changed(name: str, how: Callable[[Any], Any]) -> Callable[[Call], Call]:
    """The argument, where it is given and not None, is handed over as something else."""
    def wrap(f: Call) -> Call:
        return lambda *a, **kw: f(*a, **{k: how(v) if k == name and v is not None else v for k, v in kw.items()})

    return wrap


def swapped(one: str, other: str) -> Callable[[Call], Call]:
    def wrap(f: Call) -> Call:
        return lambda *a, **kw: f(*a, **{{one: other, other: one}.get(k, k): v for k, v in kw.items()})

    return wrap


def added(**more: Any) -> Callable[[Call], Call]:
    return lambda f: lambda *a, **kw: f(*a, **{**kw, **more})


def returning(how: Callable[[Any], Any]) -> Callable[[Call], Call]:
    return lambda f: lambda *a, **kw: how(f(*a, **kw))


def fresh_output(name: str) -> Callable[[Call], Call]:
    """A result is written to memory of the adapter's own."""
    return changed(name, lambda t: t.new_empty(t.shape))


def swapped_scales(f: Call) -> Call:
    def call(*a: Any, **kw: Any) -> Any:
        (x, sx), (y, sy) = kw["a"], kw["b"]
        return f(*a, **{**kw, "a": (x, sy), "b": (y, sx)})

    return call


def instead(other: str, how: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Call], Call]:
    """Another function of the package, with arguments that give the same result."""
    package, _, name = other.partition(".")
    return lambda f: lambda *a, **kw: getattr(importlib.import_module(package), name)(*a, **how(kw))


def first_result(f: Call) -> Call:
    """The object that the first call gave is used for ever."""
    kept: list[Any] = []

    def call(*a: Any, **kw: Any) -> Any:
        if not kept:
            kept.append(f(*a, **kw))
        return kept[0]

    return call


def first_argument(name: str) -> Callable[[Call], Call]:
    def wrap(f: Call) -> Call:
        kept: list[Any] = []

        def call(*a: Any, **kw: Any) -> Any:
            kept.append(kw[name])
            return f(*a, **{**kw, name: kept[0]})

        return call

    return wrap


def positional(*order: str) -> Callable[[Call], Call]:
    """Arguments are passed by place, in this order."""
    def wrap(f: Call) -> Call:
        return lambda *a, **kw: f(*a, *(kw[n] for n in order), **{k: v for k, v in kw.items() if k not in order})

    return wrap


CALLS: Mapping[str, tuple[str, str, Callable[[Call], Call]]] = {
    # name: package, function, what is done to its calls
    "topk_renamed": ("deep_select", "topk", renamed("sorted_index", "sort_index")),
    "topk_offset_dropped": ("deep_select", "topk", dropped("output_idx_offset")),
    "topk_end_int64": ("deep_select", "topk", changed("end", lambda t: t.long())),
    "topk_input_copied": ("deep_select", "topk", changed("input", lambda t: t.contiguous())),
    "topk_index_type_dropped": ("deep_select", "topk", dropped("indices_type")),
    "topk_output_fresh": ("deep_select", "topk", fresh_output("output_idx")),
    "topk_results_swapped": ("deep_select", "topk", returning(lambda r: (r[1], r[0]))),
    "topk_fill_dropped": ("deep_select", "topk", dropped("idx_oob_fill_value")),
    "gemm_operands_swapped": ("deep_gemm", "bf16_gemm_nt", swapped("a", "b")),
    "gemm_c_dropped": ("deep_gemm", "bf16_gemm_nt", dropped("c")),
    "gemm_hint_dropped": ("deep_gemm", "bf16_gemm_nt", dropped("compiled_dims")),
    "gemm_wrong_function": ("deep_gemm", "bf16_gemm_nt",
                            instead("deep_gemm.bf16_gemm_nn", lambda kw: {**kw, "b": kw["b"].t()})),
    "gemm_alpha_renamed": ("deep_gemm", "bf16_gemm_nt", renamed("alpha", "scale")),
    "gemm_called_twice": ("deep_gemm", "bf16_gemm_nt", lambda f: lambda *a, **kw: (f(*a, **kw), f(*a, **kw))[0]),
    "fp8_scales_swapped": ("deep_gemm", "fp8_gemm_nt", swapped_scales),
    "fp8_recipe_dropped": ("deep_gemm", "fp8_gemm_nt", dropped("recipe")),
    "fp8_scales_row_major": ("deep_gemm", "fp8_gemm_nt", changed("a", lambda p: (p[0], p[1].clone(
        memory_format=importlib.import_module("torch").contiguous_format)))),
    "fp8_scales_left_in_int32": ("deep_gemm", "fp8_gemm_nt", changed("a", lambda p: (
        p[0], p[1].t().contiguous().t().int()))),
    "grouped_layout_int64": ("deep_gemm", "m_grouped_bf16_gemm_nt_contiguous",
                             changed("grouped_layout", lambda t: t.long())),
    "grouped_psum_dropped": ("deep_gemm", "m_grouped_bf16_gemm_nt_contiguous", dropped("use_psum_layout")),
    "grouped_expected_m_dropped": ("deep_gemm", "m_grouped_bf16_gemm_nt_contiguous",
                                   dropped("expected_m_for_psum_layout")),
    "grouped_alignment_not_set": ("deep_gemm", "set_mk_alignment_for_contiguous_layout",
                                  lambda f: lambda *a, **kw: None),
    "cast_gran_k_dropped": ("deep_gemm", "per_token_cast_to_fp8", dropped("gran_k")),
    "decode_lengths_swapped": ("flash_mla", "flash_mla_with_kvcache", swapped("topk_length", "extra_topk_length")),
    "decode_old_num_splits": ("flash_mla", "flash_mla_with_kvcache",
                              added(num_splits=importlib.import_module("torch").zeros(1))),
    "decode_sink_dropped": ("flash_mla", "flash_mla_with_kvcache", dropped("attn_sink")),
    "decode_invariance_dropped": ("flash_mla", "flash_mla_with_kvcache", dropped("enable_batch_invariant")),
    "decode_lse_in_base_2": ("flash_mla", "flash_mla_with_kvcache", returning(lambda r: (r[0], r[1] / math.log(2)))),
    "metadata_kept": ("flash_mla", "get_mla_metadata", first_result),
    "prefill_scale_renamed": ("flash_mla", "flash_mla_sparse_fwd", renamed("sm_scale", "softmax_scale")),
    "prefill_indices_int64": ("flash_mla", "flash_mla_sparse_fwd", changed("indices", lambda t: t.long())),
    "prefill_results_reordered": ("flash_mla", "flash_mla_sparse_fwd", returning(lambda r: (r[0], r[2], r[1]))),
    "cast_round_dropped": ("tile_kernels.quant", "per_token_cast", dropped("round_sf")),
    "cast_columns_dropped": ("tile_kernels.quant", "per_token_cast", dropped("use_tma_aligned_col_major_sf")),
    "norm_residuals_swapped": ("tile_kernels.quant", "norm_forward", swapped("residual", "residual_out")),
    "norm_scale_dropped": ("tile_kernels.quant", "norm_forward", dropped("out_scale")),
    "rope_key_dropped": ("tile_kernels.transform", "apply_rotary", dropped("key")),
    "rope_positions_int32": ("tile_kernels.transform", "apply_rotary", changed("positions", lambda t: t.int())),
    "rope_offset_dropped": ("tile_kernels.transform", "apply_rotary", dropped("seqlen_offset")),
    "momentum_nesterov_dropped": ("tile_kernels.engram", "engram_sinkhorn_momentum_update", dropped("nesterov")),
    "momentum_not_in_place": ("tile_kernels.engram", "engram_sinkhorn_momentum_update",
                              changed("momentum_buffer", lambda t: t.clone())),
    "gate_renamed": ("tile_kernels.moe", "topk_gate", renamed("num_topk", "topk")),
    "dispatch_not_waited_for": ("deep_ep", "EPBuffer.dispatch", added(async_with_compute_stream=True)),
    "dispatch_stale_handle": ("deep_ep", "EPBuffer.combine", first_argument("handle")),
    "combine_biases_in_a_list": ("deep_ep", "EPBuffer.combine", changed("bias", list)),
    "combine_weights_dropped": ("deep_ep", "EPBuffer.combine", dropped("topk_weights")),
    "pipe_sends_a_copy": ("deep_ep", "PPBuffer.send", changed("x", lambda t: t.clone())),
    "pipe_wrong_peer": ("deep_ep", "PPBuffer.recv", changed("src_rank_idx", lambda r: (r + 1) % 4)),
}


def _spoil(package: str, function: str, wrap: Callable[[Call], Call]) -> None:
    """Every later look-up of the function finds the altered one, which tells the same signature."""
    owner: Any = sys.modules[package]
    *path, name = function.split(".")
    for part in path:
        owner = getattr(owner, part)
    real = getattr(owner, name)
    spoilt = _named(package, function, wrap(real))
    if isinstance(real, Binding):
        spoilt.__name__ = name
        setattr(owner, name, Binding(spoilt))
        return
    setattr(owner, name, functools.wraps(real)(spoilt))


def _named(package: str, function: str, f: Call) -> Call:
    """The same with every argument handed on by its name, however the adapter passed it."""
    root, _, rest = f"{package}.{function}".partition(".")
    rows = {r.name: r for platform in ("cuda", "ascend") for r in rows_of(root, platform)}
    row = rows[rest]
    first = 1 if row.method else 0
    if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in row.signature.parameters.values()):
        return f
    return lambda *a, **kw: f(*a[:first], **dict(zip(row.signature.parameters, a[first:], strict=False)), **kw)


class Mistaken(Rehearsed):
    """Put in front of a rehearsed backend."""

    def installed(self, options: Mapping[str, str], group: Group | None) -> Rig:
        rig = super().installed({k: v for k, v in options.items() if k != "mistake"}, group)
        self.mistake = options.get("mistake", "")
        if self.mistake in CALLS:
            _spoil(*CALLS[self.mistake])
        elif self.mistake and self.mistake not in OWN:
            raise ValueError(self.mistake)
        return rig

    @classmethod
    def describe(cls, options: Mapping[str, str]) -> Any:
        return super().describe({k: v for k, v in options.items() if k != "mistake"})

    def synchronize(self) -> None:
        if self.mistake != "synchronize_missing":
            super().synchronize()

    def set_settings(self, module: str, settings: Mapping[str, Any]) -> None:
        if self.mistake != "settings_not_set":
            super().set_settings(module, settings)
        else:
            self.rig.calls.add("settings", module, settings)

    def view(self, buf: Any, offset: int, spec: Any) -> Any:
        made = super().view(buf, offset, spec)
        return made.contiguous() if self.mistake == "view_loses_strides" else made


OWN = ("synchronize_missing", "settings_not_set", "view_loses_strides")
"""mistakes of the backend itself"""


class MistakenSM90(Mistaken, RehearsedSM90):
    """SM90"""


class MistakenSM100(Mistaken, RehearsedSM100):
    """SM100"""


class MistakenAscend950(Mistaken, RehearsedAscend950):
    """Ascend 950"""
