"""A failure read backwards: which fault of the cpu kernels, given the same problem, gives the same wrong numbers.

No verdict hangs on it: whatever goes wrong in here, nothing is said. docs/diagnosis.md tells how it is used.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from conformance.engine import kinds
from conformance.engine.attempt import Attempts, Bench, Clock
from conformance.engine.clock import monotonic
from conformance.engine.draw import work
from conformance.engine.evidence import Evidence, Score, direct, evidence_of, score, wrong_in
from conformance.engine.example import Example, build, digests
from conformance.engine.executor import ArenaPool
from conformance.engine.kinds import Candidate
from conformance.engine.patterns import pattern_of
from conformance.engine.rig import Rig
from conformance.engine.told import Diagnosis, Match
from conformance.model import Op, Problem
from references.expected import Array

LIMIT_S = 2.0
KEPT = 12
"""settings a kind that are tried on the other evidence too, where none fits the small problem wholly"""
CLEAR = 0.9
"""the best stands alone where no other kind comes above this share of it"""
MANY = 100
"""settings, from which on it pays to find out which tiles hold all of the small problem's axes"""
MOST_MEASURED = 3
"""problems that the backend may be asked about whose axes are looked at"""
MOST_ASKED = 6
"""problems that the backend is asked about beside the evidence"""
ENOUGH_EVIDENCE = (3, 3, 6, math.inf)
"""failing problems without which nothing is certain, by rank: on a small one alone many faults look the same, and of
many unusual parameters one may fit by chance"""
ENOUGH_ELEMENTS = 24
"""wrong ones, of all evidence together, without which nothing is certain"""
DEFAULT_TILES, WHOLE = (64, 128), (1, 2, 3, 32, 64)
"""tiles of a setting that names none, and how many of them make an axis; some kernels walk 32 at a time"""
NEVER_CERTAIN = ("untouched",)
"""kinds that others hide behind: what adds to poison leaves poison too"""
DESCRIBED = 3
"""the rank of what tells less than a setting"""


@dataclass(frozen=True)
class Further:
    """More problems of the case, and a way to ask the backend about one: what it gives there, or None.

    Asking runs the backend, so that arrays of former attempts stand in their arenas no longer.
    """

    problems: Sequence[Problem]
    ask: Callable[[Problem], Evidence | None]
    requirements: Mapping[str, int]


def further(bench: Bench, op: Op, problems: Sequence[Problem]) -> Further | None:
    """These problems, the largest first, and the backend to ask; None where the case holds its devices.

    What is asked runs in a process and arenas of its own, so that what a failure kept stays as it is.
    """
    if bench.devices is not None or bench.inline:
        return None

    def ask(problem: Problem) -> Evidence | None:
        attempts = Attempts(replace(bench, pool=ArenaPool()), op, Clock())
        try:
            attempt = attempts.run(problem, fresh=True)
            return evidence_of(attempt, attempt.worst)
        finally:
            attempts.close()

    return Further(sorted(problems, key=lambda p: -work(op, p)), ask, bench.description.requirements)


def diagnose(op: Op, evidence: Sequence[Evidence], bench: Callable[[], Bench], *, further: Further | None = None,
             tiles: Iterable[int] = (), limit_s: float = LIMIT_S, without: str = "") -> Diagnosis | None:
    """What kind of fault it is.

    evidence: of the small problem first, then of others of the same case, wrong or right. bench: gives a Bench on
    rig.SETTABLE. further: asked about where two kinds fit, or one on too few problems. tiles: sizes that the backend
    declares for this op. limit_s: for the settings, half of it more for what follows; compilers and the backend have
    their own. without: a kind to leave out, for evaluation. None where nothing can be said. Raises nothing: a
    diagnosis never stands in the way of a verdict.
    """
    rig: Rig | None = None
    try:
        with np.errstate(all="ignore"):
            rig = Rig(bench(), op)
            return _Search(op, rig, tuple(tiles), limit_s, without).go(evidence, further)
    except Exception:
        return None
    finally:
        if rig is not None:
            rig.close()


@dataclass(frozen=True)
class _Key:
    """What decides a score: the evidence, whether calls come before, and the setting."""

    evidence: int
    after_others: bool
    knobs: str


