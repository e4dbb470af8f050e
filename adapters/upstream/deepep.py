"""DeepEP (`deep_ep`) 2.5: its public calls. Also DeepEP-Ascend, which has the same interface.

A method of an object takes that object first. A process group can't be named in a plain call, so `group` is the
backend's own: torch.distributed over NCCL or HCCL.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from adapters.upstream.base import UpstreamAdapter, given
from adapters.upstream.release import Refused, parameters, stated_version


class Adapter(UpstreamAdapter):
    """A method an op; `EPBuffer__dispatch(buffer, ...)` is `buffer.dispatch(...)`."""

    module, package = "deepep", "deep_ep"

    def __init__(self, backend: Any) -> None:
        self._group: Any = None
        self.pipes: list[Any] = []
        """all that were made: one that a rank lets go may take a send along that its peer has yet to receive"""
        super().__init__(backend)

    # Buffers

    def EPBuffer(self, group: Any = None, num_bytes: int | None = None, num_max_tokens_per_rank: int | None = None,
                 hidden: int | None = None, num_topk: int | None = None, use_fp8_dispatch: bool | None = None,
                 lb_allocation_plan_or_num_bytes: Any = None, deterministic: bool | None = None,
                 allow_hybrid_mode: bool | None = None, allow_multiple_reduction: bool | None = None,
                 prefer_overlap_with_compute: bool | None = None, sl_idx: int | None = None,
                 num_allocated_qps: int | None = None, num_cpu_timeout_secs: int | None = None,
                 num_gpu_timeout_secs: int | None = None, explicitly_destroy: bool | None = None) -> Any:
        return self.lib.EPBuffer(
            group or self.group(),
            **given(num_bytes=num_bytes, num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden,
                    num_topk=num_topk, use_fp8_dispatch=use_fp8_dispatch,
                    lb_allocation_plan_or_num_bytes=lb_allocation_plan_or_num_bytes, deterministic=deterministic,
                    allow_hybrid_mode=allow_hybrid_mode, allow_multiple_reduction=allow_multiple_reduction,
                    prefer_overlap_with_compute=prefer_overlap_with_compute, sl_idx=sl_idx,
                    num_allocated_qps=num_allocated_qps, num_cpu_timeout_secs=num_cpu_timeout_secs or self.limit_s,
                    num_gpu_timeout_secs=num_gpu_timeout_secs or self.limit_s, explicitly_destroy=explicitly_destroy))

    def PPBuffer(self, group: Any = None, num_max_tensor_bytes: int = 0, num_max_inflight_tensors: int = 0,
                 sl_idx: int | None = None, num_gpu_timeout_secs: int | None = None,
                 explicitly_destroy: bool | None = None) -> Any:
        self.pipes.append(self.lib.PPBuffer(
            group or self.group(), num_max_tensor_bytes, num_max_inflight_tensors,
            **given(sl_idx=sl_idx, num_gpu_timeout_secs=num_gpu_timeout_secs or self.limit_s,
                    explicitly_destroy=explicitly_destroy)))
        return self.pipes[-1]

    # Dispatch and combine

    def EPBuffer__dispatch(
        self, buffer: Any, x: Any, topk_idx: Any = None, topk_weights: Any = None,
        cumulative_local_expert_recv_stats: Any = None, num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None, expert_alignment: int | None = None, num_sms: int | None = None,
        num_qps: int | None = None, previous_event: Any = None, async_with_compute_stream: bool | None = None,
        allocate_on_comm_stream: bool | None = None, handle: Any = None, do_handle_copy: bool | None = None,
        do_cpu_sync: bool | None = None, do_expand: bool | None = None, do_zero_padding: bool | None = None,
        use_tma_aligned_col_major_sf: bool | None = None, defer_epilogue: bool | None = None,
    ) -> Any:
        return buffer.dispatch(
            x, **given(topk_idx=topk_idx, topk_weights=topk_weights,
                       cumulative_local_expert_recv_stats=cumulative_local_expert_recv_stats, num_experts=num_experts,
                       num_max_tokens_per_rank=num_max_tokens_per_rank, expert_alignment=expert_alignment,
                       num_sms=num_sms, num_qps=num_qps, previous_event=previous_event,
                       async_with_compute_stream=async_with_compute_stream,
                       allocate_on_comm_stream=allocate_on_comm_stream, handle=handle, do_handle_copy=do_handle_copy,
                       do_cpu_sync=do_cpu_sync, do_expand=do_expand, do_zero_padding=do_zero_padding,
                       use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf, defer_epilogue=defer_epilogue))

    def EPBuffer__combine(
        self, buffer: Any, x: Any, handle: Any, topk_weights: Any = None, bias: Any = None, num_sms: int | None = None,
        num_qps: int | None = None, previous_event: Any = None, async_with_compute_stream: bool | None = None,
        allocate_on_comm_stream: bool | None = None, defer_epilogue: bool | None = None,
    ) -> Any:
        return buffer.combine(
            x, handle, **given(topk_weights=topk_weights, bias=bias, num_sms=num_sms, num_qps=num_qps,
                               previous_event=previous_event, async_with_compute_stream=async_with_compute_stream,
                               allocate_on_comm_stream=allocate_on_comm_stream, defer_epilogue=defer_epilogue))

    def EventOverlap__wait(self, event: Any) -> Any:
        return event.wait()

    def EPHandle__read(self, handle: Any, names: Sequence[str]) -> tuple[Any, ...]:
        """Public attributes of a handle as tensors: a tensor as it is, a list int32 [n], a number int32 [1]."""
        torch = self.backend.torch
        values = [getattr(handle, name) for name in names]
        return tuple(v if isinstance(v, torch.Tensor) else
                     torch.tensor(v if isinstance(v, list) else [int(v)], dtype=torch.int32,
                                  device=self.backend.torch_device) for v in values)

    # The pipe

    def PPBuffer__send(self, buffer: Any, x: Any, dst_rank_idx: int, num_sms: int | None = None) -> None:
        buffer.send(x, dst_rank_idx, **given(num_sms=num_sms))

    def PPBuffer__recv(self, buffer: Any, x: Any, src_rank_idx: int, num_sms: int | None = None) -> None:
        buffer.recv(x, src_rank_idx, **given(num_sms=num_sms))

    # What it is

    @property
    def limit_s(self) -> int | None:
        """Whole seconds that a rank waits for its peers: less than the call has, so that it ends by itself."""
        group = self.backend.group
        return max(1, int(group.timeout_s / 2)) if group else None

    def group(self) -> Any:
        """The process group of all ranks; made at the first call. Collective."""
        if self._group is None:
            dist, g, collective = self.backend.torch.distributed, self.backend.group, self.backend.collective
            if g is None:
                msg = "a buffer needs a group of ranks; this backend was made for one process alone"
                raise ValueError(msg)
            if collective == "gloo":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            if not dist.is_initialized():
                store = dist.PrefixStore(f"attempt{g.attempt}", dist.FileStore(g.rendezvous, g.size))
                where = {"device_id": self.backend.torch_device} if collective == "nccl" else {}
                dist.init_process_group(collective, store=store, rank=g.rank, world_size=g.size,
                                        timeout=timedelta(seconds=g.timeout_s), **where)
            self._group = dist.new_group(list(range(g.size)))
        return self._group

    def recognised(self) -> str:
        lib = self.lib
        if not hasattr(lib, "EPBuffer"):
            if hasattr(lib, "ElasticBuffer"):
                return "2"
            if hasattr(lib, "Buffer"):
                return "1"
            raise self.cannot_tell("it has none of EPBuffer, ElasticBuffer and Buffer")
        takes = parameters(lib.EPBuffer.dispatch) or ()
        if "defer_epilogue" not in takes or "previous_event_before_epilogue" in takes:
            raise self.cannot_tell("EPBuffer.dispatch takes no defer_epilogue, or an argument of version 2")
        ids = getattr(lib, "topk_idx_t", self.backend.torch.int64)
        if ids != self.backend.torch.int64:
            raise Refused(f"deep_ep {stated_version(lib)} was built for expert ids of {ids}: build it without "
                          "EP_NUM_TOPK_IDX_BITS, for int64 is the public dtype")
        return "2.5"
