"""What other people's criteria say of the same results: would they have seen the fault, and do they pass what is right.

Each rule sees every problem that ours sees, with the oracle's value as its golden one. It rejects a problem when it
does not hold for one of the outputs that it can be applied to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.engine.attempt import Attempt
from conformance.engine.example import Example
from references.criteria import criteria
from references.expected import Exact, Expected, OneOf, Within
from references.formats import codec

OURS = "this suite"
COLUMNS: dict[str, tuple[str, ...]] = {
    "calc_diff": ("calc_diff",), "allclose": ("allclose",), "double-thousandth": ("double_thousandth",),
    "MERE/MARE": ("mere", "mare"), "mixed tolerance": ("mixed_tolerance",), "the module's own": ("own",),
    "FlashAttention": ("flash_attention",),
}
"""column of the comparison: the criteria of which any may reject"""
ORDINARY = "normal"
"""the data family that most test suites know"""


@dataclass
class Rules:
    """By rule and kind of data ("ordinary", "all"): how many problems it saw, and how many of them it rejected."""

    seen: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    rejected: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    def verdict(self, rule: str, data: str) -> bool | None:
        """Whether the rule rejected any problem; None where it saw none."""
        return self.rejected[rule, data] > 0 if self.seen[rule, data] else None

    def look(self, attempt: Attempt) -> None:
        """Note what every rule says of one problem that ran."""
        if len(attempt.seen) != len(attempt.examples) or not attempt.expected:
            return
        kinds = ("all", "ordinary") if attempt.problem.family == ORDINARY else ("all",)
        verdicts = {OURS: bool(attempt.findings), **others(attempt)}
        for rule, rejects in verdicts.items():
            for kind in kinds:
                self.seen[rule, kind] += 1
                self.rejected[rule, kind] += rejects


def others(attempt: Attempt) -> dict[str, bool]:
    """{rule: whether it rejects} of those that apply to any output."""
    seen, expected = attempt.seen[-1], attempt.expected[-1]
    low = low_precision(attempt.examples[-1])
    told: dict[str, list[bool]] = defaultdict(list)
    for name, want in expected.items():
        golden = _golden(want, seen.formats.get(name, "")) if name in seen.outputs else None
        if golden is None:
            continue
        observed = np.asarray(codec.decode(seen.outputs[name], seen.formats[name]), np.float64)
        entries = criteria(observed, golden, seen.formats[name], op=attempt.problem.op, output=str(name),
                           low_precision=low.get(name), unspecified=getattr(want, "unspecified", None))
        for rule, names in COLUMNS.items():
            told[rule] += [entries[n]["holds"] for n in names if entries.get(n, {}).get("holds") is not None]
    return {rule: not all(held) for rule, held in told.items() if held}


def _golden(want: Expected, fmt: str) -> np.ndarray | None:
    """The value that a rule compares with; None where several outputs constrain each other."""
    if isinstance(want, Within):
        return want.value
    if isinstance(want, Exact):
        return np.asarray(codec.decode(want.codes, fmt), np.float64)
    return np.asarray(codec.decode(want.candidates[0], fmt), np.float64) if isinstance(want, OneOf) else None


def low_precision(example: Example) -> Mapping[Any, np.ndarray]:
    """What FlashAttention's rule compares with: attention whose logits, weights and result are each rounded to bf16.

    Only of `flashmla.flash_mla_sparse_fwd`; nothing for other ops.
    """
    if example.problem.op != "flashmla.flash_mla_sparse_fwd":
        return {}
    inputs = example.inputs
    q, kv, indices = inputs.real("q"), inputs.real("kv")[:, 0], inputs.codes("indices")[:, 0].astype(np.int64)
    lengths = inputs.codes("topk_length") if "topk_length" in inputs else np.full(len(q), indices.shape[1])
    out = np.zeros(q.shape)
    with np.errstate(all="ignore"):
        for t, row in enumerate(indices):
            taken = row[: max(int(lengths[t]), 0)]
            rows = kv[taken[(taken >= 0) & (taken < len(kv))]]
            if not len(rows):
                continue
            z = codec.round_to(float(example.problem.values["sm_scale"]) * (q[t] @ rows.T), "bf16")
            e = np.exp(z - z.max(axis=1, keepdims=True))
            weights = codec.round_to(e / e.sum(axis=1, keepdims=True), "bf16")
            o = weights @ rows
            if "attn_sink" in inputs:
                lse = z.max(axis=1) + np.log(e.sum(axis=1))
                o = o / (1 + np.exp(inputs.real("attn_sink") - lse))[:, None]
            out[t] = codec.round_to(o, "bf16")
    return {"out": out}
