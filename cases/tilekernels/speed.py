"""How fast TileKernels' ops are. All are bound by memory: each byte counts once, read or written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cases.tilekernels import norm
from cases.tilekernels.engram import BLOCK
from cases.tilekernels.quant import groups
from conformance.declare import Cost
from conformance.model import Problem
from conformance.protocol import FORMATS
from conformance.speed import Speed, Workload

V3, V41 = "DeepSeek-V3, 8192 tokens", "DeepSeek-V4.1-Flash, 8192 tokens"


def _given(codes: Mapping[str, Any]) -> int:
    return sum(a.nbytes for a in codes.values())


def cast(p: Problem, codes: Mapping[str, Any]) -> Cost:
    out = 0.5 if p.variant.get("fmt") == "e2m1" else 1
    scales = groups(p)[0] * groups(p)[1]
    return Cost(2 * p.t * p.h, _given(codes) + out * p.t * p.h + 4 * scales)


def norm_forward(p: Problem, codes: Mapping[str, Any]) -> Cost:
    rows, item = norm.tokens(p), FORMATS[p.variant.x].itemsize_bytes
    residual = rows * p.h * item if p.variant.residual == "yes" else 0
    rstd = 4 * rows if p.variant.with_rstd == "yes" else 0
    return Cost(5 * rows * p.h, _given(codes) + rows * p.h * item + residual + rstd)


def rotary(p: Problem, codes: Mapping[str, Any]) -> Cost:
    key = p.kv_heads if p.variant.key == "yes" else 0
    batch = p.b if p.variant.batch == "yes" else 1
    n = batch * p.s * (p.heads + key) * p.d
    table = min(batch * p.s, p.table_rows) * p.d * 4
    return Cost(3 * n, 2 * n * FORMATS[p.variant.x].itemsize_bytes + table)


def gate(p: Problem, codes: Mapping[str, Any]) -> Cost:
    return Cost(0, 4 * p.t * p.experts + 8 * p.t * p.num_topk)


def momentum(p: Problem, codes: Mapping[str, Any]) -> Cost:
    n = BLOCK * p.blocks
    moved = FORMATS[p.variant.grad].itemsize_bytes + 2 * FORMATS[p.variant.momentum].itemsize_bytes + 4
    return Cost((6 if p.variant.nesterov == "yes" else 3) * n, moved * n)


def sinkhorn(p: Problem, codes: Mapping[str, Any]) -> Cost:
    """Both calls; how many partial sums stand between them is the callee's affair and not counted."""
    return Cost(8 * p.r * p.d, 4 * (p.r * p.d + 3 * p.r + 2 * p.d))


PLAIN_CAST = dict(x="bf16", out="callee")
PLAIN_NORM = dict(x="bf16", batch="no", weight="yes", residual="yes", residual_out="callee", out="callee",
                  with_rstd="no")
PLAIN_ROPE = dict(x="bf16", batch="no", key="yes", positions="none", interleaved="no")
SPEEDS = (
    Speed("tilekernels.quant.per_token_cast", cast, lambda v: "vector_fp32",
          (Workload("t256_h2048", dict(t=256, h=2048), PLAIN_CAST),
           Workload("t8192_h7168", dict(t=8192, h=7168), PLAIN_CAST, "model", source=V3),
           Workload("t8192_h5120", dict(t=8192, h=5120), PLAIN_CAST, "model", source=V41))),
    Speed("tilekernels.quant.norm_forward", norm_forward, lambda v: "vector_fp32",
          (Workload("t256_h2048", dict(b=1, t=256, h=2048), PLAIN_NORM),
           Workload("t8192_h7168", dict(b=1, t=8192, h=7168), PLAIN_NORM, "model", source=V3),
           Workload("t8192_h5120", dict(b=1, t=8192, h=5120), PLAIN_NORM, "model", source=V41))),
    Speed("tilekernels.transform.apply_rotary", rotary, lambda v: "vector_fp32",
          (Workload("s128_heads32", dict(b=1, s=128, heads=32, kv_heads=1, d=64, table_rows=160), PLAIN_ROPE),
           Workload("s8192_heads128", dict(b=1, s=8192, heads=128, kv_heads=1, d=64, table_rows=8224), PLAIN_ROPE,
                    "model", source=V3))),
    Speed("tilekernels.moe.topk_gate", gate, lambda v: None,
          (Workload("t1024_e256", dict(t=1024, experts=256, num_topk=8)),
           Workload("t8192_e256", dict(t=8192, experts=256, num_topk=8), scale="model", source=V3),
           Workload("t8192_e384", dict(t=8192, experts=384, num_topk=6), scale="model", source=V41)),
          rows=("t", ("scores", "topk_idx"))),
    Speed("tilekernels.engram.engram_sinkhorn_momentum_update", momentum, lambda v: "vector_fp32",
          (Workload("n32768", dict(blocks=128), dict(grad="bf16", momentum="fp32", nesterov="yes")),
           Workload("n134217728", dict(blocks=524288), dict(grad="bf16", momentum="fp32", nesterov="yes"), "model",
                    source="DeepSeek-V4.1-Flash, a fraction of a table of its n-gram memory"))),
    Speed("tilekernels.engram.engram_sinkhorn_step", sinkhorn, lambda v: "vector_fp32",
          (Workload("r256_d1024", dict(r=256, d=1024)),
           Workload("r65536_d1024", dict(r=65536, d=1024), scale="model",
                    source="DeepSeek-V4.1-Flash, a fraction of a table of its n-gram memory")),
          timed=("step", "reduce")),
)

