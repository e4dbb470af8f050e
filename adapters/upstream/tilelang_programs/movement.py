"""Copies: tiles with tails, transposition, indexed reads and atomic writes.

Annotations are evaluated when a program is built, so this file can't postpone them.
"""

from typing import Any

import tilelang.language as T

from adapters.upstream.tilelang_programs.target import Target


def copy(target: Target, *, dtype: str, tile_m: int, tile_n: int, fill: float | None, drop_tail: bool = False) -> Any:
    """out[i,j] = x[i,j]; where out is larger than x, the fill value; where smaller, nothing else is written.

    x [m, n], out [mo, no], dtype; every size dynamic. Loads from outside give 0, or
    `fill` by T.annotate_safe_value; stores outside are dropped (T.copy's rule).
    """
    m, n, mo, no = (T.dynamic(s) for s in ("m", "n", "mo", "no"))
    blocks_m, blocks_n = (mo // tile_m, no // tile_n) if drop_tail else (T.ceildiv(mo, tile_m), T.ceildiv(no, tile_n))

    @T.prim_func
    def copy(x: T.Tensor((m, n), dtype), out: T.Tensor((mo, no), dtype)):
        with T.Kernel(blocks_m, blocks_n, threads=target.threads) as (bm, bn):
            tile = target.operand((tile_m, tile_n), dtype)
            if fill is not None:
                T.annotate_safe_value({x: T.cast(fill, dtype)})
            T.copy(x[bm * tile_m, bn * tile_n], tile)
            T.copy(tile, out[bm * tile_m, bn * tile_n])

    return copy


def copy_unguarded(target: Target, *, dtype: str, tile_m: int, tile_n: int) -> Any:
    """A fault: the last row is stored in whole tiles, past the end of the tensor.

    Needs the pass config `tl.disable_safe_memory_legalize`, for the language guards every access.
    """
    m, n, mo, no = (T.dynamic(s) for s in ("m", "n", "mo", "no"))

    @T.prim_func
    def copy_unguarded(x: T.Tensor((m, n), dtype), out: T.Tensor((mo, no), dtype)):
        with T.Kernel(T.ceildiv(mo, tile_m), T.ceildiv(no, tile_n), threads=target.threads) as (bm, bn):
            for i, j in target.loop(tile_m, tile_n):
                inside = (bm * tile_m + i < mo) & (bn * tile_n + j < no)
                if inside | (bm * tile_m + i == mo - 1):
                    out[bm * tile_m + i, bn * tile_n + j] = T.if_then_else(
                        (bm * tile_m + i < m) & (bn * tile_n + j < n),
                        x[bm * tile_m + i, bn * tile_n + j],
                        T.cast(0, dtype),
                    )

    return copy_unguarded


def transpose(
    target: Target, *, dtype: str, tile_m: int, tile_n: int, swap_blocks: bool = True, bare: bool = False
) -> Any:
    """out[j,i] = x[i,j] by T.transpose on tiles. x [m, n], out [n, m]; the callee allocates out.

    Faults: swap_blocks=False, tiles are transposed, their places are not; bare, without T.transpose.
    """
    m, n = T.dynamic("m"), T.dynamic("n")

    @T.prim_func
    def transpose(x: T.Tensor((m, n), dtype), out: T.Tensor((n, m), dtype)):
        with T.Kernel(T.ceildiv(m, tile_m), T.ceildiv(n, tile_n), threads=target.threads) as (bm, bn):
            tile = target.operand((tile_m, tile_n), dtype)
            turned = target.operand((tile_n, tile_m), dtype)
            T.copy(x[bm * tile_m, bn * tile_n], tile)
            if not bare:
                T.transpose(tile, turned)
            if swap_blocks:
                T.copy(turned, out[bn * tile_n, bm * tile_m])
            else:
                T.copy(turned, out[bm * tile_n, bn * tile_m])

    return transpose


def gather(target: Target, *, dtype: str, index_dtype: str, tile: int, clamped: bool = False) -> Any:
    """out[i] = x[index[i]], and 0 where index[i] < 0 or >= n (the rule for loads outside a tensor).

    x [n], index [k], out [k]. clamped=True is a fault: the nearest element instead of 0.
    """
    n, k = T.dynamic("n"), T.dynamic("k")

    @T.prim_func
    def gather(x: T.Tensor((n,), dtype), index: T.Tensor((k,), index_dtype), out: T.Tensor((k,), dtype)):
        with T.Kernel(T.ceildiv(k, tile), threads=target.threads) as b:
            for i in target.loop(tile):
                if b * tile + i < k:
                    if clamped:
                        out[b * tile + i] = x[T.max(T.min(index[b * tile + i], n - 1), 0)]
                    else:
                        out[b * tile + i] = x[index[b * tile + i]]

    return gather


def atomic_add(target: Target, *, dtype: str, index_dtype: str, tile: int, atomic: bool = True) -> Any:
    """out[index[i]] += x[i] for all i by T.atomic_add; an index outside out is dropped.

    x [k], index [k], out [n]. atomic=False is a fault: the last writer wins.
    """
    n, k = T.dynamic("n"), T.dynamic("k")

    @T.prim_func
    def atomic_add(x: T.Tensor((k,), dtype), index: T.Tensor((k,), index_dtype), out: T.Tensor((n,), dtype)):
        with T.Kernel(T.ceildiv(k, tile), threads=target.threads) as b:
            for i in target.loop(tile):
                if b * tile + i < k:
                    if atomic:
                        T.atomic_add(out[index[b * tile + i]], x[b * tile + i])
                    else:
                        out[index[b * tile + i]] = x[b * tile + i]

    return atomic_add
