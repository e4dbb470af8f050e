"""The sentence about a wrong element says what differs."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.engine.judge import sentence, shown
from references.expected import Exact
from references.formats import codec


@pytest.mark.parametrize(("wanted", "observed", "says"), [
    (0x7F800001, 0x7FC00001, "d[1] is nan, expected nan of another bit pattern than 0x7fc00001; 1 of 2"),
    (0x7F800001, 0x3F800000, "d[1] is 1.0, expected nan; 1 of 2"),
    (0x80000000, 0x00000000, "d[1] is 0.0, expected -0.0; 1 of 2"),
])
def test_what_differs_is_said(wanted: int, observed: int, says: str) -> None:
    want, got = (np.array([0x3F800000, code], np.uint32).view(np.float32) for code in (wanted, observed))
    judged = Exact(want, any_nan=False).judge(got, "fp32")
    assert judged.bad.tolist() == [False, True]
    figures = {"wrong": 1, "elements": 2, "index": [1], "observed": shown(codec.decode(got, "fp32")[1]),
               "expected": shown(codec.decode(want, "fp32")[1])}
    assert sentence("d", judged, got, "fp32", figures) == f"{says} elements are wrong"
