"""The fake clock adds what a simulated device says its work took, and limits follow it."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest

from conformance.engine import clock
from conformance.engine.attempt import Clock


def put(path: Path, seconds: float) -> None:
    # In place: who has the file mapped must see it.
    with path.open("r+b" if path.exists() else "wb") as f:
        f.write(struct.pack("=d", seconds))


def test_without_a_file_it_is_the_real_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(clock.VARIABLE, raising=False)
    assert abs(clock.monotonic() - time.monotonic()) < 1.0


def test_simulated_seconds_are_added_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "clock"
    put(file, 0.0)
    monkeypatch.setenv(clock.VARIABLE, str(file))
    before = clock.monotonic()
    put(file, 3600.5)
    assert clock.monotonic() - before == pytest.approx(3600.5, abs=1.0)


def test_phases_of_a_case_are_measured_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "clock"
    put(file, 0.0)
    monkeypatch.setenv(clock.VARIABLE, str(file))
    spent = Clock()
    with spent.timed("run"):
        put(file, 20.0)
    assert spent["run"] == pytest.approx(20.0, abs=1.0)


@pytest.mark.parametrize("content", [None, b"short"])
def test_a_file_that_can_not_be_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            content: bytes | None) -> None:
    file = tmp_path / "no clock"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv(clock.VARIABLE, str(file))
    with pytest.raises(ValueError, match=r"CONFORMANCE_FAKE_CLOCK=.*no clock must name a file of at least 8 bytes"):
        clock.monotonic()
