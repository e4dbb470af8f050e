"""Expert-parallel combine: rows go home to the token's rank and are summed there.

The sum is unweighted, in FP32, in lane order after the bias, and is rounded to
BF16 once at the end. Where the owner of several of a token's experts adds them
up first, `partial` says in which format that sum travels.

Knobs that this kernel reads: tile_m (tokens or rows at a time), k_order (order of
the lanes), partial (fp32, or bf16 as the published staged recipe has it), and the
faults accumulator, output_rounding, flush_subnormals, nan_to, `fault`, one of FAULTS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from adapters.cpu.kernels.ep_dispatch import Placement
from adapters.cpu.kernels.exchange import Record
from adapters.cpu.kernels.knobs import Knobs

FAULTS = {
    "home_rank_shift": "rows go home to the rank behind the one that sent the token",
    "weighted_combine": "rows are multiplied by the router weight",
    "bias_ignored": "no bias is added",
    "second_bias_ignored": "of two biases only the first is added",
    "bias_after_rounding": "the sum is rounded before the bias is added, and again after it",
    "last_lane_lost": "the last top-k lane is left out of the sum",
    "own_lanes_only": "only weights of lanes that the token's own rank owns come home",
    "masked_slot_wraps": "a lane without a slot reads the last expanded row",
}

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Items:
    """Rows on their way home. home: [n] rank; token, lane: [n]; data: [n, H]; weights: fp32 [n, K] or [n, 0]."""

    home: torch.Tensor
    token: torch.Tensor
    lane: torch.Tensor
    data: torch.Tensor
    weights: torch.Tensor


def rounded(x: torch.Tensor, fmt: str, *, toward_zero: bool = False) -> torch.Tensor:
    """fp32 values rounded to a format, in that format. Toward zero: bf16 only."""
    if toward_zero:
        cut = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
        x = torch.where(x.isfinite(), cut, x)
    return x.to(_FORMATS[fmt])


def accumulate(lanes: torch.Tensor, start: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    """fp32 [n, H]: start + the lanes of fp32 [n, K, H].

    An absent lane is -0.0, the one value that changes no sum, not even in sign.
    """
    def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a + b).to(_FORMATS[knobs.accumulator]).float()

    terms = list(lanes.unbind(1))
    if knobs.k_order == "pairwise":
        while len(terms) > 1:
            terms = [add(*terms[i:i + 2]) if i + 1 < len(terms) else terms[i] for i in range(0, len(terms), 2)]
    elif knobs.k_order == "reverse":
        terms.reverse()
    for term in terms:
        start = add(start, term)
    return start


def merge(lanes: torch.Tensor, present: torch.Tensor, group: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    """Lanes of one group summed into the group's last lane, the others made absent.

    lanes: fp32 [n, K, H]; present: bool [n, K]; group: [n, K], any integers.
    A sum is rounded to `knobs.partial`; a lone BF16 row passes as it is.
    """
    merged = torch.full_like(lanes, -0.0)
    for k in range(lanes.shape[1]):
        peers = (group == group[:, k:k + 1]) & present
        last = present[:, k] & ~peers[:, k + 1:].any(1)
        total = accumulate(torch.where(peers[:, :, None], lanes, -0.0), torch.full_like(lanes[:, k], -0.0), knobs)
        merged[:, k] = torch.where(last[:, None], rounded(total, knobs.partial).float(), -0.0)
    return merged


def items_to_send(
    place: Placement, x: torch.Tensor, weights: torch.Tensor | None, size: int, max_tokens: int,
    *, expanded: bool, multiple_reduction: bool, knobs: Knobs,
) -> Items:
    """What this rank returns: a row a token, or, expanded without multiple reduction, a row a lane.

    x: bf16, rows as dispatch laid them. weights: fp32 [N.., K] (normal), [rows] (expanded) or None.
    """
    owned = place.local_ids >= 0
    num_rows, num_topk = owned.shape
    lane = (num_topk - 1 - owned.flip(1).int().argmax(1)) if num_rows else torch.empty(0, dtype=torch.int64)
    scaled = knobs.fault == "weighted_combine" and weights is not None
    back = torch.empty((num_rows, 0)) if weights is None else torch.zeros((num_rows, num_topk))
    origin = torch.arange(num_rows)
    if not expanded:
        data = x[:num_rows]
        if weights is not None:
            back = weights[:num_rows]
            if scaled:
                data = (data.float() * back[origin, lane][:, None]).bfloat16()
    else:
        slots = place.slots
        if knobs.fault == "masked_slot_wraps" and len(x):
            slots = torch.where(slots < 0, len(x) - 1, slots)
        present = slots >= 0
        if weights is not None:
            # As integers: an assignment under a mask turns a single NaN into another one.
            bits = back.view(torch.int32)
            bits[owned] = weights.view(torch.int32)[place.slots[owned]]
        if scaled:
            x = (x.float() * weights[:, None]).bfloat16()
        if multiple_reduction:
            data = _owner_sums(x, slots, present, knobs)
        else:
            origin, lane = present.nonzero().unbind(1)
            data, back = x[slots[origin, lane]], back[origin]
    source = place.source[origin]
    home = torch.div(source, max_tokens, rounding_mode="floor")
    if knobs.fault == "home_rank_shift":
        home = (home + 1) % size
    return Items(home, source % max_tokens, lane, data, back)


def _owner_sums(x: torch.Tensor, slots: torch.Tensor, present: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    out = torch.empty((len(slots), x.shape[1]), dtype=_FORMATS[knobs.partial])
    for first in range(0, len(slots), knobs.tile_m):
        tile = slice(first, first + knobs.tile_m)
        lanes = torch.where(present[tile][:, :, None], x[slots[tile].clamp(min=0)].float(), -0.0)
        out[tile] = rounded(accumulate(lanes, torch.full_like(lanes[:, 0], -0.0), knobs), knobs.partial)
    return out


def record(hidden: int, num_topk: int, *, has_weights: bool, fmt: str) -> Record:
    itemsize = _FORMATS[fmt].itemsize
    return Record({"data": hidden * itemsize, "weights": 4 * num_topk * has_weights, "token": 8, "lane": 8})


def pack(items: Items, rec: Record, size: int) -> list[torch.Tensor]:
    """For every home rank the rows to send, uint8 [rows, width]."""
    at = [(items.home == rank).nonzero()[:, 0] for rank in range(size)]
    return [
        rec.pack({"data": items.data[i], "weights": items.weights[i], "token": items.token[i], "lane": items.lane[i]})
        for i in at
    ]


def reduce_home(
    arrived: torch.Tensor, per_owner: list[int], rec: Record, fmt: str, owner: torch.Tensor,
    domain: torch.Tensor | None, biases: list[torch.Tensor], hidden: int, rank: int, knobs: Knobs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(combined bf16 [T, H], combined weights fp32 [T, K] or None) of this rank's tokens.

    arrived: uint8 [n, width], owner rank by owner rank, `per_owner` rows each.
    owner: [T, K] rank of each lane's expert, -1 where masked. domain: [T, K] to sum by first, or None.
    """
    num_tokens, num_topk = owner.shape
    token = rec.unpack(arrived, "token", torch.int64)[:, 0]
    lane = rec.unpack(arrived, "lane", torch.int64)[:, 0]
    data = rec.unpack(arrived, "data", _FORMATS[fmt])
    keep = token < num_tokens  # a row sent home to the wrong rank may name a token that this rank lacks
    position = torch.full((num_tokens, num_topk), -1)
    position[token[keep], lane[keep]] = torch.arange(len(token))[keep]
    if knobs.fault == "last_lane_lost":
        position[:, -1] = -1
    if knobs.fault == "bias_ignored":
        biases = []
    elif knobs.fault == "second_bias_ignored":
        biases = biases[:1]

    out = torch.empty((num_tokens, hidden), dtype=torch.bfloat16)
    for first in range(0, num_tokens, knobs.tile_m):
        tile = slice(first, first + knobs.tile_m)
        at = position[tile]
        present = at >= 0
        lanes = torch.full((*at.shape, hidden), -0.0)
        lanes[present] = data[at[present]].float()
        if domain is not None:
            lanes = merge(lanes, present, domain[tile], knobs)
        out[tile] = _finish(lanes, [b[tile].float() for b in biases], knobs)
    return out, _weights_home(rec, arrived, per_owner, token, owner, rank, knobs)


