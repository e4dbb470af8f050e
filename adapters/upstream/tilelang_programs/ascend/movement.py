"""Copies: tiles with tails, indexed reads and atomic writes. Annotations are evaluated when a program is built.

There is no `transpose`: the target has no T.transpose.
"""

from typing import Any

import tilelang.ascend.language as T

from adapters.upstream.tilelang_programs.target import Target


def copy(target: Target, *, dtype: str, tile_m: int, tile_n: int, fill: float | None) -> Any:
    """out[i,j] = x[i,j]; where out is larger than x, the fill value (0 where None).

    x [m, n], out [mo, no], dtype; every size dynamic.
    """
    m, n, mo, no = (T.dynamic(s) for s in ("m", "n", "mo", "no"))
    value = T.cast(0 if fill is None else fill, dtype)

    @T.prim_func
    def copy(x: T.Tensor((m, n), dtype), out: T.Tensor((mo, no), dtype)):
        with T.Kernel(T.ceildiv(mo, tile_m)) as bm:
            tile = target.vector((tile_m, tile_n), dtype)
            for bn in T.serial(T.ceildiv(no, tile_n)):
                with T.SimtVF(threads=target.threads):
                    for i, j in target.loop(tile_m, tile_n):
                        tile[i, j] = value
                T.copy(x[bm * tile_m, bn * tile_n], tile)
                T.copy(tile, out[bm * tile_m, bn * tile_n])

    return copy


def gather(target: Target, *, dtype: str, index_dtype: str, tile: int) -> Any:
    """out[i] = x[index[i]], and 0 where index[i] < 0 or >= n. x [n], index [k], out [k]."""
    n, k = T.dynamic("n"), T.dynamic("k")

    @T.prim_func
    def gather(x: T.Tensor((n,), dtype), index: T.Tensor((k,), index_dtype), out: T.Tensor((k,), dtype)):
        with T.Kernel(T.ceildiv(k, tile)) as b, T.SimtVF(threads=target.threads):
            for i in target.loop(tile):
                if b * tile + i < k:
                    out[b * tile + i] = x[index[b * tile + i]]

    return gather


def atomic_add(target: Target, *, dtype: str, index_dtype: str, tile: int) -> Any:
    """out[index[i]] += x[i] for all i by T.atomic_add; an index outside out is dropped. x [k], index [k], out [n]."""
    n, k = T.dynamic("n"), T.dynamic("k")

    @T.prim_func
    def atomic_add(x: T.Tensor((k,), dtype), index: T.Tensor((k,), index_dtype), out: T.Tensor((n,), dtype)):
        with T.Kernel(T.ceildiv(k, tile)) as b, T.SimtVF(threads=target.threads):
            for i in target.loop(tile):
                if b * tile + i < k:
                    T.atomic_add(out[index[b * tile + i]], x[b * tile + i])

    return atomic_add
