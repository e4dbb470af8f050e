"""Every op-agnostic fault is told apart, and would not be if the part of the engine that sees it were missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.bench import bench_of
from conformance.collect import cases_at
from conformance.engine import judge, observe
from conformance.engine.attempt import Attempts, Bench
from conformance.engine.checks import CHECKS
from conformance.engine.effort import EFFORTS, Config
from conformance.engine.inject import FAULTS
from conformance.engine.run import run_case
from conformance.results import Record

CALLEE = "deepselect.topk/values:dtype=fp32,index=int32,order=any,values=yes,end=no,offset=no,output_idx=callee"
CALLER = CALLEE.replace("callee", "caller")
MEMORY = "deepselect.topk/memory:dtype=bf16,index=int64,order=index,values=no,end=yes,offset=yes,output_idx=caller"
REFUSED = "deepselect.topk/rejects:misuse=topk_of_0"
PLACES = {"write_before": (CALLER, MEMORY), "write_behind": (CALLER, MEMORY), "mutate_input": (CALLEE, CALLER, MEMORY)}
by_id = {c.id: c for c in cases_at("full", ("deepselect",))}


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with bench_of("cpu", {"memory_mib": "600"}) as b:
        yield b


def attempt(bench: Bench, case: str, fault: str, out: Path, examples: int = 4) -> Record:
    for launcher in (bench.launcher, bench.debug_launcher):
        launcher.inject = fault
    mine = replace(bench, case_timeout_s=1.0) if fault == "hang" else bench
    effort = replace(EFFORTS["full"], examples=examples, shrink_s=0.0, max_work=2.0**15)
    return run_case(replace(by_id[case], explicit=()), Config(mine, effort, 0, out, "cpu"))


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda f: f.name)
def test_told_apart(bench: Bench, fault: Any, tmp_path: Path) -> None:
    usual = (REFUSED,) if fault.check == "rejects" else (CALLEE, CALLER)
    for case in PLACES.get(fault.name, usual):
        r = attempt(bench, case, fault.name, tmp_path)
        told = {"timeout": "timeout", "oom": "oom"}.get(r.status, r.reason)
        assert told in fault.expect, f"{case}: {r.status} {r.reason}: {r.message}"
        assert r.status not in ("pass", "error", "flaky")
        assert r.problem
        assert r.message


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _without_decoy(patch: pytest.MonkeyPatch) -> None:
    def plan(attempts: Attempts, problem: Any) -> list[Any]:
        return [attempts.example(problem, judged=True)]

    patch.setitem(CHECKS, "values", replace(CHECKS["values"], plan=plan))


MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "buffers are not looked at: an input": (
        lambda p: p.setattr(observe, "_check_buffers", _nothing), "mutate_input", MEMORY),
    "buffers are not looked at: a guard band": (
        lambda p: p.setattr(observe, "_check_buffers", _nothing), "write_behind", CALLER),
    "only bytes of elements are compared": (
        lambda p: p.setattr(observe, "_outside", lambda *a: None), "write_before", CALLER),
    "no element is judged": (lambda p: p.setattr(judge, "_note", _nothing), "one_element", CALLER),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_blind_engine_misses_it(bench: Bench, mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these parts is needed: without it the fault passes, or nothing was judged and the case is mistrusted."""
    blind, fault, case = MUTANTS[mutant]
    assert attempt(bench, case, fault, tmp_path).status == "fail"
    blind(monkeypatch)
    assert attempt(bench, case, fault, tmp_path).status in ("pass", "mistrusted")


def test_a_stale_result_shows_alone(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoy makes what an earlier call left behind show in any one problem; without, it takes a sequence."""
    r = attempt(bench, CALLER, "stale", tmp_path)
    assert r.status == "fail"
    assert not r.lineage
    _without_decoy(monkeypatch)
    r = attempt(bench, CALLER, "stale", tmp_path)
    assert r.status == "pass" or r.lineage


def test_poison_is_recognised(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote is told from what somebody wrote wrongly, whoever allocated it."""
    for case in (CALLEE, CALLER):
        assert attempt(bench, case, "untouched", tmp_path).reason == "unwritten"
    monkeypatch.setattr(judge, "_is_poison", lambda e, n, codes, f: codes != codes)
    for case in (CALLEE, CALLER):
        assert attempt(bench, case, "untouched", tmp_path).reason != "unwritten"


def test_lateness_takes_time_to_see(bench: Bench, tmp_path: Path) -> None:
    """A result that comes 50 ms late is seen as late only by who waits for longer than that."""
    assert attempt(bench, CALLER, "late_write", tmp_path).reason == "late_write"
    assert attempt(replace(bench, settle_s=1e-6), CALLER, "late_write", tmp_path).reason != "late_write"


def test_without_a_fault(bench: Bench, tmp_path: Path) -> None:
    for case in (CALLEE, CALLER, MEMORY, REFUSED):
        r = attempt(bench, case, "", tmp_path)
        assert r.status == "pass", r.message
