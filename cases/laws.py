"""Laws that hold between two calls whatever the rounding."""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.model import Problem, Relation, VariantFn
from references.formats import codec

OUT_OF_RANGE = ("subnormal", "subnormal_products", "near_overflow", "overflow", "all_bits", "infinities", "nans")
"""families in which twice a number may leave a format's normal range"""


def doubled(argument: str, fmt: str, *, output: str, when: VariantFn) -> Relation:
    """Twice one operand gives twice the result, bit for bit: every rounding commutes with a power of two.

    Whatever hides in absolute terms (a threshold, an epsilon, a fixed-point accumulator) breaks it.
    """

    def second(problem: Problem, codes: dict[str, np.ndarray]) -> tuple[Problem, dict[str, np.ndarray]]:
        twice = codec.encode(2.0 * codec.decode(codes[argument], fmt), fmt)
        return problem, {**codes, argument: twice}

    def compare(problem: Problem, first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> dict[str, Any]:
        if problem.family in OUT_OF_RANGE:
            return {}
        out = problem.variant.out
        want = codec.encode(2.0 * codec.decode(first[output], out), out)
        return {output: codec.bits(want) != codec.bits(second[output])}

    return Relation(f"doubled_{argument}", f"twice {argument} gives twice {output}, bit for bit", second, compare, when)
