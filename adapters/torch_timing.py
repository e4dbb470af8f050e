"""Timing on torch: events in the device's queue, a flush that stays on the device, and rates to compare with."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from conformance.protocol import Samples

if TYPE_CHECKING:
    import torch

ROUNDS = 5
MOST_S = 0.5
"""after which no further round is begun: some products have no fast path on some devices"""
COPY_BYTES = {"cpu": 1 << 26}
"""by device type; a copy must be larger than the caches"""
LARGE_COPY_BYTES = 1 << 30
SQUARES = {"cpu": (512, 1024)}
"""sides of the matrices that are multiplied"""
LARGE_SQUARES = (4096, 8192)
FORMATS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""whose products are measured"""


def _torch() -> Any:
    """torch, when it is needed and not before: device masks are set before it is imported."""
    return importlib.import_module("torch")



class TorchTiming:
    """Mixed into a backend on torch, which has `device_type`, `torch_device` and `synchronize`."""

    device_type: str
    torch_device: torch.device

    @property
    def module(self) -> Any:
        """torch.cuda, torch.npu and their like."""
        return getattr(_torch(), self.device_type)

    def time(self, calls: Sequence[Callable[[], Any]], rounds: int, flush: Callable[[], None]) -> Samples:
        """By two events on the current stream where the device has events, else by the host's clock.

        The flush is still under way when the call is enqueued: so the device does not wait for the host in between.
        """
        if self.device_type == "cpu":
            return super().time(calls, rounds, flush)  # type: ignore[misc]
        seconds = []
        for i in range(rounds):
            flush()
            before, after = (self.module.Event(enable_timing=True) for _ in range(2))
            before.record()
            result = calls[i % len(calls)]()
            after.record()
            self.synchronize()  # type: ignore[attr-defined]
            seconds.append(before.elapsed_time(after) / 1000)
            del result
        return Samples(tuple(seconds), "device_event")

    def flush_caches(self, nbytes: int) -> None:
        held = getattr(self, "_flush", None)
        if held is None or held.numel() != nbytes // 4:
            held = self._flush = _torch().zeros(nbytes // 4, dtype=_torch().int32, device=self.torch_device)
        held.add_(1)

    def device_name(self) -> str:
        if self.device_type == "cpu":
            return ""
        with suppress(Exception):
            return str(self.module.get_device_name())
        return ""

    def attainable(self) -> dict[str, float]:
        """Best of a few rounds; random normal data, since zeros are faster than what anybody multiplies."""
        nbytes = COPY_BYTES.get(self.device_type, LARGE_COPY_BYTES)
        rates = {"bytes": self._copy(nbytes)}
        for name, dtype in FORMATS.items():
            with suppress(RuntimeError):
                sides = SQUARES.get(self.device_type, LARGE_SQUARES)
                rates[name] = max(self._product(n, getattr(_torch(), dtype)) for n in sides)
        return rates

    def _copy(self, nbytes: int) -> float:
        source = _torch().empty(nbytes, dtype=_torch().uint8, device=self.torch_device).random_(0, 255)
        target = _torch().empty_like(source)
        return 2 * nbytes / self._best(lambda: target.copy_(source))

    def _product(self, n: int, dtype: torch.dtype) -> float:
        t = _torch()
        a, b = (t.randn(n, n, device=self.torch_device).to(dtype) for _ in range(2))
        return 2 * n**3 / self._best(lambda: t.mm(a, b))

    def _best(self, call: Callable[[], Any]) -> float:
        begun = time.perf_counter()
        call()
        self.synchronize()  # type: ignore[attr-defined]
        if time.perf_counter() - begun > MOST_S:
            return time.perf_counter() - begun
        best, end = float("inf"), time.perf_counter() + MOST_S
        for _ in range(ROUNDS):
            if best < float("inf") and time.perf_counter() > end:
                break
            begun = time.perf_counter()
            call()
            self.synchronize()  # type: ignore[attr-defined]
            best = min(best, time.perf_counter() - begun)
        return best
