"""From a backend's name to its class. Runs in child processes: it imports adapters."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from conformance.protocol import Backend

BUILT_IN = {
    "cpu": "adapters.cpu.backend:CpuBackend",
    "compiler": "adapters.compiler.backend:CompilerBackend",
    "nvidia": "adapters.nvidia.backend:NvidiaBackend",
    "ascend": "adapters.ascend.backend:AscendBackend",
}
ENTRY_POINT_GROUP = "conformance.backends"


def backend_path(name: str) -> str:
    """`package.module:Class` of a backend's name. Raises KeyError for an unknown one."""
    if ":" in name:
        return name
    return known_backends()[name]


def known_backends() -> dict[str, str]:
    """Every backend that has a short name: the built-in ones, and those that packages register."""
    found = {e.name: e.value for e in entry_points(group=ENTRY_POINT_GROUP)}
    return {**found, **BUILT_IN}


def load_backend_class(name: str) -> type[Backend]:
    """Import the class. Raises KeyError, ImportError, AttributeError or TypeError."""
    module, _, attribute = backend_path(name).partition(":")
    cls = getattr(importlib.import_module(module), attribute)
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        msg = f"{name} is no class that inherits conformance.protocol.Backend"
        raise TypeError(msg)
    return cls
