"""Sums in a given format, in any order: how far they may be off, and when they may not be off at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from references.bounds.profile import resolve
from references.expected import Array
from references.formats import codec
from references.formats.spec import CODE_DTYPES, float_spec

_FRACTION_F64 = np.int64((1 << 52) - 1)


def wrapped(values: Array, fmt: str) -> Array:
    """int64 values as the integer format keeps them: modulo its size."""
    return values.astype(np.int64).astype(CODE_DTYPES[fmt])


def flushes(profile: Mapping[str, Any]) -> bool:
    """Whether the backend declares that subnormal numbers may count as zero."""
    return resolve(profile)["subnormals"] != "keep"


def lowest_bit(x: Array) -> Array:
    """The largest power of two of which x is a multiple; inf for zero and what is not finite."""
    fraction, exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))
    whole = np.ldexp(fraction, 53).astype(np.int64)
    return np.where(whole == 0, np.inf, np.ldexp((whole & -whole).astype(np.float64), exponent - 53))


def any_order(
    total: Array, size: Array, count: ArrayLike, fmt: str, *, unit: Array, profile: Mapping[str, Any]
) -> tuple[Array, Array]:
    """(bound, unspecified) of count additions that each round to `fmt`, in any order.

    total: exact sums; size: sums of the finite |terms|; unit: power of two of which all terms of a sum are
    multiples. Any order errs by at most ((1 + u)^count - 1) size (Higham 2002, chapter 4);
    additions of subnormals are exact. Where size < 2^p unit, all partial sums are numbers
    of the format, and nothing is rounded. A truncating adder has twice the unit roundoff.
    Unspecified: where a partial sum may overflow although the total is finite.
    """
    spec = float_spec(fmt)
    count = np.asarray(count, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = size < 2.0**spec.p * unit
        error = np.where(exact, 0.0, np.expm1(count * np.log1p(2 * spec.u)) * size)
        if spec.name == "fp64":
            error = error * 2  # the reference itself is a float64 sum
        if flushes(profile):
            error = error + count * 2.0**spec.emin
        limit = codec.max_finite(fmt)
        unspecified = ((size + error > limit) & ~np.isnan(total)) | ~np.isfinite(size)
    return np.where(unspecified, 0.0, error), unspecified


def finite(x: Array) -> Array:
    """x with zeros for what is not finite."""
    return np.where(np.isfinite(x), x, 0.0)
