"""The words for where an error sits, and its picture."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from conformance.engine.patterns import pattern_of
from conformance.engine.picture import RIGHT, WRONG, error_map, write_png


def wrong(shape: tuple[int, ...], *index: object) -> np.ndarray:
    bad = np.zeros(shape, bool)
    bad[index] = True
    return bad


@pytest.mark.parametrize(("bad", "words"), [
    (np.zeros((4, 4), bool), ""),
    (np.ones((4, 4), bool), "every element (16)"),
    (wrong((8, 16), 2, 3), "one element, at [2, 3]"),
    (wrong((8, 16), 2), "row 2"),
    (wrong((8, 16), slice(None), 7), "column 7"),
    (wrong((8, 40), slice(None), slice(32, None)), "the last 8 of 40 columns"),
    (wrong((8, 40), slice(0, 2)), "the first 2 of 8 rows"),
    (wrong((8, 64), slice(None), slice(3, None, 16)), "every 16th column from 3 on"),
    (wrong((64, 64), slice(32, 48), slice(16, 32)), "columns 16 to 31 of rows 32 to 47"),
    (wrong((30,), slice(10, 20)), "elements 10 to 19"),
])
def test_pattern(bad: np.ndarray, words: str) -> None:
    assert pattern_of(bad) == words


def test_scattered_errors_are_counted() -> None:
    bad = np.zeros((20, 20), bool)
    bad[np.arange(20), np.arange(20)] = True
    assert pattern_of(bad) == "20 of 400 elements, all over"


def test_png_holds_the_picture(tmp_path: Path) -> None:
    image = error_map(wrong((8, 16), 2, 3), None)
    write_png(tmp_path / "e.png", image)
    data = (tmp_path / "e.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert (height, width) == image.shape[:2]
    at = data.index(b"IDAT")
    n = struct.unpack(">I", data[at - 4 : at])[0]
    raw = np.frombuffer(zlib.decompress(data[at + 4 : at + 4 + n]), np.uint8).reshape(height, 1 + 3 * width)
    assert np.array_equal(raw[:, 1:].reshape(height, width, 3), image)


def test_picture_marks_the_wrong_element() -> None:
    image = error_map(wrong((8, 16), 2, 3), None)
    zoom = image.shape[0] // 8
    assert tuple(image[2 * zoom + zoom // 2, 3 * zoom + zoom // 2]) == WRONG
    assert tuple(image[5 * zoom + zoom // 2, 9 * zoom + zoom // 2]) == RIGHT


def test_a_large_array_keeps_its_one_wrong_element() -> None:
    assert (error_map(wrong((5000, 3000), 4999, 2999), None) == WRONG).all(-1).any()
