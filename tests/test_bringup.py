"""Bring-up finds faults of the declared tiles with few tiny problems; a time budget takes what tells most."""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import runs
from tiled_backend import VOCAB_TILE, Tiled

from conformance.bench import bench_of
from conformance.budget import Budget, minutes
from conformance.collect import UsageError, all_cases, cases_at, find_case
from conformance.engine import bringup
from conformance.engine.attempt import Bench
from conformance.engine.effort import EFFORTS, Config
from conformance.engine.order import most_telling
from conformance.engine.run import run_case
from conformance.model import Case
from conformance.protocol import Description, supported

HERE = Path(__file__).resolve().parent
TILED = "tiled_backend:Tiled"
CASES = list(cases_at("bringup", (), Tiled.describe({})))
FAULTS = [("deepgemm.bf16_gemm_nt", knobs) for knobs in (
    "drop_tail=yes", "drop_tile=-1", "drop_tile=1", "double_tile=0", "double_tile=1", "stale_tile=1")] + [
    ("deepselect.topk", knobs) for knobs in ("drop_tail=yes", "drop_tile=-1", "double_tile=0", "stale_tile=1")]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as m:
        m.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        with bench_of(TILED, {}) as made:
            yield made


def problems_until_found(bench: Bench, cases: list[Case], knobs: str, tmp_path: Path) -> int:
    """How many problems of the level, of any op, come up to the one that finds the fault; 0 if none does."""
    bench.launcher.options["knobs"] = knobs
    config = Config(bench, EFFORTS["bringup"], 0, tmp_path, TILED, confirm=False)
    before = 0
    for case in CASES:
        if case in cases:
            record = run_case(case, config)
            if record.status == "fail":
                return before + record.examples["executed"]
        before += case.most
    return 0


@pytest.mark.parametrize(("op", "knobs"), FAULTS)
def test_a_tile_fault_is_found(bench: Bench, op: str, knobs: str, tmp_path: Path) -> None:
    mine = [c for c in CASES if c.op.name == op and c.check == "values"]
    at = problems_until_found(bench, mine, knobs, tmp_path)
    assert 0 < at <= 60, f"{knobs} found after {at} of {sum(c.most for c in CASES)} problems"


def test_right_kernels_conform_and_nothing_is_vacuous(bench: Bench, tmp_path: Path) -> None:
    bench.launcher.options["knobs"] = ""
    config = Config(bench, EFFORTS["bringup"], 0, tmp_path, TILED)
    some = [c for c in CASES if c.most and c.check in ("values", "layout", "degenerate")][:20]
    assert {run_case(c, config).status for c in some} == {"pass"}


def test_the_level_is_small_and_knows_the_tiles() -> None:
    tiny = [(c, a) for c in CASES for a in c.explicit[: c.most]]
    assert 150 <= sum(max(c.most, c.check == "rejects") for c in CASES) <= bringup.PROBLEMS
    for case, sizes in tiny:
        problem = bringup.sized(case, sizes)
        assert bringup.multiply_adds(case.op, problem) <= 1e6, (case.id, sizes)
        tiles = {"m": 96, "n": 160, "k": 48} if "gemm" in case.op.name else {"vocab": VOCAB_TILE}
        assert all(sizes[n] <= 2 * t for n, t in tiles.items()), (case.id, sizes)
    first = next(a for c, a in tiny if c.op.name == "deepgemm.bf16_gemm_nt")
    assert first["m"] > 96
    assert first["n"] > 160
    assert first["k"] > 48


def test_the_first_twenty_problems_try_twenty_ops() -> None:
    everything = Description("any", {"*": supported()}, ranks=(1, 2, 4))
    cases = list(cases_at("bringup", (), everything))
    first = []
    for case in cases:
        first += [case.op.name] * case.most
    assert len(set(first[:20])) == 20
    assert {c.check for c in cases} >= {"values", "memory", "rejects", "repeat", "degenerate", "layout"}
    assert {c.op.name for c in cases} == {c.op.name for c in all_cases()}


