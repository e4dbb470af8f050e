"""TileKernels: quantisation by token and the choice of experts; norm and rotation stand in files of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adapters.cpu.apart import tilekernels_rotary, tilekernels_rows
from adapters.cpu.apart.quantise import blocks, exponent_up, quantised, words
from adapters.cpu.apart.row import FAULT, VARIANT, Args, Call, Function, Row, bytes_of, copied

CAST, GATE = "tilekernels.quant.per_token_cast", "tilekernels.moe.topk_gate"


def _floor(call: Call, args: Args) -> float:
    """The module's own setting of the least amax."""
    name = f"amax_clamp_{args['fmt']}" + ("_with_e4m3_sf" if args.get("use_e4m3_sf") else "")
    return call.__self__.settings[name]  # type: ignore[attr-defined]


def _plain(args: Args) -> bool:
    """Whether x is a plain tensor of finite values, rounded to nearest."""
    x = args["x"]
    finite = isinstance(x, torch.Tensor) and x.numel() > 0 and bool(x.isfinite().all())
    return finite and not args.get("stochastic_cast")


def _mode(args: Args) -> str:
    return "e4m3" if args.get("use_e4m3_sf") else "round" if args.get("round_sf") else "plain"


def _store(result: Any, fmt: str, codes: torch.Tensor, scale: torch.Tensor, exponents: torch.Tensor) -> None:
    data, sf = result
    bytes_of(data).copy_(codes if fmt == "e4m3" else codes[:, 0::2] | codes[:, 1::2] << 4)
    if sf.dtype == torch.int32:
        scale = words(exponents, 0)
    sf.copy_(scale)


def _anew(
    *, only: Callable[[Args], bool] = lambda args: True, floor: Callable[[Call, Args], float] = _floor, **steps: Any
) -> Function:
    """The cast by the documented rule with some steps changed; results stand where the true call put them."""

    def function(call: Call, args: Args) -> Any:
        result = call(**args)
        if _plain(args) and only(args):
            fmt = args["fmt"]
            made = quantised(args["x"], fmt, args["num_per_channels"], _mode(args), floor(call, args), **steps)
            _store(result, fmt, *made)
        return result

    return function


def _exponent_by_log2(a: torch.Tensor) -> torch.Tensor:
    """ceil(log2) in FP32: a value just over a power of two lands on it."""
    return (torch.ceil(torch.log2(a)) + 127).long().clamp(1, 254)


def _amax_of_bf16(call: Call, args: Args) -> Any:
    if not _plain(args) or args["x"].dtype != torch.float32:
        return call(**args)
    x, width = copied(args["x"]), args["num_per_channels"]
    for at in range(0, x.shape[1], width):
        part = x[:, at : at + width]
        largest = part.abs().argmax(1, keepdim=True)
        part.scatter_(1, largest, part.gather(1, largest).bfloat16().float())
    return call(**{**args, "x": x})


def _ragged_group_clamped(call: Call, args: Args) -> Any:
    data, sf = call(**args)
    if data.shape[1] * (2 if args["fmt"] == "e2m1" else 1) % args["num_per_channels"] and sf.dtype != torch.int32:
        sf[:, -1].copy_(sf[:, -2] if sf.shape[1] > 1 else sf[:, -1])
    return data, sf


def _last_column_entry(call: Call, args: Args) -> Any:
    data, sf = call(**args)
    if args.get("use_tma_aligned_col_major_sf") and len(sf) % 4 and len(sf) > 1:
        sf[-1].copy_(sf[-2])
    return data, sf


def _nibbles_of_the_last_vector(call: Call, args: Args) -> Any:
    data, sf = call(**args)
    if args["fmt"] == "e2m1" and data.numel():
        raw = bytes_of(data)[:, -8:]
        raw.copy_(raw >> 4 | raw << 4)
    return data, sf


