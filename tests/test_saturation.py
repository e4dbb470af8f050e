"""A backend in saturation mode: what its profile declares reaches every oracle, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from conformance.bench import bench_of
from conformance.collect import find_case
from conformance.engine import draw, oracle
from conformance.engine.attempt import Attempts, Bench, Clock
from conformance.engine.example import build
from references.bounds.profile import resolve
from references.expected import Exact, OneOf, Within
from references.tilelang.nans import by_rule

NORM = find_case("tilekernels.quant.norm_forward/values:x=fp32,batch=no,weight=no,residual=yes,residual_out=caller,"
                 "out=callee,with_rstd=yes", "core")
GEMM = find_case("deepgemm.bf16_gemm_nt/values:out=bf16,c=none,a_major=k,b_major=k", "core")
ROPE = find_case("tilekernels.transform.apply_rotary/values:x=fp32,batch=yes,key=no,positions=int32,interleaved=no",
                 "core")
SPECIAL = ("infinities", "nans", "overflow")


def test_the_profile_decides() -> None:
    example = build(NORM.op, draw.first_chunk(NORM, 0)[0][0], {})
    for overflow in ("inf", "saturate"):
        found = oracle.ask(NORM.op, example, resolve({"overflow": overflow}) | {"requirements": {}})
        kinds = {type(want) for want in found.values()}
        assert Within in kinds
        assert kinds & {Exact, OneOf}  # the residual's sum
        assert {getattr(want, "saturates", False) for want in found.values()} == {overflow == "saturate"}


def test_all_rules_of_nan_admit_the_largest_number() -> None:
    both = by_rule("consistent", drop=Exact(np.array([np.inf, 1], np.float32)),
                   propagate=Exact(np.array([np.inf, np.nan], np.float32)), free=Exact(np.zeros(2, np.float32)))
    largest = np.finfo(np.float32).max
    assert both.saturating().judge(np.array([largest, 1], np.float32), "fp32").ok
    assert both.saturating().judge(np.array([largest, 0], np.float32), "fp32").ok  # NaN wins, and became 0
    assert not both.judge(np.array([largest, 1], np.float32), "fp32").ok


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with bench_of("cpu", {"knobs": "overflow=saturate"}) as made:
        yield made


@pytest.mark.parametrize("case", [NORM, ROPE, GEMM], ids=lambda c: c.op.name)
def test_a_chip_that_saturates_is_right_where_it_says_so_alone(bench: Bench, case) -> None:
    declared = bench.profile
    problems = [p for seed in range(3) for p in (*draw.explicit(case, seed), *draw.first_chunk(case, seed)[0])
                if p.family in SPECIAL][:12]
    assert len(problems) >= 4
    failed = {}
    try:
        for overflow in ("inf", "saturate"):
            bench.profile = declared | {"overflow": overflow}
            attempts = Attempts(bench, case.op, Clock())
            failed[overflow] = [p.family for p in problems if attempts.run(p).worst is not None]
            attempts.close()
    finally:
        bench.profile = declared
    assert failed["inf"]
    assert not failed["saturate"]
