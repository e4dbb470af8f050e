"""TileLang's T.gemm on tiles: one matrix product, one rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from references.bounds import basic
from references.bounds.constants import RANDOM_FAMILIES
from references.bounds.gemm import tensor_core_14_bit_unpromoted
from references.bounds.profile import resolve
from references.expected import Array, Exact, Expected, Inputs, Problem, Within
from references.flashmla.grid import rounded_once
from references.formats import codec
from references.formats.spec import float_spec
from references.tilelang.sums import finite, lowest_bit, wrapped

_NARROW_BITS = 11
"""Products of operands with no more significand bits are exact in single precision."""


def gemm(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[str, Expected]:
    """`tilelang.gemm`: c = op(a) @ op(b), with init=c added to c; op transposes where its flag is yes.

    Variant: transpose_a, transpose_b (yes, no); init (clear, clear_accum, c). Inputs a [m, k]
    ([k, m]), b [k, n] ([n, k]) of one format, and c [m, n] before the call where init=c. Output c, in
    the format of the variant key out (default: int32 for integers, else a's).
    FP8 under accumulator fp8_tc14_promoted: the unit's 14 bits to the end, for nothing in the language promotes.
    The sum is single precision (fp64: double; integers: int32, wrapping), in any order, rounded once to c.
    Where all terms are multiples of one power of two and small enough, no order rounds, and the result is exact.
    Unspecified: where partial sums may overflow though the result does not. Profile: accumulator,
    input_conversion (of fp32 operands), subnormals.
    """
    variant = problem.variant
    fmt = inputs.format("a")
    out = variant.get("out", "int32" if float_spec(fmt) is None else fmt)
    a, b = (inputs.real(name) for name in "ab")
    a = a.T if variant.get("transpose_a", "no") == "yes" else a
    b = b.T if variant.get("transpose_b", "no") == "yes" else b
    c = inputs.real("c") if variant.get("init", "clear") == "c" else None
    if float_spec(fmt) is None:
        total = a.astype(np.int64) @ b.astype(np.int64)
        return {"c": Exact(wrapped(total if c is None else total + c, out))}
    return {"c": _float_gemm(a, b, c, (fmt, out), resolve(profile), getattr(problem, "family", ""))}


def _float_gemm(
    a: Array, b: Array, c: Array | None, formats: tuple[str, str], profile: Mapping[str, Any], family: str
) -> Within:
    fmt, out = formats
    k = a.shape[1] + (c is not None)
    accumulator = "fp64" if fmt == "fp64" else profile["accumulator"]
    with np.errstate(all="ignore"):
        value = a @ b if c is None else a @ b + c
        fa, fb = finite(np.abs(a)), finite(np.abs(b))
        fc = 0.0 if c is None else finite(np.abs(c))
        size = fa @ fb + fc
        root = (fa * fa) @ (fb * fb) + fc * fc if family in RANDOM_FAMILIES else None
        partials = basic.magnitude(size, finite(value), root)
        unit = np.multiply.outer(_unit(a, 1), _unit(b, 0))
        if c is not None:
            unit = np.minimum(unit, lowest_bit(c))
        narrow = float_spec(fmt).p <= _NARROW_BITS
        error = basic.dot(partials, k, accumulator, exact_products=narrow, flush=profile["subnormals"] != "keep")
        if accumulator == "fp64":
            error = 3 * error + 2 * k * codec.min_subnormal("fp64")  # the reference is a float64 sum too
        if accumulator == "fp8_tc14_promoted" and fmt in ("e4m3", "e5m2"):
            # One T.gemm sums in the unit; nothing promotes its chunks.
            error = error + tensor_core_14_bit_unpromoted(size, partials, k)
        elif profile["subnormals"] == "keep":
            held = "fp64" if accumulator == "fp64" else "fp32"
            exact = (size < 2.0 ** float_spec(held).p * unit) & (unit >= codec.min_subnormal(held))
            error = np.where(exact, 0.0, error)
        if fmt == "fp32" and profile["input_conversion"] != "none":
            sums = np.add.outer(fa.sum(axis=1), fb.sum(axis=0))
            error = error + basic.converted_inputs(size, profile["input_conversion"], abs_sums=sums, k=a.shape[1])
        exact = (np.broadcast_to(error, value.shape) == 0) & np.isfinite(value)
        if out != "fp64" and exact.any():  # what is exact is rounded to one number, also half way between two
            value = np.where(exact, codec.round_to(value, out), value)
        bound = rounded_once(finite(value), finite(error), out) if out != "fp64" else error
        limit = codec.max_finite("fp64" if accumulator == "fp64" else "fp32")
        unsure = ((size + error > limit) & ~np.isnan(value)) | ~np.isfinite(size)
    return Within(value, np.where(unsure, 0.0, bound), unsure)


def _unit(x: Array, axis: int) -> Array:
    return lowest_bit(x).min(axis=axis, initial=np.inf)