def _negative_zero_dropped(call: Call, args: Args) -> Any:
    data, sf = call(**args)
    raw = bytes_of(data)
    if args["fmt"] == "e4m3":
        raw.copy_(torch.where(raw == 0x80, 0, raw))
    else:
        low, high = raw & 15, raw >> 4
        raw.copy_(torch.where(low == 8, 0, low) | torch.where(high == 8, 0, high) << 4)
    return data, sf


def _given_row_unwritten(call: Call, args: Args) -> Any:
    out = args.get("out")
    if out is None or len(out[0]) < 2:
        return call(**args)
    held = bytes_of(out[0])[-1].clone()
    result = call(**args)
    bytes_of(out[0])[-1] = held
    return result


def _last_word_from_the_top(call: Call, args: Args) -> Any:
    data, sf = call(**args)
    groups = -(-data.shape[1] * (2 if args["fmt"] == "e2m1" else 1) // args["num_per_channels"])
    if sf.dtype == torch.int32 and groups % 4 and sf.numel():
        last = sf[:, -1].long() & (1 << 8 * (groups % 4)) - 1
        sf[:, -1] = (last << 8 * (4 - groups % 4)).to(torch.int32)
    return data, sf


def _input_scale_column_clamped(call: Call, args: Args) -> Any:
    x = args["x"]
    if not isinstance(x, tuple) or x[1].dtype == torch.int32 or x[1].shape[1] < 2:
        return call(**args)
    sf = copied(x[1])
    sf[:, -1].copy_(sf[:, -2])
    return call(**{**args, "x": (x[0], sf)})


def _scale_one_row_up(call: Call, args: Args) -> Any:
    """The data of the first row of each second tile of 32 rows is scaled as the row above it was."""
    result = call(**args)
    if _plain(args) and _mode(args) == "plain" and len(args["x"]) > 32:
        x, width, fmt = args["x"], args["num_per_channels"], args["fmt"]
        top = {"e4m3": 448.0, "e2m1": 6.0}[fmt]
        amax = blocks(x, width).abs().amax(-1).clamp(min=_floor(call, args))
        for row in range(32, len(x), 64):
            scaled = blocks(x[row : row + 1], width) * (torch.full_like(amax[0], top) / amax[row - 1])[:, None]
            wrong = quantised(scaled.view(1, -1)[:, : x.shape[1]], fmt, x.shape[1], "round", top)[0][0]
            data = bytes_of(result[0])
            data[row] = wrong if fmt == "e4m3" else wrong[0::2] | wrong[1::2] << 4
    return result


def _reversed(call: Call, args: Args) -> Any:
    result = call(**args)
    if _plain(args):
        data, sf = call(**{**args, "x": args["x"].flip(0), "out": None})
        bytes_of(result[0]).copy_(bytes_of(data.contiguous()).flip(0))
        for row in range(len(sf)):
            result[1][row].copy_(sf[len(sf) - 1 - row])
    return result


def _column_parts(call: Call, args: Args) -> Any:
    result = call(**args)
    if _plain(args) and args["x"].shape[1] > 512 and result[1].dtype != torch.int32:
        width, per_byte = args["num_per_channels"], 2 if args["fmt"] == "e2m1" else 1
        for part in (slice(0, 512), slice(512, args["x"].shape[1])):
            x = args["x"][:, part].contiguous()
            data, sf = call(**{**args, "x": x, "out": None})
            bytes_of(result[0])[:, part.start // per_byte : part.stop // per_byte] = bytes_of(data)
            result[1][:, part.start // width : part.start // width + sf.shape[1]].copy_(sf)
    return result


# ---- the choice of experts -------------------------------------------------------------------------------------------


def _ranked(key: Callable[[torch.Tensor], torch.Tensor]) -> Function:
    """Experts by the order that key(scores) gives, int64 [t, experts]."""

    def function(call: Call, args: Args) -> Any:
        result = call(**args)
        result.copy_(key(args["scores"])[:, : args["num_topk"]])
        return result

    return function


def _order(keys: torch.Tensor) -> torch.Tensor:
    return torch.argsort(keys, dim=1, descending=True, stable=True)


def _by_lane(scores: torch.Tensor) -> torch.Tensor:
    """Equal scores go to the lower lane of 32, not to the lower expert."""
    lanes = torch.argsort(torch.arange(scores.shape[1]) % 32, stable=True)
    return lanes[_order(scores[:, lanes])]


def _by_bits(scores: torch.Tensor) -> torch.Tensor:
    bits = scores.contiguous().view(torch.int32).long()
    return _order(torch.where(bits < 0, -1 - (bits + (1 << 31)), bits))


def _tail_unseen(scores: torch.Tensor) -> torch.Tensor:
    keys = scores.double()
    keys[:, scores.shape[1] // 4 * 4 :] -= 1e300
    return _order(keys)


def _never_negative(call: Call, args: Args) -> Any:
    result = call(**args)
    result[args["scores"].gather(1, result) < 0] = 0
    return result


def _last_odd_token(call: Call, args: Args) -> Any:
    result = call(**args)
    if len(result) % 2 and len(result) > 1:
        result[-1] = result[-2]
    return result


def _one_round_short(call: Call, args: Args) -> Any:
    result = call(**args)
    if args["num_topk"] == args["scores"].shape[1] > 1:
        result[:, -1] = result[:, -2]
    return result


def _token_by_token(call: Call, args: Args) -> Any:
    result = call(**args)
    for row in range(len(result)):
        result[row : row + 1] = call(**{**args, "scores": args["scores"][row : row + 1]})
    return result


ROWS = (
    Row("quant_amax_in_bf16", CAST, FAULT,
        "The block maximum of FP32 input is kept as bf16. Shows for FP32 whose maxima have more than 8 bits.",
        "section 7 report 5: amax accumulated in the input dtype", _amax_of_bf16),
    Row("quant_ragged_scale_clamped", CAST, FAULT,
        "The scale of the partial last group is stored from the group before. Shows where the width is no multiple of "
        "num_per_channels, scales not packed.",
        "section 7 report 2: tail masking", _ragged_group_clamped),
    Row("quant_last_column_entry", CAST, FAULT,
        "In the column-major layout the last row's scales repeat the row above. Shows where the row count is no "
        "multiple of 4.",
        "section 3.1: rows aligned to 16 bytes", _last_column_entry),
    Row("quant_last_vector_nibbles", CAST, FAULT,
        "The last 8 bytes of an e2m1 row have their nibbles swapped. Shows for e2m1.",
        "section 3.1: even column in the low nibble", _nibbles_of_the_last_vector),
    Row("quant_negative_zero_dropped", CAST, FAULT,
        "Codes of -0 lose their sign. Shows for -0 and small negative values.",
        "section 3.1: negative zero keeps its sign bit", _negative_zero_dropped),
    Row("quant_floor_of_plain_for_e4m3_sf", CAST, FAULT,
        "With e4m3 scales the floor of amax is 1e-4. Shows with use_e4m3_sf and blocks under the documented floor.",
        "section 3.1: clamp by format",
        _anew(only=lambda args: bool(args.get("use_e4m3_sf")), floor=lambda call, args: 1e-4)),
    Row("quant_multiplier_by_reciprocal", CAST, FAULT,
        "Plain scales: data is multiplied by 1/sf, not by M/amax. Shows in a few codes near halfway points.",
        "section 3.1: not the reciprocal of sf", _anew(reciprocal=True)),
    Row("quant_exponent_by_log2", CAST, FAULT,
        "Rounded scales by ceil(log2 x) in FP32. Shows only where amax/M is a hair over a power of two that is at "
        "least 16 or at most 1/16.",
        "section 3.1: exact power stays", _anew(byte=_exponent_by_log2)),
    Row("quant_negative_ties_away_e2m1", CAST, FAULT,
        "Negative e2m1 values halfway between two codes go away from zero. Shows for e2m1 with such values.",
        "section 3.1: nearest even", _anew(only=lambda args: args["fmt"] == "e2m1", away=lambda v: v < 0)),
    Row("quant_ties_away_e4m3", CAST, FAULT,
        "e4m3 values halfway between two codes go away from zero. Shows for e4m3 with such values.",
        "section 3.1: nearest even", _anew(only=lambda args: args["fmt"] == "e4m3", away=lambda v: True)),
    Row("quant_given_row_unwritten", CAST, FAULT,
        "The last row of a preallocated result is not written. Shows with `out` and more than one row.",
        "section 7 report 29: tail dropped", _given_row_unwritten),
    Row("quant_last_word_from_the_top", CAST, FAULT,
        "A partial last word of packed scales is filled from its top byte. Shows where the group count is no multiple "
        "of 4.",
        "section 3.1: little endian", _last_word_from_the_top),
    Row("quant_input_scale_clamped", CAST, FAULT,
        "The last column block of an input with scales is scaled as the one before. Shows for requantisation with two "
        "column blocks.",
        "section 8: requantisation with unequal blocks", _input_scale_column_clamped),
    Row("quant_first_row_of_tile_by_row_above", CAST, FAULT,
        "The data of rows 32, 96, ... is scaled as the row above; the stored scale is right. Shows for plain scales "
        "and more than 32 rows.",
        "section 7 report 4", _scale_one_row_up),
    Row("quant_written_anew", CAST, VARIANT,
        "The documented rule, code by code.",
        "section 3.1", _anew(byte=exponent_up)),
    Row("quant_rows_reversed", CAST, VARIANT,
        "Rows from the last to the first.",
        "section 8: row permutation", _reversed),
    Row("quant_column_parts", CAST, VARIANT,
        "Columns up to 512 and behind them in two calls.",
        "section 3.1", _column_parts),
    Row("gate_ties_by_lane", GATE, FAULT,
        "Equal scores go to the lower lane of 32 instead of the lower expert. Shows for ties among more than 32 "
        "experts.",
        "section 3.4: smaller index first", _ranked(_by_lane)),
    Row("gate_plus_zero_first", GATE, FAULT,
        "Scores compare by bits, so +0 beats -0. Shows where both zeros stand in one row, -0 first.",
        "section 3.4: equal scores: smaller index first", _ranked(_by_bits)),
    Row("gate_tail_experts_unseen", GATE, FAULT,
        "Experts behind the last full vector of 4 come last. Shows where their number is no multiple of 4.",
        "section 8: E % 4 edge sizes", _ranked(_tail_unseen)),
    Row("gate_scores_in_bf16", GATE, FAULT,
        "Scores compare as bf16. Shows for scores that differ behind 8 bits.",
        "section 3.4: order of decreasing score", _ranked(lambda s: _order(s.bfloat16().double()))),
    Row("gate_never_negative", GATE, FAULT,
        "The running maximum starts at 0, so a slot that only negative scores could fill holds expert 0. Shows with "
        "fewer than num_topk scores >= 0.",
        "section 8: negative values reorder", _never_negative),
    Row("gate_last_odd_token", GATE, FAULT,
        "The last of an odd number of tokens repeats the one before. Shows for odd t > 1.",
        "section 7 report 29", _last_odd_token),
    Row("gate_one_round_short", GATE, FAULT,
        "With num_topk = E the last slot repeats the one before. Shows there only.",
        "section 8: K = E", _one_round_short),
    Row("gate_stable_sort", GATE, VARIANT,
        "A stable sort in float64.",
        "section 3.4", _ranked(lambda s: _order(s.double()))),
    Row("gate_token_by_token", GATE, VARIANT,
        "A call a token.",
        "section 8: row independence", _token_by_token),
    *tilekernels_rows.ROWS,
    *tilekernels_rotary.ROWS,
)
