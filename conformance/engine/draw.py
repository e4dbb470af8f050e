"""Drawing problems: from an op's full contract, the same on every machine.

Drawing and running are apart. Hypothesis draws chunks of 16 with a body that only
records; which of them run is decided afterwards. Nothing here knows a backend, a level
or a number of examples, else two chips would not see the same problems.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from conformance.identity import seed_of
from conformance.model import Case, Drawn, In, Op, Out, Problem, Size, Tup, Variant

CHUNK = 16
OTHER_VALUES = 4
"""of drawn values, tried with sizes that must occur but do not fit with the first ones"""
SMALL_VALUES = 48
"""upper end of the range from which sizes are drawn most often"""
STRIDED_CHECKS = ("layout", "memory")
"""checks that draw strides and offsets too: what lies between rows must stay as it is"""


def pin_constants() -> None:
    """Keep literals of imported local modules out of draws.

    Stock Hypothesis mixes them in, so that 25 of 40 cases drew other problems with another
    number of workers.
    """
    empty = Constants()
    providers._get_local_constants = lambda: empty


pin_constants()

QUIET = settings(
    max_examples=CHUNK, database=None, deadline=None, derandomize=False, phases=(Phase.generate,),
    report_multiple_bugs=False, print_blob=False, suppress_health_check=list(HealthCheck),
)


def arrays_of(op: Op) -> Iterator[In | Out]:
    """Every declared array argument, parts of tuples too, in order."""
    for step in op.steps:
        for a in step.args:
            if isinstance(a, (In, Out)):
                yield a
            elif isinstance(a, Tup):
                yield from a.parts


def values_of(op: Op, variant: Variant) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every drawn argument and setting with its choices; `step/name` where steps draw apart."""
    seen = set()
    for s in op.settings:
        if isinstance(s.value, Drawn) and s.when(variant):
            yield s.name, s.value.choices
    for step in op.steps:
        for a in step.args if step.when(variant) else ():
            if isinstance(getattr(a, "value", None), Drawn) and a.when(variant):
                name = a.name if a.name not in seen else f"{step.name}/{a.name}"
                seen.add(a.name)
                yield name, a.value.choices


