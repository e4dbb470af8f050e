"""Whether C = A B^T holds in every element, at the price of a few passes over A, B and C.

Freivalds' check (1979) on whole numbers: with r random modulo a prime p, (C r) mod p has to equal (A (B^T r)) mod p.
An error e of one row of C that is not 0 modulo p gives a residue e.r that is uniform over the p residues, so one
projection misses it with probability 1/p and two with 1/p**2, 5.7e-14. An error is below p by force: |C| is at most
`exact.limit`, below p / 2, and what is read outside of that is wrong without any projection. Rows come from
projections from the right; if any is wrong, columns come from projections from the left.

Why it is exact: whole numbers of magnitude up to 2**53 are exact in float64, and so is any sum that stays there, in any
order and with fused operations. Residues are below 2**22 and max|a| max|b| k is below 2**24. A sum over k is thus below
2**46; one over 128 rows of an operand is below 2**24 * 2**22 * 2**7 = 2**53, and is reduced before the next 128; one
over columns of C is cut where limit * p * columns would reach 2**53. A correct C never fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from references.formats import codec
from references.large.exact import PRIME, limit, words

Array = np.ndarray

EXACT_F64, EXACT_F32 = 2.0**53, 2.0**24
_MOST_ROWS = 128
_BLOCK_ELEMENTS = 1 << 18
"""2 MiB of float64: a block stays in the cache from one step to the next"""
_RIGHT, _LEFT = 101, 102
_SETTLED = 64
"""elements outside of the limit that are computed, to see whether the data or the result is at fault"""


@dataclass(frozen=True)
class Located:
    """Rows and columns of C that hold a wrong element, int64 and rising; both empty where C is right.

    Wrong elements lie where one of the rows meets one of the columns, not at each such place: `examine` tells.
    """

    rows: Array
    columns: Array

    @property
    def ok(self) -> bool:
        return not self.rows.size and not self.columns.size


class _Whole:
    """An operand, read in blocks of rows as float64 whole numbers; the largest magnitude is kept."""

    def __init__(self, codes: Array, fmt: str, name: str) -> None:
        self.codes, self.fmt, self.name, self.largest = codes, fmt, name, 0.0

    def blocks(self) -> Iterator[tuple[slice, Array]]:
        """Raises ValueError at what is no whole number below 2**24."""
        for rows in _pieces(*self.codes.shape):
            block = np.asarray(codec.decode(self.codes[rows], self.fmt), np.float64)
            self.largest = max(self.largest, float(block.max(initial=0)), -float(block.min(initial=0)))
            if not (self.largest < EXACT_F32 and np.array_equal(block, np.rint(block))):  # NaN is not equal to itself
                msg = f"operand {self.name} is not made of whole numbers below 2**24: there is nothing exact to project"
                raise ValueError(msg)
            yield rows, block


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, min(_MOST_ROWS, _BLOCK_ELEMENTS // max(columns, 1)))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def project(
    a: Array, b: Array, c: Array, *, out: str, seed: int, a_format: str = "bf16", b_format: str = "bf16",
    most: int | None = None, count: int = 2, prime: int = PRIME,
) -> Located:
    """Where C differs from A B^T; for whole numbers in A and B with |A B^T| <= most, such as `exact_operands` makes.

    a [m, k], b [n, k], c [m, n]: codes of a_format, b_format and out. most: `exact.limit(out)` by default.
    seed: of the random vectors; it must not decide A, B or C in any other way than through `exact_operands`.
    count, prime: a wrong C is passed with probability at most prime**-count (times 1 + 2**-40, as 64 random bits
    are reduced), and with the same probability a wrong row or column goes unnamed.
    Memory beside the arguments: a few blocks of 2 MiB and vectors of m, n and k.
    Raises ValueError for shapes that do not fit, a prime that is not above twice `most`, operands that are not whole
    or so large that fp32 sums need not be exact, and where A B^T itself is seen to pass `most`.
    """
    most = limit(out) if most is None else most
    (m, k), (n, _) = a.shape, b.shape
    if b.shape[1] != k or c.shape != (m, n) or not 2 * most < prime <= 2**22:
        msg = f"a {a.shape}, b {b.shape}, c {c.shape} with |C| <= {most} can't be projected modulo {prime}"
        raise ValueError(msg)
    left, right = _Whole(a, a_format, "a"), _Whole(b, b_format, "b")
    rows, stray = _wrong_rows(left, right, c, _vectors(seed, _RIGHT, n, count, prime), out, most, prime)
    if not left.largest * right.largest * k < EXACT_F32:
        msg = f"with |a| <= {left.largest:g}, |b| <= {right.largest:g} and k = {k} sums in fp32 need not be exact"
        raise ValueError(msg)
    _settle(left, right, stray, most)
    if not rows.any():
        return Located(np.flatnonzero(rows), np.flatnonzero(rows))
    columns = _wrong_columns(left, right, c, _vectors(seed, _LEFT, m, count, prime), out, most, prime)
    return Located(np.flatnonzero(rows), np.flatnonzero(columns))


def examine(a: Array, b: Array, located: Located, *, a_format: str = "bf16", b_format: str = "bf16") -> Array:
    """What C has to be where located rows meet located columns: float64 [rows, columns], exact for exact data.

    Costs a product of that size: the caller hands in as many rows and columns as it wants to see.
    """
    part_a = np.asarray(codec.decode(a[located.rows], a_format), np.float64)
    return part_a @ np.asarray(codec.decode(b[located.columns], b_format), np.float64).T


def _vectors(seed: int, stream: int, length: int, count: int, prime: int) -> Array:
    """float64 [length, count], whole numbers in 0..prime-1."""
    index = np.arange(length * count, dtype=np.uint64)
    return (words(seed, stream, index) % np.uint64(prime)).astype(np.float64).reshape(length, count)


def _wrong_rows(
    a: _Whole, b: _Whole, c: Array, r: Array, out: str, most: int, prime: int
) -> tuple[Array, list[tuple[int, int]]]:
    """bool [m], and the first few elements that no right C could hold."""
    v = np.zeros((r.shape[1], a.codes.shape[1]))
    for at, block in b.blocks():
        v = (v + r[at].T @ block) % prime
    wrong, stray = np.zeros(len(c), bool), []
    expected = np.empty((len(c), r.shape[1]))
    for at, block in a.blocks():
        expected[at] = (block @ v.T) % prime
    for at, block, outside in _results(c, out, most):
        wrong[at] = (_times(block, r, most, prime) != expected[at]).any(axis=1)
        if outside is not None:
            wrong[at] |= outside.any(axis=1)
            room = _SETTLED - len(stray)
            stray += [(at.start + int(i), int(j)) for i, j in np.argwhere(outside)[:room]]
    return wrong, stray


def _wrong_columns(a: _Whole, b: _Whole, c: Array, s: Array, out: str, most: int, prime: int) -> Array:
    """bool [n]."""
    w = np.zeros((s.shape[1], a.codes.shape[1]))
    for at, block in a.blocks():
        w = (w + s[at].T @ block) % prime
    wrong = np.zeros(c.shape[1], bool)
    observed = np.zeros((s.shape[1], c.shape[1]))
    for at, block, outside in _results(c, out, most):
        observed = (observed + s[at].T @ block) % prime  # 128 rows of 2**21 times 2**22 stay below 2**53
        if outside is not None:
            wrong |= outside.any(axis=0)
    for at, block in b.blocks():
        wrong[at] |= ((block @ w.T) % prime != observed[:, at].T).any(axis=1)
    return wrong


def _results(c: Array, out: str, most: int) -> Iterator[tuple[slice, Array, Array | None]]:
    """Blocks of C as float64, with zeros for what is no whole number up to `most`, and where that was (None: nowhere).

    NaN, infinities, fractions and multiples of the prime are found here.
    """
    for at in _pieces(*c.shape):
        block = np.asarray(codec.decode(c[at], out), np.float64)
        with np.errstate(invalid="ignore"):
            good = np.abs(block) <= most
            good &= block == np.rint(block)
        if good.all():
            yield at, block, None
        else:
            yield at, np.where(good, block, 0.0), ~good


def _times(block: Array, r: Array, most: int, prime: int) -> Array:
    """(block r) mod prime, over so many columns at a time that float64 stays exact."""
    step = int(EXACT_F64) // (max(most, 1) * prime)
    total = np.zeros((len(block), r.shape[1]))
    for start in range(0, block.shape[1], step):
        total = (total + (block[:, start : start + step] @ r[start : start + step]) % prime) % prime
    return total


def _settle(a: _Whole, b: _Whole, stray: list[tuple[int, int]], most: int) -> None:
    """A result outside of the limit may be what A and B make: then the data are no exact data, and nobody is wrong."""
    for i, j in stray:
        value = examine(a.codes, b.codes, Located(np.array([i]), np.array([j])), a_format=a.fmt, b_format=b.fmt)
        if abs(value.item()) > most:
            msg = f"A B^T is {value.item():g} at ({i}, {j}), above the {most} that these data promise"
            raise ValueError(msg)
