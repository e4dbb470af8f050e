"""From a failing problem to a small one, while time and deaths last.

First our own pre-shrink on the fields that mean something, then Hypothesis with every
integer bounded above by what was reached. A smaller problem counts only if it shows the
same status and reason: a shrink never slips from one bug to another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from conformance.engine.clock import monotonic
from conformance.engine.draw import values_of
from conformance.model import Op, Problem, Size

MAX_DEATHS = 25
SHRINK_EXAMPLES = 60
PLAIN = ("integers", "normal")


class _Spent(BaseException):
    """Leaves Hypothesis at once when the budget is used up."""


@dataclass
class Shrinker:
    """Keeps the smallest problem seen that still shows the bug."""

    op: Op
    fails: Callable[[Problem], bool]
    best: Problem
    end: float
    deaths: Callable[[], int]
    recovering_s: Callable[[], float] = lambda: 0.0
    """seconds that bringing devices back took: the deaths have a limit of their own"""
    tried: int = 0
    fine: list[Problem] = field(default_factory=list)
    """tried, and they don't show the bug"""

    def spent(self) -> bool:
        return monotonic() - self.recovering_s() >= self.end or self.deaths() >= MAX_DEATHS

    def attempt(self, problem: Problem) -> bool:
        """Whether this smaller problem shows the bug too; if so it becomes the best."""
        if self.spent():
            raise _Spent
        if problem == self.best or problem in self.fine or not self.op.fits(problem):
            return False
        self.tried += 1
        if self.fails(problem):
            self.best = problem
            return True
        self.fine.append(problem)
        return False

    def run(self) -> Problem:
        try:
            self._pre_shrink()
            self._hypothesis()
        except _Spent:
            pass
        return self.best

    def _pre_shrink(self) -> None:
        changed = True
        while changed:
            changed = False
            for candidates in (self._plainer(), *(self._smaller(n) for n in sorted(
                    self.op.sizes, key=lambda n: -_largest(self.best.sizes[n])))):
                for candidate in candidates:
                    if self.attempt(candidate):
                        changed = True
                        break

    def _plainer(self) -> Iterator[Problem]:
        """Without layout, with the plainest values, of a plainer family."""
        b = self.best
        if b.layout:
            yield replace(b, layout={})
        for name, choices in values_of(self.op, b.variant):
            if name in b.values and b.values[name] is not choices[0] and b.values[name] == b.values[name]:
                yield replace(b, values={**b.values, name: choices[0]})
        for family in PLAIN:
            if family in self.op.families and b.family not in PLAIN[: PLAIN.index(family) + 1]:
                yield replace(b, family=family)

    def _smaller(self, name: str) -> Iterator[Problem]:
        """Candidates for one size: the least, the numbers that decide code paths, halves, then by bisection."""
        b, size = self.best, self.op.sizes[name]
        now = b.sizes[name]
        for i, n in enumerate(now) if isinstance(now, list) else ((None, now),):
            def with_size(m: int, i: int | None = i) -> Problem:
                return replace(b, sizes={**b.sizes, name: m if i is None else [*now[:i], m, *now[i + 1:]]})

            for smaller in _steps(size, n, {m for m in self._tried(name, i) if with_size(m) in self.fine}):
                yield with_size(smaller)

    def _tried(self, name: str, i: int | None) -> set[int]:
        return {p.sizes[name] if i is None else p.sizes[name][i] for p in self.fine}

    def _hypothesis(self) -> None:
        """A second run bounded by the first: Hypothesis can't be started from a given problem."""
        bound = self.best
        free = {n: _bounded(self.op.sizes[n], bound.sizes[n]) for n in self.op.sizes
                if self.op.sizes[n].step and not isinstance(bound.sizes[n], list)}
        free = {n: s for n, s in free.items() if s is not None}
        if not free:
            return
        shrinker = self

        @settings(max_examples=SHRINK_EXAMPLES, database=None, deadline=None, report_multiple_bugs=False,
                  phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck), print_blob=False)
        @hypothesis.seed(bound.seed)
        @hypothesis.given(st.fixed_dictionaries(free))
        def look(sizes: dict[str, int]) -> None:
            problem = replace(bound, sizes={**bound.sizes, **sizes})
            weight = _weight(problem)
            best = shrinker.best
            if weight < _weight(best) and shrinker.attempt(problem):
                raise _Found
            if problem == best:
                raise _Found

        try:
            look()
        except _Spent:
            raise
        except Exception:
            return


class _Found(Exception):
    """The bug shows."""


def _largest(n: Any) -> int:
    return max(n) if isinstance(n, list) else n


def _weight(p: Problem) -> tuple[int, ...]:
    flat = [n for v in p.sizes.values() for n in (v if isinstance(v, list) else [v])]
    return (sum(flat), *flat)


def _steps(size: Size, now: int, fine: Collection[int] = ()) -> Iterator[int]:
    """Numbers below `now`, none of `fine`, which don't show the bug. Who asks for the next one says: nor did this.

    What shows the bug may cost a device its life, so the border is found by halving what lies between.
    """
    least = 0 if size.zero and now > 0 and size.lo == 0 else size.lo
    if size.step == 0:
        yield from sorted(p for p in size.points if p < now and p not in fine)
        return
    seen = {now, *fine}
    halves, n = [], now
    while n > least:
        n = max(least, (n // 2) // size.step * size.step)
        halves.append(n)
        if n == least:
            break
    for candidate in [least, *(p for p in size.points if p < now), *reversed(halves)]:
        if candidate not in seen and least <= candidate < now:
            seen.add(candidate)
            yield candidate
    floor = max((n for n in seen if n < now), default=now)
    while floor < (middle := (floor + now) // 2 // size.step * size.step) < now:
        yield middle
        floor = middle


def _bounded(size: Size, now: int) -> st.SearchStrategy[int] | None:
    lo, hi = -(-size.lo // size.step), now // size.step
    return st.integers(lo, hi).map(lambda n: n * size.step) if hi > lo else None
