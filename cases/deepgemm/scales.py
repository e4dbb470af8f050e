"""Scale factors as the contract has them: positive and normal, and powers of two where the variant says so."""

from __future__ import annotations

import numpy as np

from conformance.engine.arrays import Draw
from conformance.model import Problem

EXACT_FAMILIES = ("integers", "one_hot", "powers", "zeros", "constant", "subnormal")
"""their sums are exact under powers of two, so these get no others"""
BIAS = 127
PACKED = 4
"""exponent bytes in a word"""


def near(d: Draw) -> np.ndarray:
    """Codes of scales that differ from each neighbour along both axes; in one problem of 8 they span the exponents.

    Then the scales of A are small and those of B large, so that products stay inside FP32. The bytes of a packed word
    behind the last block of K hold any exponent.
    """
    if d.problem.seed % 8 == 5:
        smallest = -BIAS if d.format == "e8m0x4" else 1 - BIAS  # byte 0 is no zero
        low, high = (smallest, -60) if d.name.startswith("a") else (60, BIAS - 7)
    else:
        low, high = -4, 4
    exponent = d.integers(low, high)
    if d.format == "e8m0x4":
        return (exponent + BIAS).astype(np.uint8)
    scale = np.ldexp(1.0, exponent)
    if d.problem.variant.scales == "fp32" and d.problem.family not in EXACT_FAMILIES:
        scale = scale * (1.0 + d.uniform(salt=3))
    return scale.astype(np.float32)


def granularity(p: Problem) -> tuple[int, int, int]:
    """(rows of A, rows of B, columns of K) that share a scale."""
    if p.values["recipe_a"]:
        (gran_m, gran_k), (gran_n, _) = p.values["recipe_a"], p.values["recipe_b"]
        return gran_m, gran_n, gran_k
    default = (1, 1, 128) if p.variant.scales == "ue8m0" else (1, 128, 128)
    return tuple(p.values.get("recipe") or default)


def shape(p: Problem, rows: int, gran_mn: int, gran_k: int) -> tuple[int, int]:
    """In codes: the bytes of whole words where they are packed."""
    blocks = -(-p.k // gran_k)
    if p.variant.scales == "ue8m0":
        blocks = -(-blocks // PACKED) * PACKED
    return -(-rows // gran_mn), blocks


def shape_a(p: Problem) -> tuple[int, int]:
    gran_m, _, gran_k = granularity(p)
    return shape(p, p.m, gran_m, gran_k)


def shape_b(p: Problem) -> tuple[int, int]:
    _, gran_n, gran_k = granularity(p)
    return shape(p, p.n, gran_n, gran_k)
