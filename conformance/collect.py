"""From declarations to cases: loads `cases/`, checks it against the catalogue, and applies a level."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

from conformance.catalogue.load import MODULES, required_checks
from conformance.engine.variants import all_variants, cases_of
from conformance.identity import unknown
from conformance.model import CHECKS, Case, Op, Variant
from conformance.protocol import Description
from conformance.speed import Speed, TimedCase, timed_cases

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "cases" / "levels" / "core.json"
ALL = ""
"""stands for any setting of a variant"""
DRAWN = 4
"""problems of a core case beside those of its size assignments"""
GOLDEN = 5**0.5 / 2 - 0.5
"""multiples of it modulo 1 are spread over the whole unit interval, however many of them"""


class UsageError(Exception):
    """Something a user named does not exist."""


@cache
def files_of(module: str) -> dict[str, tuple[Op, ...]]:
    """`module/file.py` -> the ops it declares."""
    out: dict[str, tuple[Op, ...]] = {}
    folder = ROOT / "cases" / module
    if not (folder / "__init__.py").exists():
        return out
    for info in sorted(pkgutil.iter_modules([str(folder)]), key=lambda i: i.name):
        declared = getattr(importlib.import_module(f"cases.{module}.{info.name}"), "OPS", None)
        if declared:
            out[f"{module}/{info.name}.py"] = tuple(declared)
    return out


def ops_by_file(modules: Iterable[str] = ()) -> dict[str, tuple[Op, ...]]:
    """The same for several modules, by default all."""
    return {name: group for m in modules or MODULES for name, group in files_of(m).items()}


def ops(modules: Iterable[str] = ()) -> Iterator[Op]:
    """Every declared op, of these modules or of all."""
    for group in ops_by_file(modules).values():
        yield from group


@cache
def full_cases(op: Op) -> tuple[Case, ...]:
    """Every case of an op; its class must be able to have each required check. Raises ValueError."""
    wanted = [c for c, needed in required_checks(op.name).items() if needed is True and c != "timing"]
    cases = tuple(cases_of(op, wanted))
    missing = set(wanted) - {c.check for c in cases}
    if missing:
        msg = f"{op.name}: its class requires {', '.join(sorted(missing))}; the declaration gives it nothing to run"
        raise ValueError(msg)
    return cases


def all_cases(modules: Iterable[str] = ()) -> Iterator[Case]:
    """Every case, of these modules or of all. Raises ValueError on a duplicate id."""
    seen: set[str] = set()
    for op in ops(modules):
        for case in full_cases(op):
            if case.id in seen:
                msg = f"duplicate case id {case.id}"
                raise ValueError(msg)
            seen.add(case.id)
            yield case


@cache
def core_rows() -> tuple[dict[str, Any], ...]:
    """The checked-in core level: rows of op, variant, check and size assignments."""
    if not CORE.exists():
        return ()
    return tuple(json.loads(CORE.read_text())["cases"])


def cases_at(level: str, modules: Iterable[str] = (), description: Description | None = None) -> Iterator[Case]:
    """The cases of a level, of these modules or of all. The level bringup depends on a backend's description."""
    if level == "bringup":
        from conformance.engine.bringup import bringup  # brings Hypothesis, which pytest wants to import itself

        wanted = tuple(modules) or MODULES
        yield from (c for c in bringup(all_cases(), description) if c.op.module in wanted)
        return
    yield from crossed(core_cases(modules) if level == "core" else sized_cases(modules))


def crossed(cases: Iterable[Case]) -> Iterator[Case]:
    """The same; explicit problems show each data family with each setting of a variant key, then with pairs of them.

    What a family shows (NaN, ties, a tail) may matter with some settings only, so each case takes the families that
    its settings have met least, within its op and check.
    """
    met: dict[tuple[str, str], Counter[tuple[str, Any]]] = defaultdict(Counter)
    for case in cases:
        seen, one = met[case.op.name, case.check], tuple(dict(case.variant).items())
        two = tuple(combinations(one, 2))
        fresh = {f: (-sum(not seen[f, s] for s in one), -sum(not seen[f, s] for s in two), seen[f, ALL])
                 for f in case.op.families}
        order = tuple(sorted(fresh, key=fresh.__getitem__))
        seen.update((order[i % len(order)], s) for i in range(len(case.explicit)) for s in (ALL, *one, *two))
        yield replace(case, families=order)