class _Search:
    def __init__(self, op: Op, rig: Rig, tiles: tuple[int, ...], limit_s: float, without: str) -> None:
        self.op, self.rig, self.tiles, self.without = op, rig, tiles, without
        self.begun, self.limit_s, self.end_s = monotonic(), limit_s, 1.5 * limit_s
        self.after_others = False
        """whether each run comes after the calls that came before it"""
        self.known: dict[_Key, Score] = {}
        """of settings that come to the same"""
        self.judged: dict[tuple[int, str], Score] = {}
        """of results that are the same, by evidence and digest"""
        self.reach: dict[int, dict[str, int]] = {}
        """by evidence and axis, the smallest tile that holds all of it"""
        self.pool: list[Problem] = []
        """problems that the backend may be asked about"""
        self.asked = 0
        self.cut = False
        """whether time ran out before all evidence was seen"""

    @property
    def spent_s(self) -> float:
        """Without what compilers and the first start took, which have limits of their own."""
        return monotonic() - self.begun - self.rig.apart_s

    def go(self, evidence: Sequence[Evidence], further: Further | None) -> Diagnosis | None:
        known = [e for e in map(self._countable, evidence) if e is not None]
        if not known or not known[0].count or known[0].example is not evidence[0].example:
            return None
        small = known[0]
        self.pool = list(further.problems) if further else []
        most = [build(self.op, p, further.requirements) for p in self.pool[:MOST_MEASURED]] if further else []
        largest = max([*(e.example for e in known), *most], key=_longest)
        rows = [r for r in kinds.kinds_of(self.op.name) if kinds.family_of(r["knobs"]) != self.without]
        axes = self.rig.axes([known[-1].example, largest])
        settings = kinds.candidates(rows, axes, self.tiles, _longest(largest))
        if len(settings) >= MANY:
            self.reach[id(small)] = {**_whole_axes(small.example), **self.rig.reach(small.example, axes)}
        scored = self._first_look(small, settings)
        self.end_s = max(1.5 * self.limit_s, self.spent_s + self.limit_s / 2)
        while True:
            others = sorted(known[1:], key=lambda e: sum(w.size for w in e.wrong.values()))
            best = _best([*self._direct([small, *others]), *self._narrowed(scored, others)])
            whole = len(scored) == len(settings) and not self.cut
            rivals = self._rivals(best, known)
            certain = whole and _alone(best, [e.count for e in known if e.count])
            done = self.cut or (certain and len(rivals) < 2)
            more = None if done or not further else self._asked(rivals, further)
            if more is None:
                break
            known.append(more)
        patterns = {n: pattern_of(w) for n, w in small.wrong.items()}
        words = "; ".join(f"{p} of {n}" for n, p in patterns.items() if p)
        also = rivals[1] if len(rivals) > 1 and rivals[1] not in {m.knobs for m in best} else ""
        return Diagnosis(best, certain, words, len(scored), len(settings), self.spent_s + self.rig.apart_s, also)

    def _rivals(self, best: Sequence[Match], known: Sequence[Evidence]) -> list[str]:
        """The knobs of the two best that fit wholly; of one that stands alone also its twin, if that fits too."""
        rivals = [m.knobs for m in best if m.full and m.rank < DESCRIBED][:2]
        other = kinds.twin(rivals[0]) if len(rivals) == 1 else ""
        if other and all(self._score(e, Candidate("", "", "", other, 0)).full for e in known):
            rivals.append(other)
        return rivals

    def _asked(self, rivals: Sequence[str], further: Further) -> Evidence | None:
        """What the backend gives for a problem that tells two rivals apart; None where no problem does."""
        if len(rivals) < 2 or not all(rivals):
            choice = iter(self.pool[:])
        else:
            choice = (p for p in chain(self.pool[:], self._whole_tiles(further, rivals))
                      if self.spent_s <= self.end_s and self._tells(build(self.op, p, further.requirements), rivals))
        for problem in choice:
            if self.asked == MOST_ASKED:
                return None
            self.asked += 1
            self.pool = [p for p in self.pool if p is not problem]
            begun = monotonic()
            found = further.ask(problem)
            self.begun += monotonic() - begun  # the backend's time
            found = self._countable(found) if found is not None else None
            if found is not None:
                return found
        return None

    def _whole_tiles(self, further: Further, rivals: Sequence[str]) -> Iterator[Problem]:
        """The smallest problem with one axis of whole tiles of the rivals: there alone is a tail no last tile."""
        tiles = {int(v) for r in rivals for n, v in kinds.parse(r).items() if n in kinds.AXES} or set(DEFAULT_TILES)
        for name, size in self.op.sizes.items():
            for n in (t * times for t in sorted(tiles) for times in WHOLE):
                legal = not size.per_rank and size.lo <= n <= size.hi and not (
                    n % size.step if size.step else n not in size.points)
                for p in further.problems[-1:] if legal else ():
                    made = replace(p, sizes={**p.sizes, name: n})
                    if self.op.fits(made):
                        yield made

    def _tells(self, example: Example, rivals: Sequence[str]) -> bool:
        """Whether two settings give other results for a problem."""
        return len({digests(self.rig.outputs([example], knobs) or {}) for knobs in rivals}) > 1

    def _narrowed(self, scored: Sequence[tuple[Score, Candidate]], others: Sequence[Evidence]) -> list[Match]:
        """The best settings of the first look, on the rest of the evidence, as long as they keep up with the best.

        Where time runs out in between, each counts by what it met.
        """
        kept = _kept(sorted(scored, key=lambda s: (-s[0].share, s[1].rank)))
        scores = {c.knobs: [s] for s, c in kept}
        alive = [c for _, c in kept]
        for e in others:
            for c in alive:
                if self._key(e, c) in self.known or self.spent_s <= self.end_s:
                    scores[c.knobs].append(self._score(e, c))
                else:
                    self.cut = True
            whole = [c for c in alive if all(s.full for s in scores[c.knobs])]
            alive = whole or alive
        missed = [Score(0, 1, 0, 0)]
        full = {k: tuple(s) if self.cut else (*s, *missed * (1 + len(others) - len(s))) for k, s in scores.items()}
        return [Match(c.kind, c.name, c.doc, c.knobs, c.rank, full[c.knobs]) for _, c in kept]

    def _countable(self, e: Evidence) -> Evidence | None:
        """The evidence with wrong elements to count; None where the kernels as they should be give the same.

        Where only all elements together are wrong, those count that the correct kernels give otherwise.
        """
        found = self.rig.outputs([e.example], "")
        if found is None:
            return None
        correct = {n: np.array(found[n]) for n in e.wrong if n in found}
        if not e.reason:
            return e if score(e, correct).full else None
        if not e.count:
            e = replace(e, correct=correct)
            e.wrong = wrong_in(e, e.outputs) or {}
        return e if e.count and not score(e, correct).full else None

    def _first_look(self, small: Evidence, settings: Sequence[Candidate]) -> list[tuple[Score, Candidate]]:
        """Each setting on the small problem, as far as the time goes.

        What a fault keeps of the call before shows only after that call: where nothing fits, that is made too.
        """
        scored = self._looked_at(small, settings)
        if small.before and not any(s.full for s, _ in scored):
            self.after_others = True
            again = {c.knobs: s for s, c in self._looked_at(small, [c for _, c in scored if not c.rank])}
            scored = [(max(s, again.get(c.knobs, s), key=lambda x: x.share), c) for s, c in scored]
        return scored

    def _looked_at(self, e: Evidence, settings: Sequence[Candidate]) -> list[tuple[Score, Candidate]]:
        """Those for which there was time, in order."""
        keys = [self._key(e, c) for c in settings]
        new = [k for k in dict.fromkeys(keys) if k not in self.known]
        results = self.rig.each(self._calls(e), (k.knobs for k in new))
        with contextlib.closing(results):
            for key in new:
                if self.spent_s > self.limit_s:
                    break
                self.known[key] = self._judged(e, next(results))
        return [(self.known[k], c) for k, c in zip(keys, settings, strict=True) if k in self.known]

    def _score(self, e: Evidence, c: Candidate) -> Score:
        key = self._key(e, c)
        if key not in self.known:
            self.known[key] = self._judged(e, self.rig.outputs(self._calls(e), c.knobs))
        return self.known[key]

    def _judged(self, e: Evidence, outputs: Mapping[str, Array] | None) -> Score:
        key = id(e), digests(outputs or {})
        if key not in self.judged:
            self.judged[key] = score(e, outputs)
        return self.judged[key]

    def _calls(self, e: Evidence) -> list[Example]:
        return [*e.before, e.example] if self.after_others else [e.example]

    def _key(self, e: Evidence, c: Candidate) -> _Key:
        if id(e) not in self.reach:
            self.reach[id(e)] = _whole_axes(e.example)
        return _Key(id(e), self.after_others, kinds.clipped(c.knobs, self.reach[id(e)]))

    def _direct(self, evidence: Sequence[Evidence]) -> list[Match]:
        """Kinds that any op can have."""
        found = [list(direct(e)) for e in evidence]
        return [Match(kind, kind, doc, "", rank, tuple(of[i][3] for of in found))
                for i, (kind, doc, rank, _) in enumerate(found[0]) if kind != self.without]


