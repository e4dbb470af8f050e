"""The numerics profile: what a backend may declare about how it computes, and what holds where it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from references.bounds.constants import ACCUMULATORS, PROBABILITIES

NAN_RULES = ("consistent", "drop", "propagate", "free")
"""of a maximum or minimum: NaN is dropped or wins, the same for every order of the operands; free: nothing is said"""

#      key               default     other values; () stands for a list of formats
PROFILE: dict[str, tuple[Any, tuple[str, ...]]] = {
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
}  # fmt: skip
"""Keys of `protocol.Description.profile`, as far as oracles use them."""


def resolve(profile: Mapping[str, Any]) -> dict[str, Any]:
    """The profile with every key of `PROFILE` filled in; further keys pass.

    Raises ValueError for a value that a known key does not have.
    """
    for key, value in profile.items():
        _, allowed = PROFILE.get(key, (None, ()))
        if allowed and value not in allowed:
            msg = f"profile {key}={value!r}; known: {', '.join(allowed)}"
            raise ValueError(msg)
    return {key: default for key, (default, _) in PROFILE.items()} | dict(profile)
