"""Control arrays: lengths, offsets, tables. Each is a function of a draw that returns codes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from conformance.engine.arrays import Draw


def lengths(limit: str, around: str) -> Callable[[Draw], np.ndarray]:
    """int32 lengths in 0..limit: 0, 1, at and beside another size, the whole, and anything between."""

    def make(d: Draw) -> np.ndarray:
        top, near = d.sizes[limit], d.sizes[around]
        points = np.clip(np.array([0, 1, near - 1, near, near + 1, top - 1, top]), 0, top)
        pick = d.integers(0, len(points) + 2)
        free = d.integers(0, top, salt=29)
        return np.where(pick < len(points), points[np.minimum(pick, len(points) - 1)], free).astype(np.int32)

    return make


def offsets(d: Draw) -> np.ndarray:
    """int32 offsets: 0, both ends of the range, where sums leave it, and anything between."""
    points = np.array([0, 2**31 - 1, 2**31 - 2, -(2**31), 2**30, -1])
    pick = d.integers(0, len(points) + 1, salt=31)
    wide = d.integers(-(2**31), 2**31 - 1)
    return np.where(pick < len(points), points[np.minimum(pick, len(points) - 1)], wide).astype(np.int32)
