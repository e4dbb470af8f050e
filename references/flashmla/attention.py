"""Attention of one token's heads over a list of rows, with the errors that are allowed. K and V are the same rows.

The bounds of `bounds.attention` hold to first order; here they are given the exact
growth of each weight instead, so that large logits, whose errors are not small, stay covered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from references.bounds import attention
from references.bounds import profile as profiles
from references.bounds.constants import PROBABILITIES, SPREAD_SCORES, SPREAD_WEIGHTS, U32
from references.bounds.scatter import AttentionScatter, attention_scatter
from references.expected import Array
from references.flashmla.grid import rounded_once

_TINY = 2.0**-120
"""What flushing in single precision may cost, with room for factors of a few powers of two."""
_LARGEST = 2.0**120
"""Sums beyond this may overflow single precision on the way."""
_LOWEST_MAX = -1e30
"""First running maximum of a kernel: a list whose logits all lie below counts as empty for it."""
_BLOCK = 16
"""The smallest block of keys after which a kernel rescales."""
_HALF = 0.5
_LAG = 8.0
"""A kernel may keep its running maximum while it grows by less (6 in natural units is published)."""
_TIED = 2.0**-12
"""Logits this close to the largest give a P that rounds to 1 in every format."""


@dataclass(frozen=True)
class Rules:
    """How a backend computes, from its numerics profile (`bounds.profile`): format of P, what the row sum adds.

    random: the data are random, so that the rounding errors of P are independent of V.
    """

    p: str = "bf16"
    l_from: str = "fp32"
    random: bool = False

    @classmethod
    def of(cls, profile: Mapping[str, Any], *, random: bool = False) -> Rules:
        full = profiles.resolve(profile)
        return cls(full["p"], full["l_from"], random)


@dataclass(frozen=True)
class Attended:
    """Of one token: out [h, d] float64, lse and top (largest logit) [h]; each with its bound.

    free: [h], heads of which the contract says nothing (single precision overflows on
    the way, or the lowest running maximum is not reached); top_free, lse_free the same of
    one output (a maximum may drop NaN; a logit of +inf).
    """

    out: Array
    out_bound: Array
    lse: Array
    lse_bound: Array
    top: Array
    top_bound: Array
    free: Array
    top_free: Array
    lse_free: Array
    scatter: AttentionScatter | None = None
    """of the errors of out, where the data are random"""


def empty(heads: int, dim: int) -> Attended:
    """A token with no row to attend: out 0, lse +inf, largest logit -inf."""
    none, zero = np.zeros(heads, bool), np.zeros(heads)
    return Attended(np.zeros((heads, dim)), np.zeros((heads, dim)), np.full(heads, np.inf), zero,
                    np.full(heads, -np.inf), zero, none, none, none)  # fmt: skip


def attend(
    q: Array, rows: Array, scale: float, sink: Array | None, rules: Rules, *, slack: float = 0.0, repeats: int = 1
) -> Attended:
    """q [h, d], rows [n, d] float64 (one a list entry, repeated entries repeated), sink [h] or None.

    z = scale * q . k; lse = ln sum exp z; out = sigmoid(lse - sink) * sum exp(z - lse) * v.
    Natural units; the sink is not part of lse. slack: absolute error that every element of
    rows and of q may have. repeats: how often the list names one row at most.
    """
    n, dim = rows.shape
    if n == 0:
        return empty(q.shape[0], dim)
    with np.errstate(all="ignore"):
        z = scale * (q @ rows.T)
        # Of the finite numbers: also beside an infinity a partial sum may overflow.
        linear = abs(scale) * (_finite(np.abs(q)) @ _finite(np.abs(rows)).T)
        top = z.max(axis=1)
        p = np.exp(z - top[:, None])
        weight = p / p.sum(axis=1, keepdims=True)
        lse = top + np.log(p.sum(axis=1))
        out = weight @ rows

        # Partial sums of q . k: in an order that does not depend on the data within 3 root mean squares of z.
        root = abs(scale) * np.sqrt((q * q) @ (rows * rows).T)
        spread = np.maximum(_finite(np.minimum(root, (linear - np.abs(z)) / SPREAD_SCORES)), 0.0)
        inputs = slack * abs(scale) * (np.abs(q).sum(axis=1, keepdims=True) + np.abs(rows).sum(axis=1))
        error = attention.score_error(z, dim, spread, score_rounding=_finite(inputs))
        growth = np.expm1(np.minimum(error, 50.0))
        lse_bound = attention.lse(weight, lse, top, growth, p=rules.p, l_from=rules.l_from)
        other = _exponentials_and_sums(weight, rows, out, growth) + slack
        relative = _rounding_of_p(top[:, None] - z, error, rules.p)
        out_bound = other + _rounded_weights(weight, rows, out, relative, rules, repeats)
        factor = 1.0
        if sink is not None:
            grown = np.expm1(np.minimum(lse_bound, 50.0))
            out_bound = attention.with_sink(out, out_bound, lse, grown, sink) + _TINY * np.abs(out)
            factor = 1 / (1 + np.exp(sink - lse))[:, None]
            out = out * factor
        scatter = None
        if rules.random and rules.l_from == "fp32" and np.isfinite(out).all():
            scatter = attention_scatter(weight, rows, out, other, PROBABILITIES[rules.p], "bf16", repeats=repeats,
                                        factor=factor)
        out_bound = rounded_once(_finite(out), _finite(out_bound), "bf16")

        # No exponential has a part in the largest logit.
        alone = attention.score_error(z, dim, spread, exp_relative=0.0, score_rounding=_finite(inputs))
        finite = np.isfinite(z)
        free = (linear > _LARGEST).any(axis=1) | (np.abs(_finite(z)) > _LARGEST).any(axis=1) | (top < _LOWEST_MAX)
        near_top = finite & (z + alone >= (z - alone).max(axis=1, keepdims=True))
        top_bound = np.where(near_top, alone, 0.0).max(axis=1) + 4 * U32 * np.abs(top) + _TINY
        infinite = (z == np.inf).any(axis=1)  # exp(inf - inf): lse is NaN or +inf, out is NaN
    return Attended(out, out_bound, lse, lse_bound, top, _finite(top_bound), free,
                    free | np.isnan(z).any(axis=1), free | infinite, None if free.any() else scatter)  # fmt: skip


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)


def _exponentials_and_sums(weight: Array, rows: Array, out: Array, growth: Array) -> Array:
    """Error of sum w v by the exponentials, growth [h, n] relative, and by adding in single precision.

    The sum of the weights grows by at most b = sum w growth, so the quotient moves by
    (sum w growth |v| + b |out|) / (1 - b). Where b is not small: out is a mean of the same rows
    with other weights, never further away than any of them.
    """
    b = (weight * growth).sum(axis=1, keepdims=True)
    small = b < _HALF
    reach = np.abs(rows).max(axis=0) + np.abs(out)
    grown = np.where(small, growth / (1 - np.minimum(b, _HALF)), 0.0)
    bound = attention.output(weight, rows, out, grown, p="fp32", blocks=-(-len(rows) // _BLOCK))
    return bound + np.where(small, _TINY, 1.0) * reach


def _rounding_of_p(gap: Array, error: Array, p: str) -> Array:
    """[h, n] relative error of rounding P; gap = largest logit - z, error that of the logits.

    P is 1 at the largest logit and rounds to 1 beside it, which costs no more than its
    distance. That holds where the running maximum is the largest one: if all else lies so far
    below that no kernel keeps its maximum when the largest comes.
    """
    u = PROBABILITIES[p].u
    settled = ~((gap > _TIED) & (gap < _LAG)).any(axis=1, keepdims=True)
    return np.where(settled & (gap <= _TIED), np.minimum(u, gap + error), u)


def _rounded_weights(
    weight: Array, rows: Array, out: Array, relative: Array, rules: Rules, repeats: int
) -> Array:
    """Error of sum w v by rounding P: all agree at worst; of random data within 6 root mean squares.

    Entries of one row round alike: k of them have k times the variance of k that do not agree.
    """
    row = PROBABILITIES[rules.p]
    moved = weight * relative
    bound = moved @ np.abs(rows)
    if rules.random:
        square = weight * weight
        variance = square @ (rows * rows) - 2 * out * (square @ rows) + out * out * square.sum(axis=1, keepdims=True)
        likely = np.abs(out) + SPREAD_WEIGHTS * np.sqrt(repeats * np.maximum(variance, 0.0))
        bound = np.minimum(bound, row.u * likely)
    if rules.l_from == "rounded":
        bound = bound + np.abs(out) * moved.sum(axis=1, keepdims=True)
    return bound + row.absolute * np.abs(rows).sum(axis=0)