def _finish(lanes: torch.Tensor, biases: list[torch.Tensor], knobs: Knobs) -> torch.Tensor:
    zero = torch.zeros((lanes.shape[0], lanes.shape[2]))
    start = sum(biases[1:], biases[0]) if biases else zero
    if knobs.nan_to is not None:
        lanes = torch.where(lanes.isnan(), knobs.nan_to, lanes)
    if knobs.fault == "bias_after_rounding":
        total = accumulate(lanes, zero, knobs).bfloat16().float() + start
    else:
        total = accumulate(lanes, start, knobs)
    out = rounded(total, "bf16", toward_zero=knobs.output_rounding == "toward_zero")
    if knobs.flush_subnormals:
        out = torch.where(out.abs() < torch.finfo(torch.bfloat16).tiny, torch.zeros_like(out), out)
    return out


def _weights_home(
    rec: Record, arrived: torch.Tensor, per_owner: list[int], token: torch.Tensor, owner: torch.Tensor, rank: int,
    knobs: Knobs,
) -> torch.Tensor | None:
    if not rec.widths_bytes["weights"]:
        return None
    values = rec.unpack(arrived, "weights", torch.float32)
    sender = torch.repeat_interleave(torch.arange(len(per_owner)), torch.tensor(per_owner))
    combined = torch.zeros(owner.shape)
    for r in range(len(per_owner)):
        if knobs.fault == "own_lanes_only" and r != rank:
            continue
        rows = ((sender == r) & (token < len(owner))).nonzero()[:, 0]
        tokens = token[rows]
        combined[tokens] = torch.where(owner[tokens] == r, values[rows], combined[tokens])
    return combined