def test_ops_that_a_backend_does_not_run_stay_in_the_level() -> None:
    shown = Counter(c.op.name for c in CASES)
    assert set(shown) == {c.op.name for c in all_cases()}
    assert all(n == 1 for name, n in shown.items() if name not in ("deepgemm.bf16_gemm_nt", "deepselect.topk"))


def test_replay_has_the_problems_of_the_level() -> None:
    case = CASES[0]
    assert find_case(case.id, "bringup", Tiled.describe({})).explicit == case.explicit


def test_the_most_telling_order_is_spread_and_complete() -> None:
    every = list(all_cases())
    ordered = most_telling(every)
    assert sorted(c.id for c in ordered) == sorted(c.id for c in every)
    ops = {c.op.name for c in every}
    assert {c.op.name for c in ordered[: len(ops)]} == ops
    assert len({c.check for c in ordered[: 12 * len(ops)]}) == len({c.check for c in every})
    assert most_telling(reversed(every)) != every


@pytest.mark.parametrize(("text", "expected"), [("30", 30), ("30min", 30), ("1.5h", 90), ("90s", 1.5), ("2 h", 120)])
def test_a_budget_is_minutes(text: str, expected: float) -> None:
    assert minutes(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "-3", "0", "5 weeks"])
def test_a_budget_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="time budget"):
        minutes(text)


def test_a_case_that_would_take_too_long_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("conformance.engine.clock.monotonic", lambda: now[0])
    slow, quick = CASES[0], CASES[1]
    assert slow.op.name != quick.op.name
    budget = Budget(100.0)
    budget.took(slow, 60.0)
    budget.took(quick, 1.0)
    now[0] = 50.0
    assert not budget.fits(slow)
    assert budget.fits(quick)
    now[0] = 100.0
    assert not budget.fits(quick)
    assert Budget(None).fits(slow)


def test_what_does_not_fit_is_told_so_while_there_is_time_left(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_bytes(struct.pack("=d", 0.0))
    got = runs.run(tmp_path / "run", "--level=bringup", "--backend-option=slow_s=13", "-n", "1", "--time-budget=4min",
                   "--case=deepselect.topk/*", backend=TILED, CONFORMANCE_FAKE_CLOCK=str(clock))
    assert got.code == 0, got.text
    assert struct.unpack("=d", clock.read_bytes())[0] < 238, "no case fits any more, long before the deadline"
    left = [r for r in got.run.records.values() if r.status == "not_run"]
    assert left
    assert {r.message.partition(";")[0] for r in left} == {"left out: the time budget of 4min was used up"}


def test_a_run_ends_in_time_and_goes_on_later(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_bytes(struct.pack("=d", 0.0))
    more = ("--level=bringup", "--backend-option=slow_s=3", "-n", "2")
    env = {"CONFORMANCE_FAKE_CLOCK": str(clock)}
    got = runs.run(tmp_path / "run", *more, "--time-budget=3min", "--module=deepselect,deepgemm", backend=TILED, **env)
    assert got.code == 0, got.text
    spent = struct.unpack("=d", clock.read_bytes())[0]
    assert 130 < spent < 240
    ran = [r for r in got.run.records.values() if r.status == "pass"]
    left = [r for r in got.run.records.values() if r.status == "not_run"]
    assert len(ran) >= 8
    assert len(left) > 20
    assert {r.op for r in ran} == {"deepgemm.bf16_gemm_nt", "deepselect.topk"}
    assert {r.check for r in ran} >= {"values", "memory"}
    assert {r.message.partition(";")[0] for r in left} == {"left out: the time budget of 3min was used up"}
    assert f"{len(ran)} of {len(ran) + len(left)} cases run" in got.text
    telling = [c.id for c in CASES if c.most][: len(ran) // 2]
    assert {r.id for r in ran} >= set(telling), "what tells most was left out"
    again = runs.run(tmp_path / "run", *more, "--resume", "--check=values", "--module=deepselect,deepgemm",
                     backend=TILED, **env)
    assert again.code == 0, again.text
    assert not [r for r in again.run.records.values() if r.status == "not_run" and r.check == "values"]
    assert struct.unpack("=d", clock.read_bytes())[0] - spent < 15 * 60
