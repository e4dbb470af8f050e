"""The suite tried on itself: what the command tells is what happened."""

from __future__ import annotations

import json
import queue
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conformance.catalogue.load import MODULES
from conformance.collect import UsageError, cases_at
from conformance.engine.attempt import Attempt
from conformance.engine.effort import Config
from conformance.engine.judge import Seen
from conformance.model import Case, Problem, Variant
from conformance.results import Record
from conformance.selftest import report
from conformance.selftest.command import _as_they_end, main
from conformance.selftest.journal import FILE, Journal
from conformance.selftest.library import ANY, Row, injected, library, tabled
from conformance.selftest.rules import OURS, Rules
from conformance.selftest.trial import Caught, interleaved, try_rows
from references.expected import Exact, Within
from references.formats import codec

GEMM = "deepgemm.bf16_gemm_nt"
FAULT = Row("deepgemm", "k_tail_dropped", GEMM, "values", ("numeric",), (("knobs", "drop_tail=yes,tile_k=96"),))
VARIANT = Row("deepgemm", "small_tiles", GEMM, "values", (), (("knobs", "tile_m=16,tile_n=32"),))


def test_the_library_is_large_and_its_rows_differ() -> None:
    rows = library(MODULES, parts=("tabled", "injected"))
    assert len({(r.name, r.op, r.check) for r in rows}) == len(rows)
    assert sum(r.fault for r in rows) >= 200
    assert {r.module for r in rows} == set(MODULES)
    assert all(r.doc for r in rows)


def test_injected_faults_name_their_check() -> None:
    checks = {r.name: r.check for r in injected(["deepselect"])}
    assert checks["any:write_behind"] == checks["any:mutate_input"] == "memory"
    assert checks["any:wrong_after_refusal"] == checks["any:accepts"] == "rejects"


@pytest.mark.parametrize(("row", "outcome"), [
    (FAULT, "killed"),
    (Row("deepgemm", "x", GEMM, "values", ("order",), FAULT.options), "wrong reason"),
    (Row("deepgemm", "x", GEMM, "values", ("numeric",), VARIANT.options), "survived"),
    (VARIANT, "right"),
    (Row("deepgemm", "x", GEMM, "values", (), FAULT.options), "false alarm"),
    (Row("deepgemm", "any:one_element", GEMM, "values", ("numeric", "nonfinite"), inject="one_element"), "killed"),
], ids=lambda v: v if isinstance(v, str) else v.name)
def test_outcomes(row: Row, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.selftest.trial.PASSES", ((0, 2, True), (0, 1, False)))
    (caught,) = try_rows([row], "core", 0)
    assert caught.outcome == outcome
    assert caught.good == (outcome in ("killed", "right"))
    assert caught.problems > 0
    assert bool(caught.case) == (outcome in ("killed", "false alarm"))


def test_rows_tried_side_by_side_end_as_they_do_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.selftest.trial.PASSES", ((0, 4, True), (0, 1, False)))
    rows = [VARIANT, FAULT, replace(FAULT, name="passes", options=VARIANT.options),
            replace(VARIANT, name="other", profile=(("subnormals", "flush"),))]

    def told(caught: Caught) -> tuple[str, int, int, int, str]:
        return caught.outcome, caught.cases, caught.problems, caught.comparisons, caught.case

    together = {c.row.name: told(c) for c in try_rows(rows, "core", 3)}
    monkeypatch.setattr("conformance.selftest.trial.RECALL.most_bytes", 0)
    alone = {row.name: told(next(iter(try_rows([row], "core", 3)))) for row in rows}
    assert together == alone
    assert {name: t[:2] for name, t in together.items()} == {
        "small_tiles": ("right", 2), "k_tail_dropped": ("killed", together["k_tail_dropped"][1]),
        "passes": ("survived", 5), "other": ("right", 2)}


def test_a_fault_meets_first_what_killed_it_before() -> None:
    last = [c.id for c in cases_at("core", ("deepgemm",)) if c.op.name == GEMM and c.check == "values"][-1]
    (caught,) = try_rows([FAULT], "core", 0, killed_by=[last])
    assert (caught.outcome, caught.cases, caught.case) == ("killed", 1, last)
    (caught,) = try_rows([replace(FAULT, options=VARIANT.options, reasons=("order",))], "bringup", 0, killed_by=[last])
    assert caught.outcome == "survived"
    assert caught.cases > 1


def test_a_variant_meets_a_case_of_values_and_another(monkeypatch: pytest.MonkeyPatch) -> None:
    met: dict[int, list[str]] = {0: [], 1: []}

    def run(case: Case, config: Config) -> Record:
        met[config.seed].append(case.id)
        executed = 0 if len(met[config.seed]) == 1 else 5  # the first one runs nothing, so it does not count
        return Record(case.id, "", "", {}, case.check, "core", "unsupported", examples={"executed": executed})

    monkeypatch.setattr("conformance.selftest.trial.run_case", run)
    for seed in met:
        (caught,) = try_rows([VARIANT], "core", seed)
        checks = [case.partition("/")[2].partition(":")[0] for case in met[seed][1:]]
        assert (caught.outcome, caught.cases, caught.problems) == ("right", 3, 10)
        assert len(checks) == 2
        assert checks.count("values") == 1
    assert met[0] != met[1]
    assert sorted(interleaved(list(range(50)), 3)) == list(range(50))


@pytest.mark.parametrize(("status", "outcome"), [
    ("fail", "killed"), ("crash", "killed"), ("mistrusted", "wrong reason"), ("skipped", "wrong reason"),
    ("error", "wrong reason"), ("pass", "survived")])
def test_only_a_verdict_kills_a_fault_of_any_reason(status: str, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.selftest.trial.run_case", lambda case, config: Record(
        case.id, "", "", {}, case.check, "core", status, examples={"executed": 3}))
    (caught,) = try_rows([replace(FAULT, reasons=ANY)], "core", 0)
    assert caught.outcome == outcome


