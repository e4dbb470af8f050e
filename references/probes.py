"""Probes that tell from the results of one matrix product how its sums were kept: the data, and how it is read.

Row i of A holds a large number 2**m[i] and a small one at fixed places; a column of B picks a few of these places, with
signs, and zeros elsewhere. Each sum cancels to a small number that BF16 holds exactly, so the rounding of the result
hides nothing. What is kept of `2**m + 1 - 2**m` is measured with 1 added after the first large number and, with all
signs turned, before it, so that a kernel that walks K backwards reads the same. After the probes of Fasi, Higham,
Mikaitis and Pranesh (Numerical behavior of NVIDIA tensor cores, 2021), for whole kernels with tiles and splits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray

M, N, K = 64, 64, 1024
"""of the one product"""
TRIPLES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "mid": ((0, 128, 255), (0, 127, 255)),
    "far": ((0, 128, 256), (0, 128, 384)),
    "near": ((0, 1, 1023),),
}
"""Places of large, small, large. mid: inside 256 columns; far: in three chunks; near: the small one beside a large one
and the other at the far end. Only far outlives an accumulator that is promoted after each chunk; of a few long splits
of K only near meets two. mid and far have two each, for a kernel may take even chunks before odd ones."""
WHOLE, PART = (1.0, -1.0), (0.75, -0.75)
"""small numbers: all of a last bit of the sum, and a part that rounding decides about (of the first triple alone)"""
SIGNS = (1.0, -1.0)
"""of the large number that a forward kernel meets first"""
EXTRA = 3
"""extra alignment bits that can be seen"""
_EXTRA_AT = 772
"""the large number among 2**e small ones of 2**-e; all stand in one block of 16, and for e < 3 in one of 8"""
WIDTHS = (2, 4, 8, 16, 32, 64, 128, 256)
_WIDTH_AT = 512
_END = 1023
_LARGE_PLACES = (0, 255, 256, 384, _EXTRA_AT, _END)

SUBNORMAL = {
    # column: (what is lost where it reads 0, places, exponents of the factors)
    "a": ("in", (300,), (-130, 10)),
    "b": ("in", (301,), (10, -130)),
    "product": ("out", (302,), (-70, -60)),
    "sum": ("out", tuple(range(304, 368)), (-64, -64)),
}
"""Of BF16: operands, a result, and 64 products below the normal range. Their sum is normal: it is kept or lost with
the products, whole or in part."""
OVERFLOW = {
    "sum": ((400, 127, 0, 1.0), (401, 127, 0, 1.0)),
    "cast": ((402, 127, 0, 1.9921875), (403, 119, 0, 1.5)),
    "product": ((404, 100, 100, 1.0),),
}
"""Of BF16: (place, exponents of the factors, significand). `cast` fits FP32 and no BF16."""


@dataclass(frozen=True)
class Probes:
    """One product. Values are exact in the operands' format.

    a: float64 [M, K], b: [N, K]. scale: [M], powers of two, of all of a row of a; those of b are 1. Sums of row i are
    read in units of unit[i], [M], 0 for rows without magnitude. m: exponents of the first rows; columns, rows: by name.
    """

    format: str
    m: Array
    unit: Array
    a: Array
    b: Array
    scale: Array
    columns: dict[tuple, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    @property
    def exact(self) -> Array:
        """The exact results, float64 [M, N]; of the cancelling rows and columns up to float64."""
        return (self.a * self.scale[:, None]) @ self.b.T


@dataclass(frozen=True)
class Card:
    """What was read. A number of bits is the largest m that came through, `limit` where no larger one was tried."""

    format: str
    mid: int
    far: int
    near: int
    limit: int
    rounding: str
    """nearest, toward_zero, down, up, or not_visible"""
    extra_bits: int | None
    """kept below the last bit of the sum when addends are aligned; None where not visible"""
    width: int | None
    """of the blocks that are added exactly; 1 also where a unit keeps no extra bits and so shows none"""
    lost: frozenset[str]
    """in, out: subnormal operands, and subnormal products and results, that counted as zero"""
    operands_kept: bool
    """of FP8: whether subnormal operands count; of BF16 this is `lost`"""
    overflow: str
    """inf, saturate, or mixed"""
    odd: tuple[str, ...] = ()
    """probes that gave neither of the results that any rule explains"""


@dataclass(frozen=True)
class _Format:
    """How magnitudes are put into operands: 2**m = large * b_large / (small * b_small)."""

    limit: int
    significand: int
    """bits behind the leading one"""
    b_large: float
    b_small: float

    def factors(self, m: int) -> tuple[float, float]:
        """(large, small) of A."""
        if self.b_large == self.b_small:
            return 2.0**m, 1.0
        ratio = m - int(np.log2(self.b_large / self.b_small))
        small = -6 if ratio >= 0 else -6 - ratio
        return 2.0 ** (small + ratio), 2.0**small


_FORMATS = {"bf16": _Format(54, 7, 1.0, 1.0), "e4m3": _Format(25, 3, 2.0**8, 2.0**-3)}
"""limit: FP64 loses 2**53 + 1. With E4M3 2**25 is what normal operands reach; FP32 loses 2**24 + 1."""


def probes(fmt: str) -> Probes:
    """The product for operands in `bf16` or `e4m3`. Raises KeyError for another format."""
    how = _FORMATS[fmt]
    m = np.arange(1, how.limit + 1)
    a, b = _cancelling(M, how, 1, 1.0), _cancelling(N, how, 2, -1.0)
    a[: len(m) + 3], unit = 0, np.zeros(M)
    columns: dict[tuple, int] = {}
    for i, exponent in enumerate(m):
        large, small = how.factors(int(exponent))
        a[i] = small
        a[i, list(_LARGE_PLACES)] = large
        unit[i] = small * how.b_small

    def column(name: tuple, large: dict[int, float], small: dict[int, float]) -> None:
        j = columns[name] = len(columns)
        b[j] = 0
        for factors, size in ((large, how.b_large), (small, how.b_small)):
            for place, factor in factors.items():
                b[j, place] = factor * size

    for kind, triples in TRIPLES.items():
        for t, (first, middle, last) in enumerate(triples):
            for x in WHOLE if t else WHOLE + PART:
                for sign in SIGNS:
                    column((kind, t, x, sign), {first: sign, last: -sign}, {middle: x})
    for sign in SIGNS:
        for e in range(1, EXTRA + 1):
            half = 2 ** (e - 1)
            around = [*range(_EXTRA_AT - half, _EXTRA_AT), *range(_EXTRA_AT + 1, _EXTRA_AT + half + 1)]
            column(("extra", e, sign), {_EXTRA_AT: sign, _END: -sign}, dict.fromkeys(around, 2.0**-e))
        for width in WIDTHS:
            column(("width", width, sign), {0: sign, _END: -sign},
                   dict.fromkeys((_WIDTH_AT, _WIDTH_AT + width - 1), 0.5))
    out = Probes(fmt, m, unit, a, b, np.ones(M), columns)
    (_bf16_range if fmt == "bf16" else _e4m3_range)(out)
    return out


def _cancelling(rows: int, how: _Format, seed: int, sign: float) -> Array:
    """Values of either sign over many binades; the second half is the first, shuffled, times `sign`.

    With sign 1 for A and -1 for B every sum is 0, and what a kernel gives is its own rounding errors: any other order
    gives other bits. The same on every machine, for only raw words of the generator are used.
    """
    words = np.random.PCG64(seed).random_raw(rows * K // 2).reshape(rows, K // 2)
    turned = np.where(words & np.uint64(1), -1.0, 1.0)
    steps = np.uint64(2**how.significand)
    significand = 1 + ((words >> np.uint64(8)) % steps).astype(np.float64) / float(steps)
    first = turned * np.ldexp(significand, ((words >> np.uint64(32)) % np.uint64(12)).astype(np.int64) - 6)
    shuffled = first[:, np.argsort(np.random.PCG64(0).random_raw(K // 2), kind="stable")]
    return np.concatenate([first, sign * shuffled], axis=1)


def _range_row(p: Probes, name: str) -> Array:
    p.rows[name] = len(p.m) + len(p.rows)
    return p.a[p.rows[name]]


def _range_column(p: Probes, *name: str) -> Array:
    j = p.columns[name] = len(p.columns)
    p.b[j] = 0
    return p.b[j]


def _bf16_range(p: Probes) -> None:
    low, high = _range_row(p, "low"), _range_row(p, "high")
    for name, (_, places, (left, right)) in SUBNORMAL.items():
        low[list(places)] = 2.0**left
        _range_column(p, "low", name)[list(places)] = 2.0**right
    for name, terms in OVERFLOW.items():
        column = _range_column(p, "high", name)
        for place, left, right, significand in terms:
            high[place], column[place] = significand * 2.0**left, 2.0**right


def _e4m3_range(p: Probes) -> None:
    """Scales bring a sum below the normal range of BF16 and beyond its largest number; operands can't."""
    own, low, high = (_range_row(p, name) for name in ("operands", "low", "high"))
    own[300], own[301] = 2.0**-9, 2.0**3
    _range_column(p, "operands", "a")[300] = 2.0**3
    _range_column(p, "operands", "b")[301] = 2.0**-9
    low[302] = high[302] = 2.0**-5
    _range_column(p, "low", "product")[302] = 2.0**-5
    p.scale[p.rows["low"]] = 2.0**-120
    high[400] = 2.0**8
    _range_column(p, "high", "sum")[400] = 2.0**8
    p.scale[p.rows["high"]] = 2.0**120


