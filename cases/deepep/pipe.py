"""Tensors handed on along a ring of ranks, as a pipeline does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cases.deepep.steps import REFUSED
from conformance.declare import ALWAYS, Cost, From, In, Op, Out, Returned, Size, Step, Token, Value, When, edges, misuse
from conformance.model import Problem, VariantFn
from conformance.protocol import FORMATS
from references.deepep import pipe
from references.expected import Inputs

UNIT_BYTES = 32
"""what the bytes of a tensor are a multiple of"""
TWO = When(tensors="two")


def elements(p: Problem, rank: int) -> int:
    return p.units[rank] * UNIT_BYTES // FORMATS[p.variant.x].itemsize_bytes


def derived(p: Problem, inputs: Inputs) -> Mapping[str, Any]:
    """Where each rank sends to and receives from, and the room that the buffer must have."""
    ranks = range(pipe.RANKS)
    source = [pipe.source(p, rank) for rank in ranks]
    return {"src_rank": source, "dst_rank": [source.index(rank) for rank in ranks],
            "max_bytes": UNIT_BYTES * max(p.units)}


def send(name: str, when: VariantFn = ALWAYS) -> Step:
    return Step(name, "deepep.PPBuffer.send", (
        Token("buffer", of="buffer"),
        In("x", From("x"), lambda p, rank: (elements(p, rank),), forms=("offset",)),
        Value("dst_rank_idx", Size("dst_rank"))), (), when)


def recv(name: str, when: VariantFn = ALWAYS) -> Step:
    return Step(name, "deepep.PPBuffer.recv", (
        Token("buffer", of="buffer"),
        Out("x", From("x"), lambda p, rank: (elements(p, pipe.source(p, rank)),), forms=("offset",)),
        Value("src_rank_idx", Size("src_rank"))), (), when)


def both_ends(x: Mapping[str, Any]) -> dict[str, Any]:
    """The override in both calls: a recv whose send was refused would wait for ever."""
    return {"send/x": x, "recv/x": x}


def opposite(p: Problem, rank: int) -> int:
    """The one rank of four that is no neighbour."""
    return (rank + 2) % pipe.RANKS


RECV = Op(
    "deepep.PPBuffer.recv",
    doc="the tensors that a neighbour sent, byte for byte and in its order",
    ranks=pipe.RANKS,
    variants=dict(x=("bf16", "fp32", "e4m3", "int32"), to=("next", "previous"), tensors=("one", "two")),
    sizes=dict(units=edges(1, 2, 64, hi=300, per_rank=True)),
    derived=derived,
    steps=(
        Step("make", "deepep.PPBuffer", (
            Value("num_max_tensor_bytes", Size("max_bytes")),
            Value("num_max_inflight_tensors", lambda v: {"one": 1, "two": 2}[v.tensors])),
            (Returned("buffer", kind="token"),)),
        send("send"), send("send_2", TWO), recv("recv"), recv("recv_2", TWO),
    ),
    families=("normal", "integers", "all_bits", "zeros", "nans"),
    oracle=pipe.recv,
    cost=lambda p: Cost(flops=0, bytes=2 * UNIT_BYTES * sum(p.units)),
    sample=dict(units=[3, 1, 4, 2]),
    rejects=(
        misuse("tensors of 48 bytes", variant={"x": "bf16"}, raises=REFUSED, **both_ends({"shape": "24"})),
        misuse("empty tensors", raises=REFUSED, **both_ends({"shape": "0"})),
        misuse("tensors larger than the buffer was made for", variant={"x": "bf16"}, raises=REFUSED,
               **both_ends({"shape": "max_bytes"})),
        misuse("tensors with gaps", variant={"x": "bf16"}, raises=REFUSED,
               **both_ends({"shape": "2 16", "row_bytes_extra": 32})),
        misuse("to and from the rank opposite", raises=REFUSED,
               **{"send/dst_rank_idx": opposite, "recv/src_rank_idx": opposite}),
        misuse("from the rank opposite", raises=REFUSED, **{"recv/src_rank_idx": opposite}),
        misuse("room for no tensor", raises=REFUSED, **{"make/num_max_inflight_tensors": 0}),
    ),
)

OPS = (RECV,)
