"""The calls that the cases of expert parallelism are made of: a buffer, a dispatch, a look into its handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cases.deepep.routing import counts_before, local_experts, switch, topk_idx
from conformance.declare import ALWAYS, Drawn, In, Returned, Size, Step, Token, Tup, Value, When
from conformance.model import Problem, Variant, VariantFn
from references.deepep.ep import HANDLE_FIELDS

REFUSED = ("AssertionError", "RuntimeError")
"""Python checks of the module end in the one, its host checks in the other"""

PAYLOADS = ("bf16", "fp8", "fp8_packed")
SCALES = {"fp8": "fp32", "fp8_packed": "int32"}
"""format of the scales beside E4M3 rows: a number, or four exponents in a word; packed ones stand column by column"""

WEIGHTS = When(weights="yes")
INLINE, DEFERRED = When(epilogue="inline"), When(epilogue="deferred")


def both(*conditions: VariantFn) -> VariantFn:
    return lambda v: all(c(v) for c in conditions)


def make(**more: VariantFn) -> Step:
    """The buffer, sized by what the calls will need. Collective."""
    return Step("make", "deepep.EPBuffer", (
        Value("num_max_tokens_per_rank", Size("num_max_tokens_per_rank")),
        Value("hidden", Size("h")),
        Value("num_topk", Size("k")),
        switch("deterministic", "deterministic"),
        *(Value(name, value) for name, value in more.items())), (Returned("buffer", kind="token"),))


def payload(x: str) -> In | Tup:
    """The argument x: a matrix, or a pair with its scales."""
    if x == "bf16":
        return In("x", "bf16", "t h", forms=("offset",))
    scales = In("sf", SCALES[x], lambda p, rank: (p.t[rank], packs(p)), major=0 if x == "fp8_packed" else None,
                forms=("padded", "offset"))
    return Tup("x", (In("x", "e4m3", "t h", forms=("offset",)), scales))


def packs(p: Problem) -> int:
    """Scales of a row: one for each sf_group elements, the last group maybe shorter."""
    return -(-p.h // p.sf_group)


def per_slot(p: Problem) -> str:
    """Shape of received weights: the whole row of each token, or one number a row."""
    return "rows k" if p.variant.layout == "normal" else "rows"


def received(x: str) -> tuple[Returned, ...]:
    """What a dispatch returns, but for the event."""
    column = When(sf_order="column")
    fmt, inside = ("bf16", None) if x == "bf16" else ("e4m3", "recv")
    scales = () if x == "bf16" else (
        Returned("recv_sf", SCALES[x], "rows packs", inside=inside, row_align=lambda v: 16 if column(v) else 4,
                 major=lambda v: 0 if column(v) else 1),)
    return (Returned("recv_x", fmt, "rows h", inside=inside), *scales,
            Returned("recv_topk_idx", "int64", "rows k", when=When(layout="normal")),
            Returned("recv_topk_weights", "fp32", per_slot, when=WEIGHTS),
            Returned("handle", kind="token"))


def call(name: str, op: str, args: tuple[Any, ...], results: tuple[Returned, ...], when: VariantFn) -> tuple[Step, ...]:
    """A call in both its forms: results at once with an event, or an event whose `wait` gives them."""
    event = Returned("event", kind="token")
    deferred = (Value("async_with_compute_stream", True), Value("defer_epilogue", True))
    return (Step(name, op, args, (*results, event), when=both(when, INLINE)),
            Step(name, op, (*args, *deferred), (event,), when=both(when, DEFERRED)),
            Step(name, "deepep.EventOverlap.wait", (Token("event", of="event"),), results, when=both(when, DEFERRED)))


def dispatch(x: str, when: VariantFn = ALWAYS) -> tuple[Step, ...]:
    """The first dispatch, with counts added to statistics where weights travel too."""
    args = (
        Token("buffer", of="buffer"),
        payload(x),
        In("topk_idx", "int64", "t k", data=topk_idx, shapes=True, forms=("offset",)),
        In("topk_weights", "fp32", "t k", when=WEIGHTS, forms=("offset",)),
        In("cumulative_local_expert_recv_stats", "int32", lambda p: (local_experts(p),), role="accumulate",
           data=counts_before, when=WEIGHTS),
        Value("num_experts", Size("num_experts")),
        Value("num_max_tokens_per_rank", Size("num_max_tokens_per_rank")),
        Value("expert_alignment", Drawn((1, 4, 16, 128))),
        switch("do_cpu_sync", "sync"),
        *layout_switches(),
    )
    return call("dispatch", "deepep.EPBuffer.dispatch", args, received(x), when)


def cached(x: str, when: VariantFn) -> tuple[Step, ...]:
    """The same tokens again with other data, placed as the handle says."""
    args = (Token("buffer", of="buffer"), payload(x), In("topk_weights", "fp32", "t k", when=WEIGHTS),
            Token("handle", of="handle"), *layout_switches())
    return call("cached", "deepep.EPBuffer.dispatch", args, received(x), when)


def layout_switches() -> tuple[Value, ...]:
    return (Value("do_expand", lambda v: v.layout == "expanded"),
            switch("do_zero_padding", "zero_padding"),
            Value("use_tma_aligned_col_major_sf", lambda v: v.get("sf_order") == "column"))


def read_handle(name: str, when: VariantFn = ALWAYS) -> Step:
    """The counts that a handle holds."""
    shapes: tuple[str | Callable[[Problem], str], ...] = (
        "ranks", "local_experts", "local_experts", lambda p: "local_experts" if p.variant.sync == "yes" else "0")
    return Step(name, "deepep.EPHandle.read", (Token("handle", of="handle"), Value("names", HANDLE_FIELDS)),
                tuple(Returned(f, "int32", s) for f, s in zip(HANDLE_FIELDS, shapes, strict=True)), when=when)


def is_layout(v: Variant) -> bool:
    """Whether the keys of the layout agree: there are gaps in the expanded one only."""
    return v.layout == "expanded" or v.get("zero_padding", "no") == "no"
