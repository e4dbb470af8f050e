"""What is timed: data sets of one problem that fit the same buffers, and some rows that stand for all."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.engine.draw import arrays_of, values_of
from conformance.engine.example import Example, build
from conformance.engine.judge import Seen
from conformance.engine.timed import PROBE_BYTES
from conformance.model import In, Out, Problem
from conformance.speed import Speed, TimedCase

LARGE_BYTES = 32 << 20
"""from which on another data set is the first one with its rows rolled: drawing takes longer than timing"""
ROWS = 64
"""of a large result that are judged, at random, in each data set"""
LARGE_ELEMENTS = 1 << 22


def problem_of(case: TimedCase, seed: int) -> Problem:
    """The workload's problem: plain values and ordinary data. Odd seeds plant nothing that must not matter."""
    op, work = case.op, case.workload
    assert work is not None
    assert case.of is not None
    choices = {name: work.values.get(name, c[0]) for name, c in values_of(op, case.of)}
    family = "normal" if "normal" in op.families else op.families[0]
    return Problem(op.name, case.of, {**op.sample, **work.sizes}, choices, family, 96 * (1 + seed) + 1)


class DataSets:
    """Data sets of one problem by number: the same on every machine, of one shape, none the data of another."""

    def __init__(self, case: TimedCase, problem: Problem, requirements: Mapping[str, int]) -> None:
        assert case.speed is not None
        self.op, self.speed, self.problem, self.requirements = case.op, case.speed, problem, requirements
        first = build(self.op, problem, requirements)
        if self.speed.settle:
            self.speed.settle(problem, first.codes)
            first = build(self.op, problem, requirements, codes=first.codes)
        self.first = first
        self.nbytes = sum(b.nbytes for plan in first.plans for b in plan.buffers)
        self.fixed = {a.name for a in arrays_of(self.op) if isinstance(a, In) and a.shapes}
        self.free = {a.name for a in arrays_of(self.op) if a.data is None} | set(self.speed.rolled)

    def make(self, number: int) -> Example:
        """Data set `number`; 0 is the problem's own."""
        if number == 0:
            return copy.copy(self.first)
        codes = self._rolled(number) if self.nbytes > LARGE_BYTES else self._drawn(number)
        return build(self.op, self.problem, self.requirements, codes=codes)

    def _drawn(self, number: int) -> dict[str, np.ndarray]:
        other = replace(self.problem, seed=self.problem.seed + 96 * 1000 * number)
        made = build(self.op, other, self.requirements).codes
        if self.speed.settle:
            self.speed.settle(other, made)
        return {k: made[k] if _name(k) not in self.fixed and made[k].shape == a.shape else a
                for k, a in self.first.codes.items()}

    def _rolled(self, number: int) -> dict[str, np.ndarray]:
        """Rows of every array that data families make, each array by another distance."""
        out = dict(self.first.codes)
        for i, (key, a) in enumerate(out.items()):
            if _name(key) in self.free and a.ndim and a.shape[0] > 1:
                out[key] = np.roll(a, 1 + (number * 7919 + i * 104729) % (a.shape[0] - 1), axis=0)
        return out

    @property
    def differ(self) -> bool:
        """Whether another data set is other data."""
        return any(not np.array_equal(a, b) for a, b in zip(
            self.make(1).codes.values(), self.first.codes.values(), strict=True))


def _name(key: str) -> str:
    return key.partition("@")[0].rpartition("/")[2]


def last_bytes(example: Example, requests: list[dict[str, Any]]) -> None:
    """Tell the executor where in each buffer the last element stands that the call may write."""
    for plan, request in zip(example.plans, requests, strict=True):
        for a in plan.arrays.values():
            if isinstance(a.arg, Out) or a.written:
                row = request["buffers"][a.buffer]
                row["last"] = max(row.get("last", 0), a.offset_bytes + max(a.spec.span_bytes(), PROBE_BYTES))


def some_rows(speed: Speed, example: Example, seen: Seen, pick: np.random.Generator) -> tuple[Example, Seen]:
    """The same call on a few of its rows, at random, where the op says that each row stands for itself."""
    total = sum(a.size for a in seen.outputs.values())
    if speed.rows is None or total < LARGE_ELEMENTS:
        return example, seen
    size, names = speed.rows
    n = example.problem.sizes[size]
    if n <= ROWS:
        return example, seen
    at = np.sort(pick.choice(n, ROWS, replace=False))
    codes = {k: a[at] if _name(k) in names else a for k, a in example.codes.items()}
    problem = replace(example.problem, sizes={**example.problem.sizes, size: ROWS})
    outputs = {k: np.ascontiguousarray(a[at]) if _name(k) in names else a for k, a in seen.outputs.items()}
    return replace(example, problem=problem, codes=codes), replace(seen, outputs=outputs)
