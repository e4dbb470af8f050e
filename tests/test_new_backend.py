"""A backend made by the commands of docs/adding-a-backend.md passes its doctor and runs deepselect at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conformance.cli import main
from conformance.new_backend import class_name, kinds
from conformance.results import read_run

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "adding-a-backend.md"
CI_LIMIT_S = 180.0


def commands() -> list[str]:
    """The commands of the first shell block of the guide."""
    block = re.search(r"```sh\n(.*?)```", DOCS.read_text(), re.S)
    assert block
    return block[1].strip().splitlines()


@pytest.mark.parametrize("abi", sorted(kinds()))
def test_the_commands_of_the_guide(abi: str, tmp_path: Path) -> None:
    script = "\n".join(commands()).replace("--abi c", f"--abi {abi}")
    assert f"--abi {abi}" in script
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    blocked = {}
    if abi == "c":  # no framework may be needed: an import of torch would end it
        (tmp_path / "block").mkdir()
        (tmp_path / "block" / "torch.py").write_text("raise ImportError('torch is not installed')\n")
        blocked = {"PYTHONPATH": str(tmp_path / "block")}
    began = time.monotonic()
    done = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False,
                          env={**os.environ, "PATH": path, **blocked})
    took = time.monotonic() - began
    assert done.returncode == 0, done.stdout + done.stderr
    assert took < CI_LIMIT_S
    run = read_run(tmp_path / "mychip" / "runs" / "first")
    mine = [r for r in run.records.values() if r.op == "deepselect.topk"]
    assert len(mine) > 50
    assert {r.status for r in mine} == {"pass"}
    assert {r.check for r in mine} >= {"values", "memory", "layout", "degenerate", "rejects"}
    matrix = json.loads((tmp_path / "mychip" / "matrix" / "matrix.json").read_text())
    assert [r["platform"] for r in matrix["runs"]] == ["simulator"]
    assert (tmp_path / "mychip" / "matrix" / "html" / "index.html").is_file()


def test_a_kernel_that_breaks_in_the_written_package_is_caught(tmp_path: Path) -> None:
    assert main(["new-backend", "broken", "--abi", "c", "--out", str(tmp_path)]) == 0
    source = tmp_path / "broken" / "broken" / "chip.c"
    text = source.read_text()
    assert "i < n ? found[i].at + shift : index_fill" in text
    source.write_text(text.replace("i < n ? found[i].at + shift : index_fill", "found[i].at + shift"))
    done = subprocess.run(
        [sys.executable, "-m", "conformance.cli", "run", "--backend=broken.backend:Broken", "--module=deepselect",
         "--level=bringup", "--check=values", "-x", "--run-dir=run"], cwd=tmp_path / "broken", capture_output=True,
        text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode == 1, done.stdout + done.stderr


@pytest.mark.parametrize("abi", sorted(kinds()))
def test_a_written_package_that_can_not_start_ends_a_run_at_once(abi: str, tmp_path: Path) -> None:
    assert main(["new-backend", "broken", "--abi", abi, "--out", str(tmp_path)]) == 0
    source = tmp_path / "broken" / "broken" / "backend.py"
    text = source.read_text()
    line = "        super().__init__(device=device, options=options, group=group)\n"
    assert line in text
    source.write_text(text.replace(line, line + "        raise RuntimeError('no driver')\n"))
    done = subprocess.run(
        [sys.executable, "-m", "conformance.cli", "run", "--backend=broken.backend:Broken", "--module=deepselect",
         "--run-dir=run"], cwd=tmp_path / "broken", capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode == 6, done.stdout + done.stderr
    assert "no driver" in done.stdout + done.stderr
    assert not list((tmp_path / "broken").glob("run/results*.jsonl"))


@pytest.mark.parametrize("name", ["MyChip", "2chips", "my-chip", "class", "numpy", "json", "cpu", "cases"])
def test_a_name_that_can_not_be_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-backend", name, "--out", str(tmp_path)]) == 4
    assert name in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("precious")
    assert main(["new-backend", "mine", "--out", str(tmp_path)]) == 4
    assert "nothing is overwritten" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes"]
    assert main(["new-backend", "other", "--abi", "rust", "--out", str(tmp_path)]) == 4


def test_every_template_is_used_and_listed_as_package_data() -> None:
    folder = ROOT / "conformance" / "templates"
    used = {source for kind in kinds().values() for source in kind["files"].values()}
    assert used == {str(p.relative_to(folder)) for p in folder.rglob("*.tmpl")}
    assert '"templates/*/*.tmpl"' in (ROOT / "pyproject.toml").read_text()
    assert class_name("my_new_chip") == "MyNewChip"
