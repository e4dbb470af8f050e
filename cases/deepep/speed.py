"""How fast DeepEP's exchanges are, by what a rank receives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cases.deepep import dispatch as dispatching
from cases.deepep import pipe, routing
from conformance.declare import Cost
from conformance.model import Problem
from conformance.speed import Speed, Workload

V3 = "DeepSeek-V3, as DeepEP's own benchmark has it: 4096 tokens a rank, hidden 7168, top-8"
OWN_RULE = "logical bandwidth: all that a rank receives, rows of its own too, over the time; the slowest rank's"
IDS_AND_WEIGHTS = 12
"""bytes of an id and a weight, as they are given back"""


def _rows(p: Problem) -> float:
    """Rows that the rank receives that receives most."""
    return max(routing.rows_of(p, rank) for rank in range(routing.RANKS))


def dispatch_own(p: Problem, codes: Mapping[str, Any]) -> Cost:
    lanes = IDS_AND_WEIGHTS * p.k if p.variant.layout == "normal" else 4
    return Cost(0, _rows(p) * (dispatching.row_bytes(p) + lanes))


def dispatch_cost(p: Problem, codes: Mapping[str, Any]) -> Cost:
    """Each row is read where it comes from and written where it goes to."""
    return Cost(0, 2 * dispatch_own(p, codes).bytes)


def combine_own(p: Problem, codes: Mapping[str, Any]) -> Cost:
    return Cost(0, _rows(p) * 2 * p.h)


def combine_cost(p: Problem, codes: Mapping[str, Any]) -> Cost:
    """Each row is read once, each sum written once; one addition an element of a row."""
    return Cost(_rows(p) * p.h, _rows(p) * 2 * p.h + max(p.t) * 2 * p.h)


def recv_own(p: Problem, codes: Mapping[str, Any]) -> Cost:
    calls = 2 if p.variant.tensors == "two" else 1
    return Cost(0, calls * pipe.UNIT_BYTES * max(p.units))


def recv_cost(p: Problem, codes: Mapping[str, Any]) -> Cost:
    return Cost(0, 2 * recv_own(p, codes).bytes)


def _experts(t: int, k: int, h: int, spare: int, **more: int) -> dict[str, Any]:
    return dict(t=[t] * routing.RANKS, k=k, spare_experts=spare, spare_tokens=0, h=h, **more)


DISPATCH = dict(x="bf16", layout="normal", zero_padding="no", sf_order="row", weights="yes", sync="yes",
                deterministic="no", cached="no", epilogue="inline")
COMBINE = dict(layout="normal", rows="returned", bias="none", weights="no", reduction="multiple", sync="yes",
               deterministic="no", epilogue="inline")

SPEEDS = (
    Speed("deepep.EPBuffer.dispatch", dispatch_cost, lambda v: None,
          (Workload("t64_h512_k3", _experts(64, 3, 512, 3, sf_group=128), DISPATCH),
           Workload("t4096_h7168_k8", _experts(4096, 8, 7168, 62, sf_group=128), DISPATCH, "model", source=V3),
           Workload("t4096_h7168_k8_fp8", _experts(4096, 8, 7168, 62, sf_group=128), {**DISPATCH, "x": "fp8"}, "model",
                    source=V3)),
          own=dispatch_own, own_rule=OWN_RULE, timed=("dispatch",)),
    Speed("deepep.EPBuffer.combine", combine_cost, lambda v: "vector_fp32",
          (Workload("t64_h512_k3", _experts(64, 3, 512, 3), COMBINE),
           Workload("t4096_h7168_k8", _experts(4096, 8, 7168, 62), COMBINE, "model", source=V3)),
          own=combine_own, own_rule=OWN_RULE, timed=("combine",)),
    Speed("deepep.PPBuffer.recv", recv_cost, lambda v: None,
          (Workload("n32768", dict(units=[1024] * routing.RANKS), dict(x="bf16", to="next", tensors="one")),
           Workload("n58720256", dict(units=[4096 * 7168 * 2 // pipe.UNIT_BYTES] * routing.RANKS),
                    dict(x="bf16", to="next", tensors="one"), "model", source="DeepSeek-V3, 4096 tokens of a stage")),
          own=recv_own, own_rule=OWN_RULE, timed=("send", "recv")),
)
