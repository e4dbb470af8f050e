"""DeepEP on the CPU: expert-parallel dispatch and combine between real processes, over gloo.

Signatures are those of DeepEP 2.5 (`EPBuffer`), with two liberties. `group` may be
None: a process group can't be named in a plain call, so it then is the backend's
own. A method of an object takes that object as its first argument.

There are no streams here: a call has finished when it returns, except that a
deferred epilogue runs at the first `wait`. A refusal reaches all ranks, which
raise at once. Arguments of the contract that only tune a GPU (`num_sms`,
`num_qps`, time limits, `sl_idx`) are accepted and have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from adapters.cpu.kernels import ep_combine, ep_dispatch, exchange
from adapters.cpu.kernels.ep_checks import (
    ALLOCATION_ALIGN_BYTES,
    MAX_TOPK,
    RDMA_ALIGN_BYTES,
    TMA_ALIGN_BYTES,
    biases_of,
    check_combine,
    check_switches,
    require,
    shape_of,
)
from adapters.cpu.kernels.ep_dispatch import EXPERT_COUNT, Options, Shape
from adapters.cpu.kernels.ep_objects import EPBuffer, EPHandle, EventHandle, EventOverlap
from adapters.cpu.kernels.exchange import Wire, align
from adapters.cpu.kernels.knobs import Knobs
from adapters.cpu.kernels.pipe import PPBuffer

FAULTS = {
    "max_tokens_exclusive": "as many tokens as the declared maximum are refused",
    "zero_tokens_rejected": "a rank without tokens raises",
    "zero_tokens_skipped": "a rank without tokens returns without taking part, its peers wait",
    "empty_combine_rejected": "combine raises where the rank has no tokens of its own",
    "cached_needs_num_sms": "a cached dispatch raises TypeError unless num_sms is given",
}
"""Values of `Knobs.fault` that act on a whole call; the others are in the two kernels' files."""


