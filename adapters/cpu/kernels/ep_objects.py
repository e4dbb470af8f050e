"""The objects that expert-parallel calls hand out and take back; they never leave the process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from adapters.cpu.kernels.ep_checks import require
from adapters.cpu.kernels.ep_dispatch import EXPERT_COUNT, EXPERT_PSUM, SCALEUP_PSUM, Options, Placement, Shape
from adapters.cpu.kernels.exchange import Wire, align


class EventHandle:
    """A point on the current stream; on the CPU everything before it is done."""

    def current_stream_wait(self) -> None:
        """Returns at once."""


class EventOverlap:
    """What an asynchronous call returns. `finish`, if given, runs at the first wait, whose value it becomes."""

    def __init__(self, event: EventHandle | None = None, finish: Callable[[], Any] | None = None) -> None:
        self.event, self._finish = event, finish

    def wait(self) -> Any:
        """The value of the hook at the first wait, None later. AssertionError after a synchronous call."""
        assert self.event is not None, "a synchronous call leaves nothing to wait for"
        # Taken out before it runs, so that a hook that waits or raises runs once.
        finish, self._finish = self._finish, None
        return finish() if finish else None


class EPHandle:
    """What combine and a cached dispatch need; public attributes as DeepEP documents them."""

    def __init__(self, shape: Shape, place: Placement, options: Options, topk_idx: torch.Tensor, num_sms: int) -> None:
        self.shape, self.place, self.options = shape, place, options
        self.do_expand, self.num_experts = shape.do_expand, shape.num_experts
        self.expert_alignment, self.num_max_tokens_per_rank = shape.expert_alignment, shape.num_max_tokens_per_rank
        self.num_sms = align(num_sms, 2)
        self._topk_idx, self._version = topk_idx, topk_idx._version

    @property
    def topk_idx(self) -> torch.Tensor:
        """The caller's own tensor. AssertionError if it was modified since dispatch."""
        assert self._topk_idx._version == self._version, "topk_idx was modified since dispatch"
        return self._topk_idx

    def complete(self, wire: Wire) -> None:
        """Fill in what the receiving side decided."""
        place = self.place
        capacity = wire.size * self.num_max_tokens_per_rank
        self.num_recv_tokens = len(place.source) if self.options.sync else capacity
        self.num_expanded_tokens = place.rows if self.do_expand else 0
        self.num_recv_tokens_per_expert_list = place.aligned
        self.psum_num_recv_tokens_per_scaleup_rank = place.counted[SCALEUP_PSUM]
        self.psum_num_recv_tokens_per_expert = place.counted[EXPERT_PSUM]
        self.num_unaligned_recv_tokens_per_expert = place.counted[EXPERT_COUNT]
        lanes = place.slots if self.do_expand else torch.full_like(place.local_ids, -1)
        self.recv_src_metadata = torch.cat([place.source[:, None], place.arrival[:, None], lanes], 1).int()


@dataclass
class EPBuffer:
    """The receive area of one rank, and the settings of its constructor."""

    wire: Wire
    storage: torch.Tensor | None
    num_max_tokens_per_rank: int
    deterministic: bool
    allow_hybrid_mode: bool
    allow_multiple_reduction: bool
    explicitly_destroy: bool

    @property
    def physical_domain(self) -> tuple[int, int]:
        nodes = self.wire.nodes
        num_nodes = len(set(nodes))
        per_node = self.wire.size // num_nodes
        assert nodes == [nodes[r // per_node * per_node] for r in range(len(nodes))], "nodes need equal blocks of ranks"
        return num_nodes, per_node

    @property
    def logical_domain(self) -> tuple[int, int]:
        return self.physical_domain if self.allow_hybrid_mode else (1, self.wire.size)

    def stage(self, rows: int, width_bytes: int, worst_rows: int) -> torch.Tensor:
        """uint8 [rows, width_bytes] of the receive area. RuntimeError if the worst case does not fit."""
        assert self.storage is not None, "the buffer was destroyed"
        need = max(rows, worst_rows) * width_bytes
        require(need <= len(self.storage), f"this call may need {need} bytes, the buffer has {len(self.storage)}")
        return self.storage[:rows * width_bytes].view(rows, width_bytes)
