"""`conformance plan`: what a run would take before it is begun: compile keys, minutes, memory, and what fits a budget.

Minutes are estimates: by the cases of a former run of the backend where one is named, else by usual figures, and the
page says which.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from conformance.budget import minutes
from conformance.collect import UsageError, cases_at, check_names
from conformance.engine import draw
from conformance.engine.bringup import LEVEL
from conformance.engine.compiled import refusal
from conformance.engine.effort import EFFORTS, Effort
from conformance.engine.layout import Planner, rank_sizes, resolve, row_bytes_of, shape_of
from conformance.engine.limits import problem_limit, support_of, variant_limit
from conformance.engine.misuse import problem_of
from conformance.engine.order import most_telling
from conformance.engine.relations import drawn_case
from conformance.model import Case, Problem
from conformance.progress import duration
from conformance.protocol import FORMATS, Description, Support
from conformance.results import Record, read_run

START_S = {True: 0.1, False: 4.0}
"""to start a process for a case, by whether the backend is forked after its import"""
RUN_S = 0.015
"""a run of a small problem, with drawing, oracle and judging"""
BYTES_PER_S = 5e7
"""work that oracle and judging get through"""
COMPILE_S = 10.0
"""a compile key where neither a run nor the user says otherwise"""
RUNS = {"repeat": 4, "invariance": 3, "laws": 3, "rejects": 3}
"""runs of a problem by check, else 2"""


@dataclass
class Item:
    """A case with what it is expected to take."""

    case: Case
    problems: int = 0
    run_s: float = 0.0
    keys: set[tuple[Any, ...]] = field(default_factory=set)
    memory_bytes: int = 0
    measured: bool = False


@dataclass
class Former:
    """What a former run took, by case, by op and check, and a compile key."""

    run_s: dict[str, float] = field(default_factory=dict)
    usual_s: dict[str, float] = field(default_factory=dict)
    compile_s: dict[str, float] = field(default_factory=dict)
    """seconds spent on compiling, by op"""

    @classmethod
    def of(cls, records: Mapping[str, Record]) -> Former:
        out, groups = cls(), defaultdict(list)
        for r in records.values():
            if r.finished > r.started and r.status not in ("not_run", "unsupported", "skipped"):
                compiling = r.duration_s.get("compile", 0.0)
                out.run_s[r.id] = max(r.finished - r.started - compiling, 0.0)
                out.compile_s[r.op] = out.compile_s.get(r.op, 0.0) + compiling
                groups[f"{r.op}/{r.check}"].append(out.run_s[r.id])
        out.usual_s = {k: median(v) for k, v in groups.items()}
        return out

    def takes(self, case: Case) -> float | None:
        return self.run_s.get(case.id, self.usual_s.get(f"{case.op.name}/{case.check}"))


def items(description: Description, level: str, modules: list[str], former: Former, seed: int = 0) -> Iterator[Item]:
    """Every case of the level that the backend runs, in the order of a run with a budget."""
    effort = EFFORTS[level]
    cases = list(cases_at(level, modules, description))
    for case in cases if level == LEVEL else most_telling(cases):
        support = support_of(description, case.op.name)
        if (not support.supported or variant_limit(support, case.variant) or refusal(case.check, description.platform)
                or case.op.ranks not in (1, *description.ranks)):
            continue
        chosen = list(problems(case, support, description, effort, seed))
        if not chosen:
            continue
        asked = effort.problems_of(case)
        n = 1 if case.check == "rejects" else min(asked, len(chosen)) if level == LEVEL else asked
        item = Item(case, n)
        known = former.takes(case)
        item.measured = known is not None
        work = sum(draw.work(case.op, p) for p in chosen) / len(chosen)
        runs = RUNS.get(case.check, 2)
        item.run_s = known if known is not None else (
            START_S[description.fork_after_import] * case.op.ranks + n * runs * (RUN_S + work / BYTES_PER_S))
        fields = support.compile_key or case.op.compile_key
        item.keys = {compile_key(fields, p) for p in chosen} if fields else set()
        item.memory_bytes = max(memory_of(case, p, description.requirements) for p in chosen)
        yield item


def problems(case: Case, support: Support, description: Description, effort: Effort, seed: int) -> Iterator[Problem]:
    """The problems that a run of the case would try, as far as one chunk of draws goes."""
    if case.check == "rejects":
        yield problem_of(case, seed)
        return
    own = drawn_case(case)
    left = effort.problems_of(case)
    pool = draw.explicit(own, seed) + (draw.first_chunk(own, seed)[0] if effort.drawn else [])
    for p in pool:
        if left and effort.admits(case.op, p) and not problem_limit(
                support, p, row_bytes_of(case.op, p, description.requirements)):
            left -= 1
            yield p


def compile_key(fields: tuple[str, ...], problem: Problem) -> tuple[Any, ...]:
    """What a compiler specialises on: the op, and the fields that the backend names, or else the declaration.

    Of a size that each rank has for itself the largest: all ranks build one program.
    """
    sizes = {n: max(s) if isinstance(s, (list, tuple)) else s for n, s in problem.sizes.items()}
    known = {**sizes, **problem.values, **dict(problem.variant)}
    return problem.op, *(str(known.get(f)) for f in fields)


def memory_of(case: Case, problem: Problem, requirements: Mapping[str, int]) -> int:
    """Bytes on one device: every argument's buffer, and results twice, since those of the run before are kept."""
    planner = Planner(case.op, problem, requirements, 0, None, {})
    results = 0
    for step in case.op.steps:
        if not step.when(problem.variant):
            continue
        for a in step.args:
            if a.when(problem.variant) and type(a).__name__ in ("In", "Out", "Tup"):
                planner.argument(step, a)
        given = {a.name for a in step.args if a.when(problem.variant)}
        for r in step.returns:
            if r.kind == "array" and r.when(problem.variant) and resolve(r.same_as, problem) not in given:
                results += _result_bytes(r, problem)
    return sum(b.nbytes for b in planner.plan.buffers) + 2 * results


