"""The cpu backend with one rank that fails: dies, hangs or raises before its combine, or answers late."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

from adapters.cpu.backend import CpuBackend
from conformance.protocol import Group


class Lame(CpuBackend):
    """Option `mode`: kill, exit, hang, raise or late; it strikes on rank 2."""

    def __init__(self, *, device: str, options: Mapping[str, str], group: Group | None) -> None:
        super().__init__(device=device, options={}, group=group)
        self.mode = options.get("mode", "") if group is not None and group.rank == 2 else ""

    def run(self, op: str, kwargs: dict[str, Any]) -> Any:
        if op == "deepep.EPBuffer.combine":
            if self.mode == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.mode == "exit":
                os._exit(3)
            if self.mode == "hang":
                time.sleep(3600)
            if self.mode == "raise":
                msg = "rank 2 has had enough"
                raise ArithmeticError(msg)
            if self.mode == "late":
                time.sleep(0.3)
        return super().run(op, kwargs)
