"""Real-valued data too large to be judged whole: some rows, columns and tiles are, element by element.

The rows and columns are those beside the edges of the kernel's tiles, so that every tile is crossed four times or more;
what goes wrong for a whole tile can't hide. The rest is drawn at random. What this can't see is told by
`smallest_detectable`; exact data and `projection` see it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from references.bounds import gemm
from references.bounds.basic import magnitude
from references.expected import Within
from references.formats import codec
from references.large.exact import below, words

Array = np.ndarray

_ROWS, _COLUMNS, _TILES = 201, 202, 203
_BLOCK_ELEMENTS = 1 << 22
"""32 MiB of float64, of which there are about three"""


@dataclass(frozen=True)
class Plan:
    """What of C [m, n] is judged: whole rows, whole columns (int64, rising) and tiles of a grid, as grid positions."""

    m: int
    n: int
    tile: tuple[int, int]
    rows: Array
    columns: Array
    tiles: Array
    """int64 [t, 2], all different"""

    def spans(self) -> Iterator[tuple[range, range]]:
        """The rows and columns of each tile."""
        for i, j in self.tiles.tolist():
            yield (range(i * self.tile[0], min((i + 1) * self.tile[0], self.m)),
                   range(j * self.tile[1], min((j + 1) * self.tile[1], self.n)))

    @property
    def judged(self) -> int:
        """How many different elements."""
        total = self.m * self.n - (self.m - len(self.rows)) * (self.n - len(self.columns))
        for down, across in self.spans():
            total += _free(self.rows, down) * _free(self.columns, across)
        return total


def _free(taken: Array, span: range) -> int:
    return len(span) - int(np.searchsorted(taken, span.stop) - np.searchsorted(taken, span.start))


def sample_plan(m: int, n: int, tile: tuple[int, int], seed: int, count: int) -> Plan:
    """First and last row and column, the three around every edge of a tile, and `count` random rows, columns and tiles.

    tile: (rows, columns) of the kernel's output tiles. The first and the last tile are always among the tiles.
    Raises ValueError for a tile without elements or a negative count.
    """
    if min(tile) < 1 or count < 0:
        msg = f"no sample with tiles of {tile} and {count} at random"
        raise ValueError(msg)
    if not m or not n:
        none = np.zeros(0, np.int64)
        return Plan(m, n, tile, none, none, np.zeros((0, 2), np.int64))
    grid = (-(-m // tile[0]), -(-n // tile[1]))
    cells = np.concatenate([[0, grid[0] * grid[1] - 1], _random(seed, _TILES, grid[0] * grid[1], count)])
    return Plan(m, n, tile, _lines(m, tile[0], seed, _ROWS, count), _lines(n, tile[1], seed, _COLUMNS, count),
                np.stack(np.divmod(np.unique(cells), grid[1]), axis=1).astype(np.int64))


def _random(seed: int, stream: int, size: int, count: int) -> Array:
    return below(words(seed, stream, np.arange(count)), size)


def _lines(size: int, tile: int, seed: int, stream: int, count: int) -> Array:
    edges = np.arange(tile, size, tile, dtype=np.int64)
    lines = np.concatenate([[0, size - 1], edges - 1, edges, edges + 1, _random(seed, stream, size, count)])
    return np.unique(lines[lines < size]).astype(np.int64)


@dataclass(frozen=True)
class Sampled:
    """The verdict on the elements of a plan.

    wrong: int64 [w, 2], places of the wrong ones, rising. worst: largest error over bound, infinite where an error
    can't be measured by it. worst_at: its place, None where every judged element is exact.
    """

    judged: int
    wrong: Array
    worst: float
    worst_at: tuple[int, int] | None

    @property
    def ok(self) -> bool:
        return not len(self.wrong)


def check_sampled(
    a: Array, b: Array, c: Array, plan: Plan, *, out: str, a_format: str = "bf16", b_format: str = "bf16",
    exchangeable: bool = False, **dot: Any,
) -> Sampled:
    """Judges the plan's elements of C = A B^T by the bound of `bounds.gemm.dense`, each product in float64.

    a [m, k], b [n, k], c [m, n]: codes. exchangeable: the order along k is random, so that partial sums are bounded by
    chance (see `bounds.basic.magnitude`). dot: further arguments of `bounds.basic.dot` (accumulator, splits, ...).
    Sums are taken to stay below fp32's overflow.
    Memory beside the arguments: some 100 MiB and the decoded rows of the plan, 8 k bytes each.
    Raises ValueError for shapes that do not fit the plan and for NaN or infinities in A or B.
    """
    if c.shape != (plan.m, plan.n) or (len(a), len(b)) != c.shape or a.shape[1] != b.shape[1]:
        msg = f"a {a.shape}, b {b.shape} and c {c.shape} do not fit a plan for {(plan.m, plan.n)}"
        raise ValueError(msg)
    wrong, worst, worst_at = [np.zeros((0, 2), np.int64)], 0.0, None
    for rows, columns in _regions(plan, a.shape[1]):
        left, right = _real(a[rows], a_format), _real(b[columns], b_format)
        value = left @ right.T
        square = np.square(left) @ np.square(right).T if exchangeable else None
        size = magnitude(np.abs(left) @ np.abs(right).T, value if exchangeable else None, square)
        judged = Within(value, gemm.dense(value, size, a.shape[1], out, **dot)).judge(c[np.ix_(rows, columns)], out)
        at = np.argwhere(judged.bad)
        wrong.append(np.stack([rows[at[:, 0]], columns[at[:, 1]]], axis=1))
        if judged.ratio is not None and judged.ratio.max(initial=0) > worst:
            i, j = np.unravel_index(int(judged.ratio.argmax()), judged.ratio.shape)
            worst, worst_at = float(judged.ratio[i, j]), (int(rows[i]), int(columns[j]))
    return Sampled(plan.judged, np.unique(np.concatenate(wrong), axis=0), worst, worst_at)


def _regions(plan: Plan, k: int) -> Iterator[tuple[Array, Array]]:
    """Rows and columns of each piece of work: the plan's lines against blocks of the other operand, then its tiles."""
    step = max(1, _BLOCK_ELEMENTS // max(k, 1))
    other = np.setdiff1d(np.arange(plan.m), plan.rows, assume_unique=True)
    for start in range(0, plan.n, step):
        yield plan.rows, np.arange(start, min(start + step, plan.n))
    for start in range(0, len(other), step):
        yield other[start : start + step], plan.columns
    for down, across in plan.spans():
        yield np.setdiff1d(down, plan.rows), np.setdiff1d(across, plan.columns)


def _real(codes: Array, fmt: str) -> Array:
    values = np.asarray(codec.decode(codes, fmt), np.float64)
    if not np.isfinite(values).all():
        msg = "sampled rows are judged for finite data only"
        raise ValueError(msg)
    return values


@dataclass(frozen=True)
class Detectable:
    """Errors of more than `multiple` bounds in `elements` elements at random places are found with `probability`."""

    multiple: float
    elements: int
    probability: float


def smallest_detectable(plan: Plan, probability: float = 0.999) -> tuple[Detectable, Detectable]:
    """How few wrong elements the sample finds with a probability, for errors of two sizes.

    An element is wrong if it is further from the exact value than its bound. A fault that moves it by more than twice
    the bound always does that, as a correct result is within the bound. One that moves it by more than one bound does
    it at least where it goes the way the rounding error went: every second time, if signs of errors are fair.
    So N wrong elements at random places, of which a share s is judged, go unseen with at most (1 - s)**N or
    (1 - s / 2)**N. Raises ValueError where the plan is empty or the probability not between 0 and 1.
    """
    if not plan.judged or not 0 < probability < 1:
        msg = f"{plan.judged} judged elements find nothing with probability {probability}"
        raise ValueError(msg)
    share = plan.judged / (plan.m * plan.n)
    return tuple(Detectable(multiple, _enough(share * seen, probability), probability)  # type: ignore[return-value]
                 for multiple, seen in ((2.0, 1.0), (1.0, 0.5)))


def _enough(share: float, probability: float) -> int:
    return 1 if share >= probability else math.ceil(math.log(1 - probability) / math.log1p(-share))


def touched(plan: Plan, height: int, width: int) -> float:
    """Probability that a rectangle at a random place in C meets a row or a column of the plan (tiles not counted)."""
    return 1.0 - _missed(plan.rows, plan.m, height) * _missed(plan.columns, plan.n, width)


def _missed(lines: Array, size: int, width: int) -> float:
    """Share of the windows of this width that hold none of the lines."""
    held = np.zeros(size + 1, np.int64)
    held[lines + 1] = 1
    before = np.cumsum(held)
    return float(np.mean(before[width:] == before[: size + 1 - width]))
