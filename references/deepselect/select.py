"""What a row-wise top-k may return: every set, every tie choice, every order that is left free.

Nothing is rounded and no arithmetic is done on values, so every rule is exact. The
key of a value is its bit pattern turned from sign and magnitude into an ordinary
integer: it orders as the reals do, makes -0 equal +0, and keeps subnormals apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from references.bounds.profile import resolve
from references.expected import Array, Expected, Inputs, Joint, Judgement, Problem
from references.formats import codec

NAN_SENTINEL = 0x3F3F3F3F
"""Written to the index list of a row in which a NaN was found."""

_SIGNED = {"bf16": np.int16, "fp32": np.int32}
_INF_BITS = {"bf16": 0x7F80, "fp32": 0x7F800000}


@dataclass(frozen=True)
class _Rows:
    """What is known of every row before any answer is seen. b rows, one column an input position."""

    key: Array
    """(b, vocab) order of the values; lowest of all behind the row's end"""
    bits: Array
    """(b, vocab) patterns as signed integers"""
    end: Array
    """(b, 1) int64"""
    n: Array
    """(b, 1) how many entries of the result are real"""
    in_contract: Array
    """(b, 1) 0 <= end <= vocab"""
    has_nan: Array
    """(b, 1) before the end"""
    sentinel: Array
    """(b, 1) rows that must be reported as NaN"""
    threshold: Array
    """(b, 1) key of the n-th largest value; lower than all keys in short rows"""
    ties: Array
    """(b, 1) how many of the values equal to the threshold belong to the result"""


