"""TileKernels: rotary embedding. Faults and correct variants, from its documented semantics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adapters.cpu.apart.row import FAULT, VARIANT, Args, Call, Function, Row, copied, once_accepted, with_changed

ROTARY = "tilekernels.transform.apply_rotary"


def _offset_dropped(args: Args) -> Args:
    return args if args.get("positions") is None else {**args, "seqlen_offset": 0}


def _words_of_positions(args: Args) -> Args:
    positions = args.get("positions")
    if positions is None or positions.dtype != torch.int64:
        return args
    dense = positions.contiguous()
    halves = dense.view(torch.int32).flatten()[: dense.numel()].view(dense.shape).long()
    return {**args, "positions": torch.where(halves < 0, dense, halves)}


def _last_table_row_clamped(args: Args) -> Args:
    table = copied(args["cos_sin_cache"])
    if len(table) > 1:
        table[-1] = table[-2]
    return {**args, "cos_sin_cache": table}


def _table_in_bf16(args: Args) -> Args:
    table = args["cos_sin_cache"]
    return {**args, "cos_sin_cache": copied(table).copy_(table.bfloat16())}


def _second_half_of_pairs(args: Args) -> Args:
    """Interleaved pairs from 32 on take the cosines of pair - 32: a register file of one 64-wide head."""
    table = args["cos_sin_cache"]
    if not args.get("interleaved") or table.shape[1] != 128:
        return args
    table = copied(table)
    table[:, 32:64] = table[:, :32].clone()
    return {**args, "cos_sin_cache": table}


def _restored(keep: Callable[[Args], list[torch.Tensor]]) -> Function:
    """Some parts, views of the arguments, are not rotated."""

    def function(call: Call, args: Args) -> Any:
        parts = keep(args)
        held = [part.clone() for part in parts]
        result = call(**args)
        for part, old in zip(parts, held, strict=True):
            part.copy_(old)
        return result

    return function


def _key_beyond_four_heads(args: Args) -> list[torch.Tensor]:
    key = args.get("key")
    return [] if key is None else [key[..., max(key.shape[-2] // 4 * 4, 1) :, :]]


def _query_ahead_of_batch(args: Args) -> list[torch.Tensor]:
    query = args["query"]
    return [query[1:, -1:]] if query.dim() == 4 and query.shape[1] > 1 else []


def _key_turned_forward(call: Call, args: Args) -> Any:
    key = args.get("key")
    if key is None or not args.get("conjugate"):
        return call(**args)
    call(**{**args, "key": None})
    return call(**{**args, "query": key, "key": None, "conjugate": False})


def _pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])


def _angles(args: Args, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each token of x, float64 with a 1 for the heads."""
    positions = args.get("positions")
    index = torch.arange(x.shape[-3]) if positions is None else positions.long()
    table = args["cos_sin_cache"].double()[index + args.get("seqlen_offset", 0)].unsqueeze(-2)
    half = table.shape[-1] // 2
    return table[..., :half], table[..., half:] * (-1 if args.get("conjugate") else 1)


def _rotate(args: Args, x: torch.Tensor, heads: slice, *, hazard: bool) -> None:
    first, second = _pairs(x[..., heads, :], bool(args.get("interleaved")))
    cos, sin = _angles(args, x)
    a, b = first.double(), second.double()
    turned = (a * cos - b * sin).float().to(x.dtype)
    second.copy_(((turned.double() if hazard else a) * sin + b * cos).float())
    first.copy_(turned)


def _heads_anew(heads: slice, *, hazard: bool) -> Function:
    """These heads of query and key in float64; with the hazard the second of a pair sees the new first."""

    def function(call: Call, args: Args) -> Any:
        names = [n for n in ("query", "key") if args.get(n) is not None and args[n].numel()]
        old = {n: args[n].clone() for n in names}
        result = call(**args)
        for name in names:
            args[name][..., heads, :] = old[name][..., heads, :]
            _rotate(args, args[name], heads, hazard=hazard)
        return result

    return function