def sized_cases(modules: Iterable[str] = ()) -> Iterator[Case]:
    """Every case with every size assignment."""
    for case in all_cases(modules):
        yield replace(case, explicit=(*(case.op.everywhere if case.check == "values" else ()), *default_sizes(case)))


def core_cases(modules: Iterable[str] = ()) -> Iterator[Case]:
    """The cases of the checked-in core level. Raises ValueError for a row that no declaration makes."""
    by_name = {op.name: op for op in ops(modules)}
    known = {case.id for case in all_cases(modules)}
    for row in core_rows():
        if row["op"] not in by_name:
            continue
        case = Case(by_name[row["op"]], Variant(row["variant"]), row["check"], tuple(row.get("sizes", ())),
                    least=len(row.get("sizes", ())) + DRAWN)
        if case.id not in known:
            msg = f"core.json names {case.id}, which no declaration makes"
            raise ValueError(msg)
        yield case


@cache
def speeds(module: str) -> dict[str, Speed]:
    """How the ops of a module are timed: `SPEEDS` of cases/<module>/speed.py, by op."""
    if not (ROOT / "cases" / module / "speed.py").exists():
        return {}
    return {s.op: s for s in importlib.import_module(f"cases.{module}.speed").SPEEDS}


@cache
def timings_of(op: Op) -> tuple[TimedCase, ...]:
    """The cases of the check `timing`, a workload each. Raises ValueError where the op's class asks for what isn't."""
    speed = speeds(op.module).get(op.name)
    if required_checks(op.name)["timing"] is not True:
        return ()
    if speed is None:
        msg = f"{op.name}: its class requires timing; cases/{op.module}/speed.py has no row for it"
        raise ValueError(msg)
    return tuple(timed_cases(op, speed, all_variants(op)))


def timing_cases(scale: str = "", modules: Iterable[str] = ()) -> Iterator[TimedCase]:
    """The timed cases of a scale (`small` or `model`), or of both."""
    for op in ops(modules):
        yield from (c for c in timings_of(op) if c.workload is not None and scale in ("", c.workload.scale))


def default_sizes(case: Case) -> tuple[dict[str, Any], ...]:
    """Each number that decides a code path once, the other sizes small; names in turn, so that a few show all."""
    if case.check not in ("values", "memory", "layout"):
        return ()
    idle = case.op.idle(case.variant)
    names = [[{name: p} for p in _spread(size.points)] for name, size in case.op.sizes.items()
             if not size.per_rank and name not in idle]
    return tuple(a for turn in zip_longest(*names) for a in turn if a is not None)


def _spread(points: tuple[int, ...]) -> list[int]:
    """All of them, the largest first and then from all over the range."""
    return sorted(points, key=lambda p: (points.index(p) + 1) * GOLDEN % 1 if p != max(points) else -1)


def find_case(case_id: str, level: str = "full", description: Description | None = None) -> Case:
    """The case of an id as a level has it, its explicit problems too. Raises UsageError with the nearest known one."""
    every: dict[str, Case] = {c.id: c for c in (*all_cases(), *timing_cases())}
    if case_id in every and every[case_id].check != "timing":
        every.update({c.id: c for c in cases_at(level, (every[case_id].op.module,), description) if c.id == case_id})
    if case_id not in every:
        raise UsageError(unknown("case", case_id, every, limit=5))
    return every[case_id]


def check_names(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises UsageError on the first name that does not exist."""
    names = list(known)
    for word in given:
        if word not in names:
            raise UsageError(unknown(kind, word, names))


__all__ = ["CHECKS", "MODULES", "UsageError", "all_cases", "cases_at", "check_names", "find_case", "ops",
           "timing_cases"]
