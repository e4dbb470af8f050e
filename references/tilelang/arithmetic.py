"""TileLang's operators of two values: floats rounded once, integers with floor or C semantics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from references.bounds.profile import resolve
from references.expected import Array, Exact, Expected, Inputs, OneOf, Problem, Within
from references.formats import codec
from references.formats.spec import CODE_DTYPES, float_spec
from references.tilelang.nans import by_rule
from references.tilelang.sums import flushes

DIVISION_ULPS = 2.5
"""Division in single precision: OpenCL C 3.0, full profile; a correctly rounded one is inside."""


def arithmetic(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[str, Expected]:
    """`tilelang.arithmetic`: out = a function b; a, b, out [n] of one format.

    Variant: function. Floats: add, sub, mul (rounded once, or for narrow formats through single
    precision), div (2.5 ulp of single precision, correctly rounded in double), max, min (of two zeros either;
    profile max_nan: "drop" the NaN, which leaves the other operand, "propagate" it, "consistent" (default): one of
    these two for all elements, "free": either operand may be the result). Integers: add, sub, mul, max, min, floordiv,
    floormod (Python), truncdiv, truncmod (C), bitand, bitor, bitxor, shl, shr (keeps the sign).
    Unspecified, as in C: overflow of signed integers, division by zero, the most negative number
    over -1, shifts by less than 0 or not less than the width. Unsigned integers wrap. Profile: subnormals.
    """
    name, fmt = problem.variant["function"], inputs.format("a")
    if float_spec(fmt) is None:
        return {"out": _integer(name, inputs.codes("a"), inputs.codes("b"), fmt)}
    with np.errstate(all="ignore"):
        if name in ("max", "min"):
            return {"out": _extreme(name, inputs, fmt, resolve(profile)["max_nan"])}
        return {"out": _float(name, inputs, fmt, profile)}


def _float(name: str, inputs: Inputs, fmt: str, profile: Mapping[str, Any]) -> Expected:
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name]
    real = function(inputs.real("a"), inputs.real("b"))
    if name == "div" and fmt != "fp64":
        known = np.where(np.isfinite(real), real, 0.0)
        error = DIVISION_ULPS * codec.ulp(known, "fp32")
        bound = error if fmt == "fp32" else error + codec.half_ulp(np.abs(known) + error, fmt)
        return Within(real, bound + (2.0**-126 if flushes(profile) else 0.0))
    wide = fmt if fmt == "fp64" else "fp32"
    a, b = (inputs.real(n).astype(CODE_DTYPES[wide]) for n in "ab")
    single = function(a, b).astype(np.float64)
    # Of narrow formats float64 is exact enough to round from directly; for fp32 it would round twice.
    values = [single] if fmt == wide else [single, real]
    candidates = [codec.encode(v, fmt) for v in values]
    if flushes(profile):
        low = np.abs(single) < 2.0 ** float_spec(fmt).emin
        candidates.append(codec.encode(np.where(low, np.copysign(0.0, single), single), fmt))
    zeros = [codec.encode(np.where(v == 0, -v, v), fmt) for v in values]
    return OneOf((*candidates, *zeros))


def _extreme(name: str, inputs: Inputs, fmt: str, rule: str) -> Expected:
    a, b = inputs.codes("a"), inputs.codes("b")
    x, y = inputs.real("a"), inputs.real("b")
    a_nan, b_nan = np.isnan(x), np.isnan(y)
    first = x > y if name == "max" else x < y

    def where(from_a: Array, from_b: Array) -> Expected:
        """Elements that may come from a and those that may come from b; each from one at least."""
        return OneOf((np.where(from_a, a, b), np.where(from_b, b, a)))

    plain_a, plain_b = first | (x == y), ~first
    return by_rule(rule, drop=where((plain_a & ~a_nan) | b_nan, (plain_b & ~b_nan) | a_nan),
                   propagate=where((plain_a & ~b_nan) | a_nan, (plain_b & ~a_nan) | b_nan),
                   free=where(plain_a | a_nan | b_nan, plain_b | a_nan | b_nan))


def _integer(name: str, a: Array, b: Array, fmt: str) -> Expected:
    info = np.iinfo(CODE_DTYPES[fmt])
    # Python's integers neither overflow nor round; all n are few enough.
    values, known = [], []
    for x, y in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True):
        value, defined = _of_integers(name, x, y, info.bits)
        inside = info.min <= value <= info.max
        values.append(value & (2**info.bits - 1))
        known.append(defined and (inside or info.min == 0))
    codes = np.array(values, np.uint64).astype(codec.bits(a).dtype).view(a.dtype).reshape(a.shape)
    return Exact(codes, ~np.array(known, bool).reshape(a.shape))


def _of_integers(name: str, x: int, y: int, width: int) -> tuple[int, bool]:
    """(exact result, whether C defines it apart from overflow)."""
    if name in ("floordiv", "floormod", "truncdiv", "truncmod"):
        if y == 0:
            return 0, False
        quotient = x // y
        if name.startswith("trunc") and quotient < 0 and quotient * y != x:
            quotient += 1
        return (quotient if name.endswith("div") else x - quotient * y), not (y == -1 and x == -(2 ** (width - 1)))
    if name in ("shl", "shr"):
        if not 0 <= y < width:
            return 0, False
        return (x << y if name == "shl" else x >> y), True
    simple = {
        "add": x + y, "sub": x - y, "mul": x * y, "max": max(x, y), "min": min(x, y),
        "bitand": x & y, "bitor": x | y, "bitxor": x ^ y,
    }  # fmt: skip
    return simple[name], True
