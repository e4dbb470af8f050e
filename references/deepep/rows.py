"""Rows that may come in a free order inside known ranges: what is right, and what went wrong otherwise.

A row is everything that travels together: payload, scales, ids, weights. The rows of a
range must be a permutation of the wanted ones, the same permutation for every output.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from references.expected import Array, Judgement
from references.formats import codec

PAYLOAD, INDEX, OTHER = "payload", "index", "other"
_ALIKE = 0.5
"""Share of equal elements from which a row counts as a damaged copy of another, not as something else."""
_MANY = 64
"""Rows of one range that are compared each with each; above, only those at the same place."""


@dataclass(frozen=True)
class Column:
    """What one output holds. want: codes [n, ...], one entry a wanted row, in canonical order."""

    name: str
    want: Array
    kind: str = OTHER
    limit: int = 0
    """of an index: the values -1..limit-1 are in range"""


@dataclass(frozen=True)
class Range:
    """Wanted rows first..first+count-1 lie, in any order, at rows start..start+count-1."""

    start: int
    first: int
    count: int


@dataclass(frozen=True)
class Rows:
    """columns: the first is the payload that names a row. total: rows of the outputs.

    zero: bool [total], rows that must hold zeros; of other rows outside all ranges nothing is said.
    known: bytes of every payload that exists anywhere, to tell a misrouted row from garbage.
    """

    columns: tuple[Column, ...]
    ranges: tuple[Range, ...]
    total: int
    zero: Array
    known: frozenset[bytes]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {c.name: (self.total, *c.want.shape[1:]) for c in self.columns}

    def check(self, got: Mapping[str, Array]) -> dict[str, Judgement]:
        """The verdict on every output; for `expected.Joint`."""
        bits = {c.name: _flat(got[c.name]) for c in self.columns}
        want = {c.name: _flat(c.want) for c in self.columns}
        found = _Comparison(self, bits, want)
        verdicts = {}
        for c in self.columns:
            bad, reason = found.bad[c.name], found.reason(c.name)
            gaps = self.zero[:, None] & (bits[c.name] != 0)
            shape = (self.total, *c.want.shape[1:])
            shown = found.shown[c.name].view(c.want.dtype).reshape(shape) if bad.any() else None
            verdicts[c.name] = Judgement((bad | gaps).reshape(shape), shown, None, reason or "numeric")
        return verdicts


class _Comparison:
    """Matches the rows of every range, then explains what is left over."""

    _ORDER = ("token_duplicated", "token_lost", "order", "index_range", "numeric")

    def __init__(self, rows: Rows, bits: Mapping[str, Array], want: Mapping[str, Array]) -> None:
        self._rows, self._bits, self._want = rows, bits, want
        self._names = [c.name for c in rows.columns]
        self.bad = {n: np.zeros(b.shape, bool) for n, b in bits.items()}
        self.shown = {n: b.copy() for n, b in bits.items()}
        self._reasons: dict[str, set[str]] = {n: set() for n in self._names}
        self._permuted: dict[str, bool] = {}
        self._wanted = [self._key(want, i) for i in range(len(rows.columns[0].want))]
        self._got = {p: self._key(bits, p) for r in rows.ranges for p in range(r.start, r.start + r.count)}
        self._wanted_count, self._got_count = Counter(self._wanted), Counter(self._got.values())
        left = [self._match(r) for r in rows.ranges]
        if any(positions for positions, _ in left):
            self._explain(left)

    def reason(self, name: str) -> str:
        return next((r for r in self._ORDER if r in self._reasons[name]), "")

    def _key(self, source: Mapping[str, Array], row: int) -> bytes:
        return b"".join(source[n][row].tobytes() for n in self._names)

    def _match(self, r: Range) -> tuple[list[int], list[int]]:
        """Positions and wanted rows of the range that have no equal."""
        open_rows: dict[bytes, list[int]] = {}
        for i in range(r.first, r.first + r.count):
            open_rows.setdefault(self._wanted[i], []).append(i)
        positions = []
        for p in range(r.start, r.start + r.count):
            same = open_rows.get(self._got[p])
            if same:
                same.pop()
            else:
                positions.append(p)
        return positions, sorted(i for same in open_rows.values() for i in same)

    def _explain(self, left: list[tuple[list[int], list[int]]]) -> None:
        everywhere = Counter(self._key(self._bits, p) for p in range(self._rows.total))
        nothing_lost = not Counter(self._wanted) - everywhere
        payload = self._names[0]
        astray = []
        for positions, rows in left:
            for p, i in self._pair(positions, rows):
                for n in self._names:
                    self.bad[n][p] = self._bits[n][p] != self._want[n][i]
                    self.shown[n][p] = self._want[n][i]
                if self.bad[payload][p].any():
                    astray.append((p, i))
                else:
                    self._by_column(p)
        reasons = {self._by_row(p, i, nothing_lost=nothing_lost) for p, i in astray}
        reason = next((r for r in self._ORDER if r in reasons), "")
        for n in self._names:
            if any(self.bad[n][p].any() for p, _ in astray):
                self._reasons[n].add(reason)

    def _by_row(self, p: int, i: int, *, nothing_lost: bool) -> str:
        """A payload that is not the wanted one: a copy, a row in the wrong place, or none at all."""
        key = self._got[p]
        if self._wanted_count[key]:
            return "token_duplicated" if self._got_count[key] > self._wanted_count[key] else "order"
        if nothing_lost:
            return "order"
        payload, others = self._names[0], self._names[1:]
        if self._bits[payload][p].tobytes() in self._rows.known:
            own = others and all((self._bits[n][p] == self._want[n][i]).all() for n in others)
            return "token_lost" if own else "token_duplicated"
        alike = (self._bits[payload][p] == self._want[payload][i]).mean()
        return "numeric" if alike >= _ALIKE else "token_lost"

    def _pair(self, positions: list[int], rows: list[int]) -> list[tuple[int, int]]:
        """Each position with the wanted row it most likely stands for: same payload first, then most alike."""
        payload = self._names[0]
        open_rows, pairs, rest = list(rows), [], []
        by_payload: dict[bytes, list[int]] = {}
        for i in rows:
            by_payload.setdefault(self._want[payload][i].tobytes(), []).append(i)
        for p in positions:
            same = by_payload.get(self._bits[payload][p].tobytes())
            if same:
                i = max(same, key=lambda i: self._alike(p, i))
                same.remove(i)
                open_rows.remove(i)
                pairs.append((p, i))
            else:
                rest.append(p)
        for p in rest:
            i = open_rows[0] if len(rest) > _MANY else max(open_rows, key=lambda i: self._alike(p, i))
            open_rows.remove(i)
            pairs.append((p, i))
        return pairs

    def _alike(self, p: int, i: int) -> float:
        return sum(float((self._bits[n][p] == self._want[n][i]).mean()) for n in self._names if self._bits[n].shape[1])

    def _by_column(self, p: int) -> None:
        """The right payload, something else with it wrong."""
        for c in self._rows.columns[1:]:
            if not self.bad[c.name][p].any():
                continue
            if c.kind == PAYLOAD:
                self._reasons[c.name].add("order" if self._is_permuted(c.name) else "token_lost")
            elif c.kind == INDEX:
                value = self._bits[c.name][p].view(c.want.dtype)
                self._reasons[c.name].add("index_range" if ((value < -1) | (value >= c.limit)).any() else "numeric")
            else:
                self._reasons[c.name].add("numeric")

    def _is_permuted(self, name: str) -> bool:
        """Whether an output holds the wanted rows, each as often as wanted, in whatever places."""
        if name not in self._permuted:
            got = Counter(self._bits[name][p].tobytes() for p in self._got)
            self._permuted[name] = got == Counter(row.tobytes() for row in self._want[name])
        return self._permuted[name]


def _flat(codes: Any) -> Array:
    """Bits, one row a row."""
    bits = codec.bits(np.ascontiguousarray(codes))
    return bits.reshape(len(bits), math.prod(bits.shape[1:]))


def payloads(arrays: list[Array]) -> frozenset[bytes]:
    """Bytes of every row of some code arrays."""
    return frozenset(row.tobytes() for a in arrays for row in _flat(a))
