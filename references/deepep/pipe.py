"""Tensors that travel along a ring of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from references.expected import Exact, Expected, Inputs, Problem

RANKS = 4


def source(problem: Problem, rank: int) -> int:
    """The rank that `rank` receives from: the one before it where tensors go to the next rank, else the one behind."""
    return (rank - 1 if problem.variant.to == "next" else rank + 1) % RANKS


def recv(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[Any, Expected]:
    """`deepep.PPBuffer.recv` after `send`: the bytes of the neighbour's tensors, in the order of its sends.

    Inputs: send/x@rank (n,), and where a second one follows send_2/x@rank; n is each rank's own. Outputs: recv/x@rank
    and recv_2/x@rank, of the sender's length. NaN patterns travel as they are.
    """
    names = {"send": "recv", "send_2": "recv_2"}
    return {f"{there}/x@{rank}": Exact(inputs.codes(f"{here}/x@{source(problem, rank)}"), any_nan=False)
            for here, there in names.items() if f"{here}/x@0" in inputs for rank in range(RANKS)}
