"""Reductions of tiles in the unified buffer. Annotations are evaluated when a program is built."""

from typing import Any

import tilelang.ascend.language as T

from adapters.upstream.tilelang_programs.reduce import identity
from adapters.upstream.tilelang_programs.target import Target

REDUCERS = {
    "sum": T.reduce_sum,
    "max": T.reduce_max,
    "min": T.reduce_min,
    "absmax": T.reduce_absmax,
    "bitand": T.reduce_bitand,
    "bitor": T.reduce_bitor,
    "bitxor": T.reduce_bitxor,
}


def reduce(
    target: Target, *, dtype: str, kind: str, dim: int, clear: bool, tile_m: int, tile_n: int, bare: bool = False
) -> Any:
    """out = reduction of x along dim; clear=False combines with the values already in out.

    x [m, n]; out [n] for dim 0, [m] for dim 1; both sizes dynamic. The first tile is reduced with the flag asked for,
    all others with clear=False; what a tile has outside x is the identity. bare is a fault: without T.reduce.
    """
    m, n = T.dynamic("m"), T.dynamic("n")
    kept, extent = (n, m) if dim == 0 else (m, n)
    tile_kept, tile_extent = (tile_n, tile_m) if dim == 0 else (tile_m, tile_n)
    reducer = REDUCERS[kind]
    pad = identity(kind, dtype)

    @T.macro
    def reduce_tile(x, tile, acc, b, step, first):
        with T.SimtVF(threads=target.threads):
            for i, j in target.loop(tile_m, tile_n):
                tile[i, j] = pad
        T.copy(x[step * tile_m, b * tile_n] if dim == 0 else x[b * tile_m, step * tile_n], tile)
        with T.SimtVF(threads=target.threads):
            if not bare:
                reducer(tile, acc, dim=dim, clear=first)

    @T.prim_func
    def reduce(x: T.Tensor((m, n), dtype), out: T.Tensor((kept,), dtype)):
        with T.Kernel(T.ceildiv(kept, tile_kept)) as b:
            tile = target.vector((tile_m, tile_n), dtype)
            acc = target.vector((tile_kept,), dtype)
            if clear:
                reduce_tile(x, tile, acc, b, 0, True)
            else:
                T.copy(out[b * tile_kept], acc)
                reduce_tile(x, tile, acc, b, 0, False)
            for step in T.serial(1, T.ceildiv(extent, tile_extent)):
                reduce_tile(x, tile, acc, b, step, False)
            T.copy(acc, out[b * tile_kept])

    return reduce
