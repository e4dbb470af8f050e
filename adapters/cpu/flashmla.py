"""FlashMLA's sparse attention on the CPU: the public functions over `kernels.attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from adapters.cpu.kernels.attention import attend
from adapters.cpu.kernels.knobs import Knobs
from adapters.cpu.kernels.mla_cache import FP4_ROW_BYTES, FP8_ROW_BYTES, HEAD_DIM, DenseRows, PagedCache

FAULTS = {
    "metadata_stale": "a second decode with the same metadata object reads the list of the first",
    "metadata_poisoned": "a decode that is refused leaves its numbers in the metadata object",
    "neighbour_list": "each request reads the list of the next one",
    "length_by_token": "lengths are taken by query token instead of by request",
    "lse_not_transposed": "lse is stored token by token although its shape says head by head",
    "extra_ignored": "the extra cache is not read",
    "extra_length_main": "the extra list is cut by the length of the main list",
    "extra_length_capped": "the length of the extra list is capped at that of the main lists",
    "default_scale_576": "the default softmax scale is that of 576 dimensions",
    "repeats_once": "a repeated index counts once",
}
"""Faults of this layer (`Knobs.fault`); the others stand in `kernels.attention` and `kernels.mla_cache`."""

SPLIT_ABOVE = 640
"""lists longer than this are split unless enable_batch_invariant is set"""
BLOCK = 64
_CACHE_DTYPES = (torch.float8_e4m3fn, torch.int8, torch.uint8)


@dataclass(frozen=True)
class SchedConfig:
    """What every decode with the same metadata object must agree on."""

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
    """Empty until the first decode; `num_splits` int32 [b + 1], cumulative, where the list is split."""

    def __init__(self) -> None:
        self.have_initialized = False
        self.config: SchedConfig | None = None
        self.tile_scheduler_metadata: torch.Tensor | None = None
        self.num_splits: torch.Tensor | None = None


class Adapter:
    """A method an op; keyword arguments as in the public signatures."""

    def __init__(self, backend: Any) -> None:
        self._knobs: Knobs = backend.knobs

    def get_mla_metadata(self, *args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
        """An empty metadata object; all arguments are ignored."""
        return FlashMLASchedMeta(), None

    def flash_mla_sparse_fwd(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        sm_scale: float,
        d_v: int = HEAD_DIM,
        attn_sink: torch.Tensor | None = None,
        topk_length: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Prefill: (out, max_logits, lse) = bf16 [s_q, h_q, 512] and two float32 [s_q, h_q].

        q: bf16 [s_q, h_q, 512], h_q 64 or 128; kv: bf16 [s_kv, 1, 512], K and V alike;
        indices: int32 [s_q, 1, topk], outside [0, s_kv) = skipped; attn_sink: float32 [h_q];
        topk_length: int32 [s_q], entries from there on are ignored. Logarithms are natural.
        A row without a key: out 0, max_logits -inf, lse +inf. RuntimeError for other shapes,
        dtypes and strides.
        """
        _check("q", q, (torch.bfloat16,), (None, None, HEAD_DIM))
        s_q, h_q, _ = q.shape
        _check("kv", kv, (torch.bfloat16,), (None, 1, HEAD_DIM))
        _check("indices", indices, (torch.int32,), (s_q, 1, None))
        _check_heads(h_q, d_v)
        _check_vector("attn_sink", attn_sink, torch.float32, h_q)
        _check_vector("topk_length", topk_length, torch.int32, s_q)
        topk = indices.shape[2]
        unit, least = (BLOCK, 128) if h_q == BLOCK else (BLOCK if topk <= 1280 else 128, BLOCK)
        _require(topk >= least and topk % unit == 0, f"topk must be a multiple of {unit}, at least {least}, got {topk}")
        _require(s_q > 0, "s_q must be positive")

        out = torch.empty(s_q, h_q, HEAD_DIM, dtype=torch.bfloat16)
        max_logits, lse = torch.empty(s_q, h_q), torch.empty(s_q, h_q)
        source = DenseRows(kv, self._knobs)
        lengths = self._lengths(topk_length, s_q, topk)
        for t in range(s_q):
            slots = self._list(indices[:, 0], t, lengths[t])
            done = attend(q[t], [slots], [source], sm_scale, attn_sink, self._knobs.split_k, self._knobs)
            out[t], lse[t], max_logits[t] = done
        return out, max_logits, lse

    def flash_mla_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: Any,
        cache_seqlens: Any,
        head_dim_v: int,
        tile_scheduler_metadata: FlashMLASchedMeta,
        num_splits: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        is_fp8_kvcache: bool = True,
        indices: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
        extra_k_cache: torch.Tensor | None = None,
        extra_indices_in_kvcache: torch.Tensor | None = None,
        topk_length: torch.Tensor | None = None,
        extra_topk_length: torch.Tensor | None = None,
        enable_batch_invariant: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode over paged quantised caches: (out, softmax_lse) = bf16 [b, s_q, h_q, 512], float32 [b, h_q, s_q].

        q: bf16 [b, s_q, h_q, 512]; k_cache: bytes [blocks, page, 1, 528]; indices: int32
        [b, s_q, topk], slot = block * page + place, outside the cache = skipped; lengths:
        int32 [b], a request's list is cut there. The extra cache (528 or 288 bytes a row)
        has its own list and length; the softmax runs over both. block_table and
        cache_seqlens are ignored. softmax_lse is natural, without the sink, +inf for a row
        without a key, and a transposed view.

        Raises AssertionError for causal, num_splits, is_fp8_kvcache=False, missing indices,
        and metadata that an earlier call filled for other shapes; RuntimeError for other
        shapes, dtypes and strides. The metadata object is filled only by a call that succeeds.
        """
        meta = tile_scheduler_metadata
        known = isinstance(meta, FlashMLASchedMeta)
        _require(known, "tile_scheduler_metadata must come from get_mla_metadata", AssertionError)
        _require(num_splits is None, "num_splits must be None", AssertionError)
        _require(not causal, "causal must be False", AssertionError)
        _require(is_fp8_kvcache, "is_fp8_kvcache must be True", AssertionError)
        _require(indices is not None, "indices are required", AssertionError)
        config = _config(q, k_cache, indices, extra_k_cache, extra_indices_in_kvcache, enable_batch_invariant)
        if meta.have_initialized:
            _require(meta.config == config, f"metadata was made for {meta.config}, got {config}", AssertionError)
        if self._knobs.fault == "metadata_poisoned":
            meta.have_initialized, meta.config = True, config
        _check_decode(q, k_cache, indices, head_dim_v, attn_sink, topk_length)
        _check_extra(q, extra_k_cache, extra_indices_in_kvcache, extra_topk_length)

        b, s_q, h_q, _ = q.shape
        if self._knobs.fault == "metadata_stale":
            indices = meta.__dict__.setdefault("stale_indices", indices.clone())
        self._schedule(meta, config)
        sources, index_lists = [PagedCache(k_cache, self._knobs)], [indices]
        lengths = [self._lengths(topk_length, b, indices.shape[2])]
        if extra_k_cache is not None and self._knobs.fault != "extra_ignored":
            sources.append(PagedCache(extra_k_cache, self._knobs))
            index_lists.append(extra_indices_in_kvcache)
            own = topk_length if self._knobs.fault == "extra_length_main" else extra_topk_length
            longest = extra_indices_in_kvcache.shape[2]
            if self._knobs.fault == "extra_length_capped" and own is not None:
                own = own.clamp(max=indices.shape[2])
            lengths.append(self._lengths(own, b, longest))
        default = 576**-0.5 if self._knobs.fault == "default_scale_576" else HEAD_DIM**-0.5
        scale = default if softmax_scale is None else softmax_scale

        out = torch.empty(b, s_q, h_q, HEAD_DIM, dtype=torch.bfloat16)
        lse = torch.empty(b, s_q, h_q)
        for i in range(b):
            splits = 1 if meta.num_splits is None else int(meta.num_splits[i + 1] - meta.num_splits[i])
            for t in range(s_q):
                length_row = (i * s_q + t) % b if self._knobs.fault == "length_by_token" else i
                lists = [self._list(x[:, t], i, n[length_row]) for x, n in zip(index_lists, lengths, strict=True)]
                done = attend(q[i, t], lists, sources, scale, attn_sink, splits, self._knobs)
                out[i, t], lse[i, t] = done.out, done.lse
        return out, lse.view(b, h_q, s_q) if self._knobs.fault == "lse_not_transposed" else lse.transpose(1, 2)

    def _schedule(self, meta: FlashMLASchedMeta, config: SchedConfig) -> None:
        """Fills an empty metadata object; a filled one keeps its splits."""
        if meta.have_initialized and meta.num_splits is not None:
            return
        total = config.topk + (config.extra_topk or 0)
        splits = max(self._knobs.split_k, 2 if total > SPLIT_ABOVE else 1)
        if splits > 1 and not config.enable_batch_invariant:
            meta.num_splits = torch.arange(config.b + 1, dtype=torch.int32) * splits
        meta.have_initialized, meta.config = True, config

    def _lengths(self, lengths: torch.Tensor | None, count: int, most: int) -> list[int]:
        if lengths is None:
            return [most] * count
        return [min(max(n + self._knobs.mask_shift, 0), most) for n in lengths.tolist()]

    def _list(self, indices: torch.Tensor, row: int, length: int) -> torch.Tensor:
        """The list of one row of [rows, topk], cut at its length."""
        if self._knobs.fault == "neighbour_list":
            row = (row + 1) % len(indices)
        slots = indices[row, :length]
        return slots.unique() if self._knobs.fault == "repeats_once" else slots


def _require(holds: bool, message: str, error: type[Exception] = RuntimeError) -> None:
    if not holds:
        raise error(message)


def _check(name: str, t: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]) -> None:
    """dtype, shape (None: any) and a last stride of 1."""
    _require(isinstance(t, torch.Tensor) and t.device.type == "cpu", f"{name} must be a tensor of this device")
    _require(t.dtype in dtypes, f"{name} has dtype {t.dtype}, expected one of {dtypes}")
    fits = t.dim() == len(shape) and all(want in (None, got) for want, got in zip(shape, t.shape, strict=True))
    _require(fits, f"{name} has shape {tuple(t.shape)}, expected {shape}")
    _require(t.stride(-1) == 1 or t.shape[-1] == 1, f"the last stride of {name} must be 1")


def _check_vector(name: str, t: torch.Tensor | None, dtype: torch.dtype, count: int) -> None:
    if t is not None:
        _check(name, t, (dtype,), (count,))


def _check_heads(h_q: int, d_v: int) -> None:
    _require(h_q in (64, 128), f"h_q must be 64 or 128, got {h_q}")
    _require(d_v == HEAD_DIM, f"the head dimension of V must be {HEAD_DIM}, got {d_v}")


def _check_cache(name: str, cache: torch.Tensor, row_bytes: tuple[int, ...]) -> None:
    _check(name, cache, _CACHE_DTYPES, (None, None, 1, None))
    blocks, page, _, width = cache.shape
    _require(width in row_bytes, f"{name} rows must have {row_bytes} bytes, got {width}")
    _require(blocks > 0 and page > 0, f"{name} must not be empty")
    _require(cache.stride(1) == width, f"rows of a page of {name} must follow each other, stride is {cache.stride(1)}")
    _require(blocks == 1 or cache.stride(0) >= page * width, f"pages of {name} overlap")


def _check_decode(
    q: torch.Tensor, k_cache: torch.Tensor, indices: torch.Tensor, head_dim_v: int,
    attn_sink: torch.Tensor | None, topk_length: torch.Tensor | None,
) -> None:
    _check("q", q, (torch.bfloat16,), (None, None, None, HEAD_DIM))
    b, s_q, h_q, _ = q.shape
    _require(b > 0 and s_q > 0, "b and s_q must be positive")
    _check_heads(h_q, head_dim_v)
    _check_cache("k_cache", k_cache, (FP8_ROW_BYTES,))
    _check("indices", indices, (torch.int32,), (b, s_q, None))
    topk = indices.shape[2]
    _require(topk > 0 and topk % BLOCK == 0, f"topk must be a positive multiple of {BLOCK}, got {topk}")
    _check_vector("attn_sink", attn_sink, torch.float32, h_q)
    _check_vector("topk_length", topk_length, torch.int32, b)


def _check_extra(
    q: torch.Tensor, cache: torch.Tensor | None, indices: torch.Tensor | None, length: torch.Tensor | None
) -> None:
    _require((cache is None) == (indices is None), "extra_k_cache and extra_indices_in_kvcache go together")
    if cache is None or indices is None:
        _require(length is None, "extra_topk_length needs an extra cache")
        return
    b, s_q, h_q, _ = q.shape
    _check_cache("extra_k_cache", cache, (FP8_ROW_BYTES, FP4_ROW_BYTES))
    _check("extra_indices_in_kvcache", indices, (torch.int32,), (b, s_q, None))
    topk = indices.shape[2]
    unit = BLOCK if h_q == BLOCK else 1
    _require(topk > 0 and topk % unit == 0, f"extra topk must be a positive multiple of {unit}, got {topk}")
    _check_vector("extra_topk_length", length, torch.int32, b)


def _config(
    q: torch.Tensor, k_cache: torch.Tensor, indices: torch.Tensor, extra_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None, batch_invariant: bool,
) -> SchedConfig:
    shape = [("q", q, 4), ("k_cache", k_cache, 4), ("indices", indices, 3), ("extra_k_cache", extra_cache, 4),
             ("extra_indices_in_kvcache", extra_indices, 3)]
    for name, t, dims in shape:
        _require(t is None or (isinstance(t, torch.Tensor) and t.dim() == dims), f"{name} must have {dims} dimensions")
    return SchedConfig(
        q.shape[0], q.shape[1], q.shape[2], k_cache.shape[1], k_cache.shape[2], False, True, indices.shape[2],
        None if extra_cache is None else extra_cache.shape[1],
        None if extra_indices is None else extra_indices.shape[2], batch_invariant,
    )
