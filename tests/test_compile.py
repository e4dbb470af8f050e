"""The check `compile` catches what can't have come from the program, and tells every other end apart."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from runs import ROOT, environment, run

from conformance.bench import bench_of
from conformance.collect import all_cases, find_case
from conformance.engine.attempt import Bench
from conformance.engine.compiled import problem_of, refusal
from conformance.engine.effort import EFFORTS, Config
from conformance.engine.run import run_case
from conformance.engine.static_build import digest
from conformance.engine.variants import all_variants, in_core, programs
from conformance.results import Record
from reports.fold import State, fold, run_headline
from reports.load import load_runs

CASE = "tilelang.cast/compile:out=fp16,dtype=fp32"
FAULTY = "faulty_compiler:Compiler"


@pytest.fixture(autouse=True)
def plug_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))


def compiled(tmp_path: Path, mode: str, *, case: str = CASE, backend: str = FAULTY, **limits: float) -> Record:
    with bench_of(backend, {"mode": mode, "folder": str(tmp_path)}) as bench:
        config = Config(replace(bench, **limits), EFFORTS["full"], 0, tmp_path, backend)
        return run_case(find_case(case), config)


@pytest.mark.parametrize(
    ("mode", "status", "reason", "said"),
    [
        ("good", "pass", None, ""),
        ("empty", "fail", "compile", "empty artefact"),
        ("gutted", "fail", "compile", "never touches out"),
        ("raise", "fail", "compile", "SyntaxError: line 7: no such instruction"),
        ("nothing", "fail", "compile", "NoneType, not an Artefact"),
        ("signal", "crash", "signal", "SIGFPE in phase compile"),
        ("exit", "crash", "exit", "exit code 3"),
        ("deaf", "mistrusted", None, "lowered to nothing would not show"),
        ("once", "flaky", "compile", "showed once"),
    ],
)
def test_every_end_has_its_own_word(tmp_path: Path, mode: str, status: str, reason: str | None, said: str) -> None:
    record = compiled(tmp_path, mode)
    assert (record.status, record.reason) == (status, reason), record.message
    assert said in record.message
    if status != "pass":
        assert record.phase == "compile"
        assert record.problem is not None
        assert said in (tmp_path / str(record.artifacts) / "compile.log").read_text()
    schema = json.loads((ROOT / "conformance" / "schema" / "result.schema.json").read_text())
    jsonschema.validate(record.to_json(), schema)


def test_a_hanging_compiler_has_a_limit_of_its_own(tmp_path: Path) -> None:
    record = compiled(tmp_path, "hang", case_timeout_s=0.2, compile_timeout_s=1.0)
    assert (record.status, record.phase) == ("timeout", "compile")
    assert record.duration_s["compile"] < 10


def test_a_stale_artefact_is_caught(tmp_path: Path) -> None:
    """The first program fills the cache and is right; the second gets the first one's artefact."""
    assert compiled(tmp_path, "stale").status == "pass"
    other = compiled(tmp_path, "stale", case=CASE.replace("fp16", "int8"))
    assert (other.status, other.reason) == ("fail", "compile")
    assert "stale cache" in other.message


def test_the_record_holds_digest_and_log(tmp_path: Path) -> None:
    first, again = compiled(tmp_path, "good"), compiled(tmp_path, "good")
    assert first.artefact is not None
    assert again.artefact is not None
    assert first.artefact["sha256"] == again.artefact["sha256"]
    assert (first.artefact["kind"], first.artefact["log"], first.artefact["named"]) == ("text", "1 warning", 1)
    other = compiled(tmp_path, "good", case=CASE.replace("fp16", "int8"))
    assert other.artefact is not None
    assert other.artefact["sha256"] != first.artefact["sha256"]


def test_a_digest_forgets_the_name_only() -> None:
    assert digest(b"void kaaaa(int)", "kaaaa") == digest(b"void kbbbb(int)", "kbbbb")
    assert digest(b"void kaaaa(int)", "kaaaa") != digest(b"void kaaaa(float)", "kaaaa")


def test_a_backend_without_the_method_fails_and_tells(tmp_path: Path) -> None:
    record = compiled(tmp_path, "good", backend="faulty_compiler:Silent")
    assert (record.status, record.reason) == ("fail", "compile")
    assert "NotImplementedError" in record.message


