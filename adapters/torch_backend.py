"""A backend on torch, of any device type: memory, views and dtypes. Ops come by inheritance.

torch is imported by the constructor, not by this module: a description needs none, and what a process may see of a
machine's devices must be said before the framework looks.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from adapters.torch_timing import TorchTiming
from conformance.protocol import FORMATS, STORAGE_BYTES, Backend, Group, OutOfDeviceMemory, TensorSpec, Unrepresentable

if TYPE_CHECKING:
    import torch

CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""By bytes of an element: what holds the bits of a storage dtype that this torch has no name for."""


@functools.cache
def dtypes() -> dict[str, torch.dtype]:
    """torch's dtype by storage name; one that this torch lacks is carried by an integer of its width, bit for bit."""
    t = importlib.import_module("torch")
    return {f.storage: getattr(t, f.storage, None) or getattr(t, CARRIERS[f.itemsize_bytes]) for f in FORMATS.values()}


@functools.cache
def names() -> dict[torch.dtype, str]:
    """Storage name by torch's dtype; a carrier keeps its own name."""
    t = importlib.import_module("torch")
    return {getattr(t, name): name for name in STORAGE_BYTES if hasattr(t, name)}


class TorchBackend(TorchTiming, Backend):
    """Inherit, set `device_type` and `adapters` (module to `package.module`), and write `describe`."""

    device_type = "cpu"
    adapters: Mapping[str, str] = {}

    @classmethod
    def devices(cls, options: Mapping[str, str]) -> tuple[str, ...]:
        if cls.device_type == "cpu":
            return ("0",)
        torch = importlib.import_module("torch")
        return tuple(map(str, range(getattr(torch, cls.device_type).device_count())))

    def __init__(self, *, device: str, options: Mapping[str, str], group: Group | None) -> None:
        super().__init__(device=device, options=options, group=group)
        self.before_framework()
        self.torch = importlib.import_module("torch")
        self.torch.set_num_threads(1)
        self.torch_device = self.own_device()
        self._loaded: dict[str, Any] = {}

    def before_framework(self) -> None:
        """Called before torch is imported: environment that it reads once."""

    def own_device(self) -> torch.device:
        """The device that this process works on."""
        return self.torch.device(self.device_type)

    def alloc(self, nbytes: int, align: int) -> torch.Tensor:
        try:
            raw = self.torch.empty(nbytes + align, dtype=self.torch.uint8, device=self.torch_device)
        except RuntimeError as e:
            if "memory" in str(e):
                raise OutOfDeviceMemory(str(e)) from e
            raise
        shift = -raw.data_ptr() % align
        return raw[shift : shift + nbytes]

    def free(self, buf: torch.Tensor) -> None:
        """The storage goes when the last view of it does."""

    def write(self, buf: torch.Tensor, offset: int, data: memoryview) -> None:
        if len(data):
            buf[offset : offset + len(data)].copy_(self.torch.frombuffer(data, dtype=self.torch.uint8))

    def read(self, buf: torch.Tensor, offset: int, out: memoryview) -> None:
        if len(out):
            self.torch.frombuffer(out, dtype=self.torch.uint8).copy_(buf[offset : offset + len(out)])

    def view(self, buf: torch.Tensor, offset: int, spec: TensorSpec) -> torch.Tensor:
        if spec.dtype not in dtypes():
            msg = f"no format is stored as {spec.dtype}"
            raise Unrepresentable(msg)
        usable = (buf.numel() - offset) // spec.itemsize_bytes * spec.itemsize_bytes
        typed = buf[offset : offset + usable].view(dtypes()[spec.dtype])
        return typed.as_strided(spec.shape, spec.strides, typed.storage_offset())

    def inspect(self, tensor: Any) -> tuple[TensorSpec, torch.Tensor, int, int]:
        if not isinstance(tensor, self.torch.Tensor):
            msg = f"{type(tensor).__name__} is no tensor"
            raise TypeError(msg)
        name = names().get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        storage = tensor.untyped_storage()
        whole = self.torch.empty(0, dtype=self.torch.uint8, device=tensor.device)
        whole.set_(storage, 0, (storage.nbytes(),))
        spec = TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), name, name)
        return spec, whole, tensor.storage_offset() * tensor.element_size(), storage.nbytes()

    def same_memory(self, a: Any, b: Any) -> bool:
        tensors = isinstance(a, self.torch.Tensor) and isinstance(b, self.torch.Tensor)
        return tensors and a.data_ptr() == b.data_ptr()

    def dtype(self, name: str) -> torch.dtype:
        return dtypes()[name]

    def adapter(self, module: str) -> Any:
        if module not in self._loaded:
            self._loaded[module] = importlib.import_module(self.adapters[module]).Adapter(self)
        return self._loaded[module]

    def get_settings(self, module: str) -> dict[str, Any]:
        return dict(getattr(self.adapter(module), "settings", {}))

    def set_settings(self, module: str, settings: Mapping[str, Any]) -> None:
        own = getattr(self.adapter(module), "settings", {})
        for key, value in settings.items():
            if key not in own:
                msg = f"{module} has no setting {key!r}; there are {', '.join(own) or 'none'}"
                raise ValueError(msg)
            own[key] = value

    def compile(self, op: str, kwargs: dict[str, Any]) -> None:
        module, _, name = op.partition(".")
        build = getattr(self.adapter(module), "compile", None)
        if build is not None:
            build(name.replace(".", "__"), kwargs)

    def synchronize(self) -> None:
        if self.device_type != "cpu":
            getattr(self.torch, self.device_type).synchronize()

    def alive(self) -> bool:
        return bool((self.torch.ones(4, device=self.torch_device) + 1).sum().item() == 8)
