"""A ring of ranks that hand tensors on: a send waits only where as many are under way as the buffer allows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from adapters.cpu.kernels.ep_checks import TMA_ALIGN_BYTES, require
from adapters.cpu.kernels.exchange import Wire
from adapters.cpu.kernels.knobs import Knobs

FAULTS = {
    "pipe_reorders": "of two tensors under way the later one is received first",
    "pipe_short": "the last 32 bytes of a tensor are not received",
}
"""Values of `Knobs.fault` that act on a received tensor."""


@dataclass
class PPBuffer:
    """What one rank knows of its pipe: limits, sends that no peer may have taken yet."""

    wire: Wire
    max_bytes: int
    max_inflight: int
    tag: int
    """of its messages, the same on all ranks: what an earlier buffer left under way is none of this one's"""
    sent: deque[tuple[Any, torch.Tensor]] = field(default_factory=deque)
    early: dict[int, torch.Tensor] = field(default_factory=dict)
    """a tensor that the fault `pipe_reorders` has overtaken, by source"""

    def check(self, x: torch.Tensor, peer: int) -> None:
        """RuntimeError for what the contract excludes, before anything travels."""
        n = x.numel() * x.element_size()
        require(x.is_contiguous(), "x must be contiguous")
        require(x.data_ptr() % TMA_ALIGN_BYTES == 0 and n % TMA_ALIGN_BYTES == 0, "x must be aligned to 32 bytes")
        require(0 < n <= self.max_bytes, f"x has {n} bytes, of 1 to {self.max_bytes}")
        require((peer - self.wire.rank) % self.wire.size in (1, self.wire.size - 1), f"rank {peer} is no neighbour")

    def send(self, x: torch.Tensor, to: int) -> None:
        """Returns when the bytes are copied; waits while as many as allowed are under way."""
        self.check(x, to)
        while len(self.sent) >= self.max_inflight:
            self.sent.popleft()[0].wait()
        copy = _bytes(x).clone()
        self.sent.append((dist.isend(copy, to, tag=self.tag), copy))

    def recv(self, x: torch.Tensor, source: int, knobs: Knobs) -> None:
        """Fills x with the oldest tensor that `source` sent and that was not received yet."""
        self.check(x, source)
        got = self.early.pop(source, None)
        if got is None:
            got = torch.empty_like(_bytes(x))
            dist.recv(got, source, tag=self.tag)
            if knobs.fault == "pipe_reorders" and self.max_inflight > 1:
                self.early[source] = got
                got = torch.empty_like(got)
                dist.recv(got, source, tag=self.tag)
        kept = len(got) - TMA_ALIGN_BYTES if knobs.fault == "pipe_short" else len(got)
        _bytes(x)[:kept].copy_(got[:kept])


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)
