"""The numbers that the bounds are made of, one row each, with where it comes from.

Sources named by a word: *IEEE* IEEE 754-2019; *OCP* Open Compute Project FP8 and MX v1.0; *Higham* Accuracy and
Stability of Numerical Algorithms, 2002, chapters 3 and 4; *OpenCL* OpenCL C 3.0, relative error as ULPs, table of
single-precision built-ins (full and relaxed profile); *Khattak* Khattak and Mikaitis, Accurate Models of NVIDIA
Tensor Cores, 2025; *measured* models of these units and a CPU matrix unit, run by this project.
"""

from __future__ import annotations

from dataclasses import dataclass

from references.formats.spec import FLOATS

UNIT_ROUNDOFF: dict[str, float] = {name: spec.u for name, spec in FLOATS.items()} | {
    "tf32": 2.0**-11,  # 11 significand bits, rounded to nearest (IEEE's fp16 width)
    "tf32_trunc": 2.0**-10,  # the same, truncated
    "hf32": 2.0**-11,  # error threshold of the Ascend accuracy rules
}
"""u of one rounding to nearest: IEEE and OCP widths, 2**-p."""

U32 = UNIT_ROUNDOFF["fp32"]


@dataclass(frozen=True)
class Accumulator:
    """error <= factor * gamma(n, u) * sum|products|, plus `underflow` for each product."""

    u: float
    factor: float
    underflow: float
    source: str


_FP32 = Accumulator(U32, 1.0, 2.0**-149, "Higham (4.4): any order; measured <= 0.15 with IEEE additions")
_TRUNCATING = Accumulator(
    U32, 1.0, 2.0**-149,
    "Khattak: 0.7 at worst with two extra alignment bits; measured <= 0.11 with two, 0.17 with one, 0.31 with none",
)
ACCUMULATORS: dict[str, Accumulator] = {
    "fp32": _TRUNCATING,
    "tc_rz_fp32": _TRUNCATING,
    "ieee_rn_fp32": _FP32,
    "fp8_tc14_promoted": _FP32,  # of the promoted sums; the units inside a chunk are `gemm.tensor_core_14_bit`
    "fp64": Accumulator(UNIT_ROUNDOFF["fp64"], 1.0, 0.0, "IEEE, Higham (4.4)"),
    "int32": Accumulator(0.0, 0.0, 0.0, "exact"),
}
"""What a sum of products is kept in; `fp32` stands for every accumulator that is at least a truncating fp32."""

FLUSH_FP32 = 2.0**-126
"""What a declared flush of fp32 subnormals may take from each term (IEEE: smallest normal)."""


@dataclass(frozen=True)
class Accuracy:
    """Relative error of a fp32 function: (ulps + ulps_per_x * |x|) * 2u."""

    ulps: float
    ulps_per_x: float
    source: str


FUNCTIONS: dict[str, Accuracy] = {
    "exp": Accuracy(3, 2, "OpenCL relaxed: 3 + floor(|2x|); covers exp2 of a rounded product with log2(e)"),
    "log": Accuracy(4, 0, "OpenCL full: 3; one more for a base-2 logarithm times ln 2"),
    "rsqrt": Accuracy(4, 0, "OpenCL full: 2; twice that for a square root and a division"),
    "divide": Accuracy(2.5, 0, "OpenCL full: 2.5; covers a multiplication by the reciprocal"),
    "sqrt": Accuracy(3, 0, "OpenCL full without correct rounding: 3"),
    "tanh": Accuracy(5, 0, "OpenCL full: 5"),
}

@dataclass(frozen=True)
class ProbabilityFormat:
    """Format of the unnormalised softmax weights P <= 1 that enter the second matrix product."""

    u: float
    absolute: float
    """error of a P too small to keep its significand; fp32 and bf16 include a flush of subnormals by exp"""
    source: str


PROBABILITIES: dict[str, ProbabilityFormat] = {
    "fp32": ProbabilityFormat(0.0, FLUSH_FP32, "IEEE"),
    "bf16": ProbabilityFormat(UNIT_ROUNDOFF["bf16"], FLUSH_FP32, "IEEE, bfloat16"),
    "fp16": ProbabilityFormat(UNIT_ROUNDOFF["fp16"], 2.0**-25, "IEEE: half of 2**-24"),
    "e4m3": ProbabilityFormat(UNIT_ROUNDOFF["e4m3"], 2.0**-10, "OCP: half of 2**-9"),
}

SPREAD_SCORES, SPREAD_WEIGHTS = 3.0, 6.0
"""Standard deviations allowed where data are random: of partial sums (failure 2 exp(-18) an element, Brownian
bridge) and of weighted rounding errors (Hoeffding)."""

RANDOM_FAMILIES = frozenset({"normal"})
"""Data families whose elements are independent and of either sign alike: where chance may be counted on."""


@dataclass(frozen=True)
class Limit:
    """One number of the aggregate statistics (`typical.Typical`, `bounds.scatter`)."""

    value: float
    source: str


_MODELS = "measured on models of six accumulators and a CPU matrix unit: 1524 products, no alarm"
STATISTICS: dict[str, Limit] = {
    "gemm_rms": Limit(1.1, f"1 is the model; {_MODELS}, 1.00 at k = 64 falling to 0.85 at k = 7168"),
    "attention_rms": Limit(1.15, "1 is the model; measured at most 1.0 on nine kernels with P in bf16, 648 runs"),
    "whole_spread": Limit(4.0, "of sqrt(2 n): six standard deviations of the root mean square of n roundings, whose "
                               "squares have the variance 0.8"),
    "part_spread": Limit(5.0, "the same of one block or row of many"),
    "sigmas": Limit(6.0, "standard deviations of a mean or a common factor: one tensor in 5e8 by chance (normal tail)"),
    "least_factor": Limit(2.0**-13, "room for fp32 functions with errors of one sign, OpenCL relaxed exp at |x| = 200"),
    "accumulation": Limit(0.3, f"share of gamma_k u |A||B| that a sum of random terms spends; {_MODELS}: 0.31 at most"),
    "squares": Limit(0.1, "share of gamma_n that a sum of squares of random numbers spends one way: one row of "
                          "64 after the other 0.094 at most, the mean of 64 rows 0.034, in lanes or blocks 0.05"),
    "extra": Limit(1 / 3, "of an error bounded by what chance exceeds with 2 exp(-18): a third is one deviation"),
    "other": Limit(1 / 6, "of a largest error of six standard deviations: one"),
    "weight_rounding": Limit(0.43, "root mean square of the relative error of rounding log-uniform numbers, in u: "
                                   "sqrt(1/3 * mean of x**-2) = sqrt(1/3 * 3/8 / ln 2) over one binade"),
    "nearly_all": Limit(2.0**-4, "weight beside one row below which the others may move a bf16 result by less than 16 "
                                 "half ulp, so that roundings are not spread evenly"),
    "square_spread": Limit(2.1, "standard deviation over mean of its square: the square lies in 0..u**2 with mean "
                                "0.185 u**2, so its variance is at most 0.185 (1 - 0.185) u**4"),
}
"""Where the errors of many elements together stop to be those of a correct kernel."""
