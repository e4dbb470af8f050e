"""The ops that simdev has, by their public signatures; arguments are checked here, arithmetic is the device's."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from simdev import runtime
from simdev.runtime import CastArgs, GemmArgs, Matrix, TopkArgs

REQUIREMENTS = {"input_row_bytes": 512, "output_row_bytes": 32}
"""Bytes that row strides of deepselect must be multiples of."""

MAX_TOPK, MAX_COLUMNS = 4096, 2**23
FLOATS = {"bfloat16": runtime.BF16, "float32": runtime.F32}
TYPES = {**FLOATS, "int32": runtime.I32, "float8_e4m3fn": runtime.BYTE}


def matrix(t: Any, strides: Sequence[int] | None = None) -> Matrix:
    """A tensor of one or two axes as the device takes it; None is no memory."""
    if t is None:
        return Matrix()
    row, column = strides or (*t.strides, 1)[:2]
    return Matrix(t.buf.mem, t.offset, row, column, TYPES[t.dtype], 0)


def require(holds: bool, message: str, error: type[Exception] = RuntimeError) -> None:
    if not holds:
        raise error(message)


def is_tensor(t: Any) -> bool:
    return hasattr(t, "spec")


class DeepGemm:
    """`deepgemm.*`."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.settings: dict[str, Any] = {"deterministic_algorithms": False}

    def bf16_gemm_nt(self, a: Any, b: Any, d: Any, c: Any = None, compiled_dims: str = "nk", alpha: float | None = None,
                     epilogue: None = None) -> None:
        """d[m,n] = alpha a[m,k] b[n,k].T (+ c). a, b: bf16; d: bf16 or fp32, n side by side; c: as d, broadcast to it.

        Raises TypeError for what is no tensor, RuntimeError for everything else, before anything is launched.
        """
        for t in (a, b, d):
            require(is_tensor(t), f"an operand must be a tensor, got {type(t).__name__}", TypeError)
        for name, t in (("a", a), ("b", b)):
            require(len(t.shape) == 2, f"{name} must have 2 axes, got {len(t.shape)}")
            require(t.dtype == "bfloat16", f"{name} must be bfloat16, got {t.dtype}")
        (m, k), n = a.shape, b.shape[0]
        require(b.shape[1] == k, f"a and b must agree in k, got {k} and {b.shape[1]}")
        require(d.shape == (m, n), f"d must have shape {(m, n)}, got {d.shape}")
        require(d.dtype in FLOATS, f"d must be bfloat16 or float32, got {d.dtype}")
        require(d.strides[1] == 1 or n <= 1, "d must be contiguous along n")
        require(epilogue is None, "epilogues are not supported")
        strides = (0, 0)
        if c is not None:
            require(c.dtype == d.dtype, f"c must have the dtype of d, got {c.dtype}")
            fits = len(c.shape) <= 2 and all(x in (1, y) for x, y in zip(c.shape[::-1], (n, m), strict=False))
            require(fits, f"c of shape {c.shape} does not broadcast to {d.shape}")
            whole = ((0,) * (2 - len(c.shape)) + c.strides, (1,) * (2 - len(c.shape)) + c.shape)
            strides = tuple(0 if x == 1 else s for s, x in zip(*whole, strict=True))
        if m and n:
            factor = 1.0 if alpha is None else alpha
            args = GemmArgs(matrix(a), matrix(b), matrix(c, strides), matrix(d), m, n, k, factor)
            self.backend.launch("gemm", args, a, b, c, d)

    def per_token_cast_to_fp8(self, x: Any, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False) -> Any:
        """(e4m3 [m, n], scales) of x [m, n]: fp32 [m, groups], or packed int32 [m, ceil(groups / 4)].

        Raises AssertionError for a wrong number of axes and packed scales that are no powers of two, else RuntimeError.
        """
        require(len(x.shape) == 2, f"x must have 2 axes, got {len(x.shape)}", AssertionError)
        require(use_ue8m0 or not use_packed_ue8m0, "packed scales must be powers of two", AssertionError)
        require(x.dtype in FLOATS, f"x must be bfloat16 or float32, got {x.dtype}")
        require(gran_k > 0, f"gran_k must be positive, got {gran_k}")
        (m, n), empty = x.shape, self.backend.empty
        width = -(-n // (gran_k * (4 if use_packed_ue8m0 else 1)))
        codes = empty((m, n), (n, 1), "float8_e4m3fn")
        scales = empty((m, width), (width, 1), "int32" if use_packed_ue8m0 else "float32")
        kind = 2 if use_packed_ue8m0 else int(use_ue8m0)
        if m and n:
            args = CastArgs(matrix(x), matrix(codes), matrix(scales), m, n, gran_k, kind)
            self.backend.launch("cast", args, x, codes, scales)
        return codes, scales


class DeepSelect:
    """`deepselect.*`."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.settings: dict[str, Any] = {}

    def get_stride_requirement(self) -> tuple[int, int]:
        return REQUIREMENTS["input_row_bytes"], REQUIREMENTS["output_row_bytes"]

    def topk(self, input: Any, topk: int, sorted: bool = False, begin: None = None, end: Any = None,
             indices_type: str = "int64", sorted_index: bool = False, hint: None = None, output_idx: Any = None,
             output_idx_offset: Any = None, idx_oob_fill_value: int = 2147483647,
             value_oob_fill_value: float = float("-inf"), return_value: bool = True,
             abort_when_nan_found: bool = True) -> Any:
        """(values or None, indices) of the topk largest of each row; indices are int32 here, whatever the default.

        Raises, before anything is launched: AssertionError for begin, hint or another dtype of output_idx; TypeError
        for numbers that don't fit 32 bits; RuntimeError for everything else.
        """
        require(begin is None and hint is None, "begin and hint are not supported", AssertionError)
        same = output_idx is None or output_idx.dtype == indices_type
        require(same, f"output_idx must have dtype {indices_type}", AssertionError)
        require(indices_type == "int32", f"the device has no {indices_type}")
        require(is_tensor(input), "input must be a tensor", TypeError)
        for name, n in (("topk", topk), ("idx_oob_fill_value", idx_oob_fill_value)):
            require(-(2**31) <= operator.index(n) < 2**31, f"{name} must fit 32 bits, got {n}", TypeError)
        require(0 < topk <= MAX_TOPK, f"topk must be in 1..{MAX_TOPK}, got {topk}")
        require(len(input.shape) == 2, f"input must have 2 axes, got {len(input.shape)}")
        require(input.dtype in FLOATS, f"input must be bfloat16 or float32, got {input.dtype}")
        rows, columns = input.shape
        require(columns < MAX_COLUMNS, f"vocab must be below {MAX_COLUMNS}, got {columns}")
        rows_of(input, "input", REQUIREMENTS["input_row_bytes"])
        by_value = return_value and not sorted_index and input.dtype == "float32"
        require(not sorted or by_value, "sorted goes with values of float32, and not with sorted_index")
        for name, t in (("end", end), ("output_idx_offset", output_idx_offset)):
            fits = t is None or (t.dtype == "int32" and t.shape == (rows,) and (t.strides == (1,) or rows <= 1))
            require(fits, f"{name} must be int32 of shape ({rows},), side by side")
        if output_idx is not None:
            shape = output_idx.shape
            require(shape == (rows, topk), f"output_idx must have shape {(rows, topk)}, got {shape}")
            rows_of(output_idx, "output_idx", REQUIREMENTS["output_row_bytes"])
        values = self.lines(rows, topk, input) if return_value else None
        indices = self.lines(rows, topk, None) if output_idx is None else output_idx
        if rows:
            arrays = map(matrix, (input, values, indices, end, output_idx_offset))
            args = TopkArgs(*arrays, rows, columns, topk, int(sorted), idx_oob_fill_value, int(abort_when_nan_found),
                            value_oob_fill_value)
            self.backend.launch("topk", args, input, values, indices, end, output_idx_offset)
        return values, indices

    def lines(self, rows: int, columns: int, like: Any) -> Any:
        """A result whose rows start at multiples of what outputs must have."""
        dtype, item = (like.dtype, like.spec.itemsize_bytes) if like is not None else ("int32", 4)
        unit = REQUIREMENTS["output_row_bytes"] // item
        return self.backend.empty((rows, columns), (-(-columns // unit) * unit, 1), dtype)


def rows_of(t: Any, name: str, unit: int) -> None:
    require(t.strides[1] == 1 or t.shape[1] == 1, f"the last stride of {name} must be 1, got {t.strides[1]}")
    row_bytes = t.strides[0] * t.spec.itemsize_bytes
    require(row_bytes % unit == 0, f"{name} row stride must be a multiple of {unit} bytes, got {row_bytes}")
