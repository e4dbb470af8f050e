"""A device that runs behind the caller, on CPU tensors.

What a launched call writes is not there until something waits for it: results hold a
poison byte first. Two queues, as on a device. What is launched on the *current stream*
is done when the next operation of the framework runs (stream order), or at
`synchronize`. What runs on the *communication stream* is done at the event's wait, or
at `synchronize`. A device-side assertion shows at the next `synchronize`, and at every
call after it, since the context is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

POISON_BYTE = 0x5B
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Pair = tuple[torch.Tensor, torch.Tensor]
"""(what the caller sees, what it will hold)"""


class DeviceGone(RuntimeError):
    """The context was lost by a device-side error; only a new process helps."""


class Device:
    """Pending work of one process."""

    def __init__(self, says: str = "device error") -> None:
        self.says = says
        """what an error message starts with"""
        self._current: list[Pair] = []
        self._apart: list[list[Pair]] = []
        self._error = ""
        self.waits = 0
        """how often `synchronize` was called"""

    def launch(self, pairs: Iterable[Pair]) -> None:
        """Results that the current stream will have written."""
        self._current.extend(pairs)

    def launch_apart(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Results of the communication stream; hand what is returned to `finish_apart`."""
        work = list(pairs)
        self._apart.append(work)
        return work

    def in_order(self) -> None:
        """The current stream reaches this point."""
        done, self._current = self._current, []
        _fill(done)

    def finish_apart(self, work: list[Pair]) -> None:
        """The current stream waits for work of the communication stream."""
        if any(w is work for w in self._apart):
            self._apart = [w for w in self._apart if w is not work]
            _fill(work)

    def trap(self, message: str) -> None:
        """A device-side check fails. Nothing is told before the next wait."""
        self._error = self._error or message

    def ready(self) -> None:
        """Raises DeviceGone where an earlier error has been left behind."""
        if self._error and self.waits:
            self._raise()

    def synchronize(self) -> None:
        """All work is done. Raises DeviceGone for what a device-side check found."""
        self.waits += 1
        self.in_order()
        apart, self._apart = self._apart, []
        for work in apart:
            _fill(work)
        self._raise()

    def _raise(self) -> None:
        if self._error:
            msg = f"{self.says}: {self._error}"
            raise DeviceGone(msg)


class StreamOrder(TorchDispatchMode):
    """Every operation of the framework comes behind what was launched before it on the current stream."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device, self.paused = device, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused:
            with self.quiet():
                self.device.in_order()
        return func(*args, **(kwargs or {}))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """The operations of a stand-in itself: no order with what it has launched."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before


def pending(true: torch.Tensor) -> Pair:
    """A tensor laid out as `true` in memory of its own, full of poison, and what it will hold."""
    storage = torch.full((max(true.untyped_storage().nbytes(), 1),), POISON_BYTE, dtype=torch.uint8)
    seen = torch.empty(0, dtype=true.dtype).set_(storage.untyped_storage(), true.storage_offset(), true.shape,
                                                 true.stride())
    return seen, true


def shadow(t: torch.Tensor) -> torch.Tensor:
    """A copy of shape, strides and contents, for a call to write to while the caller still sees the old."""
    out = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    _bits(out).copy_(_bits(t))
    return out


def _bits(t: torch.Tensor) -> torch.Tensor:
    # As integers: a copy of floats may change the bits of a NaN.
    return t if t.dtype == torch.bool else t.view(_WHOLE[t.element_size()])


def _fill(pairs: Iterable[Pair]) -> None:
    for seen, true in pairs:
        if seen.numel():
            _bits(seen).copy_(_bits(true))
