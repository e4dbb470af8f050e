"""A backend on the cpu kernels that is fast by cheating: the option `cheat` says how. Without one it is honest.

`stream_honest` has a queue of its own and a device's clock, and does all of its work in time.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from adapters.cpu.backend import CpuBackend
from conformance.protocol import Samples


def _key(kwargs: dict[str, Any]) -> bytes:
    h = hashlib.blake2b()
    for name in ("a", "b"):
        h.update(kwargs[name].contiguous().view(torch.uint8).numpy())
    return h.digest()


class Cheating(CpuBackend):
    """Cheats in `deepgemm.bf16_gemm_nt`, whose result the caller allocates."""

    def __init__(self, **kw: Any) -> None:
        super().__init__(**kw)
        self.cheat = self.options.get("cheat", "")
        self.kept: dict[Any, torch.Tensor] = {}
        self.calls = 0
        self.late: list[Callable[[], Any]] = []
        self.queue: queue.Queue[Any] = queue.Queue()
        if self.cheat.startswith("stream"):
            threading.Thread(target=self.drain, daemon=True).start()

    def drain(self) -> None:
        while True:
            self.queue.get()()
            self.queue.task_done()

    def run(self, op: str, kwargs: dict[str, Any]) -> Any:
        cheat = getattr(self, f"_{self.cheat.partition('_')[0]}", None) if self.cheat else None
        self.calls += 1
        return cheat(op, kwargs) if cheat else super().run(op, kwargs)

    def honest(self, op: str, kwargs: dict[str, Any]) -> Any:
        return super().run(op, kwargs)

    def _cached(self, op: str, kwargs: dict[str, Any]) -> None:
        """What was computed of these bytes before is copied."""
        key = _key(kwargs)
        if key not in self.kept:
            self.honest(op, kwargs)
            self.kept[key] = kwargs["d"].clone()
        else:
            kwargs["d"].copy_(self.kept[key])

    def _pointer(self, op: str, kwargs: dict[str, Any]) -> None:
        """What was computed at these addresses before is copied."""
        key = tuple(kwargs[n].data_ptr() for n in ("a", "b", "d"))
        if key not in self.kept:
            self.honest(op, kwargs)
            self.kept[key] = kwargs["d"].clone()
        else:
            kwargs["d"].copy_(self.kept[key])

    def _thread(self, op: str, kwargs: dict[str, Any]) -> None:
        """Returns, and so does `synchronize`, while somebody else still works."""
        def work() -> None:
            time.sleep(0.002)
            self.honest(op, kwargs)

        threading.Thread(target=work).start()

    def _stream(self, op: str, kwargs: dict[str, Any]) -> None:
        self.queue.put(lambda: self.honest(op, kwargs))

    def _zeros(self, op: str, kwargs: dict[str, Any]) -> None:
        """Works on zeros, which is faster on a chip."""
        self.honest(op, {**kwargs, "a": torch.zeros_like(kwargs["a"])})

    def _first(self, op: str, kwargs: dict[str, Any]) -> None:
        """Right as long as somebody may be looking."""
        self.honest(op, kwargs)
        if self.calls > 4:
            kwargs["d"][-1, -1] += 1

    def _half(self, op: str, kwargs: dict[str, Any]) -> None:
        half = kwargs["a"].shape[0] // 2
        self.honest(op, {**kwargs, "a": kwargs["a"][:half], "d": kwargs["d"][:half]})

    def _lazy(self, op: str, kwargs: dict[str, Any]) -> None:
        """Works when somebody looks."""
        self.late.append(lambda: self.honest(op, kwargs))

    def read(self, buf: Any, offset: int, out: memoryview) -> None:
        while self.late:
            self.late.pop()()
        super().read(buf, offset, out)

    def synchronize(self) -> None:
        self.queue.join()

    def time(self, calls: Sequence[Callable[[], Any]], rounds: int, flush: Callable[[], None]) -> Samples:
        if self.cheat == "nocall":
            return Samples((1e-6,) * rounds)
        if not self.cheat.startswith("stream"):
            taken = super().time(calls, rounds, flush)
            scale = 0.5 if self.cheat == "clock" else 1.0
            return Samples(tuple(scale * s for s in taken.seconds), taken.clock)
        seconds = []
        for i in range(rounds):
            flush()
            self.synchronize()
            marks: list[float] = []
            mark = lambda: marks.append(time.perf_counter())  # noqa: E731, B023
            # The honest clock stands in the queue with the work, the other one beside it.
            (self.queue.put if self.cheat == "stream_honest" else lambda f: f())(mark)
            calls[i % len(calls)]()
            (self.queue.put if self.cheat == "stream_honest" else lambda f: f())(mark)
            self.synchronize()
            seconds.append(marks[1] - marks[0])
        return Samples(tuple(seconds), "device_event")
