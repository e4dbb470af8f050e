"""Contract of `tile_kernels` 2.1.0. Sections are those of dossiers/tilekernels.md."""

from __future__ import annotations

from typing import Any

import torch

from adapters.cpu import tilekernels
from adapters.standins.checks import align, asserts, ceil_div
from adapters.standins.device import pending, shadow

FLOATS = (torch.bfloat16, torch.float32)
PACK = {"cuda": 4, "ascend": 2}
WORD = {"cuda": torch.int32, "ascend": torch.int16}
DEFAULT_CLAMPS = {
    ("e4m3", False): 1e-4, ("e2m1", False): 6.0 * 2.0**-126, ("e4m3", True): 0.875, ("e2m1", True): 6.0 * 2.0**-9,
}
"""3.1"""


class Package:
    """A method a public function; dots of its name are `__`. What the wrappers check is AssertionError."""

    def __init__(self, rig: Any) -> None:
        self.rig, self.arch, self.platform = rig, rig.arch, rig.arch.platform
        self.kernel = tilekernels.Adapter(rig.host)
        self.config__reset_runtime_config()

    def state(self) -> dict[str, Any]:
        """Settings as a call finds them."""
        return {f"amax_clamp_{fmt}" + ("_with_e4m3_sf" if e4m3 else ""): clamp
                for (fmt, e4m3), clamp in self.clamps.items()}

    # 1: configuration

    def config__reset_runtime_config(self) -> None:
        self.num_sms, self.pdl, self.alignment, self.deterministic = self.arch.cores, False, 128, False
        self.clamps = dict(DEFAULT_CLAMPS)

    def config__is_ascend(self) -> bool:
        return self.arch.is_ascend

    def config__get_device(self) -> str:
        return self.arch.device

    def set_num_sms(self, num_sms: int) -> None:
        asserts(0 < num_sms <= self.arch.cores, f"num_sms {num_sms}")
        self.num_sms = num_sms

    def get_num_sms(self) -> int:
        return self.num_sms

    def get_device_num_sms(self) -> int:
        return self.arch.cores

    def set_pdl(self, use_pdl: bool) -> None:
        self.pdl = use_pdl

    def get_pdl(self) -> bool:
        return self.pdl

    def set_token_alignment(self, token_alignment: int) -> None:
        self.alignment = token_alignment

    def get_token_alignment(self) -> int:
        return self.alignment

    def use_deterministic_algorithms(self, enabled: bool) -> None:
        self.deterministic = enabled

    def get_deterministic_algorithms(self) -> bool:
        return self.deterministic

    def set_amax_clamp_for_quant(self, fmt: str, use_e4m3_sf: bool, clamp_min_value: float) -> None:
        asserts((fmt, use_e4m3_sf) in self.clamps, f"unknown format {fmt}")
        self.clamps[fmt, use_e4m3_sf] = clamp_min_value

    def get_amax_clamp_for_quant(self, fmt: str, use_e4m3_sf: bool) -> float:
        asserts((fmt, use_e4m3_sf) in self.clamps, f"unknown format {fmt}")
        return self.clamps[fmt, use_e4m3_sf]

    # 2.1

    def moe__topk_gate(self, scores: Any, num_topk: int) -> torch.Tensor:
        asserts(scores.dim() == 2 and scores.dtype == torch.float32 and scores.is_contiguous(), "scores")
        asserts(0 < num_topk <= min(scores.shape[1], 32), f"num_topk {num_topk}")
        if not torch.isfinite(scores).all():
            self.rig.device.trap("device-side assert: a score is not finite")
            scores = torch.nan_to_num(scores)
        return self._late(self.kernel.moe__topk_gate(scores, num_topk))

    # 2.2

    def quant__per_token_cast(
        self, x: Any, fmt: str, num_per_channels: int, x_block_size: Any, use_tma_aligned_col_major_sf: bool,
        round_sf: bool, use_packed_ue8m0: bool, use_e4m3_sf: bool, stochastic_cast: bool, out: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ascend = self.arch.is_ascend
        asserts(fmt in ("e4m3", "e2m1"), f"fmt {fmt!r}")
        asserts(not use_packed_ue8m0 or round_sf, "use_packed_ue8m0 needs round_sf")
        asserts(not (round_sf and use_e4m3_sf), "round_sf excludes use_e4m3_sf")
        asserts(num_per_channels in ((32,) if ascend else (16, 32, 64, 128)), f"num_per_channels {num_per_channels}")
        data, x_sf = x if isinstance(x, tuple) else (x, None)
        asserts(data.dim() == 2, "x must have two axes")
        codes = data.dtype in (torch.int8, torch.uint8)
        t, h = data.shape[0], data.shape[1] * (2 if codes else 1)
        asserts(h % (128 if ascend else 64) == 0, f"{h} columns")
        asserts(data.stride(1) == 1 or data.shape[1] <= 1, "the last stride of x")
        if x_sf is None:
            asserts(data.dtype in FLOATS, f"x in {data.dtype}")
            asserts(x_block_size is None, "x_block_size without scales")
        else:
            asserts(data.dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8), f"x in {data.dtype}")
            asserts(x_block_size is not None, "scales without x_block_size")
            asserts(not ascend or x_block_size[1] == 32, "blocks of 32 columns on Ascend")
            asserts(self.arch.capability < 10 or codes or num_per_channels >= 32, "FP8 input on SM100: at least 32")
            x_sf = self._input_sf(x_sf, t, h, x_block_size)
        if ascend:
            asserts(not stochastic_cast and not use_e4m3_sf, "neither stochastic_cast nor E4M3 scales on Ascend")
        if stochastic_cast and self.arch.name == "sm90":
            msg = "compilation failed: stochastic conversion needs sm_100a or sm_103a"
            raise RuntimeError(msg)
        asserts(not (out is not None and out[1] is not None and use_tma_aligned_col_major_sf),
                "a given sf can't be column-major")
        for (f, e4m3_sf), value in self.clamps.items():
            self.kernel.settings[f"amax_clamp_{f}" + ("_with_e4m3_sf" if e4m3_sf else "")] = value
        given = data if x_sf is None else (data, x_sf)
        got, scales = self.kernel.quant__per_token_cast(
            given, fmt, num_per_channels, x_block_size, False, round_sf, use_packed_ue8m0, use_e4m3_sf)
        if use_packed_ue8m0 and ascend:
            groups = ceil_div(h, num_per_channels)
            words = scales.contiguous().view(torch.int16).reshape(t, -1)
            scales = words[:, :ceil_div(groups, 2)].contiguous()
        if use_tma_aligned_col_major_sf:
            rows = t if ascend else align(t, 16 // scales.element_size())
            column = torch.empty(rows * scales.shape[1], dtype=scales.dtype).as_strided(scales.shape, (1, rows))
            scales = column.copy_(scales)
        results = []
        for true, target in zip((got, scales), out or (None, None), strict=True):
            if target is not None:
                asserts(target.shape == true.shape and target.dtype == true.dtype, "out has a wrong shape or dtype")
            results.append(pending(true) if target is None else (target, true))
        self.rig.device.launch(results)
        return results[0][0], results[1][0]

    def _input_sf(self, sf: torch.Tensor, t: int, h: int, block: Any) -> torch.Tensor:
        """Scales of the input, packed ones in the words of the cpu kernel: 3.1."""
        allowed = (torch.float32, WORD[self.platform], *(() if self.arch.is_ascend else (torch.float8_e4m3fn,)))
        asserts(sf.dtype in allowed, f"scales of x in {sf.dtype}")
        packed = sf.dtype == WORD[self.platform]
        wide = ceil_div(h, block[1])
        words = ceil_div(wide, PACK[self.platform]) if packed else wide
        asserts(tuple(sf.shape) == (ceil_div(t, block[0]), words), f"scales of x: {tuple(sf.shape)}")
        asserts(sf.stride(1) == 1 or sf.stride(0) == 1 or min(sf.shape) <= 1, "scales of x: row- or column-major")
        asserts(not packed or block[1] > 1, "packed scales of single columns")
        if not (packed and self.arch.is_ascend):
            return sf
        even = torch.zeros(sf.shape[0], align(words, 2), dtype=torch.int16)
        even[:, :words] = sf
        return even.view(torch.int32)

    def quant__norm_forward(
        self, x: Any, weight: Any, eps: float, residual: Any, out_scale: float, out: Any, residual_out: Any,
        with_rstd: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        asserts(x.dtype in FLOATS and x.dim() in (2, 3), "x: bf16 or fp32 of two or three axes")
        asserts(x.stride(-1) == 1 or x.shape[-1] <= 1, "the last stride of x")
        h = x.shape[-1]
        if self.arch.is_ascend:
            asserts(x.dtype != torch.bfloat16 or align(h, 128) <= 32768, f"{h} columns")
        else:
            asserts(h % 16 == 0 and 0 < h <= 8192, f"{h} columns")
        if weight is not None:
            asserts(tuple(weight.shape) == (h,) and weight.dtype == x.dtype, "weight")
        if residual is None:
            residual_out = None
        given = {"x": x, "residual": residual, "out": out, "residual_out": residual_out}
        for name, t in given.items():
            if t is None:
                continue
            asserts(t.shape == x.shape and t.dtype == x.dtype, f"{name} must be like x")
            asserts(t.stride(-1) == 1 or h <= 1, f"the last stride of {name}")
            if not self.arch.is_ascend:
                asserts(all(s % 16 == 0 for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1),
                        f"leading strides of {name} must be multiples of 16")
        y, rstd, r = self.kernel.quant__norm_forward(x, weight, eps, residual, out_scale, None, None, with_rstd)
        results = [pending(y) if out is None else (out, y)]
        if rstd is not None:
            results.append(pending(rstd))
        norm_input = x
        if residual is not None:
            results.append(pending(r) if residual_out is None else (residual_out, r))
            norm_input = results[-1][0]
        self.rig.device.launch(results)
        return results[0][0], (results[1][0] if rstd is not None else None), norm_input

    # 2.3

    def engram__engram_sinkhorn_momentum_update(
        self, grad: Any, momentum_buffer: Any, beta1: float, nesterov: bool
    ) -> torch.Tensor:
        asserts(grad.dim() == 1 and grad.shape == momentum_buffer.shape, "grad and momentum_buffer: one axis, alike")
        asserts(grad.dtype in FLOATS and momentum_buffer.dtype in FLOATS, "bf16 or fp32")
        asserts(grad.numel() % 256 == 0, f"{grad.numel()} elements")
        own = shadow(momentum_buffer)
        update = self.kernel.engram__engram_sinkhorn_momentum_update(grad, own, beta1, nesterov)
        self.rig.device.launch([(momentum_buffer, own)])
        return self._late(update)

    def engram__engram_sinkhorn_step(
        self, matrix: Any, row_scale: Any, col_scale: Any, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        asserts(all(t.dtype == torch.float32 and t.is_contiguous() for t in (matrix, row_scale, col_scale)), "fp32")
        asserts(matrix.dim() == 2 and matrix.shape[1] % 256 == 0, "matrix: [r, d], d % 256")
        asserts(matrix.shape == (*row_scale.shape, *col_scale.shape), "row_scale [r], col_scale [d]")
        own = shadow(row_scale)
        norm, sums = self.kernel.engram__engram_sinkhorn_step(matrix, own, col_scale, eps)
        rows = self.arch.vec_cores if self.arch.is_ascend else 3 * self.num_sms
        partial = torch.zeros(rows, matrix.shape[1])
        partial[0] = sums.sum(0)
        self.rig.device.launch([(row_scale, own)])
        return self._late(norm), self._late(partial)

    def engram__engram_sinkhorn_step_reduce(self, col_sumsq_partial: Any, col_sumsq: Any) -> None:
        asserts(col_sumsq.dtype == torch.float32 and col_sumsq_partial.dtype == torch.float32, "fp32")
        asserts(col_sumsq_partial.dim() == 2 and col_sumsq_partial.shape[1:] == col_sumsq.shape, "col_sumsq: [d]")
        own = shadow(col_sumsq)
        self.kernel.engram__engram_sinkhorn_step_reduce(col_sumsq_partial, own)
        self.rig.device.launch([(col_sumsq, own)])

    # 2.5

    def transform__apply_rotary(
        self, query: Any, cos_sin_cache: Any, key: Any, positions: Any, interleaved: bool, conjugate: bool,
        seqlen_offset: int,
    ) -> None:
        asserts(query.dim() in (3, 4), "query: three or four axes")
        asserts(key is None or key.dim() == query.dim(), "key: as many axes as query")
        asserts(cos_sin_cache.dim() == 2 and cos_sin_cache.dtype == torch.float32, "cos_sin_cache: fp32, two axes")
        width = cos_sin_cache.shape[1]
        asserts(width in (64, 128) and cos_sin_cache.stride(1) == 1, f"cos_sin_cache: width {width}")
        heads = [t for t in (query, key) if t is not None]
        for t in heads:
            asserts(t.dtype in FLOATS and t.dtype == query.dtype, "query and key: bf16 or fp32, the same")
            asserts(t.shape[-1] == width and (t.stride(-1) == 1 or t.numel() == 0), "query and key: the cache's width")
            if t.dim() == 4 and not self.arch.is_ascend and t.shape[0] != 1 and t.numel():
                asserts(t.stride(0) % 8 == 0, "the batch stride must be a multiple of 8")
        tokens = query.shape[:-2]
        if positions is not None:
            asserts(positions.dtype in (torch.int32, torch.int64), f"positions in {positions.dtype}")
            asserts(positions.shape == tokens, "positions: one a token")
        place = torch.arange(tokens[-1]) if positions is None else positions.long()
        place = place + seqlen_offset
        if place.numel() and (place.min() < 0 or place.max() >= cos_sin_cache.shape[0]):
            self.rig.device.trap("illegal memory access: a position outside cos_sin_cache")
            return
        own = [shadow(t) for t in heads]
        self.kernel.transform__apply_rotary(own[0], cos_sin_cache, own[1] if key is not None else None, positions,
                                            interleaved, conjugate, seqlen_offset)
        self.rig.device.launch(zip(heads, own, strict=True))

    def _late(self, true: torch.Tensor) -> torch.Tensor:
        seen, _ = pair = pending(true)
        self.rig.device.launch([pair])
        return seen
