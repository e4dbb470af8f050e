"""Timed cases end to end: honest backends pass, every way of cheating is caught, and why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.bench import bench_of
from conformance.collect import timing_cases
from conformance.engine.attempt import Bench
from conformance.engine.effort import EFFORTS, Config
from conformance.engine.grade import Rates
from conformance.engine.run import run_case
from conformance.engine.timing import Plan
from conformance.protocol import supported
from conformance.results import Record
from conformance.speed import TimedCase
from tests import runs

HERE = Path(__file__).parent
QUICK = Plan(first_blocks=6, most_blocks=6, samples=9, warm_rounds=15, warm_s=0.05, flush_bytes=1 << 20, span_s=0.01,
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
    assert (perf["blocks"], perf["executors"]) == (6, 6)
    assert perf["samples"] >= 54  # more where the machine is slow to warm up
    assert 0 < perf["low_s"] <= perf["time_s"] <= perf["high_s"]
    assert perf["flops"] == 2 * 128 * 256 * 512
    assert perf["bytes"] == 2 * (128 + 256) * 512 + 2 * 128 * 256
    assert perf["tflops"] == pytest.approx(perf["flops"] / perf["time_s"] / 1e12)
    assert perf["fraction_nominal"] is None
    assert 0 < perf["fraction_roofline"] < 1
    assert perf["verdict"] == "not comparable"
    assert perf["judged"] == 6 * 5


CHEATS = {
    "cached": ("too_fast",), "pointer": ("numeric",), "thread": ("late_write", "unwritten", "numeric"),
    "stream": ("too_fast",), "zeros": ("numeric",), "clock": ("too_fast",), "first": ("numeric",),
    "half": ("unwritten", "numeric"), "lazy": ("too_fast", "late_write"), "nocall": ("exception",),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_is_caught(bench: Bench, cheat: str, tmp_path: Path) -> None:
    found = timed(bench, GEMM, tmp_path, cheat=cheat)
    assert (found.status, found.reason in CHEATS[cheat]) == ("fail", True), (found.reason, found.message)


def test_every_cheat_of_the_backend_is_tried() -> None:
    assert len(CHEATS) >= 8


@pytest.mark.parametrize("fault", ["zeros", "untouched", "stale"])
def test_faults_of_any_op_show_in_what_was_timed(bench: Bench, fault: str, tmp_path: Path) -> None:
    bench.launcher.inject = fault
    try:
        found = timed(bench, GEMM, tmp_path)
    finally:
        bench.launcher.inject = ""
    assert (found.status, found.reason in ("numeric", "unwritten")) == ("fail", True), found.message
    assert "after timing" in found.message


def test_faster_than_the_published_peak_fails(bench: Bench, tmp_path: Path) -> None:
    slow = Rates("ascend-950dt", "a test", {"bf16": 1e6, "bytes": 1e12})
    found = timed(bench, GEMM, tmp_path, rates=slow)
    assert (found.status, found.reason) == ("fail", "too_fast")
    assert "above the published peak" in found.message
    assert found.perf is not None
    assert found.perf["verdict"] == "too fast"


def test_what_the_backend_can_not_run_is_unsupported(bench: Bench, tmp_path: Path) -> None:
    before = bench.description
    row = {"field": "m", "le": 64, "reason": "small tiles only"}
    bench.description = replace(before, ops={GEMM.op.name: supported(limits=(row,))})
    try:
        found = timed(bench, GEMM, tmp_path)
    finally:
        bench.description = before
    assert found.status == "unsupported"
    assert "small tiles only" in found.message


def test_a_group_is_timed_from_a_barrier_to_its_slowest_rank(bench: Bench, tmp_path: Path) -> None:
    case = next(c for c in timing_cases("small", ("deepep",)) if c.op.name == "deepep.PPBuffer.recv")
    before = bench.description
    bench.description = replace(before, fork_after_import=False)
    try:
        found = timed(bench, case, tmp_path)
    finally:
        bench.description = before
    assert found.status == "pass", found.message
    assert found.perf is not None
    assert found.perf["bytes"] == 2 * 32 * 1024
    # Where starting a process is dear, two blocks share one.
    assert (found.perf["blocks"], found.perf["executors"]) == (6, 3)


def test_a_large_result_is_judged_by_some_of_its_rows(bench: Bench, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.engine.timing_data.LARGE_ELEMENTS", 1)
    assert timed(bench, GEMM, tmp_path).status == "pass"
    found = timed(bench, GEMM, tmp_path, cheat="half")
    assert (found.status, found.reason in CHEATS["half"]) == ("fail", True), found.message


@pytest.mark.parametrize(("argv", "word"), [
    (["--timing", "-n", "2"], "one case at a time"), (["--check=timing"], "a pass of its own"),
    (["--timing", "--case=deepgemm.bf16_gemm_nt/values*"], "unknown case")])
def test_what_makes_no_sense_is_told(argv: list[str], word: str, tmp_path: Path) -> None:
    ended = runs.run(tmp_path / "run", *argv)
    assert ended.code == 4
    assert word in ended.text
    assert not (tmp_path / "run").exists()


def test_a_run_times_the_small_workloads_of_cpu_only(tmp_path: Path) -> None:
    ended = runs.run(tmp_path / "run", "--timing", "--collect-only")
    listed = [line for line in ended.text.splitlines() if "/timing:" in line]
    assert len(listed) == 2
    assert all("b16_topk512" in line or "b4_topk512" in line for line in listed)
