"""Which variants of an op become cases: the whole product, or few that show every pair or triple of key values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any

from conformance.model import CHECKS, Case, Op, Variant


@cache
def all_variants(op: Op) -> tuple[Variant, ...]:
    """Every legal variant, in the order of the declaration."""
    keys = list(op.variants)
    every = (Variant(dict(zip(keys, values, strict=True))) for values in product(*op.variants.values()))
    return tuple(v for v in every if op.where(v))


def pairwise(op: Op) -> list[Variant]:
    """Few legal variants that show every legal pair of key values; those of the core first."""
    legal = sorted((v for v in all_variants(op) if not op.values_only(v)), key=lambda v: not op.core(v))
    return _covering(legal, 2) or legal[:1]


CORE_STRENGTH = {"values": 3, "memory": 1, "repeat": 1, "degenerate": 1}
"""how many key values at once level core shows every combination of, by check; of others it has what full has"""


@cache
def core_variants(op: Op, check: str) -> frozenset[Variant]:
    """Of the variants that `op.core` admits few that show the combinations which this check is to show."""
    among = all_variants(op) if check == "values" else pairwise(op)
    return frozenset(_covering([v for v in among if op.core(v)], CORE_STRENGTH[check]))


def _covering(variants: Sequence[Variant], strength: int) -> list[Variant]:
    """Greedily chosen, always the same: each combination of so many key values that occurs among these, occurs."""
    number: dict[Any, int] = {}
    shown = [sum(1 << number.setdefault(c, len(number)) for c in _combinations(v, strength)) for v in variants]
    still, chosen = (1 << len(number)) - 1, []
    while still:
        best = max(range(len(variants)), key=lambda i: (still & shown[i]).bit_count())
        chosen.append(variants[best])
        still &= ~shown[best]
    return chosen


def _combinations(v: Variant, strength: int) -> Iterator[Any]:
    items = tuple(dict(v).items())
    return combinations(items, min(strength, len(items)))


@cache
def programs(op: Op) -> tuple[Variant, ...]:
    """The keys of each program that the op's variants compile to; of an op without a compile key none."""
    every = (Variant({k: v[k] for k in op.compile_key}) for v in all_variants(op)) if op.compile_key else ()
    return tuple(dict.fromkeys(every))


def in_core(case: Case) -> bool:
    """Whether the core level has the case: a program belongs to it with any variant that does."""
    op, keys = case.op, dict(case.variant)
    if case.check == "rejects":
        return True
    if case.check == "compile":
        return any(op.core(v) for v in all_variants(op) if all(v[k] == x for k, x in keys.items()))
    if case.check in CORE_STRENGTH:
        return case.variant in core_variants(op, case.check)
    return op.core(case.variant)


def matching(op: Op, keys: Mapping[str, str]) -> Variant:
    """The first legal variant with these key values. Raises ValueError where there is none."""
    return next(every_matching(op, keys))


def every_matching(op: Op, keys: Mapping[str, str]) -> Iterator[Variant]:
    """The legal variants with these key values. Raises ValueError where there is none."""
    among = [v for v in all_variants(op) if all(v[k] == x for k, x in keys.items())]
    if not among:
        msg = f"{op.name}: no legal variant has {dict(keys)}"
        raise ValueError(msg)
    return iter(among)


def cases_of(op: Op, checks: Iterable[str]) -> Iterator[Case]:
    """Every case of an op for the checks that its class requires."""
    wanted = set(checks)
    for check in CHECKS:
        if check not in wanted:
            continue
        if check == "rejects":
            yield from (Case(op, Variant({"misuse": m.name}), check) for m in op.rejects)
        elif check in ("invariance", "laws"):
            key, relations = ("promise", op.promises) if check == "invariance" else ("law", op.laws)
            for r in relations:
                yield from (Case(op, Variant({key: r.name, **v}), check) for v in pairwise(op) if r.when(v))
        elif check == "compile":
            yield from (Case(op, v, check) for v in programs(op))
        else:
            for v in all_variants(op) if check == "values" else pairwise(op):
                yield Case(op, v, check)
