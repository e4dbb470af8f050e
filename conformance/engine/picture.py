"""A PNG that shows where an error sits; written without an imaging library."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

MAX_PIXELS = 512
RIGHT, MARGINAL, WRONG = (232, 240, 232), (240, 200, 90), (176, 20, 40)
GRID = (205, 214, 205)


def error_map(bad: np.ndarray, ratio: np.ndarray | None, tile: int = 16) -> np.ndarray:
    """An RGB image of an array folded to two axes: right, near its bound, wrong; a line every `tile` elements."""
    rows = bad.reshape(-1, bad.shape[-1]) if bad.ndim > 1 else bad.reshape(1, -1)
    near = None if ratio is None else np.asarray(ratio).reshape(rows.shape) > 0.5
    fold = [max(1, -(-n // MAX_PIXELS)) for n in rows.shape]
    rows = _fold(rows, fold)
    image = np.empty((*rows.shape, 3), np.uint8)
    image[...] = RIGHT
    if near is not None:
        image[_fold(near, fold)] = MARGINAL
    image[rows] = WRONG
    zoom = max(1, min(16, MAX_PIXELS // max(image.shape[:2])))
    big = image.repeat(zoom, 0).repeat(zoom, 1)
    if zoom > 2:
        for axis in (0, 1):
            lines = np.arange(0, big.shape[axis], zoom * tile)
            index = (lines,) if axis == 0 else (slice(None), lines)
            light = big[index]
            light[(light == RIGHT).all(-1)] = GRID
            big[index] = light
    return big


def _fold(a: np.ndarray, by: list[int]) -> np.ndarray:
    """Any of a block of elements, one pixel."""
    out = np.zeros((-(-a.shape[0] // by[0]), -(-a.shape[1] // by[1])), bool)
    at = np.argwhere(a)
    out[at[:, 0] // by[0], at[:, 1] // by[1]] = True
    return out


def write_png(path: Path, image: np.ndarray) -> None:
    """Write an RGB uint8 image."""
    height, width, _ = image.shape
    raw = np.zeros((height, 1 + width * 3), np.uint8)
    raw[:, 1:] = image.reshape(height, -1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw.tobytes(), 6)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
