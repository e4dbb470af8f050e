"""Expert-parallel combine: a token's rows come home and are summed there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cases.deepep import routing, steps
from cases.deepep.steps import REFUSED, WEIGHTS
from conformance.declare import ALWAYS, Cost, In, Op, Returned, Token, Tup, When, choices, misuse
from conformance.engine.arrays import encode
from conformance.model import Problem, Variant
from references.deepep import ep
from references.expected import Expected, Inputs
from references.formats import codec

GIVEN, BACK = When(rows="given"), When(rows="returned")
"""rows handed in are an array of their own (as experts would make it), or just what dispatch returned"""

BF16_NAN = 0x7FC0


def legal(v: Variant) -> bool:
    """Rows of an own array need an order that is known; one reduction goes with the expanded layout and no weights."""
    if (v.rows == "given") != (v.deterministic == "yes"):
        return False
    if v.reduction == "single" and (v.layout, v.weights) != ("expanded", "no"):
        return False
    return v.epilogue == "inline" or (v.rows, v.sync, v.bias) == ("returned", "yes", "one")


def rows_by_h(p: Problem, rank: int) -> tuple[int, int]:
    return routing.rows_of(p, rank), p.h


def weight_of_rows(p: Problem, rank: int) -> tuple[int, ...]:
    rows = routing.rows_of(p, rank)
    return (rows, p.k) if p.variant.layout == "normal" else (rows,)


def arrange(p: Problem, codes: dict[str, np.ndarray]) -> None:
    """Rows that belong to no token hold NaN; with `cancellation` the bias takes away what the rows add up to."""
    for rank in range(routing.RANKS):
        handed_in = f"combine/x@{rank}"
        if handed_in in codes:
            codes[handed_in][~belongs(p, codes, rank)] = BF16_NAN
        for name in ("bias", "bias_0"):
            key = f"combine/{name}@{rank}"
            if p.family == "cancellation" and key in codes and handed_in not in codes:
                ids = codes[f"dispatch/topk_idx@{rank}"]
                total = codec.decode(codes[f"dispatch/x@{rank}"], "bf16") * times(p, ids)[:, None]
                codes[key] = encode(-total, "bf16")


def times(p: Problem, ids: np.ndarray) -> np.ndarray:
    """How often a token's row comes home: once a rank (normal), or once a lane."""
    if p.variant.layout == "expanded":
        return (ids >= 0).sum(axis=1)
    owner = np.where(ids < 0, -1, ids // routing.local_experts(p))
    return sum((owner == rank).any(axis=1).astype(np.int64) for rank in range(routing.RANKS))


def belongs(p: Problem, codes: Mapping[str, np.ndarray], rank: int) -> np.ndarray:
    """bool [rows]: whether a row of this rank's result is a token's."""
    local, a = routing.local_experts(p), p.values["expert_alignment"]
    ids = [codes[f"dispatch/topk_idx@{r}"] for r in range(routing.RANKS)]
    mine = [np.where(i < 0, -1, i // local) == rank for i in ids]
    inside = np.zeros(len(codes[f"combine/x@{rank}"]), bool)
    if p.variant.layout == "normal":
        inside[: sum(int(m.any(axis=1).sum()) for m in mine)] = True
        return inside
    start = 0
    wanted = np.concatenate([i[m] - rank * local for i, m in zip(ids, mine, strict=True)])
    for count in np.bincount(wanted, minlength=local).tolist():
        inside[start : start + count] = True
        start += -(-count // a) * a
    return inside


def oracle(p: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> Mapping[Any, Expected]:
    """The dispatch before it is judged too: where that is wrong, nothing can be said of combine."""
    settled = routing.settled(p)
    return {**ep.dispatch(settled, inputs, profile), **ep.combine(settled, inputs, profile)}


def cost(p: Problem) -> Cost:
    return Cost(flops=p.h * routing.capacity(p), bytes=4 * p.h * routing.capacity(p))


ARGS = (
    Token("buffer", of="buffer"),
    Token("x", of="recv_x", when=BACK),
    In("x", "bf16", rows_by_h, when=GIVEN, forms=("offset",)),
    Token("handle", of="handle"),
    Token("topk_weights", of="recv_topk_weights", when=steps.both(WEIGHTS, BACK)),
    In("topk_weights", "fp32", weight_of_rows, when=steps.both(WEIGHTS, GIVEN), forms=("offset",)),
    In("bias", "bf16", "t h", when=When(bias="one"), forms=("offset",)),
    Tup("bias", (In("bias_0", "bf16", "t h", forms=("offset",)), In("bias_1", "bf16", "t h", forms=("offset",))),
        when=When(bias="two")),
)
RESULTS = (Returned("combined_x", "bf16", "t h"), Returned("combined_topk_weights", "fp32", "t k", when=WEIGHTS))


PLAIN = {"rows": "returned", "epilogue": "inline", "sync": "yes"}
OWN = {"rows": "given", "sync": "yes"}

COMBINE = Op(
    "deepep.EPBuffer.combine",
    doc="the unweighted sum of each token's rows and its biases, rounded once; router weights carried home",
    variants=dict(layout=("normal", "expanded"), rows=("returned", "given"), bias=("none", "one", "two"),
                  weights=("yes", "no"), reduction=("multiple", "single"), sync=("yes", "no"),
                  deterministic=("no", "yes"), epilogue=("inline", "deferred")),
    where=legal,
    ranks=routing.RANKS,
    sizes=dict(**routing.SIZES, h=choices(256, 512, 2816, 7168)),
    fits=routing.fits,
    steps=(steps.make(allow_multiple_reduction=lambda v: v.reduction == "multiple"), *steps.dispatch("bf16"),
           *steps.call("combine", "deepep.EPBuffer.combine", ARGS, RESULTS, ALWAYS)),
    families=("normal", "integers", "positive", "ill_scaled", "cancellation", "powers", "zeros", "subnormal",
              "infinities", "nans"),
    oracle=oracle,
    arrange=arrange,
    derived=routing.derived,
    repeatable=When(deterministic="yes", layout="normal", sync="yes"),
    cost=cost,
    sample=dict(t=[5, 3, 4, 2], k=3, spare_experts=3, spare_tokens=1, h=256),
    rejects=(
        misuse("32 columns", variant=OWN, **{"combine/x": {"shape": "rows 32"}}),
        misuse("x in FP16", variant=OWN, raises=REFUSED, **{"combine/x": {"dtype": "fp16"}}),
        misuse("x in FP32", variant=OWN, raises=REFUSED, **{"combine/x": {"dtype": "fp32"}}),
        misuse("x of one axis", variant=OWN, **{"combine/x": {"shape": "h"}}),
        misuse("x in padded rows", variant=OWN, raises=REFUSED, **{"combine/x": {"row_bytes_extra": 512}}),
        misuse("x one row short", variant=OWN, raises=REFUSED, **{"combine/x": {"shape": "rows-1 h"}}),
        misuse("weights in BF16", variant={**OWN, "weights": "yes"}, raises=REFUSED,
               **{"combine/topk_weights": {"dtype": "bf16"}}),
        misuse("weights of one lane less", variant={**OWN, "layout": "normal", "weights": "yes"}, raises=REFUSED,
               **{"combine/topk_weights": {"shape": "rows k-1"}}),
        misuse("bias in FP32", variant={**PLAIN, "bias": "one"}, raises=REFUSED, **{"combine/bias": {"dtype": "fp32"}}),
        misuse("bias one token short", variant={**PLAIN, "bias": "one"}, raises=REFUSED,
               **{"combine/bias": {"shape": "t-1 h"}}),
        misuse("bias of other columns", variant={**PLAIN, "bias": "one"}, raises=REFUSED,
               **{"combine/bias": {"shape": "t h+256"}}),
        misuse("weights of expanded rows without multiple reduction", kind="trap",
               variant={"layout": "expanded", "reduction": "single", "rows": "given"},
               **{"combine/topk_weights": {"dtype": "fp32", "shape": "rows"}}),
        misuse("a deferred epilogue of a synchronous call", variant=PLAIN, raises=REFUSED,
               **{"combine/defer_epilogue": True}),
        misuse("an event to wait for without the communication stream", variant=PLAIN, raises=REFUSED,
               **{"combine/previous_event": True}),
    ),
)

OPS = (COMBINE,)
