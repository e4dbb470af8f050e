"""Arrays of sparse attention: index lists with what must be skipped, lengths, sinks, rows and cached tokens.

Rows that no list names hold NaN in every second problem, so that reading one shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from conformance.declare import INT_MAX, INT_MIN
from conformance.engine.arrays import Draw
from conformance.engine.families import make, wide_exponent
from conformance.model import Problem
from references.formats import codec

Codes = dict[str, np.ndarray]

HEAD_DIM = 512
FP8_BYTES, FP4_BYTES = 528, 288
SECOND = 1
"""the place of keys among the operands: families pair them with the queries"""
BLOCK = 64
"""list entries that kernels take at a time"""

_NAN_BF16 = (0x7FC0, 0xFFC1, 0x7F81)
_NAN_BYTE = 0x7F
"""NaN as an e4m3 code: as data of the FP8 form, as scale of the FP4 form"""


# --- index lists ----------------------------------------------------------------------------------------------

def out_of_range(rows: int) -> tuple[int, ...]:
    """Indices that prefill must skip: negative ones, and all from the number of rows on."""
    return INT_MIN, -123456, -1, rows, rows + 1, 2147480000, INT_MAX


def minus_one(rows: int) -> tuple[int, ...]:
    """The one index that decoding must skip; all others out of range are undefined."""
    return (-1,)


def _random(good: np.ndarray, bad: np.ndarray, r: np.ndarray) -> np.ndarray:
    return good


def _sprinkled(good: np.ndarray, bad: np.ndarray, r: np.ndarray) -> np.ndarray:
    return np.where(r % 8 == 0, bad, good)


def _one(good: np.ndarray, bad: np.ndarray, r: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(good)) == r[0] % len(good), good, bad)


def _few(good: np.ndarray, bad: np.ndarray, r: np.ndarray) -> np.ndarray:
    return np.where(r % 32 == 0, good, bad)


def _none(good: np.ndarray, bad: np.ndarray, r: np.ndarray) -> np.ndarray:
    return bad


def _repeated(good: np.ndarray, bad: np.ndarray, r: np.ndarray) -> np.ndarray:
    return good[r % 5 % len(good)]


def _first(good: np.ndarray, bad: np.ndarray, r: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(good)) < r[0] % len(good), good, bad)


def _last_block(good: np.ndarray, bad: np.ndarray, r: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(good)) >= len(good) - BLOCK, good, bad)


_KINDS = (_random, _sprinkled, _random, _one, _few, _repeated, _first, _last_block, _sprinkled, _none)
"""what the list of a token may look like; the word of a token picks one"""


def lists(rows: Callable[[Problem], int], skipped: Callable[[int], tuple[int, ...]]) -> Callable[[Draw], np.ndarray]:
    """int32 lists [.., topk] of row numbers: all valid, some, one or none, repeated, first or last ones."""

    def fill(d: Draw) -> np.ndarray:
        n, topk = rows(d.problem), d.shape[-1]
        good = d.integers(0, n - 1).reshape(-1, topk)
        bad = np.array(skipped(n))
        bad = bad[d.integers(0, len(bad) - 1, salt=1)].reshape(-1, topk)
        r = d.integers(0, 2**20, salt=2).reshape(-1, topk)
        kinds = d.words(3, len(good)) % np.uint64(len(_KINDS))
        chosen = [_KINDS[int(kind)](*arrays) for kind, *arrays in zip(kinds, good, bad, r, strict=True)]
        return np.array(chosen).reshape(d.shape).astype(np.int32)

    return fill


def lengths(topk: Callable[[Problem], int]) -> Callable[[Draw], np.ndarray]:
    """int32 lengths in 0..topk: at both ends, at and beside a block, and anything between."""

    def fill(d: Draw) -> np.ndarray:
        top = topk(d.problem)
        points = np.array([top, top - 1, BLOCK - 1, BLOCK, BLOCK + 1, 1, 0]).clip(0, top)
        pick = d.integers(0, len(points) + 3)
        free = d.integers(0, top, salt=1)
        return np.where(pick < len(points), points[np.minimum(pick, len(points) - 1)], free).astype(np.int32)

    return fill


def sinks(d: Draw) -> np.ndarray:
    """fp32 sinks: both infinities, far above and far below every lse, and near to it."""
    kind = d.integers(0, 8)
    special = np.array([np.inf, -np.inf, 1e30, -1e30])
    return np.where(kind < len(special), special[kind % len(special)], 4 * d.normal() + 5).astype(np.float32)


# --- rows and cached tokens -----------------------------------------------------------------------------------

def rows(d: Draw) -> np.ndarray:
    """bf16 rows that are keys and values alike; of the family `subnormal` with one sign a dim, so that means stay."""
    if d.problem.family != "subnormal":
        return make(replace(d, position=SECOND), d.problem.family)
    sign = replace(d, shape=d.shape[-1:]).integers(0, 1) << 15
    return (d.integers(1, 127) | sign).astype(np.uint16)


def tokens(d: Draw) -> np.ndarray:
    """Bytes of cached tokens [blocks, page, 1, 528 or 288], as codes of the array's format: legal data and scales."""
    width = d.shape[-1]
    n = d.n // width
    flat = replace(d, shape=(n, HEAD_DIM), position=SECOND)
    made = _fp8(flat) if width == FP8_BYTES else _fp4(flat)
    return made.view(codec.storage(d.format)).reshape(d.shape)


