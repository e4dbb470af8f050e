"""A torch backend with one mistake as ports make them: `faulty_adapter:Faulty`, option `mistake`."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from adapters.cpu.backend import CpuBackend
from conformance.protocol import Description, Group, Samples, TensorSpec, supported

MIB = 1 << 20
MISTAKES = {
    "write_ignores_offset": "bytes",
    "read_one_short": "bytes",
    "read_ignores_offset": "bytes",
    "one_buffer_for_all": "bytes",
    "dies_in_alloc": "bytes",
    "fill_lost_by_view": "poison",
    "pool_promised": "pool",
    "out_of_memory_as_runtime_error": "beyond",
    "free_above_total": "beyond",
    "alive_says_nothing": "alive",
    "view_copies": "format bf16",
    "view_rounds_nans": "format bf16",
    "bf16_as_fp16": "format bf16",
    "strides_in_bytes": "format fp32",
    "rows_packed": "format fp32",
    "offset_in_elements": "format fp32",
    "inspect_forgets_offset": "format int32",
    "int64_as_int32": "format int64",
    "no_dtype": "format e4m3",
    "argument_renamed": "methods deepselect",
    "argument_demanded": "methods deepselect",
    "method_missing": "methods deepselect",
    "settings_swallowed": "settings deepselect",
    "synchronise_missing": "synchronise deepselect",
    "one_stream_forgotten": "synchronise deepselect",
    "launch_forgotten": "synchronise deepselect",
    "timer_stands_still": "timer deepselect",
    "timer_in_microseconds": "timer deepselect",
    "timer_skips_a_round": "timer deepselect",
    "op_misspelt": "description",
    "limit_on_no_field": "description",
    "platform_unknown": "description",
}
"""mistake to the row of the doctor's table that must tell it"""


class Renamed:
    """An adapter whose public function takes other names."""

    def __init__(self, inner: Any, mistake: str) -> None:
        self.inner, self.settings = inner, {}
        if mistake == "argument_renamed":
            self.topk = _renamed
        elif mistake == "argument_demanded":
            self.topk = _demanded

    def get_stride_requirement(self) -> Any:
        return self.inner.get_stride_requirement()


def _renamed(input: Any, k: int, sorted: bool = False, end: Any = None, indices_type: Any = None,
             sorted_index: bool = False, output_idx: Any = None, output_idx_offset: Any = None,
             idx_oob_fill_value: int = 0, value_oob_fill_value: float = 0.0, return_value: bool = True,
             abort_when_nan_found: bool = True) -> Any:
    return None


def _demanded(stream: Any, input: Any, topk: int, **more: Any) -> Any:
    return None


