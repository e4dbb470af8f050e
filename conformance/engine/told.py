"""What a diagnosis says: which kinds fit how well, and whether the first is certain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conformance.engine.evidence import Score

WORTH_TELLING = 0.5


@dataclass(frozen=True)
class Match:
    """A setting of the kernels, or what the arrays alone show (`knobs` empty), with its score on each evidence."""

    kind: str
    name: str
    doc: str
    knobs: str
    rank: int
    scores: tuple[Score, ...]

    @property
    def share(self) -> float:
        """0 to 1, the mean over the evidence."""
        return sum(s.share for s in self.scores) / len(self.scores)

    @property
    def full(self) -> bool:
        return all(s.full for s in self.scores)

    def words(self) -> str:
        how = f" (knobs={self.knobs})" if self.knobs else ""
        fits = sum(s.full for s in self.scores)
        more = f", and fits {fits} of {len(self.scores)} problems" if len(self.scores) > 1 else ""
        doc = self.doc.split(". ")[0].rstrip(".") + ("; here with other parameters" if self.knobs and self.rank else "")
        return f"{self.name.replace('_', ' ')}{how}: {self.scores[0].words()}{more} ({doc})"


@dataclass(frozen=True)
class Diagnosis:
    """The best kinds, best first, one setting a kind; `certain` where the first stands alone and fits wholly."""

    matches: tuple[Match, ...]
    certain: bool
    wrong: str
    """the pattern that the wrong elements make"""
    tried: int
    settings: int
    seconds: float
    also: str = ""
    """knobs of the same family that fit just as well"""

    @property
    def known(self) -> tuple[Match, ...]:
        return tuple(m for m in self.matches if m.scores[0].share >= WORTH_TELLING)[:2]

    def sentence(self) -> str:
        """One line for a message."""
        some = f"; {self.tried} of {self.settings} settings tried in time" if self.tried < self.settings else ""
        if not self.known:
            return f"no known kind; wrong elements: {self.wrong}{some}"
        if self.certain:
            return f"matches {self.known[0].words()}{f'; knobs={self.also} fits as well' if self.also else ''}"
        return f"may be {', or '.join(m.words() for m in self.known)}{some}"

    def to_json(self) -> dict[str, Any]:
        """For the record: words and plain numbers."""
        matches = [{"kind": m.name, "knobs": m.knobs, "share": round(m.share, 4), "explained": m.scores[0].explained,
                    "wrong": m.scores[0].wrong, "left_right": m.scores[0].left, "right": m.scores[0].right}
                   for m in self.known]
        return {"certain": self.certain, "tried": self.tried, "settings": self.settings, "also": self.also,
                "matches": matches}
