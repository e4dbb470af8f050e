"""The real backends on host tensors, with stand-ins where they import the vendors' packages.

Options: `calls` (file that every call is appended to), `defects` (known faults of the recorded
releases to have, `a,b`), `release.PACKAGE` (which recorded release of a package), `cache_dir`.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from adapters.accelerator import AcceleratorBackend
from adapters.ascend.backend import AscendBackend
from adapters.cpu.backend import _M_PERTURB, compile_cache
from adapters.cpu.kernels.knobs import Knobs
from adapters.cpu.support import TILELANG
from adapters.nvidia.backend import NvidiaBackend
from adapters.standins.calls import Calls
from adapters.standins.loading import Rig, install
from adapters.standins.signatures import PACKAGES
from conformance.protocol import Description, Group, Report

RELEASE = "release."


class Rehearsed(AcceleratorBackend):
    """Put in front of a real backend. What needs a device is replaced; describing and calling are the real thing."""

    device_type = "cpu"
    plugin = ""
    mask_variable = ""
    collective = "gloo"
    tilelang_target = "c"
    stands_for = ""

    @classmethod
    def arch_of(cls, options: Mapping[str, str]) -> str:
        return cls.stands_for

    @classmethod
    def describe(cls, options: Mapping[str, str]) -> Description:
        """The real description, but for TileLang: its programs are compiled for the host."""
        own = ("calls", "defects", "cache_dir")
        real = super().describe({k: v for k, v in options.items() if k not in own and not k.startswith(RELEASE)})
        return replace(real, name=f"rehearsed-{real.name}", platform="simulator", fork_after_import=True, host=True,
                       ops={**{k: v for k, v in real.ops.items() if not k.startswith("tilelang.")}, **TILELANG})

    @classmethod
    def preload(cls, module: str) -> None:
        importlib.import_module("torch._dynamo")  # torch itself does at the first call that is looked at: over a second
        for package in PACKAGES:
            importlib.import_module(f"adapters.standins.{package}")
        importlib.import_module(cls.adapters[module])

    def __init__(self, *, device: str, options: Mapping[str, str], group: Group | None) -> None:
        self.rig = self.installed(options, group)
        self._libc = ctypes.CDLL(None)
        passed = {k: v for k, v in options.items() if not k.startswith(RELEASE)}
        super().__init__(device=device, options={"cache_dir": compile_cache(), **passed}, group=group)
        self.knobs = Knobs()

    def installed(self, options: Mapping[str, str], group: Group | None) -> Rig:
        """The stand-ins of this process."""
        releases = {k.removeprefix(RELEASE): v for k, v in options.items() if k.startswith(RELEASE)}
        return install(
            self.stands_for, calls=Calls(options.get("calls", ""), group.rank if group else 0), releases=releases,
            defects=frozenset(filter(None, options.get("defects", "").split(","))))

    def run(self, op: str, kwargs: dict[str, Any]) -> Any:
        self.rig.calls.add("asked", op, kwargs)
        with self.rig.running():
            return super().run(op, kwargs)

    def compile(self, op: str, kwargs: dict[str, Any]) -> None:
        self.rig.calls.add("compile", op)
        with self.rig.running():
            super().compile(op, kwargs)

    def set_settings(self, module: str, settings: Mapping[str, Any]) -> None:
        self.rig.calls.add("settings", module, settings)
        with self.rig.running():
            super().set_settings(module, settings)

    def synchronize(self) -> None:
        self.rig.calls.add("wait", "synchronize")
        with self.translated():
            self.rig.device.synchronize()

    def poison_pool(self, byte: int) -> bool:
        # Results of a stand-in are filled by itself; this is for what an adapter allocates.
        return bool(self._libc.mallopt(_M_PERTURB, byte ^ 0xFF if byte else 0))

    def doctor(self) -> Report:
        with self.rig.running():
            return super().doctor()


class RehearsedSM90(Rehearsed, NvidiaBackend):
    """`nvidia` with arch=sm90."""

    stands_for = default_arch = "sm90"


class RehearsedSM100(Rehearsed, NvidiaBackend):
    """`nvidia` with arch=sm100."""

    stands_for = default_arch = "sm100"


class RehearsedAscend950(Rehearsed, AscendBackend):
    """`ascend` with arch=ascend950."""

    stands_for = default_arch = "ascend950"
