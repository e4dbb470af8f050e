"""Reductions of tiles. Annotations are evaluated when a program is built."""

from typing import Any

import tilelang.language as T

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


def identity(kind: str, dtype: str) -> Any:
    """The value that changes no result of this kind, in this dtype."""
    if kind == "max":
        return T.min_value(dtype) if "int" in dtype else T.cast(-float("inf"), dtype)
    if kind == "min":
        return T.max_value(dtype) if "int" in dtype else T.cast(float("inf"), dtype)
    if kind == "bitand":
        return T.max_value(dtype) if dtype.startswith("uint") else T.cast(-1, dtype)
    return T.cast(0, dtype)


def reduce(
    target: Target,
    *,
    dtype: str,
    kind: str,
    dim: int,
    clear: bool,
    tile_m: int,
    tile_n: int,
    init: bool = True,
    seed: bool = True,
    pad_zero: bool = False,
    drop_last: bool = False,
    drop_tail: bool = False,
    bare: bool = False,
) -> Any:
    """out = reduction of x along dim; clear=False combines with the values already in out.

    x [m, n]; out [n] for dim 0, [m] for dim 1; both sizes dynamic. The extent is cut in
    tiles: the first is reduced with the flag asked for, all others with clear=False.
    What a tile reads outside x is the identity, by T.annotate_safe_value.
    Faults: init=False starts from out although clear is set; seed=False ignores out although
    it is not; pad_zero pads with 0; drop_last leaves out the last element along dim; drop_tail
    the partial tile; bare has no T.reduce.
    """
    m, n = T.dynamic("m"), T.dynamic("n")
    kept, extent = (n, m) if dim == 0 else (m, n)
    tile_kept, tile_extent = (tile_n, tile_m) if dim == 0 else (tile_m, tile_n)
    tiles = extent // tile_extent if drop_tail else T.ceildiv(extent, tile_extent)
    pad = T.cast(0, dtype) if pad_zero else identity(kind, dtype)
    first_clears = clear and init
    reducer = REDUCERS[kind]

    @T.macro
    def reduce_tile(x, staged, tile, acc, b, step, first):
        T.copy(x[step * tile_m, b * tile_n] if dim == 0 else x[b * tile_m, step * tile_n], staged)
        if drop_last:
            for i, j in target.loop(tile_m, tile_n):
                if step * tile_extent + (i if dim == 0 else j) == extent - 1:
                    staged[i, j] = identity(kind, dtype)
        T.copy(staged, tile)
        if not bare:
            reducer(tile, acc, dim=dim, clear=first)

    @T.prim_func
    def reduce(x: T.Tensor((m, n), dtype), out: T.Tensor((kept,), dtype)):
        with T.Kernel(T.ceildiv(kept, tile_kept), threads=target.threads) as b:
            staged = target.operand((tile_m, tile_n), dtype)
            tile = target.accumulator((tile_m, tile_n), dtype)
            acc = target.accumulator((tile_kept,), dtype)
            T.annotate_safe_value({x: pad})
            if first_clears or not seed:
                reduce_tile(x, staged, tile, acc, b, 0, True)
            else:
                T.copy(out[b * tile_kept], acc)
                reduce_tile(x, staged, tile, acc, b, 0, False)
            for step in T.serial(1, tiles):
                reduce_tile(x, staged, tile, acc, b, step, False)
            T.copy(acc, out[b * tile_kept])

    return reduce
