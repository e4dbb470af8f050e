"""How fast the suite's TileLang programs are: one feature each, not tuned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.declare import Cost
from conformance.model import Problem, Variant
from conformance.protocol import FORMATS
from conformance.speed import Speed, Workload

BENCH = "TileLang's own matrix product benchmark"
LARGE = "as many elements as a layer of DeepSeek-V3 has activations: 8192 tokens by 7168"
N = 1 << 16
LARGE_N = 8192 * 7168


def _item(p: Problem, key: str = "dtype") -> int:
    return FORMATS[p.variant[key]].itemsize_bytes


def streams(count: int, key_of_last: str = "dtype") -> Any:
    """Arrays of n elements read or written once; the last has a format of its own."""
    def counted(p: Problem, codes: Mapping[str, Any]) -> Cost:
        return Cost(p.n, p.n * ((count - 1) * _item(p) + _item(p, key_of_last)))

    return counted


def gemm(p: Problem, codes: Mapping[str, Any]) -> Cost:
    out = _item(p, "out") * (2 if p.variant.init == "c" else 1)
    return Cost(2 * p.m * p.n * p.k, (p.m + p.n) * p.k * _item(p) + p.m * p.n * out)


def reduce(p: Problem, codes: Mapping[str, Any]) -> Cost:
    return Cost(p.m * p.n, (p.m * p.n + (p.n if p.variant.dim == "0" else p.m)) * _item(p))


def copy(p: Problem, codes: Mapping[str, Any]) -> Cost:
    return Cost(0, (min(p.m, p.mo) * min(p.n, p.no) + p.mo * p.no) * _item(p))


def transpose(p: Problem, codes: Mapping[str, Any]) -> Cost:
    return Cost(0, 2 * p.m * p.n * _item(p))


def gather(p: Problem, codes: Mapping[str, Any]) -> Cost:
    """What an element is gathered from counts once, at most the whole array."""
    return Cost(0, codes["index"].nbytes + p.k * _item(p) + min(p.n, p.k) * _item(p))


def atomic_add(p: Problem, codes: Mapping[str, Any]) -> Cost:
    return Cost(p.k, codes["index"].nbytes + p.k * _item(p) + 2 * min(p.n, p.k) * _item(p))


def matrix(v: Variant) -> str:
    return {"e4m3": "fp8", "e5m2": "fp8", "fp32": "tf32"}.get(v.dtype, v.dtype)


def vector(v: Variant) -> str:
    return f"vector_{v.dtype}"


def _flat(*variants: Mapping[str, str]) -> tuple[Workload, ...]:
    return tuple(w for v in variants for w in (
        Workload(f"n{N}", dict(n=N), v), Workload(f"n{LARGE_N}", dict(n=LARGE_N), v, "model", source=LARGE)))


def _pair(small: Mapping[str, int], large: Mapping[str, int], variant: Mapping[str, str]) -> tuple[Workload, ...]:
    def name(sizes: Mapping[str, int]) -> str:
        return "_".join(f"{k}{n}" for k, n in sizes.items())

    return (Workload(name(small), small, variant), Workload(name(large), large, variant, "model", source=LARGE))


FP16 = dict(dtype="fp16", out="fp32", transpose_a="no", transpose_b="yes", init="clear")
SPEEDS = (
    Speed("tilelang.gemm", gemm, matrix,
          (Workload("m128_n128_k256", dict(m=128, n=128, k=256), {**FP16, "dtype": "fp32"}),
           Workload("m8192_n8192_k16384", dict(m=8192, n=8192, k=16384), FP16, "model", source=BENCH)),
          rows=("m", ("a", "c"))),
    Speed("tilelang.elementwise", streams(2), vector, _flat(dict(function="exp", dtype="fp32"))),
    Speed("tilelang.arithmetic", streams(3), vector, _flat(dict(function="add", data="plain", dtype="fp32"))),
    Speed("tilelang.clamp", streams(2), vector, _flat(dict(dtype="fp32"))),
    Speed("tilelang.cast", streams(2, "out"), vector, _flat(dict(dtype="fp32", out="fp16", data="plain"))),
    Speed("tilelang.reduce", reduce, vector,
          _pair(dict(m=256, n=256), dict(m=8192, n=7168),
                dict(kind="sum", data="plain", dtype="fp32", dim="1", clear="yes"))),
    Speed("tilelang.copy", copy, lambda v: None,
          _pair(dict(m=256, n=256, mo=256, no=256), dict(m=8192, n=7168, mo=8192, no=7168),
                dict(dtype="fp32", fill="none"))),
    Speed("tilelang.transpose", transpose, lambda v: None,
          _pair(dict(m=256, n=256), dict(m=8192, n=7168), dict(dtype="fp32"))),
    Speed("tilelang.gather", gather, lambda v: None,
          _pair(dict(n=N, k=N), dict(n=LARGE_N, k=LARGE_N), dict(dtype="fp32", index="int32"))),
    Speed("tilelang.atomic_add", atomic_add, vector,
          _pair(dict(n=N, k=N), dict(n=LARGE_N, k=LARGE_N), dict(dtype="fp32", index="int32"))),
)
