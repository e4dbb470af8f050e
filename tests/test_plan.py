"""A plan counts compile keys and memory as a run makes them, and takes what tells most into a budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.cli import main
from conformance.collect import UsageError, ops
from conformance.engine.effort import EFFORTS
from conformance.model import Case, Problem, Variant
from conformance.plan import Former, Item, compile_key, fits, items, memory_of, plan_page
from conformance.protocol import Description, supported
from conformance.results import Record

GEMM = next(o for o in ops(("deepgemm",)) if o.name == "deepgemm.bf16_gemm_nt")
PLAIN = Variant({"out": "bf16", "c": "none", "a_major": "k", "b_major": "k"})
ONE_OP = Description("one", {"deepgemm.bf16_gemm_nt": supported(tiles={"m": 96, "n": 160, "k": 48},
                                                               compile_key=("out", "k"))}, fork_after_import=True)


def gemm(m: int, n: int, k: int) -> Problem:
    return Problem(GEMM.name, PLAIN, {"m": m, "n": n, "k": k}, {"compiled_dims": "nk"}, GEMM.families[0], 0)


def test_a_compile_key_is_what_the_backend_names() -> None:
    support = ONE_OP.ops[GEMM.name].compile_key
    assert compile_key(support, gemm(8, 16, 24)) == (GEMM.name, "bf16", "24")
    assert compile_key(support, gemm(64, 128, 24)) == compile_key(support, gemm(8, 16, 24))
    assert compile_key(support, gemm(8, 16, 32)) != compile_key(support, gemm(8, 16, 24))


def test_of_a_size_that_each_rank_has_the_largest_counts() -> None:
    def group(*t: int) -> Problem:
        return Problem("deepep.EPBuffer.dispatch", Variant({}), {"t": list(t), "h": 64}, {}, "normal", 0)

    assert compile_key(("t", "h"), group(5, 3, 0)) == ("deepep.EPBuffer.dispatch", "5", "64")
    assert compile_key(("t", "h"), group(0, 5, 4)) == compile_key(("t", "h"), group(5, 3, 0))


def test_memory_is_the_buffers_with_their_guards() -> None:
    m, n, k = 40, 56, 24
    wanted = 2 * (m * k + n * k + m * n) + 3 * 2 * 512
    assert memory_of(Case(GEMM, PLAIN, "values"), gemm(m, n, k), {}) == wanted


def test_memory_counts_what_a_callee_allocates_twice() -> None:
    topk = next(o for o in ops(("deepselect",)) if o.name == "deepselect.topk")
    v = Variant({"dtype": "fp32", "index": "int64", "order": "any", "values": "yes", "end": "no", "offset": "no",
                 "output_idx": "callee"})
    p = Problem(topk.name, v, {"b": 3, "topk": 8, "vocab": 64}, {}, topk.families[0], 0)
    requirements = {"input_row_bytes": 64}
    assert memory_of(Case(topk, v, "values"), p, requirements) == 3 * 64 * 4 + 2 * 512 + 2 * (3 * 8 * 4 + 3 * 8 * 8)


def test_the_keys_of_a_level_are_counted_once() -> None:
    listed = list(items(ONE_OP, "bringup", ["deepgemm"], Former()))
    keys = set().union(*(i.keys for i in listed))
    assert 5 < len(keys) < sum(len(i.keys) for i in listed)
    page = plan_page("one", ONE_OP, "bringup", ["deepgemm"], 1, "", None, 60.0)
    row = next(line for line in page.splitlines() if line.startswith("in all"))
    assert f" {len(keys)} " in row
    assert "as given" in page


def test_what_fits_shares_compile_keys_and_lets_the_long_give_way() -> None:
    case = Case(GEMM, PLAIN, "values")
    a, b, c = (GEMM.name, "a"), (GEMM.name, "b"), (GEMM.name, "a")
    listed = [Item(case, run_s=5, keys={a}), Item(case, run_s=5, keys={b}), Item(case, run_s=500, keys={a}),
              Item(case, run_s=5, keys={c})]
    per_key = {GEMM.name: 60.0}
    assert fits(listed, per_key, 70.0) == [listed[0], listed[3]]
    assert fits(listed, per_key, 140.0) == [listed[0], listed[1], listed[3]]
    assert fits(listed, per_key, 1.0) == []


def test_a_former_run_is_gone_by() -> None:
    ran = Record("deepgemm.bf16_gemm_nt/values:x=y", "deepgemm", GEMM.name, {}, "values", "core", "pass",
                 duration_s={"compile": 30.0}, started=100.0, finished=137.0)
    former = Former.of({ran.id: ran})
    assert former.takes(Case(GEMM, PLAIN, "values")) == 7.0
    assert former.takes(Case(GEMM, PLAIN, "memory")) is None
    assert former.compile_s == {GEMM.name: 30.0}


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["plan", "--backend", "cpu", "--module", "deepselect", "--level", "bringup"]
    assert main([*argv, "--budget", "1s"]) == 0
    out = capsys.readouterr().out
    assert "deepselect" in out
    assert "within 1s:" in out
    assert "--time-budget=1s" in out
    assert main([*argv, "--budget", "soon"]) == 4
    assert main([*argv, "-n", "0"]) == 4
    assert main([*argv, "--from", str(tmp_path / "none")]) == 4
    assert main(["plan", "--backend", "cpu", "--level", "brignup"]) == 4


def test_a_backend_that_runs_nothing_says_so() -> None:
    assert "runs no case" in plan_page("none", Description("none", {}), "bringup", [], 1, "", None, None)
    with pytest.raises(UsageError):
        plan_page("one", ONE_OP, "bringup", [], 1, "never", None, None)


def test_a_core_case_of_many_sizes_is_planned_with_all_of_its_problems() -> None:
    every = Description("all", {"*": supported()})
    (gate,) = (i for i in items(every, "core", ["tilekernels"], Former())
               if i.case.op.name == "tilekernels.moe.topk_gate" and i.case.check == "values")
    assert gate.problems == gate.case.least == len(gate.case.explicit) + 4 > EFFORTS["core"].examples