def _whole_axes(example: Example) -> dict[str, int]:
    """By axis, a tile that is large enough for all of it."""
    return dict.fromkeys(kinds.AXES, _longest(example))


def _longest(example: Example) -> int:
    """The longest axis of all inputs."""
    return max((max(a.shape, default=1) for a in example.codes.values()), default=1)


def _kept(scored: Sequence[tuple[Score, Candidate]]) -> list[tuple[Score, Candidate]]:
    """All settings that fit wholly; where none does, the best few of each kind."""
    whole = [(s, c) for s, c in scored if s.full]
    if whole:
        return whole
    seen: dict[str, int] = {}
    for s, c in scored:
        seen[c.kind] = seen.get(c.kind, 0) + 1
        if s.share > 0 and seen[c.kind] <= KEPT:
            whole.append((s, c))
    return whole[: 4 * KEPT]


def _best(matches: Iterable[Match]) -> tuple[Match, ...]:
    """The best of each kind, best first; what only describes has to be twice as good as what explains."""
    by_kind: dict[str, Match] = {}
    for m in sorted(matches, key=lambda m: (-m.share / (2 if m.rank >= DESCRIBED else 1), m.rank)):
        by_kind.setdefault(m.kind, m)
    return tuple(by_kind.values())


def _alone(best: Sequence[Match], wrong: Sequence[int]) -> bool:
    """Whether the first kind fits wholly, is no mere description, and no other kind comes near.

    wrong: wrong elements of each problem that failed.
    """
    first = best[0]
    enough = len(wrong) >= ENOUGH_EVIDENCE[first.rank] and sum(wrong) >= ENOUGH_ELEMENTS
    return (first.full and enough and first.kind not in NEVER_CERTAIN
            and all(m.share <= CLEAR * first.share for m in best[1:] if m.rank < DESCRIBED))
