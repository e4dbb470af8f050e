"""Blocked kernels that work row by row: RMS norm, rotary embedding, and the k best of a row."""

from __future__ import annotations

import torch

from adapters.cpu.kernels import tile_io
from adapters.cpu.kernels.block_walk import walk
from adapters.cpu.kernels.knobs import Knobs

_WALK = ("drop_tile", "double_tile", "stale_tile", "drop_tail")
KERNELS = {
    "rms_norm": ("tile_m", "tile_k", "split_k", "k_order", *_WALK, "accumulator", "partial", *tile_io.KNOBS),
    "rotate": ("tile_m", "mask_shift", *tile_io.KNOBS),
    "best_of_row": ("tile_m", "tile_n", *_WALK, "tie_rule", "flush_subnormals", "fault"),
}
"""Kernel to the knobs it obeys.

mask_shift of `rotate` moves the position. tie_rule=high_index is a fault of `best_of_row`:
its order among equal scores is documented.
"""

FAULTS = {
    "no_eps": "eps is left out",
    "eps_outside": "eps is added to the root instead of under it",
    "ignore_weight": "the weight is taken to be 1",
    "ignore_out_scale": "out_scale is taken to be 1",
    "ignore_residual": "the residual is not added",
    "raw_residual": "the norm is taken of the sum before it is rounded to the input format",
    "n_minus_one": "the mean square divides by one less than the row length",
    "n_minus_one_from_4096": "the mean square of rows of 4096 and more divides by one less than the row length",
    "slack_written": "each output row is stored one element too far where the row pitch leaves room",
    "swapped_pairs": "the pair layout is the other one: neighbours for halves and halves for neighbours",
    "ignore_conjugate": "the rotation always goes forward",
    "ignore_offset": "seqlen_offset is taken to be 0",
    "ignore_positions": "positions are taken to be 0, 1, 2, ..",
    "bf16_table": "cos and sin are rounded to BF16",
    "first_head_only": "heads behind the first one are not rotated",
    "ascending": "the chosen experts come in increasing order of score",
    "by_magnitude": "scores are compared by magnitude",
    "minus_zero_lower": "+0 counts as larger than -0",
    "one_short_of_all": "where all columns are chosen the last place repeats the one before",
}
"""Faults that only these kernels know (`Knobs.fault`)."""


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    knobs: Knobs,
    residual: torch.Tensor | None = None,
    out_scale: float = 1.0,
    residual_out: torch.Tensor | None = None,
    rstd_out: torch.Tensor | None = None,
) -> None:
    """out = r * rstd * (weight * out_scale) with r = x (+ residual, rounded), rstd = 1/sqrt(mean(r^2) + eps).

    x, residual, out, residual_out: [t, h] of one dtype, rows may have gaps. weight: [h].
    rstd_out: fp32 [t]. The sum of squares is FP32, in blocks of tile_k columns.
    """
    t, h = x.shape
    factor = torch.ones(()) if weight is None or knobs.fault == "ignore_weight" else tile_io.load(weight, knobs)
    if out_scale != 1.0 and knobs.fault != "ignore_out_scale":
        factor = factor * out_scale
    splits = walk(h, knobs.tile_k, knobs)
    less = knobs.fault == "n_minus_one" or (knobs.fault == "n_minus_one_from_4096" and h >= 4096)
    count = h - 1 if less else h
    for rows in tile_io.row_tiles(t, knobs):
        r = tile_io.load(x[rows], knobs)
        if residual is not None:
            r = _add_residual(r, residual[rows], residual_out[rows], knobs)
        mean_square = _sum_of_squares(r, splits, knobs) / count
        rstd = _rstd(mean_square, eps, knobs)
        if rstd_out is not None:
            rstd_out[rows] = rstd
        tile_io.store(out[rows], r * rstd.unsqueeze(1) * factor, knobs)
    if knobs.fault == "slack_written" and t > 1 and out.stride(0) > h:
        out.as_strided((t - 1, 1), (out.stride(0), 1), out.storage_offset() + h).zero_()


