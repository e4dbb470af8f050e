"""The doctor finds every mistake of an adapter in the row that is about it, and finds none in a good one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_adapter import MISTAKES

from conformance import backends
from conformance.bench import bench_of
from conformance.cli import main
from conformance.doctor import (
    Examination,
    Patient,
    Row,
    call_rows,
    contract_rows,
    description_rows,
    examine,
    folded,
    page,
    settings_of,
)
from conformance.engine import contract
from conformance.engine.attempt import Bench
from conformance.protocol import FORMATS, Backend, Description, supported

HERE = Path(__file__).resolve().parent
FAULTY = "faulty_adapter:Faulty"


@pytest.fixture(scope="module", autouse=True)
def _plug_in_is_found() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as m:
        m.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        yield


@pytest.fixture(scope="module")
def bench(_plug_in_is_found: None) -> Iterator[Bench]:
    with bench_of(FAULTY, {}) as bench:
        yield bench


def rows_of(bench: Bench, mistake: str, wanted: str) -> Iterator[Row]:
    """The rows of the part of the examination that is about `wanted`."""
    if wanted == "description":
        yield from description_rows(backends.describe(FAULTY, {"mistake": mistake}))
        return
    bench.launcher.options["mistake"] = mistake
    patient = Patient(bench)
    part = call_rows if wanted.startswith(("synchronise", "timer")) else contract_rows
    try:
        yield from part(patient, ["deepselect"])
    finally:
        patient.close()


def named(row: Row) -> str:
    return f"{row.test} {row.about}".strip()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_its_row(bench: Bench, mistake: str) -> None:
    wanted = MISTAKES[mistake]
    failed = {named(r): r.text for r in rows_of(bench, mistake, wanted) if r.state == "failed"}
    assert wanted in failed, failed
    assert len(failed[wanted]) > 20


def test_a_setting_that_a_declared_op_needs_and_nobody_has_is_told() -> None:
    class NoSettings(Backend):
        pass

    needed = settings_of(Description("x", {"deepgemm.bf16_gemm_nt": supported()}), "deepgemm")
    assert needed == {"deterministic_algorithms": "deepgemm.bf16_gemm_nt"}
    backend = NoSettings(device="0", options={}, group=None)
    with pytest.raises(contract.Failed, match="bf16_gemm_nt sets deterministic_algorithms: get_settings"):
        contract.settings(backend, {"module": "deepgemm", "needed": needed})
    assert contract.settings(backend, {"module": "deepselect", "needed": {}}) == "none"


def test_a_good_adapter_has_no_failed_row() -> None:
    found = examine(FAULTY, {})
    assert found.usable == ["deepselect"]
    assert [named(r) for r in found.failed] == []
    states = {named(r): r.state for r in found.rows}
    assert all(states[f"format {f}"] == "ok" for f in FORMATS)
    assert states["pool"] == states["methods deepselect"] == states["synchronise deepselect"] == "ok"
    assert states["timer deepselect"] == "ok"
    text, code = page("faulty", found, [])
    assert code == 0
    assert "formats" in text
    assert "deepgemm     no" in text
    assert page("faulty", found, ["deepgemm"])[1] == 6


def test_what_dies_in_a_test_is_a_row_and_the_rest_goes_on(bench: Bench) -> None:
    rows = {named(r): r for r in rows_of(bench, "dies_in_alloc", "bytes")}
    assert "SIGSEGV" in rows["bytes"].text
    assert rows["format fp32"].state == "ok"


def test_nothing_usable_is_told_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backend", "no_such_package.backend:Nothing"]) == 6
    out = capsys.readouterr().out
    assert "no_such_package" in out
    assert "Traceback" not in out


def test_without_a_device_the_contract_is_not_called_broken() -> None:
    found = examine(FAULTY, {"mistake": "no_device"})
    assert not found.usable
    assert not found.failed
    text, code = page("faulty", found, [])
    assert code == 6
    assert "no module is usable here" in text
    assert "plug the device in" in found.modules["deepselect"]
    assert "Traceback" not in text


def test_the_controller_imports_no_adapter() -> None:
    before = set(sys.modules)
    backends.describe("cpu", {})
    assert not {m for m in set(sys.modules) - before if m.startswith("adapters.")}


def test_a_required_module_must_exist() -> None:
    from conformance.collect import UsageError

    with pytest.raises(UsageError, match="did you mean deepgemm"):
        page("x", Examination({"deepgemm": ""}), ["deepgem"])


def test_formats_of_which_the_same_is_said_share_a_row() -> None:
    rows = [Row("allocate", "", "ok", "64 MiB"), Row("format", "fp32", "ok", ""),
            Row("format", "e4m3", "failed", "why"), Row("format", "bf16", "ok", ""),
            Row("format", "e5m2", "failed", "why"), Row("format", "e8m0", "absent", "x")]
    assert list(folded(rows)) == [
        rows[0], Row("formats", "", "ok", "fp32, bf16"), Row("formats", "", "failed", "e4m3, e5m2: why"), rows[-1]]
