"""Blocked matrix products D = A B^T (+ C), plain, block-scaled and grouped, with FP32 accumulation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from adapters.cpu.kernels import accumulators, tile_io
from adapters.cpu.kernels.block_walk import Block, walk
from adapters.cpu.kernels.knobs import Knobs

_GEMM = (
    "tile_m", "tile_n", "tile_k", "split_k", "k_order", "c_add", "accumulator", "partial", "drop_tile", "double_tile",
    "stale_tile", "drop_tail", *tile_io.KNOBS,
)
KERNELS = {
    "gemm_nt": (*_GEMM, "scale_shift", "swap_scales", "skip_scale"),
    "gemm_groups": _GEMM,
    "runs_of_labels": ("tile_m", "label_lookup", "mask_shift", "fault"),
    "runs_of_ends": ("mask_shift", "fault"),
}
"""Kernel to the knobs it obeys. Scale knobs count for block-scaled products only."""

FAULTS = {
    "ignore_c": "C is not added",
    "add_c_twice": "C is added twice",
    "accumulate_always": "what D held before the call is added although there is no C",
    "slack_written": "each row of D is stored one element too far where the row pitch leaves room",
    "contiguous_rows": "A is read as if its rows followed each other without gaps, whatever its strides",
    "double_gran": "a scale is taken to cover twice as many k as it does",
    "saturates": "a sum past the range of D becomes its largest number instead of infinity",
    "bf16_scales": "scales are rounded to BF16 before use",
    "next_group": "a row is multiplied with the B of the group after its own",
    "negative_group": "label -1 is used as an index, so padding rows are computed with the last B",
    "zero_behind": "rows that belong to no group are overwritten with zeros",
    "ends_as_counts": "the end row of a group is taken for its number of rows",
}
"""Faults that only these kernels know (`Knobs.fault`)."""


class Scales(NamedTuple):
    """a: FP32 [m, ceil(k / gran_a)], b: FP32 [n, ceil(k / gran_b)]: factors of each row and k block."""

    a: torch.Tensor
    b: torch.Tensor
    gran_a: int
    gran_b: int


class Run(NamedTuple):
    """Rows start..stop of A and D that are multiplied with B[group]."""

    start: int
    stop: int
    group: int


def gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    knobs: Knobs,
    c: torch.Tensor | None = None,
    alpha: float = 1.0,
    scales: Scales | None = None,
) -> None:
    """d[m, n] = alpha * sum over k blocks of sa * sb * (a[m, block] . b[n, block]) + c, in place.

    a, b: any float dtype, any strides. d: BF16 or FP32. c: of d's dtype, expandable to
    d's shape, may be d itself. Each block product is FP32, its scales are applied to it
    (promotion), blocks are added in FP32, one rounding at the end.
    """
    m, k = a.shape
    n = b.shape[0]
    a, b = _whole_tiles(_operand(a, knobs), knobs), tile_io.load(b, knobs)
    step = knobs.tile_k if scales is None else math.gcd(knobs.tile_k, scales.gran_a, scales.gran_b)
    if scales is not None:
        scales = _read_scales(scales, m, n, knobs)
        scales = scales._replace(a=_whole_tiles(scales.a, knobs))
    splits = walk(k, step, knobs)
    if c is None and knobs.fault == "accumulate_always":
        c = d
    if c is not None:
        c = c.expand(m, n)
    for rows in tile_io.row_tiles(m, knobs):
        for cols in tile_io.tiles(n, knobs.tile_n):
            tile = slice(rows.start, rows.start + knobs.tile_m)
            part = None if scales is None else scales._replace(a=scales.a[tile], b=scales.b[cols])
            acc = _accumulate(a[tile], b[cols], splits, part, knobs)[: rows.stop - rows.start]
            if alpha != 1.0:
                acc = acc * alpha
            if c is not None:
                acc = _add_c(acc, c[rows, cols], knobs)
            if knobs.fault == "saturates":
                largest = torch.finfo(d.dtype).max
                acc = acc.clamp(-largest, largest)
            tile_io.store(d[rows, cols], acc, knobs)
    if knobs.fault == "slack_written" and d.stride(0) > n > 0:
        d.as_strided((m - 1, 1), (d.stride(0), 1), d.storage_offset() + n).zero_()


def _whole_tiles(x: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    """x with zero rows up to a multiple of tile_m, contiguous.

    The BLAS below adds in another order for other numbers of rows; so a row's bits would depend on its neighbours.
    """
    whole = x.new_zeros((-(-x.shape[0] // knobs.tile_m) * knobs.tile_m, x.shape[1]))
    whole[: x.shape[0]] = x
    return whole


def _operand(a: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    if knobs.fault == "contiguous_rows":
        a = a.as_strided(a.shape, (a.shape[1], 1), a.storage_offset())
    return tile_io.load(a, knobs)


def _accumulate(
    a: torch.Tensor, b: torch.Tensor, splits: list[list[Block]], scales: Scales | None, knobs: Knobs
) -> torch.Tensor:
    """FP32 [rows of a, rows of b]: blocks added in visiting order, splits one after the other."""
    unit = accumulators.unit_of(knobs.accumulator, fp8=scales is not None)
    total: torch.Tensor | None = None
    for split in splits:
        acc: torch.Tensor | None = None
        for block in split:
            left = a[:, block.source : block.source + block.width]
            right = b[:, block.start : block.start + block.width].t()
            if unit is not None:
                acc = unit.add(acc, left, right, None if scales is None else _factor(scales, block.start))
                continue
            if acc is not None and scales is None:
                acc = acc.addmm_(left, right)
            else:
                product = torch.mm(left, right)
                if scales is not None:
                    product = _scaled(product, scales, block.start)
                acc = product if acc is None else acc.add_(product)
            acc = tile_io.through(acc, knobs.accumulator)
        if acc is not None:
            acc = tile_io.through(acc, knobs.partial)
            total = acc if total is None else total + acc
    return torch.zeros(a.shape[0], b.shape[0]) if total is None else total


def _scaled(product: torch.Tensor, scales: Scales, start: int) -> torch.Tensor:
    """Scales are applied in float64: 2^-80 * 2^-80 * 2^24 must not underflow on the way."""
    return _factor(scales, start).mul_(product).float()


def _factor(scales: Scales, start: int) -> torch.Tensor:
    """float64 [m, n], a new tensor: the product of the two scales of the block that begins at `start`."""
    return scales.a[:, start // scales.gran_a, None] * scales.b[:, start // scales.gran_b]


def _add_c(acc: torch.Tensor, c: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    if knobs.fault == "ignore_c":
        return acc
    if knobs.c_add == "twice_rounded":
        acc = acc.to(c.dtype).float()
    c = tile_io.load(c, knobs)
    return acc + c + c if knobs.fault == "add_c_twice" else acc + c


def _read_scales(scales: Scales, m: int, n: int, knobs: Knobs) -> Scales:
    """The scales as float64, wrong in the way the knobs say."""
    a, b = scales.a, scales.b
    if knobs.fault == "bf16_scales":
        a, b = tile_io.through(a, "bf16"), tile_io.through(b, "bf16")
    if knobs.fault == "double_gran":
        a, b = (s[:, torch.arange(s.shape[1]) // 2] for s in (a, b))
    if knobs.scale_shift:
        a, b = a.roll(-knobs.scale_shift, 1), b.roll(-knobs.scale_shift, 1)
    if knobs.swap_scales:
        a, b = b[torch.arange(m) % n], a[torch.arange(n) % m]
        scales = scales._replace(gran_a=scales.gran_b, gran_b=scales.gran_a)
    if knobs.skip_scale:
        a, b = torch.ones_like(a), torch.ones_like(b)
    return scales._replace(a=a.double(), b=b.double())


def gemm_groups(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, runs: Iterable[Run], knobs: Knobs) -> None:
    """d[rows of a run] = a[rows] b[group]^T for every run; all other rows of d stay as they are.

    a: [m, k], b: [groups, n, k], d: [m, n] BF16 or FP32.
    """
    untouched = torch.ones(a.shape[0], dtype=torch.bool) if knobs.fault == "zero_behind" else None
    shift = 1 if knobs.fault == "next_group" else 0
    for start, stop, group in runs:
        gemm_nt(a[start:stop], b[(group + shift) % b.shape[0]], d[start:stop], knobs)
        if untouched is not None:
            untouched[start:stop] = False
    if untouched is not None:
        d[untouched] = 0


def runs_of_labels(labels: torch.Tensor, knobs: Knobs) -> list[Run]:
    """Runs of equal labels; int32 [m], -1 = a row of no group.

    With label_lookup=tile the label of each tile's first row counts for the whole tile:
    the same where groups start on multiples of tile_m, but for padding inside a tile.
    """
    m = labels.shape[0]
    if knobs.label_lookup == "tile":
        labels = labels[:: knobs.tile_m].repeat_interleave(knobs.tile_m)[:m]
    values, counts = torch.unique_consecutive(labels, return_counts=True)
    runs, stop = [], 0
    for group, count in zip(values.tolist(), counts.tolist(), strict=True):
        start, stop = stop, stop + count
        if group >= 0 or knobs.fault == "negative_group":
            runs.append(_shifted(Run(start, stop, group), m, knobs))
    return runs


def runs_of_ends(ends: torch.Tensor, m: int, alignment: int, whole_blocks: bool, knobs: Knobs) -> list[Run]:
    """Runs of a prefix-sum layout; int32 [groups], ends[i] = end row of group i.

    Group i starts at align(ends[i-1], alignment), the first at 0, and is empty where it
    ends at or before its start. whole_blocks: the rows up to the next start belong to it too.
    """
    runs, start = [], 0
    for group, entry in enumerate(ends.tolist()):
        end = min(start + entry, m) if knobs.fault == "ends_as_counts" else entry
        following = -(-end // alignment) * alignment
        if end > start:
            runs.append(_shifted(Run(start, min(following if whole_blocks else end, m), group), m, knobs))
        start = max(start, following)
    return runs


def _shifted(run: Run, m: int, knobs: Knobs) -> Run:
    start, stop = (min(max(bound + knobs.mask_shift, 0), m) for bound in run[:2])
    return Run(start, stop, run.group)
