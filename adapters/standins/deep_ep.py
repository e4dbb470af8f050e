"""Contract of `deep_ep` 2.5.0 and of its Ascend port. Sections are those of dossiers/deepep.md."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from adapters.cpu import deepep
from adapters.cpu.kernels.exchange import Wire
from adapters.standins.checks import asserts, host
from adapters.standins.device import pending, shadow
from adapters.standins.ep_objects import EPHandle, new_classes

DEFECTS = {"cached_needs_num_sms": "a cached dispatch without num_sms raises TypeError on CUDA (6.19)"}

ALLOCATION_BYTES, RDMA_BYTES, TMA_BYTES = 2**21, 64, 32
MAX_TOPK, MAX_EXPERTS, MAX_LOCAL_EXPERTS, MAX_RANKS = 32, 2048, 512, 1024
HIDDEN_MULTIPLE = 256


class GroupWire(Wire):
    """The ranks of a process group that the caller has made."""

    def __init__(self, group: Any) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.nodes = [0] * self.size


class Kernel(deepep.Adapter):
    """The cpu kernels on a wire that is given."""

    def __init__(self, rig: Any, wire: Wire) -> None:
        super().__init__(rig.host)
        self._wire = wire

    @property
    def wire(self) -> Wire:
        return self._wire


class Package:
    """A method a public function; methods of classes take the object first."""

    def __init__(self, rig: Any) -> None:
        self.rig, self.ascend = rig, rig.arch.is_ascend
        self.classes = new_classes(rig)
        self.values = {"topk_idx_t": torch.int64}
        self._kernels: dict[Any, Kernel] = {}

    def get_num_allocation_alignment(self) -> int:
        return ALLOCATION_BYTES

    def get_num_rdma_alignment(self) -> int:
        return RDMA_BYTES

    def get_num_tma_alignment(self) -> int:
        return TMA_BYTES

    def _kernel(self, group: Any) -> Kernel:
        """One a process group; AttributeError for what is no group, as in the real constructor."""
        size = group.size()
        host(size <= MAX_RANKS, f"{size} ranks")
        host(not self.ascend or size == 1 or size % 2 == 0, f"{size} ranks: an even number on Ascend")
        if group not in self._kernels:
            self._kernels[group] = Kernel(self.rig, GroupWire(group))
        return self._kernels[group]

    # 2.4

    def EPBuffer(
        self, group: Any, num_bytes: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int,
        use_fp8_dispatch: bool, lb_allocation_plan_or_num_bytes: Any, deterministic: bool, allow_hybrid_mode: bool,
        allow_multiple_reduction: bool, prefer_overlap_with_compute: bool, sl_idx: Any, num_allocated_qps: int,
        num_cpu_timeout_secs: int, num_gpu_timeout_secs: int, explicitly_destroy: bool,
    ) -> dict[str, Any]:
        kernel = self._kernel(group)
        if self.ascend:
            host(allow_multiple_reduction, "allow_multiple_reduction must be True on Ascend")
            host(sl_idx is None and num_allocated_qps == 0, "sl_idx and queue pairs must be left alone on Ascend")
        if lb_allocation_plan_or_num_bytes:
            msg = "the load-balancing region is not stood in for"
            raise NotImplementedError(msg)
        if num_bytes is None:
            asserts(num_max_tokens_per_rank > 0 and hidden > 0, "num_bytes, or the settings of the model")
        else:
            asserts(num_bytes > 0 and num_bytes % ALLOCATION_BYTES == 0, f"num_bytes {num_bytes}")
        inner = kernel.EPBuffer(
            None, num_bytes, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, 0, deterministic,
            allow_hybrid_mode, allow_multiple_reduction, explicitly_destroy=explicitly_destroy)
        return {"group": group, "_kernel": kernel, "_inner": inner, "explicitly_destroy": explicitly_destroy,
                "num_max_tokens_per_rank": num_max_tokens_per_rank, "main_context": object()}

    def EPBuffer__get_buffer_size_hint(
        self, group: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int, use_fp8_dispatch: bool,
        allow_hybrid_mode: bool, allow_multiple_reduction: bool,
    ) -> int:
        return self._kernel(group).EPBuffer__get_buffer_size_hint(
            None, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_hybrid_mode,
            allow_multiple_reduction)

    def EPBuffer__get_theoretical_num_sms(self, buffer: Any, num_experts: int, num_topk: int, **unused: Any) -> int:
        return 24

    def EPBuffer__barrier(self, buffer: Any, **unused: Any) -> None:
        self._alive(buffer)
        buffer._kernel.wire.barrier()

    def EPBuffer__get_physical_domain_size(self, buffer: Any) -> tuple[int, int]:
        return 1, buffer.group.size()

    def EPBuffer__get_logical_domain_size(self, buffer: Any, allow_hybrid_mode: Any) -> tuple[int, int]:
        return 1, buffer.group.size()

    def EPBuffer__capture(self) -> Any:
        return self.classes["EventHandle"]()

    def EPBuffer__destroy(self, buffer: Any) -> None:
        asserts(buffer.explicitly_destroy, "destroy() needs explicitly_destroy=True")
        buffer._kernel.wire.barrier()
        buffer.main_context = buffer._inner.storage = None

    def EPBuffer__dispatch(self, buffer: Any, **call: Any) -> Any:
        a = SimpleNamespace(**call)
        data, sf = a.x if isinstance(a.x, tuple) else (a.x, None)
        with self._agreed(buffer, "dispatch") as agreed:
            agreed.check(self._check_dispatch, buffer, a, data, sf)
        stats, own_stats = a.cumulative_local_expert_recv_stats, None
        if stats is not None:
            own_stats = shadow(stats)
        deferred = a.defer_epilogue
        result = buffer._kernel.EPBuffer__dispatch(
            buffer._inner, a.x, a.topk_idx, a.topk_weights, own_stats, a.num_experts, a.num_max_tokens_per_rank,
            a.expert_alignment, a.num_sms, handle=a.handle.inner if a.handle else None, do_cpu_sync=a.do_cpu_sync,
            do_expand=a.do_expand, do_zero_padding=a.do_zero_padding, async_with_compute_stream=deferred,
            use_tma_aligned_col_major_sf=a.use_tma_aligned_col_major_sf, defer_epilogue=deferred)

        def finish(x: Any, ids: Any, weights: Any, inner: Any) -> tuple[list[Any], Any]:
            handle = a.handle if a.handle else EPHandle(inner, buffer)
            extra = [] if own_stats is None else [(stats, own_stats)]
            return extra, (x, ids, weights, handle)

        return self._returned(result, finish, a)

    def EPBuffer__combine(self, buffer: Any, **call: Any) -> Any:
        a = SimpleNamespace(**call)
        with self._agreed(buffer, "combine") as agreed:
            agreed.check(self._check_combine, buffer, a)
        deferred = a.defer_epilogue
        result = buffer._kernel.EPBuffer__combine(
            buffer._inner, a.x, a.handle.inner, a.topk_weights, a.bias, a.num_sms,
            async_with_compute_stream=deferred, defer_epilogue=deferred)
        return self._returned(result, lambda x, weights: ([], (x, weights)), a)

    def _returned(self, result: Any, finish: Any, a: Any) -> Any:
        """Results at once, at the event's wait, or made by the event's wait."""
        device, overlap = self.rig.device, self.classes["EventOverlap"]
        if a.defer_epilogue:
            def hook() -> Any:
                extra, values = finish(*result.wait())
                seen, pairs = _late(values)
                device.launch([*pairs, *extra])
                return seen

            return overlap._make(event=object(), hook=hook)
        extra, values = finish(*result[:-1])
        seen, pairs = _late(values)
        if a.async_with_compute_stream:
            work = device.launch_apart([*pairs, *extra])
            return (*seen, overlap._make(event=object(), work=work))
        device.launch([*pairs, *extra])
        return (*seen, overlap._make(event=None))

    def _agreed(self, buffer: Any, what: str) -> Any:
        """A refusal of one rank is told to all before it is raised: else its peers would wait for their time limit."""
        self._alive(buffer)
        return _Agreement(buffer._kernel.wire)

    def _alive(self, buffer: Any) -> None:
        asserts(buffer.main_context is not None, "the buffer was destroyed")

    def _switches(self, a: Any) -> None:
        asserts(a.previous_event is None or a.allocate_on_comm_stream, "previous_event needs allocate_on_comm_stream")
        asserts(not a.defer_epilogue or a.async_with_compute_stream, "defer_epilogue needs async_with_compute_stream")
        host(not self.ascend or a.num_qps == 0, "num_qps must be left alone on Ascend")
        for name in ("num_sms", "num_qps"):
            if not isinstance(getattr(a, name), int):
                msg = f"{name} must be an integer, got {getattr(a, name)!r}"
                raise TypeError(msg)

    def _check_dispatch(self, buffer: Any, a: Any, data: Any, sf: Any) -> None:
        self._switches(a)
        asserts(not a.do_handle_copy, "do_handle_copy must be False")
        asserts(not a.do_zero_padding or a.do_expand, "do_zero_padding needs do_expand")
        host(a.do_expand or not self.ascend, "only do_expand=True is supported on Ascend")
        ids, handle = a.topk_idx, a.handle
        if handle is not None:
            if "cached_needs_num_sms" in self.rig.defects and not self.ascend and not a.num_sms:
                msg = "unsupported operand type(s): num_sms is not known"
                raise TypeError(msg)
            asserts(isinstance(handle, EPHandle), "handle must come from dispatch")
            asserts(handle.buffer is buffer, "the handle belongs to another buffer")
            asserts(ids is None, "topk_idx must be None with a handle")
            asserts(not a.do_cpu_sync, "do_cpu_sync must be None or False with a handle")
            asserts(a.cumulative_local_expert_recv_stats is None, "no statistics with a handle")
            for name in ("num_experts", "num_max_tokens_per_rank", "expert_alignment"):
                asserts(getattr(a, name) in (None, getattr(handle, name)), f"{name} differs from the handle's")
            asserts(handle.do_expand == a.do_expand, "do_expand differs from the handle's")
            ids = handle.topk_idx
        else:
            asserts(ids is not None, "topk_idx or a handle")
            asserts(a.num_experts is not None, "num_experts or a handle")
        host(isinstance(data, torch.Tensor) and data.dim() == 2 and data.is_contiguous(), "x: contiguous matrix")
        row_bytes = data.shape[1] * data.element_size()
        host(row_bytes % TMA_BYTES == 0, f"rows of {row_bytes} bytes")
        host(ids.dtype == torch.int64 and ids.dim() == 2 and ids.is_contiguous(), "topk_idx: contiguous int64 [T, K]")
        host(ids.shape[0] == data.shape[0], f"{ids.shape[0]} rows of ids, {data.shape[0]} tokens")
        host(0 < ids.shape[1] <= MAX_TOPK, f"top-k {ids.shape[1]}")
        size = buffer.group.size()
        experts = handle.num_experts if handle else a.num_experts
        host(0 < experts <= MAX_EXPERTS and experts % size == 0, f"{experts} experts on {size} ranks")
        host(experts // size <= MAX_LOCAL_EXPERTS, f"{experts // size} experts a rank")
        most = a.num_max_tokens_per_rank or (handle or buffer).num_max_tokens_per_rank
        host(data.shape[0] <= most, f"{data.shape[0]} tokens, at most {most} declared")
        if a.topk_weights is not None:
            w = a.topk_weights
            host(w.dtype == torch.float32 and w.is_contiguous() and w.shape == ids.shape, "topk_weights: fp32 [T, K]")
        if a.cumulative_local_expert_recv_stats is not None:
            stats = a.cumulative_local_expert_recv_stats
            host(stats.dtype == torch.int32 and tuple(stats.shape) == (experts // size,), "statistics: int32 [L]")
        if sf is not None:
            host(data.dtype == torch.float8_e4m3fn, "scales beside FP8 only")
            host(sf.element_size() == 4 and sf.dim() == 2 and sf.shape[0] == data.shape[0], "scales: [T, P], 4 bytes")

    def _check_combine(self, buffer: Any, a: Any) -> None:
        self._switches(a)
        asserts(isinstance(a.handle, EPHandle), "handle must come from dispatch")
        asserts(a.handle.buffer is buffer, "the handle belongs to another buffer")
        ids, x = a.handle.topk_idx, a.x
        host(isinstance(x, torch.Tensor) and x.dim() == 2 and x.dtype == torch.bfloat16, "x: bf16 matrix")
        host(x.is_contiguous(), "x must be contiguous")
        host(x.shape[1] % HIDDEN_MULTIPLE == 0, f"hidden {x.shape[1]} is no multiple of {HIDDEN_MULTIPLE}")
        rows = a.handle.num_recv_tokens
        host(a.handle.do_expand or x.shape[0] == rows, f"{x.shape[0]} rows, dispatch returned {rows}")
        biases = a.bias if isinstance(a.bias, tuple) else (a.bias,) if isinstance(a.bias, torch.Tensor) else ()
        host(len(biases) <= 2, f"{len(biases)} biases")
        for b in biases:
            host(b.dtype == torch.bfloat16 and tuple(b.shape) == (ids.shape[0], x.shape[1]), "bias: bf16 [T, H]")
        if a.topk_weights is not None:
            wanted = (x.shape[0],) if a.handle.do_expand else (x.shape[0], ids.shape[1])
            host(a.topk_weights.dtype == torch.float32 and tuple(a.topk_weights.shape) == wanted, "topk_weights")

    # 2.3

    def EventOverlap(self, event: Any, extra_tensors: Any) -> dict[str, Any]:
        return {"event": event, "hook": None, "work": None}

    def EventOverlap__wait(self, event: Any) -> Any:
        return event._waited()

    def EventOverlap__current_stream_wait(self, event: Any, release_handle: bool) -> Any:
        return event._waited()

    def EventOverlap__register_hook_after_wait(self, event: Any, hook_after_wait: Any) -> None:
        asserts(event.hook is None, "a hook is registered already")
        event.hook = hook_after_wait

    # 2.6

    def PPBuffer(
        self, group: Any, num_max_tensor_bytes: int, num_max_inflight_tensors: int, sl_idx: Any,
        num_gpu_timeout_secs: int, explicitly_destroy: bool,
    ) -> dict[str, Any]:
        host(num_max_tensor_bytes > 0 and num_max_inflight_tensors > 0, "room for at least one tensor")
        host(not self.ascend or sl_idx is None, "sl_idx must be left alone on Ascend")
        kernel = self._kernel(group)
        inner = kernel.PPBuffer(None, num_max_tensor_bytes, num_max_inflight_tensors)
        return {"group": group, "_kernel": kernel, "_inner": inner, "max_bytes": num_max_tensor_bytes,
                "explicitly_destroy": explicitly_destroy, "main_context": object()}

    def PPBuffer__send(self, buffer: Any, x: Any, dst_rank_idx: int, num_sms: Any) -> None:
        self._check_pipe(buffer, x, dst_rank_idx)
        buffer._kernel.PPBuffer__send(buffer._inner, x, dst_rank_idx)

    def PPBuffer__recv(self, buffer: Any, x: Any, src_rank_idx: int, num_sms: Any) -> None:
        self._check_pipe(buffer, x, src_rank_idx)
        # Not a shadow: the kernel asks for an address that is a multiple of 32.
        raw = torch.empty(x.numel() * x.element_size() + TMA_BYTES, dtype=torch.uint8)
        own = raw[-raw.data_ptr() % TMA_BYTES:][:x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        buffer._kernel.PPBuffer__recv(buffer._inner, own, src_rank_idx)
        self.rig.device.launch([(x, own)])

    def PPBuffer__destroy(self, buffer: Any) -> None:
        asserts(buffer.explicitly_destroy, "destroy() needs explicitly_destroy=True")
        buffer._kernel.wire.barrier()
        buffer.main_context = None

    def _check_pipe(self, buffer: Any, x: Any, peer: Any) -> None:
        self._alive(buffer)
        if isinstance(peer, bool) or not isinstance(peer, int):
            msg = f"a rank must be an integer, got {peer!r}"
            raise TypeError(msg)
        nbytes = x.numel() * x.element_size()
        host(x.is_contiguous(), "x must be contiguous")
        host(0 < nbytes <= buffer.max_bytes, f"{nbytes} bytes, room for {buffer.max_bytes}")
        host(nbytes % TMA_BYTES == 0 and x.data_ptr() % TMA_BYTES == 0, f"x must be aligned to {TMA_BYTES} bytes")
        size, rank = buffer.group.size(), buffer.group.rank()
        host((peer - rank) % size in (1, size - 1), f"rank {peer} is no neighbour of {rank}")


class _Agreement:
    """Checks of one rank, told to the others."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.refusal = wire, None

    def __enter__(self) -> _Agreement:
        return self

    def check(self, f: Any, *args: Any) -> None:
        try:
            f(*args)
        except Exception as e:
            self.refusal = e

    def __exit__(self, *_: Any) -> None:
        self.wire.agree({}, [0] * self.wire.size, self.refusal)


def _late(value: Any) -> tuple[Any, list[Any]]:
    """The value with every tensor replaced by one that is still to be written."""
    if isinstance(value, tuple):
        parts = [_late(v) for v in value]
        return tuple(seen for seen, _ in parts), [p for _, pairs in parts for p in pairs]
    if isinstance(value, torch.Tensor):
        pair = pending(value)
        return pair[0], [pair]
    return value, []
