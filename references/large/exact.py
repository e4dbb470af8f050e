"""Whole numbers whose product every kernel that sums in fp32 must get bit for bit, whatever its order.

C[m, n] = A[m, k] B[n, k]^T. Column q of the first half of A and B has a mate in the second half, at a random place:
a is the same there, and b is turned round and off by a little e, so that a b + a (e - b) = a e:

    first half:  a = x,  b = y        x in 1..8, y in 2..9
    second half: a = x,  b = e - y    e = 0 but at a few places a row, and always below y

With h pairs, C is X E^T and as small as the output needs it, while partial sums in natural order reach 24 h. Both
factors of a column have one more sign, drawn for the column. What follows from it:

- No factor is 0. For one element of C all products of the first half are positive and all of the second negative, so
  leaving out any columns of one half, be it one, moves *every* element by at least 1.
- |C| < 2**p of an output of p significand bits, so a result that is off by at least 1 before it is rounded is
  wrong after it: whole numbers up to 2**p are held exactly, and rounding keeps the order.
- sum |a b| < 2**24, so fp32 holds every partial sum exactly, in any order, also where addends are aligned and cut.

Of odd k the last column stands alone and adds -x. Every value depends on seed, row and column alone: rows can be made
in any pieces.
"""

from __future__ import annotations

import numpy as np

from references.formats import codec
from references.formats.spec import float_spec

Array = np.ndarray

LARGEST_A, LARGEST_B = 8, 15
MAX_K = (2**24 - 1) // (LARGEST_A * LARGEST_B)
"""longest k whose sum of |products| stays below 2**24, the whole numbers that fp32 holds"""

PRIME = 4194301
"""2**22 - 3, the modulus of the projections: errors of C have to stay below it"""

_STEPS = ((2**8, (1, -1)), (2**16, (-1, -2)), (2**32, (-1, -2, -3, -4, -5, -6)))
"""what e may be, all alike, up to which `limit`: of one sign where C shall need more bits than a narrower output has"""
_BLOCK_ROWS = 256

_MASK = 2**64 - 1
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_X, _Y, _E, _SIGN, _MATE = range(1, 6)
"""streams of random words: what each is for"""