def _add_residual(r: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    total = r if knobs.fault == "ignore_residual" else r + tile_io.load(residual, knobs)
    tile_io.store(out, total, knobs)
    return total if knobs.fault == "raw_residual" else out.float()


def _sum_of_squares(r: torch.Tensor, splits: list, knobs: Knobs) -> torch.Tensor:
    total = torch.zeros(r.shape[0])
    for split in splits:
        acc = torch.zeros(r.shape[0])
        for block in split:
            part = r[:, block.source : block.source + block.width]
            acc = tile_io.through(acc + (part * part).sum(1), knobs.accumulator)
        total = total + tile_io.through(acc, knobs.partial)
    return total


def _rstd(mean_square: torch.Tensor, eps: float, knobs: Knobs) -> torch.Tensor:
    if knobs.fault == "no_eps":
        return mean_square.sqrt().reciprocal()
    if knobs.fault == "eps_outside":
        return (mean_square.sqrt() + eps).reciprocal()
    return (mean_square + eps).sqrt().reciprocal()


def rotate(
    x: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    knobs: Knobs,
    interleaved: bool = False,
    conjugate: bool = False,
) -> None:
    """Rotates pairs of x in place: (a, b) -> (a cos - b sin, a sin + b cos), sin negated if conjugate.

    x: [batch, s, heads, d] bf16 or fp32, any outer strides. table: fp32 [n, d], first half
    cos, second half sin. positions: int64 [batch or 1, s], rows of the table. Pairs are
    (i, i + d/2), or (2i, 2i + 1) if interleaved.
    """
    half = x.shape[-1] // 2
    if knobs.fault == "bf16_table":
        table = tile_io.through(table, "bf16")
    if knobs.fault == "swapped_pairs":
        interleaved = not interleaved
    if knobs.fault == "first_head_only":
        x = x[:, :, :1]
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    if knobs.mask_shift:
        positions = (positions + knobs.mask_shift) % table.shape[0]
    for rows in tile_io.row_tiles(x.shape[1], knobs):
        cos_sin = table[positions[:, rows]].unsqueeze(2)
        cos, sin = cos_sin[..., :half], cos_sin[..., half:]
        if conjugate and knobs.fault != "ignore_conjugate":
            sin = -sin
        tile = x[:, rows]
        a, b = tile_io.load(tile[..., first], knobs), tile_io.load(tile[..., second], knobs)
        new_a, new_b = a * cos - b * sin, a * sin + b * cos
        tile_io.store(tile[..., first], new_a, knobs)
        tile_io.store(tile[..., second], new_b, knobs)
    if knobs.fault == "slack_written" and x.shape[2] > 1 and x.stride(2) > 2 * half:
        heads = x[:, :, :-1, :1]
        heads.as_strided(heads.shape, heads.stride(), x.storage_offset() + 2 * half).zero_()


def best_of_row(scores: torch.Tensor, k: int, knobs: Knobs) -> torch.Tensor:
    """int64 [t, k]: columns of the k largest of each row of fp32 [t, n], largest first.

    Of equal scores the smaller column comes first (`tie_rule=low_index`). Scans blocks of
    tile_n columns with a list of the k best so far.
    """
    t, n = scores.shape
    chosen = torch.empty(t, k, dtype=torch.int64)
    blocks = [block for split in walk(n, knobs.tile_n, knobs) for block in split]
    blocks.sort(key=lambda block: block.start, reverse=knobs.tie_rule == "high_index")
    for rows in tile_io.row_tiles(t, knobs):
        keys = tile_io.load(scores[rows], knobs)
        if knobs.fault == "by_magnitude":
            keys = keys.abs()
        if knobs.fault == "minus_zero_lower":
            keys = keys.view(torch.int32)
            keys = torch.where(keys < 0, -1 - (keys & 0x7FFFFFFF), keys)
        best, columns = keys[:, :0], torch.empty(keys.shape[0], 0, dtype=torch.int64)
        for block in blocks:
            here = torch.arange(block.start, block.start + block.width).expand(keys.shape[0], -1)
            values = keys[:, block.source : block.source + block.width]
            if knobs.tie_rule == "high_index":
                here, values = here.flip(1), values.flip(1)
            values = torch.cat((best, values), 1)
            order = values.argsort(dim=1, descending=True, stable=True)[:, :k]
            best, columns = values.gather(1, order), torch.cat((columns, here), 1).gather(1, order)
        if knobs.fault == "one_short_of_all" and k == n > 1:
            columns[:, -1] = columns[:, -2]
        chosen[rows] = columns.flip(1) if knobs.fault == "ascending" else _filled(columns, k)
    return chosen


def _filled(columns: torch.Tensor, k: int) -> torch.Tensor:
    """k columns; where a fault left fewer candidates the list starts again, from 0 if it is empty."""
    if columns.shape[1] == 0:
        return torch.zeros(columns.shape[0], k, dtype=torch.int64)
    return columns[:, torch.arange(k) % columns.shape[1]] if columns.shape[1] < k else columns
