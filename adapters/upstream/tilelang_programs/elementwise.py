"""One value at a time: functions, operators, clamp and casts.

One program holds a family of functions and picks by a run-time number, so that a family is
compiled once. Annotations are evaluated when a program is built.
"""

from collections.abc import Callable, Mapping
from typing import Any

import tilelang.language as T

from adapters.upstream.tilelang_programs.target import Target

Function = Callable[..., Any]

FAMILIES: dict[str, dict[str, Function]] = {
    "exponential": {
        "exp": T.exp, "exp2": T.exp2, "exp10": T.exp10, "log": T.log, "log2": T.log2, "log10": T.log10,
        "log1p": T.log1p, "sqrt": T.sqrt, "rsqrt": T.rsqrt, "sigmoid": T.sigmoid,
    },
    "trigonometric": {
        "sin": T.sin, "cos": T.cos, "tan": T.tan, "atan": T.atan, "sinh": T.sinh, "cosh": T.cosh, "tanh": T.tanh,
        "erf": T.erf,
    },
    "rounding": {
        "floor": T.floor, "ceil": T.ceil, "trunc": T.trunc, "round": T.round, "nearbyint": T.nearbyint, "abs": T.abs,
        "isnan": T.isnan, "isinf": T.isinf, "isfinite": T.isfinite,
    },
}  # fmt: skip
"""Functions of one floating-point value; a predicate gives 1 or 0 in the same dtype."""

FUNCTIONS = {name: function for family in FAMILIES.values() for name, function in family.items()}

FLOAT_OPERATORS: dict[str, Function] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": T.max,
    "min": T.min,
}
INT_OPERATORS: dict[str, Function] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "max": T.max,
    "min": T.min,
    "floordiv": lambda a, b: a // b,
    "floormod": lambda a, b: a % b,
    "truncdiv": T.truncdiv,
    "truncmod": T.truncmod,
    "bitand": lambda a, b: a & b,
    "bitor": lambda a, b: a | b,
    "bitxor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
}


def operators(dtype: str) -> dict[str, Function]:
    """The operators of two values that this dtype has; a name's place is its number."""
    return INT_OPERATORS if "int" in dtype else FLOAT_OPERATORS


def family_of(function: str) -> str:
    """The family of a function of one value. Raises ValueError naming the known functions."""
    for name, family in FAMILIES.items():
        if function in family:
            return name
    msg = f"unknown function {function!r}; known: {', '.join(FUNCTIONS)}"
    raise ValueError(msg)


def picked(table: Mapping[str, Function], missing: frozenset[str], which: Any, dtype: str, *args: Any,
           only: tuple[str, ...] | None = None) -> Any:
    """table[which](*args) as an expression; a function the target lacks stays out.

    `only` names those that are in it instead, so that the compiler is asked whatever is said to be missing.
    """
    result = args[0]
    for number, (name, function) in enumerate(table.items()):
        if name not in missing if only is None else name in only:
            result = T.if_then_else(which == number, T.cast(function(*args), dtype), result)
    return result


def unary(
    target: Target,
    *,
    dtype: str,
    family: str,
    tile: int,
    replaced: tuple[tuple[str, str], ...] = (),
    through: str | None = None,
    drop_tail: bool = False,
    only: tuple[str, ...] | None = None,
) -> Any:
    """out[i] = f(x[i]); f is number `which` of the family, or of `only` some of it. x [n], out [n], which int32.

    Faults: replaced names functions computed by another; through rounds x to that dtype first;
    drop_tail leaves out the partial tile.
    """
    n = T.dynamic("n")
    table = {name: FUNCTIONS[dict(replaced).get(name, name)] for name in FAMILIES[family]}
    blocks = n // tile if drop_tail else T.ceildiv(n, tile)

    @T.prim_func
    def unary(x: T.Tensor((n,), dtype), out: T.Tensor((n,), dtype), which: T.int32):
        with T.Kernel(blocks, threads=target.threads) as b:
            for i in target.loop(tile):
                if b * tile + i < n:
                    value = x[b * tile + i] if through is None else T.cast(T.cast(x[b * tile + i], through), dtype)
                    out[b * tile + i] = picked(table, target.lacks(dtype), which, dtype, value, only=only)

    return unary


def binary(
    target: Target,
    *,
    dtype: str,
    tile: int,
    replaced: tuple[tuple[str, str], ...] = (),
    drop_tail: bool = False,
    only: tuple[str, ...] | None = None,
) -> Any:
    """out[i] = f(a[i], b[i]); f is number `which` of operators(dtype). All [n]; faults and `only` as in unary."""
    n = T.dynamic("n")
    known = operators(dtype)
    table = {name: known[dict(replaced).get(name, name)] for name in known}
    blocks = n // tile if drop_tail else T.ceildiv(n, tile)

    @T.prim_func
    def binary(a: T.Tensor((n,), dtype), b: T.Tensor((n,), dtype), out: T.Tensor((n,), dtype), which: T.int32):
        with T.Kernel(blocks, threads=target.threads) as block:
            for i in target.loop(tile):
                if block * tile + i < n:
                    at = block * tile + i
                    out[at] = picked(table, target.lacks(dtype), which, dtype, a[at], b[at], only=only)

    return binary


def clamp(target: Target, *, dtype: str, tile: int, swap: bool = False, bare: bool = False) -> Any:
    """out[i] = x[i] held in [low, high] by T.clamp; NaN stays NaN, and high counts where low > high.

    x [n], out [n]; low and high are run-time numbers. Faults: swap, the bounds change places; bare, without T.clamp.
    """
    n = T.dynamic("n")

    @T.prim_func
    def clamp(x: T.Tensor((n,), dtype), out: T.Tensor((n,), dtype), low: T.float32, high: T.float32):
        with T.Kernel(T.ceildiv(n, tile), threads=target.threads) as b:
            for i in target.loop(tile):
                if b * tile + i < n:
                    first, second = (high, low) if swap else (low, high)
                    value = x[b * tile + i]
                    bounds = T.cast(first, dtype), T.cast(second, dtype)
                    out[b * tile + i] = value if bare else T.clamp(value, *bounds)

    return clamp


def cast(target: Target, *, dtype: str, out_dtype: str, tile: int, how: str = "cast", drop_tail: bool = False) -> Any:
    """out[i] = x[i] as out_dtype by T.cast: to nearest even for floats, toward zero for integers.

    x [n], out [n]. Faults: how = `toward_zero` (floats lose their tail), `rounded` (to an
    integer by nearest), `through_fp16`; drop_tail leaves out the partial tile.
    """
    n = T.dynamic("n")
    blocks = n // tile if drop_tail else T.ceildiv(n, tile)

    def converted(value: Any) -> Any:
        if how == "rounded":
            return T.cast(T.nearbyint(value), out_dtype)
        if how == "through_fp16":
            return T.cast(T.cast(value, "float16"), out_dtype)
        if how == "toward_zero":
            kept = T.reinterpret(T.reinterpret(value, "uint32") & T.uint32(0xFFFFE000), "float32")
            return T.cast(kept, out_dtype)
        return T.cast(value, out_dtype)

    @T.prim_func
    def cast(x: T.Tensor((n,), dtype), out: T.Tensor((n,), out_dtype)):
        with T.Kernel(blocks, threads=target.threads) as b:
            for i in target.loop(tile):
                if b * tile + i < n:
                    out[b * tile + i] = converted(x[b * tile + i])

    return cast
