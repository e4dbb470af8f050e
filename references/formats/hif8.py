"""HiFloat8 (HiF8), Ascend's 8-bit format of tapered precision: codes to values.

Source: Luo et al. 2024, "Ascend HiFloat8 Format for Deep Learning" (arXiv 2409.16626). The fields vary in width, so it
is a table of its own and no row of `spec.py`. From the highest bit: sign, dot, exponent, fraction. The dot is a prefix
code that tells how wide the exponent is. The exponent is sign and magnitude; the leading one of the magnitude is not
stored, so that no exponent has two codes. What is left is the fraction of 1.fraction. The denormal dot has no exponent
field: its three bits m stand for 2**(m - 23), and m = 0 for zero and, with the sign, for the one NaN. There is no
negative zero. The largest number of the widest exponent is replaced by infinity.
"""

from __future__ import annotations

from functools import cache

import numpy as np

Array = np.ndarray

NAN_CODE = 0x80
INF_CODE = 0x6F
SIGN_BIT = 0x80

_DENORMAL = None
#         dot     bits of the dot, of the exponent
_DOTS = ((0b11, 2, 4),
         (0b10, 2, 3),
         (0b01, 2, 2),
         (0b001, 3, 1),
         (0b0001, 4, 0),
         (0b0000, 4, _DENORMAL))
_DENORMAL_BIAS = 23


def decode(codes: Array) -> Array:
    """float64 values [...] of HiF8 codes uint8 [...], exact. Raises TypeError for another dtype."""
    codes = np.asarray(codes)
    if codes.dtype != np.uint8:
        msg = f"codes of hif8 are uint8, got {codes.dtype}"
        raise TypeError(msg)
    return np.asarray(_table()[codes])


@cache
def _table() -> Array:
    """Values of the 256 codes."""
    half = np.array([_value(code) for code in range(SIGN_BIT)])
    half[INF_CODE] = np.inf
    table = np.concatenate([half, -half])
    table[NAN_CODE] = np.nan
    table.setflags(write=False)
    return table


def _value(code: int) -> float:
    """Value of a code without sign, as the fields have it."""
    dot_bits, exponent_bits = next((n, e) for dot, n, e in _DOTS if code >> (7 - n) == dot)
    rest_bits = 7 - dot_bits
    rest = code & ((1 << rest_bits) - 1)
    if exponent_bits is _DENORMAL:
        return 2.0 ** (rest - _DENORMAL_BIAS) if rest else 0.0
    fraction_bits = rest_bits - exponent_bits
    significand = 1.0 + (rest & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    if not exponent_bits:
        return significand
    leading = 1 << (exponent_bits - 1)
    field = rest >> fraction_bits
    magnitude = leading | (field & (leading - 1))
    return significand * 2.0 ** (-magnitude if field & leading else magnitude)