def test_a_row_that_is_not_told_of_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.selftest.command.LOST_S", 0.3)
    late, told = queue.Queue(), caught("a", "killed")
    threading.Timer(0.5, late.put, [told]).start()
    running, others = Future(), Future()
    threading.Timer(0.4, running.set_result, [None]).start()
    assert list(_as_they_end({running}, late, 1)) == [told]
    others.set_result(None)
    with pytest.raises(RuntimeError, match="2 rows have ended and were not told of"):
        list(_as_they_end({others}, late, 2))


def test_other_rules_see_as_many_cases_of_a_fault_that_dies_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.selftest.trial.COMPARED_CASES", 2)
    dead, right = try_rows([FAULT, replace(VARIANT, name="w")], "bringup", 0, compare=True)
    assert (dead.outcome, right.outcome) == ("killed", "right")
    assert dead.cases == 1
    assert dead.rules.seen[OURS, "all"] >= right.rules.seen[OURS, "all"] > 0
    assert dead.rules.rejected[OURS, "all"] > right.rules.rejected[OURS, "all"] == 0


def attempt(observed: list[float], golden: list[float], family: str) -> Attempt:
    problem = Problem(GEMM, Variant({}), {}, {}, family, 0)
    codes = codec.encode(np.array(observed), "fp32")
    seen = Seen(outputs={"d": codes, "i": np.arange(3, dtype=np.int32)}, formats={"d": "fp32", "i": "int32"})
    example = type("E", (), {"problem": problem})()
    expected = {"d": Within(np.array(golden), np.zeros(len(golden))), "i": Exact(np.arange(3, dtype=np.int32))}
    out = Attempt(problem, seen=[seen], examples=[example], expected=[expected])
    return out


def test_other_rules_are_asked_about_the_same_results() -> None:
    rules = Rules()
    rules.look(attempt([1.0, 2.0], [1.0, 2.0], "normal"))
    assert rules.verdict("allclose", "ordinary") is False
    assert rules.verdict(OURS, "all") is False
    rules.look(attempt([1.0, 3.0], [1.0, 2.0], "wide"))
    assert rules.verdict("allclose", "all") is True
    assert rules.verdict("allclose", "ordinary") is False
    assert rules.verdict("FlashAttention", "all") is None


def caught(name: str, outcome: str, fault: bool = True, seed: int = 0, margin: float | None = None) -> Caught:
    row = Row("deepgemm", name, GEMM, "values", ("numeric",) if fault else ())
    return Caught(row, seed, outcome, 3, 5, 1000, 0.5, "numeric" if outcome in ("killed", "false alarm") else "", "",
                  margin)


