"""Several codes in one storage element, along the last axis."""

from __future__ import annotations

import numpy as np

from conformance.protocol import FORMATS

Array = np.ndarray


def pack(codes: Array, fmt: str) -> Array:
    """Codes [..., n] to storage [..., n / per_item]; formats of one code an element pass unchanged.

    e2m1x2_lo: int8, the first code in the low nibble. e8m0x4: int32, the first byte lowest.
    Raises ValueError for a last axis that is no multiple of per_item, or an e2m1 code above 15.
    """
    per_item = FORMATS[fmt].per_item
    codes = np.asarray(codes)
    if per_item == 1:
        return codes
    _check_axis(codes, fmt, per_item)
    if fmt == "e2m1x2_lo":
        if codes.size and codes.max() > 0xF:
            msg = f"an e2m1 code has 4 bits, got {int(codes.max())}"
            raise ValueError(msg)
        return (codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))).view(np.int8)
    return np.ascontiguousarray(codes, np.uint8).view(_storage(fmt))


def unpack(storage: Array, fmt: str) -> Array:
    """Storage [..., m] to codes uint8 [..., m * per_item]; the inverse of `pack`.

    Raises ValueError for a 0-d array, TypeError for a dtype that is not the format's storage.
    """
    per_item = FORMATS[fmt].per_item
    storage = np.asarray(storage)
    if per_item == 1:
        return storage
    if storage.dtype.itemsize != FORMATS[fmt].itemsize_bytes:
        msg = f"{fmt} is stored as {FORMATS[fmt].storage}, got {storage.dtype}"
        raise TypeError(msg)
    _check_axis(storage, fmt, 1)
    if fmt == "e2m1x2_lo":
        byte = storage.view(np.uint8)
        codes = np.empty((*storage.shape[:-1], storage.shape[-1] * 2), np.uint8)
        np.bitwise_and(byte, 0xF, out=codes[..., 0::2])
        np.right_shift(byte, 4, out=codes[..., 1::2])
        return codes
    return np.ascontiguousarray(storage).astype(_storage(fmt), copy=False).view(np.uint8)


def _storage(fmt: str) -> np.dtype:
    """Storage dtype with the byte order that the packing defines."""
    return np.dtype(FORMATS[fmt].storage).newbyteorder("<")


def _check_axis(a: Array, fmt: str, multiple: int) -> None:
    if a.ndim == 0 or a.shape[-1] % multiple:
        msg = f"{fmt} packs along the last axis, which must be a multiple of {multiple}; got shape {a.shape}"
        raise ValueError(msg)
