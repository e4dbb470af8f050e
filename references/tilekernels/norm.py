"""RMSNorm of TileKernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from references.bounds.basic import gamma, rounded
from references.bounds.constants import RANDOM_FAMILIES, STATISTICS, U32
from references.bounds.scatter import product_scatter
from references.expected import Array, Exact, Expected, Inputs, Problem, Within
from references.formats import codec
from references.tilekernels.arguments import argument, underflow
from references.typical import Typical

_SUM_ROUNDINGS = 4
"""of mean(r**2) + eps beside the n of the sum: 1 / H and its product, eps and its sum"""
_RSQRT = 4
"""an rsqrt of 2 ulp, in unit roundoffs"""
_SCALE_ROUNDINGS = 4
"""out_scale, weight * out_scale, and the two products"""
_HOPELESS = 0.1
"""a relative error of rstd that only underflow of the squares can cause"""


def norm_forward(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[Any, Expected]:
    """`tilekernels.quant.norm_forward`: out = r * rstd * (weight * out_scale), rounded to x's format once.

    r = x, or x + residual rounded to x's format, is returned as norm_input; rstd = 1 / sqrt(mean(r**2) + eps) over
    the last axis, in fp32. Bound: half the sum's relative error gamma_n (all terms positive) and the few operations
    after it. Rows whose squares overflow fp32, or fall below its range with an eps too small to hide it, are
    unspecified; NaN and infinities follow IEEE (an infinity gives rstd 0, zeros, and NaN at its place).

    Arguments (default): eps (1e-6), out_scale (1.0), with_rstd (False). Inputs: x (..., H) bf16 or fp32, weight (H,)
    and residual (..., H) of the same format, each or not. Outputs: out, norm_input, and rstd fp32 (...) if asked for.
    Profile: subnormals.
    """
    fmt = inputs.format("x")
    eps, out_scale = argument(problem, "eps", 1e-6), argument(problem, "out_scale", 1.0)
    codes, r = inputs.codes("x"), inputs.real("x")
    tiny = underflow(profile)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if "residual" in inputs:
            codes = codec.encode(r + inputs.real("residual"), fmt)
            r = codec.decode(codes, fmt).astype(np.float64)
        n = r.shape[-1]
        total = np.square(r).sum(axis=-1)
        mean = total / n + eps
        rstd = 1 / np.sqrt(mean)
        summed = (1 - gamma(n + _SUM_ROUNDINGS, U32)) ** -0.5 - 1
        relative = summed + gamma(_RSQRT, U32) + tiny / mean
        overflows = np.isfinite(r).all(axis=-1) & (total * (1 + gamma(n, U32)) >= codec.overflow_threshold("fp32"))
        free = overflows | (relative > _HOPELESS)
        weight = (inputs.real("weight") if "weight" in inputs else 1.0) * out_scale
        y = r * rstd[..., None] * weight
        each = relative[..., None] + gamma(_SCALE_ROUNDINGS, U32)
        error = each * np.abs(y) + tiny * (np.abs(r * rstd[..., None]) + np.abs(weight) + 1)
        bound = error if fmt == "fp32" else rounded(y, error, fmt)
        typical = None
        # Without a weight a row of bf16 numbers times one factor near a power of two rounds alike everywhere.
        spread = fmt == "fp32" or "weight" in inputs
        if spread and getattr(problem, "family", "") in RANDOM_FAMILIES:
            common = STATISTICS["squares"].value * summed + tiny / mean
            typical = product_scatter(np.where(free[..., None], 0.0, y), np.where(free, 0.0, common)[..., None],
                                      gamma(_RSQRT + _SCALE_ROUNDINGS, U32), fmt)
    expected: dict[Any, Expected] = {
        "out": _within(y, bound, np.broadcast_to(free[..., None], y.shape), typical),
        "norm_input": Exact(codes),
    }
    if argument(problem, "with_rstd", False):
        expected["rstd"] = _within(rstd, relative * rstd, free)
    return expected


def _within(value: Array, bound: Array, free: Array, typical: Typical | None = None) -> Within:
    return Within(np.where(free, 0.0, value), np.where(free, 0.0, bound), free if free.any() else None, typical)
