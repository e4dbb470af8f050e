"""Expert-parallel dispatch: which token goes where, and where a received row lies.

Every rank sends each of its tokens once to each rank that owns an expert of it.
The receiver orders the rows, and in the expanded layout copies each into one
slot for every expert that wants it.

Knobs that this kernel reads: tile_m (tokens a chunk), row_order (order inside a
source's rows, where the contract leaves it free), and the faults drop_tile,
double_tile, stale_tile, drop_tail (tiles of tile_m tokens of one destination),
mask_shift (smallest id that counts), scale_shift, swap_scales, skip_scale,
nan_to, flush_subnormals (BF16 payload), and `fault`, one of FAULTS.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from adapters.cpu.kernels.exchange import Record, Wire, align, as_bytes
from adapters.cpu.kernels.knobs import Knobs

FAULTS = {
    "duplicate_per_expert": "a token goes to a rank once an expert instead of once",
    "masked_to_first": "a negative id counts as expert 0",
    "masked_to_last": "a negative id counts as the last expert",
    "global_ids": "received ids are not made local",
    "foreign_lanes_zeroed": "weights of other ranks' lanes arrive as 0",
    "swap_weights": "weights arrive in reversed lane order",
    "group_order": "rows are grouped by source in descending order",
    "deterministic_ignored": "deterministic=True has no effect on the order",
    "packed_experts": "expanded rows are placed as if the alignment were 1, offsets say otherwise",
    "pad_repeats_row": "gap rows repeat a real row instead of zeros",
    "count_off_by_one": "the last expert's count is one too high",
    "aligned_as_real": "aligned counts are returned as real counts",
    "counts_from_send": "the rows received from a source are reported as the rows sent to it",
    "stats_overwritten": "receive statistics are set instead of added to",
    "unaligned_sf_stride": "column-major scales lack the padding of the column",
    "cached_stale_payload": "a cached dispatch hands out the first call's data",
    "cached_reorders": "a cached dispatch places the rows anew",
    "replay_clobbers_handle": "a cached dispatch uses the handle's prefix sums as scratch",
}

SCALEUP_PSUM = "psum_num_recv_tokens_per_scaleup_rank"
EXPERT_PSUM = "psum_num_recv_tokens_per_expert"
EXPERT_COUNT = "num_unaligned_recv_tokens_per_expert"


@dataclass(frozen=True)
class Shape:
    """What all ranks must agree on. Bytes are of one row."""

    num_experts: int
    num_max_tokens_per_rank: int
    expert_alignment: int
    num_topk: int
    x_bytes: int
    sf_bytes: int
    has_weights: bool
    do_expand: bool

    @property
    def record(self) -> Record:
        weights = 4 * self.num_topk if self.has_weights else 0
        return Record({"x": self.x_bytes, "sf": self.sf_bytes, "weights": weights, "idx": 8 * self.num_topk, "src": 8})


def _none_yet() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass
class Placement:
    """What a first dispatch decides and a cached one repeats (one rank's view)."""

    sent: list[torch.Tensor]
    """for every destination the token of each row sent, int64"""
    payload: list[torch.Tensor]
    """token whose data the row carries: `sent`, unless a fault is on"""
    ids: torch.Tensor
    """[T, K] global ids, negative where masked"""
    counts: torch.Tensor = field(default_factory=_none_yet)
    """[source, destination] rows"""
    arrival: torch.Tensor = field(default_factory=_none_yet)
    """[N] position on arrival of each row"""
    source: torch.Tensor = field(default_factory=_none_yet)
    """[N] source rank * num_max_tokens_per_rank + token"""
    local_ids: torch.Tensor = field(default_factory=_none_yet)
    """[N, K] id of this rank's expert, or -1"""
    slots: torch.Tensor = field(default_factory=_none_yet)
    """[N, K] row of the expanded output, or -1"""
    rows: int = 0
    """rows of the output, used or not"""
    aligned_rows: int = 0
    """rows that belong to an expert, gaps included"""
    counted: dict[str, torch.Tensor] = field(default_factory=dict)
    aligned: list[int] = field(default_factory=list)
    first_payload: torch.Tensor | None = None


@dataclass(frozen=True)
class Options:
    """Switches of one dispatch that need not be the same on all ranks."""

    sync: bool
    zero_padding: bool
    col_major_sf: bool
    deterministic: bool


def route(topk_idx: torch.Tensor, num_experts: int, size: int, knobs: Knobs) -> Placement:
    """Tokens for every destination, each once and in ascending order. topk_idx: int64 [T, K]."""
    ids = torch.where(topk_idx >= knobs.mask_shift, topk_idx, -1)
    instead = {"masked_to_first": 0, "masked_to_last": num_experts - 1}.get(knobs.fault, -1)
    ids = torch.where(ids < 0, instead, ids)
    owner = torch.div(ids, num_experts // size, rounding_mode="floor")
    sent, payload = [], []
    for rank in range(size):
        wanted = owner == rank
        tokens = wanted.any(1).nonzero()[:, 0]
        if knobs.fault == "duplicate_per_expert":
            tokens = wanted.nonzero()[:, 0]
        tiles = _tiles(tokens, knobs)
        sent.append(_joined(tiles))
        payload.append(_joined(_stale(tiles, knobs.stale_tile)))
    return Placement(sent, payload, ids)


def _tiles(tokens: torch.Tensor, knobs: Knobs) -> list[torch.Tensor]:
    tiles = list(tokens.split(knobs.tile_m)) if len(tokens) else []
    if knobs.drop_tail and tiles and len(tiles[-1]) < knobs.tile_m:
        tiles.pop()
    for index, copies in ((knobs.drop_tile, 0), (knobs.double_tile, 2)):
        if index is not None and -len(tiles) <= index < len(tiles):
            at = index % len(tiles)
            tiles[at:at + 1] = [tiles[at]] * copies
    return tiles


def _stale(tiles: list[torch.Tensor], index: int | None) -> list[torch.Tensor]:
    if index is None or not -len(tiles) <= index < len(tiles) or len(tiles) == 1:
        return tiles
    at = index % len(tiles)
    neighbour = tiles[at - 1] if at else tiles[1]
    return [*tiles[:at], neighbour[torch.arange(len(tiles[at])) % len(neighbour)], *tiles[at + 1:]]


def _joined(tiles: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(tiles) if tiles else torch.empty(0, dtype=torch.int64)


def pack(
    place: Placement, shape: Shape, rank: int, x: torch.Tensor, sf: torch.Tensor | None,
    weights: torch.Tensor | None, knobs: Knobs,
) -> list[torch.Tensor]:
    """For every destination the rows to send, uint8 [rows, width].

    x: [T, H]. sf: [T, P] of 4-byte elements or None. weights: fp32 [T, K] or None.
    """
    x_bytes = as_bytes(_touched(x, knobs), shape.x_bytes)
    num_tokens = len(x)
    if sf is None:
        sf = torch.empty((num_tokens, 0), dtype=torch.int32)
    sf_bytes = as_bytes(sf.roll(-knobs.scale_shift, 1) if knobs.scale_shift else sf, shape.sf_bytes)
    if knobs.skip_scale:
        sf_bytes = torch.zeros_like(sf_bytes)
    if weights is None:
        weights = torch.empty((num_tokens, 0), dtype=torch.float32)
    src = rank * shape.num_max_tokens_per_rank + torch.arange(num_tokens)
    return [
        shape.record.pack({
            "x": x_bytes[payload], "sf": sf_bytes[payload.roll(1) if knobs.swap_scales else payload],
            "weights": weights[sent], "idx": place.ids[sent], "src": src[sent],
        })
        for sent, payload in zip(place.sent, place.payload, strict=True)
    ]


def _touched(x: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    """x itself; a transport that handles values instead of bytes only under a fault."""
    if x.dtype is not torch.bfloat16 or (knobs.nan_to is None and not knobs.flush_subnormals):
        return x
    if knobs.nan_to is not None:
        x = torch.where(x.isnan(), knobs.nan_to, x)
    if knobs.flush_subnormals:
        x = torch.where(x.abs() < torch.finfo(torch.bfloat16).tiny, torch.zeros_like(x), x)
    return x


def place_rows(
    place: Placement, arrived: torch.Tensor, shape: Shape, options: Options, wire: Wire, num_scaleup: int, knobs: Knobs
) -> None:
    """Decide the row of everything that arrived, and count it. arrived: uint8 [N, width]."""
    src = shape.record.unpack(arrived, "src", torch.int64)[:, 0]
    group = torch.div(src, shape.num_max_tokens_per_rank, rounding_mode="floor") % num_scaleup
    if knobs.fault == "group_order":
        group = -group
    if options.deterministic and knobs.fault != "deterministic_ignored":
        order = src.argsort(stable=True)
    else:
        if knobs.fault == "deterministic_ignored" or knobs.row_order == "reverse":
            inner = -src
        elif knobs.row_order == "value":
            inner = arrived.long().sum(1)
        else:
            inner = src
        order = inner.argsort(stable=True)
        order = order[group[order].argsort(stable=True)]
    num_local = shape.num_experts // wire.size
    local = shape.record.unpack(arrived, "idx", torch.int64)[order] - wire.rank * num_local
    place.arrival, place.source = order, src[order]
    place.local_ids = torch.where((local >= 0) & (local < num_local), local, -1)
    _count(place, shape, options, wire, num_local, num_scaleup, knobs)


def _count(
    place: Placement, shape: Shape, options: Options, wire: Wire, num_local: int, num_scaleup: int, knobs: Knobs
) -> None:
    received, a = len(place.source), shape.expert_alignment
    pairs = (place.local_ids >= 0).nonzero()
    expert = place.local_ids[pairs[:, 0], pairs[:, 1]]
    real = torch.bincount(expert, minlength=num_local)
    aligned = -torch.div(-real, a, rounding_mode="floor") * a
    starts = aligned.cumsum(0) - aligned
    if shape.do_expand:
        laid = real.cumsum(0) - real if knobs.fault == "packed_experts" else starts
        by_expert = expert.argsort(stable=True)
        rank_in_expert = torch.arange(len(expert)) - (real.cumsum(0) - real)[expert[by_expert]]
        place.slots = torch.full_like(place.local_ids, -1)
        at = pairs[by_expert]
        place.slots[at[:, 0], at[:, 1]] = laid[expert[by_expert]] + rank_in_expert
    place.aligned_rows = int(aligned.sum())
    place.rows = _rows(shape, options, wire.size, num_local, received, place.aligned_rows)

    shown = real.clone()
    if knobs.fault == "count_off_by_one":
        shown[-1] += 1
    elif knobs.fault == "aligned_as_real":
        shown = aligned
    per_source = place.counts[wire.rank] if knobs.fault == "counts_from_send" else place.counts[:, wire.rank]
    psum = starts + shown if shape.do_expand else aligned.cumsum(0)
    place.aligned = aligned.tolist() if options.sync else []
    place.counted = {
        SCALEUP_PSUM: per_source.reshape(-1, num_scaleup).sum(0).cumsum(0).int(),
        EXPERT_PSUM: psum.int(),
        EXPERT_COUNT: shown.int(),
    }


def _rows(shape: Shape, options: Options, size: int, num_local: int, received: int, aligned: int) -> int:
    capacity, a = size * shape.num_max_tokens_per_rank, shape.expert_alignment
    if options.sync:
        return aligned if shape.do_expand else received
    if shape.do_expand:
        return align(capacity * min(shape.num_topk, num_local) + (a - 1) * num_local, a)
    return capacity


@dataclass(frozen=True)
class Received:
    x: torch.Tensor
    sf: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None


def copy_out(
    place: Placement, arrived: torch.Tensor, shape: Shape, options: Options, wire: Wire,
    dtypes: tuple[torch.dtype, torch.dtype], knobs: Knobs,
) -> Received:
    """The tensors a dispatch returns. dtypes: of the data and of the scales."""
    rows = arrived[place.arrival]
    if shape.do_expand:
        pairs = (place.slots >= 0).nonzero()
        origin, lane = pairs[:, 0], pairs[:, 1]
        target = place.slots[origin, lane]
    else:
        origin = target = torch.arange(len(rows))
    record, filler = shape.record, None
    if options.zero_padding:
        gap = torch.ones(place.aligned_rows, dtype=torch.bool)
        gap[target] = False
        filler = gap.nonzero()[:, 0]

    def laid(values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out[target] = values
        if filler is not None:
            out[filler] = values[-1] if knobs.fault == "pad_repeats_row" and len(values) else 0
        return out

    x = laid(record.unpack(rows, "x", torch.uint8)[origin], torch.empty((place.rows, shape.x_bytes), dtype=torch.uint8))
    sf = None
    if shape.sf_bytes:
        packs = shape.sf_bytes // 4
        column = place.rows if knobs.fault == "unaligned_sf_stride" else align(place.rows, 4)
        flat = torch.empty(packs * column, dtype=torch.int32)
        out = flat.as_strided((place.rows, packs), (1, column) if options.col_major_sf else (packs, 1))
        sf = laid(record.unpack(rows, "sf", torch.int32)[origin], out).view(dtypes[1])
    weights = idx = None
    if shape.has_weights:
        weights = record.unpack(rows, "weights", torch.float32)
        if knobs.fault == "swap_weights":
            weights = weights.flip(1)
        elif knobs.fault == "foreign_lanes_zeroed":
            weights = torch.where(place.local_ids >= 0, weights, 0)
        if shape.do_expand:
            weights = laid(weights[origin, lane], torch.empty(place.rows))
        else:
            weights = laid(weights, torch.empty((place.rows, shape.num_topk)))
    if not shape.do_expand:
        ids = place.local_ids
        if knobs.fault == "global_ids":
            ids = torch.where(ids >= 0, ids + wire.rank * (shape.num_experts // wire.size), -1)
        idx = laid(ids, torch.empty((place.rows, shape.num_topk), dtype=torch.int64))
    return Received(x.view(dtypes[0]), sf, idx, weights)
