"""Which token goes to which experts, and the sizes that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
ALL_LANES = 2**19
"""bytes that the results of all ranks may take together"""

SIZES = dict(
    t=edges(1, 2, 8, 16, hi=24, zero=True, per_rank=True),
    k=choices(1, 2, 3, 6, 8, 32),
    num_experts=choices(4, 8, 12, 16, 64, 256),
    spare_tokens=choices(0, 1, 7),
)
"""tokens of each rank, lanes, experts of all ranks together, and how far the declared maximum lies above the largest t"""


def most_tokens(p: Problem) -> int:
    """What the ranks declare as the most tokens of one of them."""
    return max(1, *p.t) + p.spare_tokens


def settled(p: Problem) -> Problem:
    """The problem with what follows from it, as the oracle reads it."""
    sizes = {**p.sizes, "num_max_tokens_per_rank": most_tokens(p)}
    return replace(p, sizes=sizes, variant=Variant({**dict(p.variant), "handle": "yes"}))


def derived(p: Problem, inputs: Inputs) -> Mapping[str, Any]:
    """Sizes that no draw gives: rows of each rank's result, the declared maximum, experts a rank."""
    return {"rows": ep.result_rows(settled(p), inputs), "num_max_tokens_per_rank": most_tokens(p),
            "local_experts": p.num_experts // RANKS, "ranks": RANKS}


def rows_of(p: Problem, rank: int) -> int:
    """Rows of a rank's result, from the problem alone."""
    ids = {f"dispatch/topk_idx@{r}": topk_idx(_draw_of_ids(p, r)) for r in range(RANKS)}
    return ep.result_rows(settled(p), Inputs(ids, dict.fromkeys(ids, "int64")))[rank]


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
    experts, local = np.arange(p.num_experts), p.num_experts // RANKS
    word = p.seed >> 8
    wanted = {
        "one_rank": experts // local == word % RANKS,
        "next_rank": experts // local == (d.rank + 1) % RANKS,
        "two_experts": (experts == word % p.num_experts) | (experts == (word + local) % p.num_experts),
    }.get(kind, np.ones(p.num_experts, bool))
    order = d.words(3, tokens * p.num_experts).reshape(tokens, p.num_experts) >> np.uint64(1)
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
    return p.k <= p.num_experts and 2 * p.h * capacity(p) <= ALL_LANES


def capacity(p: Problem) -> int:
    """Rows that the results of all ranks may have together, at most."""
    local, expanded = p.num_experts // RANKS, p.variant.layout == "expanded"
    tokens = sum(p.t) if p.variant.sync == "yes" else RANKS * most_tokens(p)
    if not expanded:
        return tokens * (min(p.k, RANKS) if p.variant.sync == "yes" else RANKS)
    lanes = p.k if p.variant.sync == "yes" else RANKS * min(p.k, local)
    return tokens * lanes + RANKS * local * (p.values.get("expert_alignment", 1) - 1)


def switch(argument: str, key: str) -> Value:
    """An argument that is True where the variant key says yes."""
    return Value(argument, lambda v: v.get(key) == "yes")
