"""FlashMLA's sparse decoding on paged quantised caches, and the metadata object that its calls share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cases.flashmla import data
from cases.flashmla.prefill import REFUSED, heads, smaller
from cases.promises import rows_alone
from conformance.declare import (
    ALWAYS,
    Cost,
    Drawn,
    From,
    In,
    Op,
    Relation,
    Returned,
    Step,
    Token,
    Value,
    When,
    choices,
    edges,
    misuse,
)
from conformance.model import Misuse, Problem, Variant
from references.flashmla import sparse
from references.formats import codec

ASSERTED = ("AssertionError",)
"""what the Python part of the module checks by itself"""

FAMILIES = ("normal", "integers", "positive", "ill_scaled", "cancellation", "one_hot", "powers", "zeros", "constant",
            "codes", "subnormal", "nans", "wide")


def extra_topk(p: Problem) -> int:
    """Length of the extra lists: whole blocks with 64 heads, any with 128; 0 without an extra cache."""
    if p.variant.extra == "none":
        return 0
    return -(-p.extra // data.BLOCK) * data.BLOCK if p.variant.h_q == "64" else p.extra


def _extra_bytes(p: Problem) -> int:
    return data.FP4_BYTES if p.variant.extra == "fp4" else data.FP8_BYTES


EXTRA, SINK, LENGTH = When(extra=("fp8", "fp4")), When(attn_sink="yes"), When(topk_length="yes")


FORMER = When(args="former")
"""arguments that earlier releases took; all are ignored"""


def _extra_length(v: Variant) -> bool:
    return EXTRA(v) and LENGTH(v)


def decode_step(name: str, *, first: str = "", when: Any = ALWAYS, plain: bool = False) -> Step:
    """One decode with the metadata object. first: the earlier step whose caches, lengths and sink it uses again.

    plain: one cache, no sink, and splits as the call likes.
    """
    def again(argument: str) -> str | None:
        return f"{first}/{argument}" if first else None

    options = (
        In("attn_sink", "fp32", lambda p: (heads(p),), when=SINK, data=data.sinks, alias=again("attn_sink")),
        In("extra_k_cache", From("cache"), lambda p: (p.extra_pages, p.extra_page, 1, _extra_bytes(p)), when=EXTRA,
           data=data.tokens, alias=again("extra_k_cache"), forms=("offset", "apart")),
        In("extra_indices_in_kvcache", "int32", lambda p: (p.b, p.s_q, extra_topk(p)), row_align=32, when=EXTRA,
           forms=("padded", "offset"), data=data.lists(lambda p: p.extra_pages * p.extra_page, data.minus_one)),
        In("extra_topk_length", "int32", "b", when=_extra_length, data=data.lengths(extra_topk),
           alias=again("extra_topk_length")),
        Value("enable_batch_invariant", lambda v: v.split == "never"),
    )
    return Step(
        name, "flashmla.flash_mla_with_kvcache",
        (In("q", "bf16", lambda p: (p.b, p.s_q, heads(p), data.HEAD_DIM), row_align=16, data=data.queries,
            forms=("padded", "offset")),
         In("k_cache", "e4m3" if plain else From("cache"), "pages page 1 528", data=data.tokens, alias=again("k_cache"),
            forms=("offset", "apart")),
         Value("block_table", None),
         Value("cache_seqlens", None),
         Value("head_dim_v", data.HEAD_DIM),
         Token("tile_scheduler_metadata", of="metadata"),
         Value("softmax_scale", Drawn((None, 0.5, data.HEAD_DIM**-0.55, 0.01))),
         In("indices", "int32", "b s_q topk", row_align=32, forms=("padded", "offset"),
            data=data.lists(lambda p: p.pages * p.page, data.minus_one)),
         In("topk_length", "int32", "b", when=LENGTH, data=data.lengths(lambda p: p.topk), alias=again("topk_length")),
         *(() if plain else options)),
        (Returned("out", "bf16", lambda p: (p.b, p.s_q, heads(p), data.HEAD_DIM), row_align=2 * data.HEAD_DIM),
         Returned("softmax_lse", "fp32", lambda p: (p.b, heads(p), p.s_q))),
        when,
    )


SLOTS = 384
"""of a cache, so that making it takes no longer than attending it"""

METADATA = (Returned("metadata", kind="token"), Returned("nothing", when=lambda v: False))
"""an object, and None where a second one used to be"""

SIZES = dict(
    b=choices(1, 2, 3, 4), s_q=choices(1, 2, 3, 4), topk=edges(64, 128, 640, step=64, hi=704),
    pages=edges(1, 2, 7, hi=24), page=edges(1, 2, 5, 53, 61, 64, hi=69), extra=edges(1, 64, 100, 512, 576),
    extra_pages=edges(1, 2, 7, hi=24), extra_page=edges(2, 5, 53, 64, hi=69, lo=1),
)


def _call_cost(p: Problem, extra: int = 0) -> Cost:
    """Of one decode without an extra cache; extra: further entries of each list."""
    tokens = p.b * p.s_q
    return Cost(flops=4 * data.HEAD_DIM * heads(p) * tokens * (p.topk + extra),
                bytes=4 * data.HEAD_DIM * heads(p) * tokens + min(p.pages * p.page, tokens * p.topk) * data.FP8_BYTES)


def _cost(p: Problem) -> Cost:
    calls, one = 1 if p.variant.calls == "one" else 2, _call_cost(p, extra_topk(p))
    extra = min(p.extra_pages * p.extra_page, p.b * p.s_q * extra_topk(p)) * _extra_bytes(p)
    return Cost(calls * one.flops, calls * (one.bytes + extra))


def _metadata_cost(p: Problem) -> Cost:
    one = _call_cost(p)
    return Cost(2 * one.flops, 2 * one.bytes)


def _large_cache(p: Problem, pages: str, page: str) -> str:
    if p.sizes[pages] * p.sizes[page] <= SLOTS:
        return ""
    return max(pages, page, key=lambda n: p.sizes[n])


def _gives_way(p: Problem) -> str:
    listed = ("topk",) if p.variant.extra == "none" else ("topk", "extra")
    return (_large_cache(p, "pages", "page") or _large_cache(p, "extra_pages", "extra_page")
            or smaller(p, _cost(p), ("b", "s_q"), listed))


def _beside(sizes: Mapping[str, int]) -> Mapping[str, int]:
    """One token beside long lists; beside short ones some of some requests, so that these can be mixed up."""
    if max(sizes.get("topk", 0), sizes.get("extra", 0)) > 128:
        return {"b": 1}
    return {"s_q": 2} if sizes.get("b") == 2 or sizes.get("topk") == 64 or "pages" in sizes else {}


def _same_bits(names: Iterable[str], requests: Any) -> Any:
    def compare(problem: Problem, first: data.Codes, second: data.Codes) -> dict[str, Any]:
        return {n: codec.bits(requests(first[n])) != codec.bits(second[n]) for n in names if n in first}

    return compare


BY_REQUEST = ("q", "indices", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")
RESULTS = ("decode/out", "decode/softmax_lse")
INVARIANT = When(split="never", calls="one")
"""requests are promised not to matter to each other where splitting is switched off"""


def _reversed(problem: Problem, codes: data.Codes) -> tuple[Problem, data.Codes]:
    return problem, {k: a[::-1].copy() if k.partition("/")[2] in BY_REQUEST else a for k, a in codes.items()}


PROMISES = (
    replace(rows_alone("b", of=tuple(f"decode/{n}" for n in BY_REQUEST), outputs=RESULTS), when=INVARIANT),
    Relation("order_of_requests", "a request's bits do not depend on its place among the others", _reversed,
             _same_bits(RESULTS, lambda a: np.ascontiguousarray(a[::-1])), INVARIANT),
)


def _variant(v: Variant) -> bool:
    """Caches of bytes, and a second call, go with the plain choices of the other keys."""
    if v.cache != "e4m3":
        return (v.split, v.calls, v.attn_sink) == ("auto", "one", "no")
    return v.calls == "one" or (v.split, v.h_q) == ("auto", "64")


def _of_two(**variant: str) -> tuple[Misuse, ...]:
    """What a second decode with one metadata object is refused for, and what a refused one must not leave there."""
    return (
        misuse("a second decode with longer lists", variant=variant, raises=ASSERTED,
               **{"again/indices": {"shape": "b s_q 128"}}),
        misuse("a second decode of fewer requests", variant={**variant, "topk_length": "no"}, raises=ASSERTED,
               **{"again/q": {"shape": "b-1 s_q 64 512"}, "again/indices": {"shape": "b-1 s_q 64"}}),
        misuse("a second decode that may not split", variant=variant, raises=ASSERTED,
               **{"again/enable_batch_invariant": True}),
        misuse("a refused decode in front of a right one", variant=variant, raises=REFUSED,
               **{"decode/indices": {"shape": "b s_q 100"}}),
    )


WITH_KVCACHE = Op(
    "flashmla.flash_mla_with_kvcache",
    doc="sparse attention of each request over slots of paged FP8 caches, and of a second FP8 or FP4 one",
    variants=dict(h_q=("64", "128"), cache=("e4m3", "int8", "uint8"), extra=("none", "fp8", "fp4"),
                  attn_sink=("no", "yes"), topk_length=("no", "yes"), split=("auto", "never"), calls=("one", "two")),
    where=_variant,
    sizes=SIZES,
    steps=(Step("", "flashmla.get_mla_metadata", (), METADATA),
           decode_step("decode"),
           decode_step("again", first="decode", when=When(calls="two"))),
    families=FAMILIES,
    oracle=sparse.flash_mla_with_kvcache,
    arrange=data.poison_tokens,
    cost=_cost,
    gives_way=_gives_way,
    beside=_beside,
    everywhere=({"topk": 704}, {"topk": 640}, {"topk": 64, "extra": 640}),
    idle=lambda v: () if EXTRA(v) else ("extra", "extra_pages", "extra_page"),
    sample=dict(b=2, s_q=1, topk=64, pages=3, page=16, extra=64, extra_pages=2, extra_page=16),
    promises=PROMISES,
    rejects=(
        misuse("no indices", indices=None, raises=ASSERTED),
        misuse("num_splits given", num_splits={"dtype": "int32", "shape": "b+1"}, raises=ASSERTED),
        misuse("causal", causal=True, raises=ASSERTED),
        misuse("a cache that is not FP8", is_fp8_kvcache=False, raises=ASSERTED),
        misuse("no metadata object", tile_scheduler_metadata=None, raises=("AssertionError", "TypeError")),
        misuse("q in FP16", q={"dtype": "fp16"}, raises=REFUSED),
        misuse("q of 576 dims", q={"shape": "b s_q 64 576"}, raises=REFUSED),
        misuse("32 heads", q={"shape": "b s_q 32 512"}, raises=REFUSED),
        misuse("no request", q={"shape": "0 s_q 64 512"}, indices={"shape": "0 s_q 64"}, raises=REFUSED),
        misuse("no token", q={"shape": "b 0 64 512"}, indices={"shape": "b 0 64"}, raises=REFUSED),
        misuse("values of 256 dims", head_dim_v=256, raises=REFUSED),
        misuse("tokens of 656 bytes", k_cache={"shape": "pages page 1 656"}, raises=REFUSED),
        misuse("tokens of 584 bytes", k_cache={"shape": "pages page 1 584"}, raises=REFUSED),
        misuse("FP4 tokens as the main cache", k_cache={"shape": "pages page 1 288"}, raises=REFUSED),
        misuse("two heads of the cache", k_cache={"shape": "pages page 2 528"}, raises=REFUSED),
        misuse("cache in BF16", k_cache={"dtype": "bf16"}, raises=REFUSED),
        misuse("cached tokens that do not follow each other", k_cache={"row_bytes_extra": 16}, raises=REFUSED),
        misuse("indices in INT64", indices={"dtype": "int64"}, raises=REFUSED),
        misuse("indices one request short", indices={"shape": "b-1 s_q 64"}, raises=REFUSED),
        misuse("lists of 100", indices={"shape": "b s_q 100"}, raises=REFUSED),
        misuse("empty lists", indices={"shape": "b s_q 0"}, raises=REFUSED),
        misuse("sink in BF16", variant={"attn_sink": "yes"}, attn_sink={"dtype": "bf16"}, raises=REFUSED),
        misuse("sink one head short", variant={"attn_sink": "yes", "h_q": "64"}, attn_sink={"shape": "63"},
               raises=REFUSED),
        misuse("length in INT64", variant={"topk_length": "yes"}, topk_length={"dtype": "int64"}, raises=REFUSED),
        misuse("length one request short", variant={"topk_length": "yes"}, topk_length={"shape": "b-1"},
               raises=REFUSED),
        misuse("an extra cache without a list", variant={"extra": "fp8", "topk_length": "no"},
               extra_indices_in_kvcache=None, raises=REFUSED),
        misuse("an extra list without a cache", variant={"extra": "fp8", "topk_length": "no"}, extra_k_cache=None,
               raises=REFUSED),
        misuse("extra lists of 100 with 64 heads", variant={"extra": "fp8", "h_q": "64"},
               extra_indices_in_kvcache={"shape": "b s_q 100"}, raises=REFUSED),
        misuse("extra tokens of 656 bytes", variant={"extra": "fp8"},
               extra_k_cache={"shape": "extra_pages extra_page 1 656"}, raises=REFUSED),
        *_of_two(calls="two"),
    ),
)


GET_METADATA = Op(
    "flashmla.get_mla_metadata",
    doc="a fresh object that decode calls of the same sizes and lengths may share; judged by two of them",
    variants=dict(args=("none", "former"), h_q=("64",), topk_length=("no", "yes")),
    sizes={name: size for name, size in SIZES.items() if not name.startswith("extra")},
    steps=(Step("", "flashmla.get_mla_metadata",
                (In("cache_seqlens", "int32", "b", when=FORMER, data=data.lengths(lambda p: p.topk)),
                 Value("num_q_tokens_per_head_k", 128, when=FORMER),
                 Value("num_heads_k", 1, when=FORMER)), METADATA),
           decode_step("decode", plain=True),
           decode_step("again", first="decode", plain=True)),
    families=FAMILIES,
    oracle=sparse.get_mla_metadata,
    arrange=data.poison_tokens,
    cost=_metadata_cost,
    gives_way=lambda p: _large_cache(p, "pages", "page") or smaller(p, _metadata_cost(p), ("b", "s_q"), ("topk",)),
    beside=_beside,
    sample=dict(b=2, s_q=1, topk=64, pages=3, page=16),
    rejects=_of_two(),
)

OPS = (WITH_KVCACHE, GET_METADATA)
