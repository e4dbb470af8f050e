"""Expert-parallel dispatch: each token once to every rank that owns an expert of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cases.deepep import routing, steps
from cases.deepep.steps import REFUSED
from conformance.declare import Cost, Op, When, choices, misuse
from conformance.engine.arrays import Draw
from conformance.model import Problem, Variant
from references.deepep import ep
from references.expected import Expected, Inputs


def legal(v: Variant) -> bool:
    """The plain payload with every layout and order; scales with every layout; deferral with the plainest of both."""
    if not steps.is_layout(v) or (v.x, v.sf_order) in (("bf16", "column"), ("fp8_packed", "row")):
        return False
    if v.epilogue == "deferred":
        return v.x != "fp8" and v.weights == "yes" and (v.sync, v.deterministic) == ("yes", "no")
    return v.x == "bf16" or (v.weights == "yes" and v.deterministic == "no")


def row_bytes(p: Problem) -> int:
    return 2 * p.h if p.variant.x == "bf16" else p.h + 4 * steps.packs(p)


def cost(p: Problem) -> Cost:
    return Cost(flops=0, bytes=row_bytes(p) * routing.capacity(p) * (2 if p.variant.cached == "yes" else 1))


def oracle(p: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> Mapping[Any, Expected]:
    return ep.dispatch(routing.settled(p, handle="yes"), inputs, profile)


def one_expert(d: Draw) -> np.ndarray:
    """The same expert in every lane."""
    return np.zeros(d.shape, np.int64)


CACHED, SCALED = {"cached": "yes", "x": "bf16"}, {"x": "fp8", "cached": "no"}
FIRST = {"cached": "no", "x": "bf16", "epilogue": "inline"}

DISPATCH = Op(
    "deepep.EPBuffer.dispatch",
    doc="rows of x to the ranks that own their experts, by source (normal) or by expert (expanded); its counts",
    variants=dict(x=steps.PAYLOADS, layout=("normal", "expanded"), zero_padding=("no", "yes"),
                  sf_order=("row", "column"), weights=("yes", "no"), sync=("yes", "no"), deterministic=("no", "yes"),
                  cached=("no", "yes"), epilogue=("inline", "deferred")),
    where=legal,
    ranks=routing.RANKS,
    sizes=dict(**routing.SIZES, h=choices(32, 64, 256, 512, 2880, 7168), sf_group=choices(128, 32, 512, 96)),
    fits=routing.fits,
    idle=lambda v: ("sf_group",) if v.x == "bf16" else (),
    steps=(steps.make(use_fp8_dispatch=lambda v: v.x != "bf16"),
           *(s for x in steps.PAYLOADS for s in steps.dispatch(x, When(x=x))),
           steps.read_handle("handle"),
           *(s for x in steps.PAYLOADS for s in steps.cached(x, When(x=x, cached="yes"))),
           steps.read_handle("handle_again", When(cached="yes"))),
    families=("normal", "all_bits", "nans", "ill_scaled", "infinities", "subnormal"),
    oracle=oracle,
    derived=lambda p, inputs: {**routing.derived(p, inputs), "packs": steps.packs(p)},
    repeatable=False,
    cost=cost,
    sample=dict(t=[5, 3, 4, 2], k=3, spare_experts=3, spare_tokens=1, h=64, sf_group=32),
    rejects=(
        misuse("more tokens than declared", variant=FIRST, raises=REFUSED,
               **{"dispatch/num_max_tokens_per_rank": lambda p, rank: max(p.t) - 1}),
        misuse("ranks declare different maxima", variant=FIRST, kind="trap",
               **{"dispatch/num_max_tokens_per_rank": lambda p, rank: max(p.t) + rank}),
        misuse("neither ids nor a handle", variant=FIRST, **{"dispatch/topk_idx": None}),
        misuse("ids in int16", variant=FIRST, raises=REFUSED, **{"dispatch/topk_idx": {"dtype": "int16"}}),
        misuse("ids of one axis", variant=FIRST, **{"dispatch/topk_idx": {"shape": "t"}}),
        misuse("ids one token short", variant=FIRST, raises=REFUSED, **{"dispatch/topk_idx": {"shape": "t-1 k"}}),
        misuse("ids in padded rows", variant=FIRST, raises=REFUSED, **{"dispatch/topk_idx": {"row_bytes_extra": 8}}),
        misuse("33 lanes", variant=FIRST, **{"dispatch/topk_idx": {"shape": "t 33"},
                                            "dispatch/topk_weights": {"shape": "t 33"}}),
        misuse("an expert twice in a row", variant=FIRST, kind="trap", **{"dispatch/topk_idx": {"fill": one_expert}}),
        misuse("experts that do not divide among the ranks", variant=FIRST, raises=REFUSED,
               **{"dispatch/num_experts": 2 * routing.RANKS + 1}),
        misuse("no experts", variant=FIRST, **{"dispatch/num_experts": 0}),
        misuse("2052 experts", variant=FIRST, raises=REFUSED, **{"dispatch/num_experts": 2052}),
        misuse("x in padded rows", variant=FIRST, raises=REFUSED, **{"dispatch/x": {"row_bytes_extra": 32}}),
        misuse("x of one axis", variant=FIRST, **{"dispatch/x": {"shape": "h"}}),
        misuse("rows of 40 bytes", variant=FIRST, raises=REFUSED, **{"dispatch/x": {"shape": "t 20"}}),
        misuse("weights in BF16", variant=FIRST, raises=REFUSED, **{"dispatch/topk_weights": {"dtype": "bf16"}}),
        misuse("weights of one lane less", variant=FIRST, raises=REFUSED,
               **{"dispatch/topk_weights": {"shape": "t k-1"}}),
        misuse("scales in BF16", variant=SCALED, raises=REFUSED, **{"dispatch/sf": {"dtype": "bf16"}}),
        misuse("scales one row short", variant=SCALED, raises=REFUSED, **{"dispatch/sf": {"shape": "t-1 packs"}}),
        misuse("zero padding of the normal layout", variant={**FIRST, "layout": "normal"}, raises=REFUSED,
               **{"dispatch/do_zero_padding": True}),
        misuse("a copy of the handle asked for", variant=FIRST, raises=REFUSED, **{"dispatch/do_handle_copy": True}),
        misuse("a deferred epilogue of a synchronous call", variant=FIRST, raises=REFUSED,
               **{"dispatch/defer_epilogue": True}),
        misuse("ids beside a handle", variant=CACHED, raises=REFUSED,
               **{"cached/topk_idx": {"dtype": "int64", "shape": "t k"}}),
        misuse("statistics beside a handle", variant=CACHED, raises=REFUSED,
               **{"cached/cumulative_local_expert_recv_stats": {"dtype": "int32", "shape": "local_experts"}}),
        misuse("a cached call that waits for counts", variant=CACHED, raises=REFUSED, **{"cached/do_cpu_sync": True}),
        misuse("other experts than the handle has", variant=CACHED, raises=REFUSED,
               **{"cached/num_experts": lambda p, rank: 2 * routing.num_experts(p)}),
        misuse("another alignment than the handle has", variant=CACHED, raises=REFUSED,
               **{"cached/expert_alignment": 2}),
        misuse("another maximum than the handle has", variant=CACHED, raises=REFUSED,
               **{"cached/num_max_tokens_per_rank": 64}),
        misuse("a call that the buffer is too small for", variant=FIRST, raises=REFUSED,
               **{"dispatch/num_max_tokens_per_rank": 2**20}),
        misuse("a buffer of no bytes", variant=FIRST, raises=REFUSED, **{"make/num_bytes": 0}),
        misuse("a buffer of 1 MiB", variant=FIRST, raises=REFUSED, **{"make/num_bytes": 2**20}),
    ),
)

OPS = (DISPATCH,)
