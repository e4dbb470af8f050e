"""TileLang's data movement: copies with tails, transposition, indexed reads, atomic sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from references.expected import Array, Exact, Expected, Inputs, Problem, Within
from references.formats import codec
from references.formats.spec import float_spec
from references.tilelang.sums import any_order, finite, lowest_bit, wrapped


def copy(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[str, Expected]:
    """`tilelang.copy`: out[i,j] = x[i,j] where x has it, else the fill value; bits are kept.

    A load outside a tensor gives its safe value, a store outside is dropped.
    Variant or value fill: a number, or none (the default: 0). Sizes: mo, no of out [mo, no]
    (default those of x). Input x [m, n]. Output out, in x's format.
    """
    x = inputs.codes("x")
    shape = tuple(problem.sizes.get(name, n) for name, n in zip(("mo", "no"), x.shape, strict=True))
    out = np.full(shape, _fill(problem, inputs.format("x")), x.dtype)
    m, n = (min(a, b) for a, b in zip(shape, x.shape, strict=True))
    out[:m, :n] = x[:m, :n]
    return {"out": Exact(out, any_nan=False)}


def _fill(problem: Problem, fmt: str) -> Any:
    fill = problem.values.get("fill", problem.variant.get("fill", "none"))
    return codec.encode(np.array(0.0 if fill in (None, "none") else float(fill)), fmt)[()]


def transpose(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[str, Expected]:
    """`tilelang.transpose`: out[j,i] = x[i,j], bits kept. Input x [m, n], output out [n, m]. Reads nothing else."""
    return {"out": Exact(np.ascontiguousarray(inputs.codes("x").T), any_nan=False)}


def gather(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[str, Expected]:
    """`tilelang.gather`: out[i] = x[index[i]], 0 for an index below 0 or not below n; bits kept.

    Inputs x [n], index [k] int32 or int64; output out [k]. Reads nothing else.
    """
    x, index = inputs.codes("x"), inputs.codes("index").astype(np.int64)
    inside = (index >= 0) & (index < len(x))
    out = np.zeros(index.shape, x.dtype)
    out[inside] = x[index[inside]]
    return {"out": Exact(out, any_nan=False)}


def atomic_add(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[str, Expected]:
    """`tilelang.atomic_add`: out[index[i]] += x[i] for all i, in any order; an index outside out is dropped.

    Inputs x [k], index [k] int32 or int64, out [n] (before the call); output out [n], of x's format. Every single
    addition is rounded to that format; integers wrap. Unspecified: sums that may overflow on the way.
    """
    fmt = inputs.format("x")
    index = inputs.codes("index").astype(np.int64)
    inside = (index >= 0) & (index < len(inputs.codes("out")))
    index = index[inside]
    if float_spec(fmt) is None:
        out = inputs.codes("out").astype(np.int64)
        np.add.at(out, index, inputs.codes("x")[inside].astype(np.int64))
        return {"out": Exact(wrapped(out, fmt))}
    x, start = inputs.real("x")[inside], inputs.real("out")
    total, size, count = start.copy(), np.abs(finite(start)), np.zeros(len(start))
    with np.errstate(all="ignore"):
        np.add.at(total, index, x)
        np.add.at(size, index, np.abs(finite(x)))
    np.add.at(count, index, 1)
    unit = _units(start, x, index)
    bound, unspecified = any_order(total, size, count, fmt, unit=unit, profile=profile)
    return {"out": Within(total, bound, unspecified)}


def _units(start: Array, x: Array, index: Array) -> Array:
    """A power of two of which every addend of a cell is a multiple."""
    unit = lowest_bit(start)
    np.minimum.at(unit, index, lowest_bit(x))
    return unit
