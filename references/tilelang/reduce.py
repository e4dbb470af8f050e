"""TileLang's reductions of a matrix along one axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from references.bounds.profile import resolve
from references.expected import Array, Exact, Expected, Inputs, OneOf, Problem, Within
from references.formats.spec import CODE_DTYPES, float_spec
from references.tilelang.nans import by_rule
from references.tilelang.sums import any_order, finite, lowest_bit, wrapped

_BITWISE = {"bitand": (np.bitwise_and, -1), "bitor": (np.bitwise_or, 0), "bitxor": (np.bitwise_xor, 0)}


def reduce(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[str, Expected]:
    """`tilelang.reduce`: out = x [m, n] reduced along `dim`; clear=no combines with what stands in out.

    Variant: kind (sum, abssum, max, min, absmax, bitand, bitor, bitxor), dim (0, 1), clear (yes, no).
    Inputs x, and out before the call where clear=no; output out [n] (dim 0) or [m] (dim 1) in x's format.
    Sums: additions in that format, in any order; integers wrap. Maxima and minima are exact; the sign
    of a zero is free. An empty extent gives the identity.
    Profile: reduce_nan, of max, min and absmax: "drop" or "propagate" NaN, "consistent" (default): one of these two for
    all rows, "free": of a row with a NaN nothing is said; subnormals.
    Unspecified: sums that may overflow on the way; absmax where the most negative integer occurs,
    and where a seed below zero decides (its absolute value may or may not be taken).
    """
    variant = problem.variant
    kind, axis, fmt = variant["kind"], int(variant["dim"]), inputs.format("x")
    x = inputs.real("x")
    seed = inputs.real("out") if variant.get("clear", "yes") == "no" else None
    if kind in _BITWISE:
        function, identity = _BITWISE[kind]
        whole = function.reduce(x.astype(np.int64), axis=axis, initial=identity)
        return {"out": Exact(wrapped(whole if seed is None else function(whole, seed.astype(np.int64)), fmt))}
    if kind in ("sum", "abssum"):
        return {"out": _sum(np.abs(x) if kind == "abssum" else x, seed, axis, fmt, profile)}
    with np.errstate(invalid="ignore"):
        return {"out": _extreme(x, seed, (kind, axis, fmt), resolve(profile)["reduce_nan"])}


def _sum(x: Array, seed: Array | None, axis: int, fmt: str, profile: Mapping[str, Any]) -> Expected:
    if float_spec(fmt) is None:
        total = x.astype(np.int64).sum(axis=axis)
        return Exact(wrapped(total if seed is None else total + seed, fmt))
    terms = x if seed is None else np.concatenate([x, np.expand_dims(seed, axis)], axis=axis)
    with np.errstate(all="ignore"):
        total, size = terms.sum(axis=axis), np.abs(finite(terms)).sum(axis=axis)
    unit = lowest_bit(terms).min(axis=axis, initial=np.inf)
    # A float64 sum of narrower terms errs too; of fp32 by 2**-29 of the bound.
    count = max(terms.shape[axis] - 1, 0)
    bound, unspecified = any_order(total, size, count, fmt, unit=unit, profile=profile)
    return Within(total, bound, unspecified)


def _extreme(x: Array, seed: Array | None, what: tuple[str, int, str], nan_rule: str) -> Expected:
    kind, axis, fmt = what
    is_float = float_spec(fmt) is not None
    lowest, highest = (-np.inf, np.inf) if is_float else _limits(fmt)
    free = np.zeros(x.shape[1 - axis], bool)
    if kind == "absmax":
        if not is_float:
            free |= (lowest < 0) & (x == lowest).any(axis=axis)
            x = x.astype(np.int64)
        x, identity = np.abs(x), 0
    else:
        identity = lowest if kind == "max" else highest
    terms = x if seed is None else np.concatenate([x, np.expand_dims(seed, axis)], axis=axis)
    nan = np.isnan(terms) if is_float else np.zeros(terms.shape, bool)
    plain = np.where(nan, identity, terms)
    value = (plain.min if kind == "min" else plain.max)(axis=axis, initial=identity)
    if kind == "absmax" and seed is not None:
        free |= (seed < 0) & (np.abs(seed.astype(np.float64)) > value)
    if not is_float:
        return OneOf((value.astype(CODE_DTYPES[fmt]),), free)
    has_nan = nan.any(axis=axis)
    # All NaN: dropping them leaves the identity or, where no identity takes part, NaN.
    nothing_left = nan.all(axis=axis) & (terms.shape[axis] > 0)
    zero = np.zeros(value.shape)
    return by_rule(nan_rule, drop=Within(value, zero, free | nothing_left),
                   propagate=Within(np.where(has_nan, np.nan, value), zero, free),
                   free=Within(value, zero, free | has_nan))


def _limits(fmt: str) -> tuple[int, int]:
    info = np.iinfo(CODE_DTYPES[fmt])
    return int(info.min), int(info.max)
