"""Which token goes to which experts, and the sizes that follow from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from conformance.declare import Value, choices, edges
from conformance.engine.arrays import Draw, array_seed
from conformance.engine.layout import rank_sizes
from conformance.model import Problem, Variant
from references.deepep import ep
from references.expected import Inputs

RANKS = 4
KINDS = ("even", "next_rank", "even", "one_rank", "two_experts", "sparse")
"""who is wanted: all alike; experts of the rank behind the token's; of one rank only; two hot experts; few lanes"""
MASKED = (-1, -1, -1, -7)
"""what stands in a lane without an expert, by problem: any negative number"""
ALL_ROWS_BYTES = 3 * 2**18
"""what the results of all ranks may take together"""

SIZES = dict(
    t=edges(1, 2, 8, 16, hi=24, zero=True, per_rank=True),
    k=choices(1, 2, 3, 6, 8, 32),
    spare_experts=choices(0, 1, 2, 3, 15, 63),
    spare_tokens=choices(0, 1, 7),
)
"""tokens of each rank, lanes; experts that each rank has beyond one for each lane of all ranks together; and how far
the declared maximum lies above the largest t"""


def most_tokens(p: Problem) -> int:
    """What the ranks declare as the most tokens of one of them."""
    return max(1, *p.t) + p.spare_tokens


def local_experts(p: Problem) -> int:
    """Experts of a rank; together the ranks have at least one for each lane."""
    return -(-p.k // RANKS) + p.spare_experts


def num_experts(p: Problem) -> int:
    """Experts of all ranks together."""
    return RANKS * local_experts(p)


def settled(p: Problem, **keys: str) -> Problem:
    """The problem with what follows from it, as the oracle reads it, and with more variant keys."""
    sizes = {**p.sizes, "num_max_tokens_per_rank": most_tokens(p), "num_experts": num_experts(p)}
    return replace(p, sizes=sizes, variant=Variant({**dict(p.variant), **keys}))


def derived(p: Problem, inputs: Inputs) -> Mapping[str, Any]:
    """Sizes that no draw gives: rows of each rank's result, the declared maximum, experts."""
    return {"rows": ep.result_rows(settled(p), inputs), "num_max_tokens_per_rank": most_tokens(p),
            "num_experts": num_experts(p), "local_experts": local_experts(p), "ranks": RANKS}


def rows_of(p: Problem, rank: int) -> int:
    """Rows of a rank's result, from the problem alone."""
    return _rows(json.dumps(p.to_json()))[rank]


@lru_cache(maxsize=16)
def _rows(problem: str) -> tuple[int, ...]:
    p = Problem.from_json(json.loads(problem))
    ids = {f"dispatch/topk_idx@{r}": topk_idx(_draw_of_ids(p, r)) for r in range(RANKS)}
    return tuple(ep.result_rows(settled(p), Inputs(ids, dict.fromkeys(ids, "int64"))))


def _draw_of_ids(p: Problem, rank: int) -> Draw:
    sizes = rank_sizes(p, rank)
    seed = array_seed(p, f"dispatch/topk_idx@{rank}")
    return Draw("topk_idx", 0, (sizes["t"], p.k), "int64", p, seed, rank, sizes)


def kind_of(p: Problem) -> str:
    return KINDS[(p.seed >> 4) % len(KINDS)]


def topk_idx(d: Draw) -> np.ndarray:
    """int64 [t, k] ids, distinct in a row and in no order; a lane without one is negative.

    The kind of routing is the same on all ranks. Rows may have no expert at all.
    """
    p, kind = d.problem, kind_of(d.problem)
    tokens, lanes = d.shape
    experts, local = np.arange(num_experts(p)), local_experts(p)
    word = p.seed >> 8
    wanted = {
        "one_rank": experts // local == word % RANKS,
        "next_rank": experts // local == (d.rank + 1) % RANKS,
        "two_experts": (experts == word % len(experts)) | (experts == (word + local) % len(experts)),
    }.get(kind, np.ones(len(experts), bool))
    order = d.words(3, tokens * len(experts)).reshape(tokens, len(experts)) >> np.uint64(1)
    order = np.where(wanted, order, order | np.uint64(1 << 63))
    ids = np.argsort(order, axis=1, kind="stable")[:, :lanes].astype(np.int64)
    ids = np.take_along_axis(ids, np.argsort(d.words(5).reshape(ids.shape), axis=1, kind="stable"), axis=1)
    drop = d.integers(0, 7, salt=7) < {"sparse": 5, "two_experts": 0}.get(kind, 1)
    if kind == "one_rank":
        drop |= ~wanted[ids]
    return np.where(drop, MASKED[word % len(MASKED)], ids)


def counts_before(d: Draw) -> np.ndarray:
    """int32 statistics of calls before this one."""
    return d.integers(0, 10**6).astype(np.int32)


def fits(p: Problem) -> bool:
    return 2 * p.h * capacity(p) <= ALL_ROWS_BYTES


def capacity(p: Problem) -> int:
    """Rows that the results of all ranks may have together, at most."""
    local, expanded = local_experts(p), p.variant.layout == "expanded"
    tokens = sum(p.t) if p.variant.sync == "yes" else RANKS * most_tokens(p)
    if not expanded:
        return tokens * (min(p.k, RANKS) if p.variant.sync == "yes" else RANKS)
    lanes = p.k if p.variant.sync == "yes" else RANKS * min(p.k, local)
    blocks = local + (p.variant.sync == "no")
    return tokens * lanes + RANKS * blocks * (p.values.get("expert_alignment", 1) - 1)


def switch(argument: str, key: str) -> Value:
    """An argument that is True where the variant key says yes."""
    return Value(argument, lambda v: v.get(key) == "yes")
