"""What the results of a call must be under a numerics profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.engine.example import Example
from conformance.model import Op
from references.expected import Expected


def ask(op: Op, example: Example, profile: Mapping[str, Any]) -> Mapping[Any, Expected]:
    """The oracle's answer; what the profile says of every op alike is put in here. Raises what the oracle raises."""
    expected = op.oracle(example.problem, example.inputs, profile)
    if profile.get("overflow") != "saturate":
        return expected
    return {key: want.saturating() for key, want in expected.items()}
