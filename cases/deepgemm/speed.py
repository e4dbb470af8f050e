"""How fast DeepGEMM's ops are: what is timed and how it is counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cases.deepgemm import groups
from conformance.declare import Cost
from conformance.model import Problem
from conformance.protocol import FORMATS
from conformance.speed import Speed, Workload

TABLE = "Performance table of the DeepGEMM-Ascend README, and of upstream's for H800"
V3, V41 = "DeepSeek-V3, its output projection of attention", "DeepSeek-V4.1-Flash, an expert's first projection"


def _d_bytes(p: Problem) -> int:
    reads_c = p.variant.c != "none"
    return p.m * p.n * FORMATS[p.variant.out].itemsize_bytes * (2 if reads_c else 1)


def bf16(p: Problem, codes: Mapping[str, Any]) -> Cost:
    return Cost(2 * p.m * p.n * p.k, 2 * (p.m + p.n) * p.k + _d_bytes(p))


def fp8(p: Problem, codes: Mapping[str, Any]) -> Cost:
    scales = sum(codes[n].nbytes for n in ("a_scale", "b_scale") if n in codes)
    return Cost(2 * p.m * p.n * p.k, (p.m + p.n) * p.k + scales + _d_bytes(p))


def grouped(p: Problem, codes: Mapping[str, Any]) -> Cost:
    m = groups.rows(p)
    return Cost(2 * m * p.n * p.k, 2 * (m * p.k + p.groups * p.n * p.k + m * p.n) + codes["grouped_layout"].nbytes)


def cast(p: Problem, codes: Mapping[str, Any]) -> Cost:
    x = FORMATS[p.variant.x].itemsize_bytes
    blocks = -(-p.n // p.values["gran_k"])
    return Cost(4 * p.m * p.n, p.m * p.n * (x + 1) + p.m * blocks * (1 if p.variant.scale == "packed" else 4))


def _mnk(m: int, n: int, k: int, source: str = "", **variant: str) -> Workload:
    return Workload(f"m{m}_n{n}_k{k}", dict(m=m, n=n, k=k), variant, "model" if source else "small", source=source)


PLAIN = dict(out="bf16", c="none", a_major="k", b_major="k")

SPEEDS = (
    Speed("deepgemm.bf16_gemm_nt", bf16, lambda v: "bf16",
          (_mnk(128, 256, 512, **PLAIN), _mnk(16, 256, 1024, **PLAIN), _mnk(4096, 7168, 16384, TABLE, **PLAIN),
           _mnk(128, 7168, 16384, V3, **PLAIN), _mnk(4096, 4608, 5120, V41, **PLAIN)),
          rows=("m", ("a", "d"))),
    Speed("deepgemm.fp8_gemm_nt", fp8, lambda v: "fp8",
          (_mnk(128, 128, 512, **PLAIN, scales="fp32"), _mnk(4096, 7168, 16384, TABLE, **PLAIN, scales="fp32"),
           _mnk(128, 7168, 16384, V3, **PLAIN, scales="fp32")),
          rows=("m", ("a", "a_scale", "d"))),
    Speed("deepgemm.m_grouped_bf16_gemm_nt_contiguous", grouped, lambda v: "bf16",
          (Workload("g4_blocks2_n128_k256", dict(groups=4, blocks=2, n=128, k=256), dict(layout="labels", b_major="k")),
           Workload("g8_blocks32_n4608_k5120", dict(groups=8, blocks=32, n=4608, k=5120),
                    dict(layout="labels", b_major="k"), "model", source=V41))),
    Speed("deepgemm.per_token_cast_to_fp8", cast, lambda v: "vector_fp32",
          (Workload("m256_n1024", dict(m=256, n=1024), dict(x="bf16", scale="fp32")),
           Workload("m8192_n7168", dict(m=8192, n=7168), dict(x="bf16", scale="fp32"), "model",
                    source="DeepSeek-V3, 8192 tokens")),
          rows=("m", ("x", "data", "sf"))),
)
