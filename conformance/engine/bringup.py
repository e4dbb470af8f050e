"""The bring-up level: some 200 tiny problems at the tiles that a backend declares, most telling first.

For simulators and first silicon. A problem has at most 10^6 multiply-adds and no size above two tiles; the first
problems try every op once, just past its tiles in every size. Only explicit problems run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from conformance.engine.compiled import refusal
from conformance.engine.draw import values_of, work
from conformance.engine.layout import row_bytes_of
from conformance.engine.limits import problem_limit, support_of, variant_limit
from conformance.engine.order import most_telling
from conformance.engine.relations import drawn_case
from conformance.model import Case, Op, Problem, Size
from conformance.protocol import Description, Support, supported

LEVEL = "bringup"
PROBLEMS = 200
MOST_MULTIPLY_ADDS = 1e6
MOST_BYTES = 2.0**21
"""for ops whose cost is not in multiply-adds"""
USUAL_TILE = 16
"""of a size for which neither the backend nor the op's sample names a number"""
SPARE_SEEDS = 4
"""how often a case's assignments may be tried with other data while no problem could have failed"""
TILES_SHOW = ("ascending", "normal", "tail_max", "integers", "ill_scaled", "positive")
"""data families in which an element that is left out, doubled or out of place changes the result, most telling first"""
LATER = 2
"""problems a case of check `values` behind the first round"""
ANY = Description("any", {"*": supported()})
OF_THE_SAMPLE = ("rejects", "compile")
"""checks that have one problem, at the op's sample"""


def bringup(cases: Iterable[Case], description: Description | None = None) -> list[Case]:
    """The cases of the level in the order in which they are run.

    cases: all of the full level. Cases of an op that the backend does not run come last, one an op: they cost nothing
    and keep the op in the matrix.
    """
    description = description or ANY
    every = list(cases)
    runs = {c.op.name: support_of(description, c.op.name) for c in every}
    ranks = {1, *description.ranks}
    usable = [c for c in every if runs[c.op.name].supported and c.op.ranks in ranks
              and not variant_limit(runs[c.op.name], c.variant) and not refusal(c.check, description.platform)]
    chosen: list[Case] = []
    left, tried = PROBLEMS, set()
    turns: Counter[str] = Counter()
    for case in most_telling(usable):
        if left <= 0:
            break
        wanted = LATER if case.check == "values" and case.op.name in tried else 1
        sizes = problems_of(case, description, min(wanted, left), turn=len(chosen))
        if not sizes and case.check not in OF_THE_SAMPLE:
            continue
        tried.add(case.op.name)
        most = max(len(sizes), 1)
        chosen.append(replace(case, explicit=tuple(sizes) * SPARE_SEEDS, most=most,
                              families=telling(case, turns[case.op.name])))
        turns[case.op.name] += most
        left -= most
    shown = {c.op.name for c in chosen}
    rest = {c.op.name: c for c in reversed(every) if c.op.name not in shown}
    return chosen + [rest[name] for name in dict.fromkeys(c.op.name for c in every) if name in rest]


def telling(case: Case, turn: int) -> tuple[str, ...]:
    """The families of a case behind so many problems of its op: where values are compared those that show a tile."""
    shows = tuple(f for f in TILES_SHOW if f in case.op.families) if case.check == "values" else ()
    families = shows or case.op.families
    return families[turn % len(families) :] + families[: turn % len(families)]


def problems_of(case: Case, description: Description, most: int, turn: int = 0) -> list[dict[str, Any]]:
    """Up to `most` size assignments that the op, the backend and the level admit; later cases begin further on."""
    if case.check in OF_THE_SAMPLE:
        return []
    support = support_of(description, case.op.name)
    op = case.op
    names = [n for n, s in op.sizes.items() if not s.per_rank]
    patterns = empty_patterns(op, names) if case.check == "degenerate" else list(tile_patterns(op, names, support))
    first, others = patterns[:1], patterns[1:]
    if most > 1:
        others = others[turn % len(others):] + others[: turn % len(others)] if others else []
    out: list[dict[str, Any]] = []
    for pattern in first + others if most == 1 else others + first:
        fitting = fitted(case, pattern, support, description.requirements)
        if fitting is not None and fitting not in out:
            out.append(fitting)
        if len(out) == most:
            break
    return out


