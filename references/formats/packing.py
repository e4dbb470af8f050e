"""Several codes in one storage element, along the last axis. One row a form.

Sources: DeepGEMM (two e2m1 a byte, four e8m0 an int32, on Ascend two an int16), TileKernels (the same, and eight e5m6
in three words). `e2m1x2_hi`, the other nibble order, is what a kernel reads that has the order wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from references.formats.spec import float_spec

Array = np.ndarray


@dataclass(frozen=True)
class Packing:
    """How `codes` codes of `bits` bits lie in `words` storage elements; the functions do it for a checked last axis."""

    storage: np.dtype
    codes: int
    words: int
    bits: int
    pack: Callable[[Array], Array]
    unpack: Callable[[Array], Array]


def _nibbles(low: int, high: int) -> Packing:
    """Two codes a byte: code `low` of the pair in the lower nibble, code `high` in the upper."""

    def pack(codes: Array) -> Array:
        return (codes[..., low::2] | (codes[..., high::2] << np.uint8(4))).view(np.int8)

    def unpack(storage: Array) -> Array:
        byte = storage.view(np.uint8)
        codes = np.empty((*storage.shape[:-1], storage.shape[-1] * 2), np.uint8)
        np.bitwise_and(byte, 0xF, out=codes[..., low::2])
        np.right_shift(byte, 4, out=codes[..., high::2])
        return codes

    return Packing(np.dtype(np.int8), 2, 1, 4, pack, unpack)


def _bytes(storage: str) -> Packing:
    """One code a byte, the first one lowest."""
    dtype = np.dtype(storage).newbyteorder("<")

    def pack(codes: Array) -> Array:
        return np.ascontiguousarray(codes, np.uint8).view(dtype)

    def unpack(words: Array) -> Array:
        return np.ascontiguousarray(words).astype(dtype, copy=False).view(np.uint8)

    return Packing(dtype, dtype.itemsize, 1, 8, pack, unpack)


def _pack_12_bits(codes: Array) -> Array:
    """Eight codes are 96 bits, the first code uppermost; cut in three words, the first word uppermost."""
    even, odd = codes[..., 0::2], codes[..., 1::2]
    octets = np.stack([even >> 4, (even & 0xF) << 4 | odd >> 8, odd & 0xFF], axis=-1).astype(np.uint8)
    return octets.reshape(*codes.shape[:-1], codes.shape[-1] // 2 * 3).view(">u4").astype("<u4")


def _unpack_12_bits(words: Array) -> Array:
    octets = np.ascontiguousarray(words).astype(">u4").view(np.uint8).astype(np.uint16)
    first, middle, last = octets[..., 0::3], octets[..., 1::3], octets[..., 2::3]
    codes = np.stack([first << 4 | middle >> 4, (middle & 0xF) << 8 | last], axis=-1)
    return codes.reshape(*words.shape[:-1], words.shape[-1] // 3 * 8)


PACKINGS: dict[str, Packing] = {
    "e2m1x2_lo": _nibbles(0, 1),
    "e2m1x2_hi": _nibbles(1, 0),
    "e8m0x2": _bytes("int16"),
    "e8m0x4": _bytes("int32"),
    "e5m6x8": Packing(np.dtype("<u4"), 8, 3, 12, _pack_12_bits, _unpack_12_bits),
}
"""Every form that holds more than one code; in the other formats a code is a storage element."""


def pack(codes: Array, fmt: str) -> Array:
    """Codes [..., n] to storage [..., n / codes * words] of the form's row; other formats pass unchanged.

    e2m1x2_lo: int8, the first code in the low nibble; e2m1x2_hi: in the high one. e8m0x2: int16, e8m0x4: int32, the
    first byte lowest. e5m6x8: uint32, of which a little-endian view as uint8 is the public tensor of TileKernels.
    Raises ValueError for a last axis that is no multiple of the row's codes, or a code with more bits than the format
    has; KeyError for an unknown format.
    """
    row, codes = PACKINGS.get(fmt), np.asarray(codes)
    if row is None:
        float_spec(fmt)
        return codes
    _check_axis(codes, fmt, row.codes)
    if row.bits < 8 * codes.itemsize and codes.size and codes.max() >> row.bits:
        msg = f"a code of {fmt} has {row.bits} bits, got {int(codes.max())}"
        raise ValueError(msg)
    return row.pack(codes)


def unpack(storage: Array, fmt: str) -> Array:
    """Storage [..., m] to codes [..., m / words * codes], uint8 (of e5m6x8 uint16); the inverse of `pack`.

    Raises ValueError for a 0-d array or a last axis that is no multiple of the row's words, TypeError for a dtype that
    has not the size of the form's storage, KeyError for an unknown format.
    """
    row, storage = PACKINGS.get(fmt), np.asarray(storage)
    if row is None:
        float_spec(fmt)
        return storage
    if storage.dtype.itemsize != row.storage.itemsize:
        msg = f"{fmt} is stored as {row.storage.name}, got {storage.dtype}"
        raise TypeError(msg)
    _check_axis(storage, fmt, row.words)
    return row.unpack(storage)


def _check_axis(a: Array, fmt: str, multiple: int) -> None:
    if a.ndim == 0 or a.shape[-1] % multiple:
        msg = f"{fmt} packs along the last axis, which must be a multiple of {multiple}; got shape {a.shape}"
        raise ValueError(msg)
