"""C = op(A) @ op(B) by T.gemm on the cube. Annotations are evaluated when a program is built."""

from typing import Any

import tilelang.ascend.language as T

from adapters.upstream.tilelang_programs.target import Target


def gemm(
    target: Target,
    *,
    dtype: str,
    out_dtype: str,
    acc_dtype: str,
    transpose_a: bool,
    transpose_b: bool,
    init: str,
    tile_m: int,
    tile_n: int,
    tile_k: int,
    num_stages: int = 2,
    bare: bool = False,
) -> Any:
    """c (+)= op(a) @ op(b); op is the transposition where its flag is set.

    a [m, k] or [k, m]; b [k, n] or [n, k]; c [m, n]; every size dynamic, tiles static. T.gemm takes A as it is and B
    transposed from L1, every other form from L0 only. The sum begins at nothing by the flag of T.gemm, for L0C has
    no fill; with init `c` the tile of c is added in the unified buffer, for nothing loads into L0C.
    bare is a fault: without T.gemm.
    """
    m, n, k = (T.dynamic(s) for s in "mnk")
    a_shape, b_shape = ((k, m) if transpose_a else (m, k)), ((n, k) if transpose_b else (k, n))
    a_tile = (tile_k, tile_m) if transpose_a else (tile_m, tile_k)
    b_tile = (tile_n, tile_k) if transpose_b else (tile_k, tile_n)
    from_l1 = transpose_b and not transpose_a

    @T.macro
    def product(a, b, acc, bm, bn):
        at = target.operand(a_tile, dtype)
        bt = target.operand(b_tile, dtype)
        for ko in T.Pipelined(T.ceildiv(k, tile_k), num_stages=num_stages):
            T.copy(a[ko * tile_k, bm * tile_m] if transpose_a else a[bm * tile_m, ko * tile_k], at)
            T.copy(b[bn * tile_n, ko * tile_k] if transpose_b else b[ko * tile_k, bn * tile_n], bt)
            if bare:
                pass
            elif from_l1:
                T.gemm(at, bt, acc, transpose_B=True, clear_accum=ko == 0)
            else:
                a0 = T.alloc_l0a(a_tile, dtype)
                b0 = T.alloc_l0b(b_tile, dtype)
                T.copy(at, a0)
                T.copy(bt, b0)
                T.gemm(a0, b0, acc, transpose_A=transpose_a, transpose_B=transpose_b, clear_accum=ko == 0)

    @T.prim_func
    def gemm(a: T.Tensor(a_shape, dtype), b: T.Tensor(b_shape, dtype), c: T.Tensor((m, n), out_dtype)):
        with T.Kernel(T.ceildiv(m, tile_m)) as bm:
            acc = target.accumulator((tile_m, tile_n), acc_dtype)
            for bn in T.serial(T.ceildiv(n, tile_n)):
                product(a, b, acc, bm, bn)
                if init == "c":
                    total = target.vector((tile_m, tile_n), acc_dtype)
                    before = target.vector((tile_m, tile_n), out_dtype)
                    T.copy(acc, total)
                    T.copy(c[bm * tile_m, bn * tile_n], before)
                    with T.SimtVF(threads=target.threads):
                        for i, j in target.loop(tile_m, tile_n):
                            before[i, j] = T.cast(total[i, j] + T.cast(before[i, j], acc_dtype), out_dtype)
                    T.copy(before, c[bm * tile_m, bn * tile_n])
                else:
                    T.copy(acc, c[bm * tile_m, bn * tile_n])

    return gemm
