"""Which variants of an op become cases: the whole product, or every pair of keys at least once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    """Few legal variants that show every legal pair of key values; greedy, always the same, those of the core first."""
    legal = sorted((v for v in all_variants(op) if not op.values_only(v)), key=lambda v: not op.core(v))
    open_pairs = {pair for v in legal for pair in _pairs(v)}
    chosen: list[Variant] = []
    while open_pairs:
        best = max(legal, key=lambda v: len(open_pairs & _pairs(v)))
        chosen.append(best)
        open_pairs -= _pairs(best)
    return chosen or legal[:1]


def _pairs(v: Variant) -> set[Any]:
    items = tuple(dict(v).items())
    return set(combinations(items, 2)) if len(items) > 1 else {(i,) for i in items}


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
    return op.core(case.variant)


def matching(op: Op, keys: Mapping[str, str]) -> Variant:
    """The first legal variant with these key values. Raises ValueError where there is none."""
    for v in all_variants(op):
        if all(v[k] == x for k, x in keys.items()):
            return v
    msg = f"{op.name}: no legal variant has {dict(keys)}"
    raise ValueError(msg)


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
