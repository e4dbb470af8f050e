"""A failure of a run names the fault that it is, and no verdict hangs on that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from conformance.bench import bench_of
from conformance.collect import cases_at
from conformance.diagnosis import Diagnoser
from conformance.engine.attempt import Bench
from conformance.engine.effort import EFFORTS, Config
from conformance.engine.run import run_case
from conformance.results import Record

ROOT = Path(__file__).parent.parent
SCHEMA = json.loads((ROOT / "conformance/schema/result.schema.json").read_text())
CASE = next(c for c in cases_at("core", ("deepgemm",)) if c.op.name == "deepgemm.bf16_gemm_nt"
            and (c.check, c.variant["c"], c.variant["out"]) == ("values", "none", "fp32"))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with bench_of("cpu", {}) as b:
        yield b


@pytest.fixture(scope="module")
def diagnoser() -> Iterator[Diagnoser]:
    with closing(Diagnoser(limit_s=20.0)) as d:
        yield d


def ran(bench: Bench, out: Path, knobs: str, diagnose: Any) -> Record:
    for launcher in (bench.launcher, bench.debug_launcher):
        launcher.options = {"knobs": knobs} if knobs else {}
    effort = replace(EFFORTS["core"], shrink_s=5.0)
    return run_case(CASE, Config(bench, effort, 0, out, "cpu", {"knobs": knobs}, diagnose=diagnose))


def test_the_kind_is_named(bench: Bench, diagnoser: Diagnoser, tmp_path: Path) -> None:
    r = ran(bench, tmp_path, "drop_tail=yes,tile_k=48", diagnoser)
    assert (r.status, r.reason) == ("fail", "numeric")
    assert "diagnosis: " in r.message
    assert r.diagnosis is not None
    assert r.diagnosis["matches"][0]["knobs"].startswith(("drop_tail", "drop_tile"))
    assert r.diagnosis["tried"] > 20
    assert r.duration_s["diagnose"] > 0
    Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(r.to_json())))


def test_what_was_kept_is_the_failure_still(bench: Bench, diagnoser: Diagnoser, tmp_path: Path) -> None:
    """A diagnosis runs the backend on other problems; the arrays in the evidence are those of the failure."""
    with_it = ran(bench, tmp_path / "a", "drop_tail=yes,tile_k=48", diagnoser)
    without = ran(bench, tmp_path / "b", "drop_tail=yes,tile_k=48", None)
    assert with_it.problem == without.problem
    files = sorted(f.name for f in (tmp_path / "b" / str(without.artifacts)).glob("*.npy"))
    assert files
    for name in files:
        mine, theirs = ((tmp_path / run / str(r.artifacts) / name).read_bytes()
                        for run, r in (("a", with_it), ("b", without)))
        assert mine == theirs, name


@pytest.mark.parametrize("broken", ["raises", "says nothing", "spent", "no evidence", "no problems"])
def test_no_verdict_hangs_on_it(bench: Bench, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: Any, **__: Any) -> None:
        msg = "no kernels here"
        raise RuntimeError(msg)

    own = Diagnoser(most=0 if broken == "spent" else 1)
    if broken == "raises":
        monkeypatch.setattr(own, "_started", raising)
    for name, when in (("evidence_of", "no evidence"), ("further", "no problems")):
        if broken == when:
            monkeypatch.setattr(f"conformance.engine.run.{name}", raising)
    r = ran(bench, tmp_path, "drop_tail=yes,tile_k=48", (lambda *a, **k: None) if broken == "says nothing" else own)
    own.close()
    assert (r.status, r.reason, r.diagnosis) == ("fail", "numeric", None)
    assert "diagnosis" not in r.message


def test_what_passes_is_not_diagnosed(bench: Bench, tmp_path: Path) -> None:
    def never(*_: Any, **__: Any) -> None:
        pytest.fail("nothing was wrong")

    assert ran(bench, tmp_path, "", never).status == "pass"
