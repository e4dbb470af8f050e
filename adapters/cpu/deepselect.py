"""DeepSelect on the CPU: the public functions over the blocked kernel of `kernels.select`."""

from __future__ import annotations

import operator
import os
import sys
from typing import Any

import torch

from adapters.cpu.kernels import select
from adapters.cpu.kernels.knobs import Knobs

INPUT_ROW_BYTES = 64
OUTPUT_ROW_BYTES = 32
MAX_TOPK = 4096
VOCAB_LIMIT = 2**23
NAN_SENTINEL = 0x3F3F3F3F

FAULTS = {
    "offset_on_fill": "the row's offset is added to the fill index too",
    "int32_wrap": "an int64 result is formed in int32 and wraps",
    "slack_written": "the index row is stored in whole 32-byte vectors, over what lies behind the caller's columns",
    "contiguous_rows": "the index result is stored as if its rows followed each other without gaps",
    "skip_empty_row": "a row of length 0 is not written",
    "stale_values": "values stay in descending order while the indices are put in another order",
    "copy_output": "output_idx is ignored and a fresh tensor is returned",
    "nan_spreads": "one row with a NaN marks all rows",
    "stride_in_elements": "the stride requirement is given in float32 elements",
    "unpadded_result": "rows of the allocated results are not rounded up to 32 bytes",
}
"""Faults of the layer that writes results (`Knobs.fault`); those of the scan stand in `kernels.select`."""


