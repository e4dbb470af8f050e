"""Bytes of the quantised KV cache of one token, to values: the 528-byte FP8 and the 288-byte FP4 form.

Scales stand directly behind each token's data. Source: the byte formats of the
2026-09-30 release.
"""

from __future__ import annotations

import numpy as np

from references.expected import Array
from references.formats import codec

HEAD_DIM = 512
FP8_BYTES, FP4_BYTES = 528, 288
_FP8_GROUPS, _FP4_GROUPS = 16, 32
"""runs of dims with one scale"""


def decode_tokens(tokens: Array, scale_clamp: int = 255) -> Array:
    """Values of cached tokens: [n, bytes] uint8 to [n, 512] float64, exact.

    528 bytes: 512 e4m3, then 16 UE8M0 bytes, one a run of 32 dims, value = e4m3 * 2**(byte - 127).
    288 bytes: 256 bytes of two e2m1 codes, the even dim in the low nibble, then 32 e4m3
    scales, one a run of 16 dims. A NaN scale makes its run NaN.
    scale_clamp: largest UE8M0 byte that is taken as it stands; larger ones count as this one.
    Raises ValueError for another number of bytes.
    """
    n, nbytes = tokens.shape
    if nbytes == FP8_BYTES:
        data = codec.decode(tokens[:, :HEAD_DIM], "e4m3").reshape(n, _FP8_GROUPS, HEAD_DIM // _FP8_GROUPS)
        scale = codec.decode(np.minimum(tokens[:, HEAD_DIM:], np.uint8(scale_clamp)), "e8m0_byte")
    elif nbytes == FP4_BYTES:
        pairs = tokens[:, : HEAD_DIM // 2]
        nibbles = np.stack([pairs & 0xF, pairs >> 4], axis=-1).reshape(n, _FP4_GROUPS, HEAD_DIM // _FP4_GROUPS)
        data = codec.decode(nibbles, "e2m1")
        scale = codec.decode(tokens[:, HEAD_DIM // 2 :], "e4m3")
    else:
        msg = f"a cached token has {FP8_BYTES} or {FP4_BYTES} bytes, got {nbytes}"
        raise ValueError(msg)
    return (data * scale[:, :, None]).reshape(n, HEAD_DIM)
