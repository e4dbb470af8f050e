"""DeepEP: dispatch, combine and the ring's receive. Every rank makes the true call; the change comes behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adapters.cpu.apart.row import FAULT, VARIANT, Args, Call, Function, Row, bytes_of, copied

DISPATCH, COMBINE, RECEIVE = "deepep.EPBuffer.dispatch", "deepep.EPBuffer.combine", "deepep.PPBuffer.recv"


class Later:
    """The event of a deferred call, whose value is changed when it is first waited for."""

    def __init__(self, event: Any, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
        self._event, self._change = event, change

    def wait(self) -> Any:
        """The changed value at the first wait, what the true event gives later."""
        value = self._event.wait()
        return value if value is None else self._change(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)


def _behind(change: Callable[[Args, tuple[Any, ...]], tuple[Any, ...]]) -> Function:
    """change(args, results without the event), now or when a deferred call is waited for."""

    def function(call: Call, args: Args) -> Any:
        result = call(**args)
        if isinstance(result, tuple):
            return (*change(args, result[:-1]), result[-1])
        return Later(result, lambda value: change(args, value))

    return function


def _data(recv_x: Any) -> torch.Tensor:
    return recv_x[0] if isinstance(recv_x, tuple) else recv_x


def _real_rows(handle: Any) -> int:
    return int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])


def _foreign_weights_zeroed(args: Args, value: tuple[Any, ...]) -> tuple[Any, ...]:
    _, idx, weights, _ = value
    if idx is not None and weights is not None:
        weights[idx < 0] = 0
    return value


def _two_rows_exchanged(args: Args, value: tuple[Any, ...]) -> tuple[Any, ...]:
    x, idx, _, handle = value
    ends = handle.psum_num_recv_tokens_per_scaleup_rank.tolist()
    if idx is not None and ends[-1] - (ends[-2] if len(ends) > 1 else 0) > 1:
        rows = bytes_of(_data(x))[ends[-1] - 2 : ends[-1]]
        rows.copy_(rows.flip(0))
    return value


def _last_scales_repeat(args: Args, value: tuple[Any, ...]) -> tuple[Any, ...]:
    x, idx, _, handle = value
    rows = _real_rows(handle)
    if isinstance(x, tuple) and idx is not None and rows > 1:
        x[1][rows - 1].copy_(x[1][rows - 2])
    return value


def _nan_payload_lost(args: Args, value: tuple[Any, ...]) -> tuple[Any, ...]:
    x = _data(value[0])
    if x.dtype == torch.bfloat16:
        codes = x.view(torch.int16)
        codes.copy_(torch.where(x.isnan(), 0x7FC0, codes))
    return value


def _last_gap_row_kept(args: Args, value: tuple[Any, ...]) -> tuple[Any, ...]:
    """The last zero row in front of the next expert keeps something: the store loop ends one early."""
    x, _, _, handle = value
    step = args.get("expert_alignment") or handle.expert_alignment
    if args.get("do_zero_padding"):
        for end in handle.psum_num_recv_tokens_per_expert.tolist():
            if end % step:
                bytes_of(_data(x))[-(-end // step) * step - 1] = 0x3C
    return value


def _counts_not_aligned(args: Args, value: tuple[Any, ...]) -> tuple[Any, ...]:
    handle = value[-1]
    if handle.num_recv_tokens_per_expert_list:
        handle.num_recv_tokens_per_expert_list = handle.num_unaligned_recv_tokens_per_expert.tolist()
    return value


def _stats_aligned(args: Args, value: tuple[Any, ...]) -> tuple[Any, ...]:
    stats, handle = args.get("cumulative_local_expert_recv_stats"), value[-1]
    if stats is not None:
        raw, step = handle.num_unaligned_recv_tokens_per_expert.to(stats.dtype), handle.expert_alignment
        stats += (raw + step - 1) // step * step - raw
    return value


def _unused_rows_filled(args: Args, value: tuple[Any, ...]) -> tuple[Any, ...]:
    x, idx, weights, handle = value
    if idx is not None:
        rows = _real_rows(handle)
        bytes_of(_data(x))[rows:] = 0xFF
        idx[rows:] = -7
        if weights is not None:
            weights[rows:] = float("nan")
    return value


def _gaps_filled(args: Args, value: tuple[Any, ...]) -> tuple[Any, ...]:
    x, idx, weights, handle = value
    step = args.get("expert_alignment") or handle.expert_alignment
    if idx is None and not args.get("do_zero_padding"):
        for end in handle.psum_num_recv_tokens_per_expert.tolist():
            gap = slice(end, -(-end // step) * step)
            bytes_of(_data(x))[gap] = 0xFF
            if weights is not None:
                weights[gap] = float("nan")
    return value


# ---- combine ------------------------------------------------------------------------------------------------------


def _unrouted(args: Args) -> torch.Tensor:
    """bool [T]: tokens that no expert got."""
    return (args["handle"].topk_idx < 0).all(1)


def _unrouted_without_bias(args: Args, value: tuple[Any, ...]) -> tuple[Any, ...]:
    value[0][_unrouted(args)] = 0
    return value


def _masked_weights_left(args: Args, value: tuple[Any, ...]) -> tuple[Any, ...]:
    x, weights = value
    if weights is not None and weights.shape[1] > 1:
        # The lane keeps what its neighbour left in the register.
        weights.copy_(torch.where(args["handle"].topk_idx < 0, weights.roll(1, 1), weights))
    return x, weights


def _bias_behind_the_rounding(call: Call, args: Args) -> Any:
    bias = args.get("bias")
    if not isinstance(bias, torch.Tensor):
        return call(**args)

    def change(rest: Args, value: tuple[Any, ...]) -> tuple[Any, ...]:
        value[0].add_(bias)
        return value

    return _behind(change)(call, {**args, "bias": None})


def _second_bias_lost(call: Call, args: Args) -> Any:
    bias = args.get("bias")
    return call(**({**args, "bias": bias[0]} if isinstance(bias, tuple) and len(bias) == 2 else args))


def _last_columns_of_the_row_before(args: Args, value: tuple[Any, ...]) -> tuple[Any, ...]:
    x = value[0]
    if x.shape[1] > 512 and len(x) > 1:
        x[-1, x.shape[1] // 512 * 512 :] = x[-2, x.shape[1] // 512 * 512 :]
    return value


def _on_a_copy(call: Call, args: Args) -> Any:
    return call(**{**args, "x": copied(args["x"])})


def _biases_exchanged(call: Call, args: Args) -> Any:
    bias = args.get("bias")
    return call(**({**args, "bias": (bias[1], bias[0])} if isinstance(bias, tuple) and len(bias) == 2 else args))


# ---- the ring -----------------------------------------------------------------------------------------------------


def _last_vector_unwritten(call: Call, args: Args) -> Any:
    flat = args["x"].view(-1).view(torch.uint8)
    tail = flat[-32:] if flat.numel() % 64 and flat.numel() > 64 else flat[:0]
    held = tail.clone()
    result = call(**args)
    tail.copy_(held)
    return result


ROWS = (
    Row("dispatch_foreign_weights_zeroed", DISPATCH, FAULT,
        "Weights of lanes that belong to other ranks arrive as 0. Shows in the normal layout with weights and more "
        "than one rank, or masked ids.",
        "section 2.4: foreign lanes not masked", _behind(_foreign_weights_zeroed)),
    Row("dispatch_two_rows_exchanged", DISPATCH, FAULT,
        "The data of the last two rows change places, their ids and weights do not. Shows in the normal layout where "
        "the last source sends two.",
        "section 6 report 22: rows out of step", _behind(_two_rows_exchanged)),
    Row("dispatch_last_scales_repeat", DISPATCH, FAULT,
        "The last row's scale factors repeat the row before. Shows in the normal layout for FP8 with two rows.",
        "section 6 report 28: scales", _behind(_last_scales_repeat)),
    Row("dispatch_nan_payload_lost", DISPATCH, FAULT,
        "NaN of a bf16 row arrives as the quiet NaN. Shows for other NaN patterns.",
        "section 3.1: NaN payloads must survive", _behind(_nan_payload_lost)),
    Row("dispatch_last_gap_row_kept", DISPATCH, FAULT,
        "Zero padding leaves out the last row in front of the next expert. Shows with do_zero_padding and an expert "
        "that does not fill its alignment.",
        "section 2.4: zero padding", _behind(_last_gap_row_kept)),
    Row("dispatch_counts_not_aligned", DISPATCH, FAULT,
        "The list of counts is not rounded up. Shows for expert_alignment > 1 with CPU sync.",
        "section 6 report 27: aligned and unaligned", _behind(_counts_not_aligned)),
    Row("dispatch_stats_aligned", DISPATCH, FAULT,
        "Statistics grow by aligned counts. Shows for expert_alignment > 1 with statistics.",
        "section 3.1: stats += n_e", _behind(_stats_aligned)),
    Row("dispatch_unused_rows_filled", DISPATCH, VARIANT,
        "Rows behind the received ones hold NaN and -7.",
        "section 2.4: rows >= N undefined", _behind(_unused_rows_filled)),
    Row("dispatch_gaps_filled", DISPATCH, VARIANT,
        "Gaps between experts hold NaN where no zero padding is asked for.",
        "section 2.4: gaps undefined unless zero-padded", _behind(_gaps_filled)),
    Row("combine_unrouted_without_bias", COMBINE, FAULT,
        "Tokens without an expert give 0. Shows with a bias and a token whose ids are all negative.",
        "section 2.4: rows with no expert give bias", _behind(_unrouted_without_bias)),
    Row("combine_masked_weights_left", COMBINE, FAULT,
        "Lanes of negative ids carry the neighbour's weight home. Shows with weights, masked ids and K > 1.",
        "section 6 report 2: weight 0 back", _behind(_masked_weights_left)),
    Row("combine_bias_behind_the_rounding", COMBINE, FAULT,
        "The sum is rounded, then the bias is added and rounded again. Shows with one bias where more than one row is "
        "added for a token, most where they cancel.",
        "section 3.3: bias first, round once", _bias_behind_the_rounding),
    Row("combine_second_bias_lost", COMBINE, FAULT,
        "Of two biases the first counts. Shows with a pair.",
        "section 2.4: 2-tuple", _second_bias_lost),
    Row("combine_last_columns_of_the_row_before", COMBINE, FAULT,
        "The columns behind a multiple of 512 of the last token are those of the token before. Shows for widths over "
        "512 that are no multiple, T > 1.",
        "section 6 report 13: stale rows", _behind(_last_columns_of_the_row_before)),
    Row("combine_on_a_copy", COMBINE, VARIANT,
        "On a copy of x.",
        "section 2.4", _on_a_copy),
    Row("combine_biases_exchanged", COMBINE, VARIANT,
        "The two biases in the other order.",
        "section 3.3: fp32 sum", _biases_exchanged),
    Row("ring_last_vector_unwritten", RECEIVE, FAULT,
        "The last 32 bytes of an odd number of them are not written. Shows for more than 64 bytes.",
        "section 2.6: multiples of 32 bytes", _last_vector_unwritten),
)