class Faulty(CpuBackend):
    """The cpu backend with one mistake in what lies between kernels and engine."""

    @classmethod
    def describe(cls, options: Mapping[str, str]) -> Description:
        mistake = options.get("mistake", "")
        limits = ({"field": "rows", "le": 8},) if mistake == "limit_on_no_field" else ()
        ops = {"deepselect.*": supported(limits=limits)}
        if mistake == "op_misspelt":
            ops["deepselect.top_k"] = supported()
        return Description("faulty", ops, requirements={"input_row_bytes": 64, "output_row_bytes": 32},
                           fork_after_import=True,
                           platform="sillicon" if mistake == "platform_unknown" else "silicon")

    def __init__(self, *, device: str, options: Mapping[str, str], group: Group | None) -> None:
        if options.get("mistake") == "no_device":
            msg = "no device answers: plug the device in"
            raise RuntimeError(msg)
        super().__init__(device=device, options={}, group=group)
        self.adapters = {"deepselect": "adapters.cpu.deepselect"}
        self.mistake = options.get("mistake", "")
        self.late: list[threading.Thread] = []
        self.only: Any = None
        if self.mistake in ("synchronise_missing", "one_stream_forgotten"):
            self.run = self.run_late  # type: ignore[method-assign]
        if self.mistake == "launch_forgotten":
            self.run = self.run_never  # type: ignore[method-assign]
        self.fill = 0

    def alive(self) -> Any:
        return None if self.mistake == "alive_says_nothing" else super().alive()

    def memory(self) -> tuple[int, int] | None:
        return {"out_of_memory_as_runtime_error": (MIB, 2 * MIB), "free_above_total": (2 * MIB, MIB)}.get(self.mistake)

    def alloc(self, nbytes: int, align: int) -> Any:
        if self.mistake == "dies_in_alloc" and nbytes == 100:
            ctypes.string_at(0)
        if self.mistake == "out_of_memory_as_runtime_error" and nbytes > 2 * MIB:
            msg = "no memory"
            raise RuntimeError(msg)
        if self.mistake == "one_buffer_for_all":
            self.only = super().alloc(4 * MIB, align) if self.only is None else self.only
            return self.only[:nbytes]
        return super().alloc(nbytes, align)

    def poison_pool(self, byte: int) -> bool:
        self.fill = byte or self.fill
        return True if self.mistake == "pool_promised" else super().poison_pool(byte)

    def write(self, buf: Any, offset: int, data: memoryview) -> None:
        super().write(buf, 0 if self.mistake == "write_ignores_offset" else offset, data)

    def read(self, buf: Any, offset: int, out: memoryview) -> None:
        if self.mistake == "synchronise_missing":
            self.join()
        if self.mistake == "read_one_short":
            out = out[:-1]
        super().read(buf, 0 if self.mistake == "read_ignores_offset" else offset, out)

    def view(self, buf: Any, offset: int, spec: TensorSpec) -> Any:
        m, size = self.mistake, spec.itemsize_bytes
        if m == "offset_in_elements":
            offset *= size
        if m == "rows_packed" and len(spec.shape) == 2:
            spec = TensorSpec(spec.shape, (spec.shape[1], 1), spec.dtype, spec.format)
        if m == "strides_in_bytes":
            spec = TensorSpec(spec.shape, tuple(s * size for s in spec.strides), spec.dtype, spec.format)
        if m == "int64_as_int32" and spec.dtype == "int64":
            spec = TensorSpec(spec.shape, spec.strides, "int32", spec.format)
        if m == "bf16_as_fp16" and spec.dtype == "bfloat16":
            spec = TensorSpec(spec.shape, spec.strides, "float16", spec.format)
        t = super().view(buf, offset, spec)
        if m == "view_copies":
            return t.clone()
        if m == "fill_lost_by_view":
            t.zero_()
        if m == "view_rounds_nans" and spec.dtype == "bfloat16":
            t.copy_(torch.where(t.isnan(), torch.full_like(t, float("nan")), t))
        return t

    def inspect(self, tensor: Any) -> Any:
        spec, whole, offset, nbytes = super().inspect(tensor)
        return spec, whole, 0 if self.mistake == "inspect_forgets_offset" else offset, nbytes

    def dtype(self, name: str) -> Any:
        if self.mistake == "no_dtype":
            raise KeyError(name)
        return super().dtype(name)

    def adapter(self, module: str) -> Any:
        inner = super().adapter(module)
        return Renamed(inner, self.mistake) if self.mistake.startswith(("argument", "method")) else inner

    def set_settings(self, module: str, settings: Mapping[str, Any]) -> None:
        if self.mistake != "settings_swallowed":
            super().set_settings(module, settings)

    def run_late(self, op: str, kwargs: dict[str, Any]) -> Any:
        """The results come 50 ms after the call, and nobody waits for them."""
        result = CpuBackend.run(self, op, kwargs)
        values = [t for t in result if isinstance(t, torch.Tensor)]
        right = [t.clone() for t in values]
        for t in values:
            t.zero_()

        def finish() -> None:
            time.sleep(0.05)
            for t, r in zip(values, right, strict=True):
                t.copy_(r)

        self.late.append(threading.Thread(target=finish))
        self.late[-1].start()
        return result

    def run_never(self, op: str, kwargs: dict[str, Any]) -> Any:
        """The results are allocated, and what should fill them is never started."""
        result = CpuBackend.run(self, op, kwargs)
        for t in (t for t in result if isinstance(t, torch.Tensor)):
            memory = t.untyped_storage()
            torch.empty(0, dtype=torch.uint8).set_(memory, 0, (memory.nbytes(),)).fill_(self.fill)
        return result

    def time(self, calls: Any, rounds: int, flush: Any) -> Samples:
        got = super().time(calls, rounds, flush)
        return {"timer_stands_still": Samples((1e-4,) * rounds, "host"),
                "timer_in_microseconds": Samples(tuple(s * 1e6 for s in got.seconds), "host"),
                "timer_skips_a_round": Samples(got.seconds[1:], "host")}.get(self.mistake, got)

    def join(self) -> None:
        for t in self.late:
            t.join()
        self.late.clear()

