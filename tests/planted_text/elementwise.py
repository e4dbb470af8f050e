"""A cast that ends TileLang's own process, and a clamp that is none. Annotations are evaluated at building."""

from typing import Any

import tilelang.ascend.language as A
import tilelang.language as T


def cast(target: Any, *, dtype: str, out_dtype: str, tile: int) -> Any:
    """FP32 to FP4 in SIMD: TileLang 0.1.15 divides by zero as it lowers this for Ascend."""

    @A.prim_func
    def cast(x: A.Tensor((1024,), "float32"), out: A.Tensor((1024,), "float4_e2m1fn")):
        with A.Kernel(8) as b:
            source = A.alloc_shared((128,), "float32")
            narrow = A.alloc_shared((128,), "float4_e2m1fn")
            A.copy(x[b * 128], source)
            with A.SimdVF():
                for i in A.Parallel(128):
                    narrow[i] = A.cast(source[i], "float4_e2m1fn")
            A.copy(narrow, out[b * 128])

    return cast


def clamp(target: Any, *, dtype: str, tile: int, bare: bool = False) -> Any:
    """A code generator that drops T.clamp would make this text of a clamp."""
    n = T.dynamic("n")

    @T.prim_func
    def clamp(x: T.Tensor((n,), dtype), out: T.Tensor((n,), dtype), low: T.float32, high: T.float32):
        with T.Kernel(T.ceildiv(n, tile), threads=target.threads) as b:
            for i in target.loop(tile):
                if b * tile + i < n:
                    out[b * tile + i] = x[b * tile + i]

    return clamp
