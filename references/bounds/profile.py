"""The numerics profile: what a backend may declare about how it computes, and what holds where it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from references.bounds.constants import ACCUMULATORS, PROBABILITIES
from references.formats.spec import FLOATS

NAN_RULES = ("consistent", "drop", "propagate", "free")
"""of a maximum or minimum: NaN is dropped or wins, the same for every order of the operands; free: nothing is said"""

#      key               default     every value; () stands for a list of formats, a range for a number
PROFILE: dict[str, tuple[Any, tuple[str, ...] | range]] = {
    "accumulator":      ("fp32",     tuple(ACCUMULATORS)),
    "input_conversion": ("none",     ("none", "tf32", "tf32_trunc", "hf32")),
    "p":                ("bf16",     tuple(PROBABILITIES)),
    "l_from":           ("fp32",     ("fp32", "rounded")),
    "partial":          ("fp32",     ("fp32", "bf16", "fp16")),
    "subnormals":       ("keep",     ("keep", "flush_in", "flush_out", "flush")),
    "overflow":         ("inf",      ("inf", "saturate")),
    "e4m3_overflow":    ("saturate", ("saturate", "nan")),
    "reduce_nan":       ("consistent", NAN_RULES),
    "max_nan":          ("consistent", NAN_RULES),
    "cast_steps":       ("one",      ("one", "through_fp32")),
    "hops":             ((),         ()),
    "c_added":          ("before_rounding", ("before_rounding", "after_rounding")),
    "foreign_weights":  ("kept",     ("kept", "zero")),
    "invalid_index":    ("minus_one", ("minus_one", "negative")),
    "kv_scale_clamp":   (255,        range(256)),
    "nan_sentinel":     ("first",    ("first", "row")),
    "nan_short_row":    ("unchecked", ("unchecked", "checked")),
}  # fmt: skip
"""Keys of `protocol.Description.profile`; an oracle reads no others.

c_added: whether the product is rounded before C is added to it. foreign_weights: what a dispatched row holds where
the expert is another rank's. invalid_index: which indices of a KV list are skipped. kv_scale_clamp: the largest
exponent byte of a KV scale, larger ones count as it. nan_sentinel: how much of a top-k row with a NaN is the sentinel.
nan_short_row: whether rows of at most k elements are searched for NaN too.
"""
ADDED = ("requirements",)
"""put beside the profile by the engine"""


def mistakes(profile: Mapping[str, Any]) -> list[str]:
    """What a profile says that can't be meant: unknown keys, unknown values. A sentence each."""
    out = []
    for key, value in profile.items():
        if key in ADDED:
            continue
        if key not in PROFILE:
            out.append(f"profile {key}: no such key; known: {', '.join(PROFILE)}")
            continue
        allowed = PROFILE[key][1]
        if key == "hops":
            if not isinstance(value, (list, tuple)) or any(v not in FLOATS for v in value):
                out.append(f"profile hops={value!r}; a list of formats: {', '.join(FLOATS)}")
        elif isinstance(value, bool) or value not in allowed:
            known = f"{allowed.start} to {allowed.stop - 1}" if isinstance(allowed, range) else ", ".join(allowed)
            out.append(f"profile {key}={value!r}; known: {known}")
    return out


def resolve(profile: Mapping[str, Any]) -> dict[str, Any]:
    """The profile with every key of `PROFILE` filled in. Raises ValueError for what `mistakes` tells."""
    wrong = mistakes(profile)
    if wrong:
        raise ValueError("; ".join(wrong))
    return {key: default for key, (default, _) in PROFILE.items()} | dict(profile)
