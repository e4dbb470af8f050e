"""Block quantisation: which scales and, given the scale observed, which codes are right. Sets, not intervals.

Two fp32 recipes for a scale are documented, and three for a code; they differ by one unit at ties only.
An interval around the exact quotient would also admit another tie rule.
"""

from __future__ import annotations

import numpy as np

from references.formats import codec

Array = np.ndarray


def scales(amax: Array, fmt: str) -> tuple[Array, Array]:
    """float32 amax / M and amax * (1 / M), M the largest number of the data format `fmt`; amax float32."""
    largest = np.float32(codec.max_finite(fmt))
    amax = np.asarray(amax, np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return amax / largest, amax * (np.float32(1) / largest)


def power_of_two_up(scale: Array) -> Array:
    """float32 scale rounded up to a power of two, as `(bits + 0x7FFFFF) & 0x7F800000`; for normal scales."""
    raw = np.asarray(scale, np.float32).view(np.uint32)
    return ((raw + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)).view(np.float32)


def codes(x: Array, scale: Array, fmt: str, amax: Array | None = None) -> tuple[Array, ...]:
    """Codes of x * (1 / s), x / s and, given the block's amax, x * (M / amax), each in fp32, saturated, to nearest.

    x float32; scale, amax float32 that broadcast to it: s as observed. amax only where s was not rounded further.
    """
    largest = np.float32(codec.max_finite(fmt))
    x, scale = np.asarray(x, np.float32), np.asarray(scale, np.float32)
    with np.errstate(all="ignore"):
        quotients = [x * (np.float32(1) / scale), x / scale]
        if amax is not None:
            quotients.append(x * (largest / np.asarray(amax, np.float32)))
    return tuple(codec.encode(q, fmt, overflow="saturate") for q in quotients)


def off_grid(x: Array, scale: Array, observed: Array, fmt: str) -> Array:
    """|clip(x / s) - decoded code| in half ulps of the format: at most 1 + 2**-18 for any recipe, exact ties kept."""
    largest = codec.max_finite(fmt)
    quotient = np.clip(np.asarray(x, np.float64) / np.asarray(scale, np.float64), -largest, largest)
    return np.abs(quotient - codec.decode(observed, fmt)) / codec.half_ulp(quotient, fmt)
