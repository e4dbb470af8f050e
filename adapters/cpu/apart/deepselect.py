"""DeepSelect: faults and correct variants, from its documented semantics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from adapters.cpu.apart.row import FAULT, VARIANT, Args, Call, Function, Row, before, bytes_of, copied, once_accepted

TOPK, STRIDE = "deepselect.topk", "deepselect.get_stride_requirement"
SENTINEL = 0x3F3F3F3F
BLOCK, CAPACITY = 4096, 2048
"""elements of a block of the scan, and of what one block may add to the candidate list"""
VECTOR_BYTES = 16
_ENDS: dict[Any, torch.Tensor] = {}


def _ends(args: Args) -> list[int]:
    x, end = args["input"], args.get("end")
    return [x.shape[1]] * len(x) if end is None else end.tolist()


def _long(args: Args) -> Iterator[tuple[int, int]]:
    """(row, end) of the rows that have more elements than topk, and no NaN among them."""
    for row, end in enumerate(_ends(args)):
        if end > args["topk"] and not bool(args["input"][row, :end].isnan().any()):
            yield row, end


def _offset(args: Args, row: int) -> int:
    offset = args.get("output_idx_offset")
    return 0 if offset is None else int(offset[row])


def _put(args: Args, result: Any, row: int, position: torch.Tensor, at: int = 0) -> None:
    """Write these positions of a row, and their values, from column `at` on."""
    values, indices = result
    stop = at + len(position)
    indices[row, at:stop] = (position + _offset(args, row)).to(indices.dtype)
    if values is not None:
        values[row, at:stop] = args["input"][row][position]


def _choose(args: Args, result: Any, row: int, position: torch.Tensor) -> None:
    """`_put` in the order that the call asks for."""
    x = args["input"][row]
    if args.get("sorted"):
        position = position[torch.argsort(x[position].double(), descending=True, stable=True)]
    if args.get("sorted_index"):
        position = position.sort().values
    _put(args, result, row, position)


def _by(key: Callable[[torch.Tensor], torch.Tensor], *, last_first: bool = False) -> Function:
    """Long rows chosen by decreasing key; equal keys by increasing position, or by decreasing one."""

    def function(call: Call, args: Args) -> Any:
        result = call(**args)
        for row, end in _long(args):
            keys = key(args["input"][row, :end])
            if last_first:
                position = end - 1 - torch.argsort(keys.flip(0), descending=True, stable=True)
            else:
                position = torch.argsort(keys, descending=True, stable=True)
            _choose(args, result, row, position[: args["topk"]])
        return result

    return function


def _raw(x: torch.Tensor) -> torch.Tensor:
    """The bits of bf16 or fp32 as signed integers."""
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32).long()


def _total_order(x: torch.Tensor) -> torch.Tensor:
    """Integers that order as the values do, with -0 next under +0."""
    bits, sign = _raw(x), 1 << (8 * x.element_size() - 1)
    return torch.where(bits < 0, -1 - (bits + sign), bits)


def _flushed(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < torch.finfo(x.dtype).tiny, torch.zeros_like(x), x).double()


def _masked(where: Callable[[Args, int, int], slice]) -> Function:
    """Some elements of the long rows are never looked at."""

    def function(call: Call, args: Args) -> Any:
        x = copied(args["input"])
        for row, end in _long(args):
            x[row, where(args, row, end)] = float("-inf")
        return call(**{**args, "input": x})

    return function


def _tail(args: Args, row: int, end: int) -> slice:
    width = args["input"].shape[1]
    per_vector = VECTOR_BYTES // args["input"].element_size()
    return slice(width - width % per_vector if end == width else width, width)


def _first(args: Args, row: int, end: int) -> slice:
    return slice(0, 0 if args.get("return_value", True) else 1)


def _end_inclusive(call: Call, args: Args) -> Any:
    end = args.get("end")
    if end is None:
        return call(**args)
    grows = (end > args["topk"]) & (end < args["input"].shape[1])
    return call(**{**args, "end": end + grows.int()})


def _tie_taken_twice(call: Call, args: Args) -> Any:
    result = call(**args)
    for row, end in _long(args):
        x = args["input"][row, :end]
        real = result[1][row].long() - _offset(args, row)
        lowest = x[real].min()
        tied = (x[real] == lowest).nonzero()[:, 0]
        if 2 <= len(tied) < int((x == lowest).sum()):
            result[1][row, tied[-1]] = result[1][row, tied[-2]].clone()
            if result[0] is not None:
                result[0][row, tied[-1]] = result[0][row, tied[-2]].clone()
    return result


def _block_overflow(call: Call, args: Args) -> Any:
    result = call(**args)
    for row, end in _long(args):
        x, k = args["input"][row, :end].double(), args["topk"]
        kept = torch.arange(min(BLOCK, end))
        for start in range(BLOCK, end + BLOCK, BLOCK):
            kept = kept[torch.argsort(x[kept], descending=True, stable=True)[:k]]
            block = x[start : start + BLOCK]
            fresh = torch.arange(len(block)) if len(kept) < k else (block > x[kept[-1]]).nonzero()[:CAPACITY, 0]
            kept = torch.cat([kept, fresh + start])
        if end > BLOCK:
            _choose(args, result, row, kept)
    return result


def _offset_32_bit(call: Call, args: Args) -> Any:
    result = call(**args)
    if args.get("output_idx_offset") is not None and result[1].dtype == torch.int64:
        for row, end in enumerate(_ends(args)):
            real = result[1][row, : min(end, args["topk"])]
            real.copy_(real.int().long())
    return result


def _offset_on_empty_row(call: Call, args: Args) -> Any:
    result = call(**args)
    for row, end in enumerate(_ends(args)):
        if end == 0:
            result[1][row] += _offset(args, row)
    return result


def _fill_truncated(call: Call, args: Args) -> Any:
    if args["input"].dtype != torch.bfloat16:
        return call(**args)
    fill = torch.tensor(args.get("value_oob_fill_value", float("-inf")), dtype=torch.float64).float()
    cut = (fill.view(torch.int32) & -65536).view(torch.float32)
    return call(**{**args, "value_oob_fill_value": float(cut)})


def _fill_one_late(call: Call, args: Args) -> Any:
    result = call(**args)
    for row, end in enumerate(_ends(args)):
        if end == args["topk"] - 1 and end < args["input"].shape[1]:
            _put(args, result, row, torch.tensor([end]), at=end)
    return result


def _short_row_unsorted(call: Call, args: Args) -> Any:
    result = call(**args)
    if args.get("sorted"):
        for row, end in enumerate(_ends(args)):
            if end <= args["topk"]:
                _put(args, result, row, torch.arange(end))
    return result


def _index_chunks_unmerged(call: Call, args: Args) -> Any:
    result = call(**args)
    if args.get("sorted_index") and args["topk"] > 1024:
        for row, _ in _long(args):
            position = result[1][row].long() - _offset(args, row)
            _put(args, result, row, position.roll(-1024))
    return result


def _odd_row_takes_length(call: Call, args: Args) -> Any:
    end = args.get("end")
    if end is None or len(end) % 2 == 0 or len(end) < 3:
        return call(**args)
    end = end.clone()
    end[-1] = end[-2]
    return call(**{**args, "end": end})


def _ends_of_the_call_before(call: Call, args: Args) -> Any:
    end = args.get("end")
    earlier = None if end is None else before(_ENDS, (len(end), args["topk"]), end)
    return call(**(args if earlier is None else {**args, "end": earlier.clamp(max=args["input"].shape[1])}))


def _own_buffer_dense(call: Call, args: Args) -> Any:
    out = args.get("output_idx")
    if out is None:
        return call(**args)
    values, indices = call(**{**args, "output_idx": None})
    out.as_strided(out.shape, indices.stride()).copy_(indices)
    return values, out


def _negative_nan_lowest(call: Call, args: Args) -> Any:
    x = copied(args["input"])
    x[x.isnan() & x.signbit()] = float("-inf")
    return call(**{**args, "input": x})


def _sentinel_shifted(call: Call, args: Args) -> Any:
    result = call(**args)
    for row, end in enumerate(_ends(args)):
        if end > args["topk"] and bool(args["input"][row, :end].isnan().any()):
            result[1][row, 0] += _offset(args, row)
    return result


def _requirement_in_elements(call: Call, args: Args) -> Any:
    return tuple(n // torch.bfloat16.itemsize for n in call(**args))


def _row_by_row(call: Call, args: Args) -> Any:
    result = call(**args)
    for row in range(len(args["input"])):
        one = {n: args[n][row : row + 1] for n in ("input", "end", "output_idx_offset") if args.get(n) is not None}
        values, indices = call(**{**args, **one, "output_idx": None})
        result[1][row].copy_(indices[0])
        if values is not None:
            result[0][row].copy_(values[0])
    return result


def _free_order_reversed(call: Call, args: Args) -> Any:
    result = call(**args)
    if not args.get("sorted") and not args.get("sorted_index"):
        for row, _ in _long(args):
            _put(args, result, row, (result[1][row].long() - _offset(args, row)).flip(0))
    return result


def _slack_written(call: Call, args: Args) -> Any:
    result = call(**args)
    for out in result if args.get("output_idx") is None else result[:1]:
        if out is not None and out.stride(0) > out.shape[1]:
            slack = out.stride(0) - out.shape[1]
            out.as_strided((len(out), slack), out.stride(), out.storage_offset() + out.shape[1]).fill_(7)
    return result


def _slack_of_input_cleared(call: Call, args: Args) -> Any:
    x = args["input"]
    wide = torch.zeros(len(x), max(x.stride(0), x.shape[1]), dtype=x.dtype)
    bytes_of(wide)[:, : x.shape[1] * x.element_size()] = bytes_of(x.contiguous())
    return call(**{**args, "input": wide[:, : x.shape[1]]})


ROWS = (
    Row("select_tail_vector_unread", TOPK, FAULT,
        "The columns behind the last full 16-byte vector of a row are never read. Shows where vocab is no multiple of "
        "8 (bf16) or 4 (fp32) and a chosen value stands there.",
        "section 6 report 5: what stands behind the last aligned vector", _masked(_tail)),
    Row("select_position_zero_is_false", TOPK, FAULT,
        "Indices-only kernels take position 0 for 'none' and drop it. Shows with return_value=False where the row's "
        "first element is among the largest.",
        "section 7: both forms of return_value must be acceptable; maxima in the first element", _masked(_first)),
    Row("select_end_inclusive", TOPK, FAULT,
        "The right bound of a long row counts as inside. Shows with `end` between topk and vocab where the element at "
        "`end` is large.",
        "section 7: poison beyond end", _end_inclusive),
    Row("select_negative_keys_by_raw_bits", TOPK, FAULT,
        "Raw bits are compared as signed integers, so negative values order backwards. Shows where the k-th value is "
        "negative.",
        "section 6 report 12: key mapping", _by(_raw)),
    Row("select_tie_taken_twice", TOPK, FAULT,
        "Of values equal to the last chosen one, one position is given twice. Shows where at least two of them are "
        "chosen and one more is left out.",
        "section 6 report 17: race of counting and compaction; section 7: uniqueness above all", _tie_taken_twice),
    Row("select_block_overflow", TOPK, FAULT,
        "A block of 4096 adds at most 2048 candidates; the rest of it is lost. Shows where more of one block beat the "
        "threshold: ascending rows longer than 4096.",
        "section 3: rows in which every block refills the list", _block_overflow),
    Row("select_subnormals_flushed", TOPK, FAULT,
        "Subnormal values compare as zeros. Shows where the k-th value is subnormal or zero.",
        "section 6 report 11: a build that flushes", _by(_flushed)),
    Row("select_offset_sum_32_bit", TOPK, FAULT,
        "Position and offset are added in 32 bits, then widened. Shows for int64 indices where the sum leaves int32.",
        "section 2.2: int64 results carry the exact sum", _offset_32_bit),
    Row("select_offset_on_empty_row", TOPK, FAULT,
        "The offset is added to the fill of rows with end 0. Shows with an offset and an empty row.",
        "section 2.2: the offset is not added to fill", _offset_on_empty_row),
    Row("select_fill_value_cut", TOPK, FAULT,
        "The fill value is cut to bf16, not rounded. Shows for bf16 short rows and a fill such as 0.1 or 1e39.",
        "section 7: 1e39 is inf in bf16, 0.1 rounds to nearest", _fill_truncated),
    Row("select_fill_one_late", TOPK, FAULT,
        "The fill of a row with topk - 1 elements is left out; its place holds the element at `end`. Shows for end = "
        "topk - 1 below vocab only.",
        "section 7: end at topk - 1", _fill_one_late),
    Row("select_short_row_unsorted", TOPK, FAULT,
        "Rows no longer than topk skip the sort by value. Shows with sorted and end <= topk.",
        "section 2.3: with sorted, values of short rows descend", _short_row_unsorted),
    Row("select_index_chunks_unmerged", TOPK, FAULT,
        "Indices are sorted in chunks of 1024 that stand in the wrong order. Shows with sorted_index and topk over "
        "1024.",
        "section 3: k tiers at 1024 and 4096", _index_chunks_unmerged),
    Row("select_odd_row_takes_length", TOPK, FAULT,
        "Blocks work on two rows; the last of an odd batch takes the length of the row before. Shows with `end` and an "
        "odd batch of 3 or more.",
        "section 6 report 19: what belongs to one row is shared by two", _odd_row_takes_length),
    Row("select_ends_of_the_call_before", TOPK, FAULT,
        "The lengths of the call before are used again. Shows from the second call of one batch size and topk on, "
        "where lengths differ.",
        "section 7: replay with changed input and end", _ends_of_the_call_before),
    Row("select_own_buffer_dense", TOPK, FAULT,
        "The row stride of the caller's output is ignored: rows stand at the least stride. Shows with output_idx of a "
        "larger row stride and more than one row.",
        "section 6 report 18: honour strides", _own_buffer_dense, "layout"),
    Row("select_negative_nan_lowest", TOPK, FAULT,
        "A NaN with its sign bit set ranks as -inf and is not reported. Shows in a long row whose NaNs are all "
        "negative.",
        "section 6 report 12: both signs are NaN", _negative_nan_lowest),
    Row("select_sentinel_shifted", TOPK, FAULT,
        "The offset is added to the NaN sentinel. Shows with an offset and a NaN in a long row.",
        "section 2.2: not to the NaN sentinel", _sentinel_shifted),
    Row("select_requirement_in_elements", STRIDE, FAULT,
        "The stride requirement is given in bf16 elements. Shows always.",
        "section 2.1: bytes", _requirement_in_elements),
    Row("select_by_stable_sort", TOPK, VARIANT,
        "A stable sort in float64: of equal values the lowest positions.",
        "section 3: any subset of the equal ones", _by(lambda x: x.double())),
    Row("select_ties_from_the_right", TOPK, VARIANT,
        "Of equal values the highest positions.",
        "section 3: any subset of the equal ones", _by(lambda x: x.double(), last_first=True)),
    Row("select_plus_zero_first", TOPK, VARIANT,
        "Chosen by bit key, so +0 is taken before -0.",
        "section 3: sorts by bit key, -0 equals +0", _by(_total_order)),
    Row("select_row_by_row", TOPK, VARIANT,
        "A call a row, results copied.",
        "section 7: a row alone", _row_by_row),
    Row("select_free_order_reversed", TOPK, VARIANT,
        "Long rows stand in the opposite order where no order is asked for.",
        "section 2.3: order arbitrary", _free_order_reversed),
    Row("select_slack_written", TOPK, VARIANT,
        "The slack columns of callee-allocated results are written.",
        "section 2.3: slack belongs to the allocation and may be overwritten", _slack_written),
    Row("select_from_a_cleared_copy", TOPK, VARIANT,
        "The input is copied first, its slack columns zero.",
        "section 7: what stands in slack does not matter", once_accepted(_slack_of_input_cleared)),
)
