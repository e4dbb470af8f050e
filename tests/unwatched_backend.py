"""The cpu backend without a way to fill what callees allocate."""

from __future__ import annotations

from adapters.cpu.backend import CpuBackend


class Unwatched(CpuBackend):
    """Right in everything, but nobody can see whether it leaves a result's element unwritten."""

    def poison_pool(self, byte: int) -> bool:
        return False