def _fp8(d: Draw) -> np.ndarray:
    """512 e4m3 codes, then 16 exponent bytes: around 2^0, by family far from it, the smallest or all over the range."""
    family = d.problem.family
    groups = replace(d, shape=(d.shape[0], HEAD_DIM // 32))
    scales = groups.integers(124, 130)
    if family == "subnormal":
        data, scales = make(replace(d, format="e4m3"), "positive"), groups.integers(0, 2)
    elif family == "codes":
        data = d.integers(0, 255)
        data = np.where(data & 0x7F == _NAN_BYTE, 0x7E, data)
        # Three groups in eight are so small that they hardly count; one is zero, whatever its scale.
        kind = groups.integers(0, 7, salt=1)
        scales = np.where(kind < 3, groups.integers(0, 123, salt=2), scales)
        scales = np.where(kind == 7, groups.integers(200, 254, salt=3), scales)
        data = np.where(np.repeat(kind == 7, 32, axis=1), data & 0x80, data)
    else:
        data = make(replace(d, format="e4m3"), "normal" if family in ("nans", "wide") else family)
    if family == "wide":
        scales = scales + wide_exponent(replace(d, format="bf16"))
    if family == "nans" and len(scales):
        scales[d.seed % len(scales), d.seed % scales.shape[1]] = 255
    return np.concatenate([data, scales], axis=1).astype(np.uint8)


def _fp4(d: Draw) -> np.ndarray:
    """256 bytes of two e2m1 codes, the even dim in the low nibble, then 32 e4m3 scales of 2^-3 to 2^3."""
    family = d.problem.family
    groups = replace(d, shape=(d.shape[0], HEAD_DIM // 16))
    if family == "codes":
        nibbles, scales = d.integers(0, 15), groups.integers(0, 0x50)
    elif family == "subnormal":
        nibbles, scales = make(replace(d, format="e2m1x2_lo"), "positive"), groups.integers(0, 7)
    else:
        nibbles = make(replace(d, format="e2m1x2_lo"), "normal" if family in ("nans", "wide") else family)
        scales = groups.integers(0x20, 0x50)
    if family == "nans" and len(scales):
        scales[d.seed % len(scales), d.seed % scales.shape[1]] = _NAN_BYTE
    return np.concatenate([nibbles[:, 0::2] | nibbles[:, 1::2] << 4, scales], axis=1).astype(np.uint8)


def queries(d: Draw) -> np.ndarray:
    """bf16 queries; where only the cache is special they are normal."""
    return make(d, "normal" if d.problem.family in ("codes", "subnormal") else d.problem.family)


# --- what nobody may read -------------------------------------------------------------------------------------

def poison_rows(problem: Problem, codes: Codes) -> None:
    """NaN in rows of kv that no list names, not even behind its length: from there NaN may come through."""
    if problem.seed % 2 == 0:
        kv, indices = codes["kv"], codes["indices"]
        known = indices[(indices >= 0) & (indices < len(kv))]
        kv[np.setdiff1d(np.arange(len(kv)), known)] = _NAN_BF16[problem.seed // 2 % len(_NAN_BF16)]


_CACHES = (("k_cache", "indices", "topk_length"), ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"))


def poison_tokens(problem: Problem, codes: Codes) -> None:
    """NaN in cached tokens that count in no list of any step."""
    if problem.seed % 2:
        return
    for cache, indices, length in _CACHES:
        if f"decode/{cache}" in codes:
            listed = [_counted(codes, f"{step}/{indices}", f"{step}/{length}") for step in _steps(codes)]
            bytes_of = codes[f"decode/{cache}"].reshape(-1, codes[f"decode/{cache}"].shape[-1])
            bytes_of[np.setdiff1d(np.arange(len(bytes_of)), np.concatenate(listed))] = _NAN_BYTE


def _steps(codes: Iterable[str]) -> Iterator[str]:
    return (key.partition("/")[0] for key in codes if key.endswith("/q"))


def _counted(codes: Codes, indices: str, length: str) -> np.ndarray:
    """Slots that a list names in front of its length."""
    slots = codes[indices]
    if length in codes:
        slots = np.where(np.arange(slots.shape[2]) < codes[length][:, None, None], slots, -1)
    return slots[slots >= 0]
