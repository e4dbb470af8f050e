"""What the contract tests of the stand-ins share: an installed package, tensors of a layout, waiting."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from adapters.standins import Rig, install, uninstall

BF16, FP32, FP16, FP8 = torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn
I16, I32, I64 = torch.int16, torch.int32, torch.int64


@contextmanager
def standing_in(arch: str, package: str, **options: Any) -> Any:
    """(package, rig) while it is installed; afterwards nothing of it is left."""
    rig = install(arch, (package,), **options)
    try:
        yield importlib.import_module(package), rig
    finally:
        uninstall()


def refused(arch: str, package: str, call: Callable[[Any], Any], error: type[BaseException], **options: Any) -> None:
    """The call raises exactly this type, at once."""
    with standing_in(arch, package, **options) as (p, _):
        with pytest.raises(Exception) as caught:
            call(p)
        assert type(caught.value) is error, caught.value


def traps(arch: str, package: str, call: Callable[[Any], Any], what: str, **options: Any) -> None:
    """The call returns; the wait for the device tells, and every later call."""
    with standing_in(arch, package, **options) as (p, rig):
        call(p)
        with pytest.raises(RuntimeError, match=what):
            rig.device.synchronize()
        with pytest.raises(RuntimeError, match=what):
            call(p)


def accepted(arch: str, package: str, call: Callable[[Any], Any], **options: Any) -> Any:
    """What the call returns when the device is done."""
    with standing_in(arch, package, **options) as (p, rig):
        out = call(p)
        rig.device.synchronize()
        return out


def aligned(shape: tuple[int, ...], dtype: torch.dtype, align_bytes: int = 1024, pitch: int | None = None) -> Any:
    """Zeros at an aligned address; rows `pitch` elements apart."""
    columns = pitch or shape[-1]
    rows = 1
    for n in shape[:-1]:
        rows *= n
    raw = torch.zeros(rows * columns * dtype.itemsize + align_bytes, dtype=torch.uint8)
    flat = raw[-raw.data_ptr() % align_bytes:][:rows * columns * dtype.itemsize].view(dtype)
    return flat.view(rows, columns)[:, :shape[-1]].reshape(shape) if pitch is None else flat.view(rows, columns)[
        :, :shape[-1]]


__all__ = ["BF16", "FP8", "FP16", "FP32", "I16", "I32", "I64", "Rig", "accepted", "aligned", "refused", "standing_in",
           "traps"]
