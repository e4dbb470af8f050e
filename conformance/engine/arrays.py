"""Input arrays from a seed: integer and exact float steps only, so that no machine differs.

A frozen counter-based generator (splitmix64, Steele, Lea and Flood 2014) gives words; data
families turn words into values, and the codec rounds these once into codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from conformance.identity import seed_of
from conformance.model import Problem
from conformance.protocol import FORMATS
from references.formats import codec

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def words(seed: int, n: int) -> np.ndarray:
    """n words of 64 random bits; word i depends on the seed and i alone."""
    with np.errstate(over="ignore"):
        z = np.arange(1, n + 1, dtype=np.uint64) * _GOLDEN + np.uint64(seed & (2**64 - 1))
        z = (z ^ (z >> np.uint64(30))) * _MIX1
        z = (z ^ (z >> np.uint64(27))) * _MIX2
        return z ^ (z >> np.uint64(31))


@dataclass
class Draw:
    """What a family or a control array is made from."""

    name: str
    """argument"""
    position: int
    """which of the op's float arrays this is, from 0"""
    shape: tuple[int, ...]
    """in codes"""
    format: str
    problem: Problem
    seed: int
    rank: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    """sizes of this rank"""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """codes of the arguments declared before this one, same rank"""
    along: int = -1
    """axis along which families pair elements or single one out"""

    @cached_property
    def n(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def words(self, salt: int = 0, n: int | None = None) -> np.ndarray:
        return words(self.seed + 0x632BE59BD9B4E019 * salt, self.n if n is None else n)

    def integers(self, lo: int, hi: int, salt: int = 0) -> np.ndarray:
        """int64 in lo..hi (both in), of the array's shape; the span stays below 2^32."""
        w = self.words(salt) >> np.uint64(32)
        span = np.uint64(hi - lo + 1)
        return ((w * span) >> np.uint64(32)).astype(np.int64).reshape(self.shape) + lo

    def uniform(self, salt: int = 0) -> np.ndarray:
        """float64 in [0, 1), 53 bits."""
        return (self.words(salt) >> np.uint64(11)).astype(np.float64).reshape(self.shape) * 2.0**-53

    def normal(self, salt: int = 0) -> np.ndarray:
        """Near N(0, 1): the sum of eight 16-bit uniforms, exact up to its one scaling."""
        total = np.zeros(self.n, np.int64)
        for half in (2 * salt, 2 * salt + 1):
            w = self.words(1000 + half)
            for shift in (0, 16, 32, 48):
                total += ((w >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
        return ((2 * total - 8 * 65535) * (0.5 / 53510.0)).reshape(self.shape)


def array_seed(problem: Problem, key: str) -> int:
    return seed_of(problem.seed, key)


def encode(values: np.ndarray, fmt: str) -> np.ndarray:
    """Codes of values; what a format can't hold is clipped to its range, never NaN by accident."""
    if fmt == "bool":
        return values.astype(bool)
    dtype = np.dtype(FORMATS[fmt].codes)
    if np.issubdtype(dtype, np.integer) and fmt.startswith(("int", "uint")):
        info = np.iinfo(dtype)
        whole = np.nan_to_num(np.rint(values), nan=0.0)
        return np.clip(whole, max(info.min, -(2**53)), min(info.max, 2**53)).astype(dtype)
    return codec.encode(values, fmt)
