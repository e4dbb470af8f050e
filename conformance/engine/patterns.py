"""What pattern the wrong elements of an array make, in words."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

PERIODS = (2, 4, 8, 16, 32, 64, 128)


def pattern_of(bad: np.ndarray) -> str:
    """A phrase such as `column 7 of every row` or `the last 3 of 40 columns`; empty where none is wrong."""
    bad = np.asarray(bad, bool)
    count = int(bad.sum())
    if not count:
        return ""
    if count == bad.size:
        return f"every element ({count})"
    if count == 1:
        return f"one element, at {[int(i) for i in np.argwhere(bad)[0]]}"
    if bad.ndim == 0:
        return "the value"
    names = _axis_names(bad.ndim)
    boxes = [np.flatnonzero(bad.any(axis=tuple(j for j in range(bad.ndim) if j != i))) for i in range(bad.ndim)]
    inside = bad[np.ix_(*boxes)]
    whole = bool(inside.all())
    parts = [p for p in (_along(names[i], boxes[i], bad.shape[i]) for i in range(bad.ndim)) if p]
    share = "" if whole else f"{count} of {inside.size} elements in "
    return f"{share}{' of '.join(reversed(parts))}" if parts else f"{count} of {bad.size} elements, all over"


def _axis_names(ndim: int) -> list[str]:
    if ndim == 1:
        return ["element"]
    return [f"index {i} of axis" for i in range(ndim - 2)] + ["row", "column"]


def _along(name: str, at: np.ndarray, n: int) -> str:
    """How the wrong positions lie along one axis; empty where they are everywhere."""
    if len(at) == n:
        return ""
    if len(at) == 1:
        return f"{name} {at[0]}"
    lo, hi = int(at[0]), int(at[-1])
    if hi - lo + 1 == len(at):
        if hi == n - 1:
            return f"the last {len(at)} of {n} {name}s"
        if lo == 0:
            return f"the first {len(at)} of {n} {name}s"
        return f"{name}s {lo} to {hi}"
    for period in _regular(at, n):
        return f"every {period}th {name} from {lo} on"
    return f"{len(at)} of {n} {name}s"


def _regular(at: np.ndarray, n: int) -> Iterator[int]:
    steps = np.unique(np.diff(at))
    if len(steps) == 1 and int(steps[0]) in PERIODS:
        yield int(steps[0])