def read(p: Probes, d: Array) -> Card:
    """The card of results d, float64 [M, N]. Raises ValueError for another shape."""
    if d.shape != (M, N):
        msg = f"results of the probes are {(M, N)}, got {d.shape}"
        raise ValueError(msg)
    with np.errstate(divide="ignore", invalid="ignore"):
        sums = d[: len(p.m)] / p.unit[: len(p.m), None]
    bits = {(kind, t): _bits(p, sums, kind, t) for kind, triples in TRIPLES.items() for t in range(len(triples))}
    mid, far, near = (min(n for (k, _), n in bits.items() if k == kind) for kind in TRIPLES)
    seen = [n for n in (mid, far, near) if 0 < n < len(p.m)]
    extra = _extra(p, sums[min(seen) - 1]) if seen else None
    width = _width(p, sums[max(seen) - 1]) if seen else None
    lost, operands_kept, odd = _range(p, d)
    overflow, strange = _overflow(p, d)
    return Card(p.format, mid, far, near, len(p.m), _rounding(p, sums, bits), extra, width, lost, operands_kept,
                overflow, (*odd, *strange))


def _bits(p: Probes, sums: Array, kind: str, t: int) -> int:
    """The largest m up to which every sign and order keeps the 1; 0 where none does."""
    kept = np.ones(len(p.m), bool)
    for x in WHOLE:
        for sign in SIGNS:
            kept &= sums[:, p.columns[kind, t, x, sign]] == x
    return len(kept) if kept.all() else int(np.argmin(kept))


