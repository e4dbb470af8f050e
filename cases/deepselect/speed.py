"""How fast DeepSelect's top-k is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.declare import Cost
from conformance.model import Problem
from conformance.protocol import FORMATS
from conformance.speed import Speed, Workload

BENCH = "a cell of DeepSelect's own benchmark"


def counted(p: Problem, codes: Mapping[str, Any]) -> Cost:
    """Elements in front of a row's end once, and what is given back."""
    item, index = (FORMATS[p.variant[key]].itemsize_bytes for key in ("dtype", "index"))
    read = int(codes["end"].clip(max=p.vocab).sum()) if "end" in codes else p.b * p.vocab
    values = p.b * p.topk * item if p.variant["values"] == "yes" else 0
    return Cost(0, read * item + values + p.b * p.topk * index)


def _cell(b: int, topk: int, vocab: int, scale: str = "small", source: str = "", **variant: str) -> Workload:
    return Workload(f"b{b}_topk{topk}_n{vocab}", dict(b=b, topk=topk, vocab=vocab), variant, scale, source=source)


INDICES = dict(dtype="bf16", index="int32", order="any", values="no", end="no", offset="no", output_idx="callee")
SORTED = dict(dtype="fp32", index="int64", order="value", values="yes", end="no", offset="no", output_idx="callee")

SPEEDS = (
    Speed("deepselect.topk", counted, lambda v: None,
          (_cell(16, 512, 16384, **INDICES), _cell(4, 512, 32768, **SORTED),
           _cell(256, 512, 131072, "model", BENCH, **INDICES), _cell(4096, 512, 65536, "model", BENCH, **INDICES),
           _cell(768, 512, 129280, "model", BENCH, **SORTED)),
          own=counted,
          own_rule="elements read times their size (the sum of `end`, else all), values and indices given back",
          rows=("b", ("input", "end", "output_idx_offset", "output_idx", "values", "indices"))),
)
