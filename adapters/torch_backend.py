"""A backend on torch, of any device type: memory, views and dtypes. Ops come by inheritance."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from conformance.protocol import FORMATS, Backend, Group, OutOfDeviceMemory, TensorSpec, Unrepresentable

_DTYPES: dict[str, torch.dtype] = {
    f.storage: getattr(torch, f.storage) for f in FORMATS.values() if hasattr(torch, f.storage)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TorchBackend(Backend):
    """Inherit, set `device_type` and `adapters` (module to `package.module`), and write `describe`."""

    device_type = "cpu"
    adapters: Mapping[str, str] = {}

    def __init__(self, *, device: str, options: Mapping[str, str], group: Group | None) -> None:
        super().__init__(device=device, options=options, group=group)
        torch.set_num_threads(1)
        self.torch_device = torch.device(self.device_type)
        self._loaded: dict[str, Any] = {}

    def alloc(self, nbytes: int, align: int) -> torch.Tensor:
        try:
            raw = torch.empty(nbytes + align, dtype=torch.uint8, device=self.torch_device)
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
            buf[offset : offset + len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))

    def read(self, buf: torch.Tensor, offset: int, out: memoryview) -> None:
        if len(out):
            torch.frombuffer(out, dtype=torch.uint8).copy_(buf[offset : offset + len(out)])

    def view(self, buf: torch.Tensor, offset: int, spec: TensorSpec) -> torch.Tensor:
        if spec.dtype not in _DTYPES:
            msg = f"torch {torch.__version__} has no dtype {spec.dtype}"
            raise Unrepresentable(msg)
        usable = (buf.numel() - offset) // spec.itemsize_bytes * spec.itemsize_bytes
        typed = buf[offset : offset + usable].view(_DTYPES[spec.dtype])
        return typed.as_strided(spec.shape, spec.strides, typed.storage_offset())

    def inspect(self, tensor: Any) -> tuple[TensorSpec, torch.Tensor, int, int]:
        if not isinstance(tensor, torch.Tensor):
            msg = f"{type(tensor).__name__} is no tensor"
            raise TypeError(msg)
        name = _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),))
        spec = TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), name, name)
        return spec, whole, tensor.storage_offset() * tensor.element_size(), storage.nbytes()

    def same_memory(self, a: Any, b: Any) -> bool:
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.data_ptr() == b.data_ptr()

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[name]

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
            getattr(torch, self.device_type).synchronize()

    def alive(self) -> bool:
        return bool((torch.ones(4, device=self.torch_device) + 1).sum().item() == 8)
