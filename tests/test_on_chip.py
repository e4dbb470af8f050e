"""The one script for a machine with an accelerator, tried on the backends that are here."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

from conformance.results import EXIT_CONFORMING, EXIT_INCONCLUSIVE, EXIT_USAGE, read_run

SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "on_chip"


def visit(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *map(str, args)], env={**os.environ, "PYTHON": sys.executable}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600, check=False)


def test_a_visit_leaves_doctor_correctness_timing_and_a_matrix(tmp_path: Path) -> None:
    ended = visit("cpu", tmp_path / "out", 3, "--module=deepselect")
    assert ended.returncode == EXIT_CONFORMING, ended.stdout
    seen = (tmp_path / "out" / "seen.md").read_text()
    assert ended.stdout.endswith(seen)
    core, timing = read_run(tmp_path / "out" / "core"), read_run(tmp_path / "out" / "timing")
    assert {r.module for r in core.records.values()} == {"deepselect"}
    assert {r.check for r in timing.records.values()} == {"timing"}
    assert all(r.verdict == "conforming" for r in timing.records.values()), timing.records
    # A row for each step, with the number of cases that its run really has.
    assert "| doctor | exit code 0 |" in seen
    assert "| core | exit code 0, " in seen
    assert f"| cases of timing | {len(timing.records)} conforming |" in seen
    with tarfile.open(tmp_path / "out" / "all.tar.gz") as tar:
        names = set(tar.getnames())
    assert {"./seen.md", "./doctor.txt", "./core.log", "./timing.log", "./core/results.jsonl", "./timing/run.json",
            "./matrix/matrix.md", "./matrix/html/speed.html"} <= names


def test_a_machine_without_the_chip_is_told_and_nothing_is_run(tmp_path: Path) -> None:
    ended = visit("ascend", tmp_path / "out")
    assert ended.returncode == EXIT_INCONCLUSIVE, ended.stdout
    assert "Traceback" not in ended.stdout
    assert "| doctor | exit code 6 |" in ended.stdout
    assert not (tmp_path / "out" / "core").exists()
    assert (tmp_path / "out" / "all.tar.gz").exists()


def test_a_folder_with_something_in_it_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "seen.md").write_text("of an earlier visit")
    ended = visit("cpu", tmp_path)
    assert ended.returncode == EXIT_USAGE
    assert "is not empty" in ended.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["seen.md"]
    assert (tmp_path / "seen.md").read_text() == "of an earlier visit"


def test_a_visit_without_a_backend_prints_how_it_is_called() -> None:
    ended = visit()
    assert ended.returncode == EXIT_USAGE
    assert ".ci/on_chip BACKEND FOLDER" in ended.stdout
