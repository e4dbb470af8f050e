"""The `cpu` backend: all six modules run for real on the host, on blocked torch kernels.

Options: `knobs` (settings of the kernels, see kernels/knobs.py), `memory_mib` (how much
more address space a call may take), `cache_dir` (where compiled programs are kept).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import platform
import resource
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from adapters.cpu.kernels.knobs import Knobs
from adapters.cpu.support import OPS, PROFILE, REQUIREMENTS
from adapters.torch_backend import TorchBackend
from conformance.protocol import Description, Group, Report

_M_PERTURB = -6
DEFAULT_MEMORY_MIB = 4096


class CpuBackend(TorchBackend):
    """Every op on the host's CPU; one thread a process."""

    adapters = {m: f"adapters.cpu.{m}" for m in
                ("deepselect", "deepgemm", "tilekernels", "flashmla", "deepep", "tilelang")}

    @classmethod
    def describe(cls, options: Mapping[str, str]) -> Description:
        Knobs.parse(options.get("knobs", ""))
        if importlib.util.find_spec("torch") is None:
            msg = "torch is not installed; pip install -c constraints.txt -e '.[cpu]' brings it"
            raise ModuleNotFoundError(msg)
        return Description(
            name="cpu", ops=OPS, requirements=REQUIREMENTS, profile=PROFILE, ranks=(1, 2, 4), fork_after_import=True,
            host=True,
            versions={"torch": _version("torch")},
            peaks={"sizes": "small", "source": "measured in the run: no published figure is about this host"},
        )

    @classmethod
    def preload(cls, module: str) -> None:
        loaded = importlib.import_module(cls.adapters[module])
        if hasattr(loaded, "preload"):
            loaded.preload({"cache_dir": compile_cache()})

    def __init__(self, *, device: str, options: Mapping[str, str], group: Group | None) -> None:
        super().__init__(device=device, options={"cache_dir": compile_cache(), **options}, group=group)
        self.knobs = Knobs.parse(options.get("knobs", ""))
        self._libc = ctypes.CDLL(None)
        _limit_memory(int(options.get("memory_mib", DEFAULT_MEMORY_MIB)))

    def poison_pool(self, byte: int) -> bool:
        # glibc fills what malloc gives out with the complement of this byte; 0 turns it off.
        return bool(self._libc.mallopt(_M_PERTURB, byte ^ 0xFF if byte else 0))

    def doctor(self) -> Report:
        found = {}
        for module in self.adapters:
            try:
                self.adapter(module)
                found[module] = ""
            except Exception as e:
                found[module] = f"{type(e).__name__}: {e}"
        versions, threads = {"torch": self.torch.__version__}, self.torch.get_num_threads()
        return Report(versions, (f"cpu, {threads} thread",), found)


def compile_cache() -> str:
    """Where compiled programs are kept between runs; a folder a toolchain, so that versions never mix."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    toolchain = "-".join((f"tilelang-{_version('tilelang')}", f"torch-{_version('torch')}", platform.machine()))
    return os.environ.get("CONFORMANCE_CACHE_DIR") or str(root / "conformance" / toolchain)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _limit_memory(mib: int) -> None:
    """Cap the address space, and be the first to go if the host runs out all the same."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + (mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
