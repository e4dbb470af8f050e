"""FlashMLA: decode over paged caches. Faults and correct variants, from its documented semantics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from adapters.cpu.apart.row import (
    FAULT,
    VARIANT,
    Args,
    Call,
    Function,
    Row,
    before,
    copied,
    once_accepted,
    with_changed,
)

DECODE = "flashmla.flash_mla_with_kvcache"
BLOCK = 64
FP8_ROW_BYTES, FP4_ROW_BYTES = 528, 288
SPLIT_FROM = 640
_LENGTHS: dict[Any, torch.Tensor] = {}


def _page_by_mask(args: Args) -> Args:
    """The offset in a page as slot & (page - 1): right for powers of two only."""
    page, indices = args["k_cache"].shape[1], args["indices"]
    offset = indices % page & page - 1
    return {"indices": copied(indices).copy_(torch.where(indices < 0, indices, indices // page * page + offset))}


def _extra_length_by_main(args: Args) -> Args:
    length = args.get("extra_topk_length")
    return {} if length is None else {"extra_topk_length": length.clamp(max=args["indices"].shape[-1])}


def _first_list_for_all_tokens(args: Args) -> Args:
    indices = args["indices"]
    if indices.shape[0] < 2 or indices.shape[1] < 2:
        return {}
    indices = copied(indices)
    indices[-1, 1:] = indices[-1, :1].clone()
    return {"indices": indices}


def _cache_changed(name: str, row_bytes: int, change: Callable[[torch.Tensor], None]) -> Function:
    """The true call on a cache whose bytes uint8 [blocks, page, 1, row] were changed in place."""

    def function(call: Call, args: Args) -> Any:
        cache = args.get(name)
        if cache is None or cache.shape[-1] != row_bytes:
            return call(**args)
        raw = copied(cache.view(torch.uint8))
        change(raw)
        return call(**{**args, name: raw.view(cache.dtype)})

    return function


def _last_scale_clamped(raw: torch.Tensor) -> None:
    raw[..., 527] = raw[..., 526]


def _scales_signed(raw: torch.Tensor) -> None:
    scales = raw[..., 512:528]
    scales.copy_(torch.where(scales >= 128, 0, scales))


def _small_scales_flushed(raw: torch.Tensor) -> None:
    scales = raw[..., 256:288]
    scales.copy_(torch.where((scales & 0x78) == 0, 0, scales))


def _largest_negative_lowered(raw: torch.Tensor) -> None:
    """The largest negative code, -6, is read as -4."""
    codes = raw[..., :256]
    low, high = codes & 15, codes >> 4
    codes.copy_(torch.where(low == 15, 14, low) | torch.where(high == 15, 14, high) << 4)


def _listed(args: Args) -> int:
    extra = args.get("extra_indices_in_kvcache")
    return args["indices"].shape[-1] + (0 if extra is None else extra.shape[-1])


def _split_lse_base_2(call: Call, args: Args) -> Any:
    out, lse = call(**args)
    if _listed(args) > SPLIT_FROM and not args.get("enable_batch_invariant"):
        lse.div_(math.log(2))
    return out, lse


def _sink_twice_when_split(call: Call, args: Args) -> Any:
    out, lse = call(**args)
    sink = args.get("attn_sink")
    if sink is not None and _listed(args) > SPLIT_FROM and not args.get("enable_batch_invariant"):
        factor = torch.sigmoid(lse.double() - sink.double()[None, :, None]).transpose(1, 2)[..., None]
        out.copy_((out.double() * torch.where(factor.isnan(), 1.0, factor)).float())
    return out, lse


def _first_request_nan(call: Call, args: Args) -> Any:
    out, lse = call(**args)
    if len(out):
        out[0][lse[0].transpose(0, 1) == math.inf] = math.nan
    return out, lse


def _skipped_weigh(call: Call, args: Args) -> Any:
    """-1 entries of the last block of the list count as tokens of logit 0 and value 0."""
    out, lse = call(**args)
    last = args["indices"][..., -BLOCK:]
    missing = (last == -1).sum(-1).double()
    length = args.get("topk_length")
    if length is not None:
        counted = length[:, None, None] > torch.arange(args["indices"].shape[-1] - BLOCK, args["indices"].shape[-1])
        missing = ((last == -1) & counted).sum(-1).double()
    total = lse.double().exp()
    grown = total + missing[:, None]
    factor = torch.where(lse.isfinite(), total / grown, torch.ones_like(total)).transpose(1, 2)[..., None]
    out.copy_(torch.where(factor == 1, out, (out.double() * factor).float().to(out.dtype)))
    lse.copy_(torch.where(lse.isfinite() & (grown > total), grown.log().float(), lse))
    return out, lse


def _lengths_of_the_call_before(call: Call, args: Args) -> Any:
    length = args.get("topk_length")
    earlier = None if length is None else before(_LENGTHS, tuple(args["indices"].shape), length)
    return call(**(args if earlier is None else {**args, "topk_length": earlier}))


def _length_of_last_request_short(args: Args) -> Args:
    length = args.get("topk_length")
    if length is None or len(length) < 2:
        return {}
    length = length.clone()
    length[-1] = length[-1] // BLOCK * BLOCK if length[-1] > BLOCK else length[-1]
    return {"topk_length": length}


def _fresh(call: Call, args: Args, **change: Any) -> Any:
    """A further call with an empty metadata object of its own."""
    meta = call.__self__.get_mla_metadata()[0]  # type: ignore[attr-defined]
    return call(**{**args, **change, "tile_scheduler_metadata": meta})


def _request_by_request(call: Call, args: Args) -> Any:
    result = call(**args)
    by_request = ("q", "indices", "topk_length", "extra_indices_in_kvcache", "extra_topk_length")
    for row in range(len(args["q"])):
        own = {n: args[n][row : row + 1] for n in by_request if args.get(n) is not None}
        for whole, part in zip(result, _fresh(call, args, **own), strict=True):
            whole[row : row + 1] = part
    return result


def _blocks_reversed(args: Args) -> Args:
    cache, indices = args["k_cache"], args["indices"]
    blocks, page = cache.shape[:2]
    moved = (blocks - 1 - indices // page) * page + indices % page
    turned = cache.view(torch.uint8).flip(0).contiguous().view(cache.dtype)
    return {"k_cache": turned, "indices": copied(indices).copy_(torch.where(indices < 0, indices, moved))}


def _page_of_all(args: Args) -> Args:
    """The whole cache as one page: slot numbers stay."""
    cache = args["k_cache"]
    return {"k_cache": cache.view(torch.uint8).reshape(1, -1, 1, cache.shape[-1]).clone().view(cache.dtype)}


def _decode_list_reversed(args: Args) -> Args:
    indices, length = args["indices"].clone(), args.get("topk_length")
    if length is not None:
        indices[(torch.arange(indices.shape[-1]) >= length[:, None, None]).expand_as(indices)] = -1
    return {"indices": indices.flip(-1).contiguous(), "topk_length": None}


ROWS = (
    Row("decode_page_by_mask", DECODE, FAULT,
        "The offset in a page is slot & (page - 1). Shows for pages of no power of two.",
        "section 7: page sizes 1, 2, primes", with_changed(_page_by_mask)),
    Row("decode_extra_length_by_main", DECODE, FAULT,
        "extra_topk_length is cut at the main list's topk. Shows where the extra list is longer.",
        "section 2.2: each list by its own length", with_changed(_extra_length_by_main)),
    Row("decode_first_list_for_all_tokens", DECODE, FAULT,
        "In the last request all tokens use the first one's list. Shows for b > 1 and s_q > 1.",
        "section 2.2: indices [b, s_q, topk]", with_changed(_first_list_for_all_tokens)),
    Row("decode_last_scale_clamped", DECODE, FAULT,
        "Dims 480 to 511 of the main cache are scaled as the 32 before. Shows where the two scales differ.",
        "section 2.8: 16 UE8M0 bytes", _cache_changed("k_cache", FP8_ROW_BYTES, _last_scale_clamped)),
    Row("decode_scales_signed", DECODE, FAULT,
        "A scale byte of 128 or more is read as negative, so the scale vanishes. Shows for scales of 2 or more.",
        "section 6 report 24", _cache_changed("k_cache", FP8_ROW_BYTES, _scales_signed)),
    Row("decode_fp4_small_scales_flushed", DECODE, FAULT,
        "Subnormal e4m3 scales of the FP4 cache count as zero. Shows for scales under 2^-6.",
        "section 2.8: scale from 2^-9 on", _cache_changed("extra_k_cache", FP4_ROW_BYTES, _small_scales_flushed)),
    Row("decode_fp4_largest_negative", DECODE, FAULT,
        "The FP4 code of -6 reads as -4. Shows with this code in the extra cache.",
        "section 7: every e2m1 nibble", _cache_changed("extra_k_cache", FP4_ROW_BYTES, _largest_negative_lowered)),
    Row("decode_split_lse_base_2", DECODE, FAULT,
        "Where the list is split, lse is in base 2. Shows for more than 640 entries without enable_batch_invariant.",
        "section 6 report 1", _split_lse_base_2),
    Row("decode_sink_twice_when_split", DECODE, FAULT,
        "Where the list is split, the sink counts in the part and in the combination. Shows for more than 640 entries "
        "with a sink.",
        "section 3: sink applied once in combine", _sink_twice_when_split),
    Row("decode_first_request_nan", DECODE, FAULT,
        "A row without keys is NaN in the first request, 0 elsewhere. Shows for an empty first request.",
        "section 6 report 20", _first_request_nan),
    Row("decode_skipped_weigh", DECODE, FAULT,
        "-1 entries in the last 64 of the list weigh as tokens of logit 0. Shows with such entries inside the length.",
        "section 2.2: -1 = skip", _skipped_weigh),
    Row("decode_lengths_of_the_call_before", DECODE, FAULT,
        "topk_length of the call before is used. Shows from the second call of one shape on.",
        "section 6 report 17: stale scheduling", _lengths_of_the_call_before),
    Row("decode_last_request_by_full_blocks", DECODE, FAULT,
        "The last request counts full list blocks of 64 only. Shows for b > 1 and a length over 64 that is no "
        "multiple.",
        "section 7: lengths 65, topk-1", with_changed(_length_of_last_request_short)),
    Row("decode_request_by_request", DECODE, VARIANT,
        "A call a request, each with its own metadata.",
        "section 7: slicing the batch", _request_by_request),
    Row("decode_blocks_reversed", DECODE, VARIANT,
        "Cache blocks in the opposite order, lists renumbered.",
        "section 3: re-paging", once_accepted(with_changed(_blocks_reversed))),
    Row("decode_page_of_all", DECODE, VARIANT,
        "The cache in one page.",
        "section 3: re-paging", once_accepted(lambda call, args: _fresh(call, args, **_page_of_all(args)))),
    Row("decode_list_reversed", DECODE, VARIANT,
        "The main list from the last entry to the first.",
        "section 3: permuting the list", once_accepted(with_changed(_decode_list_reversed))),
)
