"""Contract of `flash_mla`, release of 2026-09-30 (R26). Sections are those of dossiers/flashmla.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from adapters.cpu import flashmla
from adapters.standins.checks import asserts, host, is_tensor, last_stride_one
from adapters.standins.device import pending

DEFECTS = {"metadata_flag_first": "a refused first decode leaves its numbers in the metadata object (6.6)"}

HEAD_DIM = 512
FP8_BYTES, FP4_BYTES = 528, 288
CACHE_DTYPES = (torch.float8_e4m3fn, torch.int8, torch.uint8)
INDEX_ROW_ITEMS, INDEX_BASE_BYTES = 8, 32
SPLIT_ABOVE = 640
INT_MAX = 2**31 - 1
ASCEND_LARGEST_EXPONENT = 0xE0


@dataclass(frozen=True)
class Config:
    """What the calls that share a metadata object agree in: 2.1."""

    b: int
    s_q: int
    h_q: int
    page_block_size: int
    h_k: int
    causal: bool
    is_fp8_kvcache: bool
    topk: int
    extra_page_block_size: int | None
    extra_topk: int | None
    enable_batch_invariant: bool


class FlashMLASchedMeta:
    """2.1: empty until the first decode."""

    def __init__(self) -> None:
        self.have_initialized = False
        self.config: Config | None = None
        self.tile_scheduler_metadata: torch.Tensor | None = None
        self.num_splits: torch.Tensor | None = None


class Package:
    """A method a public function."""

    def __init__(self, rig: Any) -> None:
        self.rig, self.arch = rig, rig.arch
        self.kernel = flashmla.Adapter(rig.host)
        self.planar = rig.releases.get("flash_mla", "R26") == "W24"
        self.values = {"flash_mla_interface.FlashMLASchedMeta": FlashMLASchedMeta}

    def get_mla_metadata(self, *args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
        return FlashMLASchedMeta(), None

    def flash_mla_sparse_fwd(
        self, q: Any, kv: Any, indices: Any, sm_scale: Any, d_v: int, attn_sink: Any, topk_length: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._on_this_chip()
        if isinstance(sm_scale, bool) or not isinstance(sm_scale, (int, float)):
            msg = f"sm_scale must be a float, got {sm_scale!r}"
            raise TypeError(msg)
        is_tensor("q", q, torch.bfloat16, (None, None, HEAD_DIM))
        s_q, h_q, _ = q.shape
        is_tensor("kv", kv, torch.bfloat16, (None, 1, HEAD_DIM))
        is_tensor("indices", indices, torch.int32, (s_q, 1, None))
        self._heads(h_q, d_v)
        host(s_q > 0, "s_q must be positive")
        topk = indices.shape[2]
        if self.arch.is_ascend:
            host(topk > 0 and topk % 64 == 0, f"topk {topk}")
            host(kv.stride(0) == HEAD_DIM, f"kv.stride(0) {kv.stride(0)}, must be {HEAD_DIM}")
        elif h_q == 64:
            host(topk >= 128 and topk % 64 == 0, f"topk {topk} with 64 heads")
        else:
            host(topk > 0 and topk % (64 if topk <= 1280 else 128) == 0, f"topk {topk} with 128 heads")
        for name, t in (("q", q), ("kv", kv), ("indices", indices)):
            last_stride_one(name, t)
        self._vector("attn_sink", attn_sink, torch.float32, h_q)
        self._vector("topk_length", topk_length, torch.int32, s_q)
        self._index_rows(indices)
        if self.arch.is_ascend and sm_scale <= 0:
            self.rig.device.trap("device-side assert: sm_scale must be positive")
        out = self.kernel.flash_mla_sparse_fwd(q, kv, _least(indices), float(sm_scale), HEAD_DIM, attn_sink,
                                               topk_length)
        return self._late(out)

    def flash_mla_with_kvcache(
        self, q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: Any,
        tile_scheduler_metadata: Any, num_splits: Any, softmax_scale: Any, causal: bool, is_fp8_kvcache: bool,
        indices: Any, attn_sink: Any, extra_k_cache: Any, extra_indices_in_kvcache: Any, topk_length: Any,
        extra_topk_length: Any, enable_batch_invariant: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        meta = tile_scheduler_metadata
        # The Python layer: AssertionError.
        asserts(isinstance(meta, FlashMLASchedMeta), "tile_scheduler_metadata must come from get_mla_metadata")
        asserts(num_splits is None, "num_splits must be None")
        asserts(not causal, "causal must be False")
        asserts(bool(is_fp8_kvcache), "is_fp8_kvcache must be True")
        asserts(indices is not None, "indices are required")
        config = Config(
            q.shape[0], q.shape[1], q.shape[2], k_cache.shape[1], k_cache.shape[2], False, True, indices.shape[-1],
            None if extra_k_cache is None else extra_k_cache.shape[1],
            None if extra_indices_in_kvcache is None else extra_indices_in_kvcache.shape[-1],
            bool(enable_batch_invariant))
        if meta.have_initialized:
            asserts(meta.config == config, f"metadata was made for {meta.config}, not for {config}")
        if "metadata_flag_first" in self.rig.defects:
            meta.have_initialized, meta.config = True, config
        # The compiled part: RuntimeError.
        self._on_this_chip()
        is_tensor("q", q, torch.bfloat16, (None, None, None, HEAD_DIM))
        b, s_q, h_q, _ = q.shape
        last_stride_one("q", q)
        host(b > 0 and s_q > 0, "b and s_q must be positive")
        self._heads(h_q, head_dim_v)
        if h_q == 128 and b > 1 and s_q > 1:
            host(q.stride(0) % q.stride(1) == 0, "q.stride(0) must be a multiple of q.stride(1)")
        if self.arch.is_ascend:
            host(s_q == 1, f"s_q {s_q}, must be 1 on Ascend")
        self._cache("k_cache", k_cache, (FP8_BYTES,))
        is_tensor("indices", indices, torch.int32, (b, s_q, None))
        last_stride_one("indices", indices)
        topk = indices.shape[2]
        host(topk > 0 and topk % 64 == 0, f"topk {topk}")
        self._vector("attn_sink", attn_sink, torch.float32, h_q)
        self._vector("topk_length", topk_length, torch.int32, b)
        host((extra_k_cache is None) == (extra_indices_in_kvcache is None), "extra cache and extra list go together")
        host(extra_topk_length is None or extra_k_cache is not None, "extra_topk_length without an extra cache")
        if extra_k_cache is not None:
            self._cache("extra_k_cache", extra_k_cache, (FP8_BYTES, FP4_BYTES))
            is_tensor("extra_indices_in_kvcache", extra_indices_in_kvcache, torch.int32, (b, s_q, None))
            last_stride_one("extra_indices_in_kvcache", extra_indices_in_kvcache)
            extra_topk = extra_indices_in_kvcache.shape[2]
            whole = not self.arch.is_ascend and h_q == 64
            host(extra_topk > 0 and (not whole or extra_topk % 64 == 0), f"extra topk {extra_topk}")
            self._vector("extra_topk_length", extra_topk_length, torch.int32, b)
        self._slots(indices, k_cache, topk_length)
        if extra_k_cache is not None:
            self._slots(extra_indices_in_kvcache, extra_k_cache, extra_topk_length)
        self._index_rows(indices)

        # Computed with an own object: the kernel's one never leaves this call.
        own, _ = self.kernel.get_mla_metadata()
        scale = HEAD_DIM**-0.5 if softmax_scale is None else float(softmax_scale)
        unit = 64 if h_q == 64 else 1
        out = self.kernel.flash_mla_with_kvcache(
            q, self._inline(k_cache), None, None, HEAD_DIM, own, softmax_scale=scale, indices=indices,
            attn_sink=attn_sink, extra_k_cache=self._inline(extra_k_cache),
            extra_indices_in_kvcache=_whole(extra_indices_in_kvcache, unit), topk_length=topk_length,
            extra_topk_length=extra_topk_length, enable_batch_invariant=enable_batch_invariant)
        meta.have_initialized, meta.config = True, config
        if not self.arch.is_ascend and not enable_batch_invariant and topk + (config.extra_topk or 0) > SPLIT_ABOVE:
            parts = max(self.arch.cores // s_q // (1 if h_q == 64 else 2), 1)
            meta.tile_scheduler_metadata = torch.zeros(parts, 8, dtype=torch.int32)
            meta.num_splits = torch.arange(b + 1, dtype=torch.int32)
        return self._late(out)

    def _on_this_chip(self) -> None:
        host(self.arch.is_ascend or self.arch.capability == 10,
             f"Unsupported architecture: compute capability {self.arch.capability}, needs 10")

    def _heads(self, h_q: int, d_v: Any) -> None:
        host(h_q == 64 or (h_q == 128 and not self.arch.is_ascend), f"h_q {h_q} on {self.arch.name}")
        host(d_v == HEAD_DIM, f"head dimension {d_v} of V")

    def _vector(self, name: str, t: Any, dtype: torch.dtype, n: int) -> None:
        if t is not None:
            is_tensor(name, t, dtype, (n,))
            host(t.is_contiguous(), f"{name} must be contiguous")

    def _cache(self, name: str, t: Any, row_bytes: tuple[int, ...]) -> None:
        is_tensor(name, t, CACHE_DTYPES, (None, None, 1, None))
        blocks, page, _, width = t.shape
        host(width in row_bytes, f"{name} has tokens of {width} bytes, known: {row_bytes}")
        host(t.stride(3) == 1 and t.stride(1) == width, f"tokens of {name} must follow each other")
        host(blocks <= 1 or t.stride(0) >= page * width, f"pages of {name} overlap")
        host(max(t.stride()) <= INT_MAX, f"a stride of {name} is too large")
        if self.arch.is_ascend:
            host(page > 1, f"{name} has pages of one token")
        else:
            host(t.stride(0) % width == 0 or blocks <= 1, f"{name}.stride(0) must be a multiple of {width}")
            host(t.data_ptr() % 16 == 0, f"base of {name} must be aligned to 16 bytes")

    def _index_rows(self, indices: torch.Tensor) -> None:
        """2.3: CUDA reads rows by vectors of 32 bytes and validates nothing."""
        off = indices.shape[0] > 1 and indices.stride(0) % INDEX_ROW_ITEMS
        if not self.arch.is_ascend and (off or indices.data_ptr() % INDEX_BASE_BYTES):
            self.rig.device.trap("misaligned address: rows of indices")

    def _slots(self, indices: torch.Tensor, cache: torch.Tensor, length: Any) -> None:
        """2.2: CUDA skips -1 only; what is out of range is a wild address."""
        counted = indices
        if length is not None:
            counted = torch.where(torch.arange(indices.shape[2]) < length[:, None, None], indices, -1)
        low = -1 if not self.arch.is_ascend else torch.iinfo(torch.int32).min
        if ((counted < low) | (counted >= cache.shape[0] * cache.shape[1])).any():
            self.rig.device.trap("illegal memory access: a slot outside the cache")

    def _inline(self, cache: Any) -> Any:
        """The cache as the cpu kernel reads it.

        W24 keeps all rows of a page in front of all their scales (2.8). Ascend takes exponent bytes above 0xE0
        for 0xE0 (3).
        """
        if cache is None or not (self.planar or self.arch.is_ascend):
            return cache
        blocks, page, _, width = cache.shape
        data = {FP8_BYTES: 512, FP4_BYTES: 256}[width]
        rows = cache.view(torch.uint8).reshape(blocks, page, width)
        if self.planar:
            flat = rows.reshape(blocks, page * width)
            halves = flat[:, :page * data].reshape(blocks, page, data), flat[:, page * data:].reshape(blocks, page, -1)
            rows = torch.cat(halves, 2)
        if self.arch.is_ascend and width == FP8_BYTES:
            rows = torch.cat([rows[..., :data], rows[..., data:].clamp(max=ASCEND_LARGEST_EXPONENT)], 2)
        return rows.reshape(blocks, page, 1, width).view(cache.dtype)

    def _late(self, results: Any) -> Any:
        pairs = [pending(t) for t in results]
        self.rig.device.launch(pairs)
        return tuple(seen for seen, _ in pairs)


def _least(indices: torch.Tensor) -> torch.Tensor:
    """Lists of at least 128, as the cpu kernel wants them: padded by what is skipped."""
    short = 128 - indices.shape[2]
    return indices if short <= 0 else torch.nn.functional.pad(indices, (0, short), value=-1)


def _whole(indices: Any, unit: int) -> Any:
    if indices is None or indices.shape[2] % unit == 0:
        return indices
    return torch.nn.functional.pad(indices, (0, -indices.shape[2] % unit), value=-1)
