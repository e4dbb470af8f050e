"""Problems that are tried again and again, with what the oracle said of them: for many settings of one backend."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from conformance.engine import draw
from conformance.engine.example import Example
from conformance.model import Case, Problem
from references.expected import Expected

MOST_BYTES = 1 << 30
"""what is kept at most; what comes after is made anew each time"""

Answer = Mapping[Any, Expected]


class Recall:
    """Drawn problems; their arrays and the oracle's answers, kept until `forget`. Kept arrays can't be written to."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._chunks: dict[Any, list[Problem]] = {}
        self.forget()

    def forget(self) -> None:
        """Let go of all arrays. Drawn problems stay: they are small."""
        self.kept_bytes = 0
        self._examples: dict[str, Example] = {}
        self._answers: dict[tuple[int, str], Answer] = {}

    def chunk(self, case: Case, seed: int, index: int) -> list[Problem]:
        """As `draw.chunk`."""
        key = (case.id, seed, index)
        if key not in self._chunks:
            self._chunks[key] = draw.chunk(case, seed, index)
        return self._chunks[key]

    def example(self, problem: Problem, judged: bool, requirements: Mapping[str, int],
                make: Callable[[], Example]) -> Example:
        """What `make` gives for these, not yet placed in any memory."""
        key = json.dumps([problem.to_json(), judged, sorted(requirements.items())])
        found = self._examples.get(key)
        if found is None:
            found = make()
            if self._room(found.codes.values()):
                self._examples[key] = found
        return replace(found, before=[], after=[], arenas=[])

    def answer(self, example: Example, profile: Mapping[str, Any], make: Callable[[], Answer]) -> Answer:
        """What `make` gives for an example and a profile."""
        key = id(example.codes), json.dumps(profile, sort_keys=True, default=str)
        found = self._answers.get(key)
        if found is None:
            found = make()
            # An id names what is kept, and nothing that may be gone by the next call.
            known = any(e.codes is example.codes for e in self._examples.values())
            if known and self._room(_arrays(found)):
                self._answers[key] = found
        return found

    def _room(self, arrays: Any) -> bool:
        mine = list(arrays)
        needed = sum(a.nbytes for a in mine)
        if self.kept_bytes + needed > self.most_bytes:
            return False
        self.kept_bytes += needed
        for a in mine:
            a.flags.writeable = False
        return True


def _arrays(answer: Any) -> list[np.ndarray]:
    """Every array of an answer, whatever it is made of."""
    if isinstance(answer, np.ndarray):
        return [answer]
    if isinstance(answer, Mapping):
        return [a for part in answer.values() for a in _arrays(part)]
    if isinstance(answer, (tuple, list)):
        return [a for part in answer for a in _arrays(part)]
    if is_dataclass(answer):
        return [a for f in fields(answer) for a in _arrays(getattr(answer, f.name))]
    return []