def test_tables_count_every_row() -> None:
    results = [caught("a", "killed", margin=3.5), caught("a", "survived", seed=1), caught("b", "killed", margin=np.inf),
               caught("v", "right", fault=False), caught("w", "false alarm", fault=False)]
    head, rows = report.confusion(results)
    told = dict(zip(head, rows[0], strict=True))
    assert (told["killed"], told["survived"], told["right"], told["false alarms"]) == (2, 1, 1, 1)
    assert told["comparisons of variants"] == "2,000"
    head, rows = report.by_row(results)
    first = dict(zip(head, rows[0], strict=True))
    assert (first["as it must"], first["smallest margin"]) == ("1 of 2", "3.5")
    assert dict(zip(head, rows[1], strict=True))["smallest margin"] == "no error is allowed"
    assert [line.split(":")[0] for line in report.wrong_ones(results)] == ["survived", "false alarm"]


def test_the_comparison_counts_only_what_a_rule_could_see() -> None:
    one, two, right = caught("a", "killed"), caught("b", "killed"), caught("v", "right", fault=False)
    one.rules.look(attempt([1.0, 3.0], [1.0, 2.0], "normal"))
    two.rules.look(attempt([1.0, 2.00001], [1.0, 2.0], "normal"))
    right.rules.look(attempt([1.0, 9.0], [1.0, 2.0], "normal"))
    head, rows = report.comparison([one, two, right])
    told = dict(zip(head, rows[0], strict=True))
    assert told["allclose"] == "1/2 (FA 1/1)"
    assert told["FlashAttention"] == "-"


def test_the_command_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--module", "deepselect", "--fault", "any:zeros", "-n", "1", "--out", str(tmp_path)])
    assert code == 0
    assert "1 rows, 1 seed" in capsys.readouterr().out
    assert "any:zeros" in (tmp_path / "selftest.md").read_text()
    assert "<td>any:zeros</td>" in (tmp_path / "selftest.html").read_text()
    (row,) = json.loads((tmp_path / "selftest.json").read_text())
    assert row["outcome"] == "killed"


def test_a_killed_selftest_goes_on_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"level": "core", "compare": True}
    rows = [FAULT, VARIANT, replace(FAULT, doc="another sentence")]
    first = Journal(tmp_path, about, resume=False)
    kept = caught("a", "killed")
    kept = replace(kept, row=FAULT, seed=3, margin=2.5)
    kept.rules.look(attempt([1.0, 3.0], [1.0, 2.0], "normal"))
    first.note(kept)
    with (tmp_path / FILE).open("a") as f:
        f.write('{"key": "cut o')
    again = Journal(tmp_path, about, resume=True)
    assert again.done([(row, 3) for row in rows]) == {0: kept, 2: replace(kept, row=rows[2])}
    assert again.done([(FAULT, 4), (replace(FAULT, options=()), 3)]) == {}
    again.note(replace(kept, row=VARIANT, outcome="right", margin=None))
    done = Journal(tmp_path, about, resume=True).done([(row, 3) for row in rows])
    assert {i: c.outcome for i, c in done.items()} == {0: "killed", 1: "right", 2: "killed"}


@pytest.mark.parametrize(("about", "resume", "told"), [
    ({"level": "core"}, False, "--resume goes on"),
    ({"level": "full"}, True, "began with level 'core'"),
])
def test_another_selftest_is_left_as_it_is(about: dict[str, str], resume: bool, told: str, tmp_path: Path) -> None:
    Journal(tmp_path, {"level": "core"}, resume=False)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(UsageError, match=told):
        Journal(tmp_path, about, resume=resume)
    assert (tmp_path / FILE).read_bytes() == before


def test_a_file_that_is_no_selftest_is_refused_and_left(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("notes of mine")
    with pytest.raises(UsageError, match="is no selftest's"):
        Journal(tmp_path, {}, resume=True)
    assert (tmp_path / FILE).read_text() == "notes of mine"
    with pytest.raises(UsageError, match="name it with --out"):
        Journal(None, {}, resume=True)


def test_a_message_stays_text_on_the_page(tmp_path: Path) -> None:
    wrong = replace(caught("<b>x</b>|y", "survived"), seen="<script>alert(1)</script>")
    page = report.write([wrong], tmp_path, "conformance selftest").read_text()
    assert "<script>alert" not in page
    assert "&lt;b&gt;x&lt;/b&gt;|y" in page
    assert "\\|y" in (tmp_path / "selftest.md").read_text()


def test_a_malformed_table_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cases" / "deepgemm").mkdir(parents=True)
    (tmp_path / "cases" / "deepgemm" / "faults.toml").write_text(
        '[[fault]]\nname = "x"\nops = ["deepgemm.bf16_gemm_nt"]\nknobs = "a=1"\n')
    monkeypatch.setattr("conformance.selftest.library.ROOT", tmp_path)
    with pytest.raises(ValueError, match="names the reason"):
        list(tabled(["deepgemm"]))