def tile_of(op: Op, name: str, support: Support) -> int:
    """The tile that the backend declares of a size, else what the op's sample has, else a usual one."""
    known = support.tiles.get(name) or op.sample.get(name) or USUAL_TILE
    size = op.sizes[name]
    return legal(size, known if isinstance(known, int) else USUAL_TILE)


def legal(size: Size, n: int) -> int:
    """The nearest legal size that is not larger, or the least one."""
    if size.step == 0:
        return max((p for p in size.points if p <= n), default=min(size.points))
    return max(min(n, size.hi) // size.step * size.step, -(-size.lo // size.step) * size.step)


def tile_patterns(op: Op, names: list[str], support: Support) -> Iterator[dict[str, int]]:
    """Sizes around the tiles, most telling first.

    Past the tile in every size; twice the tile less one; exactly one tile; then each size alone at twice its tile
    less one, at one more than the tile and at two tiles, beside small others.
    """
    tile = {n: tile_of(op, n, support) for n in names}
    step = {n: max(op.sizes[n].step, 1) for n in names}
    small = {n: legal(op.sizes[n], min(tile[n], USUAL_TILE + 1)) for n in names}
    past = {n: legal(op.sizes[n], min(tile[n] + step[n], 2 * tile[n])) for n in names}
    ragged = {n: legal(op.sizes[n], 2 * tile[n] - step[n]) for n in names}
    yield past
    yield ragged
    yield dict(tile)
    for group in (ragged, past, {n: legal(op.sizes[n], 2 * tile[n]) for n in names}):
        declared = [n for n in names if n in support.tiles] or names
        yield from ({**small, n: group[n]} for n in declared)
    yield {n: legal(op.sizes[n], op.sizes[n].lo) for n in names}


def empty_patterns(op: Op, names: list[str]) -> list[dict[str, int]]:
    """Each size that may be empty alone so, then all as small as they may be."""
    small = {n: legal(op.sizes[n], min(tile_of(op, n, supported()), USUAL_TILE)) for n in names}
    return [{**small, n: 0} for n in names if op.sizes[n].zero] + [
        {n: legal(op.sizes[n], op.sizes[n].lo) for n in names}]


def fitted(case: Case, pattern: Mapping[str, int], support: Support, requirements: Mapping[str, int],
           ) -> dict[str, int] | None:
    """The pattern, with its largest sizes halved until everything admits it; None where nothing does."""
    sizes = dict(pattern)
    for _ in range(40):
        problem = sized(case, sizes)
        if case.op.fits(problem) and small_enough(case.op, problem) and not (
                problem_limit(support, problem, row_bytes_of(case.op, problem, requirements))):
            return sizes
        name = max(sizes, key=lambda n: sizes[n] if smaller(case.op, n, sizes[n]) < sizes[n] else -1, default="")
        if not name or smaller(case.op, name, sizes[name]) >= sizes[name]:
            return None
        sizes[name] = smaller(case.op, name, sizes[name])
    return None


def smaller(op: Op, name: str, n: int) -> int:
    size = op.sizes[name]
    if size.step == 0:
        return max((p for p in size.points if p < n), default=n)
    return legal(size, n // 2)


def sized(case: Case, sizes: Mapping[str, int]) -> Problem:
    """The problem of a case at these sizes, as `draw.explicit` makes it but for its data."""
    op, variant = case.op, drawn_case(case).variant
    values = {name: choices[0] for name, choices in values_of(op, variant)}
    whole = {**op.sample, **op.beside(sizes), **sizes}
    return Problem(op.name, variant, whole, values, op.families[0], 0)


def multiply_adds(op: Op, problem: Problem) -> float:
    """Of a problem; 0 where the op's cost has no operations."""
    return op.cost(problem).flops / 2 if op.cost is not None else 0.0


def small_enough(op: Op, problem: Problem) -> bool:
    return multiply_adds(op, problem) <= MOST_MULTIPLY_ADDS and work(op, problem) <= MOST_BYTES