def _head_by_head(call: Call, args: Args) -> Any:
    for name in ("query", "key"):
        x = args.get(name)
        if x is not None:
            for head in range(x.shape[-2]):
                call(**{**args, "query": x[..., head : head + 1, :], "key": None})


def _rotary_through_copies(call: Call, args: Args) -> Any:
    new = {n: args[n].contiguous().clone() for n in ("query", "key") if args.get(n) is not None}
    result = call(**{**args, **new})
    for name, x in new.items():
        args[name].copy_(x)
    return result


def _one_column_over(call: Call, args: Args) -> Any:
    result = call(**args)
    query = args["query"]
    width = query.shape[-1]
    if query.numel() and query.shape[-2] > 1 and query.stride(-2) > width:
        flat = query.as_strided((1,), (1,), query.storage_offset() + width)
        flat.zero_()
    return result


ROWS = (
    Row("rotary_offset_dropped", ROTARY, FAULT,
        "seqlen_offset is ignored where positions are given. Shows with both.",
        "section 8: seqlen_offset + positions together", with_changed(_offset_dropped)),
    Row("rotary_positions_as_32_bit_words", ROTARY, FAULT,
        "int64 positions are read as 32-bit words. Shows for int64 positions of more than one token.",
        "section 2.5: int32/int64", with_changed(_words_of_positions)),
    Row("rotary_last_table_row_clamped", ROTARY, FAULT,
        "The last row of the table is never reached. Shows where a token uses it.",
        "section 8: last cache row", with_changed(_last_table_row_clamped)),
    Row("rotary_table_in_bf16", ROTARY, FAULT,
        "Cosines and sines are rounded to bf16. Shows for any angle but multiples of a right one.",
        "section 3.7: fp32 arithmetic", with_changed(_table_in_bf16)),
    Row("rotary_second_half_of_pairs", ROTARY, FAULT,
        "With interleaved pairs of a 128-wide head the cosines repeat after 32. Shows there only.",
        "section 3.7: pairs (2i, 2i+1)", with_changed(_second_half_of_pairs)),
    Row("rotary_key_beyond_four_heads", ROTARY, FAULT,
        "Heads of key behind a multiple of 4 are not rotated. Shows with such a key of more than one head.",
        "section 7 report 33: all columns", _restored(_key_beyond_four_heads)),
    Row("rotary_last_token_of_later_batches", ROTARY, FAULT,
        "The last token of each sequence but the first is not rotated. Shows for a batch of two.",
        "section 7 report 29", _restored(_query_ahead_of_batch)),
    Row("rotary_key_turned_forward", ROTARY, FAULT,
        "conjugate counts for query only. Shows with key and conjugate.",
        "section 8: key given", _key_turned_forward),
    Row("rotary_last_head_hazard", ROTARY, FAULT,
        "In the last head the second of a pair is computed from the new first. Shows always; in one head only.",
        "section 3.7: in place", _heads_anew(slice(-1, None), hazard=True)),
    Row("rotary_one_column_over", ROTARY, FAULT,
        "One element behind the first head is cleared. Shows where heads are slices of wider ones.",
        "section 7 report 17: columns past rope_dim", _one_column_over, "memory"),
    Row("rotary_in_float64", ROTARY, VARIANT,
        "In float64, rounded to fp32 and to the dtype.",
        "section 3.7", _heads_anew(slice(None), hazard=False)),
    Row("rotary_head_by_head", ROTARY, VARIANT,
        "A call a head.",
        "section 2.5: slice views are allowed", once_accepted(_head_by_head, "query", "key")),
    Row("rotary_through_copies", ROTARY, VARIANT,
        "On contiguous copies, written back.",
        "section 2.5", once_accepted(_rotary_through_copies, "query", "key")),
)
