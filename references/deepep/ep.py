"""Expert-parallel dispatch (exact, order partly free) and combine (a sum, rounded once), of all ranks at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from references.bounds import basic
from references.bounds.constants import FLUSH_FP32, U32
from references.bounds.profile import resolve
from references.deepep.routing import Received, Routing, align
from references.deepep.rows import INDEX, OTHER, PAYLOAD, Column, Range, Rows, payloads
from references.expected import Array, Exact, Expected, Inputs, Joint, OneOf, Problem, Within
from references.flashmla.grid import rounded_once
from references.formats import codec

_BIASES = ("bias", "bias_0", "bias_1")
_LARGEST = 2.0**127
"""Partial sums beyond this may overflow on the way."""


def dispatch(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[Any, Expected]:
    """`deepep.EPBuffer.dispatch` of every rank r: each token once to each rank that owns an expert of it.

    Inputs, prefixed `dispatch/` where that step is named: x@r [T, H] bf16 or e4m3;
    topk_idx@r [T, K] int32 or int64, negative = none; where present sf@r [T, P] of 4-byte
    elements, topk_weights@r [T, K] fp32, cumulative_local_expert_recv_stats@r [L] int32 (what
    stood there before); cached/x@r, cached/sf@r, cached/topk_weights@r of a call with the handle.
    Sizes or values: num_experts, num_max_tokens_per_rank (for sync=no), expert_alignment (1).
    Variant (default): layout normal, expanded; sync yes, no; deterministic no, yes;
    zero_padding no, yes; handle no, yes.
    Outputs: recv_x@r, recv_sf@r, recv_topk_idx@r (normal only), recv_topk_weights@r and the same
    of `cached/`, in one Joint a rank; the statistics; with handle=yes `handle/<name>@r` for each of
    `HANDLE_FIELDS`, after a cached call `handle_again/<name>@r` too.

    Normal layout: rows grouped by source rank, ascending, order inside a group free; ids local
    or -1; the whole weight row. Expanded: rows of expert e from start_e on in free order,
    start_{e+1} = align(start_e + n_e); one weight a row; gaps free, zeros with zero_padding.
    deterministic: ascending (source, token). A cached call repeats the placement. What lies
    behind the last row of sync=no is free. Profile: foreign_weights "kept" (default: lanes
    of other ranks' experts arrive as they are) or "zero".
    """
    call = _Call(problem, inputs)
    expected: dict[Any, Expected] = {}
    for rank in range(call.routing.ranks):
        rows = call.rows(rank, zero_foreign=resolve(profile)["foreign_weights"] == "zero")
        expected[tuple(rows.shapes())] = Joint(rows.shapes(), rows.check)
        received = call.routing.received[rank]
        stats = f"{call.prefix}cumulative_local_expert_recv_stats@{rank}"
        if stats in inputs:
            expected[stats] = Exact((inputs.codes(stats) + received.per_expert).astype(np.int32))
        if problem.variant.get("handle", "no") == "yes":
            fields = call.handle_fields(received)
            expected |= {f"handle/{n}@{rank}": Exact(v) for n, v in fields.items()}
            if call.is_cached:
                expected |= {f"handle_again/{n}@{rank}": Exact(v, reason="contract") for n, v in fields.items()}
    return expected


HANDLE_FIELDS = (
    "psum_num_recv_tokens_per_scaleup_rank", "psum_num_recv_tokens_per_expert", "num_unaligned_recv_tokens_per_expert",
    "num_recv_tokens_per_expert_list",
)  # fmt: skip
"""int32 [R], [L], [L], and [L] (aligned counts) or, with sync=no, [0]; one scale-out domain."""


def combine(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[Any, Expected]:
    """`deepep.EPBuffer.combine` of every rank r after a dispatch: the sum of a token's rows and its bias.

    Reads what `dispatch` reads, and where present combine/bias@r, or combine/bias_0@r and
    combine/bias_1@r, [T, H] bf16; combine/x@r, the rows handed in, in canonical order (only
    right with deterministic=yes); without it they are the rows that dispatch returned.
    combine/topk_weights@r likewise ([rows, K] or, expanded, [rows]); default those of dispatch.
    Variant (default): as dispatch, and reduction multiple, single (allow_multiple_reduction).
    Outputs: combine/combined_x@r [T, H] bf16; where there are weights
    combine/combined_topk_weights@r [T, K] fp32: the owner's value in each lane, 0 where no expert is selected.

    out = bias_0 + bias_1 + sum of rows: one row from every owner rank (normal) or one a
    selected lane (expanded), added in single precision in any order, rounded to bf16 once.
    Expanded with multiple reduction the owner may round the sum of its lanes to bf16 first.
    Unspecified: elements whose partial sums may overflow on the way. Profile: hops (formats
    in which partial sums are stored besides), subnormals.
    """
    call = _Call(problem, inputs)
    full = resolve(profile)
    expected: dict[Any, Expected] = {}
    for rank in range(call.routing.ranks):
        expected[f"combine/combined_x@{rank}"] = _combined(call, rank, full)
        weights = _weights_home(call, rank)
        if weights is not None:
            expected[f"combine/combined_topk_weights@{rank}"] = weights
    return expected


def result_rows(problem: Problem, inputs: Inputs) -> list[int]:
    """Rows of recv_x on every rank, for the shapes of results; reads what `dispatch` reads, but no payload."""
    call = _Call(problem, inputs)
    return [call.total(received) for received in call.routing.received]


class _Call:
    """One dispatch with everything that follows from its inputs."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self._problem, self.inputs = problem, inputs
        self.prefix = "dispatch/" if "dispatch/topk_idx@0" in inputs else ""
        ids = []
        while f"{self.prefix}topk_idx@{len(ids)}" in inputs:
            ids.append(inputs.codes(f"{self.prefix}topk_idx@{len(ids)}").astype(np.int64))
        self.routing = Routing(tuple(ids), int(self._number("num_experts")))
        variant = problem.variant
        self.expanded = variant.get("layout", "normal") == "expanded"
        self.sync = variant.get("sync", "yes") == "yes"
        self.deterministic = variant.get("deterministic", "no") == "yes"
        self.zero_padding = variant.get("zero_padding", "no") == "yes"
        self.multiple = variant.get("reduction", "multiple") == "multiple"
        self.alignment = int(self._number("expert_alignment", 1))
        self.is_cached = "cached/x@0" in inputs

    def _number(self, name: str, default: int | None = None) -> int:
        for source in (self._problem.sizes, self._problem.values):
            if source.get(name) is not None:
                return source[name]
        if default is None:
            msg = f"the problem has no size or value {name}"
            raise KeyError(msg)
        return default

    def gathered(self, name: str, received: Received) -> Array:
        """[N, ...] codes of every received token, in canonical order; `name` with its prefix."""
        arrays = [self.inputs.codes(f"{name}@{s}") for s in range(self.routing.ranks)]
        return np.concatenate([a[received.token[received.source == s]] for s, a in enumerate(arrays)])

    def total(self, received: Received) -> int:
        """Rows of the result."""
        a, routing = self.alignment, self.routing
        aligned = int(align(received.per_expert, a).sum())
        if self.sync:
            return aligned if self.expanded else len(received.source)
        capacity = routing.ranks * int(self._number("num_max_tokens_per_rank"))
        if not self.expanded:
            return capacity
        lanes = min(received.local.shape[1], routing.local_experts)
        return int(align(capacity * lanes + (a - 1) * routing.local_experts, a))

    def rows(self, rank: int, *, zero_foreign: bool) -> Rows:
        received = self.routing.received[rank]
        columns = self._columns(self.prefix, rank, received, zero_foreign=zero_foreign)
        if self.is_cached:
            columns += self._columns("cached/", rank, received, zero_foreign=zero_foreign)
        total, a = self.total(received), self.alignment
        counts, starts = received.per_source, np.cumsum(received.per_source) - received.per_source
        zero = np.zeros(total, bool)
        if self.expanded:
            counts, starts = received.per_expert, received.starts(a)
            if self.zero_padding:
                for start, n in zip(starts, counts, strict=True):
                    zero[start + n : align(start + n, a)] = True
        ranges, first = [], 0
        for start, n in zip(starts.tolist(), counts.tolist(), strict=True):
            each = [(start + i, first + i, 1) for i in range(n)] if self.deterministic else [(start, first, n)]
            ranges += [Range(*r) for r in each]
            first += n
        known = payloads([self.inputs.codes(f"{self.prefix}x@{s}") for s in range(self.routing.ranks)])
        return Rows(tuple(columns), tuple(ranges), total, zero, known)

    def _columns(self, prefix: str, rank: int, received: Received, *, zero_foreign: bool) -> list[Column]:
        pick = received.pair_row if self.expanded else slice(None)
        columns = [Column(f"{prefix}recv_x@{rank}", self.gathered(f"{prefix}x", received)[pick], PAYLOAD)]
        if f"{prefix}sf@0" in self.inputs:
            columns.append(Column(f"{prefix}recv_sf@{rank}", self.gathered(f"{prefix}sf", received)[pick], OTHER))
        if not self.expanded:
            dtype = self.inputs.codes(f"{self.prefix}topk_idx@0").dtype
            columns.append(Column(f"{prefix}recv_topk_idx@{rank}", received.local.astype(dtype), INDEX,
                                  self.routing.local_experts))  # fmt: skip
        if f"{prefix}topk_weights@0" in self.inputs:
            weights = self.gathered(f"{prefix}topk_weights", received)
            if self.expanded:
                weights = weights[received.pair_row, received.pair_lane]
            elif zero_foreign:
                weights = np.where(received.local >= 0, weights, np.float32(0))
            columns.append(Column(f"{prefix}recv_topk_weights@{rank}", weights, OTHER))
        return columns

    def handle_fields(self, received: Received) -> dict[str, Array]:
        aligned = align(received.per_expert, self.alignment)
        per_expert = received.starts(self.alignment) + received.per_expert if self.expanded else np.cumsum(aligned)
        listed = aligned if self.sync else aligned[:0]
        values = (np.cumsum(received.per_source), per_expert, received.per_expert, listed)
        return {n: v.astype(np.int32) for n, v in zip(HANDLE_FIELDS, values, strict=True)}

    def terms(self, rank: int) -> list[list[tuple[Array, Array]]]:
        """For each owner of this rank's tokens the items it sums: (tokens, rows float64), one a lane if expanded."""
        result = []
        for owner, received in enumerate(self.routing.received):
            mine = np.nonzero(received.source == rank)[0]
            handed_in = f"combine/x@{owner}"
            if handed_in in self.inputs:
                x, slots = self.inputs.real(handed_in), received.slots(self.alignment)
            else:
                x = codec.decode(self.gathered(f"{self.prefix}x", received), self.inputs.format(f"{self.prefix}x@0"))
                slots = np.where(received.local >= 0, np.arange(len(x))[:, None], -1)
            if not self.expanded:
                result.append([(received.token[mine], x[mine])])
                continue
            lanes = [mine[slots[mine, k] >= 0] for k in range(slots.shape[1])]
            result.append([(received.token[i], x[slots[i, k]]) for k, i in enumerate(lanes)])
        return result


def _combined(call: _Call, rank: int, profile: Mapping[str, Any]) -> Within:
    inputs = call.inputs
    shape = inputs.codes(f"{call.prefix}x@{rank}").shape
    shape = (shape[0], inputs.codes("combine/x@0").shape[1]) if "combine/x@0" in inputs else shape
    total, size, count, rounding = np.zeros(shape), np.zeros(shape), np.zeros((shape[0], 1)), np.zeros(shape)

    def add(tokens: Any, rows: Array) -> None:
        total[tokens] += rows
        size[tokens] += np.abs(rows)
        count[tokens] += 1

    with np.errstate(all="ignore"):
        for name in _BIASES:
            if f"combine/{name}@{rank}" in inputs:
                add(slice(None), inputs.real(f"combine/{name}@{rank}"))
        for items in call.terms(rank):
            group, group_size, lanes = np.zeros(shape), np.zeros(shape), np.zeros((shape[0], 1))
            for tokens, rows in items:
                add(tokens, rows)
                group[tokens] += rows
                group_size[tokens] += np.abs(rows)
                lanes[tokens] += 1
            if call.expanded and call.multiple:
                error = basic.gamma(lanes, U32) * group_size
                rounding += np.where(lanes > 1, rounded_once(_finite(group), _finite(error), "bf16"), 0.0)
        # The rounded partial sums are what is added next: second order.
        error = basic.gamma(count + 2, U32) * (size + rounding) + rounding
        for fmt in profile["hops"]:
            error += codec.half_ulp(size + error, fmt) * np.maximum(count, 1)
        if profile["subnormals"] != "keep":
            error += FLUSH_FP32 * count
        bound = np.where(count > 0, rounded_once(_finite(total), _finite(error), "bf16"), 0.0)
    return Within(total, bound, _finite(size) > _LARGEST)


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)


def _weights_home(call: _Call, rank: int) -> Expected | None:
    name = f"{call.prefix}topk_weights@{rank}"
    handed_in = "combine/topk_weights@0" in call.inputs
    if name not in call.inputs and not handed_in:
        return None
    ids = call.routing.ids[rank]
    home = np.zeros(ids.shape, np.float32)
    if handed_in:
        for owner, received in enumerate(call.routing.received):
            weights = call.inputs.codes(f"combine/topk_weights@{owner}")
            row, lane = np.nonzero((received.local >= 0) & (received.source == rank)[:, None])
            at = weights[received.slots(call.alignment)[row, lane]] if call.expanded else weights[row, lane]
            home[received.token[row], lane] = at
    else:
        home = np.where(ids >= 0, call.inputs.codes(name), home)
    return OneOf((home, np.where(ids >= 0, home, np.float32(-0.0))), any_nan=False)
