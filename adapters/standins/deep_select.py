"""Contract of `deep_select` 1.0.0. Sections are those of dossiers/deepselect.md."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from adapters.cpu import deepselect
from adapters.standins.checks import align, asserts, host, is_tensor
from adapters.standins.device import pending

CPU_ROW_BYTES = 64
"""what the cpu kernel asks of its input rows"""
SENTINEL = 0x3F3F3F3F
OUTPUT_ROW_BYTES = 32
MAX_TOPK = 4096

# 2.1, 2.2 by platform
INPUT_ROW_BYTES = {"cuda": 1024, "ascend": 32}
VOCAB_LIMIT = {"cuda": 2**23, "ascend": 2**21}
DTYPES = {"cuda": (torch.bfloat16, torch.float32), "ascend": (torch.bfloat16,)}
INDEX_DTYPES = {"cuda": (torch.int32, torch.int64), "ascend": (torch.int32,)}
BASE_BYTES = 16


class Package:
    """A method a public function. Raises what section 2.5 lists, in the order of the layers."""

    def __init__(self, rig: Any) -> None:
        self.rig, self.platform = rig, rig.arch.platform
        self.kernel = deepselect.Adapter(rig.host)

    @cache  # noqa: B019  (one value a process, section 2.1)
    def get_stride_requirement(self) -> tuple[int, int]:
        return INPUT_ROW_BYTES[self.platform], OUTPUT_ROW_BYTES

    def topk(
        self, input: Any, topk: Any, sorted: bool, begin: Any, end: Any, indices_type: Any, sorted_index: bool,
        hint: Any, output_idx: Any, output_idx_offset: Any, idx_oob_fill_value: Any, value_oob_fill_value: Any,
        return_value: bool, abort_when_nan_found: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        # The Python layer.
        asserts(begin is None, "begin is not supported")
        asserts(hint is None, "hint is not supported")
        asserts(output_idx is None or output_idx.dtype == indices_type, "output_idx must have indices_type")
        # The binding.
        for name, value in (("topk", topk), ("idx_oob_fill_value", idx_oob_fill_value)):
            if isinstance(value, bool) or not isinstance(value, int) or not -(2**31) <= value < 2**31:
                msg = f"{name}: incompatible function arguments, expected a C int, got {value!r}"
                raise TypeError(msg)
        # Host checks.
        host(0 < topk <= MAX_TOPK, f"topk {topk}")
        if not isinstance(input, torch.Tensor):
            msg = "input must be a tensor"
            raise TypeError(msg)
        is_tensor("input", input, DTYPES[self.platform], (None, None))
        rows, vocab = input.shape
        host(indices_type in INDEX_DTYPES[self.platform], f"indices_type {indices_type} on {self.platform}")
        host(input.stride(1) == 1, f"last stride of input is {input.stride(1)}")
        row_bytes = input.stride(0) * input.element_size()
        host(row_bytes % INPUT_ROW_BYTES[self.platform] == 0,
             f"input rows of {row_bytes} bytes, no multiple of {INPUT_ROW_BYTES[self.platform]}")
        host(vocab < VOCAB_LIMIT[self.platform], f"vocab {vocab}")
        if sorted:
            host(self.platform == "cuda", "sorted is not supported on Ascend")
            host(bool(return_value), "sorted needs return_value")
            host(not sorted_index, "sorted excludes sorted_index")
            host(input.dtype == torch.float32, "sorted needs float32")
        for name, t in (("end", end), ("output_idx_offset", output_idx_offset)):
            if t is not None:
                is_tensor(name, t, torch.int32, (rows,))
                host(t.is_contiguous(), f"{name} must be contiguous")
        if output_idx is not None:
            is_tensor("output_idx", output_idx, indices_type, (rows, topk))
            host(output_idx.stride(1) == 1, "last stride of output_idx")
            host(output_idx.stride(0) * output_idx.element_size() % OUTPUT_ROW_BYTES == 0, "row stride of output_idx")
        host(self.rig.arch.name != "sm90", "no kernel image is available for execution on the device")
        return self._select(input, topk, sorted, end, indices_type, sorted_index, output_idx, output_idx_offset,
                            idx_oob_fill_value, value_oob_fill_value, return_value, abort_when_nan_found)

    def _select(
        self, x: torch.Tensor, topk: int, by_value: bool, end: Any, index_dtype: torch.dtype, by_index: bool,
        output_idx: Any, offset: Any, index_fill: int, value_fill: float, return_value: bool, abort: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        rows, vocab = x.shape
        device = self.rig.device
        if self.platform == "cuda" and x.data_ptr() % BASE_BYTES and x.numel():
            device.trap("misaligned address: base of input")  # 6.6: not validated, the load faults
        if end is not None and ((end < 0) | (end > vocab)).any():
            device.trap("illegal memory access: end outside 0..vocab")  # 2.2, 6.1: read as unsigned
            end = end.clamp(0, vocab)
        length = torch.full((rows,), vocab) if end is None else end.long()
        nan = torch.zeros(rows, dtype=torch.bool)
        if vocab:
            nan = (torch.isnan(x) & (torch.arange(vocab) < length[:, None])).any(1)
        short = length <= topk
        if self.platform == "cuda":
            nan &= ~short  # 2.4: a short row is not checked
        if abort and nan.any():
            device.trap("unspecified launch failure: NaN found")
        unit = CPU_ROW_BYTES // x.element_size()
        whole = torch.zeros(rows, max(align(vocab, unit), unit), dtype=x.dtype)[:, :vocab]
        whole.copy_(x)
        values, indices = self.kernel.topk(
            whole, topk, sorted=by_value, end=end, indices_type=index_dtype, sorted_index=by_index,
            output_idx_offset=offset, idx_oob_fill_value=index_fill, value_oob_fill_value=value_fill,
            return_value=return_value, abort_when_nan_found=False)
        if self.platform == "cuda":
            # The rest of such a row, and its values, are unspecified.
            indices[nan, 1:] = -0x5B5B5B5B
            if values is not None:
                values[nan] = -5.0
        else:
            indices[nan] = SENTINEL
        pairs = [pending(t) for t in (values, indices) if t is not None]
        if output_idx is not None:
            pairs[-1] = (output_idx, indices)
        device.launch(pairs)
        return (pairs[0][0] if values is not None else None), pairs[-1][0]