class Adapter:
    """A method an op; keyword arguments as in the public signatures."""

    def __init__(self, backend: Any) -> None:
        self._knobs: Knobs = backend.knobs

    def get_stride_requirement(self) -> tuple[int, int]:
        """Bytes that row strides of the input and of the outputs must be multiples of."""
        unit = torch.float32.itemsize if self._knobs.fault == "stride_in_elements" else 1
        return INPUT_ROW_BYTES // unit, OUTPUT_ROW_BYTES // unit

    def topk(
        self,
        input: torch.Tensor,
        topk: int,
        sorted: bool = False,
        begin: None = None,
        end: torch.Tensor | None = None,
        indices_type: torch.dtype = torch.int64,
        sorted_index: bool = False,
        hint: None = None,
        output_idx: torch.Tensor | None = None,
        output_idx_offset: torch.Tensor | None = None,
        idx_oob_fill_value: int = 2147483647,
        value_oob_fill_value: float = float("-inf"),
        return_value: bool = True,
        abort_when_nan_found: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The topk largest of each row, as (values or None, indices).

        input: bf16 or fp32 [b, vocab], last stride 1, row stride a multiple of 64 bytes.
        end, output_idx_offset: int32 [b]. output_idx: [b, topk] of indices_type, returned
        as the same object. Rows with end <= topk hold 0..end-1, then the fill values.
        A NaN in a row longer than topk ends the process, or with abort_when_nan_found=False
        puts 0x3F3F3F3F into indices[row][0]. end outside [0, vocab] is clamped.

        Raises, before anything is allocated or written: AssertionError for begin, hint or
        a wrong dtype of output_idx; TypeError for values that do not fit their C type;
        RuntimeError for everything else that the contract rules out.
        """
        _require(begin is None, "begin is not supported", AssertionError)
        _require(hint is None, "hint is not supported", AssertionError)
        same = output_idx is None or output_idx.dtype == indices_type
        _require(same, f"output_idx must have the dtype {indices_type}", AssertionError)
        _require(isinstance(input, torch.Tensor), "input must be a tensor", TypeError)
        topk = _c_int("topk", topk)
        fill = _c_int("idx_oob_fill_value", idx_oob_fill_value)
        value_fill = torch.tensor(float(value_oob_fill_value), dtype=torch.float64).float()
        _check_call(input, topk, sorted, sorted_index, return_value, indices_type)
        rows, vocab = input.shape
        _check_rows("end", end, rows)
        _check_rows("output_idx_offset", output_idx_offset, rows)
        if output_idx is not None:
            _check_output(output_idx, rows, topk)

        knobs = self._knobs
        length = torch.full((rows,), vocab) if end is None else end.long().clamp(0, vocab)
        order = "value" if sorted else "index" if sorted_index else "any"
        position, nan = select.select_rows(input, topk, length, order, knobs)
        if abort_when_nan_found and nan.any():
            sys.stderr.write(f"deepselect.topk: NaN in row {int(nan.nonzero()[0])}\n")
            sys.stderr.flush()
            os.abort()
        if knobs.fault == "nan_spreads":
            nan = nan.any().expand_as(nan)
        written = torch.arange(rows)[length > 0] if knobs.fault == "skip_empty_row" else slice(None)

        values = None
        if return_value:
            source = position
            if knobs.fault == "stale_values" and order != "value":
                source = select.select_rows(input, topk, length, "value", knobs).position
            values = self._allocate(rows, topk, input.dtype)
            values[written] = _gather(input, source, _round(value_fill, input.dtype, knobs))[written]
        indices = _indices(position, nan, fill, output_idx_offset, indices_type, knobs)
        if output_idx is None or knobs.fault == "copy_output":
            output_idx = self._allocate(rows, topk, indices_type)
        _store(output_idx, indices, written, knobs)
        return values, output_idx

    def _allocate(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        unit = 1 if self._knobs.fault == "unpadded_result" else OUTPUT_ROW_BYTES // dtype.itemsize
        return torch.empty(rows, -(-columns // unit) * unit, dtype=dtype)[:, :columns]


def _gather(x: torch.Tensor, position: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
    if x.shape[1] == 0:
        return fill.expand(position.shape)
    # As integers: torch's gather of bfloat16 gives every NaN another pattern.
    whole = torch.int16 if x.dtype == torch.bfloat16 else torch.int32
    picked = x.view(whole).gather(1, position.clamp(min=0)).view(x.dtype)
    return torch.where(position < 0, fill, picked)


def _round(fill: torch.Tensor, dtype: torch.dtype, knobs: Knobs) -> torch.Tensor:
    """The fill value in the dtype of the values: to nearest even, as the contract says."""
    if knobs.output_rounding == "toward_zero" and dtype == torch.bfloat16:
        fill = (fill.view(torch.int32) & -0x10000).view(torch.float32)
    return fill.to(dtype)


def _indices(
    position: torch.Tensor, nan: torch.Tensor, fill: int, offset: torch.Tensor | None, dtype: torch.dtype, knobs: Knobs
) -> torch.Tensor:
    indices = position if offset is None else position + offset.unsqueeze(1)
    missing: Any = fill
    if offset is not None and knobs.fault == "offset_on_fill":
        missing = (fill + offset.long()).unsqueeze(1)
    indices = torch.where(position < 0, missing, indices)
    if knobs.fault == "int32_wrap":
        indices = indices.int()
    indices = indices.to(dtype)
    indices[:, 0].masked_fill_(nan, NAN_SENTINEL)
    return indices


def _store(out: torch.Tensor, indices: torch.Tensor, written: Any, knobs: Knobs) -> None:
    rows, columns = indices.shape
    if knobs.fault == "contiguous_rows":
        out.as_strided((rows, columns), (columns, 1)).copy_(indices)
        return
    out[written] = indices[written]
    if knobs.fault == "slack_written":
        unit = OUTPUT_ROW_BYTES // out.element_size()
        wide = -(-columns // unit) * unit
        total = out.untyped_storage().nbytes() // out.element_size()
        for row in range(rows):
            first = out.storage_offset() + row * out.stride(0)
            stop = min(first + wide, total)
            out.as_strided((stop - first,), (1,), first)[columns:].fill_(0)


def _c_int(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        msg = f"{name} must be an integer, got {type(value).__name__}"
        raise TypeError(msg) from None
    if not -(2**31) <= number < 2**31:
        msg = f"{name} must fit 32 bits, got {number}"
        raise TypeError(msg)
    return number


def _require(holds: bool, message: str, error: type[Exception] = RuntimeError) -> None:
    if not holds:
        raise error(message)


def _check_row_bytes(name: str, t: torch.Tensor, unit: int) -> None:
    row_bytes = t.stride(0) * t.element_size()
    _require(row_bytes % unit == 0, f"{name} row stride must be a multiple of {unit} bytes, got {row_bytes}")


def _check_call(
    x: torch.Tensor, topk: int, by_value: bool, by_index: bool, return_value: bool, indices_type: torch.dtype
) -> None:
    _require(0 < topk <= MAX_TOPK, f"topk must be in 1..{MAX_TOPK}, got {topk}")
    _require(x.dim() == 2, f"input must have 2 dimensions, got {x.dim()}")
    _require(x.dtype in (torch.bfloat16, torch.float32), f"input must be bfloat16 or float32, got {x.dtype}")
    _require(indices_type in (torch.int32, torch.int64), f"indices_type must be int32 or int64, got {indices_type}")
    _require(x.stride(1) == 1, f"the last stride of input must be 1, got {x.stride(1)}")
    _check_row_bytes("input", x, INPUT_ROW_BYTES)
    _require(x.shape[1] < VOCAB_LIMIT, f"vocab must be below {VOCAB_LIMIT}, got {x.shape[1]}")
    if by_value:
        _require(return_value, "sorted needs return_value")
        _require(not by_index, "sorted and sorted_index exclude each other")
        _require(x.dtype == torch.float32, "sorted needs float32 input")


def _check_rows(name: str, t: torch.Tensor | None, rows: int) -> None:
    if t is None:
        return
    _require(t.dtype == torch.int32, f"{name} must be int32, got {t.dtype}")
    _require(tuple(t.shape) == (rows,), f"{name} must have shape ({rows},), got {tuple(t.shape)}")
    _require(t.is_contiguous(), f"{name} must be contiguous")
    _require(t.device.type == "cpu", f"{name} must be on the device of input")


def _check_output(t: torch.Tensor, rows: int, topk: int) -> None:
    _require(tuple(t.shape) == (rows, topk), f"output_idx must have shape ({rows}, {topk}), got {tuple(t.shape)}")
    _require(t.stride(1) == 1 or topk == 1, f"the last stride of output_idx must be 1, got {t.stride(1)}")
    _check_row_bytes("output_idx", t, OUTPUT_ROW_BYTES)
    _require(rows <= 1 or t.stride(0) >= topk, "rows of output_idx overlap")
