"""How fast FlashMLA's sparse attention is: on lists that are full of rows at random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cases.flashmla import data, prefill
from conformance.declare import Cost
from conformance.engine.arrays import words
from conformance.model import Problem
from conformance.speed import Speed, Workload

README = "FlashMLA's own benchmark"
OWN_RULE = "2 h (d_qk + d_v) for each entry of each list, valid or not; bytes of queries, results, and valid entries"


def full_lists(problem: Problem, codes: Mapping[str, Any]) -> None:
    """Every entry names a row, each as likely as another: no list is short, none is mostly to be skipped."""
    for name, rows in (("indices", _rows(problem)), ("extra_indices_in_kvcache", _extra_rows(problem))):
        for key in (name, f"decode/{name}"):
            if key in codes:
                r = words(problem.seed, codes[key].size) >> np.uint64(33)
                codes[key][...] = (r % np.uint64(rows)).astype(np.int32).reshape(codes[key].shape)


def _rows(p: Problem) -> int:
    return p.s_kv if "s_kv" in p.sizes else p.pages * p.page


def _extra_rows(p: Problem) -> int:
    return p.extra_pages * p.extra_page if "extra_pages" in p.sizes else 1


def _distinct(codes: Mapping[str, Any], key: str) -> int:
    return len(np.unique(codes[key][codes[key] >= 0])) if key in codes else 0


def _operations(p: Problem, codes: Mapping[str, Any]) -> float:
    entries = sum(codes[k].size for k in codes if k.endswith(("indices", "indices_in_kvcache")))
    return 4 * data.HEAD_DIM * prefill.heads(p) * entries


def prefill_cost(p: Problem, codes: Mapping[str, Any]) -> Cost:
    """Rows of kv count once, however many lists name them."""
    tokens = p.s_q * prefill.heads(p)
    moved = 4 * data.HEAD_DIM * tokens + 8 * tokens + codes["indices"].nbytes
    return Cost(_operations(p, codes), moved + 2 * data.HEAD_DIM * _distinct(codes, "indices"))


def prefill_own(p: Problem, codes: Mapping[str, Any]) -> Cost:
    valid = int(((codes["indices"] >= 0) & (codes["indices"] < p.s_kv)).sum())
    return Cost(_operations(p, codes), 2 * data.HEAD_DIM * valid + 4 * p.s_q * prefill.heads(p) * data.HEAD_DIM)


def decode_cost(p: Problem, codes: Mapping[str, Any]) -> Cost:
    tokens = p.b * p.s_q * prefill.heads(p)
    lists = sum(codes[k].nbytes for k in codes if k.endswith(("indices", "indices_in_kvcache")))
    return Cost(_operations(p, codes), 4 * data.HEAD_DIM * tokens + 4 * tokens + lists + _cached(p, codes))


def decode_own(p: Problem, codes: Mapping[str, Any]) -> Cost:
    tokens = p.b * p.s_q * prefill.heads(p)
    return Cost(_operations(p, codes), 4 * data.HEAD_DIM * tokens + _cached(p, codes))


def _cached(p: Problem, codes: Mapping[str, Any]) -> int:
    extra = data.FP4_BYTES if p.variant.extra == "fp4" else data.FP8_BYTES
    return (_distinct(codes, "decode/indices") * data.FP8_BYTES
            + _distinct(codes, "decode/extra_indices_in_kvcache") * extra)


def _prefill(h: int, s: int, kv: int, topk: int, source: str = "") -> Workload:
    return Workload(f"h{h}_s{s}_kv{kv}_topk{topk}", dict(s_q=s, s_kv=kv, entries=topk),
                    dict(h_q=str(h), attn_sink="yes" if source else "no", topk_length="no"),
                    "model" if source else "small", source=source)


def _decode(h: int, b: int, s: int, extra: str, pages: tuple[int, int], source: str = "") -> Workload:
    sizes = dict(b=b, s_q=s, topk=128, pages=pages[0], page=256 if source else 64, extra=512, extra_pages=pages[1],
                 extra_page=64)
    variant = dict(h_q=str(h), cache="e4m3", extra=extra, attn_sink="no", topk_length="no", split="auto", calls="one")
    name = f"h{h}_b{b}_s{s}_topk128" + {"none": "", "fp8": "_extra512", "fp4": "_extra512_fp4"}[extra]
    return Workload(name, sizes, variant, "model" if source else "small", source=source)


SPEEDS = (
    Speed("flashmla.flash_mla_sparse_fwd", prefill_cost, lambda v: "bf16",
          (_prefill(64, 4, 512, 128), _prefill(128, 4096, 32768, 640, README), _prefill(64, 4096, 8192, 640, README)),
          own=prefill_own, own_rule=OWN_RULE, rows=("s_q", ("q", "indices", "out", "max_logits", "lse")),
          rolled=("q", "kv"), settle=full_lists),
    Speed("flashmla.flash_mla_with_kvcache", decode_cost, lambda v: "bf16",
          (_decode(64, 2, 1, "none", (8, 4)), _decode(64, 2, 1, "fp4", (8, 4)),
           _decode(128, 128, 4, "fp8", (128, 4096), README), _decode(128, 128, 4, "fp4", (128, 4096), README),
           _decode(64, 256, 4, "fp8", (256, 8192), README)),
          own=decode_own, own_rule=OWN_RULE, timed=("decode",), rolled=("q", "k_cache", "extra_k_cache"),
          settle=full_lists),
)

