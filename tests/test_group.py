"""A group of ranks ends as one: whatever a rank does, the case is told soon and by the rank that is at fault."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from conformance.bench import bench_of  # noqa: E402
from conformance.collect import cases_at  # noqa: E402
from conformance.engine.attempt import Bench  # noqa: E402
from conformance.engine.effort import EFFORTS, Config  # noqa: E402
from conformance.engine.run import run_case  # noqa: E402
from conformance.results import Record  # noqa: E402

SOON_S = 10.0
"""beyond what the hang's own limit takes; the transport would wait for its whole limit"""


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests"))
        with bench_of("lame_backend:Lame", {}) as b:
            yield b


def tried(bench: Bench, mode: str, timeout_s: float = 60.0) -> tuple[Record, float]:
    """The record of one small combine case, and how long it took."""
    case = next(c for c in cases_at("core", ("deepep",)) if c.id.startswith("deepep.EPBuffer.combine/values"))
    bench.launcher.options = {"mode": mode}
    config = Config(replace(bench, case_timeout_s=timeout_s), replace(EFFORTS["core"], examples=2, shrink_s=0.0), 0,
                    Path("/dev/null"), "lame", {}, confirm=False)
    started = time.monotonic()
    record = run_case(case, config)
    return record, time.monotonic() - started


def test_a_good_group_passes(bench: Bench) -> None:
    assert tried(bench, "")[0].status == "pass"


def test_a_rank_that_is_late_is_waited_for(bench: Bench) -> None:
    assert tried(bench, "late")[0].status == "pass"


@pytest.mark.parametrize(("mode", "reason", "word"), [("kill", "signal", "SIGKILL"), ("exit", "exit", "exit code 3")])
def test_a_rank_that_dies_ends_the_group_at_once(bench: Bench, mode: str, reason: str, word: str) -> None:
    record, seconds = tried(bench, mode)
    assert (record.status, record.reason) == ("crash", reason)
    assert "rank 2" in record.message
    assert word in record.message
    assert seconds < SOON_S


def test_a_rank_that_raises_ends_the_group_at_once(bench: Bench) -> None:
    record, seconds = tried(bench, "raise")
    assert (record.status, record.reason) == ("fail", "exception")
    assert "rank 2" in record.message
    assert "had enough" in record.message
    assert seconds < SOON_S


def test_a_rank_that_hangs_ends_with_the_limit_of_the_call(bench: Bench) -> None:
    record, seconds = tried(bench, "hang", timeout_s=3.0)
    assert record.status == "timeout"
    assert "rank 2" in record.message
    assert seconds < 3.0 + SOON_S
