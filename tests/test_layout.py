"""Where arrays stand: strides, guard bands, packing."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.engine.layout import GUARD_BYTES, strided
from conformance.protocol import (
    DTypeArg,
    TensorArg,
    TensorSpec,
    TokenArg,
    TupleArg,
    ValueArg,
    arg_from_json,
    arg_to_json,
    contiguous_strides,
)


@pytest.mark.parametrize(("fmt", "shape", "major", "align", "units", "strides", "row_bytes"), [
    ("fp32", (3, 5), None, 0, 1, (5, 1), 20),
    ("fp32", (3, 5), None, 16, 1, (8, 1), 32),
    ("fp32", (3, 5), None, 16, 2, (16, 1), 64),
    ("bf16", (3, 5), "m", 16, 1, (1, 8), 16),
    ("bf16", (3, 5), "k", 16, 1, (8, 1), 16),
    ("bf16", (2, 3, 5), None, 16, 1, (24, 8, 1), 16),
    ("e2m1x2_lo", (3, 6), None, 0, 1, (3, 1), 3),
    ("e2m1x2_lo", (3, 5), None, 0, 1, (3, 1), 3),
    ("e8m0x4", (3, 6), "m", 16, 1, (1, 4), 16),
    ("int32", (7,), None, 0, 1, (1,), 28),
    ("int32", (), None, 0, 1, (), 0),
])
def test_strides(fmt: str, shape: tuple[int, ...], major: str | None, align: int, units: int, strides: tuple[int, ...],
                 row_bytes: int) -> None:
    axes = ["g", "m", "k"][-len(shape):] if shape else []
    spec, got = strided(fmt, shape, major, axes, align, units, 0)
    assert spec.strides == strides
    assert got == row_bytes


def test_span_counts_to_the_last_element() -> None:
    assert TensorSpec((3, 5), (8, 1), "float32", "fp32").span_bytes() == (2 * 8 + 5) * 4
    assert TensorSpec((0, 5), (8, 1), "float32", "fp32").span_bytes() == 0
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert GUARD_BYTES >= 256


def test_arguments_survive_json() -> None:
    spec = TensorSpec((3, 5), (8, 1), "bfloat16", "bf16")
    for arg in (TensorArg(1, 512, spec), ValueArg(None), ValueArg([1, "a", 2.5]), DTypeArg("int32"), TokenArg("h"),
                TupleArg((TensorArg(0, 0, spec), ValueArg(3)))):
        assert arg_from_json(arg_to_json(arg)) == arg


def test_np_view_of_a_strided_array() -> None:
    from conformance.engine.layout import ArrayPlan, np_view
    from conformance.model import In

    spec, row = strided("bf16", (3, 5), None, ["m", "k"], 16, 1, 0)
    image = np.zeros(GUARD_BYTES * 2 + spec.span_bytes(), np.uint8)
    plan = ArrayPlan("a", In("a", "bf16", "m k"), "bf16", (3, 5), spec, 0, GUARD_BYTES, row)
    np_view(image, plan)[...] = np.arange(15, dtype=np.uint16).reshape(3, 5)
    words = image[GUARD_BYTES : GUARD_BYTES + spec.span_bytes()].view(np.uint16)
    assert words[8:13].tolist() == [5, 6, 7, 8, 9]
    assert words[5:8].tolist() == [0, 0, 0]
