"""Checks that make a second run out of the first: promises and laws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.engine.attempt import Attempts
from conformance.engine.checks import Check
from conformance.engine.example import Example
from conformance.engine.judge import Finding, Seen
from conformance.model import Case, Problem, Relation, Variant

Plan = Callable[[Attempts, Problem], list[Example]]
Relate = Callable[[list[Seen]], list[Finding]]


def relation_of(case: Case) -> Relation | None:
    """The promise or law a case is about."""
    pools = {"invariance": ("promise", case.op.promises), "laws": ("law", case.op.laws)}
    if case.check not in pools:
        return None
    key, known = pools[case.check]
    return next(r for r in known if r.name == case.variant[key])


def drawn_case(case: Case) -> Case:
    """The case with the op's own variant keys, from which problems are drawn."""
    if relation_of(case) is not None:
        keys = {k: v for k, v in dict(case.variant).items() if k not in ("promise", "law")}
        return replace(case, variant=Variant(keys))
    return case


def plan_of(case: Case, check: Check) -> tuple[Plan | None, Relate | None, Callable[[], bool]]:
    """How a problem of this case is run, what must hold between its runs, and whether that was put to the test."""
    relation = relation_of(case)
    if relation is None:
        return check.plan, check.relate(case.op, drawn_case(case).variant), lambda: False
    state: dict[str, Any] = {"compared": False}

    def plan(attempts: Attempts, problem: Problem) -> list[Example]:
        decoy = attempts.example(problem, judged=False)
        first = attempts.example(problem, judged=True)
        other, codes = relation.second(problem, first.codes)
        state["problem"] = problem
        state["differs"] = other != problem or any(codes[k].tobytes() != a.tobytes() for k, a in first.codes.items())
        return [decoy, first, attempts.example(other, judged=True, codes=codes)]

    def relate(seen: list[Seen]) -> list[Finding]:
        reason = "law" if case.check == "laws" else "nondeterministic"
        out = []
        compared = relation.compare(state["problem"], seen[1].outputs, seen[2].outputs)
        # A second run that is the first again tests nothing, nor does a comparison of no elements.
        state["compared"] = state["differs"] and any(isinstance(w, str) or np.size(w) for w in compared.values())
        for name, wrong in compared.items():
            if isinstance(wrong, str) and wrong:
                out.append(Finding("fail", "compare", reason, f"{name}: {wrong}", name))
            elif not isinstance(wrong, str) and np.any(wrong):
                at = np.argwhere(wrong)[0].tolist()
                out.append(Finding("fail", "compare", reason, f"{name}{at}: {relation.doc} does not hold; "
                                   f"{int(np.sum(wrong))} elements differ", name))
        return out

    return plan, relate, lambda: state["compared"]
