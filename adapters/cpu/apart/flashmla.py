"""FlashMLA: sparse prefill and the metadata object; decode stands in `flashmla_decode`. Faults and correct variants."""

from __future__ import annotations

import math
from typing import Any

import torch

from adapters.cpu.apart import flashmla_decode
from adapters.cpu.apart.row import FAULT, VARIANT, Args, Call, Row, copied, once_accepted, with_changed

PREFILL, METADATA = "flashmla.flash_mla_sparse_fwd", "flashmla.get_mla_metadata"
BLOCK = 64
_SHARED: list[Any] = []




def _invalidated(args: Args) -> torch.Tensor:
    """The lists, int32 [s_q, topk], with -1 for what is not counted: out of the KV rows, or behind the length."""
    lists = args["indices"][:, 0].clone()
    length = args.get("topk_length")
    if length is not None:
        lists[torch.arange(lists.shape[1]) >= length[:, None]] = -1
    lists[(lists < 0) | (lists >= len(args["kv"]))] = -1
    return lists


def _relisted(lists: torch.Tensor) -> Args:
    return {"indices": lists[:, None].contiguous(), "topk_length": None}


def _repeats_merged(args: Args) -> Args:
    lists = _invalidated(args)
    ordered, where = lists.sort(dim=1, stable=True)
    repeat = torch.zeros_like(ordered, dtype=torch.bool)
    repeat[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return _relisted(lists.masked_fill(torch.zeros_like(repeat).scatter(1, where, repeat), -1))


def _length_by_block(args: Args) -> Args:
    length = args.get("topk_length")
    return {} if length is None else {"topk_length": (length + BLOCK - 1) // BLOCK * BLOCK}


def _index_at_the_end(args: Args) -> Args:
    indices, rows = args["indices"], len(args["kv"])
    return {"indices": copied(indices).copy_(torch.where(indices == rows, rows - 1, indices))}


def _sign_bit_masked(args: Args) -> Args:
    indices = args["indices"]
    return {"indices": copied(indices).copy_(torch.where(indices < 0, indices & 0x7FFFFFFF, indices))}


def _sinks_repeat(args: Args) -> Args:
    sink = args.get("attn_sink")
    if sink is None or len(sink) <= BLOCK:
        return {}
    return {"attn_sink": sink[:BLOCK].repeat(2)}


def _scale_in_bf16(args: Args) -> Args:
    return {"sm_scale": float(torch.tensor(args["sm_scale"]).bfloat16())}


def _sink_in_lse(call: Call, args: Args) -> Any:
    out, top, lse = call(**args)
    sink = args.get("attn_sink")
    if sink is not None:
        lse.copy_(torch.where(lse == math.inf, lse, torch.logaddexp(lse, sink.expand_as(lse))))
    return out, top, lse


def _odd_block_skipped(call: Call, args: Args) -> Any:
    out, top, lse = call(**args)
    heads, blocks = out.shape[1] // 2, args["indices"].shape[-1] // BLOCK
    if blocks % 2 and blocks > 1 and len(out):
        lists = _invalidated(args)
        lists[:, (blocks - 1) * BLOCK :] = -1
        shorter = call(**{**args, **_relisted(lists)})
        out[:, heads:] = shorter[0][:, heads:]
    return out, top, lse


def _maximum_from_zero(call: Call, args: Args) -> Any:
    out, top, lse = call(**args)
    top.copy_(torch.where(top.isfinite() & (top < 0), torch.zeros_like(top), top))
    return out, top, lse


def _empty_row_negative(call: Call, args: Args) -> Any:
    out, top, lse = call(**args)
    lse[top == -math.inf] = -math.inf
    return out, top, lse


def _infinite_sink_nan(call: Call, args: Args) -> Any:
    out, top, lse = call(**args)
    sink = args.get("attn_sink")
    if sink is not None:
        out[:, sink == math.inf] = math.nan
    return out, top, lse


def _logits(args: Args, row: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scaled logits [h, n], KV rows [n, 512]) in float64 of one token."""
    rows = args["kv"][index.long(), 0].double()
    return args["sm_scale"] * (args["q"][row].double() @ rows.T), rows


def _sigma(args: Args, lse: torch.Tensor) -> torch.Tensor:
    """What the sink leaves of each head's output; lse float64 [h]."""
    sink = args.get("attn_sink")
    return torch.ones_like(lse) if sink is None else torch.sigmoid(lse - sink.double())


def _rescale_of_upper_half_lost(call: Call, args: Args) -> Any:
    out, top, lse = call(**args)
    lists = _invalidated(args)
    for row in range(len(out)):
        index = lists[row]
        last = index[-BLOCK:][index[-BLOCK:] >= 0]
        head = index[:-BLOCK][index[:-BLOCK] >= 0]
        if not len(last) or not len(head):
            continue
        (z0, v0), (z1, v1) = _logits(args, row, head), _logits(args, row, last)
        m0 = z0.amax(1, keepdim=True)
        m = torch.maximum(m0, z1.amax(1, keepdim=True))
        grown = (m > m0)[:, 0]
        total = (z0 - m).exp().sum(1) + (z1 - m).exp().sum(1)
        stale = ((z0 - m0).exp() @ v0 + (z1 - m).exp() @ v1) / total[:, None]
        stale *= _sigma(args, m[:, 0] + total.log())[:, None]
        out[row, grown, 256:] = stale[grown, 256:].float().to(out.dtype)
    return out, top, lse


def _prefill_in_float64(call: Call, args: Args) -> Any:
    out, top, lse = call(**args)
    lists = _invalidated(args)
    for row in range(len(out)):
        index = lists[row][lists[row] >= 0]
        z, rows = _logits(args, row, index)
        if not len(index) or not bool(z.isfinite().all() and rows.isfinite().all()):
            continue
        log_sum = torch.logsumexp(z, 1)
        value = _sigma(args, log_sum)[:, None] * ((z - log_sum[:, None]).exp() @ rows)
        out[row], top[row], lse[row] = value.float().to(out.dtype), z.amax(1).float(), log_sum.float()
    return out, top, lse


def _list_reversed(args: Args) -> Args:
    return _relisted(_invalidated(args).flip(1))


def _valid_first(args: Args) -> Args:
    lists = _invalidated(args)
    return _relisted(lists.gather(1, (lists < 0).int().argsort(dim=1, stable=True)))


def _token_by_token(call: Call, args: Args) -> Any:
    result = call(**args)
    for row in range(len(args["q"])):
        own = {n: args[n][row : row + 1] for n in ("q", "indices", "topk_length") if args.get(n) is not None}
        for whole, part in zip(result, call(**{**args, **own}), strict=True):
            whole[row : row + 1] = part
    return result


def _one_for_all(call: Call, args: Args) -> Any:
    if not _SHARED:
        _SHARED.append(call(**args))
    return _SHARED[0]


def _pair_of_an_older_release(call: Call, args: Args) -> Any:
    return call(**args)[0], torch.zeros(2, dtype=torch.int32)


ROWS = (
    Row("prefill_repeats_merged", PREFILL, FAULT,
        "A KV row listed twice counts once. Shows for lists with repeats.",
        "section 3: each list entry counts once per occurrence", with_changed(_repeats_merged)),
    Row("prefill_length_by_block", PREFILL, FAULT,
        "topk_length is rounded up to 64. Shows where it is no multiple and valid entries follow it.",
        "section 7: lengths 1, 63, 64, 65", with_changed(_length_by_block)),
    Row("prefill_index_at_the_end", PREFILL, FAULT,
        "The index s_kv counts as the last row. Shows where a list holds s_kv itself.",
        "section 2.3: invalid is negative or >= s_kv", with_changed(_index_at_the_end)),
    Row("prefill_sign_bit_masked", PREFILL, FAULT,
        "The sign bit of an index is masked off: INT_MIN reads row 0. Shows with negative indices near INT_MIN.",
        "section 3: INT_MIN among the invalid", with_changed(_sign_bit_masked)),
    Row("prefill_sinks_repeat", PREFILL, FAULT,
        "Heads from 64 on use the sinks of the first 64. Shows for 128 heads.",
        "section 2.3: attn_sink [h_q]", with_changed(_sinks_repeat)),
    Row("prefill_scale_in_bf16", PREFILL, FAULT,
        "sm_scale is rounded to bf16. Shows for a scale of more than 8 bits, such as 512**-0.5.",
        "section 3: z = sm_scale * <q, kv>", with_changed(_scale_in_bf16)),
    Row("prefill_sink_in_lse", PREFILL, FAULT,
        "lse holds the sink too. Shows with finite sinks not far under it.",
        "section 7: sink has no effect on lse", _sink_in_lse),
    Row("prefill_odd_block_skipped", PREFILL, FAULT,
        "The upper half of the heads leaves out the last of an odd number of list blocks. Shows where topk/64 is odd.",
        "section 2.3: topk a multiple of 64", _odd_block_skipped),
    Row("prefill_maximum_from_zero", PREFILL, FAULT,
        "The running maximum starts at 0; max_logits is never negative. Shows where all logits of a row are.",
        "section 3: first running max", _maximum_from_zero),
    Row("prefill_empty_row_negative", PREFILL, FAULT,
        "lse of a row without keys is -inf. Shows for an empty list.",
        "section 6 report 2: sign of lse", _empty_row_negative),
    Row("prefill_infinite_sink_nan", PREFILL, FAULT,
        "A sink of +inf makes the head NaN instead of 0. Shows with it.",
        "section 2.2: +inf gives zeros", _infinite_sink_nan),
    Row("prefill_rescale_of_upper_half_lost", PREFILL, FAULT,
        "When the maximum grows in the last list block, dims 256 to 511 are not rescaled. Shows for lists whose last "
        "block holds a head's maximum.",
        "section 3: online rescale", _rescale_of_upper_half_lost),
    Row("prefill_in_float64", PREFILL, VARIANT,
        "In float64, rounded to fp32 and to bf16.",
        "section 3", _prefill_in_float64),
    Row("prefill_list_reversed", PREFILL, VARIANT,
        "Lists from the last entry to the first.",
        "section 3: permuting the list", once_accepted(with_changed(_list_reversed))),
    Row("prefill_valid_first", PREFILL, VARIANT,
        "Invalid entries moved behind the valid ones.",
        "section 3", once_accepted(with_changed(_valid_first))),
    Row("prefill_token_by_token", PREFILL, VARIANT,
        "A call a token.",
        "section 2.3", _token_by_token),
    Row("metadata_one_for_all", METADATA, FAULT,
        "Every call returns the object of the first. Shows when a second decode has other sizes.",
        "section 2.1: an empty object", _one_for_all),
    Row("metadata_pair_of_an_older_release", METADATA, FAULT,
        "The second result is a tensor. Shows always.",
        "section 2.1: (FlashMLASchedMeta, None)", _pair_of_an_older_release),
    *flashmla_decode.ROWS,
)
