"""What the codec costs, with wide margins: a loop or a sort in Python would be far outside."""

from __future__ import annotations

import time

import numpy as np
import pytest

from references.formats import codec


def best_of(function, rounds: int = 300) -> float:
    """Fastest of many calls, in seconds: what the code costs when nobody else runs."""
    best = np.inf
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


@pytest.mark.parametrize("fmt", ["bf16", "e4m3", "e2m1x2_lo", "e5m6", "fp32"])
def test_small_arrays_cost_some_twenty_microseconds(fmt):
    x = np.linspace(-5, 5, 128)
    codes = codec.encode(x, fmt)
    assert best_of(lambda: codec.encode(x, fmt)) < 60e-6
    assert best_of(lambda: codec.decode(codes, fmt)) < 20e-6


@pytest.mark.parametrize("fmt", ["bf16", "e4m3"])
def test_large_arrays_cost_nanoseconds_an_element(fmt):
    """Some 2 to decode and 5 to encode, as against 100 and more an element in a Python loop or by a sort."""
    x = np.random.default_rng(0).standard_normal(1 << 20)
    codes = codec.encode(x, fmt)
    assert best_of(lambda: codec.decode(codes, fmt), 10) / x.size < 25e-9
    assert best_of(lambda: codec.encode(x, fmt), 10) / x.size < 50e-9
