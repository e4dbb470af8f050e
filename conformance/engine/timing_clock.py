"""Whether a backend's clock can be believed: held against the host's, and against results as it stops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.engine.judge import Finding

CLOCK_AGREES = 0.9
"""share of the time until the device is idle that the backend's clock must have seen"""
ROUND_SLACK_S = 1e-4


@dataclass
class ClockChecks:
    """What the backend's clock said beside the host's. A busy host makes a wait look longer, so of all rounds the one
    counts that speaks best for the clock: what is wrong with a clock is wrong in each.
    """

    spans: list[tuple[float, float, float]] = field(default_factory=list)
    """calls in a row, seconds by the backend's clock, and until the device was idle by the host's"""
    excess_s: list[float] = field(default_factory=list)
    """of a round: how much longer than its time the device was busy after the call had returned"""
    shares: list[float] = field(default_factory=list)
    """of a round: its time over what the host's clock says"""
    beyond: int = 0
    """rounds that are said to have taken longer than they did"""

    def note(self, answer: Mapping[str, Any]) -> None:
        for s, w, e, r in zip(answer["samples"], answer["wall"], answer["enter"], answer["return"], strict=True):
            self.excess_s.append(w - (r - e) - s)
            self.shares.append(s / w)
            self.beyond += s > 1.05 * w + ROUND_SLACK_S
        self.spans += map(tuple, answer["spans"])

    def finding(self, clock: str, usual_s: float) -> Finding | None:
        """What contradicts the clock, if anything does."""
        if self.beyond > len(self.shares) / 2:
            return Finding("fail", "execute", "contract", f"the backend's clock ({clock}) says more than the rounds "
                           f"took by the host's clock, in {self.beyond} of {len(self.shares)}")
        if clock == "profiler":
            return None
        n, took, wall = max(self.spans, key=lambda s: s[1] / s[2])
        if took / wall < CLOCK_AGREES:
            return Finding("fail", "execute", "too_fast",
                           f"{n:.0f} calls in a row kept the device busy for {wall:.3g} s by the host's clock; the "
                           f"backend's clock ({clock}) says {took:.3g} s: it lies, or does not see all of the work")
        if min(self.excess_s) > max(usual_s, 2 * ROUND_SLACK_S):
            return Finding("fail", "execute", "too_fast",
                           f"rounds are timed at {usual_s:.3g} s by the backend's clock ({clock}), and the device was "
                           f"still busy for {min(self.excess_s):.3g} s more after each call had returned")
        top = float(np.quantile(self.shares, 0.9))
        if clock == "host" and usual_s > 2 * ROUND_SLACK_S and top < CLOCK_AGREES - 0.1:
            return Finding("fail", "execute", "too_fast",
                           f"single rounds are timed at {top:.2f} of what the host's clock says")
        return None


def moved_finding(answer: Mapping[str, Any]) -> Finding | None:
    """Whether results changed after the clock had stopped."""
    moved = sum(answer["moved"])
    if moved:
        text = f"in {moved} of {len(answer['moved'])} rounds the result still changed after the clock had stopped"
        return Finding("fail", "execute", "late_write", text)
    return None
