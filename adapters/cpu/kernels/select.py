"""Blocked top-k over rows: a scan with a candidate list that is cut back block by block."""

from __future__ import annotations

from typing import NamedTuple

import torch

from adapters.cpu.kernels.block_walk import Block, walk
from adapters.cpu.kernels.knobs import Knobs

KERNELS = {
    "select_rows": (
        "tile_n", "split_k", "k_order", "tie_rule", "row_order", "flush_subnormals", "drop_tile", "double_tile",
        "stale_tile", "drop_tail", "mask_shift", "nan_to", "fault",
    ),
}
"""Kernel to the knobs it obeys."""

FAULTS = {
    "raw_keys": "negative numbers are compared by their raw bits, so -1 beats -0.5 and -inf beats both",
    "minus_zero_lowest": "-0 gets the smallest key and ranks below -inf",
    "nan_sign": "NaN with the sign bit is not recognised as NaN",
    "nan_beyond_end": "the NaN check looks at the whole row, also behind its end",
    "kth_off_by_one": "the n-th candidate is replaced by the next one, where there is a next one",
    "ties_lost": "only values strictly above the n-th value are kept, the rest of the row is fill",
    "shared_scratch": "all rows use one candidate list, so each gets the positions of the last row",
    "ignore_order": "sorted and sorted_index are ignored: indices descend",
    "sorted_ascending": "sorted values come in ascending order",
}
"""Faults that only this kernel knows (`Knobs.fault`)."""

BLOCK_PER_TILE = 32
"""elements of a scan block for each unit of tile_n: 2048 with the default"""

_POSITION_BITS = 32
_LOW = 2**_POSITION_BITS - 1
_MASKED = -(2**63)
"""composite key of a position that may not be chosen"""

_BITS = {  # dtype -> (integer view, magnitude mask, bits of +inf, bits of the smallest normal number)
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80, 0x0080),
    torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000, 0x00800000),
}


class Selection(NamedTuple):
    """position: int64 [b, k], -1 where nothing was chosen. nan: bool [b], rows longer than k that hold a NaN."""

    position: torch.Tensor
    nan: torch.Tensor


def select_rows(x: torch.Tensor, k: int, end: torch.Tensor, order: str, knobs: Knobs) -> Selection:
    """The k largest of the first end[i] elements of each row.

    x: bf16 or fp32 [b, n]; end: int64 [b], 0..n. order: "value" (descending), "index"
    (ascending) or "any" (`knobs.row_order`; rows with end <= k always ascend).
    -0 equals +0, subnormals count, ties go by `knobs.tie_rule`.
    """
    rows, n = x.shape
    bound = (end + knobs.mask_shift).clamp(0, n).unsqueeze(1)
    keep = k + 1 if knobs.fault == "kth_off_by_one" else k
    nan = torch.zeros(rows, dtype=torch.bool)
    lists = []
    for split in walk(n, knobs.tile_n * BLOCK_PER_TILE, knobs):
        kept = None
        for block in split:
            keys, has_nan = _block_keys(x, block, bound, knobs)
            nan |= has_nan
            kept = _cut(keys if kept is None else torch.cat((kept, keys), 1), keep)
        lists.append(kept)
    if not lists:
        return Selection(torch.full((rows, k), -1), nan)
    best = lists[0] if len(lists) == 1 else _cut(torch.cat(lists, 1), keep)
    best = best.sort(1, descending=True).values
    best = _spoil(best, k, knobs)
    if best.shape[1] < k:
        best = torch.nn.functional.pad(best, (0, k - best.shape[1]), value=_MASKED)
    return Selection(_ordered(best, bound, k, order, knobs), nan & (bound.squeeze(1) > k))


def _cut(keys: torch.Tensor, k: int) -> torch.Tensor:
    return keys if keys.shape[1] <= k else keys.topk(k, 1, sorted=False).values


def _block_keys(x: torch.Tensor, block: Block, bound: torch.Tensor, knobs: Knobs) -> tuple[torch.Tensor, torch.Tensor]:
    """Composite keys int64 [b, width] (value above, position below, all distinct), and which rows hold a NaN."""
    view, mask, inf, normal = _BITS[x.dtype]
    part = x[:, block.source : block.source + block.width]
    if knobs.nan_to is not None:
        part = torch.where(part.isnan(), knobs.nan_to, part)
    bits = part.view(view)
    magnitude = bits & mask
    position = torch.arange(block.start, block.start + block.width)
    outside = position >= bound
    is_nan = magnitude > inf
    if knobs.fault == "nan_sign":
        is_nan &= bits >= 0
    if knobs.fault != "nan_beyond_end":
        is_nan = is_nan.masked_fill(outside, False)
    if knobs.flush_subnormals:
        magnitude = magnitude.masked_fill(magnitude < normal, 0)
    keys = torch.where(bits < 0, -magnitude, magnitude).long()
    if knobs.fault == "raw_keys":
        keys = bits.long()
    elif knobs.fault == "minus_zero_lowest":
        keys = keys.masked_fill((bits < 0) & (magnitude == 0), -mask - 1)
    tie = position if knobs.tie_rule == "high_index" else _LOW - position
    return ((keys << _POSITION_BITS) | tie).masked_fill_(outside, _MASKED), is_nan.any(1)


def _spoil(best: torch.Tensor, k: int, knobs: Knobs) -> torch.Tensor:
    """Faults of the candidate list; `best` is sorted, descending."""
    if knobs.fault == "kth_off_by_one" and best.shape[1] > k:
        spare = best[:, k:]
        return torch.cat((best[:, : k - 1], torch.where(spare == _MASKED, best[:, k - 1 : k], spare)), 1)
    if knobs.fault == "ties_lost":
        above = (best >> _POSITION_BITS) > (best[:, -1:] >> _POSITION_BITS)
        return best.masked_fill(~above, _MASKED)
    if knobs.fault == "shared_scratch":
        return best[-1:].expand_as(best)
    return best


def _ordered(best: torch.Tensor, bound: torch.Tensor, k: int, order: str, knobs: Knobs) -> torch.Tensor:
    """Positions of sorted composite keys in the order asked for; -1 stands last."""
    low = best & _LOW
    position = low if knobs.tie_rule == "high_index" else _LOW - low
    masked = best == _MASKED
    descending = position.masked_fill(masked, -1)
    if order == "value" and knobs.fault == "sorted_ascending":
        count = (k - masked.sum(1, keepdim=True)).clamp(min=1)
        rank = torch.arange(k).expand_as(best)
        return descending.gather(1, torch.where(masked, rank, count - 1 - rank))
    if order == "value" and knobs.fault != "ignore_order":
        return descending
    ascending = position.masked_fill(masked, _LOW).sort(1).values
    ascending = ascending.masked_fill(ascending == _LOW, -1)
    if knobs.fault == "ignore_order":
        return torch.where(bound <= k, ascending, descending.sort(1, descending=True).values)
    if order == "index" or knobs.row_order == "index":
        return ascending
    free = descending if knobs.row_order == "value" else descending.sort(1, descending=True).values
    return torch.where(bound <= k, ascending, free)