class Adapter:
    """One method an op. `backend.group`: protocol.Group or None; `backend.knobs`: Knobs."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.pipes: list[PPBuffer] = []
        """all that were made, so that no send is dropped while a peer has yet to take it"""

    @property
    def knobs(self) -> Knobs:
        return self.backend.knobs

    @property
    def wire(self) -> Wire:
        return exchange.join(self.backend.group)

    def get_num_allocation_alignment(self) -> int:
        return ALLOCATION_ALIGN_BYTES

    def get_num_rdma_alignment(self) -> int:
        return RDMA_ALIGN_BYTES

    def get_num_tma_alignment(self) -> int:
        return TMA_ALIGN_BYTES

    def EPBuffer(
        self, group: Any = None, num_bytes: int | None = None, num_max_tokens_per_rank: int = 0, hidden: int = 0,
        num_topk: int = 0, use_fp8_dispatch: bool = False, lb_allocation_plan_or_num_bytes: Any = 0,
        deterministic: bool = False, allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True, sl_idx: int | None = None, num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100, explicitly_destroy: bool = False,
    ) -> EPBuffer:
        """A buffer of `num_bytes` (a multiple of 2 MiB), or of the size hint for the other settings. Collective.

        Raises NotImplementedError for a load-balancing region, which this backend lacks.
        """
        assert group is None, "the group of this backend is given by its constructor"
        if lb_allocation_plan_or_num_bytes:
            msg = "the cpu backend has no load-balancing region"
            raise NotImplementedError(msg)
        if num_bytes is None:
            num_bytes = self.EPBuffer__get_buffer_size_hint(
                group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_hybrid_mode,
                allow_multiple_reduction)
        whole = num_bytes > 0 and num_bytes % ALLOCATION_ALIGN_BYTES == 0
        assert whole, f"num_bytes must be a positive multiple of {ALLOCATION_ALIGN_BYTES}, got {num_bytes}"
        return EPBuffer(self.wire, torch.empty(num_bytes, dtype=torch.uint8), num_max_tokens_per_rank, deterministic,
                        allow_hybrid_mode, allow_multiple_reduction, explicitly_destroy)

    def EPBuffer__get_buffer_size_hint(
        self, group: Any = None, num_max_tokens_per_rank: int = 0, hidden: int = 0, num_topk: int = 0,
        use_fp8_dispatch: bool = False, allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes, a multiple of 2 MiB: the larger of what dispatch and combine may need. num_topk 0 means 32.

        FP8 rows have room for one 4-byte scale factor for every 32 elements.
        """
        assert group is None, "the group of this backend is given by its constructor"
        assert num_max_tokens_per_rank > 0, "num_max_tokens_per_rank must be positive"
        assert hidden > 0, "hidden must be positive"
        num_topk = num_topk or MAX_TOPK
        x_bytes, sf_bytes = (hidden, align(hidden, 32) // 8) if use_fp8_dispatch else (2 * hidden, 0)
        there = Shape(0, num_max_tokens_per_rank, 1, num_topk, x_bytes, sf_bytes, True, False).record.width_bytes
        back = ep_combine.record(hidden, num_topk, has_weights=True, fmt="fp32").width_bytes
        size = self.wire.size
        most_items = min(num_topk, size) if allow_multiple_reduction else num_topk
        return align(num_max_tokens_per_rank * max(size * there, most_items * back), ALLOCATION_ALIGN_BYTES)

    def EPBuffer__get_physical_domain_size(self, buffer: EPBuffer) -> tuple[int, int]:
        """(nodes, ranks a node)."""
        return buffer.physical_domain

    def EPBuffer__get_logical_domain_size(
        self, buffer: EPBuffer, allow_hybrid_mode: bool | None = None
    ) -> tuple[int, int]:
        """(scale-out, scale-up) ranks; (1, ranks) without hybrid mode."""
        hybrid = buffer.allow_hybrid_mode if allow_hybrid_mode is None else allow_hybrid_mode
        return buffer.physical_domain if hybrid else (1, buffer.wire.size)

    def EPBuffer__barrier(
        self, buffer: EPBuffer, wait_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True,
        context_idx: int | None = None,
    ) -> None:
        """No rank returns before all have entered."""
        buffer.wire.barrier()

    def EPBuffer__capture(self) -> EventHandle:
        return EventHandle()

    def EPBuffer__destroy(self, buffer: EPBuffer) -> None:
        """Frees the receive area. Collective; AssertionError without explicitly_destroy=True."""
        assert buffer.explicitly_destroy, "destroy() needs explicitly_destroy=True"
        buffer.wire.barrier()
        buffer.storage = None

    def EventOverlap__wait(self, event: EventOverlap) -> Any:
        """What `EventOverlap.wait` returns: after a deferred call its results, else None."""
        return event.wait()

    def PPBuffer(
        self, group: Any = None, num_max_tensor_bytes: int = 0, num_max_inflight_tensors: int = 0,
        sl_idx: int | None = None, num_gpu_timeout_secs: int = 100, explicitly_destroy: bool = False,
    ) -> PPBuffer:
        """A pipe to both neighbours in the ring of ranks. Collective."""
        assert group is None, "the group of this backend is given by its constructor"
        require(num_max_tensor_bytes > 0 and num_max_inflight_tensors > 0, "room for at least one tensor")
        self.pipes.append(PPBuffer(self.wire, num_max_tensor_bytes, num_max_inflight_tensors, len(self.pipes)))
        return self.pipes[-1]

    def PPBuffer__send(self, buffer: PPBuffer, x: torch.Tensor, dst_rank_idx: int, num_sms: int | None = None) -> None:
        """Sends x (any dtype, contiguous, a multiple of 32 bytes) to a neighbour. Raises RuntimeError for any other."""
        buffer.send(x, dst_rank_idx)

    def PPBuffer__recv(self, buffer: PPBuffer, x: torch.Tensor, src_rank_idx: int, num_sms: int | None = None) -> None:
        """Fills x with the oldest tensor from a neighbour, of the same bytes. Raises RuntimeError as `send` does."""
        buffer.recv(x, src_rank_idx, self.knobs)

    def EPHandle__read(self, handle: EPHandle, names: Sequence[str]) -> tuple[torch.Tensor, ...]:
        """Public attributes of a handle as tensors: a tensor as it is, a list int32 [n], a number int32 [1]."""
        values = [getattr(handle, name) for name in names]
        return tuple(
            v if isinstance(v, torch.Tensor)
            else torch.tensor(v if isinstance(v, list) else [int(v)], dtype=torch.int32)
            for v in values
        )

    def EPBuffer__dispatch(
        self, buffer: EPBuffer, x: Any, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None, num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None, expert_alignment: int | None = None, num_sms: int = 0,
        num_qps: int = 0, previous_event: Any = None, async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False, handle: EPHandle | None = None, do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None, do_expand: bool = False, do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False, defer_epilogue: bool = False,
    ) -> Any:
        """(recv_x, recv_topk_idx, recv_topk_weights, handle, EventOverlap), or the event alone if deferred.

        x: bf16 [T, H], or (e4m3 [T, H], scales [T, P] of 4-byte elements); row bytes a multiple of 32.
        topk_idx: int64 [T, K], distinct in a row, negative = not selected. topk_weights: fp32 [T, K].
        cumulative_local_expert_recv_stats: int32 [experts a rank], added to.
        recv_x is a pair where x is one. Collective; whatever one rank refuses, all raise.
        Raises AssertionError for a contradiction between arguments, RuntimeError for a bad tensor or size.
        """
        knobs, wire, cached = self.knobs, buffer.wire, handle is not None
        data, sf = x if isinstance(x, tuple) else (x, None)
        if knobs.fault == "zero_tokens_skipped" and not len(data):
            return x, topk_idx, topk_weights, handle, EventOverlap()
        refusal = place = shape = None
        try:
            check_switches(previous_event, allocate_on_comm_stream, async_with_compute_stream, defer_epilogue,
                           do_handle_copy, do_zero_padding and not do_expand)
            if handle is not None:
                if knobs.fault == "cached_needs_num_sms" and not num_sms:
                    raise TypeError("num_sms must be an integer")
                assert topk_idx is None, "a cached dispatch takes topk_idx from its handle"
                assert not do_cpu_sync, "a cached dispatch has nothing to wait for"
                assert cumulative_local_expert_recv_stats is None, "a cached dispatch counts nothing"
                for given, kept in ((num_experts, handle.num_experts), (expert_alignment, handle.expert_alignment),
                                    (num_max_tokens_per_rank, handle.num_max_tokens_per_rank)):
                    assert given in (None, kept), f"the handle has {kept}, the call {given}"
                assert handle.do_expand or not do_expand, "the handle is of the normal layout"
                topk_idx, num_experts, do_expand = handle.topk_idx, handle.num_experts, handle.do_expand
                num_max_tokens_per_rank, expert_alignment = handle.num_max_tokens_per_rank, handle.expert_alignment
            assert topk_idx is not None, "topk_idx or a handle"
            assert num_experts is not None, "num_experts or a handle"
            shape = shape_of(
                data, sf, topk_idx, topk_weights, wire.size, num_experts, do_expand,
                buffer.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank,
                1 if expert_alignment is None else expert_alignment)
            if knobs.fault == "zero_tokens_rejected":
                require(len(data) > 0, "no tokens")
            if knobs.fault == "max_tokens_exclusive":
                require(len(data) < shape.num_max_tokens_per_rank, "too many tokens")
            place = handle.place if handle else ep_dispatch.route(topk_idx, num_experts, wire.size, knobs)
            # Asked for here, so that a buffer too small is refused before any row travels.
            buffer.stage(0, shape.record.width_bytes, wire.size * shape.num_max_tokens_per_rank)
        except Exception as e:  # whatever it is, the peers must not wait for this rank
            refusal = e
        agreed = vars(shape) if shape else dict.fromkeys(Shape.__annotations__, 0)
        facts = {"op": _DISPATCH, "cached": cached, **agreed}
        counts = wire.agree(facts, [len(s) for s in place.sent] if place else [], refusal)

        options = handle.options if handle else Options(
            do_cpu_sync is not False, do_zero_padding, use_tma_aligned_col_major_sf, buffer.deterministic)
        if cached:
            options = replace(options, zero_padding=do_zero_padding, col_major_sf=use_tma_aligned_col_major_sf)
        arrived = buffer.stage(int(counts[:, wire.rank].sum()), shape.record.width_bytes, 0)
        wire.exchange(ep_dispatch.pack(place, shape, wire.rank, data, sf, topk_weights, knobs), counts, arrived,
                      knobs.tile_m)
        if not cached:
            place.counts = counts
            handle = EPHandle(shape, place, options, topk_idx, num_sms)

        def epilogue() -> tuple[Any, ...]:
            if not cached:
                ep_dispatch.place_rows(place, arrived, shape, options, wire, buffer.logical_domain[1], knobs)
                handle.complete(wire)
            elif knobs.fault == "cached_reorders":
                place.arrival = place.arrival.flip(0)
            got = ep_dispatch.copy_out(place, arrived, shape, options, wire,
                                       (data.dtype, torch.int32 if sf is None else sf.dtype), knobs)
            if knobs.fault == "cached_stale_payload":
                place.first_payload = place.first_payload if cached else got.x.clone()
                got.x.copy_(place.first_payload)
            if knobs.fault == "replay_clobbers_handle" and cached:
                handle.psum_num_recv_tokens_per_expert.zero_()
            stats = cumulative_local_expert_recv_stats
            if stats is not None and knobs.fault == "stats_overwritten":
                stats.copy_(place.counted[EXPERT_COUNT])
            elif stats is not None:
                stats += place.counted[EXPERT_COUNT]
            return (got.x if sf is None else (got.x, got.sf)), got.topk_idx, got.topk_weights, handle

        return _returned(epilogue, async_with_compute_stream, defer_epilogue)

    def EPBuffer__combine(
        self, buffer: EPBuffer, x: torch.Tensor, handle: EPHandle, topk_weights: torch.Tensor | None = None,
        bias: Any = None, num_sms: int = 0, num_qps: int = 0, previous_event: Any = None,
        async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False, defer_epilogue: bool = False,
    ) -> Any:
        """(combined_x, combined_topk_weights, EventOverlap), or the event alone if deferred.

        x: bf16 [rows as dispatch laid them, H], H a multiple of 256. bias: None, or one or two bf16 [T, H]
        as a tensor or a tuple. topk_weights: fp32 [rows, K] (normal) or [rows] (expanded), carried home only.
        combined_x: bf16 [T, H], the unweighted sum of a token's rows and the bias, in the caller's token order.
        combined_topk_weights: fp32 [T, K], 0 where the id is negative, or None. Collective.
        Raises AssertionError or RuntimeError, on all ranks, for what the contract excludes.
        """
        knobs, wire = self.knobs, buffer.wire
        place, expanded = handle.place, handle.do_expand
        split = expanded and not buffer.allow_multiple_reduction
        fmt = knobs.partial if expanded and not split else "bf16"
        refusal, tables, ids, rec, biases = None, [], None, None, []
        try:
            check_switches(previous_event, allocate_on_comm_stream, async_with_compute_stream, defer_epilogue)
            ids, biases = handle.topk_idx, biases_of(bias)
            check_combine(x, ids, topk_weights, biases, rows=place.rows, expanded=expanded, split=split)
            if knobs.fault == "empty_combine_rejected":
                require(len(ids) > 0, "empty output")
            items = ep_combine.items_to_send(
                place, x, topk_weights, wire.size, handle.num_max_tokens_per_rank,
                expanded=expanded, multiple_reduction=not split, knobs=knobs)
            rec = ep_combine.record(x.shape[1], ids.shape[1], has_weights=topk_weights is not None, fmt=fmt)
            tables = ep_combine.pack(items, rec, wire.size)
            most_items = ids.shape[1] if split else min(ids.shape[1], wire.size)
            buffer.stage(0, rec.width_bytes, handle.num_max_tokens_per_rank * most_items)
        except Exception as e:
            refusal = e
        facts = {"op": _COMBINE, "width_bytes": rec.width_bytes if rec else 0, "expanded": expanded, "split": split}
        counts = wire.agree(facts, [len(t) for t in tables], refusal)
        per_owner = counts[:, wire.rank].tolist()
        arrived = buffer.stage(sum(per_owner), rec.width_bytes, 0)
        wire.exchange(tables, counts, arrived, knobs.tile_m)

        num_local = handle.num_experts // wire.size
        owner = torch.where(ids < 0, -1, torch.div(ids, num_local, rounding_mode="floor"))
        num_scaleout, num_scaleup = buffer.logical_domain
        staged = num_scaleout > 1 and buffer.allow_multiple_reduction
        domain = torch.div(owner, num_scaleup, rounding_mode="floor") if staged else None

        def epilogue() -> tuple[Any, ...]:
            return ep_combine.reduce_home(arrived, per_owner, rec, fmt, owner, domain, biases, x.shape[1], wire.rank,
                                          knobs)

        return _returned(epilogue, async_with_compute_stream, defer_epilogue)


_DISPATCH, _COMBINE = 1, 2


def _returned(epilogue: Callable[[], tuple[Any, ...]], is_async: bool, deferred: bool) -> Any:
    if deferred:
        return EventOverlap(EventHandle(), epilogue)
    return (*epilogue(), EventOverlap(EventHandle() if is_async else None))


