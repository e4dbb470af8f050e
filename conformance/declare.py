"""The vocabulary in which ops are declared. It builds data and runs nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from conformance.model import (
    ALWAYS,
    Cost,
    Drawn,
    DType,
    From,
    In,
    Misuse,
    Out,
    Relation,
    Requirement,
    Returned,
    SizeOf,
    Step,
    Token,
    Tup,
    Value,
)
from conformance.model import Op as _Op
from conformance.model import Size as _Size
from conformance.model import When as _When

__all__ = [
    "ALWAYS", "INF", "INT_MAX", "INT_MIN", "NAN", "Cost", "DType", "Drawn", "From", "In", "Op", "Out", "Relation",
    "Requirement", "Returned", "Size", "Step", "Token", "Tup", "Value", "When", "choices", "edges", "misuse",
]

INF, NAN = float("inf"), float("nan")
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def edges(*points: int, step: int = 1, lo: int | None = None, hi: int | None = None, zero: bool = False,
          per_rank: bool = False) -> _Size:
    """A size with the numbers that decide code paths; each is tried, one step less and one more.

    lo defaults to one step, hi to the largest point; zero: an empty axis is legal.
    """
    low = step if lo is None else lo
    high = max(points) if hi is None else hi
    near = {p + d for p in points for d in (-step, 0, step)}
    return _Size(tuple(sorted(n for n in near if low <= n <= high)), low, high, step, zero, per_rank)


def choices(*points: int) -> _Size:
    """A size that takes just these values."""
    return _Size(tuple(points), min(points), max(points), 0)


def When(**keys: str | tuple[str, ...]) -> _When:
    """Holds where each key has (one of) the value(s)."""
    return _When({k: (v,) if isinstance(v, str) else tuple(v) for k, v in keys.items()})


def Size(name: str) -> SizeOf:
    """An argument that is the value of a size."""
    return SizeOf(name)


def misuse(doc: str, /, *, kind: str = "universal", variant: Mapping[str, str] | None = None,
           raises: tuple[str, ...] = (), **overrides: Any) -> Misuse:
    """A call that must be refused; the keywords override arguments by name."""
    if kind not in ("universal", "limit", "trap"):
        msg = f"misuse {doc!r}: kind is universal, limit or trap, not {kind!r}"
        raise ValueError(msg)
    name = re.sub(r"[^a-z0-9]+", "_", doc.lower()).strip("_")
    return Misuse(name, doc, overrides, kind, variant or {}, raises)


def Op(
    name: str,
    *,
    doc: str,
    oracle: Callable[..., Any],
    variants: Mapping[str, tuple[str, ...]] | None = None,
    where: Callable[..., bool] = lambda v: True,
    sizes: Mapping[str, _Size] | None = None,
    fits: Callable[..., bool] = lambda p: True,
    args: tuple[Any, ...] = (),
    returns: tuple[Returned, ...] = (),
    steps: tuple[Step, ...] = (),
    families: tuple[str, ...] = ("normal",),
    **rest: Any,
) -> _Op:
    """One op: a single call by `args` and `returns`, or a sequence by `steps`.

    Raises ValueError where the declaration contradicts itself.
    """
    if bool(steps) == bool(args or returns):
        msg = f"{name}: declare either args and returns, or steps"
        raise ValueError(msg)
    for key, values in (variants or {}).items():
        for v in values:
            if not re.fullmatch(r"[a-z0-9_.+-]+", v):
                msg = f"{name}: variant value {key}={v!r} may hold only a-z 0-9 _ . + -"
                raise ValueError(msg)
    sequence = steps or (Step("", name, args, returns),)
    return _Op(name, doc, variants or {}, where, sizes or {}, fits, sequence, families, oracle, **rest)
