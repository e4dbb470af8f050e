"""TileLang's element-wise functions of one value: documented accuracies in units of the last place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from references.bounds.constants import FLUSH_FP32
from references.bounds.profile import resolve
from references.expected import Array, Exact, Expected, Inputs, OneOf, Problem, Within
from references.formats import codec
from references.formats.spec import CODE_DTYPES, float_spec
from references.tilelang.sums import flushes

_NARROW_BITS = 24


@dataclass(frozen=True)
class Function:
    """compute works in any NumPy float. ulps: largest error of a single-precision implementation.

    tiny: what a result may lose where an intermediate overflows.
    """

    compute: Callable[[Array], Array]
    ulps: float
    tiny: float = 0.0


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _erf(x: Array) -> Array:
    return np.array([math.erf(v) for v in np.ravel(x).astype(np.float64)], np.float64).reshape(np.shape(x))


FUNCTIONS: dict[str, Function] = {
    "exp": Function(np.exp, 3),
    "exp2": Function(np.exp2, 3),
    "exp10": Function(lambda x: np.power(x.dtype.type(10), x), 3),
    "log": Function(np.log, 3),
    "log2": Function(np.log2, 3),
    "log10": Function(np.log10, 3),
    "log1p": Function(np.log1p, 2),
    "sqrt": Function(np.sqrt, 3),
    "rsqrt": Function(lambda x: 1 / np.sqrt(x), 2),
    "sin": Function(np.sin, 4),
    "cos": Function(np.cos, 4),
    "tan": Function(np.tan, 5),
    "atan": Function(np.arctan, 5),
    "sinh": Function(np.sinh, 4),
    "cosh": Function(np.cosh, 4),
    "tanh": Function(np.tanh, 5),
    "erf": Function(_erf, 16),
    # exp within 3, an addition and a division within 2.5; exp(-x) overflows where the result is subnormal.
    "sigmoid": Function(_sigmoid, 8, 2.0**-126),
}
"""Accuracies: OpenCL C 3.0, relative error as ULPs, single precision, full profile; sigmoid composed of them."""

_EXACT: dict[str, Callable[[Array], Array]] = {
    "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "nearbyint": np.rint, "abs": np.abs,
    "isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite,
}  # fmt: skip


def elementwise(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[str, Expected]:
    """`tilelang.elementwise`: out = function(x); a predicate gives 1 or 0.

    Variant: function (of `FUNCTIONS`, and floor, ceil, trunc, round, nearbyint, abs, isnan, isinf, isfinite).
    Input x [n], output out [n] of the same float format. Narrow formats are computed in single precision
    and rounded once. The sign of a zero is free. nearbyint takes ties to even; round takes them
    to even or away from zero, as targets differ.
    Unspecified: rsqrt of a negative zero. Profile: subnormals.
    """
    name, fmt = problem.variant["function"], inputs.format("x")
    x = inputs.real("x")
    if name == "round":
        return {"out": _round(x, fmt)}
    with np.errstate(all="ignore"):
        if name in _EXACT:
            value = _EXACT[name](x).astype(np.float64)
            # An integer part of a narrow number is a number of its format.
            return {"out": Within(value, np.zeros(x.shape))}
        row = FUNCTIONS[name]
        # A double needs a wider reference; where NumPy has none, its own error is the extra unit.
        wide = x.astype(np.longdouble) if fmt == "fp64" else x
        value = row.compute(wide).astype(np.float64)
        computed_in = "fp64" if fmt == "fp64" else "fp32"
        # libm's erf has no wider form here: its error and the function's own.
        ulps = row.ulps + (2 if fmt == "fp64" else 0)
        known = np.where(np.isfinite(value), value, 0.0)
        error = ulps * codec.ulp(known, computed_in) + row.tiny
        if flushes(profile):
            error = error + np.where(np.abs(x) < FLUSH_FP32, _flushed(row, wide, known), 0.0) + FLUSH_FP32
        bound = error if fmt == computed_in else error + codec.half_ulp(np.abs(known) + error, fmt)
    free = (x == 0) & np.signbit(x) if name == "rsqrt" else None
    return {"out": Within(value, np.where(np.isfinite(value), bound, 0.0), free)}


def _flushed(row: Function, x: Array, value: Array) -> Array:
    """How far the function of zero is from that of a subnormal number; 0 where one of them is infinite."""
    distance = np.abs(row.compute(np.zeros_like(x)).astype(np.float64) - value)
    return np.where(np.isfinite(distance), distance, 0.0)


def _round(x: Array, fmt: str) -> Expected:
    with np.errstate(invalid="ignore"):
        even = np.rint(x)
        away = np.where(2 * np.abs(x - np.trunc(x)) == 1, np.trunc(x) + np.copysign(1.0, x), even)
    choices = [even, away, np.where(even == 0, -even, even), np.where(away == 0, -away, away)]
    return OneOf(tuple(codec.encode(c, fmt) for c in choices))


def clamp(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[str, Expected]:
    """`tilelang.clamp`: out = min(max(x, low), high): NaN stays NaN, high counts where low > high.

    Values low, high: numbers that pass through single precision to x's format. Input x [n], output
    out [n]. Exact; the sign of a zero is free.
    """
    fmt = inputs.format("x")
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = (codec.round_to(np.float64(np.float32(float(problem.values[n]))), fmt) for n in ("low", "high"))
        value = np.minimum(np.maximum(inputs.real("x"), low), high)
    return {"out": Within(value, np.zeros(value.shape))}


def cast(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[str, Expected]:
    """`tilelang.cast`: out = x as another format, for every pair of formats.

    Variant: out. Input x [n], output out [n].
    To floats: to nearest even, rounded once (profile cast_steps "through_fp32": or to single precision first), overflow
    to infinity; e4m3 and e5m2 saturate, infinities too (the conversion that the language documents; profile
    e4m3_overflow "nan" for e4m3). To bool: whether the value is not zero, so true for NaN. From floats to integers:
    toward zero; unspecified for NaN and what is out of range. Between integers: modulo.
    """
    x, fmt, out = inputs.codes("x"), inputs.format("x"), problem.variant["out"]
    if out == "bool":
        return {"out": Exact(codec.decode(x, fmt) != 0)}
    if float_spec(out) is None:
        return {"out": _to_integer(x, fmt, out)}
    overflow = None
    if out in ("e4m3", "e5m2"):
        overflow = "nan" if out == "e4m3" and resolve(profile)["e4m3_overflow"] == "nan" else "saturate"
    with np.errstate(over="ignore", invalid="ignore"):
        # NumPy rounds an int64 to float32 directly, which float64 in between would not.
        single = (x if float_spec(fmt) is None else codec.decode(x, fmt)).astype(np.float32)
        real = codec.decode(x, fmt).astype(np.float64)
    if out == "fp32":
        return {"out": Exact(single)}
    steps = (real, single.astype(np.float64)) if resolve(profile)["cast_steps"] == "through_fp32" else (real,)
    return {"out": OneOf(tuple(codec.encode(v, out, overflow=overflow) for v in steps))}


def _to_integer(x: Array, fmt: str, out: str) -> Expected:
    dtype = CODE_DTYPES[out]
    if float_spec(fmt) is None:
        return Exact(x.astype(np.int64).astype(dtype))
    with np.errstate(invalid="ignore"):
        real = np.trunc(codec.decode(x, fmt))
    info = np.iinfo(dtype)
    inside = (real >= float(info.min)) & (real < float(info.max) + 1)
    whole = np.where(inside, real, 0.0)
    top = np.nextafter(2.0**63, 0)
    return Exact(np.minimum(whole, top).astype(np.int64).astype(dtype), ~inside)
