"""TileKernels on the CPU: the public functions over the blocked kernels of `kernels`."""

from __future__ import annotations

import math
from typing import Any

import torch

from adapters.cpu.kernels import engram, quant, rows
from adapters.cpu.kernels.knobs import Knobs

FAULTS = {
    "accept_nonfinite": "NaN and infinite scores are ranked instead of refused",
    "positions_bf16": "positions are rounded to BF16, which counts to 256",
    "ignore_key": "only the query is rotated",
    "copy_output": "preallocated results are ignored and fresh tensors returned",
}
"""Faults of the layer that checks arguments and allocates results (`Knobs.fault`)."""

DEFAULT_SETTINGS = {
    "amax_clamp_e4m3": 1e-4,
    "amax_clamp_e2m1": 6.0 * 2.0**-126,
    "amax_clamp_e4m3_with_e4m3_sf": 0.875,
    "amax_clamp_e2m1_with_e4m3_sf": 6.0 * 2.0**-9,
}
"""Process-global settings of the module: the smallest magnitude that counts for a scale, by format."""

MAX_TOPK = 32
_FLOATS = (torch.bfloat16, torch.float32)
_TMA_BYTES = 16
_PACKED_GROUPS = 4
_OPTIMISER_BLOCK = 256
_DATA = {"e4m3": (torch.float8_e4m3fn, 1), "e2m1": (torch.int8, 2)}
"""Storage dtype and codes an element."""


