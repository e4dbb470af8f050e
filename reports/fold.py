"""Folds cases into matrix cells: the one roll-up that every view uses.

An op's cell is no better than its worst case, and a pass on a narrower domain is
never the same word as a pass on all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from conformance.model import COMPILER
from conformance.protocol import FORMATS, Support
from conformance.results import Expectation, Record, Status, Verdict, error_over_bound, verdict_of
from reports.load import LoadedRun, known_ops, module_of, op_of


class State(str, Enum):
    """What a cell or a case shows, worst first."""

    NONCONFORMING = "nonconforming"
    MISSING = "missing"
    """not supported though the claim requires it: grey as `not_yet`, counted as nonconforming"""
    INCONCLUSIVE = "inconclusive"
    WAIVED = "waived"
    NOT_RUN = "not_run"
    PARTIAL = "partial"
    """all that ran conforms, but something is unsupported, was not run, lies outside declared limits, or was only
    compiled"""
    CONFORMING = "conforming"
    NOT_YET = "not_yet"


WORDS = {
    State.NONCONFORMING: "nonconforming",
    State.MISSING: "not yet, but claimed",
    State.INCONCLUSIVE: "inconclusive",
    State.WAIVED: "waived",
    State.NOT_RUN: "not run",
    State.PARTIAL: "conforming in part",
    State.CONFORMING: "conforming",
    State.NOT_YET: "not yet",
}
GLYPHS = dict(zip(State, "✗⊘?⚑○◐✓·", strict=True))
_ORDER = {state: n for n, state in enumerate(State)}


def worst(states: Iterable[State]) -> State:
    return min(states, key=_ORDER.__getitem__)


def state_of(record: Record) -> State:
    """The state of one case. A pass inside declared limits only is `partial`."""
    if record.status == Status.UNSUPPORTED:
        return State.MISSING if record.verdict == Verdict.NONCONFORMING else State.NOT_YET
    if record.verdict == Verdict.CONFORMING:
        return State.PARTIAL if record.domain.get("limits") else State.CONFORMING
    return {
        Verdict.NONCONFORMING: State.NONCONFORMING,
        Verdict.INCONCLUSIVE: State.INCONCLUSIVE,
        Verdict.WAIVED: State.WAIVED,
    }.get(Verdict(record.verdict), State.NOT_RUN)


_SIGNS = {"lt": "<", "le": "≤", "ge": "≥"}


def limit_text(row: Mapping[str, Any]) -> str:
    """`m % 128 = 0`, `k ≤ 4096`, `out: bf16, fp32` of a declared limit."""
    name = str(row.get("field", "?"))
    rules = []
    for key, value in row.items():
        if key == "multiple_of":
            rules.append(f"{name} % {value} = 0")
        elif key in ("in", "not_in"):
            rules.append(f"{name}: {'not ' if key == 'not_in' else ''}{_listed(value)}")
        elif key == "given":
            rules.append(f"{name} given" if value else f"{name} not given")
        elif key in _SIGNS:
            rules.append(f"{name} {_SIGNS[key]} {value}")
        elif key not in ("field", "reason", "when"):
            rules.append(f"{name} {key} {value}")
    when = row.get("when")
    where = [f"{k}: {_listed(v)}" for k, v in when.items()] if isinstance(when, Mapping) else []
    return ", ".join(rules) + (f" where {' and '.join(where)}" if where else "")


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


@dataclass(frozen=True)
class Domain:
    """What a cell was run on. sizes: name -> smallest and largest that ran."""

    sizes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    path: str = "native"

    def ran_on(self) -> str:
        """Dtypes and sizes that ran, on one line; empty where nothing ran."""
        sizes = [f"{name} {lo}" if lo == hi else f"{name} {lo}..{hi}" for name, (lo, hi) in self.sizes.items()]
        return ", ".join(filter(None, ("/".join(self.dtypes), *sizes)))

    def text(self) -> str:
        """All of it on one line, the qualifications first."""
        limits = [f"only {limit}" for limit in self.limits]
        return ", ".join(filter(None, (*limits, "" if self.path == "native" else self.path, self.ran_on())))


def domain_of(records: Sequence[Record], support: Support | None) -> Domain:
    """The union of what the executed records ran on, and every limit the backend declares."""
    sizes: dict[str, tuple[Any, Any]] = {}
    dtypes: dict[str, None] = {}
    families: dict[str, None] = {}
    limits: dict[str, None] = {limit_text(row): None for row in (support.limits if support else ())}
    for record in records:
        rows = record.domain.get("limits")
        limits.update((limit_text(row), None) for row in rows if isinstance(row, dict)) if isinstance(
            rows, list
        ) else None
        if not executed(record):
            continue
        dtypes.update((v, None) for v in map(str, record.variant.values()) if v in FORMATS)
        seen = record.domain.get("families")
        families.update((str(f), None) for f in seen) if isinstance(seen, list) else None
        ranges = record.domain.get("sizes")
        for name, value in (ranges if isinstance(ranges, dict) else {}).items():
            lo, hi = value if isinstance(value, list) and len(value) == 2 else (value, value)
            old = sizes.get(name, (lo, hi))
            sizes[name] = (_pick(min, old[0], lo), _pick(max, old[1], hi))
    return Domain(sizes, tuple(dtypes), tuple(families), tuple(limits), support.path if support else "native")


def _pick(which: Any, a: Any, b: Any) -> Any:
    try:
        return which(a, b)
    except TypeError:
        return a


def executed(record: Record) -> bool:
    return record.status not in (Status.UNSUPPORTED, Status.SKIPPED, Status.NOT_RUN)


@dataclass(frozen=True)
class Cell:
    """One op on one backend. `total` counts the cases that any run of the report knows for the op on such a platform.

    compiled: the backend compiles and runs nothing, so that all its passes say little.
    """

    op: str
    records: tuple[Record, ...]
    total: int
    support: Support | None
    required: bool
    compiled: bool = False

    @cached_property
    def domain(self) -> Domain:
        return domain_of(self.records, self.support)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Cases by status, in the order of the closed list."""
        count = Counter(r.status for r in self.records)
        return {s.value: count[s.value] for s in Status if count[s.value]}

    @cached_property
    def states(self) -> dict[State, int]:
        count = Counter(map(state_of, self.records))
        return {s: count[s] for s in State if count[s]}

    @cached_property
    def state(self) -> State:
        if not self.records:
            if self.support is None or self.support.supported:
                return State.NOT_RUN
            return State.MISSING if self.required else State.NOT_YET
        seen = set(self.states)
        passing = seen & {State.PARTIAL, State.CONFORMING}
        bad = seen & {State.NONCONFORMING, State.MISSING, State.INCONCLUSIVE, State.WAIVED}
        if passing and not bad:
            whole = (seen == {State.CONFORMING} and len(self.records) >= self.total and not self.domain.limits
                     and not self.compiled)
            return State.CONFORMING if whole else State.PARTIAL
        return State.MISSING if self.required and seen == {State.NOT_YET} else worst(seen)

    @property
    def verdict(self) -> str:
        """The contract's word for the cell's worst case, or for an op without one."""
        if not self.records:
            status = Status.NOT_RUN if self.state is State.NOT_RUN else Status.UNSUPPORTED
            return verdict_of(status, Expectation.NONE, required=self.required).value
        found = {r.verdict for r in self.records}
        order = ("nonconforming", "inconclusive", "waived", "conforming", "not_run", "not_applicable")
        return next(v for v in order if v in found)

    @property
    def passed(self) -> int:
        return sum(r.verdict == Verdict.CONFORMING for r in self.records)

    @property
    def worst_error(self) -> float | None:
        """Largest error over bound of the cases that ran."""
        return max((e for e in map(error_over_bound, self.records) if e is not None), default=None)

    @property
    def reasons(self) -> dict[str, int]:
        """Cases by reason (status where there is none), of those that need one, the worst state first."""
        found: Counter[str] = Counter()
        for state in _EXPLAIN:
            count = Counter(_why(r) for r in self.records if state_of(r) is state)
            found.update(dict(count.most_common()))
        return dict(found)

    @property
    def why_missing(self) -> str:
        """Why nothing ran, in the backend's own words."""
        if self.support and not self.support.supported:
            kind = {"not_yet": "not yet", "by_design": "by design"}.get(self.support.kind, self.support.kind)
            return f"{kind}: {self.support.reason}" if self.support.reason else kind
        return next((r.message for r in self.records if r.message), "")

    def headline(self) -> str:
        """What stands in the cell beside the glyph."""
        kind = self.support.kind if self.support and not self.support.supported else ""
        if self.state in (State.NOT_YET, State.MISSING) and kind in ("hardware", "by_design"):
            return {"hardware": "not in hardware", "by_design": "not by design"}[kind]
        if not self.records and self.state is State.NOT_RUN:
            return "not selected"
        if self.state in (State.CONFORMING, State.PARTIAL):
            return f"{self.passed}/{self.total}"
        if self.state in (State.NONCONFORMING, State.INCONCLUSIVE, State.WAIVED):
            return f"{self.states[self.state]}/{self.total} {WORDS[self.state]}"
        return WORDS[self.state]

    def subline(self) -> str:
        """The qualification under it: reasons, what is missing, and declared limits."""
        parts = ["compiled, not run"] if self.compiled and self.passed else []
        parts += [f"{n} {reason}" for reason, n in self.reasons.items()][:3]
        for status, word in (("unsupported", "not yet"), ("not_run", "not run"), ("skipped", "skipped")):
            if self.counts.get(status) and self.state not in (State.NOT_YET, State.NOT_RUN, State.MISSING):
                parts.append(f"{self.counts[status]} {word}")
        if 0 < len(self.records) < self.total:
            parts.append(f"{self.total - len(self.records)} not selected")
        parts += [f"only {limit}" for limit in self.domain.limits]
        if self.domain.path != "native" and self.records:
            parts.append(self.domain.path)
        return ", ".join(parts)


