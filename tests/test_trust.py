"""What held but could not have failed is no pass, and what is printed as a replay tries the same problems."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conformance.bench import bench_of
from conformance.cli import _from_here, main
from conformance.collect import cases_at, find_case, ops
from conformance.engine.effort import EFFORTS, Config
from conformance.engine.executor import Death, Outcome
from conformance.engine.judge import Seen, rejected_share
from conformance.engine.misuse import _refusal
from conformance.engine.run import REPEATS_OF_CHANCE, run_case
from conformance.engine.variants import matching
from conformance.identity import seed_of
from conformance.model import Case, Misuse, Relation, Variant
from references.expected import Expected, Judgement, Within

HERE = Path(__file__).parent
TOPK = next(op for op in ops(("deepselect",)) if op.name == "deepselect.topk")
GEMM = next(op for op in ops(("deepgemm",)) if op.name == "deepgemm.bf16_gemm_nt")
FEW = replace(EFFORTS["core"], examples=3, shrink_s=0.0)


@pytest.mark.parametrize(("backend", "output_idx", "status"), [
    ("unwatched_backend:Unwatched", "callee", "mistrusted"),
    ("cpu", "callee", "pass"),
])
def test_unwatched_memory_is_mistrusted(backend: str, output_idx: str, status: str, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    case = Case(TOPK, matching(TOPK, {"output_idx": output_idx, "values": "yes"}), "memory")
    with bench_of(backend, {}) as bench:
        assert run_case(case, Config(bench, FEW, 0, tmp_path, backend)).status == status


@pytest.mark.parametrize(("changes", "says", "status"), [
    (False, True, "mistrusted"),  # the second run is the first again
    (True, False, "mistrusted"),  # it says nothing of any output
    (True, True, "pass"),
])
def test_a_relation_that_compares_nothing_is_mistrusted(changes: bool, says: bool, status: str,
                                                        tmp_path: Path) -> None:
    def second(problem, codes):
        return problem, {**codes, "a": codes["a"][::-1].copy()} if changes else codes

    def compare(problem, first, other):
        return {"d": np.zeros(first["d"].shape, bool)} if says else {}

    variant = matching(GEMM, {"c": "none"})
    op = replace(GEMM, laws=(Relation("empty", "nothing", second, compare),))
    case = Case(op, Variant({"law": "empty", **dict(variant)}), "laws")
    with bench_of("cpu", {}) as bench:
        assert run_case(case, Config(bench, FEW, 0, tmp_path, "cpu")).status == status


REFUSED = {"exception": {"type": "RuntimeError", "mro": ["RuntimeError", "Exception", "BaseException"],
                         "message": "no", "where": []}, "phase": "enqueue"}


@pytest.mark.parametrize(("kind", "outcome", "status"), [
    ("universal", Outcome([REFUSED, None], Death(11, "execute", 0, "", 1)), "crash"),
    ("universal", Outcome([REFUSED, None], timed_out="no answer within 3 s (rank 1 in phase execute)"), "timeout"),
    ("universal", Outcome([REFUSED, REFUSED]), None),
    ("trap", Outcome([REFUSED, None], Death(11, "execute", 0, "", 1)), None),
])
def test_one_ranks_refusal_hides_no_other_ranks_end(kind: str, outcome: Outcome, status: str | None) -> None:
    bad = SimpleNamespace(plans=[SimpleNamespace(steps=[])] * 2)
    found = _refusal(None, Misuse("m", "a misuse", {}, kind), bad, outcome)  # type: ignore[arg-type]
    assert [f.status for f in found] == ([status] if status else [])


def test_vacuity_counts_what_would_be_rejected() -> None:
    seen = Seen(outputs={"d": np.array([1.0, 2.0], np.float32)}, formats={"d": "fp32"})
    near = Within(np.array([1.0, 5.0]), np.array([0.1, 0.1]))
    assert rejected_share({"d": near}, seen) == 0.5
    assert rejected_share({"d": Within(np.array([1.0, 2.0]), np.zeros(2))}, seen) == 0.0
    assert rejected_share({"d": Within(np.zeros(3), np.zeros(3))}, seen) == 1.0


def test_a_stumble_of_ours_is_no_proof_that_it_could_have_failed() -> None:
    class Stumbles(Expected):
        shape = (2,)

        def judge(self, codes, fmt):
            raise IndexError

    seen = Seen(outputs={"d": np.zeros(2, np.float32)}, formats={"d": "fp32"})
    with pytest.raises(IndexError):
        rejected_share({"d": Stumbles()}, seen)


def test_replay_tries_the_problems_of_its_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = next(c for c in cases_at("core", ("deepgemm",)) if c.check == "values" and c.explicit)
    assert find_case(case.id, "core").explicit == case.explicit
    with bench_of("cpu", {}) as bench:
        record = run_case(case, Config(bench, FEW, 0, tmp_path, "cpu"))
    assert {"--level=core", "--examples=3", "--seed=0"} <= set(record.replay)
    assert main(record.replay[1:]) == 0
    assert "3 problems" in capsys.readouterr().out


def test_a_fault_that_only_an_explicit_problem_shows_comes_again(tmp_path: Path) -> None:
    case = next(c for c in cases_at("core", ("deepgemm",)) if c.check == "values" and c.explicit)
    options = {"knobs": "drop_tail=yes"}
    with bench_of("cpu", options) as bench:
        record = run_case(case, Config(bench, replace(FEW, examples=1), 0, tmp_path, "cpu", options))
    assert record.status == "fail"
    assert main(record.replay[1:]) == 1


@pytest.mark.parametrize(("arg", "path"), [
    ("--run-dir=r", "--run-dir=/x/r"), ("--waivers=w.toml", "--waivers=/x/w.toml"), ("--problems=p", "--problems=/x/p"),
    ("--claim=all", "--claim=all"), ("--level=core", "--level=core"), ("-n", "-n"),
])
def test_paths_are_those_of_the_user(arg: str, path: str) -> None:
    assert _from_here(arg, Path("/x")) == path


@dataclass(frozen=True)
class Doubted(Expected):
    """What it holds, and a complaint as statistics have them."""

    held: Expected
    doubted: bool

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.held.shape

    def judge(self, codes: np.ndarray, fmt: str) -> Judgement:
        judged = self.held.judge(codes, fmt)
        return replace(judged, note="errors are too even", by_chance=True) if self.doubted else judged


@pytest.mark.parametrize(("of_the_others", "status"), [(0, "pass"), (1, "pass"), (2, "fail"), (3, "fail")])
def test_what_only_statistics_reject_counts_when_two_of_three_other_data_show_it(
        of_the_others: int, status: str, tmp_path: Path) -> None:
    seeds: list[int] = []

    def oracle(problem, inputs, profile):
        if problem.seed not in seeds:
            seeds.append(problem.seed)
        doubted = seeds.index(problem.seed) <= of_the_others
        return {name: Doubted(want, doubted) for name, want in GEMM.oracle(problem, inputs, profile).items()}

    op = replace(GEMM, oracle=oracle)
    case = Case(op, matching(GEMM, {"c": "none"}), "values")
    with bench_of("cpu", {}) as bench:
        record = run_case(case, Config(bench, FEW, 0, tmp_path, "cpu", confirm=False))
    assert record.status == status
    if status == "pass":
        assert f"taken for chance, as {of_the_others} of 3 other data show it" in record.message
        assert "errors are too even" in record.message
        assert f"seed {seeds[0]}" in record.message
    else:
        assert record.message.splitlines()[0].endswith("errors are too even")


def test_each_problem_that_is_taken_for_chance_is_told(tmp_path: Path) -> None:
    doubted: set[int] = set()
    again: set[int] = set()

    def oracle(problem, inputs, profile):
        if problem.seed not in again and len(doubted) < 2:
            doubted.add(problem.seed)
            again.update(seed_of(problem.seed, "again", i) for i in range(REPEATS_OF_CHANCE))
        wants = GEMM.oracle(problem, inputs, profile)
        return {name: Doubted(want, problem.seed in doubted) for name, want in wants.items()}

    case = Case(replace(GEMM, oracle=oracle), matching(GEMM, {"c": "none"}), "values")
    with bench_of("cpu", {}) as bench:
        record = run_case(case, Config(bench, FEW, 0, tmp_path, "cpu", confirm=False))
    assert record.status == "pass"
    told = [line for line in record.message.splitlines() if line.startswith("taken for chance, as 0 of 3")]
    assert len(told) == 2
    assert all(any(f"(seed {seed})" in line for line in told) for seed in doubted)
