"""C = op(A) @ op(B) by T.gemm on tiles. Annotations are evaluated when a program is built."""

from typing import Any

import tilelang.language as T

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
    k_reverse: bool = False,
    k_dropped: int = 0,
    drop_tail: bool = False,
    flag_b: bool | None = None,
    bare: bool = False,
) -> Any:
    """c (+)= op(a) @ op(b); op is the transposition where its flag is set.

    a [m, k] or [k, m]; b [k, n] or [n, k]; c [m, n]; every size dynamic, tiles static.
    The running sum is acc_dtype, rounded once to out_dtype. init says what it starts from:
    `clear` (T.clear), `clear_accum` (T.gemm's flag, as an expression), `c` (the values of c).
    Faults: k_dropped tiles and drop_tail (the partial tile) are left out at the end of k;
    flag_b overrides the flag T.gemm is told (needs tile_k == tile_n); bare has no T.gemm.
    """
    m, n, k = (T.dynamic(s) for s in "mnk")
    a_shape, b_shape = ((k, m) if transpose_a else (m, k)), ((n, k) if transpose_b else (k, n))
    a_tile = (tile_k, tile_m) if transpose_a else (tile_m, tile_k)
    b_tile = (tile_n, tile_k) if transpose_b else (tile_k, tile_n)
    k_tiles = k // tile_k if drop_tail else T.ceildiv(k, tile_k)
    gemm_b = transpose_b if flag_b is None else flag_b

    @T.prim_func
    def gemm(a: T.Tensor(a_shape, dtype), b: T.Tensor(b_shape, dtype), c: T.Tensor((m, n), out_dtype)):
        with T.Kernel(T.ceildiv(m, tile_m), T.ceildiv(n, tile_n), threads=target.threads) as (bm, bn):
            at = target.operand(a_tile, dtype)
            bt = target.operand(b_tile, dtype)
            acc = target.accumulator((tile_m, tile_n), acc_dtype)
            if init == "c":
                T.copy(c[bm * tile_m, bn * tile_n], acc)
            else:
                T.clear(acc)
            for step in T.Pipelined(k_tiles - k_dropped, num_stages=num_stages):
                ko = k_tiles - 1 - step if k_reverse else step
                T.copy(a[ko * tile_k, bm * tile_m] if transpose_a else a[bm * tile_m, ko * tile_k], at)
                T.copy(b[bn * tile_n, ko * tile_k] if transpose_b else b[ko * tile_k, bn * tile_n], bt)
                if bare:
                    pass
                elif init == "clear_accum":
                    T.gemm(at, bt, acc, transpose_A=transpose_a, transpose_B=gemm_b, clear_accum=step == 0)
                else:
                    T.gemm(at, bt, acc, transpose_A=transpose_a, transpose_B=gemm_b)
            T.copy(acc, c[bm * tile_m, bn * tile_n])

    return gemm