def _result_bytes(r: Any, problem: Problem) -> int:
    """Of a returned array; 0 where its shape follows from data."""
    try:
        f = FORMATS[resolve(r.format, problem)]
        return math.prod(shape_of(r.shape, problem, 0, rank_sizes(problem, 0))) * f.itemsize_bytes // f.per_item
    except (KeyError, TypeError, AttributeError):
        return 0


def plan_page(name: str, description: Description, level: str, modules: list[str], workers: int, budget: str,
              run: Path | None, compile_s: float | None, seed: int = 0) -> str:
    """The page. Raises UsageError for a level, module or budget that does not exist."""
    check_names("level", [level], EFFORTS)
    if workers < 1:
        msg = f"-n {workers}: at least one worker is needed"
        raise UsageError(msg)
    limit_s = 60 * minutes(budget) if budget else math.inf
    former = Former.of(read_run(run).records) if run else Former()
    listed = list(items(description, level, modules, former, seed))
    if not listed:
        return f"backend {name} runs no case of level {level}" + (f" of {', '.join(modules)}" if modules else "")
    all_keys = {op: len(set().union(*(i.keys for i in listed if i.case.op.name == op)))
                for op in {i.case.op.name for i in listed}}
    per_key = {op: compile_s if compile_s is not None else former.compile_s[op] / n if op in former.compile_s and n
               else COMPILE_S for op, n in all_keys.items()}
    rows = []
    for module in dict.fromkeys(i.case.op.module for i in sorted(listed, key=lambda i: i.case.op.name)):
        mine = [i for i in listed if i.case.op.module == module]
        rows.append(_row(module, mine, per_key, workers))
    rows.append(_row("in all", listed, per_key, workers))
    parts = [f"backend {name}, level {level}, {workers} worker{'s' * (workers > 1)}",
             tabulate(rows, ("module", "ops", "cases", "problems", "compile keys", "time", "memory a process"),
                      tablefmt="simple", disable_numparse=True), _sources(listed, former, run, per_key, compile_s)]
    if budget:
        parts.append(fits_text(listed, per_key, limit_s * workers, budget))
    return "\n\n".join(parts)


def _row(label: str, mine: list[Item], per_key: Mapping[str, float], workers: int) -> tuple[str, ...]:
    keys = set().union(*(i.keys for i in mine))
    seconds = sum(i.run_s for i in mine) + sum(per_key[k[0]] for k in keys)
    return (label, str(len({i.case.op.name for i in mine})), str(len(mine)), str(sum(i.problems for i in mine)),
            str(len(keys)), duration(seconds / workers), f"{max(i.memory_bytes for i in mine) / 2**20:.1f} MiB")


def _sources(listed: list[Item], former: Former, run: Path | None, per_key: Mapping[str, float],
             compile_s: float | None) -> str:
    measured = sum(i.measured for i in listed)
    times = (f"{measured} of {len(listed)} cases as {run} took them, the others by usual figures" if run
             else "by usual figures, not measured on this backend: --from RUN takes those of a former run")
    keyed = any(i.keys for i in listed)
    said = "as given" if compile_s is not None else f"{COMPILE_S:.0f} s where no run tells" if keyed else ""
    return f"times: {times}" + (f"; a compile key: {said}" if said else "; no op declares a compile key") + (
        "\ncompile keys beyond those that the first chunk of draws shows are not counted" if keyed else "")


def fits(listed: list[Item], per_key: Mapping[str, float], limit_s: float) -> list[Item]:
    """What runs within so many worker seconds: most telling first; what is too long gives way to what is short."""
    left, built, out = limit_s, set(), []
    for item in listed:
        needed = item.run_s + sum(per_key[k[0]] for k in item.keys - built)
        if needed <= left:
            left -= needed
            built |= item.keys
            out.append(item)
    return out


def fits_text(listed: list[Item], per_key: Mapping[str, float], limit_s: float, budget: str) -> str:
    """What of it fits, in words."""
    inside = fits(listed, per_key, limit_s)
    ops, every = {i.case.op.name for i in inside}, {i.case.op.name for i in listed}
    by_check: dict[str, list[int]] = {}
    for i in listed:
        by_check.setdefault(i.case.check, [0, 0])[1] += 1
    for i in inside:
        by_check[i.case.check][0] += 1
    checks = ", ".join(f"{c} {a} of {b}" for c, (a, b) in by_check.items())
    text = f"within {budget}: {len(inside)} of {len(listed)} cases, on {len(ops)} of {len(every)} ops ({checks})"
    missed = sorted(every - ops)
    return text + (f"\nnothing of {', '.join(missed)}" if missed else "") + (
        f"\n--time-budget={budget.replace(' ', '')} runs them" if len(inside) < len(listed) else "\nall of it fits")
