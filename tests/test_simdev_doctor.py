"""What the doctor says of the simulated accelerator: well, behind its caller, and lost."""

from __future__ import annotations

from pathlib import Path

import simbench
from simbench import SIMDEV, sim_bench

from conformance.doctor import Examination, examine


def examined(folder: Path, **options: str) -> Examination:
    with sim_bench(folder):
        return examine(SIMDEV, options)


def test_a_well_one_keeps_the_contract(tmp_path: Path) -> None:
    found = examined(tmp_path)
    assert found.usable == ["deepgemm", "deepselect"]
    assert not found.failed
    assert {r.about for r in found.rows if r.state == "absent"} == {"fp64", "fp16", "int16", "int64"}
    assert not (tmp_path / "none" / "tried").exists(), "torch was asked for"


def test_one_that_does_not_wait_is_told(tmp_path: Path) -> None:
    found = examined(tmp_path, defect="not_waiting")
    assert {(r.test, r.about) for r in found.failed} == {("synchronise", "deepgemm"), ("synchronise", "deepselect")}


def test_a_lost_one_is_not_the_adapters_fault(tmp_path: Path) -> None:
    """One row about the device, not one for each thing that can't be tried on it."""
    examined(tmp_path, defect="stays_lost")
    assert simbench.chip(tmp_path / "devices" / "device0").lost
    (row,) = examined(tmp_path).failed
    assert row.test == "alive"
    assert "reset the device" in row.text
