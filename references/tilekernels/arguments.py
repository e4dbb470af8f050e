"""What oracles ask of a problem and of a profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from references.bounds.constants import FLUSH_FP32
from references.bounds.profile import resolve
from references.expected import Problem

_WORDS = {"yes": True, "no": False}


def argument(problem: Problem, name: str, default: Any) -> Any:
    """A scalar argument by its public name: from the drawn values, the sizes or the variant, else the default.

    The text of a variant is read as the default's type; `yes` and `no` are booleans, `1x32` a tuple.
    """
    for place in (problem.values, problem.sizes):
        if place.get(name) is not None:
            return place[name]
    text = problem.variant.get(name)
    if text is None:
        return default
    if isinstance(default, bool):
        return _WORDS[text]
    return tuple(map(int, text.split("x"))) if isinstance(default, tuple) else type(default)(text)


def flushes(profile: Mapping[str, Any]) -> bool:
    """Whether fp32 subnormals may count as zero."""
    return resolve(profile)["subnormals"] != "keep"


def underflow(profile: Mapping[str, Any]) -> float:
    """Largest error of one fp32 operation whose result lies below the normal range."""
    return FLUSH_FP32 if flushes(profile) else 2.0**-150
