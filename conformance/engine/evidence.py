"""What runs of the backend gave, and how well other results explain it, element by element."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.engine.attempt import Attempt
from conformance.engine.example import Example
from conformance.engine.judge import Finding
from references.expected import Array, Expected, Joint, Within
from references.formats import codec

OF_VALUES = frozenset({"numeric", "nonfinite", "unwritten", "order", "index_range", "token_lost", "token_duplicated"})
"""reasons of failures that show in what results hold; the others are not diagnosed"""
FLIPPED = 4
"""neighbouring bits of one element, at most, that count as a flip"""
MOST_RELATIVE = 2.0**-6
"""of a candidate far from the right value: its error may be this share of itself at most"""


@dataclass
class Evidence:
    """One run that was wrong, or right: what was right counts against a kind that is wrong there.

    Its arrays are copies, for arenas are used again.
    """

    example: Example
    before: tuple[Example, ...]
    """the calls that came before it in the same process"""
    expected: Mapping[Any, Expected]
    outputs: dict[str, Array]
    """codes by name"""
    formats: dict[str, str]
    previous: dict[str, Array]
    """what the call before gave, where that was right"""
    reason: str
    """empty where the run was right"""
    first_call: bool
    """whether it is wrong where the next call of the same process is right"""
    wrong: dict[str, Array] = field(default_factory=dict)
    """bool masks by name, of the outputs that the oracle speaks of"""
    correct: dict[str, Array] | None = None
    """where only all elements together are wrong: what the kernels as they should be give. What differs is wrong"""

    @property
    def count(self) -> int:
        return sum(int(w.sum()) for w in self.wrong.values())


@dataclass(frozen=True)
class Score:
    """How many of the wrong elements something explains, and how many of the right ones it leaves right."""

    explained: int
    wrong: int
    left: int
    right: int

    @property
    def share(self) -> float:
        """0 to 1: the share explained times the share left right. Of a run that was right all must be left so."""
        if not self.wrong:
            return float(self.full)
        return self.explained / self.wrong * (self.left / self.right if self.right else 1.0)

    @property
    def full(self) -> bool:
        return self.explained == self.wrong and self.left == self.right and self.wrong + self.right > 0

    def words(self) -> str:
        rest = f" and {self.left} of {self.right} right ones" if self.right else ""
        return f"explains {self.explained} of {self.wrong} wrong elements{rest}"


def copied(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {n: np.array(a) for n, a in arrays.items()}


def evidence_of(attempt: Attempt, finding: Finding | None) -> Evidence | None:
    """What of an attempt can be diagnosed; None where nothing can: it is not about values, or has no oracle.

    finding: what is wrong, or None where all is right and the last run is the evidence. To be asked before the next
    attempt: outputs stand in arenas, which that one uses again.
    """
    at = len(attempt.seen) - 1 if finding is None or finding.example < 0 else finding.example
    if not 0 <= at < min(len(attempt.seen), len(attempt.expected)):
        return None
    seen = attempt.seen[at]
    if finding is not None and (finding.status != "fail" or finding.reason not in OF_VALUES):
        return None
    if any(f.reason not in OF_VALUES for f in seen.findings) or (finding is None) != (not attempt.findings):
        return None
    right_later = finding is not None and at == 0 and len(attempt.seen) > 1 and not attempt.seen[1].findings
    before = attempt.seen[at - 1] if at else None
    previous = copied(before.outputs) if before is not None and not before.findings else {}
    found = Evidence(attempt.examples[at], tuple(attempt.examples[:at]), attempt.expected[at], copied(seen.outputs),
                     dict(seen.formats), previous, "" if finding is None else str(finding.reason), right_later)
    found.wrong = wrong_in(found, found.outputs) or {}
    return found if any(w.size for w in found.wrong.values()) else None


def wrong_in(e: Evidence, outputs: Mapping[str, Array]) -> dict[str, Array] | None:
    """Which elements of other results of the same call are wrong, by name; None where they have another form."""
    if e.correct is not None:
        return {n: codec.bits(outputs[n]) != codec.bits(c) for n, c in e.correct.items() if n in outputs}
    found: dict[str, Array] = {}
    try:
        for key, want in e.expected.items():
            if isinstance(want, Joint):
                found |= {n: j.bad for n, j in want.judge_all({n: outputs[n] for n in want.outputs}).items()}
            else:
                found[key] = want.judge(outputs[key], e.formats[key]).bad
    except (KeyError, TypeError, ValueError):
        return None
    return {n: np.asarray(b, bool) for n, b in found.items()}


def score(e: Evidence, outputs: Mapping[str, Array] | None) -> Score:
    """How well other results of the same call explain what was observed.

    A wrong element is explained where the other result is wrong too and agrees with what was observed.
    """
    n = e.count
    nothing = Score(0, n, 0, sum(w.size for w in e.wrong.values()) - n)
    other = wrong_in(e, outputs) if outputs else None
    if not outputs or other is None or other.keys() != e.wrong.keys():
        return nothing
    explained = left = 0
    free = _free_rows(e, outputs, other)
    for name, wrong in e.wrong.items():
        if other[name].shape != wrong.shape or outputs[name].shape != e.outputs[name].shape:
            return nothing
        same = _agree(e, name, outputs[name])
        ok = free.get(name, np.zeros(wrong.shape, bool))
        explained += int(np.sum(wrong & (ok | (other[name] & same))))
        left += int(np.sum(~wrong & (ok | ~other[name])))
    return Score(explained, n, left, nothing.right)


def _agree(e: Evidence, name: str, other: Array) -> Array:
    """Where another result is what was observed: the same bits, both NaN, or as near as rounding allows."""
    fmt, mine = e.formats[name], e.outputs[name]
    same = np.asarray(codec.bits(mine) == codec.bits(other))
    want = e.expected.get(name)
    if not isinstance(want, Within) or e.correct is not None:
        return same
    with np.errstate(all="ignore"):
        a = np.asarray(codec.decode(mine, fmt), np.float64)
        b = np.asarray(codec.decode(other, fmt), np.float64)
        # A wrong value far above the right one has an error of its own size.
        relative = np.minimum(want.bound / np.abs(want.value), MOST_RELATIVE)
        near = np.abs(a - b) <= np.fmax(want.bound, relative * np.abs(b))
    return same | near | (np.isnan(a) & np.isnan(b))


def _free_rows(e: Evidence, outputs: Mapping[str, Array], other: Mapping[str, Array]) -> dict[str, Array]:
    """By name, the rows of outputs judged together that hold the same entries in another order, as many of them wrong.

    Where the order is what is wrong, it is not free.
    """
    found: dict[str, Array] = {}
    for want in e.expected.values():
        shapes = set(want.shapes.values()) if isinstance(want, Joint) else set()
        if e.reason == "order" or e.correct is not None or len(shapes) != 1 or len(next(iter(shapes))) != 2:
            continue
        names = want.outputs
        equal = np.all(_sorted_rows(e.outputs, names) == _sorted_rows(outputs, names), axis=-1)
        for n in names:
            alike = equal & (e.wrong[n].sum(axis=-1) == other[n].sum(axis=-1))
            found[n] = np.broadcast_to(alike[:, None], e.wrong[n].shape)
    return found


def _sorted_rows(arrays: Mapping[str, Array], names: tuple[str, ...]) -> Array:
    """Structured array of the shape of the outputs: in each row the entries of all outputs, in order."""
    parts = [codec.bits(np.ascontiguousarray(arrays[n])) for n in names]
    both = np.empty(parts[0].shape, [(str(i), p.dtype) for i, p in enumerate(parts)])
    for i, p in enumerate(parts):
        both[str(i)] = p
    return np.sort(both, axis=-1)


def direct(e: Evidence) -> Iterator[tuple[str, str, int, Score]]:
    """(kind, doc, rank, score) of what any op can have, seen in the arrays alone. Rank 3 tells less than a setting."""
    none = Score(0, e.count, 0, sum(w.size for w in e.wrong.values()) or 1)
    itself = score(e, e.outputs)  # of a run that was right: a kind that may come and go
    every = e.count == sum(w.size for w in e.wrong.values())
    yield "zeros", "Every element is 0.", 0, score(e, {n: np.zeros_like(a) for n, a in e.outputs.items()})
    yield "stale", "The results are those of the call before.", 0, score(e, e.previous)
    untouched = e.reason == "unwritten" and every
    yield "untouched", "Nothing was written.", 0, itself if untouched or not e.count else none
    doc = f"Up to {FLIPPED} neighbouring bits of one element are flipped."
    yield "one_element", doc, 1, itself if _flipped(e) or not e.count else none
    unwritten = e.reason == "unwritten" and not every
    yield "unwritten", "Some elements were never written.", 3, itself if unwritten or not e.count else none
    doc = "The first call of a process is wrong, the second is right."
    yield "first_call_wrong", doc, 3, itself if e.first_call or not e.count else none


def _flipped(e: Evidence) -> bool:
    """Whether one element alone is wrong, and right again with a few neighbouring bits of it flipped."""
    if e.count != 1 or e.correct is not None:
        return False
    name = next(n for n, w in e.wrong.items() if w.any())
    at = tuple(int(i) for i in np.argwhere(e.wrong[name])[0])
    trial = copied(e.outputs)
    place = codec.bits(trial[name])
    was = int(place[at])
    width = place.dtype.itemsize * 8
    for low in range(width):
        for n in range(1, min(FLIPPED, width - low) + 1):
            place[at] = was ^ (((1 << n) - 1) << low)
            judged = wrong_in(e, trial)
            if judged and not any(b.any() for b in judged.values()):
                return True
    return False
