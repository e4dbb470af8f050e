"""Where attention reads its K and V rows from: plain bf16 rows, or a paged cache of quantised rows."""

from __future__ import annotations

import torch

from adapters.cpu.kernels.knobs import Knobs

KERNELS = {"PagedCache": ("scale_shift", "swap_scales", "skip_scale", "flush_subnormals", "fault")}
"""Kernel to the knobs it obeys."""

FAULTS = {
    "neighbour_page": "rows come from the page behind the right one",
    "signed_scale_byte": "the exponent byte is read with a sign",
    "planar_cache": "scales are looked for behind the data of the whole page, not behind each row",
    "high_nibble_first": "of two fp4 codes in a byte the high one is taken for the even dimension",
}
"""Faults that only this kernel knows (`Knobs.fault`)."""

HEAD_DIM = 512
FP8_ROW_BYTES = HEAD_DIM + HEAD_DIM // 32
"""512 e4m3 codes, then 16 exponent bytes, each for 32 dimensions: 528"""
FP4_ROW_BYTES = HEAD_DIM // 2 + HEAD_DIM // 16
"""512 e2m1 codes, even dimension in the low nibble, then 32 e4m3 scales, each for 16 dimensions: 288"""

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_SMALLEST_NORMAL = 2.0**-126


class DenseRows:
    """kv: bf16 [n, 1, 512]."""

    def __init__(self, kv: torch.Tensor, knobs: Knobs) -> None:
        self.size = kv.shape[0]
        self._kv, self._flush = kv, knobs.flush_subnormals

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """float32 [len(slots), 512]; every slot must be in [0, size)."""
        return _flushed(self._kv[slots, 0].float(), self._flush)


class PagedCache:
    """cache: bytes [blocks, page, 1, 528 or 288]; slot = block * page + place in the block."""

    def __init__(self, cache: torch.Tensor, knobs: Knobs) -> None:
        self.blocks, self.page = cache.shape[:2]
        self.size = self.blocks * self.page
        self._bytes, self._knobs = cache.view(torch.uint8)[:, :, 0], knobs

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """float32 [len(slots), 512] holding the bf16 values that the cache rows stand for."""
        block, place = slots // self.page, slots % self.page
        if self._knobs.fault == "neighbour_page":
            block = (block + 1) % self.blocks
        raw = self._planar(block, place) if self._knobs.fault == "planar_cache" else self._bytes[block, place]
        values = self._fp8(raw) if raw.shape[1] == FP8_ROW_BYTES else self._fp4(raw)
        return _flushed(values.bfloat16().float(), self._knobs.flush_subnormals)

    def _fp8(self, raw: torch.Tensor) -> torch.Tensor:
        codes = raw[:, :HEAD_DIM].contiguous().view(torch.float8_e4m3fn).float()
        exponents = raw[:, HEAD_DIM:].contiguous()
        scales = exponents.view(torch.float8_e8m0fnu).float()
        if self._knobs.fault == "signed_scale_byte":
            scales = torch.exp2(exponents.view(torch.int8).float() - 127)
        return self._scaled(codes, scales)

    def _fp4(self, raw: torch.Tensor) -> torch.Tensor:
        packed = raw[:, : HEAD_DIM // 2].int()
        pair = (packed & 15, packed >> 4)
        if self._knobs.fault == "high_nibble_first":
            pair = pair[::-1]
        codes = _E2M1[torch.stack(pair, 2).flatten(1)]
        return self._scaled(codes, raw[:, HEAD_DIM // 2 :].contiguous().view(torch.float8_e4m3fn).float())

    def _scaled(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if self._knobs.skip_scale:
            return codes
        if self._knobs.scale_shift:
            scales = scales.roll(-self._knobs.scale_shift, 1)
        if self._knobs.swap_scales:
            scales = scales.unflatten(1, (-1, 2)).flip(2).flatten(1)
        return (codes.unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(2)).flatten(1)

    def _planar(self, block: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        row_bytes = self._bytes.shape[2]
        data = HEAD_DIM if row_bytes == FP8_ROW_BYTES else HEAD_DIM // 2
        page = self._bytes[block].flatten(1)
        first = torch.cat(
            (place[:, None] * data + torch.arange(data),
             self.page * data + place[:, None] * (row_bytes - data) + torch.arange(row_bytes - data)), 1
        )
        return page.gather(1, first)


def _flushed(x: torch.Tensor, flush: bool) -> torch.Tensor:
    return x.masked_fill(x.abs() < _SMALLEST_NORMAL, 0) if flush else x