def _why(record: Record) -> str:
    if record.status == Status.PASS:
        return record.expectation.replace("_", " ")
    return record.reason or record.status


_EXPLAIN = (State.NONCONFORMING, State.INCONCLUSIVE, State.WAIVED)


@dataclass(frozen=True)
class Matrix:
    """Ops down, runs across. `cells[op][i]` belongs to `runs[i]`."""

    runs: tuple[LoadedRun, ...]
    cells: Mapping[str, tuple[Cell, ...]]

    @property
    def modules(self) -> dict[str, list[str]]:
        """Module -> its ops, both in order."""
        modules: dict[str, list[str]] = {}
        for op in self.cells:
            modules.setdefault(module_of(op), []).append(op)
        return modules

    def column(self, i: int, ops: Iterable[str] | None = None) -> list[Cell]:
        return [self.cells[op][i] for op in (self.cells if ops is None else ops)]


def fold(runs: Sequence[LoadedRun], surface: Iterable[str] = ()) -> Matrix:
    """The matrix of these runs. `surface`: the public ops; those that no run knows get a grey row."""
    by_run: list[dict[str, list[Record]]] = []
    cases: dict[tuple[str, bool], set[str]] = {}
    compiles = [run.info.platform == COMPILER for run in runs]
    for run, only in zip(runs, compiles, strict=True):
        grouped: dict[str, list[Record]] = {}
        for record in run.records:
            op = op_of(record)
            grouped.setdefault(op, []).append(record)
            cases.setdefault((op, only), set()).add(record.id)
        by_run.append(grouped)
    cells = {
        op: tuple(
            Cell(
                op,
                tuple(grouped.get(op, ())),
                len(cases.get((op, only), ())),
                run.info.support(op),
                run.info.claim is not None and run.info.claim.requires(op),
                only,
            )
            for run, grouped, only in zip(runs, by_run, compiles, strict=True)
        )
        for op in known_ops(surface, runs)
    }
    return Matrix(tuple(runs), cells)


