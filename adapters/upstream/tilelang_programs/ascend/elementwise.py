"""One value at a time: functions, operators, clamp and casts. Annotations are evaluated when a program is built."""

from typing import Any

import tilelang.ascend.language as T

from adapters.upstream.tilelang_programs.elementwise import FAMILIES, FUNCTIONS, operators, picked
from adapters.upstream.tilelang_programs.target import Target


def unary(target: Target, *, dtype: str, family: str, tile: int, only: tuple[str, ...] | None = None) -> Any:
    """out[i] = f(x[i]); f is number `which` of the family. x [n], out [n], which int32."""
    n = T.dynamic("n")
    table = {name: FUNCTIONS[name] for name in FAMILIES[family]}

    @T.prim_func
    def unary(x: T.Tensor((n,), dtype), out: T.Tensor((n,), dtype), which: T.int32):
        with T.Kernel(T.ceildiv(n, tile)) as b, T.SimtVF(threads=target.threads):
            for i in target.loop(tile):
                if b * tile + i < n:
                    out[b * tile + i] = picked(table, target.lacks(dtype), which, dtype, x[b * tile + i], only=only)

    return unary


def binary(target: Target, *, dtype: str, tile: int, only: tuple[str, ...] | None = None) -> Any:
    """out[i] = f(a[i], b[i]); f is number `which` of operators(dtype). All [n]."""
    n = T.dynamic("n")
    table = operators(dtype)

    @T.prim_func
    def binary(a: T.Tensor((n,), dtype), b: T.Tensor((n,), dtype), out: T.Tensor((n,), dtype), which: T.int32):
        with T.Kernel(T.ceildiv(n, tile)) as block, T.SimtVF(threads=target.threads):
            for i in target.loop(tile):
                if block * tile + i < n:
                    at = block * tile + i
                    out[at] = picked(table, target.lacks(dtype), which, dtype, a[at], b[at], only=only)

    return binary


def clamp(target: Target, *, dtype: str, tile: int, bare: bool = False) -> Any:
    """out[i] = x[i] held in [low, high] by T.clamp; NaN stays NaN. x [n], out [n]; low, high are run-time numbers.

    bare is a fault: without T.clamp.
    """
    n = T.dynamic("n")

    @T.prim_func
    def clamp(x: T.Tensor((n,), dtype), out: T.Tensor((n,), dtype), low: T.float32, high: T.float32):
        with T.Kernel(T.ceildiv(n, tile)) as b, T.SimtVF(threads=target.threads):
            for i in target.loop(tile):
                if b * tile + i < n:
                    at = b * tile + i
                    out[at] = x[at] if bare else T.clamp(x[at], T.cast(low, dtype), T.cast(high, dtype))

    return clamp


def cast(target: Target, *, dtype: str, out_dtype: str, tile: int) -> Any:
    """out[i] = x[i] as out_dtype by T.cast. x [n], out [n]."""
    n = T.dynamic("n")

    @T.prim_func
    def cast(x: T.Tensor((n,), dtype), out: T.Tensor((n,), out_dtype)):
        with T.Kernel(T.ceildiv(n, tile)) as b, T.SimtVF(threads=target.threads):
            for i in target.loop(tile):
                if b * tile + i < n:
                    out[b * tile + i] = T.cast(x[b * tile + i], out_dtype)

    return cast
