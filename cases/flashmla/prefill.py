"""FlashMLA's sparse prefill: every token attends the BF16 rows that its list names."""

from __future__ import annotations

from collections.abc import Sequence

from cases.flashmla import data
from conformance.declare import Cost, Drawn, In, Op, Returned, Value, When, edges, misuse
from conformance.model import Problem
from references.flashmla import sparse

REFUSED = ("RuntimeError",)
"""every host check of the module's compiled part ends in this"""

FAMILIES = ("normal", "integers", "positive", "ill_scaled", "cancellation", "one_hot", "powers", "zeros", "constant",
            "subnormal", "infinities", "nans", "wide")


ROOM = 1.6 * 2**20
"""work of most problems: what the core level takes, and enough for one token with a list that is split"""
LEAST = {"entries": 64, "topk": 64}
"""the least that a list is halved to"""


def heads(p: Problem) -> int:
    return int(p.variant.h_q)


def topk(p: Problem) -> int:
    """Length of the lists, the next that is legal: 128 at least with 64 heads, whole 128s above 1280 with 128."""
    if p.variant.h_q == "64":
        return max(p.entries, 128)
    return -(-p.entries // 128) * 128 if p.entries > 1280 else p.entries


def smaller(p: Problem, asked: Cost, tokens: Sequence[str], listed: Sequence[str]) -> str:
    """Which size of a drawn problem gives way: most are small, with many tokens or, as often, with long lists."""
    room = 2**22 if p.seed % 8 == 0 else ROOM
    if asked.bytes + asked.flops / 64 <= room:
        return ""
    tokens, listed = (sorted(names, key=lambda n: -p.sizes[n]) for names in (tokens, listed))
    order = (*tokens, *listed) if p.seed // 8 % 2 else (*listed, *tokens)
    return next((n for n in order if p.sizes[n] > LEAST.get(n, 1)), "")


def cost(p: Problem) -> Cost:
    tokens, listed = p.s_q, p.s_q * topk(p)
    return Cost(flops=4 * data.HEAD_DIM * heads(p) * listed,
                bytes=4 * data.HEAD_DIM * heads(p) * tokens + 2 * data.HEAD_DIM * min(p.s_kv, listed))


SPARSE_FWD = Op(
    "flashmla.flash_mla_sparse_fwd",
    doc="out = softmax(sm_scale q K) V over the rows that a token's list names, with their largest logit and lse",
    variants=dict(h_q=("64", "128"), attn_sink=("no", "yes"), topk_length=("no", "yes")),
    sizes=dict(s_q=edges(1, 2, 3, hi=8), entries=edges(64, 128, 640, 1280, step=64, hi=1344),
               s_kv=edges(1, 32, 95, 128, 592, hi=640)),
    args=(In("q", "bf16", lambda p: (p.s_q, heads(p), data.HEAD_DIM), row_align=16, data=data.queries,
             forms=("padded", "offset", "apart")),
          In("kv", "bf16", "s_kv 1 512", row_align=16, data=data.rows, forms=("padded", "offset")),
          In("indices", "int32", lambda p: (p.s_q, 1, topk(p)), row_align=32, forms=("padded", "offset"),
             data=data.lists(lambda p: p.s_kv, data.out_of_range)),
          Value("sm_scale", Drawn((data.HEAD_DIM**-0.5, 0.5, 0.01, 2.0))),
          In("attn_sink", "fp32", lambda p: (heads(p),), when=When(attn_sink="yes"), data=data.sinks),
          In("topk_length", "int32", "s_q", when=When(topk_length="yes"), data=data.lengths(topk))),
    returns=(Returned("out", "bf16", lambda p: (p.s_q, heads(p), data.HEAD_DIM)),
             Returned("max_logits", "fp32", lambda p: (p.s_q, heads(p))),
             Returned("lse", "fp32", lambda p: (p.s_q, heads(p)))),
    families=FAMILIES,
    oracle=sparse.flash_mla_sparse_fwd,
    arrange=data.poison_rows,
    cost=cost,
    gives_way=lambda p: smaller(p, cost(p), ("s_q",), ("entries",)),
    beside=lambda sizes: {"s_q": 1} if sizes.get("entries", 0) > 128 else {},
    sample=dict(s_q=2, entries=128, s_kv=48),
    rejects=(
        misuse("q in FP16", q={"dtype": "fp16"}, raises=REFUSED),
        misuse("q in FP32", q={"dtype": "fp32"}, raises=REFUSED),
        misuse("q of 576 dims", q={"shape": "s_q 64 576"}, raises=REFUSED),
        misuse("q of two axes", q={"shape": "s_q 512"}, raises=REFUSED),
        misuse("32 heads", q={"shape": "s_q 32 512"}, raises=REFUSED),
        misuse("no token", q={"shape": "0 64 512"}, indices={"shape": "0 1 128"}, raises=REFUSED),
        misuse("kv in FP16", kv={"dtype": "fp16"}, raises=REFUSED),
        misuse("kv of 576 dims", kv={"shape": "s_kv 1 576"}, raises=REFUSED),
        misuse("two heads of kv", kv={"shape": "s_kv 2 512"}, raises=REFUSED),
        misuse("kv of two axes", kv={"shape": "s_kv 512"}, raises=REFUSED),
        misuse("indices in INT64", indices={"dtype": "int64"}, raises=REFUSED),
        misuse("indices of two axes", indices={"shape": "s_q 128"}, raises=REFUSED),
        misuse("indices one token short", indices={"shape": "s_q-1 1 128"}, raises=REFUSED),
        misuse("lists of 100", indices={"shape": "s_q 1 100"}, raises=REFUSED),
        misuse("lists of 64 with 64 heads", variant={"h_q": "64"}, indices={"shape": "s_q 1 64"}, raises=REFUSED),
        misuse("lists of 1344 with 128 heads", variant={"h_q": "128"}, indices={"shape": "s_q 1 1344"}, raises=REFUSED),
        misuse("empty lists", indices={"shape": "s_q 1 0"}, raises=REFUSED),
        misuse("values of 256 dims", d_v=256, raises=REFUSED),
        misuse("no scale", sm_scale=None, raises=("TypeError", "RuntimeError")),
        misuse("sink in BF16", variant={"attn_sink": "yes"}, attn_sink={"dtype": "bf16"}, raises=REFUSED),
        misuse("sink one head short", variant={"attn_sink": "yes", "h_q": "64"}, attn_sink={"shape": "63"},
               raises=REFUSED),
        misuse("length in INT64", variant={"topk_length": "yes"}, topk_length={"dtype": "int64"}, raises=REFUSED),
        misuse("length one token short", variant={"topk_length": "yes"}, topk_length={"shape": "s_q-1"},
               raises=REFUSED),
    ),
)

OPS = (SPARSE_FWD,)