def module_headline(cells: Sequence[Cell]) -> str:
    """`4 of 12 ops` for a module's row: ops with a conforming cell, whole or in part."""
    good = sum(c.state in (State.CONFORMING, State.PARTIAL) for c in cells)
    return f"{good} of {len(cells)} ops"


@dataclass(frozen=True)
class Headline:
    """What a whole column comes to."""

    state: State
    words: str
    detail: str

    def __str__(self) -> str:
        return f"{self.words} ({self.detail})" if self.detail else self.words


def tally(count: Mapping[State, int], states: Iterable[State] = State) -> str:
    """`5 nonconforming, 1 waived`: the states that occur, in the order given."""
    return ", ".join(f"{count[s]} {WORDS[s]}" for s in states if count[s])


def run_headline(run: LoadedRun, cells: Sequence[Cell]) -> Headline:
    """The state and the words for a whole column.

    Relative to the claim where one is made, with all of its ops in the denominator;
    else "partial: 7 of 58 ops", whatever conforms. A run that was edited is inconclusive at best.
    """
    claim = run.info.claim
    inside = [c for c in cells if c.required] if claim else list(cells)
    count = Counter(c.state for c in inside)
    good = count[State.CONFORMING] + count[State.PARTIAL]
    in_part = f"{count[State.PARTIAL]} of these in part" if count[State.PARTIAL] else ""
    others = tally(count, (s for s in State if s not in (State.PARTIAL, State.CONFORMING)))
    detail = ", ".join(filter(None, (in_part, others)))
    if count[State.NONCONFORMING] + count[State.MISSING]:
        state = State.NONCONFORMING
    elif count[State.INCONCLUSIVE] or (claim and count[State.NOT_RUN]) or not inside:
        state = State.INCONCLUSIVE
    elif not claim:
        state = State.PARTIAL if good else (State.WAIVED if count[State.WAIVED] else State.NOT_YET)
    else:
        state = State.CONFORMING
    if run.edited:
        state = state if state is State.NONCONFORMING else State.INCONCLUSIVE
        detail = ", ".join(filter(None, ("edited since it was closed", detail)))
    if run.info.platform == COMPILER:
        mine = [c for c in inside if c.records]
        compiled = sum(c.state in (State.CONFORMING, State.PARTIAL) for c in mine)
        others = tally(Counter(c.state for c in mine), (s for s in State if s not in (State.PARTIAL, State.CONFORMING)))
        told = ", ".join(filter(None, ("edited since it was closed" if run.edited else "", others)))
        return Headline(state, f"compiled only: {compiled} of {len(mine)} ops that have programs", told)
    if not claim:
        return Headline(state, f"partial: {good} of {len(inside)} ops conforming", detail)
    word = {State.NONCONFORMING: "nonconforming", State.INCONCLUSIVE: "inconclusive"}.get(state, "conforming")
    return Headline(
        state, f"{word} to claim {claim.name or claim.level}: {good} of {len(inside)} ops conforming", detail
    )
