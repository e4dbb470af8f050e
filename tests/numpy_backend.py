"""A backend of one op on NumPy alone: it starts in a tenth of a second, where a framework takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.protocol import Backend, Description, TensorSpec, Unrepresentable, contiguous_strides, supported

NAN_SENTINEL = 0x3F3F3F3F


def _base(a: np.ndarray) -> np.ndarray:
    while isinstance(a.base, np.ndarray):
        a = a.base
    return a


def _padded(rows: int, columns: int, dtype: Any) -> np.ndarray:
    """Rows at multiples of 32 bytes."""
    item = np.dtype(dtype).itemsize
    width = -(-columns * item // 32) * 32 // item
    return np.empty((rows, width), dtype)[:, :columns]


class NumpyBackend(Backend):
    """deepselect.topk for fp32 in any order."""

    @classmethod
    def describe(cls, options: Mapping[str, str]) -> Description:
        limits = tuple({"field": f, "in": [v]} for f, v in (("dtype", "fp32"), ("order", "any")))
        return Description("numpy", {"deepselect.topk": supported(limits=limits)}, {"input_row_bytes": 64},
                           fork_after_import=True, host=True)

    def alloc(self, nbytes: int, align: int) -> np.ndarray:
        raw = np.empty(nbytes + align, np.uint8)
        start = -raw.ctypes.data % align
        return raw[start : start + nbytes]

    def free(self, buf: np.ndarray) -> None:
        """Goes with its last view."""

    def write(self, buf: np.ndarray, offset: int, data: memoryview) -> None:
        buf[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def read(self, buf: np.ndarray, offset: int, out: memoryview) -> None:
        np.frombuffer(out, np.uint8)[:] = buf[offset : offset + len(out)]

    def view(self, buf: np.ndarray, offset: int, spec: TensorSpec) -> np.ndarray:
        try:
            dtype = np.dtype(spec.dtype)
        except TypeError as e:
            raise Unrepresentable(str(e)) from e
        if 0 in spec.shape:
            return np.ndarray(spec.shape, dtype)
        return np.ndarray(spec.shape, dtype, buf, offset, tuple(s * dtype.itemsize for s in spec.strides))

    def inspect(self, tensor: Any) -> tuple[TensorSpec, np.ndarray, int, int]:
        if not isinstance(tensor, np.ndarray):
            msg = f"{type(tensor).__name__} is no array"
            raise TypeError(msg)
        whole = _base(tensor)
        strides = contiguous_strides(tensor.shape)
        if tensor.size:
            strides = tuple(s // tensor.itemsize for s in tensor.strides)
        spec = TensorSpec(tensor.shape, strides, tensor.dtype.name, tensor.dtype.name)
        return spec, whole.reshape(-1).view(np.uint8), tensor.ctypes.data - whole.ctypes.data, whole.nbytes

    def same_memory(self, a: Any, b: Any) -> bool:
        return a.ctypes.data == b.ctypes.data

    def dtype(self, name: str) -> Any:
        return np.dtype(name)

    def synchronize(self) -> None:
        """Nothing runs behind its caller."""

    def alive(self) -> bool:
        return True

    def run(self, op: str, kwargs: dict[str, Any]) -> Any:
        return topk(**kwargs)


def topk(input: np.ndarray, topk: int, end: np.ndarray | None = None, indices_type: Any = np.int64,
         output_idx: np.ndarray | None = None, output_idx_offset: np.ndarray | None = None,
         idx_oob_fill_value: int = 2147483647,
         value_oob_fill_value: float = float("-inf"), return_value: bool = True,
         **_: Any) -> tuple[np.ndarray | None, np.ndarray]:
    """The topk largest of each row, as (values or None, indices)."""
    rows, vocab = input.shape
    indices = _padded(rows, topk, indices_type) if output_idx is None else output_idx
    values = _padded(rows, topk, np.float32)
    for r in range(rows):
        n = vocab if end is None else min(max(int(end[r]), 0), vocab)
        best = np.argsort(-input[r, :n], kind="stable")[:topk] if n > topk else np.arange(n)
        shift = 0 if output_idx_offset is None else int(output_idx_offset[r])
        indices[r, : len(best)], indices[r, len(best):] = best + shift, idx_oob_fill_value
        with np.errstate(over="ignore"):
            values[r, : len(best)], values[r, len(best):] = input[r, best], np.float64(value_oob_fill_value)
        if n > topk and np.isnan(input[r, :n]).any():
            indices[r, 0] = NAN_SENTINEL
    return (values if return_value else None), indices
