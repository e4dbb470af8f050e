"""TileKernels (`tile_kernels`): its public calls, by submodule."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from adapters.upstream.base import UpstreamAdapter, given
from adapters.upstream.release import parameters
from adapters.upstream.scales import four_to_a_word, two_to_a_word

AMAX_CLAMPS = {
    "amax_clamp_e4m3": ("e4m3", False), "amax_clamp_e2m1": ("e2m1", False),
    "amax_clamp_e4m3_with_e4m3_sf": ("e4m3", True), "amax_clamp_e2m1_with_e4m3_sf": ("e2m1", True),
}
"""settings by name: the arguments of get_amax_clamp_for_quant"""
SWITCHES = {"num_sms": ("get_num_sms", "set_num_sms"), "pdl": ("get_pdl", "set_pdl"),
            "token_alignment": ("get_token_alignment", "set_token_alignment"),
            "deterministic_algorithms": ("get_deterministic_algorithms", "use_deterministic_algorithms")}


class Adapter(UpstreamAdapter):
    """A method an op, named `<submodule>__<function>`."""

    module, package = "tilekernels", "tile_kernels"

    def part(self, name: str) -> Any:
        """A submodule."""
        return getattr(self.lib, name, None) or importlib.import_module(f"{self.package}.{name}")

    def moe__topk_gate(self, scores: Any, num_topk: int) -> Any:
        return self.part("moe").topk_gate(scores, num_topk)

    def quant__per_token_cast(self, x: Any, fmt: str, num_per_channels: int, x_block_size: Any = None,
                              use_tma_aligned_col_major_sf: bool = False, round_sf: bool = False,
                              use_packed_ue8m0: bool = False, use_e4m3_sf: bool | None = None,
                              stochastic_cast: bool | None = None, out: Any = None) -> Any:
        if self.release == "1.0":
            # It has no such argument; that it is not asked for is what False says.
            use_e4m3_sf, stochastic_cast = use_e4m3_sf or None, stochastic_cast or None
        call = dict(use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf, round_sf=round_sf,
                    use_packed_ue8m0=use_packed_ue8m0,
                    **given(x_block_size=tuple(x_block_size) if isinstance(x_block_size, list) else x_block_size,
                            use_e4m3_sf=use_e4m3_sf, stochastic_cast=stochastic_cast))
        cast = self.part("quant").per_token_cast
        if not self.two_exponents_a_word:
            return cast(x, fmt, num_per_channels, **call, **given(out=out))
        if isinstance(x, tuple) and x_block_size is not None:
            x = x[0], two_to_a_word(x[1], -(-_columns(x) // x_block_size[1]))
        if out is not None and use_packed_ue8m0:
            sf = two_to_a_word(out[1], -(-_columns(x) // num_per_channels))
            cast(x, fmt, num_per_channels, **call, out=(out[0], sf))
            return out
        data, sf = cast(x, fmt, num_per_channels, **call, **given(out=out))
        return data, four_to_a_word(sf, column_major=use_tma_aligned_col_major_sf) if use_packed_ue8m0 else sf

    def quant__norm_forward(self, x: Any, weight: Any, eps: float, residual: Any = None, out_scale: float = 1.0,
                            out: Any = None, residual_out: Any = None, with_rstd: bool = False) -> Any:
        return self.part("quant").norm_forward(
            x, weight, eps, out_scale=out_scale, with_rstd=with_rstd,
            **given(residual=residual, out=out, residual_out=residual_out))

    def transform__apply_rotary(self, query: Any, cos_sin_cache: Any, key: Any = None, positions: Any = None,
                                interleaved: bool = False, conjugate: bool = False, seqlen_offset: int = 0) -> Any:
        return self.part("transform").apply_rotary(
            query, cos_sin_cache, interleaved=interleaved, conjugate=conjugate, seqlen_offset=seqlen_offset,
            **given(key=key, positions=positions))

    def engram__engram_sinkhorn_momentum_update(self, grad: Any, momentum_buffer: Any, beta1: float,
                                                nesterov: bool = True) -> Any:
        return self.part("engram").engram_sinkhorn_momentum_update(grad, momentum_buffer, beta1, nesterov=nesterov)

    def engram__engram_sinkhorn_step(self, matrix: Any, row_scale: Any, col_scale: Any, eps: float) -> Any:
        return self.part("engram").engram_sinkhorn_step(matrix, row_scale, col_scale, eps)

    def engram__engram_sinkhorn_step_reduce(self, col_sumsq_partial: Any, col_sumsq: Any) -> Any:
        return self.part("engram").engram_sinkhorn_step_reduce(col_sumsq_partial, col_sumsq)

    @property
    def two_exponents_a_word(self) -> bool:
        """Whether packed scales are int16 of two exponents, as on Ascend."""
        return bool(self.backend.chip.get("two_exponents_a_word", False))

    def recognised(self) -> str:
        quant = self.part("quant")
        takes = parameters(getattr(quant, "per_token_cast", None))
        if takes is None:
            raise self.cannot_tell("quant.per_token_cast is missing or does not tell its parameters")
        new = hasattr(quant, "norm_forward") and "use_e4m3_sf" in takes
        old = hasattr(quant, "per_channel_cast_fused") or hasattr(self.part("moe"), "top2_sum_gate")
        if new and not old:
            return "2.1"
        if old and not new:
            return "1.0"
        marks = "both" if new else "neither"
        raise self.cannot_tell(f"it has {marks} of quant.norm_forward, which came in 2.x, and moe.top2_sum_gate, which "
                               "went then")

    def knobs(self) -> dict[str, tuple[Callable[[], Any], Callable[[Any], None] | None]]:
        lib, out = self.lib, {}
        for name, (get, put) in SWITCHES.items():
            if hasattr(lib, get):
                out[name] = (getattr(lib, get), getattr(lib, put, None))
        if hasattr(lib, "get_amax_clamp_for_quant"):
            for name, (fmt, e4m3_sf) in AMAX_CLAMPS.items():
                out[name] = (lambda f=fmt, e=e4m3_sf: lib.get_amax_clamp_for_quant(f, e),
                             lambda value, f=fmt, e=e4m3_sf: lib.set_amax_clamp_for_quant(f, e, value))
        return out


def _columns(x: Any) -> int:
    """Elements of a row: a tensor's columns, or two for each byte of packed codes."""
    data = x[0] if isinstance(x, tuple) else x
    return data.shape[-1] * (2 if data.element_size() == 1 and not data.dtype.is_floating_point else 1)
