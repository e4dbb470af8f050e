"""Promises that ops make, as relations between two runs: same bits whatever surrounds them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from conformance.model import Problem, Relation
from references.formats import codec


def rows_alone(size: str, *, of: tuple[str, ...], outputs: tuple[str, ...]) -> Relation:
    """The first rows of a batch, computed without the others, have the same bits.

    size: the batch axis, the first of the arrays `of` and of the outputs.
    """

    def second(problem: Problem, codes: dict[str, np.ndarray]) -> tuple[Problem, dict[str, np.ndarray]]:
        kept = _fewer(problem.sizes[size], problem)
        cut = {k: a[:kept] if k in of or k in outputs else a for k, a in codes.items()}
        return replace(problem, sizes={**problem.sizes, size: kept}), cut

    def compare(problem: Problem, first: dict[str, np.ndarray], alone: dict[str, np.ndarray]) -> dict[str, Any]:
        return {name: codec.bits(first[name][: len(alone[name])]) != codec.bits(alone[name])
                for name in outputs if name in first}

    return Relation(f"batch_invariant_{size}", f"rows do not depend on how many there are ({size})", second, compare)


def _fewer(n: int, problem: Problem) -> int:
    """About half the rows, in steps that keep alignments of up to 8 where n has them."""
    step = 8 if n % 8 == 0 and n > 8 else 1
    return max(step, n // 2 // step * step) if n > step else n
