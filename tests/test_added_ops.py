"""The ops that docs/adding-an-op.md adds: the right ones conform, and every planted fault ends nonconforming."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from conformance.bench import bench_of
from conformance.collect import cases_at
from conformance.engine.attempt import Bench
from conformance.engine.effort import EFFORTS, Config
from conformance.engine.run import run_case
from conformance.results import Record

MOMENTUM = "tilekernels.engram.engram_sinkhorn_momentum_update/{}:grad=bf16,momentum=bf16,nesterov=yes"
STEP = "tilekernels.engram.engram_sinkhorn_step/{}"
PIPE = "deepep.PPBuffer.recv/{}:x=bf16,to=next,tensors=two"
OPS = {"in place": MOMENTUM, "two calls": STEP, "four ranks": PIPE}

RIGHT = [(op, "values", knobs) for op, knobs in (
    (MOMENTUM, ""), (MOMENTUM, "tile_m=7"), (STEP, ""), (STEP, "tile_m=5,k_order=reverse"), (PIPE, ""))]
ANY = [(op, fault) for op in OPS for fault in ("zeros", "stale", "unwritten", "one_element", "untouched")]
OWN = [(MOMENTUM, "rounded_momentum"), (MOMENTUM, "momentum_not_stored"), (STEP, "old_row_scale"),
       (STEP, "reduce_adds"), (PIPE, "pipe_reorders"), (PIPE, "pipe_short")]
by_id = {c.id: c for c in cases_at("full", ("tilekernels", "deepep"))}

BenchOf = Callable[[str], Bench]


@pytest.fixture(scope="module")
def bench_with() -> Iterator[BenchOf]:
    """A bench by settings of the kernels."""
    with ExitStack() as stack:
        yield cache(lambda knobs: stack.enter_context(bench_of("cpu", {"knobs": knobs})))


def attempt(bench: Bench, case: str, out: Path, inject: str = "") -> Record:
    for launcher in (bench.launcher, bench.debug_launcher):
        launcher.inject = inject
    effort = replace(EFFORTS["full"], examples=4, shrink_s=0.0, max_work=2.0**15)
    return run_case(replace(by_id[case], explicit=()), Config(bench, effort, 0, out, "cpu"))


@pytest.mark.parametrize(("op", "check", "knobs"), RIGHT)
def test_the_right_one_conforms(bench_with: BenchOf, op: str, check: str, knobs: str, tmp_path: Path) -> None:
    r = attempt(bench_with(knobs), op.format(check), tmp_path)
    assert r.status == "pass", r.message


@pytest.mark.parametrize(("op", "fault"), ANY)
def test_faults_of_any_op(bench_with: BenchOf, op: str, fault: str, tmp_path: Path) -> None:
    r = attempt(bench_with(""), OPS[op].format("values"), tmp_path, inject=fault)
    assert r.status == "fail", r.message
    assert r.reason in ("numeric", "nonfinite", "unwritten")


@pytest.mark.parametrize(("op", "fault"), OWN)
def test_faults_of_their_own(bench_with: BenchOf, op: str, fault: str, tmp_path: Path) -> None:
    r = attempt(bench_with(f"fault={fault}"), op.format("values"), tmp_path)
    assert r.status == "fail", r.message
    assert r.reason in ("numeric", "unwritten")


def test_a_token_with_a_format_must_be_a_tensor_of_it(bench_with: BenchOf, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """The partial sums that one call hands to the next are fp32, whatever their shape."""
    case = by_id[STEP.format("values")]
    first, second = case.op.steps
    for given, reason in (({"format": "bf16"}, "dtype"), ({"format": None}, "contract")):
        returns = (first.returns[0], replace(first.returns[1], **given))
        op = replace(case.op, steps=(replace(first, returns=returns), second))
        monkeypatch.setitem(by_id, case.id, replace(case, op=op))
        assert attempt(bench_with(""), case.id, tmp_path).reason == reason
