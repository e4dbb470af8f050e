"""The plug-in of the simulated accelerator: what a backend on a bare C runtime looks like, without torch.

`--backend=simdev.backend:SimDev`, with this folder's parent on PYTHONPATH. Options: `state` (folder in which the
devices live, else one in the temporary folder), `count` (how many devices there are, else 8), `defect` and `argument`
(what goes wrong in the device, see `runtime.defects`), `on` (the one device it goes wrong in, else all), `slow` (how
many times slower it is), `fork` (no: executors are started anew, not forked).
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.protocol import (
    Backend,
    Description,
    DeviceLost,
    Group,
    MemoryDamaged,
    OutOfDeviceMemory,
    Report,
    TensorSpec,
    Unrepresentable,
    supported,
)
from simdev import ops, runtime

TYPES = {"bfloat16": runtime.BF16, "float32": runtime.F32, "int32": runtime.I32, "uint32": runtime.I32,
         **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), runtime.BYTE)}
"""storage dtype to device type; there is none for the others"""

NO_INT64 = {"field": "index", "in": ("int32",), "reason": "the device has no int64"}
OPS = {
    "deepgemm.bf16_gemm_nt": supported(tiles={"m": 96, "n": 160, "k": 48}),
    "deepgemm.per_token_cast_to_fp8": supported(tiles={"m": 96, "n": 384}, path="emulated"),
    "deepselect.topk": supported(limits=(NO_INT64,), tiles={"vocab": 768}),
    "deepselect.get_stride_requirement": supported(),
}
ERRORS = {runtime.MEMORY: OutOfDeviceMemory, runtime.DAMAGE: MemoryDamaged, runtime.FAULT: DeviceLost,
          runtime.TRAP: DeviceLost, runtime.LOST: DeviceLost}


def raised(e: runtime.SimError) -> Exception:
    """The exception that the contract has for an error code; SimError itself, a RuntimeError, where it has none."""
    return ERRORS[e.code](str(e)) if e.code in ERRORS else e


class Buffer:
    """A block of device memory, freed with its last reference."""

    def __init__(self, device: runtime.Device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self.mem = 0
        self.mem = device.alloc(nbytes)

    def free(self) -> int:
        mem, self.mem = self.mem, 0
        return self.device.free(mem) if mem else 0

    __del__ = free


@dataclass(eq=False)
class Tensor:
    """Elements of a buffer."""

    buf: Buffer
    offset: int
    spec: TensorSpec

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self.spec.strides

    @property
    def dtype(self) -> str:
        return self.spec.dtype


class SimDev(Backend):
    """One simulated device."""

    @classmethod
    def describe(cls, options: Mapping[str, str]) -> Description:
        return Description(name="simdev", ops=OPS, requirements=ops.REQUIREMENTS, platform="simulator",
                           fork_after_import=options.get("fork", "yes") == "yes", versions={"simdev": "1"})

    @classmethod
    def devices(cls, options: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(map(str, range(int(options.get("count", runtime.DEVICES)))))

    def __init__(self, *, device: str, options: Mapping[str, str], group: Group | None) -> None:
        super().__init__(device=device, options=options, group=group)
        self.sim = runtime.Device(state_folder(options), int(device))
        self.sim.call("slow", float(options.get("slow", "1")))
        here = options.get("on", device) == device
        self.sim.call("plant", options.get("defect", "").encode() if here else b"", int(options.get("argument", "0")))
        self.in_flight: list[Buffer] = []
        self.adapters = {"deepgemm": ops.DeepGemm(self), "deepselect": ops.DeepSelect(self)}

    def doctor(self) -> Report:
        return Report({"simdev": "1"}, (f"simdev {self.device}",), dict.fromkeys(self.adapters, ""))

    def checked(self, name: str, *args: Any) -> None:
        try:
            self.sim.call(name, *args)
        except runtime.SimError as e:
            raise raised(e) from e

    def alloc(self, nbytes: int, align: int) -> Buffer:
        if runtime.ALIGN_BYTES % align:
            msg = f"simdev aligns to {runtime.ALIGN_BYTES} bytes, not to {align}"
            raise Unrepresentable(msg)
        try:
            return Buffer(self.sim, nbytes)
        except runtime.SimError as e:
            raise raised(e) from e

    def free(self, buf: Buffer) -> None:
        if self.in_flight:
            self.synchronize()
        try:
            self.sim.check("sim_free", buf.free())
        except runtime.SimError as e:
            raise raised(e) from e

    def write(self, buf: Buffer, offset: int, data: memoryview) -> None:
        start, image = offset - offset % runtime.ALIGN_BYTES, bytearray(offset % runtime.ALIGN_BYTES)
        if image:  # DMA starts at whole lines only
            self._read(buf, start, image)
        image += data
        if image:
            self.checked("write", buf.mem, start, (ctypes.c_char * len(image)).from_buffer(image), len(image))

    def read(self, buf: Buffer, offset: int, out: memoryview) -> None:
        lead = offset % runtime.ALIGN_BYTES
        if lead:
            image = bytearray(lead + len(out))
            self._read(buf, offset - lead, image)
            out[:] = image[lead:]
        else:
            self._read(buf, offset, out)

    def _read(self, buf: Buffer, offset: int, out: Any) -> None:
        if len(out):
            self.checked("read", buf.mem, offset, (ctypes.c_char * len(out)).from_buffer(out), len(out))

    def memory(self) -> tuple[int, int]:
        try:
            return self.sim.memory()
        except runtime.SimError as e:
            raise raised(e) from e

    def view(self, buf: Buffer, offset: int, spec: TensorSpec) -> Tensor:
        if spec.dtype not in TYPES:
            msg = f"simdev has no {spec.dtype}"
            raise Unrepresentable(msg)
        return Tensor(buf, offset, spec)

    def inspect(self, tensor: Any) -> tuple[TensorSpec, Buffer, int, int]:
        if not isinstance(tensor, Tensor):
            msg = f"{type(tensor).__name__} is no tensor of simdev"
            raise TypeError(msg)
        return tensor.spec, tensor.buf, tensor.offset, tensor.buf.nbytes

    def same_memory(self, a: Any, b: Any) -> bool:
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        return both and (a.buf.mem, a.offset) == (b.buf.mem, b.offset)

    def poison_pool(self, byte: int) -> bool:
        self.checked("fill", byte or -1)
        return True

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Tensor:
        """A new tensor, as callees allocate their results; unlike a view's its storage ends with its last line."""
        spec = TensorSpec(shape, strides, dtype, dtype)
        return Tensor(self.alloc(shape[0] * strides[0] * spec.itemsize_bytes, runtime.ALIGN_BYTES), 0, spec)

    def launch(self, kernel: str, args: ctypes.Structure, *tensors: Tensor | None) -> None:
        """Queue a kernel; what it touches stays allocated until it has run."""
        self.in_flight += [t.buf for t in tensors if t is not None]
        self.checked(kernel, ctypes.byref(args))

    def adapter(self, module: str) -> Any:
        return self.adapters[module]

    def synchronize(self) -> None:
        try:
            self.checked("synchronize")
        finally:
            self.in_flight.clear()

    def alive(self) -> bool:
        try:
            buf, told, heard = Buffer(self.sim, 64), bytearray(b"simdev" * 8), bytearray(48)
            self.write(buf, 0, memoryview(told))
            self.read(buf, 0, memoryview(heard))
        except (runtime.SimError, DeviceLost, OutOfDeviceMemory):
            return False
        return told == heard

    def recover(self, level: int) -> bool:
        """Level 0 is a new process, which this one is: it helps unless the device itself is lost. Then a reset may."""
        try:
            self.sim.call("reset" if level else "status")
        except runtime.SimError:
            return False
        return self.alive()

    def get_settings(self, module: str) -> dict[str, Any]:
        return dict(self.adapter(module).settings)

    def set_settings(self, module: str, settings: Mapping[str, Any]) -> None:
        own = self.adapter(module).settings
        for key, value in settings.items():
            if key not in own:
                msg = f"{module} has no setting {key!r}; there are {', '.join(own) or 'none'}"
                raise ValueError(msg)
            own[key] = value


def state_folder(options: Mapping[str, str]) -> str:
    """Where the devices live: what survives a process."""
    default = Path(tempfile.gettempdir()) / f"simdev-{os.getuid()}"
    return options.get("state") or os.environ.get("SIMDEV_STATE") or str(default)
