"""A backend on a bare C runtime conforms in an environment without torch: a whole run, from command to matrix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT
from simbench import CAST, SIMDEV, TOPK_CALLER, without_torch

from conformance.results import read_run

QUERIES = (
    "deepgemm.bf16_gemm_nt/values:out=bf16,c=none,*", "deepgemm.bf16_gemm_nt/layout:out=fp32,c=aliased,*",
    "deepgemm.bf16_gemm_nt/memory:out=bf16,c=row,*", "deepgemm.bf16_gemm_nt/degenerate:out=fp32,c=none,*",
    "deepgemm.bf16_gemm_nt/rejects*", "deepgemm.per_token_cast_to_fp8/*", "deepselect.get_stride_requirement/*",
    "deepselect.topk/rejects*", "deepselect.topk/values:dtype=fp32,index=int32,order=value,*",
    "deepselect.topk/values:dtype=bf16,index=int32,order=index,values=no,*",
    "deepselect.topk/memory:dtype=bf16,index=int32,order=any,values=yes,end=no,offset=yes,*",
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("simdev")
    return {**os.environ, "PYTHONPATH": without_torch(folder / "none"), "SIMDEV_STATE": str(folder / "devices"),
            "TRIED": str(folder / "none" / "tried"), "PYTHONDONTWRITEBYTECODE": "1"}


def run(environment: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], cwd=ROOT, env=environment, check=False, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240)


def test_torch_is_not_there(environment: dict[str, str]) -> None:
    done = run(environment, "-c", "import torch")
    assert done.returncode
    Path(environment["TRIED"]).unlink()


@pytest.mark.parametrize("fork", ["yes", "no"])
def test_three_ops_conform(environment: dict[str, str], tmp_path: Path, fork: str) -> None:
    """Forked or started anew, nothing of the controller, the worker or the executor asks for torch."""
    queries = QUERIES if fork == "yes" else (QUERIES[6], TOPK_CALLER, CAST)
    done = run(environment, "-m", "pytest", "-q", f"--backend={SIMDEV}", "--level=core", "--examples=2",
               "--module=deepgemm,deepselect", f"--run-dir={tmp_path / 'run'}", f"--backend-option=fork={fork}",
               *(f"--case={q}" for q in queries), "cases")
    assert done.returncode == 0, done.stdout
    records = read_run(tmp_path / "run").records.values()
    passed = {op: [r for r in records if r.op == op and r.status == "pass"] for op in {r.op for r in records}}
    assert all(passed.values()), passed
    assert fork == "no" or len(passed) == 4
    others = {r.status: r.message for r in records if r.status != "pass"}
    assert set(others) <= {"unsupported"}, others
    assert not Path(environment["TRIED"]).exists(), Path(environment["TRIED"]).read_text()
    cells = json.loads((tmp_path / "run" / "matrix" / "matrix.json").read_text())
    assert "simdev" in json.dumps(cells)


@pytest.mark.parametrize("command", [("doctor", f"--backend={SIMDEV}"), ("list",)], ids=lambda c: c[0])
def test_commands_do_without(environment: dict[str, str], command: tuple[str, ...]) -> None:
    program = "import sys; from conformance.cli import main; sys.exit(main())"
    done = run(environment, "-c", program, *command)
    assert done.returncode == 0, done.stdout
    assert not Path(environment["TRIED"]).exists(), Path(environment["TRIED"]).read_text()
