"""Which data families each class of op draws from. The first is the plain one that decoys use."""

from __future__ import annotations

GEMM_FAMILIES = ("normal", "integers", "positive", "ill_scaled", "cancellation", "one_hot", "powers", "zeros",
                 "constant", "subnormal_products", "infinities", "nans", "wide", "exact", "overflow")
FP8_GEMM_FAMILIES = ("normal", "integers", "positive", "ill_scaled", "cancellation", "one_hot", "powers", "zeros",
                     "constant", "subnormal", "near_overflow", "all_bits", "nans")
SELECT_FAMILIES = ("normal", "integers", "ill_scaled", "constant", "two_valued", "few_valued", "ascending",
                   "descending", "sawtooth", "tail_max", "zeros", "zero_signs", "subnormal", "near_overflow",
                   "infinities", "nans", "all_bits")
CAST_FAMILIES = ("normal", "integers", "positive", "ill_scaled", "constant", "powers", "zeros", "subnormal",
                 "near_overflow", "all_bits", "infinities", "nans", "scale_edges")
ROW_FAMILIES = ("normal", "integers", "positive", "ill_scaled", "constant", "zeros", "powers", "infinities", "nans",
                "wide")
"""for what works along a row: norms, rotations"""
