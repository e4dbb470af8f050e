"""The bound of a result that is rounded once, as tight as rounding allows."""

from __future__ import annotations

import numpy as np

from references.bounds import basic
from references.expected import Array
from references.formats import codec


def rounded_once(value: Array, error: Array, fmt: str) -> Array:
    """Distance from value to whatever any number within error of it rounds to in `fmt`, to nearest.

    Rounding is monotone, so the two ends decide: 0 where the value is a number of the format and the error
    smaller than half an ulp. value and error finite; past the largest finite number `basic.rounded`.
    """
    distance = np.zeros(np.broadcast(value, error).shape)
    for end in (value - error, value + error):
        distance = np.maximum(distance, np.abs(codec.round_to(end, fmt) - value))
    return np.where(np.isfinite(distance), distance, basic.rounded(value, error, fmt))
