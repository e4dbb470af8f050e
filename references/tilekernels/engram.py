"""The optimiser of TileKernels' n-gram memory: momentum, and the step that scales rows and columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from references.bounds.basic import function, gamma, rounded
from references.bounds.constants import U32
from references.expected import Array, Expected, Inputs, Problem, Within
from references.formats import codec
from references.tilekernels.arguments import argument, underflow

_HOPELESS = 0.1
"""a relative error that only underflow of squares can cause"""
_PRODUCTS = 2
"""row_scale * matrix * col_scale"""


def engram_sinkhorn_momentum_update(
    problem: Problem, inputs: Inputs, profile: Mapping[str, Any]
) -> dict[Any, Expected]:
    """`tilekernels.engram.engram_sinkhorn_momentum_update`, in place on momentum_buffer.

    m = beta1 * momentum_buffer + (1 - beta1) * grad in fp32, stored in the buffer's format; the result is
    beta1 * m + (1 - beta1) * grad with the m that was not rounded (nesterov), or m. Each step is a combination of
    two numbers with weights that add up to 1, so nothing overflows that its operands do not. Bound: two products and
    a sum, with or without FMA, and one fp32 unit for whether beta1 was rounded before 1 - beta1 was formed.

    Arguments (default): beta1 (0.9), nesterov (True). Inputs: grad and momentum_buffer (n,), each bf16 or fp32.
    Outputs: momentum_buffer, update fp32 (n,). Profile: subnormals.
    """
    beta, tiny = argument(problem, "beta1", 0.9), underflow(profile)
    grad, before = inputs.real("grad").astype(np.float64), inputs.real("momentum_buffer").astype(np.float64)
    with np.errstate(invalid="ignore"):
        m, m_error = _blend(beta, before, 0.0, grad, tiny)
        update, error = _blend(beta, m, m_error, grad, tiny) if argument(problem, "nesterov", True) else (m, m_error)
        fmt = inputs.format("momentum_buffer")
        stored = m_error if fmt == "fp32" else rounded(m, m_error, fmt)
    return {"momentum_buffer": Within(m, stored), "update": Within(update, error)}


def _blend(beta: float, m: Array, m_error: Any, grad: Array, tiny: float) -> tuple[Array, Array]:
    """beta * m + (1 - beta) * grad, and how far fp32 may be from it where m is off by m_error."""
    size = np.abs(beta * m) + np.abs((1 - beta) * grad)
    error = beta * m_error + gamma(3, U32) * (size + beta * m_error) + U32 * np.abs(grad) + 3 * tiny
    return beta * m + (1 - beta) * grad, error


def engram_sinkhorn_step(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[Any, Expected]:
    """`tilekernels.engram.engram_sinkhorn_step`, in place on row_scale, and `engram_sinkhorn_step_reduce` after it.

    Z = row_scale * matrix * col_scale. row_norm is the Euclidean norm of each row of Z; row_scale is divided by
    row_norm + eps; of Z with the new row_scale the squares are summed down each column. How these sums are shared
    out among partial sums is free: what the second call makes of them is judged. Every sum is one of squares, so
    its error is relative, gamma of its length. A row whose squares leave the range of fp32 is unspecified, and with
    it every column.

    Arguments (default): eps (1e-8). Inputs, all fp32: step/matrix (R, D), step/row_scale (R,) and step/col_scale
    (D,), the scales positive and of moderate size. Outputs, fp32: step/row_scale and step/row_norm (R,),
    reduce/col_sumsq (D,). Profile: subnormals.
    """
    eps, tiny = argument(problem, "eps", 1e-8), underflow(profile)
    before, matrix = inputs.real("step/row_scale").astype(np.float64), inputs.real("step/matrix").astype(np.float64)
    columns = inputs.real("step/col_scale").astype(np.float64)
    rows, n = matrix.shape
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        z = before[:, None] * matrix * columns
        squares = np.square(z).sum(axis=1)
        off = squares * gamma(n + 2 * _PRODUCTS + 1, U32) + 4 * n * tiny
        norm = np.sqrt(squares)
        norm_off = np.maximum(np.sqrt(squares + off) - norm, norm - np.sqrt(np.maximum(squares - off, 0)))
        norm_off = norm_off + function("sqrt") * (norm + norm_off)
        after = before / (norm + eps)
        relative = (norm_off / (norm + eps) + gamma(2, U32)) * (1 + 2 * _HOPELESS) + function("divide")
        relative = np.where(np.isinf(norm), 0.0, relative)  # a row with an infinity gets the scale 0
        free = np.isfinite(squares) & (relative > _HOPELESS)
        free |= np.isfinite(matrix).all(axis=1) & (squares + off >= codec.overflow_threshold("fp32"))
        scaled = after[:, None] * matrix * columns
        each = 2 * (relative + gamma(_PRODUCTS, U32)) * (1 + _HOPELESS) + U32
        sums = np.square(scaled).sum(axis=0)
        sums_off = (np.square(scaled) * each[:, None]).sum(axis=0)
        sums_off = sums_off + gamma(rows, U32) * (sums + sums_off) + 4 * rows * tiny
    return {
        "step/row_norm": _where(norm, norm_off + tiny, free),
        "step/row_scale": _where(after, np.abs(after) * relative + tiny, free),
        "reduce/col_sumsq": _where(sums, sums_off, np.full(sums.shape, free.any())),
    }


def _where(value: Array, bound: Array, free: Array) -> Within:
    return Within(np.where(free, 0.0, value), np.where(free, 0.0, bound), free if free.any() else None)
