"""What each check runs and what it looks for: a table.

A check says which runs a problem takes (`plan`), how these relate (`relate`) and which
findings count. `rejects` and relations are in files of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from conformance.engine.attempt import Attempts
from conformance.engine.example import Example
from conformance.engine.judge import MEMORY_REASONS, STRUCTURE_REASONS, Finding, Seen
from conformance.identity import seed_of
from conformance.model import Op, Problem, Variant
from references.formats import codec


@dataclass(frozen=True)
class Check:
    """One kind of check."""

    name: str
    doc: str
    plan: Callable[[Attempts, Problem], list[Example]] | None = None
    relate: Callable[[Op, Variant], Callable[[list[Seen]], list[Finding]] | None] = lambda op, variant: None
    counts: Callable[[Finding], bool] = lambda f: True
    debug_malloc: bool = False
    settle_last: bool = False


def _twice(attempts: Attempts, problem: Problem) -> list[Example]:
    """Decoy, judged, another decoy, and the judged problem again."""
    other = replace(problem, seed=seed_of(problem.seed, "second decoy"))
    return [attempts.example(problem, judged=False), attempts.example(problem, judged=True),
            attempts.example(other, judged=False), attempts.example(problem, judged=True)]


def _same_bits(op: Op, variant: Variant) -> Callable[[list[Seen]], list[Finding]] | None:
    if not (op.repeatable(variant) if callable(op.repeatable) else op.repeatable):
        return None

    def relate(seen: list[Seen]) -> list[Finding]:
        first, second = seen[1], seen[3]
        out = []
        for name, a in first.outputs.items():
            b = second.outputs.get(name)
            if b is None or a.shape != b.shape or name not in first.numerics:
                continue  # nothing is said of what the oracle does not judge
            differs = codec.bits(a) != codec.bits(b)
            if differs.any():
                at = np.argwhere(differs)[0].tolist()
                out.append(Finding("fail", "compare", "nondeterministic",
                                   f"{name}{at} has other bits when the same call is made again; "
                                   f"{int(differs.sum())} of {differs.size} elements differ", name))
        return out

    return relate


def _memory(f: Finding) -> bool:
    return f.status != "fail" or f.reason in MEMORY_REASONS or f.reason in STRUCTURE_REASONS or f.reason == "exception"


CHECKS: dict[str, Check] = {
    c.name: c
    for c in (
        Check("values", "every element of every result is one that the operation allows"),
        Check("repeat", "the same call after another gives the same bits, or where bits are free a right answer again",
              plan=_twice, relate=_same_bits),
        Check("invariance", "what is promised not to matter (batch, neighbours) changes no bit"),
        Check("memory", "nothing is written outside, nothing left unwritten, inputs stay, no result changes later",
              counts=_memory, debug_malloc=True, settle_last=True),
        Check("layout", "strided, offset and aliased arguments that the contract allows give right results"),
        Check("degenerate", "empty and smallest sizes give right results"),
        Check("rejects", "misuse raises an exception, and a good call after it is right"),
        Check("laws", "relations between calls that must hold"),
        Check("timing", "how long a call takes, by a clock that is checked; its results are right afterwards"),
        Check("compile", "the program compiles for the backend's target: no device, and no result"),
    )
}


def describe_checks() -> list[tuple[str, str]]:
    """(name, sentence) of every check."""
    return [(c.name, c.doc) for c in CHECKS.values()]


def counted(check: Check, findings: list[Any]) -> list[Any]:
    """The findings that this check is about."""
    return [f for f in findings if check.counts(f)]