def topk(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[Any, Expected]:
    """`deepselect.topk`: for each row, n = min(topk, end) distinct positions whose values no other exceeds.

    Rules, from the documented semantics: -0 equals +0, infinities are ordinary,
    subnormals distinct; any of equal values may be chosen; a row not longer than
    topk comes in index order (sorted: by value); what lies behind n is fill; an index
    is position + offset (int32 wraps, int64 exact), fill has no offset; a value has
    the very bits of its position. The value fill is rounded once to the dtype, or
    through float32, in which form it crosses the binding. Rows whose end is out of
    [0, vocab] are unspecified.

    Variant: dtype (bf16, fp32), index (int32, int64), order (any, index, value),
    values, end, offset (yes, no). Sizes: b, topk, vocab. Values (default):
    idx_oob_fill_value (2147483647), value_oob_fill_value (-inf),
    abort_when_nan_found (False: a call that has to trap is a misuse, seldom a case; if
    true, a result for a row with a NaN is wrong whatever it holds). Inputs: input (b, vocab); end and
    output_idx_offset (b,) int32 where the variant has them.
    Profile: nan_sentinel "first" (default: only column 0 holds the sentinel, the rest
    is free) or "row"; nan_short_row "unchecked" (default) or "checked".
    Returns one Joint over ("values", "indices"), or ("indices",) where values is no.
    """
    variant, k = problem.variant, problem.sizes["topk"]
    rows = _rows(variant["dtype"], inputs, k, has_end=variant["end"] == "yes", profile=profile)
    b = rows.key.shape[0]
    offset = inputs.codes("output_idx_offset").astype(np.int64)[:, None] if variant["offset"] == "yes" else 0
    values = problem.values
    index_fill = int(values.get("idx_oob_fill_value", 2**31 - 1))
    value_fill = _fill_codes(float(values.get("value_oob_fill_value", "-inf")), variant["dtype"])
    abort = bool(values.get("abort_when_nan_found", False))
    whole_row = resolve(profile)["nan_sentinel"] == "row"
    # `variant.values` would be the method of a mapping.
    names = ("values", "indices") if variant["values"] == "yes" else ("indices",)
    shapes = dict.fromkeys(names, (b, k))

    def check(got: Mapping[str, Array]) -> dict[str, Judgement]:
        index = np.asarray(got["indices"]).astype(np.int64)
        position = index - offset
        if variant["index"] == "int32":
            position = position.astype(np.int32).astype(np.int64)
        column = np.arange(k)
        plain = rows.in_contract & ~rows.sentinel
        real, fill = plain & (column < rows.n), plain & (column >= rows.n)
        in_range = real & (position >= 0) & (position < rows.end)
        where = np.where(in_range, position, 0)
        faults = _set_faults(rows, variant["order"], in_range, where)
        sentinel = rows.sentinel & rows.in_contract
        if abort:
            faults["no_exception"] = np.broadcast_to(sentinel, index.shape)
        else:
            faults["nonfinite"] = sentinel & (index != NAN_SENTINEL) & (whole_row | (column == 0))
        faults["index_range"] = real & ~in_range
        faults["numeric"] = faults["numeric"] | (fill & (index != index_fill))
        verdicts = {"indices": _judgement(faults)}
        if "values" in shapes:
            verdicts["values"] = _values(rows, got["values"], variant["dtype"], (in_range, where), fill, value_fill)
        return verdicts

    return {tuple(shapes): Joint(shapes, check)}


def _rows(dtype: str, inputs: Inputs, k: int, *, has_end: bool, profile: Mapping[str, Any]) -> _Rows:
    bits = inputs.codes("input").view(_SIGNED[dtype])
    b, vocab = bits.shape
    key = bits & np.iinfo(bits.dtype).max
    nan = key > _INF_BITS[dtype]
    np.negative(key, out=key, where=bits < 0)
    lowest = np.iinfo(key.dtype).min
    end = inputs.codes("end").astype(np.int64)[:, None] if has_end else np.full((b, 1), vocab, np.int64)
    if has_end:
        behind = np.arange(vocab) >= end
        key[behind] = lowest
        nan &= ~behind
    has_nan = nan.any(axis=1, keepdims=True)
    is_long = end > k
    checked = resolve(profile)["nan_short_row"] == "checked"
    threshold = np.full((b, 1), lowest, key.dtype)
    if 0 < k < vocab and is_long.any():
        # Everything behind a row's end sorts below all else, so one rank serves all rows.
        kth = np.partition(key, vocab - k, axis=1)[:, vocab - k : vocab - k + 1]
        threshold = np.where(is_long, kth, threshold)
    above = np.count_nonzero(key > threshold, axis=1, keepdims=True)
    n = np.clip(end, 0, k)
    return _Rows(
        key, bits, end, n, (end >= 0) & (end <= vocab), has_nan, has_nan & (is_long | checked), threshold, n - above
    )


def _set_faults(rows: _Rows, order: str, chosen: Array, where: Array) -> dict[str, Array]:
    """Faults of the chosen positions by reason; `where` is 0 outside `chosen`."""
    b, k = chosen.shape
    if rows.key.shape[1] == 0:
        return {"token_duplicated": np.zeros((b, k), bool), "numeric": np.zeros((b, k), bool),
                "order": np.zeros((b, k), bool)}  # fmt: skip
    row, column = np.nonzero(chosen)
    # Of entries that name one position the last one written stays the owner.
    owner = np.empty(rows.key.shape, np.int32)
    owner[row, where[row, column]] = column
    duplicate = np.zeros((b, k), bool)
    duplicate[row, column] = owner[row, where[row, column]] != column

    key = np.take_along_axis(rows.key, where, axis=1)
    tied = chosen & (key == rows.threshold) & ~duplicate
    surplus = tied & (np.cumsum(tied, axis=1) > rows.ties)
    wrong = (chosen & (key < rows.threshold)) | surplus

    disorder = np.zeros((b, k), bool)
    both = chosen[:, 1:] & chosen[:, :-1]
    if order == "value":
        disorder[:, 1:] = both & (key[:, 1:] > key[:, :-1]) & ~rows.has_nan
    else:
        if order == "index":
            disorder[:, 1:] = both & (where[:, 1:] <= where[:, :-1])
        disorder |= chosen & (rows.end <= k) & (where != np.arange(k))
    return {"token_duplicated": duplicate, "numeric": wrong, "order": disorder}


def _values(
    rows: _Rows, codes: Array, dtype: str, chosen: tuple[Array, Array], fill: Array, fill_codes: tuple[int, ...]
) -> Judgement:
    """Gathered bits at every index in range, fill behind; values of an index out of range are not judged."""
    bits = np.asarray(codes).view(_SIGNED[dtype])
    in_range, where = chosen
    want = np.take_along_axis(rows.bits, where, axis=1) if rows.bits.shape[1] else np.zeros_like(bits)
    want = np.where(fill, np.asarray(fill_codes[0], want.dtype), want)
    nan = (bits & np.iinfo(bits.dtype).max) > _INF_BITS[dtype]
    fill_ok = np.isin(bits, fill_codes)
    if _is_nan(fill_codes[0], dtype):
        fill_ok |= nan
    bad = (in_range & (bits != want)) | (fill & ~fill_ok)
    shown = codec.decode(want.view(np.asarray(codes).dtype), dtype) if bad.any() else None
    return Judgement(bad, shown, None, "numeric")


def _is_nan(bits: int, dtype: str) -> bool:
    return bits & int(np.iinfo(_SIGNED[dtype]).max) > _INF_BITS[dtype]


def _fill_codes(value: float, dtype: str) -> tuple[int, ...]:
    """The fill rounded to the dtype directly, and through float32, as signed patterns."""
    with np.errstate(over="ignore"):
        via_float32 = np.float64(np.float32(value))
    codes = codec.encode(np.array([value, via_float32]), dtype).view(_SIGNED[dtype])
    return tuple(int(c) for c in codes)


def _judgement(faults: Mapping[str, Array]) -> Judgement:
    """All faults together, named by the first kind of this list that occurs."""
    order = ("no_exception", "nonfinite", "index_range", "token_duplicated", "numeric", "order")
    present = [name for name in order if name in faults and faults[name].any()]
    bad = np.logical_or.reduce(list(faults.values()))
    return Judgement(bad, None, None, present[0] if present else "numeric")
