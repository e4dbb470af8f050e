"""Blocked online softmax of one query row over a list of K/V rows, in float32, with splits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from adapters.cpu.kernels.block_walk import Block, walk
from adapters.cpu.kernels.knobs import Knobs

KERNELS = {
    "attend": (
        "tile_n", "split_k", "k_order", "softmax_weights", "accumulator", "partial", "output_rounding", "drop_tile",
        "double_tile", "stale_tile", "drop_tail", "rescale_lag", "fault",
    ),
}
"""Kernel to the knobs it obeys."""

FAULTS = {
    "lse_base2": "lse in units of ln 2",
    "lse_is_max": "lse is the largest logit, without the sum",
    "sink_ignored": "the sink has no effect",
    "sink_in_lse": "lse counts the sink as a key",
    "sink_per_split": "the sink counts in every split",
    "plain_combine": "splits are averaged, whatever their weight",
    "no_rescale": "earlier blocks are not rescaled when the largest logit rises",
    "out_not_rescaled": "earlier blocks are rescaled in the sum of weights only",
    "sum_not_rescaled": "earlier blocks are rescaled in the output only",
    "weights_cut": "softmax weights are cut to BF16 instead of rounded",
    "scale_bf16": "the softmax scale is rounded to BF16",
    "coarse_exp": "exponentials are read from a table of 128 steps a unit",
    "no_max": "exponentials are formed without subtracting the largest logit",
    "logits_bf16": "logits are rounded to bf16",
    "fp16_query": "queries are read through FP16, which has more digits and a smaller range",
    "rope_omitted": "the last 64 dimensions take no part in the logits",
    "empty_row_nan": "a row without keys divides zero by zero",
    "empty_row_minus_inf": "lse of a row without keys is -inf",
    "invalid_as_token_0": "an invalid index reads token 0",
    "invalid_from_end": "an invalid index reads the last token",
}
"""Faults that only this kernel knows (`Knobs.fault`)."""

HEAD_DIM, ROPE_DIM = 512, 64

_FORMATS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}


class Source(Protocol):
    """K/V rows by slot; `size` slots."""

    size: int

    def rows(self, slots: torch.Tensor) -> torch.Tensor: ...


class Attention(NamedTuple):
    """out: bf16 [h, 512]; lse, peak: float32 [h], natural logarithm of the sum and the largest logit."""

    out: torch.Tensor
    lse: torch.Tensor
    peak: torch.Tensor


class _Part(NamedTuple):
    """Result over one split: normalised out, lse (-inf where empty), peak."""

    out: torch.Tensor
    lse: torch.Tensor
    peak: torch.Tensor


Fetch = Callable[[Block], tuple[torch.Tensor, torch.Tensor]]


def attend(
    q: torch.Tensor, lists: Sequence[torch.Tensor], sources: Sequence[Source], scale: float,
    sink: torch.Tensor | None, splits: int, knobs: Knobs,
) -> Attention:
    """Attention of q, bf16 [h, 512], over lists[i] of slots of sources[i].

    A slot outside the source is skipped and its storage never read; a repeated slot counts
    each time. out = softmax(scale * q k) v, times sigmoid(lse - sink). A row without a valid
    slot gives out 0, lse +inf, peak -inf. splits: how many parts the list is cut into.
    """
    slots, starts = _joined(lists, sources, knobs)

    def fetch(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        return _fetch(slots[block.source : block.source + block.width], sources, starts)

    query = q.half().float() if knobs.fault == "fp16_query" else q.float()
    walked = walk(len(slots), knobs.tile_n, replace(knobs, split_k=splits))
    parts = [_part(query, fetch, blocks, scale, sink, knobs) for blocks in walked]
    if not parts:
        empty = torch.full((q.shape[0],), -math.inf)
        parts = [_Part(torch.zeros_like(query), empty, empty)]
    return _finished(_combined(parts, knobs) if len(parts) > 1 else parts[0], sink, knobs)


def _joined(
    lists: Sequence[torch.Tensor], sources: Sequence[Source], knobs: Knobs
) -> tuple[torch.Tensor, list[int]]:
    """One list over all sources, invalid slots -1, and where each source starts in its numbering."""
    joined, starts, start = [], [], 0
    for narrow, source in zip(lists, sources, strict=True):
        slots = narrow.long()
        replacement = {"invalid_as_token_0": start, "invalid_from_end": start + source.size - 1}.get(knobs.fault, -1)
        joined.append(torch.where((slots >= 0) & (slots < source.size), slots + start, replacement))
        starts.append(start)
        start += source.size
    return torch.cat(joined), starts


def _fetch(
    slots: torch.Tensor, sources: Sequence[Source], starts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """K/V rows float32 [w, 512], zero where the slot is invalid, and which are valid."""
    rows = torch.zeros(len(slots), HEAD_DIM)
    for source, start in zip(sources, starts, strict=True):
        mine = (slots >= start) & (slots < start + source.size)
        if mine.all():
            return source.rows(slots - start), mine
        rows[mine] = source.rows(slots[mine] - start)
    return rows, slots >= 0


def _part(
    q: torch.Tensor, fetch: Fetch, blocks: Sequence[Block], scale: float, sink: torch.Tensor | None, knobs: Knobs
) -> _Part:
    peak = torch.full((q.shape[0],), -math.inf)
    total = torch.zeros(q.shape[0])
    out = torch.zeros_like(q)
    largest = peak
    for block in blocks:
        kv, valid = fetch(block)
        logits = _logits(q, kv, scale, knobs).masked_fill_(~valid, -math.inf)
        largest = torch.maximum(largest, logits.amax(1))
        new_peak = largest
        if knobs.rescale_lag:
            new_peak = torch.where(largest - peak <= knobs.rescale_lag, peak, largest)
        base = new_peak.masked_fill(new_peak == -math.inf, 0)
        if knobs.fault == "no_max":
            base = torch.zeros_like(base)
        shrink = torch.exp(peak - base)
        if knobs.fault in ("no_rescale", "no_max"):
            shrink = torch.ones_like(shrink)
        gap = logits - base[:, None]
        weights = torch.exp((gap * 128).floor() / 128 if knobs.fault == "coarse_exp" else gap)
        kept_sum = torch.ones_like(shrink) if knobs.fault == "sum_not_rescaled" else shrink
        kept_out = torch.ones_like(shrink) if knobs.fault == "out_not_rescaled" else shrink
        total = _as(total * kept_sum + weights.sum(1), knobs.accumulator)
        rounded = _cut(weights) if knobs.fault == "weights_cut" else _as(weights, knobs.softmax_weights)
        out = _as(out * kept_out[:, None] + rounded @ kv, knobs.accumulator)
        peak = new_peak
    base = torch.zeros_like(peak) if knobs.fault == "no_max" else peak
    lse = torch.where(total == 0, -math.inf, base + total.log())
    out = torch.where((total == 0)[:, None], 0, out / total[:, None])
    if sink is not None and knobs.fault == "sink_per_split":
        out = out * torch.sigmoid(lse - sink)[:, None]
        lse = torch.logaddexp(lse, sink)
    return _Part(_as(out, knobs.partial), lse, largest)


def _logits(q: torch.Tensor, kv: torch.Tensor, scale: float, knobs: Knobs) -> torch.Tensor:
    if knobs.fault == "rope_omitted":
        q, kv = q[:, :-ROPE_DIM], kv[:, :-ROPE_DIM]
    if knobs.fault == "scale_bf16":
        scale = float(torch.tensor(scale).bfloat16())
    logits = (q @ kv.T).mul_(scale)
    return logits.bfloat16().float() if knobs.fault == "logits_bf16" else logits


def _as(x: torch.Tensor, fmt: str) -> torch.Tensor:
    dtype = _FORMATS[fmt]
    return x if dtype is None else x.to(dtype).float()


def _cut(x: torch.Tensor) -> torch.Tensor:
    """The BF16 number next to x on the side of zero."""
    return (x.contiguous().view(torch.int32) & -0x10000).view(torch.float32)


def _combined(parts: Sequence[_Part], knobs: Knobs) -> _Part:
    """Parts weighted by exp(lse): the result over all splits."""
    lses = torch.stack([p.lse for p in parts])
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse.masked_fill(lse == -math.inf, 0))
    if knobs.fault == "plain_combine":
        weights = torch.full_like(weights, 1 / len(parts))
    out = sum(w[:, None] * p.out for w, p in zip(weights, parts, strict=True))
    return _Part(out, lse, torch.stack([p.peak for p in parts]).amax(0))


def _finished(part: _Part, sink: torch.Tensor | None, knobs: Knobs) -> Attention:
    out, lse, peak = part
    empty = peak == -math.inf
    if knobs.fault == "lse_is_max":
        lse = peak
    if sink is not None and knobs.fault not in ("sink_ignored", "sink_per_split"):
        out = out * torch.sigmoid(lse - sink)[:, None]
    if sink is not None and knobs.fault == "sink_in_lse":
        lse = torch.logaddexp(lse, sink)
    if knobs.fault == "lse_base2":
        lse, peak = lse / math.log(2), peak / math.log(2)
    out = out.masked_fill(empty[:, None], math.nan if knobs.fault == "empty_row_nan" else 0)
    lse = lse.masked_fill(empty, -math.inf if knobs.fault == "empty_row_minus_inf" else math.inf)
    if knobs.output_rounding == "toward_zero":
        out = _cut(out)
    return Attention(out.bfloat16(), lse, peak)
