"""FlashMLA's sparse attention over lists of tokens: prefill on BF16 rows, decode on a quantised paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from references.bounds.constants import FLUSH_FP32, RANDOM_FAMILIES
from references.bounds.profile import resolve
from references.bounds.scatter import attention_typical
from references.expected import Array, Expected, Inputs, Problem, Within
from references.flashmla.attention import Attended, Rules, attend
from references.flashmla.cache import HEAD_DIM, decode_tokens
from references.formats import codec

DECODE_STEPS = ("", "decode", "again")
"""Names that the calls of `flash_mla_with_kvcache` may have in a sequence; \"\" where there is no sequence."""

_MAIN = ("k_cache", "indices", "topk_length")
_EXTRA = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")


def flash_mla_sparse_fwd(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[str, Expected]:
    """`flashmla.flash_mla_sparse_fwd`: each token's heads attend the rows its list names.

    Values: sm_scale (must be drawn). Inputs: q [s_q, h_q, 512] bf16, kv [s_kv, 1, 512]
    bf16, indices [s_q, 1, topk] int32; where present attn_sink [h_q] fp32, topk_length
    [s_q] int32. Reads no variant key and no size. Outputs: out [s_q, h_q, 512] bf16;
    max_logits, lse [s_q, h_q] fp32, natural units.
    An entry counts where its place < topk_length and 0 <= index < s_kv, once an
    occurrence. No entry: out 0, max_logits -inf, lse +inf. The sink scales out by
    sigmoid(lse - sink) and changes nothing else.
    Unspecified: tokens whose length is not in 0..topk; tokens with a list entry behind
    the length that names a row with NaN (a documented exception); of a head with NaN
    logits, max_logits.
    Profile: p, l_from, subnormals (`bounds.profile`).
    """
    q, kv = inputs.real("q"), inputs.real("kv")[:, 0]
    indices = inputs.codes("indices")[:, 0].astype(np.int64)
    s_q, topk = indices.shape
    sink, lengths = _sink(inputs, "attn_sink"), _lengths(inputs, "topk_length", s_q, topk)
    scale, rules = float(problem.values["sm_scale"]), _rules(problem, profile)
    known = (indices >= 0) & (indices < len(kv))
    counted = np.arange(topk) < lengths[:, None]
    nan_row = np.isnan(kv).any(axis=1)
    free = (lengths < 0) | (lengths > topk)
    results = []
    for t in range(s_q):
        free[t] |= nan_row[indices[t, known[t] & ~counted[t]]].any()
        taken = indices[t, known[t] & counted[t]]
        results.append(attend(q[t], kv[taken], scale, sink, rules, slack=_flush(profile), repeats=_repeats(taken)))
    heads = q.shape[1]
    return {
        "out": _within(results, "out", free, (s_q, heads, HEAD_DIM)),
        "max_logits": _within(results, "top", free, (s_q, heads)),
        "lse": _within(results, "lse", free, (s_q, heads)),
    }


def flash_mla_with_kvcache(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[str, Expected]:
    """`flashmla.flash_mla_with_kvcache`, one call or several on one metadata object.

    Works on every step of `DECODE_STEPS` that has a `q`; names of a step are prefixed
    `step/`. Values: softmax_scale (`step/softmax_scale` first; absent or None: 512**-0.5).
    Inputs: q [b, s_q, h_q, 512] bf16; k_cache [blocks, page, 1, 528] uint8, int8 or
    e4m3, taken as bytes (`cache.decode_tokens`); indices [b, s_q, topk] int32, a slot being
    block * page + place; where present attn_sink [h_q] fp32, topk_length [b] int32,
    extra_k_cache [blocks, page, 1, 528 or 288], extra_indices_in_kvcache, extra_topk_length.
    Reads no variant key and no size. Outputs: out [b, s_q, h_q, 512] bf16, softmax_lse
    [b, h_q, s_q] fp32, natural log, without the sink. Both lists together are one list.
    No valid entry: out 0, lse +inf.
    Unspecified: requests whose length is not in 0..topk; tokens whose counted entries
    hold an index that names no slot and is not -1 (profile invalid_index "minus_one",
    the default; "negative": every negative one is skipped); tokens with a finite code
    whose value is beyond bf16.
    Profile: p, l_from, subnormals (`bounds.profile`), kv_scale_clamp (255).
    """
    expected: dict[str, Expected] = {}
    for step in DECODE_STEPS:
        prefix = f"{step}/" if step else ""
        if f"{prefix}q" in inputs:
            expected |= _decode_step(problem, inputs, profile, prefix)
    return expected


def get_mla_metadata(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[str, Expected]:
    """`flashmla.get_mla_metadata`: what its contract promises is a fresh object that decode calls may share.

    The object itself is a token and its fields are private, so it is judged by use: a
    sequence that makes one object and decodes with it in the steps `decode` and, with the
    same sizes and lengths, `again`. Reads and returns what `flash_mla_with_kvcache` does.
    """
    return flash_mla_with_kvcache(problem, inputs, profile)


def _decode_step(problem: Problem, inputs: Inputs, profile: Mapping[str, Any], prefix: str) -> dict[str, Expected]:
    q = inputs.real(f"{prefix}q")
    b, s_q, heads, _ = q.shape
    scale = problem.values.get(f"{prefix}softmax_scale", problem.values.get("softmax_scale"))
    scale = HEAD_DIM**-0.5 if scale is None else float(scale)
    sink, rules = _sink(inputs, f"{prefix}attn_sink"), _rules(problem, profile)
    lists = [_List(inputs, prefix, _MAIN, profile)]
    if f"{prefix}extra_k_cache" in inputs:
        lists.append(_List(inputs, prefix, _EXTRA, profile))
    # A dequantised value goes through bf16, which has no half of its smallest number.
    slack = max(_flush(profile), codec.min_subnormal("bf16") / 2)
    free = np.zeros((b, s_q), bool)
    results = []
    for request in range(b):
        for token in range(s_q):
            taken = [one.rows(request, token) for one in lists]
            free[request, token] = any(undefined for *_, undefined in taken)
            rows, repeats = np.concatenate([rows for rows, *_ in taken]), max(n for _, n, _ in taken)
            results.append(attend(q[request, token], rows, scale, sink, rules, slack=slack, repeats=repeats))
    lse = _within(results, "lse", free.ravel(), (b, s_q, heads))
    return {
        f"{prefix}out": _within(results, "out", free.ravel(), (b, s_q, heads, HEAD_DIM)),
        f"{prefix}softmax_lse": Within(*(a.transpose(0, 2, 1) for a in (lse.value, lse.bound, lse.unspecified))),
    }


class _List:
    """One list of slots with its cache."""

    def __init__(
        self, inputs: Inputs, prefix: str, names: tuple[str, str, str], profile: Mapping[str, Any]
    ) -> None:
        cache, indices, length = names
        codes = inputs.codes(prefix + cache)
        self._tokens = codes.view(np.uint8).reshape(-1, codes.shape[-1])
        self._indices = inputs.codes(prefix + indices).astype(np.int64)
        b, _, self._topk = self._indices.shape
        self._lengths = _lengths(inputs, prefix + length, b, self._topk)
        full = resolve(profile)
        self._skips_negative = full["invalid_index"] == "negative"
        self._clamp = int(full["kv_scale_clamp"])

    def rows(self, request: int, token: int) -> tuple[Array, int, bool]:
        """([n, 512] values of the entries that count, `_repeats` of them, whether the contract is silent on them)."""
        length = int(self._lengths[request])
        index = self._indices[request, token, : max(length, 0)]
        skipped = index < 0 if self._skips_negative else index == -1
        known = (index >= 0) & (index < len(self._tokens))
        rows = decode_tokens(self._tokens[index[known]], self._clamp)
        beyond = (np.abs(rows) > codec.max_finite("bf16")).any()
        return rows, _repeats(index[known]), bool(beyond or (~known & ~skipped).any() or not 0 <= length <= self._topk)


def _sink(inputs: Inputs, name: str) -> Array | None:
    return inputs.real(name) if name in inputs else None


def _repeats(index: Array) -> int:
    """How often one index stands in a list at most; 1 where the list is empty."""
    return int(np.bincount(index).max()) if len(index) else 1


def _lengths(inputs: Inputs, name: str, count: int, topk: int) -> Array:
    return inputs.codes(name).astype(np.int64) if name in inputs else np.full(count, topk, np.int64)


def _flush(profile: Mapping[str, Any]) -> float:
    """What an element may lose where the backend declares that it flushes subnormals."""
    return 0.0 if resolve(profile)["subnormals"] == "keep" else FLUSH_FP32


def _rules(problem: Problem, profile: Mapping[str, Any]) -> Rules:
    return Rules.of(profile, random=getattr(problem, "family", "") in RANDOM_FAMILIES)


def _within(results: list[Attended], field: str, free: Array, shape: tuple[int, ...]) -> Within:
    """One output of all tokens; a token or a head of which nothing is said is unspecified."""
    if not results:
        return Within(np.zeros(shape), np.zeros(shape), np.zeros(shape, bool))
    head_free = {"out": "free", "top": "top_free", "lse": "lse_free"}[field]
    unspecified = np.stack([getattr(r, head_free) for r in results]) | free[:, None]
    if field == "out":
        unspecified = np.broadcast_to(unspecified[..., None], (*unspecified.shape, HEAD_DIM))
    value, bound = (np.stack([getattr(r, f) for r in results]) for f in (field, f"{field}_bound"))
    typical = None
    if field == "out":
        typical = attention_typical([None if f else r.scatter for r, f in zip(results, free, strict=True)], value)
    return Within(value.reshape(shape), bound.reshape(shape), unspecified.reshape(shape),
                  typical and typical.shaped(shape))
