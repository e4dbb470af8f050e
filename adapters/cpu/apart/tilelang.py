"""TileLang: what its programs return, changed behind the call. What a compiler does inside is out of reach here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adapters.cpu.apart.row import FAULT, VARIANT, Args, Call, Function, Row, once_accepted

TILE = 128


def _then(change: Callable[[Args], None], keep: str = "") -> Function:
    """The true call, then a change of its output in place; args[`before`] is a copy of argument `keep`."""

    def function(call: Call, args: Args) -> Any:
        old = args[keep].clone() if keep else None
        result = call(**args)
        change({**args, "before": old, "result": result})
        return result

    return function


def _product(args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (args[n].T if args.get(f"transpose_{n}") else args[n] for n in "ab")
    wide = torch.float64 if a.dtype.is_floating_point else torch.int64
    return a.to(wide), b.to(wide)


def _tail_of_k_stale(args: Args) -> None:
    a, b = _product(args)
    k, tile = a.shape[1], args.get("tile_k", 32)
    if k > tile and k % tile:
        rest = slice(k // tile * tile - tile + k % tile, k // tile * tile)
        args["c"].copy_(args["c"].to(a.dtype) + a[:, rest] @ b[rest])


def _c_twice_in_the_last_columns(args: Args) -> None:
    tile = args.get("tile_n", 64)
    cols = args["c"].shape[1] // tile * tile
    if args.get("init") == "c":
        args["c"][:, cols:] += args["before"][:, cols:]


def _in_float64(args: Args) -> None:
    if args["c"].dtype.is_floating_point:
        a, b = _product(args)
        total = a @ b + (args["before"].double() if args.get("init") == "c" else 0)
        args["c"].copy_(total if args["c"].dtype == torch.float64 else total.float())


def _absmax_keeps_sign(args: Args) -> None:
    if args["kind"] == "absmax" and args["x"].numel():
        last = args["x"].select(args.get("dim", 1), -1)
        args["out"].copy_(torch.where(last.abs() == args["out"], last, args["out"]))


def _last_row_twice(args: Args) -> None:
    x, dim = args["x"], args.get("dim", 1)
    tile = args.get("tile_n", 64) if dim == 1 else args.get("tile_m", 32)
    if args["kind"] == "sum" and x.shape[dim] % tile and x.shape[dim] > tile:
        args["out"] += x.select(dim, -1)


def _negative_from_the_end(args: Args) -> None:
    x, index = args["x"], args["index"].long()
    inside = (index < 0) & (index >= -len(x))
    if len(x):
        args["out"].copy_(torch.where(inside, x[index.clamp(-len(x), len(x) - 1)], args["out"]))


def _one_past_wraps(args: Args) -> None:
    extra = args["x"][args["index"] == len(args["out"])]
    if len(extra) and len(args["out"]):
        args["out"][0] += extra.sum(dtype=extra.dtype)


def _subnormal_flushed(args: Args) -> None:
    out = args["out"]
    if out.dtype.is_floating_point:
        out.copy_(torch.where(out.abs() < torch.finfo(out.dtype).tiny, torch.zeros_like(out), out))


def _nan_to_low(args: Args) -> None:
    out, low = args["out"], min(args["low"], args["high"])
    out.copy_(torch.where(args["x"].isnan(), torch.full_like(out, low), out))


def _tile_begins_one_early(args: Args) -> None:
    tile = args.get("tile", TILE)
    if len(args["out"]) > tile and len(args["out"]) % tile:
        at = len(args["out"]) // tile * tile
        args["out"][at] = args["out"][at - 1].clone()


def _multiple_gives_divisor(args: Args) -> None:
    a, b = args["a"], args["b"]
    if args["function"] == "floormod" and not a.dtype.is_floating_point:
        args["out"].copy_(torch.where((args["out"] == 0) & ((a < 0) != (b < 0)) & (a != 0), b, args["out"]))


def _fill_to_the_right_only(args: Args) -> None:
    args["out"][len(args["x"]) :] = 0


def _corner_untransposed(args: Args) -> None:
    x, out = args["x"], args["result"]
    m, n = x.shape
    if m % args.get("tile_m", 32) and n % args.get("tile_n", 64) and m > 1 and n > 1:
        out[-1, -2:] = out[-1, -2:].flip(0)


def _in_two_parts(call: Call, args: Args) -> Any:
    """On copies of the first 64 elements and of the rest."""
    n = len(args["out"])
    for part in (slice(0, 64), slice(64, n))[: 1 + (n > 64)]:
        own = {k: v[part].clone() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
        call(**own)
        args["out"][part] = own["out"]


def _reduced_reversed(call: Call, args: Args) -> Any:
    return call(**{**args, "x": args["x"].flip(0, 1)} if not _turns(args) else args)


def _turns(args: Args) -> bool:
    """Whether the results would change places or order matters: only the reduced axis may be reversed, without NaN."""
    return args["x"].shape[1 - args.get("dim", 1)] > 1 or bool(args["x"].isnan().any())


ROWS = (
    Row("tile_gemm_tail_of_k_stale", "tilelang.gemm", FAULT,
        "The partial last K tile still holds the rest of the tile before. Shows where k is no multiple of tile_k and "
        "larger.",
        "tilelang dossier 3a: tails", _then(_tail_of_k_stale)),
    Row("tile_gemm_c_twice_in_the_last_columns", "tilelang.gemm", FAULT,
        "With init=c the partial column tile gets C twice. Shows where n is no multiple of tile_n.",
        "tilelang dossier 2.3: clear_accum", _then(_c_twice_in_the_last_columns, "c")),
    Row("tile_gemm_in_float64", "tilelang.gemm", VARIANT,
        "In float64, rounded to fp32 and to C.",
        "tilelang dossier 2.3: accumulator dtype", _then(_in_float64, "c")),
    Row("tile_absmax_keeps_sign", "tilelang.reduce", FAULT,
        "absmax returns a negative element if it stands last. Shows there.",
        "tilelang dossier 2.4: absmax", _then(_absmax_keeps_sign)),
    Row("tile_sum_last_twice", "tilelang.reduce", FAULT,
        "The last element of a partial tile is added twice. Shows for sum over an extent that is no multiple of the "
        "tile, and larger.",
        "TileKernels section 7 report 18: batched reduction", _then(_last_row_twice)),
    Row("tile_reduce_reversed", "tilelang.reduce", VARIANT,
        "A single row or column reduced from its end.",
        "tilelang dossier 2.4", once_accepted(_reduced_reversed, "out")),
    Row("tile_gather_negative_from_the_end", "tilelang.gather", FAULT,
        "Negative indices count from the end. Shows with indices from -n to -1.",
        "tilelang dossier 2: guarded accesses", _then(_negative_from_the_end)),
    Row("tile_atomic_one_past_wraps", "tilelang.atomic_add", FAULT,
        "What goes to index n lands in element 0. Shows with this index.",
        "tilelang dossier 2.7", _then(_one_past_wraps)),
    Row("tile_cast_subnormal_flushed", "tilelang.cast", FAULT,
        "Subnormal results become 0. Shows with them, fp16 above all.",
        "tilelang dossier 2.6: bit-exact", _then(_subnormal_flushed)),
    Row("tile_clamp_nan_to_low", "tilelang.clamp", FAULT,
        "NaN becomes the lower bound. Shows with NaN.",
        "tilelang dossier 2.5: clamp propagates NaN", _then(_nan_to_low)),
    Row("tile_elementwise_begins_one_early", "tilelang.elementwise", FAULT,
        "The first element of the partial last tile is that of the element before. Shows for n over the tile and no "
        "multiple.",
        "TileKernels section 7 report 4: tail tiles", _then(_tile_begins_one_early)),
    Row("tile_elementwise_in_two_parts", "tilelang.elementwise", VARIANT,
        "On copies of the first 64 elements and the rest.",
        "tilelang dossier 2.5", once_accepted(_in_two_parts, "out")),
    Row("tile_floormod_multiple_gives_divisor", "tilelang.arithmetic", FAULT,
        "The sign fix-up of floormod lacks the test for 0. Shows for exact multiples of opposite sign.",
        "tilelang dossier 2.5: floor semantics", _then(_multiple_gives_divisor)),
    Row("tile_copy_fill_to_the_right_only", "tilelang.copy", FAULT,
        "Rows beyond x are 0 instead of the fill. Shows where out has more rows and the fill is not 0.",
        "tilelang dossier 2: safe value", _then(_fill_to_the_right_only)),
    Row("tile_transpose_corner", "tilelang.transpose", FAULT,
        "Two elements in the last corner change places. Shows where neither side is a multiple of its tile.",
        "tilelang dossier 3a: transpose", _then(_corner_untransposed)),
)
