"""How the errors of a correct kernel scatter: what a largest allowed error of each element can't say.

A bound admits the worst order of additions, so an output that is cut instead of rounded, or a scale that is off by
a thousandth, may hide below it in every element. Together the elements tell: their errors, in units of what a correct
kernel's would be, have a root mean square of at most 1, no common direction, and no common factor.

Only for data drawn at random: then roundings are independent of each other. Every limit lies at least five standard
deviations above what a correct kernel shows, so one tensor in more than a million is rejected by chance; the engine
repeats such a finding on other data before it counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from references.bounds.constants import STATISTICS

Array = np.ndarray

TILE = 16
"""rows and columns of the blocks whose errors are looked at by themselves"""
WHOLE_SPREAD, PART_SPREAD = STATISTICS["whole_spread"].value, STATISTICS["part_spread"].value
SIGMAS, LEAST_FACTOR = STATISTICS["sigmas"].value, STATISTICS["least_factor"].value
NEAR_ZERO = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class Typical:
    """The scatter of a correct kernel's errors.

    deviation: standard deviation of each element's error, float64 of the output's shape (0: the element is not
        looked at). drift: largest mean error that a legal kernel may have in one direction, at each element or for
        all of them; 0 where every rounding is to nearest; None where errors share causes and a mean says nothing.
    rms: limit of the root mean square in units of deviation for an infinite number of elements.
    factor_deviation: standard deviation of <error, value> / <value, value>; None where errors are independent of
        each other, which gives it from `deviation`.
    least_factor: what the common factor may lie off 1 by, whatever the deviations and the drift; 0 where the drift
        holds all that functions may err by in one direction.
    rows: limits of the root mean square of single rows along the last axis, in units of deviation, of the output's
        shape without it; None: the blocks of 16 x 16 are looked at instead.
    """

    deviation: Array
    drift: Array | float | None = 0.0
    rms: float = STATISTICS["gemm_rms"].value
    factor_deviation: float | None = None
    rows: Array | None = None
    least_factor: float = LEAST_FACTOR

    def shaped(self, shape: tuple[int, ...]) -> Typical:
        """The same of an output whose leading axes are cut otherwise."""
        rows = None if self.rows is None else self.rows.reshape(shape[:-1])
        return replace(self, deviation=self.deviation.reshape(shape), rows=rows)

    def judged(self, error: Array, value: Array, mask: Array) -> tuple[str, dict[str, float]]:
        """(a sentence about the statistic furthest beyond its limit, empty where all hold; all of them by name).

        error = observed - value; mask: elements whose error is known and counts. All of the output's shape.
        """
        found = list(self.statistics(error, value, mask))
        beyond = [(seen / limit, said) for _, seen, limit, said in found if not seen <= limit]
        return max(beyond)[1] if beyond else "", {name: seen for name, seen, _, _ in found}

    def statistics(self, error: Array, value: Array, mask: Array) -> Iterator[tuple[str, float, float, str]]:
        """(name, what it is, its limit, what to say where it is beyond) of each."""
        mask = mask & (self.deviation > 0) & np.isfinite(value)
        n = int(np.count_nonzero(mask))
        if not n:
            return
        value, deviation = np.where(mask, value, 0.0), np.where(mask, self.deviation, 1.0)
        unit = np.where(mask, error, 0.0) / deviation
        square = unit * unit
        seen = float(np.sqrt(square.sum() / n))
        yield ("rms", seen, limit := self.rms + WHOLE_SPREAD / np.sqrt(2 * n), (
            f"the errors of {n} elements together are {seen:.3g} times as large as roundings on random data are; a "
            f"correct kernel stays below {limit:.3g}"))
        yield from self._parts(square, mask)
        yield from self._common(error, value, mask, unit, n)

    def _parts(self, square: Array, mask: Array) -> Iterator[tuple[str, float, float, str]]:
        if self.rows is not None:
            n = mask.sum(axis=-1)
            rms = np.sqrt(square.sum(axis=-1) / np.maximum(n, 1))
            limit = self.rows + PART_SPREAD / np.sqrt(2 * np.maximum(n, 1))
            where, name = "row", "row_rms"
        elif square.ndim == 2 and min(square.shape) >= TILE:
            rms, limit = _tiles(square, mask, self.rms)
            where, name = f"block of {TILE} x {TILE}", "block_rms"
        else:
            return
        if rms.size:
            at = np.unravel_index(int(np.argmax(rms / limit)), rms.shape)
            spot = [int(i) for i in at]
            yield (name, float(rms[at]), float(limit[at]), (
                f"the errors in {where} {spot} together are {rms[at]:.3g} times as large as roundings on random data "
                f"are; a correct kernel stays below {limit[at]:.3g}"))

    def _common(self, error: Array, value: Array, mask: Array, unit: Array, n: int) -> Iterator[
            tuple[str, float, float, str]]:
        drift = np.broadcast_to(0.0 if self.drift is None else self.drift, mask.shape)
        if self.drift is not None:
            mean = float((unit * np.sign(value)).sum() / n)
            allowed = float(np.where(mask, drift / np.where(mask, self.deviation, 1.0), 0.0).sum() / n)
            yield ("bias", abs(mean), limit := SIGMAS / np.sqrt(n) + allowed, (
                f"{n} results lie on the average {abs(mean):.3g} typical errors {'above' if mean > 0 else 'below'} "
                f"what they should be in magnitude; a correct kernel stays within {limit:.3g}"))
        scale = float(np.max(np.abs(value)))
        if scale < NEAR_ZERO:
            return
        known = value / scale
        power = float((known * known).sum())
        factor = float((np.where(mask, error, 0.0) / scale * known).sum()) / power
        spread = self.factor_deviation
        if spread is None:
            spread = float(np.sqrt(((np.where(mask, self.deviation, 0.0) / scale * known) ** 2).sum())) / power
        steady = float((np.where(mask, drift, 0.0) / scale * np.abs(known)).sum()) / power
        yield ("factor", abs(factor), limit := SIGMAS * spread + steady + self.least_factor, (
            f"all results together are {1 + factor:.6g} times what they should be; a correct kernel stays within "
            f"{limit:.2g} of 1"))


def _tiles(square: Array, mask: Array, rms: float) -> tuple[Array, Array]:
    """Root mean square of each block of `TILE` x `TILE`, and its limit; the last ones take in what is left over."""
    edges = [np.arange(0, max(n - TILE + 1, 1), TILE) for n in square.shape]
    total, count = (np.add.reduceat(np.add.reduceat(a, edges[0], axis=0), edges[1], axis=1)
                    for a in (np.where(mask, square, 0.0), mask.astype(np.float64)))
    count = np.maximum(count, 1)
    return np.sqrt(total / count), rms + PART_SPREAD / np.sqrt(2 * count)
