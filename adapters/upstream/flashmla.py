"""FlashMLA (`flash_mla`): its public calls of the release of 2026-09-30, sparse attention.

Two releases call themselves 1.0.0 and take caches of 528 bytes a token, but place the scales otherwise: behind each
token's data (`inline528`), or behind all data of a page (`planar528`). Either reads the other's cache without a word.
"""

from __future__ import annotations

from typing import Any

from adapters.upstream.base import UpstreamAdapter, given
from adapters.upstream.release import parameters, said

HEAD_DIM, HEADS, ENTRIES = 512, 64, 64
DATA_BYTES, SCALE_BYTES = 512, 16
ONE, TWO, UNIT_SCALE = 0x38, 0x40, 127
"""E4M3 codes of 1 and 2; the exponent byte of 1"""


class Adapter(UpstreamAdapter):
    """A method an op, named like the public function."""

    module, package = "flashmla", "flash_mla"

    def get_mla_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self.lib.get_mla_metadata(*args, **kwargs)

    def flash_mla_with_kvcache(
        self, q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: int, tile_scheduler_metadata: Any,
        num_splits: Any = None, softmax_scale: float | None = None, causal: bool | None = None,
        is_fp8_kvcache: bool | None = None, indices: Any = None, attn_sink: Any = None, extra_k_cache: Any = None,
        extra_indices_in_kvcache: Any = None, topk_length: Any = None, extra_topk_length: Any = None,
        enable_batch_invariant: bool | None = None,
    ) -> Any:
        return self.lib.flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata,
            **given(num_splits=num_splits, softmax_scale=softmax_scale, causal=causal, is_fp8_kvcache=is_fp8_kvcache,
                    indices=indices, attn_sink=attn_sink, extra_k_cache=extra_k_cache,
                    extra_indices_in_kvcache=extra_indices_in_kvcache, topk_length=topk_length,
                    extra_topk_length=extra_topk_length, enable_batch_invariant=enable_batch_invariant))

    def flash_mla_sparse_fwd(self, q: Any, kv: Any, indices: Any, sm_scale: float, d_v: int | None = None,
                             attn_sink: Any = None, topk_length: Any = None) -> Any:
        return self.lib.flash_mla_sparse_fwd(q, kv, indices, sm_scale,
                                             **given(d_v=d_v, attn_sink=attn_sink, topk_length=topk_length))

    def recognised(self) -> str:
        """By the signature of the decode; where that does not tell, by how it reads a cache of two tokens."""
        decode = getattr(self.lib, "flash_mla_with_kvcache", None)
        if decode is None:
            raise self.cannot_tell("it has no flash_mla_with_kvcache")
        known = parameters(decode)
        if known is None:
            return self.read_layout()
        if "enable_batch_invariant" in known:
            return "inline528"
        if "extra_k_cache" in known:
            return "planar528"
        return "656" if "indices" in known else "dense"

    def trial(self) -> str:
        """The signature names one layout; doctor looks whether the decode reads it."""
        read = self.read_layout()
        if read == self.release:
            return ""
        return (f"by its signature flash_mla is {self.release}, but its decode reads a cache as {read}: it is of no "
                "known release, and nothing that it does can be judged")

    def read_layout(self) -> str:
        """`inline528` or `planar528`, by decoding the second of two tokens. Raises Refused where neither comes out."""
        seen = []
        for layout in ("inline528", "planar528"):
            try:
                out = self._decoded(layout)
            except Exception as e:
                raise self.cannot_tell(f"a decode of two cached tokens of 528 bytes raised {said(e)}") from e
            if bool((out == 2).all()):
                seen.append(layout)
        if len(seen) != 1:
            which = "both layouts" if seen else "neither layout"
            raise self.cannot_tell(f"its decode reads {which} of 528 bytes a token")
        return seen[0]

    def _decoded(self, layout: str) -> Any:
        """What a query attends that lists the second token only, whose values are all 2; the first one's are 1."""
        torch, place = self.backend.torch, self.backend.torch_device
        data = [bytes([code]) * DATA_BYTES for code in (ONE, TWO)]
        scales = bytes([UNIT_SCALE]) * SCALE_BYTES
        page = (data[0] + scales + data[1] + scales) if layout == "inline528" else (data[0] + data[1] + scales + scales)
        cache = torch.frombuffer(bytearray(page), dtype=torch.uint8).to(place)
        indices = torch.full((1, 1, ENTRIES), -1, dtype=torch.int32)
        indices[0, 0, 0] = 1
        metadata, _ = self.lib.get_mla_metadata()
        out, _ = self.lib.flash_mla_with_kvcache(
            torch.zeros((1, 1, HEADS, HEAD_DIM), dtype=torch.bfloat16, device=place),
            cache.view(1, 2, 1, DATA_BYTES + SCALE_BYTES), None, None, HEAD_DIM, metadata, is_fp8_kvcache=True,
            indices=indices.to(place))
        self.backend.synchronize()
        return out.float().cpu()