def words(seed: int, stream: int, index: Array) -> Array:
    """64 random bits, uint64, for each index (uint64); they depend on seed, stream and index alone.

    Counter-based: splitmix64's finalisation (Steele, Lea and Flood 2014), of the seed and then of the counter.
    """
    start = _finish(np.array([(seed + stream * _MIX2) & _MASK], np.uint64))
    with np.errstate(over="ignore"):
        return _finish((index.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + start)


def _finish(z: Array) -> Array:
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
        return z ^ (z >> np.uint64(31))


def below(random: Array, bound: Array | int) -> Array:
    """int64 in 0..bound-1 from the high 32 bits of words; bounds up to 2**31, biased by at most bound / 2**32."""
    return (((random >> np.uint64(32)) * np.asarray(bound, np.uint64)) >> np.uint64(32)).astype(np.int64)


def limit(out_format: str) -> int:
    """Largest |C| that may be asked of an output: exact in the format with a whole step to spare, and below PRIME / 2.

    bf16 255, fp16 2047, fp32 and int32 2097150 (the prime's half; fp32 itself would go up to 2**24 - 1).
    Raises KeyError for an unknown format, ValueError for one that has no sign or ends below 15.
    """
    spec, dtype = float_spec(out_format), codec.storage(out_format)
    held = 2**spec.p - 1 if spec else int(np.iinfo(dtype).max) if dtype.kind == "i" else 0
    if held < LARGEST_B:
        msg = f"{out_format} holds too few whole numbers"
        raise ValueError(msg)
    return min(held, (PRIME - 1) // 2)


def exact_rows(side: str, rows: range, k: int, out_format: str, seed: int) -> Array:
    """Some rows of one operand: int8 [len(rows), k], of A (side "a") or of B (side "b"). The data family.

    out_format: of C; it decides how sparse e is. Raises ValueError for another side, a k above MAX_K
    or an output that `limit` refuses, KeyError for an unknown format.
    """
    if side not in ("a", "b") or not 0 <= k <= MAX_K:
        msg = f"no exact data for side {side!r} and k = {k}; sides are a and b, k at most {MAX_K}"
        raise ValueError(msg)
    h = k // 2
    values = np.empty((len(rows), k), np.int8)
    if side == "a":
        x = _x(rows, k, seed)
        values[:, :h], values[:, h : 2 * h], values[:, 2 * h :] = x[:, :h], x[:, _mates(h, seed)], x[:, h : k - h]
    else:
        y = _small(rows, h, seed, _Y) + np.int8(2)
        at, few = _sparse(rows, k, out_format, seed)
        e = np.zeros_like(y)
        np.put_along_axis(e, at, few, axis=1)
        values[:, :h], values[:, h : 2 * h], values[:, 2 * h :] = y, (e - y)[:, _mates(h, seed)], -1
    values *= _signs(k, seed)
    return values


def exact_operands(m: int, n: int, k: int, out_format: str, seed: int, in_format: str = "bf16") -> tuple[Array, Array]:
    """Codes of A [m, k] and B [n, k] in in_format, which has to hold the whole numbers up to 15 (bf16, fp16, fp32,
    e4m3, int8). Made in blocks of rows, so that nothing but the codes is large.

    Raises ValueError where in_format does not hold them, and as `exact_rows`; KeyError for an unknown format.
    """
    whole = np.arange(-LARGEST_B, LARGEST_B + 1).astype(np.float64)
    table = codec.encode(whole, in_format)
    if not np.array_equal(codec.decode(table, in_format), whole):
        msg = f"{in_format} does not hold the whole numbers up to {LARGEST_B}"
        raise ValueError(msg)
    out = []
    for side, count in (("a", m), ("b", n)):
        codes = np.empty((count, k), table.dtype)
        for start in range(0, count, _BLOCK_ROWS):
            rows = range(start, min(start + _BLOCK_ROWS, count))
            codes[start : rows.stop] = table[exact_rows(side, rows, k, out_format, seed) + np.int8(LARGEST_B)]
        out.append(codes)
    return out[0], out[1]


def exact_product(m: int, n: int, k: int, out_format: str, seed: int) -> Array:
    """C [m, n] in codes of out_format, from X and E alone: no product of the operands is formed.

    It knows how the operands were made and so must never judge a kernel; it is a cheap right answer to plant
    errors in. One addition for each e that is not 0: 31 an element for bf16, 127 for fp16, k / 2 for fp32.
    """
    h = k // 2
    codes = np.empty((m, n), codec.storage(out_format))
    at, e = _sparse(range(n), k, out_format, seed)
    for start in range(0, m, _BLOCK_ROWS):
        rows = range(start, min(start + _BLOCK_ROWS, m))
        x = np.ascontiguousarray(_x(rows, k, seed).T)
        total = np.zeros((n, len(rows)), np.int16 if limit(out_format) < 2**14 else np.int32)
        for group in range(at.shape[1]):
            total += x[at[:, group]] * e[:, group, None]
        if k % 2:
            total -= x[h]
        codes[start : rows.stop] = codec.encode(total.T.astype(np.float64), out_format)
    return codes


def _small(rows: range, columns: int, seed: int, stream: int) -> Array:
    """int8 in 0..7; a word holds eight columns, the first one lowest."""
    each = -(-columns // 8)
    index = np.add.outer(np.arange(rows.start, rows.stop, dtype=np.uint64) * np.uint64(each),
                         np.arange(each, dtype=np.uint64))
    octets = words(seed, stream, index).astype("<u8").view(np.uint8).reshape(len(rows), 8 * each)
    return (octets[:, :columns] & np.uint8(7)).view(np.int8)


def _x(rows: range, k: int, seed: int) -> Array:
    """x of the pairs and, of odd k, of the column that stands alone: int8 [rows, (k + 1) // 2]."""
    return _small(rows, (k + 1) // 2, seed, _X) + np.int8(1)


def _mates(h: int, seed: int) -> Array:
    """Which pair each column of the second half belongs to."""
    return np.argsort(words(seed, _MATE, np.arange(h)), kind="stable")


def _signs(k: int, seed: int) -> Array:
    return np.where(words(seed, _SIGN, np.arange(k)) & np.uint64(1), np.int8(-1), np.int8(1))


def _sparse(rows: range, k: int, out_format: str, seed: int) -> tuple[Array, Array]:
    """Where e is not 0 and what it is: int64 and int8 [rows, s]; the pairs in s parts, one place in each part."""
    h, most = k // 2, limit(out_format)
    steps = np.array(next(e for held, e in _STEPS if most <= held), np.int8)
    s = min(h, (most - LARGEST_A * (k % 2)) // (LARGEST_A * int(np.abs(steps).max())))
    starts = np.arange(s + 1, dtype=np.int64) * h // max(s, 1)
    index = np.add.outer(np.arange(rows.start, rows.stop, dtype=np.uint64) * np.uint64(max(s, 1)),
                         np.arange(s, dtype=np.uint64))
    random = words(seed, _E, index)
    e = steps[(random & np.uint64(0xFFFFFFFF)) % np.uint64(len(steps))]
    return starts[:-1] + below(random, np.diff(starts)), e