def test_checks_apply_to_their_platform_only(tmp_path: Path) -> None:
    record = compiled(tmp_path, "good", case="tilelang.cast/values:out=fp16,dtype=fp32,data=plain")
    assert record.status == "unsupported"
    assert "runs nothing" in record.message
    with bench_of("cpu", {}) as bench:
        record = run_case(find_case(CASE), Config(bench, EFFORTS["full"], 0, tmp_path, "cpu"))
    assert record.status == "unsupported"
    assert "platform compiler" in record.message
    assert refusal("values", "silicon") == refusal("compile", "compiler") == ""


def test_each_program_is_one_case() -> None:
    cases = [c for c in all_cases() if c.check == "compile"]
    assert {c.op.name for c in cases} == {c.op.name for c in all_cases() if c.op.compile_key}
    assert {c.op.module for c in cases} == {"tilelang"}
    for case in cases:
        keys = dict(case.variant)
        assert tuple(keys) == case.op.compile_key
        assert dict(problem_of(case, 0).variant).items() >= keys.items()
    op = next(c.op for c in cases if c.op.name == "tilelang.cast")
    assert len(programs(op)) == 11 * 11  # eleven formats to ten others and bool
    assert len(all_variants(op)) > len(programs(op))
    core = {c.id for c in cases if in_core(c)}
    assert CASE in core
    assert "tilelang.cast/compile:out=bool,dtype=int64" not in core


def selected(tmp_path: Path, backend: str, *more: str) -> list[str]:
    ended = run(tmp_path / "none", "--module=tilelang", "--level=core", "--collect-only", *more, backend=backend)
    return [line.partition("::")[2] for line in ended.text.splitlines() if "::" in line]


def test_a_run_holds_what_can_apply(tmp_path: Path) -> None:
    mine = selected(tmp_path, FAULTY)
    assert mine
    assert all("/compile:" in i for i in mine)
    ordinary = selected(tmp_path, "cpu")
    assert ordinary
    assert not any("/compile:" in i for i in ordinary)
    asked = selected(tmp_path, "cpu", "--case=tilelang.clamp/compile:*")
    assert asked == [i for i in mine if i.startswith("tilelang.clamp/")]


def test_a_compiler_has_a_column_of_its_own(tmp_path: Path) -> None:
    """Its cases are no part of the other column's denominator, and nothing that was only compiled is whole."""
    a = run(tmp_path / "a", "--module=tilelang", "--case=tilelang.clamp/*", backend=FAULTY)
    b = run(tmp_path / "b", "--module=tilelang", "--level=core", "--case=tilelang.clamp/degenerate:*", "--examples=1")
    assert (a.code, b.code) == (0, 0), a.text + b.text
    matrix = fold(load_runs([a.path, b.path]))
    compiler, other = matrix.cells["tilelang.clamp"]
    assert (compiler.passed, compiler.total, compiler.state) == (4, 4, State.PARTIAL)
    assert "compiled, not run" in compiler.subline()
    assert other.total == len(other.records) > 0
    assert "compiled" not in other.subline()
    assert [r.label for r in matrix.runs] == ["faulty (compiler)", "cpu"]
    assert str(run_headline(matrix.runs[0], matrix.column(0))) == "compiled only: 1 of 1 ops that have programs"


def test_a_claim_is_not_about_compiling(tmp_path: Path) -> None:
    """A compiler can claim nothing, and no claim of another backend waits for its cases."""
    claim = tmp_path / "claim"
    claim.write_text("tilelang.clamp\n")
    refused = run(tmp_path / "a", "--module=tilelang", f"--claim={claim}", backend=FAULTY)
    assert refused.code == 4
    assert "runs nothing" in refused.text
    b = run(tmp_path / "b", "--module=tilelang", "--level=core", "--case=tilelang.clamp/degenerate:*", "--examples=1",
            f"--claim={claim}")
    assert b.run.records
    assert not any(r.check == "compile" for r in b.run.records.values())


def test_replay_compiles_again(tmp_path: Path) -> None:
    import subprocess

    argv: list[Any] = [sys.executable, "-m", "conformance.cli", "replay", CASE, f"--backend={FAULTY}",
                       "--backend-option=mode=raise"]
    done = subprocess.run(argv, cwd=ROOT, env=environment("replay"), capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "no such instruction" in done.stdout


def test_bench_default_limit_is_that_of_compiling() -> None:
    assert Bench.__dataclass_fields__["compile_timeout_s"].default == 300.0
