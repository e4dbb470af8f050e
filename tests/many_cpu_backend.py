"""Every op of the cpu backend, as if it had devices."""

from __future__ import annotations

from many_devices_backend import Devices

from adapters.cpu.backend import CpuBackend


class ManyCpu(Devices, CpuBackend):
    """For groups of ranks."""
