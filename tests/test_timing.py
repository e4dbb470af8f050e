"""Timed cases end to end: honest backends pass, every way of cheating is caught, and why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.bench import bench_of
from conformance.collect import timing_cases
from conformance.engine.attempt import Bench
from conformance.engine.grade import Rates
from conformance.engine.run import EFFORTS, Config, run_case
from conformance.engine.timing import Plan
from conformance.results import Record
from conformance.speed import TimedCase

HERE = Path(__file__).parent
QUICK = Plan(first_blocks=6, most_blocks=6, samples=6, warm_rounds=15, warm_s=0.05, flush_bytes=1 << 20, span_s=0.01,
             spans=2)
GEMM = next(c for c in timing_cases("small", ("deepgemm",)) if c.op.name == "deepgemm.bf16_gemm_nt")


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """One for all tests: the process that executors are forked from imports torch once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        with bench_of("cheating_backend:Cheating", {}) as made:
            made.timing = QUICK
            yield made


def timed(bench: Bench, case: TimedCase, tmp_path: Path, rates: Rates | None = None, **options: str) -> Record:
    bench.launcher.options = options
    bench.rates = rates or Rates(source="a test", attained={"bytes": 1e10, "bf16": 1e11, "fp32": 1e11})
    return run_case(case, Config(bench, EFFORTS["core"], 0, tmp_path, "cheating", options))


@pytest.mark.parametrize("cheat", ["", "stream_honest"])
def test_an_honest_backend_passes(bench: Bench, cheat: str, tmp_path: Path) -> None:
    found = timed(bench, GEMM, tmp_path, cheat=cheat)
    assert found.status == "pass", found.message
    perf = found.perf
    assert perf is not None
    assert perf["clock"] == ("device_event" if cheat else "host")
    assert (perf["blocks"], perf["executors"], perf["samples"]) == (6, 6, 36)
    assert 0 < perf["low_s"] <= perf["time_s"] <= perf["high_s"]
    assert perf["flops"] == 2 * 128 * 256 * 512
    assert perf["bytes"] == 2 * (128 + 256) * 512 + 2 * 128 * 256
    assert perf["tflops"] == pytest.approx(perf["flops"] / perf["time_s"] / 1e12)
    assert perf["fraction_nominal"] is None
    assert 0 < perf["fraction_roofline"] < 1
    assert perf["verdict"] == "not comparable"
    assert perf["judged"] == 6 * 4


CHEATS = {
    "cached": ("too_fast",), "pointer": ("numeric",), "thread": ("late_write", "unwritten", "numeric"),
    "stream": ("too_fast",), "zeros": ("numeric",), "clock": ("too_fast",), "first": ("numeric",),
    "half": ("unwritten", "numeric"), "lazy": ("too_fast", "late_write"), "nocall": ("exception",),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_is_caught(bench: Bench, cheat: str, tmp_path: Path) -> None:
    found = timed(bench, GEMM, tmp_path, cheat=cheat)
    assert (found.status, found.reason in CHEATS[cheat]) == ("fail", True), (found.reason, found.message)
