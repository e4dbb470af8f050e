"""Which token goes where: the routing of all ranks, from their lists of expert ids alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from references.expected import Array


def align(n: Array | int, a: int) -> Array | int:
    return -(-n // a) * a


@dataclass(frozen=True)
class Received:
    """What one rank receives. Canonical order: ascending (source, token), lanes ascending inside an expert.

    source, token: [N]. local: [N, K] id among the rank's own experts, or -1.
    per_source: [R] rows from every rank; per_expert: [L] (row, lane) pairs of every expert.
    pair_row, pair_lane: [sum of per_expert], expert after expert.
    """

    source: Array
    token: Array
    local: Array
    per_source: Array
    per_expert: Array
    pair_row: Array
    pair_lane: Array

    def starts(self, a: int) -> Array:
        """First row of each expert in the expanded layout, with alignment a."""
        aligned = align(self.per_expert, a)
        return np.cumsum(aligned) - aligned

    def slots(self, a: int) -> Array:
        """[N, K] canonical row of each pair in the expanded layout, or -1."""
        slots = np.full(self.local.shape, -1, np.int64)
        before = np.cumsum(self.per_expert) - self.per_expert
        expert = np.repeat(np.arange(len(self.per_expert)), self.per_expert)
        slots[self.pair_row, self.pair_lane] = (self.starts(a) - before)[expert] + np.arange(len(expert))
        return slots


@dataclass(frozen=True)
class Routing:
    """ids: of every rank int64 [T, K], negative where nothing is selected; experts: of all ranks together.

    Expert e lives on rank e // (experts / ranks). A token goes to a rank once, however many
    of its experts live there.
    """

    ids: tuple[Array, ...]
    experts: int

    @property
    def ranks(self) -> int:
        return len(self.ids)

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    @cached_property
    def received(self) -> tuple[Received, ...]:
        return tuple(self._receive(rank) for rank in range(self.ranks))

    def owner(self, rank: int) -> Array:
        """[T, K] rank that owns each lane's expert of a source rank, -1 where none is selected."""
        return np.where(self.ids[rank] < 0, -1, self.ids[rank] // self.local_experts)

    def _receive(self, rank: int) -> Received:
        tokens = [np.nonzero((self.owner(s) == rank).any(axis=1))[0] for s in range(self.ranks)]
        local = np.concatenate([
            np.where(self.owner(s)[t] == rank, self.ids[s][t] - rank * self.local_experts, -1)
            for s, t in enumerate(tokens)
        ])  # fmt: skip
        row, lane = np.nonzero(local >= 0)
        expert = local[row, lane]
        by_expert = np.argsort(expert, kind="stable")
        counts = np.array([len(t) for t in tokens])
        return Received(
            np.repeat(np.arange(self.ranks), counts), np.concatenate(tokens), local, counts,
            np.bincount(expert, minlength=self.local_experts), row[by_expert], lane[by_expert],
        )  # fmt: skip
