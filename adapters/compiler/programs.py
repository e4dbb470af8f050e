"""From the arguments of an op to the program that is compiled for them: a function an op.

Tensors are `TensorSpec`; only their dtypes count, for every size of a program is a run-time number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from conformance.protocol import TensorSpec

Row = tuple[str, str, Mapping[str, Any]]
"""module of the text, program, parameters"""

TILE = {"tile_m": 32, "tile_n": 64}
GEMM_TILE = {"tile_m": 64, "tile_n": 64, "tile_k": 32}
ACCUMULATORS = {"int8": "int32", "uint8": "int32", "float64": "float64"}
"""dtype of a gemm's running sum by operand dtype; float32 for all others"""


def _copy(x: TensorSpec, out: TensorSpec, fill: float | None = None) -> Row:
    return "movement", "copy", {"dtype": x.dtype, "fill": fill, **TILE}


def _transpose(x: TensorSpec) -> Row:
    return "movement", "transpose", {"dtype": x.dtype, **TILE}


def _indexed(program: str) -> Callable[..., Row]:
    def row(x: TensorSpec, index: TensorSpec, out: TensorSpec) -> Row:
        return "movement", program, {"dtype": x.dtype, "index_dtype": index.dtype, "tile": 128}

    return row


def _gemm(a: TensorSpec, b: TensorSpec, c: TensorSpec, *, transpose_a: bool, transpose_b: bool, init: str) -> Row:
    return "gemm", "gemm", {
        "dtype": a.dtype, "out_dtype": c.dtype, "acc_dtype": ACCUMULATORS.get(a.dtype, "float32"),
        "transpose_a": transpose_a, "transpose_b": transpose_b, "init": init, **GEMM_TILE,
    }  # fmt: skip


def _reduce(x: TensorSpec, out: TensorSpec, *, kind: str, dim: int, clear: bool) -> Row:
    return "reduce", "reduce", {"dtype": x.dtype, "kind": kind, "dim": dim, "clear": clear, **TILE}


def _elementwise(x: TensorSpec, out: TensorSpec, *, function: str) -> Row:
    # One function alone: a whole family would say of none which one the target lacks.
    from adapters.upstream.tilelang_programs.elementwise import family_of

    return "elementwise", "unary", {"dtype": x.dtype, "family": family_of(function), "tile": 128, "only": (function,)}


def _arithmetic(a: TensorSpec, b: TensorSpec, out: TensorSpec, *, function: str) -> Row:
    return "elementwise", "binary", {"dtype": a.dtype, "tile": 128, "only": (function,)}


def _clamp(x: TensorSpec, out: TensorSpec, *, low: float, high: float) -> Row:
    return "elementwise", "clamp", {"dtype": x.dtype, "tile": 128}


def _cast(x: TensorSpec, out: TensorSpec) -> Row:
    return "elementwise", "cast", {"dtype": x.dtype, "out_dtype": out.dtype, "tile": 128}


BARE: Mapping[str, Mapping[str, Any]] = {
    "transpose": {"bare": True}, "gemm": {"bare": True}, "reduce": {"bare": True}, "clamp": {"bare": True},
    "unary": {"only": ()}, "binary": {"only": ()},
}  # fmt: skip
"""What makes a program the same without the one feature that it is about. Other programs touch no array without it."""

PROGRAMS: Mapping[str, Callable[..., Row]] = {
    "tilelang.copy": _copy,
    "tilelang.transpose": _transpose,
    "tilelang.gather": _indexed("gather"),
    "tilelang.atomic_add": _indexed("atomic_add"),
    "tilelang.gemm": _gemm,
    "tilelang.reduce": _reduce,
    "tilelang.elementwise": _elementwise,
    "tilelang.arithmetic": _arithmetic,
    "tilelang.clamp": _clamp,
    "tilelang.cast": _cast,
}