def size_strategy(size: Size) -> st.SearchStrategy[int]:
    """Plain numbers first (shrinking would stop at an edge otherwise), then the edges, then the range."""
    if size.step == 0:
        return st.sampled_from(size.points)
    lo, hi = -(-size.lo // size.step), size.hi // size.step
    small = st.integers(lo, max(lo, min(hi, SMALL_VALUES)))
    scaled = st.one_of(small, st.integers(lo, hi)).map(lambda n: n * size.step)
    return st.one_of(scaled, st.sampled_from(size.points)) if size.points else scaled


def raw_problems(case: Case) -> st.SearchStrategy[dict[str, Any]]:
    """The drawn fields of a problem. Built once a case: building costs more than drawing."""
    op, variant = case.op, case.variant
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for name, size in op.sizes.items():
        one = size_strategy(size)
        fields[f"size {name}"] = st.lists(one, min_size=op.ranks, max_size=op.ranks) if size.per_rank else one
        if case.check == "degenerate":
            fields[f"tiny {name}"] = st.booleans()
    for name, choices in values_of(op, variant):
        fields[f"value {name}"] = st.integers(0, len(choices) - 1)
    fields["family"] = st.integers(0, len(op.families) - 1)
    for a in arrays_of(op) if case.check in STRIDED_CHECKS else ():
        if a.forms and a.when(variant):
            fields[f"units {a.name}"] = st.integers(1, 3 if "padded" in a.forms else 1)
            fields[f"before {a.name}"] = st.integers(0, 3 if "offset" in a.forms else 0)
            if "apart" in a.forms:
                fields[f"between {a.name}"] = st.integers(0, 3)
    return st.fixed_dictionaries(fields)


def _group(raw: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {k.partition(" ")[2]: v for k, v in raw.items() if k.startswith(kind + " ")}


def finish(case: Case, raw: Mapping[str, Any], seed: int) -> Problem:
    """A problem from drawn fields: repaired to fit the op's own contract, never rejected."""
    op = case.op
    choices = dict(values_of(op, case.variant))
    values = {name: choices[name][i] for name, i in _group(raw, "value").items()}
    sizes, before = _group(raw, "size"), _group(raw, "before")
    if case.check == "degenerate":
        shrink_some(op, sizes, _group(raw, "tiny"))
    layout = {n: {"row_units": u, "rows_before": before[n]} for n, u in _group(raw, "units").items()}
    for n, rows in _group(raw, "between").items():
        layout[n]["rows_between"] = rows
    problem = Problem(op.name, case.variant, sizes, values, op.families[raw["family"]], seed, layout)
    return fit(op, problem)


def shrink_some(op: Op, sizes: dict[str, Any], tiny: Mapping[str, bool]) -> None:
    """Make the chosen sizes as small as the contract allows, at least one of them."""
    names = [n for n, chosen in tiny.items() if chosen]
    names = names or [n for n in sizes if op.sizes[n].zero] or list(sizes)
    for name in names:
        size = op.sizes[name]
        least = 0 if size.zero else size.lo
        if size.per_rank:
            sizes[name] = [least if i % 2 else n for i, n in enumerate(sizes[name])]
        else:
            sizes[name] = least
    for name, now in list(sizes.items()):
        size = op.sizes[name]
        if name not in names and not size.per_rank and size.step:
            sizes[name] = min(now, max(size.lo, 64 // size.step * size.step))


def fit(op: Op, problem: Problem) -> Problem:
    """Halve the largest size until the op's own contract holds, then what `gives_way`.

    Raises ValueError if nothing helps.
    """
    sizes = dict(problem.sizes)
    for _ in range(200):
        trial = Problem(problem.op, problem.variant, sizes, problem.values, problem.family, problem.seed,
                        problem.layout, problem.misuse)
        if op.fits(trial):
            name = op.gives_way(trial)
            if not name:
                return trial
        elif sizes:
            name = max(sizes, key=lambda n: _weight(sizes[n]) if _weight(sizes[n]) > op.sizes[n].lo else -1)
        else:
            break
        size = op.sizes[name]
        smaller = [_halved(size, n) for n in sizes[name]] if size.per_rank else _halved(size, sizes[name])
        if smaller == sizes[name]:
            break
        sizes[name] = smaller
    msg = f"{op.name}: no problem near {dict(problem.sizes)} satisfies the declaration's `fits`"
    raise ValueError(msg)


def _weight(n: Any) -> int:
    return max(n) if isinstance(n, list) else n


def _halved(size: Size, n: int) -> int:
    if size.step == 0:
        smaller = [p for p in size.points if p < n]
        return max(smaller) if smaller else n
    return max(size.lo, n // 2 // size.step * size.step)


def chunk(case: Case, seed: int, index: int) -> list[Problem]:
    """The problems of one chunk, in order."""
    raws: list[dict[str, Any]] = []

    @hypothesis.seed(seed_of(seed, case.id, index))
    @settings(QUIET)
    @hypothesis.given(raw_problems(case))
    def record(raw: dict[str, Any]) -> None:
        raws.append(raw)

    record()
    # Hypothesis begins with its simplest examples: in its order a case that runs few problems would see no others.
    order = sorted(range(len(raws)), key=lambda i: seed_of(seed, case.id, index, "order", i))
    raws = [raws[i] for i in order]
    return [finish(case, raw, seed_of(seed, case.id, index, i)) for i, raw in enumerate(raws)]


def digest(problems: list[Problem]) -> str:
    """sha256 of a list of problems."""
    text = json.dumps([p.to_json() for p in problems], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def explicit(case: Case, seed: int) -> list[Problem]:
    """The problems that must occur: the case's own size assignments that its contract admits, families in turn."""
    choices = list(values_of(case.op, case.variant))
    families = case.families or case.op.families
    out = []
    for i, assignment in enumerate(case.explicit):
        s = seed_of(seed, case.id, "explicit", i)
        family = families[i % len(families)]
        sizes = {**case.op.sample, **case.op.beside(assignment), **assignment}
        for other in range(OTHER_VALUES):
            values = {name: c[(seed_of(s, name) + other) % len(c)] for name, c in choices}
            problem = Problem(case.op.name, case.variant, sizes, values, family, s, _form(case, i))
            if case.op.fits(problem):
                out.append(problem)
                break
    return out


def _form(case: Case, i: int) -> dict[str, dict[str, int]]:
    if case.check not in STRIDED_CHECKS:
        return {}
    return {a.name: {"row_units": 1 + (i + 1) % 3 if "padded" in a.forms else 1,
                     "rows_before": i % 4 if "offset" in a.forms else 0,
                     **({"rows_between": (i + 1) % 4} if "apart" in a.forms else {})}
            for a in arrays_of(case.op) if a.forms and a.when(case.variant)}


def pool(case: Case, seed: int) -> Iterator[Problem]:
    """Explicit problems first, then chunk after chunk without end."""
    yield from explicit(case, seed)
    for index in count():
        yield from chunk(case, seed, index)


def first_chunk(case: Case, seed: int) -> tuple[list[Problem], str]:
    """The first chunk and its digest: what `draws_sha256` of a result line is made of."""
    problems = chunk(case, seed, 0)
    return problems, digest(problems)


def work(op: Op, problem: Problem) -> float:
    """How much a problem asks of a machine, in bytes moved (64 operations count as a byte)."""
    if op.cost is not None:
        c = op.cost(problem)
        return c.bytes + c.flops / 64
    total = 0.0
    for a in arrays_of(op):
        if a.when(problem.variant) and isinstance(a.shape, str):
            total += 4 * math.prod(_weight(problem.sizes[t]) if not t.isdigit() else int(t) for t in a.shape.split())
    return total
