"""What repeated times say: an interval, whether it is narrow enough, and whether two runs differ.

A block is the median of samples taken in one go. Blocks, not samples, are what the spread is
taken from: samples of a block share a clock rate and a state of the caches. All is computed on
logarithms, since noise of a time is a factor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

LEVEL = 0.95
UNSTABLE = 0.07
"""half-width of an interval, as a share of the time, from which on a time is called unstable"""
PROCESS_MATTERS = 0.05
"""error probability at which blocks of two processes are told to differ by more than blocks of one"""
LEAST_SLOWDOWN = 0.03
"""a change that is smaller is told of no two runs, however sure it is"""


@dataclass(frozen=True)
class Block:
    """The median of the samples of one block, in seconds, and which executor it was taken in."""

    executor: int
    median_s: float


@dataclass(frozen=True)
class Interval:
    """A time in seconds with its two-sided 95 % interval."""

    time_s: float
    low_s: float
    high_s: float
    blocks: int
    executors: int
    process_spread: bool = False
    """whether executors differed by more than their blocks did: then their means are what was measured"""

    @property
    def half_width(self) -> float:
        """Half of the interval as a share of the time."""
        return math.sqrt(self.high_s / self.low_s) - 1 if self.low_s > 0 else math.inf

    @property
    def unstable(self) -> bool:
        return not self.half_width <= UNSTABLE


def interval(blocks: Sequence[Block], spread: float | None = None, df: int = 0) -> Interval:
    """The time that blocks agree on. Needs two blocks at least; raises ValueError below.

    spread, df: standard deviation of a block's logarithm and its degrees of freedom, where a first stage has settled
    them (`more_blocks`); else both come from the blocks.
    """
    if len(blocks) < 2:
        msg = f"an interval needs two blocks at least, got {len(blocks)}"
        raise ValueError(msg)
    logs = np.log([b.median_s for b in blocks])
    by_executor = _groups(blocks)
    if spread is None:
        spread, df = float(np.std(logs, ddof=1)), len(logs) - 1
    half = t_quantile(0.5 + LEVEL / 2, df) * spread / math.sqrt(len(logs))
    mean, wide = float(np.mean(logs)), False
    if _process_matters(by_executor):
        means = [float(np.mean(g)) for g in by_executor]
        own = t_quantile(0.5 + LEVEL / 2, len(means) - 1) * float(np.std(means, ddof=1)) / math.sqrt(len(means))
        if own > half:
            mean, half, wide = float(np.mean(means)), own, True
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(blocks), len(by_executor), wide)


def more_blocks(blocks: Sequence[Block], most: int, target: float = UNSTABLE) -> tuple[int, float, int]:
    """(blocks in all, spread, degrees of freedom) after a first stage: how many blocks make the interval narrow enough.

    Stein's two stages (Ann. Math. Statist. 16, 1945): with the spread of the first stage kept, the interval over all
    blocks covers what it promises, which looking again and again until it is narrow would not.
    """
    logs = np.log([b.median_s for b in blocks])
    spread, df = float(np.std(logs, ddof=1)), len(logs) - 1
    wanted = math.ceil((t_quantile(0.5 + LEVEL / 2, df) * spread / math.log1p(target)) ** 2)
    return max(len(blocks), min(most, wanted)), spread, df


def _groups(blocks: Sequence[Block]) -> list[list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for b in blocks:
        found[b.executor].append(math.log(b.median_s))
    return list(found.values())


def _process_matters(groups: Sequence[Sequence[float]]) -> bool:
    """Whether means of groups differ by more than the spread inside them explains (F test)."""
    n, k = sum(map(len, groups)), len(groups)
    if k < 2 or n == k:
        return False
    grand = sum(map(sum, groups)) / n
    between = sum(len(g) * (sum(g) / len(g) - grand) ** 2 for g in groups) / (k - 1)
    within = sum((x - sum(g) / len(g)) ** 2 for g in groups for x in g) / (n - k)
    if within == 0:
        return between > 0
    return f_tail(between / within, k - 1, n - k) < PROCESS_MATTERS


@dataclass(frozen=True)
class Change:
    """How many times as long B takes as A, with a two-sided 90 % interval: each side is a test at 5 %."""

    ratio: float
    low: float
    high: float

    @property
    def slower(self) -> bool:
        return self.low > 1 and self.ratio >= 1 + LEAST_SLOWDOWN

    @property
    def faster(self) -> bool:
        return self.high < 1 and self.ratio <= 1 / (1 + LEAST_SLOWDOWN)

    def sentence(self) -> str:
        word = "slower" if self.slower else "faster" if self.faster else "as fast"
        return f"{word}: {self.ratio:.3f} times the time [{self.low:.3f}, {self.high:.3f}]"


def change(a_s: Sequence[float], b_s: Sequence[float]) -> Change:
    """Compare the block medians of two runs (Welch's test on logarithms). Two blocks a side at least."""
    if min(len(a_s), len(b_s)) < 2:
        msg = f"a comparison needs two blocks a side at least, got {len(a_s)} and {len(b_s)}"
        raise ValueError(msg)
    a, b = np.log(a_s), np.log(b_s)
    va, vb = float(np.var(a, ddof=1)) / len(a), float(np.var(b, ddof=1)) / len(b)
    moved = float(np.mean(b) - np.mean(a))
    if va + vb == 0:
        return Change(math.exp(moved), math.exp(moved), math.exp(moved))
    df = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    half = t_quantile(LEVEL, df) * math.sqrt(va + vb)
    return Change(math.exp(moved), math.exp(moved - half), math.exp(moved + half))


def rank_share(value: float, others: Sequence[float]) -> float:
    """Where a value stands among others, between 0 and 1; each place is as likely where it is one like them."""
    below = sum(o < value for o in others) + sum(o == value for o in others) / 2
    return (below + 0.5) / (len(others) + 1)


def all_high(shares: Sequence[float]) -> float:
    """The probability that so many places in (0, 1), all as likely, add up to as much (Irwin and Hall)."""
    n, missing = len(shares), len(shares) - math.fsum(shares)
    terms = ((-1) ** k * math.comb(n, k) * (missing - k) ** n for k in range(math.floor(missing) + 1))
    return min(max(math.fsum(terms) / math.factorial(n), 0.0), 1.0)


@lru_cache(maxsize=256)
def t_quantile(p: float, df: float) -> float:
    """The p-quantile of Student's t, p in [0.5, 1), by bisection; good to 1e-9."""
    def below(t: float) -> float:
        return 1 - 0.5 * incomplete_beta(df / 2, 0.5, df / (df + t * t))

    low, high = 0.0, 2.0
    while below(high) < p:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        mid = (low + high) / 2
        low, high = (mid, high) if below(mid) < p else (low, mid)
    return (low + high) / 2


def f_tail(f: float, d1: float, d2: float) -> float:
    """The probability that an F variable exceeds f."""
    return incomplete_beta(d2 / 2, d1 / 2, d2 / (d2 + d1 * f))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by Lentz's continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    h = d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            h *= d * c
        if abs(d * c - 1) < 1e-14:
            break
    return front * h
