"""A backend on an accelerator that torch drives (`torch.cuda`, `torch.npu`): masks, streams, memory, what went wrong.

Everything that needs the device is a method or an attribute of its own, so that a subclass with
`device_type = "cpu"` runs the same adapters on host tensors.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from adapters.chip_data import known_releases, load_description, load_file, releases
from adapters.torch_backend import TorchBackend
from adapters.upstream.release import distribution, imported, is_there, not_installed, said
from conformance.protocol import Description, DeviceLost, Group, ModuleUnusable, OutOfDeviceMemory, Report

ALIVE_LIMIT_S = 4.0
"""the engine wants an answer within 5 s"""
POISONED_BLOCKS = (*[16 << 20] * 4, *[1 << 20] * 8, *[64 << 10] * 16, *[1 << 10] * 64)
"""bytes of blocks that are filled and given back beside those of the pool: a callee need not ask for new ones"""
MODULES = ("tilelang", "deepgemm", "deepep", "tilekernels", "flashmla", "deepselect")


class AcceleratorBackend(TorchBackend):
    """Inherit and say what differs: names of the device, of its masks and errors, and of its description files."""

    adapters = {m: f"adapters.upstream.{m}" for m in MODULES}

    mask_variable = ""
    """environment variable that lists the devices a process sees"""
    plugin = ""
    """package that adds the device type to torch, imported before anything else touches it"""
    collective = "gloo"
    """name of the process group's backend that ranks meet in"""
    tilelang_target = "c"
    """name of the target in `tilelang_programs.target` that programs are compiled for"""
    descriptions: Mapping[str, Path] = {}
    """description file by the name that option `arch` picks"""
    default_arch = ""
    out_of_memory = r"out of memory"
    device_lost = r"(?!)"
    """what error messages say, as patterns in lower case: for want of memory; the device or its context is gone"""

    # Static

    @classmethod
    def arch_of(cls, options: Mapping[str, str]) -> str:
        """Option `arch`, or the default one. Raises ValueError for an unknown name."""
        arch = options.get("arch", cls.default_arch)
        if arch not in cls.descriptions:
            msg = f"option arch={arch!r}; there is a description of {', '.join(cls.descriptions)}"
            raise ValueError(msg)
        return arch

    @classmethod
    def describe(cls, options: Mapping[str, str]) -> Description:
        """The description of option `arch`, with the releases that further options name (`deepgemm=2.6`)."""
        return load_description(cls.descriptions[cls.arch_of(options)], options)

    # The device

    def __init__(self, *, device: str, options: Mapping[str, str], group: Group | None) -> None:
        self.arch = self.arch_of(options)
        self.chip = load_file(self.descriptions[self.arch])
        self.releases = releases(self.chip, options)
        super().__init__(device=device, options=options, group=group)

    def before_framework(self) -> None:
        """Let the process see its own device only, as torch's device 0.

        In a group the devices of the peers stay visible, since direct transfers between devices need them.
        """
        if self.mask_variable and self.group is None:
            os.environ[self.mask_variable] = named_in(listed_in(os.environ.get(self.mask_variable)), self.device)

    def own_device(self) -> Any:
        """torch's device of this process: number 0 behind a mask of one device, in a group its own number.

        Raises RuntimeError, a sentence to act on, where torch has no such device.
        """
        if self.plugin:
            imported(self.plugin, self.chip["plugin"]["install"])
        if self.device_type == "cpu":
            return self.torch.device("cpu")
        with self.translated():
            missing = self.missing_device()
            if missing:
                raise RuntimeError(missing)
            index = 0 if self.group is None else index_of(
                listed_in(os.environ.get(self.mask_variable)), self.device, self.group)
            self.accelerator.set_device(index)
        return self.torch.device(self.device_type, index)

    @classmethod
    def devices(cls, options: Mapping[str, str]) -> tuple[str, ...]:
        """The names of the devices that this process may use, as drivers and masks number them."""
        listed = listed_in(os.environ.get(cls.mask_variable))
        if listed:
            return tuple(listed)
        torch = importlib.import_module("torch")
        if cls.plugin:
            importlib.import_module(cls.plugin)
        return tuple(map(str, range(getattr(torch, cls.device_type).device_count())))

    @property
    def accelerator(self) -> Any:
        """`torch.cuda`, `torch.npu`, ... : the functions of this device type."""
        return getattr(self.torch, self.device_type)

    def missing_device(self) -> str:
        """Why torch can't use a device of this type, or an empty string."""
        if not hasattr(self.torch, self.device_type):
            return f"torch {self.torch.__version__} has no device type {self.device_type}"
        if not self.accelerator.is_available():
            return f"torch {self.torch.__version__} finds no device of type {self.device_type}"
        return ""

    def current_stream(self) -> Any:
        """The stream that calls are put on: torch's current one, which every package launches on."""
        return self.accelerator.current_stream()

    def event(self) -> Any:
        """An event with timing, not yet recorded."""
        return self.accelerator.Event(enable_timing=True)

    def synchronize(self) -> None:
        """Wait for every stream of the device, raise what is pending."""
        with self.translated():
            self.accelerator.synchronize()

    def memory(self) -> tuple[int, int] | None:
        """(free, total) bytes; what torch holds and does not use counts as free."""
        if self.device_type == "cpu":
            return None
        free, total = self.accelerator.mem_get_info()
        idle = self.accelerator.memory_reserved() - self.accelerator.memory_allocated()
        return free + max(idle, 0), total

    def alive(self) -> bool:
        """Whether a small sum comes back right within the limit; a device that hangs is asked in a thread."""
        answer: list[bool] = []

        def ask() -> None:
            with contextlib.suppress(Exception):
                answer.append(super(AcceleratorBackend, self).alive())

        asked = threading.Thread(target=ask, daemon=True)
        asked.start()
        asked.join(ALIVE_LIMIT_S)
        return answer == [True]

    def poison_pool(self, byte: int) -> bool:
        """Fill blocks of torch's pool and give them back: the next callee that allocates finds this byte.

        0 fills nothing. False where the pool does not keep blocks.
        """
        if self.device_type == "cpu":
            return False
        if not byte:
            return True
        with self.translated():
            # Those of the pool first, each by its own size, or a callee would get what an earlier one left.
            sizes = [*sorted(self.idle_blocks(), reverse=True), *POISONED_BLOCKS]
            blocks = [self.torch.full((size,), byte, dtype=self.torch.uint8, device=self.torch_device)
                      for size in sizes]
            del blocks
        return True

    def idle_blocks(self) -> list[int]:
        """Bytes of each block that torch's pool holds and nobody uses."""
        return [block["size"] for segment in self.accelerator.memory_snapshot() for block in segment["blocks"]
                if block["state"] == "inactive"]

    def recover(self, level: int) -> bool:
        """Level 0, a context of its own, is what a new process has; the device itself can't be reset from here."""
        return level == 0 and self.alive()

    def alloc(self, nbytes: int, align: int) -> Any:
        with self.translated():
            return super().alloc(nbytes, align)

    def write(self, buf: Any, offset: int, data: memoryview) -> None:
        with self.translated():
            super().write(buf, offset, data)

    def read(self, buf: Any, offset: int, out: memoryview) -> None:
        with self.translated():
            super().read(buf, offset, out)

    # Calls

    def run(self, op: str, kwargs: dict[str, Any]) -> Any:
        with self.translated():
            return super().run(op, kwargs)

    def compile(self, op: str, kwargs: dict[str, Any]) -> None:
        with self.translated():
            super().compile(op, kwargs)

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Raise OutOfDeviceMemory or DeviceLost for what says so; everything else passes as it is."""
        try:
            yield
        except (OutOfDeviceMemory, DeviceLost, ModuleUnusable):
            raise
        except Exception as e:
            kind = self.meaning(e)
            if kind is None:
                raise
            msg = f"{type(e).__name__}: {e}"
            raise kind(msg) from e

    def meaning(self, e: Exception) -> type[Exception] | None:
        """OutOfDeviceMemory, DeviceLost, or None for an error that is the call's own."""
        text = str(e).lower()
        # Lost first: once a context is gone, wants of memory are among what it raises.
        if re.search(self.device_lost, text, re.DOTALL):
            return DeviceLost
        if isinstance(e, getattr(self.torch, "OutOfMemoryError", ())) or re.search(self.out_of_memory, text):
            return OutOfDeviceMemory
        return None

    def doctor(self) -> Report:
        """Each module with a sentence why not; what its package turned out to be stands in `versions`."""
        versions = {"torch": self.torch.__version__, "arch": self.arch, **self.driver_versions()}
        found = {}
        for module in self.adapters:
            try:
                adapter = self.adapter(module)
                versions |= {f"{module}.{k}" if k else module: v for k, v in adapter.found().items()}
                found[module] = adapter.trial()
            except ModuleUnusable as e:
                found[module] = str(e)
            except Exception as e:
                found[module] = said(e)
        return Report(versions, self.device_lines(), found)

    @classmethod
    def why_not(cls, options: Mapping[str, str], error: Exception) -> Report:
        """Without a device: what is missing of each module's package, and why there is no device."""
        chip = load_file(cls.descriptions[cls.arch_of(options)])
        packages = {m: row["import"] for m, row in chip["package"].items()}
        versions = {p: distribution(p).partition(" ")[2] for p in ("torch", cls.plugin, *packages.values()) if p}
        found = {m: not_installed(p, chip["package"][m].get("install", "")) if not is_there(p)
                 else f"{p} is installed, but there is no device to call it on" for m, p in packages.items()}
        return Report({k: v for k, v in versions.items() if v}, (f"none: {said(error, name=False)}",), found)

    def install_hint(self, module: str) -> str:
        """Where the package of a module comes from."""
        return self.chip["package"][module].get("install", "")

    def known_releases(self, module: str) -> list[str]:
        """The releases of a module's package that are described, the usual one first."""
        return known_releases(self.chip, module)

    def device_lines(self) -> tuple[str, ...]:
        """A line a device."""
        if self.device_type == "cpu":
            return (f"cpu, {self.torch.get_num_threads()} thread",)
        return tuple(f"{self.device_type}:{i} {self.accelerator.get_device_name(i)}"
                     for i in range(self.accelerator.device_count()))

    def driver_versions(self) -> dict[str, str]:
        """Versions of driver, toolkit and plug-in."""
        return {}


def listed_in(mask: str | None) -> list[str]:
    """The devices that a mask names; none where there is no mask."""
    return [d.strip() for d in (mask or "").split(",") if d.strip()]


def named_in(listed: list[str], device: str) -> str:
    """The name for a mask of a device: its own, or that of the one that stands at this place of an outer mask.

    Raises ValueError where the outer mask leaves no such device.
    """
    if not listed or device in listed:
        return device
    if not device.isdigit() or int(device) >= len(listed):
        msg = f"device {device} is asked for, but the environment leaves {', '.join(listed)} only"
        raise ValueError(msg)
    return listed[int(device)]


def index_of(listed: list[str], device: str, group: Group) -> int:
    """torch's number of a rank's device among all that are visible.

    Where all ranks are told the first device, each takes that of its local rank.
    """
    if device == "0" and group.local_rank:
        return group.local_rank
    if listed:
        return listed.index(named_in(listed, device))
    return int(device) if device.isdigit() else group.local_rank