def _rounding(p: Probes, sums: Array, bits: dict[tuple[str, int], int]) -> str:
    """Which way a part of the last bit goes; of either sign, after either sign of the large number."""
    seen, too_low, too_high = False, False, False
    for (kind, t), m in bits.items():
        if t == 0 and 0 < m < len(p.m):
            seen = True
            for sign in SIGNS:
                positive, negative = (sums[m - 1, p.columns[kind, t, x, sign]] for x in PART)
                too_low |= not positive >= PART[0]
                too_high |= not negative <= PART[1]
    if not seen:
        return "not_visible"
    return {(False, False): "nearest", (True, True): "toward_zero", (True, False): "down", (False, True): "up"}[
        bool(too_low), bool(too_high)]


def _survive(p: Probes, row: Array, name: str, key: int) -> bool:
    return all(row[p.columns[name, key, sign]] == 1 for sign in SIGNS)


def _extra(p: Probes, row: Array) -> int:
    kept = [_survive(p, row, "extra", e) for e in range(1, EXTRA + 1)]
    return kept.index(False) if False in kept else EXTRA


def _width(p: Probes, row: Array) -> int:
    kept = [_survive(p, row, "width", w) for w in WIDTHS]
    n = kept.index(False) if False in kept else len(kept)
    return WIDTHS[n - 1] if n else 1


def _range(p: Probes, d: Array) -> tuple[frozenset[str], bool, tuple[str, ...]]:
    """(what subnormals lose, whether FP8 operands keep theirs, probes that gave something else)."""
    lost, odd, operands_kept, exact = set(), [], True, p.exact
    for name, j in p.columns.items():
        if name[0] not in ("low", "operands"):
            continue
        got, due = d[p.rows[name[0]], j], exact[p.rows[name[0]], j]
        if got == due:
            continue
        if not (0 <= got < due if name == ("low", "sum") else got == 0):
            odd.append(f"{name[1]} below the normal range: {got:.4g} instead of {due:.4g} or 0")
        elif name[0] == "operands":
            operands_kept = False
        else:
            lost.add(SUBNORMAL[name[1]][0])
    return frozenset(lost), operands_kept, tuple(odd)


NEAR_LARGEST = 2.0**127
"""binade of the largest finite bf16 and fp32 numbers"""


def _overflow(p: Probes, d: Array) -> tuple[str, tuple[str, ...]]:
    """(inf, saturate or mixed; probes that gave something else)."""
    rules, odd = set(), []
    for name, j in p.columns.items():
        if name[0] == "high":
            got = d[p.rows["high"], j]
            if np.isinf(got) and got > 0:
                rules.add("inf")
            elif got >= NEAR_LARGEST:
                rules.add("saturate")
            else:
                odd.append(f"{name[1]} beyond the largest number: {got:.4g}")
    return (rules.pop() if len(rules) == 1 else "mixed"), tuple(odd)
