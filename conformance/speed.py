"""Frozen data: what of an op is timed, on which sizes, and how its work is counted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.model import Case, Cost, Op, Problem, Variant

SCALES = ("small", "model")
"""small: what a host does in milliseconds; model: sizes of layers of published models"""

Counted = Callable[[Problem, Mapping[str, Any]], Cost]
"""(problem, input arrays by key) -> useful operations, and bytes that must move at least once"""


@dataclass(frozen=True)
class Workload:
    """One problem that is timed: sizes, and variant keys; other keys take the first legal value.

    values: of drawn arguments; others take their first choice. source: which model, or whose table, it comes from.
    """

    name: str
    sizes: Mapping[str, Any]
    variant: Mapping[str, str] = field(default_factory=dict)
    scale: str = "small"
    values: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9_.+-]+", self.name) or self.scale not in SCALES:
            msg = f"workload {self.name!r}: a name of a-z 0-9 _ . + -, and a scale of {SCALES}, not {self.scale!r}"
            raise ValueError(msg)
        if self.scale == "model" and not self.source:
            msg = f"workload {self.name}: a size of a model says which"
            raise ValueError(msg)


@dataclass(frozen=True, eq=False)
class Speed:
    """How an op is timed.

    counted: useful operations only, and each byte once. engine: the peak that the operations are compared with, such as
    `bf16`, `fp8`, `vector_fp32`; a function of the variant, None where an op is about bytes alone.
    own, own_rule: the module's own counting where it differs, and the rule in a sentence.
    timed: the steps that are timed, by default the first that calls the op and all behind it.
    rows: (size, arrays): the size along whose first axis these arrays can be cut, so that some rows of a large result
    stand for all. rolled: arrays with a `data` of their own that are still right when their first axis is rolled.
    """

    op: str
    counted: Counted
    engine: Callable[[Variant], str | None]
    workloads: tuple[Workload, ...]
    own: Counted | None = None
    own_rule: str = ""
    timed: tuple[str, ...] = ()
    rows: tuple[str, tuple[str, ...]] | None = None
    rolled: tuple[str, ...] = ()
    settle: Callable[[Problem, Mapping[str, Any]], None] | None = None


@dataclass(frozen=True, eq=False)
class TimedCase(Case):
    """A case of the check `timing`: its variant starts with the workload's name."""

    speed: Speed | None = None
    workload: Workload | None = None
    of: Variant | None = None
    """the op's own variant"""


def timed_cases(op: Op, speed: Speed, variants: tuple[Variant, ...]) -> list[TimedCase]:
    """A case a workload. Raises ValueError where a workload names what the op doesn't have."""
    out = []
    for w in speed.workloads:
        found = next((v for v in variants if all(v.get(k) == x for k, x in w.variant.items())), None)
        unknown = sorted((set(w.sizes) ^ set(op.sizes)) - (set(op.sample) - set(w.sizes)))
        if found is None or unknown:
            what = f"sizes {', '.join(unknown)}" if unknown else f"a variant with {dict(w.variant)}"
            msg = f"{op.name}: workload {w.name}: the op has no {what}"
            raise ValueError(msg)
        out.append(TimedCase(op, Variant({"workload": w.name, **found}), "timing", speed=speed, workload=w, of=found))
    return out
