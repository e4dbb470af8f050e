"""Times as a report reads them: a run is data from elsewhere, so every figure is taken by kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.results import Record

NONE = "-"
"""stands where there is no figure"""


def figure(raw: Any, key: str) -> float | None:
    """A finite, positive number of a table, or None."""
    value = raw.get(key) if isinstance(raw, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 < value < 1e30 and math.isfinite(value) else None


def word(raw: Any, key: str) -> str:
    value = raw.get(key) if isinstance(raw, Mapping) else None
    return value if isinstance(value, str) else ""


@dataclass(frozen=True)
class Timed:
    """One timed case that has a time and an interval."""

    record: Record
    time_s: float
    low_s: float
    high_s: float
    perf: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.record.op} {word(self.perf, 'workload')}"

    @property
    def flops(self) -> float:
        return figure(self.perf, "flops") or 0.0

    @property
    def bytes(self) -> float:
        return figure(self.perf, "bytes") or 0.0

    @property
    def unit(self) -> str:
        return word(self.perf, "unit")

    @property
    def unstable(self) -> bool:
        return self.perf.get("unstable") is True

    def peak(self, key: str, table: str = "peak") -> float | None:
        return figure(self.perf.get(table), key)

    @property
    def blocks_s(self) -> tuple[float, ...]:
        raw = self.perf.get("block_medians_s")
        values = [figure({"x": x}, "x") for x in raw] if isinstance(raw, list) else []
        return tuple(v for v in values if v is not None)

    @property
    def claims(self) -> list[Mapping[str, Any]]:
        raw = self.perf.get("claims")
        return [c for c in raw if isinstance(c, Mapping)] if isinstance(raw, list) else []


def timed_in(records: Iterable[Record]) -> list[Timed]:
    """The timed cases of some records, by op and workload; those without a usable time are left out."""
    out = []
    for r in records:
        times = [figure(r.perf, k) for k in ("time_s", "low_s", "high_s")]
        if r.check == "timing" and r.perf is not None and all(times):
            out.append(Timed(r, *(t for t in times if t is not None), perf=r.perf))
    return sorted(out, key=lambda t: t.record.id)


def time_text(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def share_text(share: float | None) -> str:
    if share is None:
        return NONE
    return f"{100 * share:.2g}%" if share < 0.1 else f"{share:.1%}"