class Adapter:
    """A method an op; keyword arguments as in the public signatures.

    Broken contracts raise AssertionError, what stops the device raises RuntimeError, both
    before anything is written.
    """

    def __init__(self, backend: Any) -> None:
        self._knobs: Knobs = backend.knobs
        self.settings: dict[str, Any] = dict(DEFAULT_SETTINGS)

    def moe__topk_gate(self, scores: torch.Tensor, num_topk: int) -> torch.Tensor:
        """int64 [t, num_topk]: experts by decreasing score, equal scores by increasing index.

        scores: fp32 [t, experts], contiguous, finite (RuntimeError). num_topk <= min(experts, 32).
        """
        _require(
            scores.dim() == 2 and scores.is_contiguous() and scores.dtype == torch.float32,
            "scores: fp32 [t, experts]",
        )
        _require(0 < num_topk <= min(scores.shape[1], MAX_TOPK), "num_topk must be within 1..min(experts, 32)")
        if self._knobs.fault != "accept_nonfinite" and not torch.isfinite(scores).all():
            msg = "device assertion: a score is not finite"
            raise RuntimeError(msg)
        return rows.best_of_row(scores, num_topk, self._knobs)

    def engram__engram_sinkhorn_momentum_update(
        self, grad: torch.Tensor, momentum_buffer: torch.Tensor, beta1: float, nesterov: bool = True
    ) -> torch.Tensor:
        """The update, fp32 [n]; momentum_buffer [n] then holds the new momentum.

        grad: [n]; both bf16 or fp32, n a multiple of 256.
        """
        _require(grad.dim() == 1 and grad.shape == momentum_buffer.shape, "grad and momentum_buffer: [n]")
        _require(grad.dtype in _FLOATS and momentum_buffer.dtype in _FLOATS, "grad, momentum_buffer: bf16 or fp32")
        _require(len(grad) % _OPTIMISER_BLOCK == 0, "n must be a multiple of 256")
        return engram.momentum_update(grad, momentum_buffer, beta1, nesterov, self._knobs)

    def engram__engram_sinkhorn_step(
        self, matrix: torch.Tensor, row_scale: torch.Tensor, col_scale: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(row_norm [r], col_sumsq_partial [blocks, d]); row_scale [r] is divided by row_norm + eps.

        matrix: [r, d], col_scale: [d], all fp32, d % 256 == 0.
        """
        tensors = (matrix, row_scale, col_scale)
        _require(all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors), "fp32, contiguous")
        _require(matrix.dim() == 2 and matrix.shape[1] % _OPTIMISER_BLOCK == 0, "matrix: [r, d], d a multiple of 256")
        _require(matrix.shape == (*row_scale.shape, *col_scale.shape), "row_scale: [r], col_scale: [d]")
        return engram.sinkhorn_step(matrix, row_scale, col_scale, eps, self._knobs)

    def engram__engram_sinkhorn_step_reduce(self, col_sumsq_partial: torch.Tensor, col_sumsq: torch.Tensor) -> None:
        """col_sumsq fp32 [d] becomes the sum of col_sumsq_partial [blocks, d] over the blocks."""
        _require(col_sumsq.dtype == torch.float32, "col_sumsq: fp32")
        _require(col_sumsq_partial.shape[1:] == col_sumsq.shape, "col_sumsq: [d]")
        engram.sinkhorn_step_reduce(col_sumsq_partial, col_sumsq, self._knobs)

    def quant__per_token_cast(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        fmt: str,
        num_per_channels: int,
        x_block_size: tuple[int, int] | None = None,
        use_tma_aligned_col_major_sf: bool = False,
        round_sf: bool = False,
        use_packed_ue8m0: bool = False,
        use_e4m3_sf: bool = False,
        stochastic_cast: bool = False,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(data, sf) of x [t, h], one scale a row and num_per_channels columns.

        x: bf16 or fp32, h a multiple of 64, rows may have gaps; or (e4m3 or e2m1 data, sf)
        with x_block_size. data: e4m3 [t, h], or int8 [t, h / 2] with two e2m1 codes a byte,
        low nibble first. sf: fp32 or e4m3 [t, ceil(h / num_per_channels)], packed int32
        [t, ceil(groups / 4)] (bytes of missing groups are 0 here); column-major: stride
        (1, t rounded up to 16 bytes). out: (data, sf) to write to, sf row-major.
        stochastic_cast raises NotImplementedError: the hardware rounding has no CPU form.
        """
        _require(fmt in _DATA, "fmt must be e4m3 or e2m1")
        _require(not use_packed_ue8m0 or round_sf, "use_packed_ue8m0 needs round_sf")
        _require(not (round_sf and use_e4m3_sf), "round_sf and use_e4m3_sf exclude each other")
        x, x_sf = _cast_input(x, x_block_size)
        t, h = x.shape
        packed_input = x.dtype in (torch.int8, torch.uint8)
        h = 2 * h if packed_input else h
        _require(
            num_per_channels in (16, 32, 64, 128) and h % 64 == 0,
            "num_per_channels: 16, 32, 64 or 128; h: a multiple of 64",
        )
        if stochastic_cast:
            raise NotImplementedError("stochastic_cast")
        groups = -(-h // num_per_channels)
        sf_dtype = torch.int32 if use_packed_ue8m0 else torch.float8_e4m3fn if use_e4m3_sf else torch.float32
        sf_shape = (t, -(-groups // _PACKED_GROUPS) if use_packed_ue8m0 else groups)
        data, sf = self._cast_output(out, fmt, t, h, sf_shape, sf_dtype, use_tma_aligned_col_major_sf)

        x_scales = None if x_sf is None else self._input_scales(x_sf, t, h, x_block_size)
        values = quant.unpack_codes(x) if packed_input else x
        scale = "power_of_two" if round_sf else "e4m3" if use_e4m3_sf else "fp32"
        clamp = self.settings[f"amax_clamp_{fmt}" + ("_with_e4m3_sf" if use_e4m3_sf else "")]
        recipe = quant.Recipe(fmt, num_per_channels, scale, clamp)
        scales = sf if sf_dtype == torch.float32 else torch.empty((t, groups))
        quant.cast_rows(values, recipe, data, scales, self._knobs, x_scales)
        if use_packed_ue8m0:
            sf.copy_(quant.pack_exponents(scales, 0.0, self._knobs))
        elif use_e4m3_sf:
            sf.copy_(scales)
        return data, sf

    def quant__norm_forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None = None,
        out_scale: float = 1.0,
        out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        with_rstd: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """(out, rstd or None, norm_input): RMS norm of x (+ residual), rounded once to x's dtype.

        x: bf16 or fp32 [t, h] or [b, t, h], last stride 1; weight: [h] of x's dtype or None.
        residual, out, residual_out: as x. rstd: fp32, x's shape without h. norm_input is x
        itself without a residual, else residual_out (rounded sum), allocated if not given.
        """
        _require(
            x.dtype in _FLOATS and x.dim() in (2, 3) and x.stride(-1) == 1,
            "x: bf16 or fp32 [.., t, h], last stride 1",
        )
        h = x.shape[-1]
        _require(h > 0, "h must be positive")
        if weight is not None:
            _require(
                weight.shape == (h,) and weight.dtype == x.dtype and weight.is_contiguous(),
                "weight: [h] of x's dtype",
            )
        if residual is None:
            residual_out = None
        for like_x in (residual, residual_out, out):
            if like_x is not None:
                _require(
                    like_x.shape == x.shape and like_x.dtype == x.dtype and like_x.stride(-1) == 1,
                    "a tensor is not like x",
                )
        out = self._fresh_unless(out, x)
        if residual is not None:
            residual_out = self._fresh_unless(residual_out, x)
        rstd = torch.empty(x.shape[:-1], dtype=torch.float32) if with_rstd else None
        for batch in range(x.shape[0] if x.dim() == 3 else 1):
            x_, residual_, out_, residual_out_, rstd_ = (
                t if t is None or x.dim() == 2 else t[batch] for t in (x, residual, out, residual_out, rstd)
            )
            rows.rms_norm(x_, weight, eps, out_, self._knobs, residual_, out_scale, residual_out_, rstd_)
        return out, rstd, x if residual is None else residual_out

    def transform__apply_rotary(
        self,
        query: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        key: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        interleaved: bool = False,
        conjugate: bool = False,
        seqlen_offset: int = 0,
    ) -> None:
        """Rotates query, and key if given, in place by row seqlen_offset + position of the cache.

        query, key: bf16 or fp32 [t, heads, d] or [b, s, heads, d], last stride 1, d 64 or
        128 and the cache's width. cos_sin_cache: fp32 [n, d], cos then sin. positions:
        int32 or int64 [t] or [b, s]; without them the token's place in its sequence.
        A row outside the cache raises RuntimeError.
        """
        _require(query.dim() in (3, 4) and isinstance(seqlen_offset, int), "query must have 3 or 4 dimensions")
        _require(key is None or key.dim() == query.dim(), "key must have as many dimensions as query")
        _require(cos_sin_cache.dim() == 2 and cos_sin_cache.dtype == torch.float32, "cos_sin_cache: fp32 [n, d]")
        d = cos_sin_cache.shape[1]
        _require(cos_sin_cache.stride(1) == 1 and d in (64, 128), "cos_sin_cache: width 64 or 128, last stride 1")
        for x in (query,) if key is None else (query, key):
            _require(x.shape[-1] == d and x.stride(-1) == 1, "query and key: the cache's width, last stride 1")
            _require(x.dtype in _FLOATS and x.dtype == query.dtype, "query and key: bf16 or fp32, the same")
        tokens = query.shape[:-2]
        if positions is not None:
            _require(
                positions.shape == tokens and positions.stride(-1) == 1,
                "positions must have a place for each token",
            )
            _require(positions.dtype in (torch.int32, torch.int64), "positions: int32 or int64")
        if math.prod(tokens) == 0:
            return
        index = self._table_rows(positions, tokens[-1], seqlen_offset, cos_sin_cache.shape[0])
        for x in (query, None if self._knobs.fault == "ignore_key" else key):
            if x is not None and x.numel():
                view = x.unsqueeze(0) if x.dim() == 3 else x
                rows.rotate(view, cos_sin_cache, index, self._knobs, interleaved, conjugate)

    def _table_rows(self, positions: torch.Tensor | None, s: int, offset: int, available: int) -> torch.Tensor:
        """int64 [batch or 1, s], all within the table."""
        counted = positions is None or self._knobs.fault == "ignore_positions"
        index = torch.arange(s) if counted else positions.long()
        if self._knobs.fault == "positions_bf16":
            index = index.bfloat16().long().clamp(max=available - 1 - offset)
        if self._knobs.fault != "ignore_offset":
            index = index + offset
        low, high = torch.aminmax(index)
        if low < 0 or high >= available:
            msg = f"a position is outside the {available} rows of cos_sin_cache"
            raise RuntimeError(msg)
        return index.reshape(-1, s)

    def _fresh_unless(self, given: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        ignored = given is None or self._knobs.fault == "copy_output"
        return torch.empty(x.shape, dtype=x.dtype) if ignored else given

    def _cast_output(
        self, out: Any, fmt: str, t: int, h: int, sf_shape: tuple[int, int], sf_dtype: torch.dtype, column_major: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pair to write to: the given one, checked, or a fresh one of the documented layout."""
        dtype, per_item = _DATA[fmt]
        data, sf = (None, None) if out is None else out
        if data is not None:
            _require(data.shape == (t, h // per_item) and data.dtype == dtype, "out has a wrong shape or dtype")
        if sf is not None:
            _require(not column_major, "a given sf can't be column-major")
            _require(sf.shape == sf_shape and sf.dtype == sf_dtype, "out's sf has a wrong shape or dtype")
        if data is None or self._knobs.fault == "copy_output":
            data = torch.empty((t, h // per_item), dtype=dtype)
        if sf is None or self._knobs.fault == "copy_output":
            sf = _column_major(sf_shape, sf_dtype) if column_major else torch.empty(sf_shape, dtype=sf_dtype)
        return data, sf

    def _input_scales(self, sf: torch.Tensor, t: int, h: int, block: tuple[int, int]) -> torch.Tensor:
        """fp32 [t, h]: the factor of every element of an input that was quantised before."""
        if sf.dtype == torch.int32:
            sf = quant.unpack_exponents(sf, -(-h // block[1]), self._knobs)
        return sf.float()[torch.arange(t) // block[0]][:, torch.arange(h) // block[1]]


def _require(holds: bool, condition: str) -> None:
    """The real module asserts; a function, so that running with -O keeps the checks."""
    if not holds:
        raise AssertionError(condition)


def _column_major(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """[t, groups] with stride (1, t rounded up to 16 bytes)."""
    per_line = _TMA_BYTES // dtype.itemsize
    pitch = -(-shape[0] // per_line) * per_line
    return torch.empty(pitch * shape[1], dtype=dtype).as_strided(shape, (1, pitch))


def _cast_input(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], block: tuple[int, int] | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not isinstance(x, tuple):
        _require(block is None, "x_block_size belongs to an x with scales")
        _require(x.dim() == 2 and x.dtype in _FLOATS, "x: bf16 or fp32 [t, h]")
        return x, None
    x, sf = x
    _require(isinstance(block, tuple), "an x with scales needs x_block_size")
    _require(
        x.dim() == 2 and x.dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8),
        "x: e4m3 or packed e2m1 [t, h]",
    )
    _require(sf.dtype in (torch.float32, torch.float8_e4m3fn, torch.int32), "the scales of x have a wrong dtype")
    t, h = x.shape[0], x.shape[1] * (2 if x.dtype != torch.float8_e4m3fn else 1)
    across = -(-h // block[1])
    per_item = _PACKED_GROUPS if sf.dtype == torch.int32 else 1
    _require(block[1] > 1 or per_item == 1, "packed scales of single columns are not supported")
    _require(sf.shape == (-(-t // block[0]), -(-across // per_item)), "the scales of x have a wrong shape")
    _require(1 in sf.stride(), "the scales of x must be row-major or column-major")
    return x, sf
