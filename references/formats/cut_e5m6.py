"""TileKernels' own rounding from fp32 to e5m6, which is no round to nearest below 2**-14.

Source: the cast to e5m6 of TileKernels 1.0, kernel and PyTorch reference alike. The number is cut to the e5m6 number
towards zero. Then one is added where the low 17 bits of the *fp32 pattern* are more than half of their range, or half
and the code is odd. For the normal numbers of e5m6 these are just the bits that were cut, so it is nearest even. Below
2**-14 more bits are cut, and the low 17 bits say nothing about the upper ones among them: the result is one of the two
neighbours, not always the nearer.
"""

from __future__ import annotations

import numpy as np

from references.formats.codec import bits, encode
from references.formats.spec import CODE_DTYPES

Array = np.ndarray

_TAIL = np.uint32(0x1FFFF)
_HALF = np.uint32(0x10000)
_LIMIT = np.float32(65536.0)
"""from here on the kernel and its PyTorch reference differ; scaled data, of which 65024 is the largest, stays below"""


def encode_cut(values: Array) -> Array:
    """e5m6 codes uint16 [...] of float32 values [...]. Zeros keep their sign.

    Raises TypeError for another dtype, ValueError for 2**16 and more and for NaN, which the rule does not cover.
    """
    values = np.asarray(values)
    if values.dtype != np.float32:
        msg = f"the rule cuts fp32 patterns, got {values.dtype}"
        raise TypeError(msg)
    if not np.all(np.abs(values) < _LIMIT):
        msg = "the cast to e5m6 is defined for magnitudes below 65536"
        raise ValueError(msg)
    code = encode(values, "e5m6", rounding="toward_zero")
    tail = (bits(values) & _TAIL) + (code & np.uint16(1))
    return np.asarray(code + (tail > _HALF).astype(CODE_DTYPES["e5m6"]))
