"""The matrix: what a cell says, that nothing is hidden or looks better than it is, and that pages are safe."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.protocol import Description, supported, unsupported
from conformance.results import Record
from reports.fold import State, fold, limit_text, module_headline, run_headline
from reports.load import load_runs
from reports.matrix import to_csv, to_markdown
from tests.sample_run import FAILURES, passing, with_changes, write_run

OP = "deepgemm.bf16_gemm_nt"
GOOD = [passing(OP, "values", {"out": out}) for out in ("bf16", "fp32")]
CLAIM = {"name": "gemm", "level": "core", "ops": [OP, "deepgemm.fp8_*"]}


ONLY_OP = Description("cpu", {OP: supported()})


def unsupported_record(variant: str, **changes) -> Record:
    return passing(OP, "values", {"out": variant}, status="unsupported", numerics={}, examples={}, **changes)


def matrix_of(tmp_path: Path, records: list[Record], surface=(), **run):
    return fold(load_runs([write_run(tmp_path / "run", records, **run)]), surface)


def cell_of(tmp_path: Path, records: list[Record], **run):
    return matrix_of(tmp_path, records, **run).cells[OP][0]


def pair(kind: str, **changes) -> list[Record]:
    """One case that passes, and one with this failure."""
    return [GOOD[0], with_changes(GOOD[1], **FAILURES[kind], **changes)]


STATES = {
    "all pass": (GOOD, State.CONFORMING, "2/2", ""),
    "one fails": (pair("tail"), State.NONCONFORMING, "1/2 nonconforming", "1 numeric"),
    "one crashes": (pair("crash"), State.NONCONFORMING, "1/2 nonconforming", "1 signal"),
    "one is flaky": (pair("flaky"), State.NONCONFORMING, "1/2 nonconforming", "1 nondeterministic"),
    "one times out": (pair("timeout"), State.NONCONFORMING, "1/2 nonconforming", "1 timeout"),
    "one waived": (pair("tail", expectation="waived"), State.WAIVED, "1/2 waived", "1 numeric"),
    "waiver expired": (
        pair("tail", expectation="waiver_expired"),
        State.NONCONFORMING,
        "1/2 nonconforming",
        "1 numeric",
    ),
    "unexpected pass": (
        [GOOD[0], with_changes(GOOD[1], expectation="unexpected_pass")],
        State.NONCONFORMING,
        "1/2 nonconforming",
        "1 unexpected pass",
    ),
    "one error": (pair("error"), State.INCONCLUSIVE, "1/2 inconclusive", "1 error"),
    "one oom": (pair("oom"), State.INCONCLUSIVE, "1/2 inconclusive", "1 oom"),
    "one mistrusted": (pair("mistrusted"), State.INCONCLUSIVE, "1/2 inconclusive", "1 mistrusted"),
    "fail outweighs waived and oom": (
        [
            with_changes(GOOD[0], **FAILURES["tail"], expectation="waived"),
            with_changes(GOOD[1], **FAILURES["oom"]),
            passing(OP, "repeat", {}, **FAILURES["crash"]),
        ],
        State.NONCONFORMING,
        "1/3 nonconforming",
        "1 signal, 1 oom, 1 numeric",
    ),
    "one not yet": ([GOOD[0], unsupported_record("fp32")], State.PARTIAL, "1/2", "1 not yet"),
    "one not run": (pair("not_run"), State.PARTIAL, "1/2", "1 not run"),
    "one skipped": (pair("skipped"), State.PARTIAL, "1/2", "1 skipped"),
    "none yet": ([unsupported_record("bf16"), unsupported_record("fp32")], State.NOT_YET, "not yet", ""),
    "none run": ([with_changes(r, **FAILURES["not_run"]) for r in GOOD], State.NOT_RUN, "not run", ""),
    "limits declared": (
        [
            GOOD[0],
            replace(GOOD[1], domain={"sizes": {"m": [128, 256]}, "limits": [{"field": "m", "multiple_of": 128}]}),
        ],
        State.PARTIAL,
        "2/2",
        "only m % 128 = 0",
    ),
}


@pytest.mark.parametrize(("records", "state", "headline", "subline"), STATES.values(), ids=STATES)
def test_a_cell_is_its_worst_case_and_says_so(tmp_path, records, state, headline, subline):
    cell = cell_of(tmp_path, records)
    assert (cell.state, cell.headline(), cell.subline()) == (state, headline, subline)


def test_a_narrower_declaration_never_looks_the_same(tmp_path):
    narrow = Description(
        "chip", {"deepgemm.*": supported(limits=({"field": "m", "multiple_of": 128},), path="emulated")}
    )
    cell = cell_of(tmp_path, GOOD, description=narrow)
    assert cell.state is State.PARTIAL
    assert cell.subline() == "only m % 128 = 0, emulated"
    assert cell.domain.text() == "only m % 128 = 0, emulated, bf16/fp32, m 1..4097, n 8..7168, k 8..7168"


def test_a_run_of_fewer_cases_never_looks_the_same(tmp_path):
    whole = write_run(tmp_path / "whole", GOOD)
    part = write_run(tmp_path / "part", GOOD[:1])
    cells = fold(load_runs([whole, part])).cells[OP]
    assert [c.state for c in cells] == [State.CONFORMING, State.PARTIAL]
    assert (cells[1].headline(), cells[1].subline()) == ("1/2", "1 not selected")


@pytest.mark.parametrize("description", [None, Description("chip", {"*": supported()})])
def test_an_op_that_was_not_selected_is_not_called_missing(tmp_path, description):
    run = write_run(tmp_path / "run", GOOD, description=description)
    if description is None:
        (run / "run.json").unlink()
    cell = fold(load_runs([run]), ["deepselect.topk"]).cells["deepselect.topk"][0]
    assert (cell.state, cell.headline(), cell.verdict) == (State.NOT_RUN, "not selected", "not_run")


def test_without_a_claim_the_word_is_partial(tmp_path):
    matrix = matrix_of(tmp_path, GOOD, surface=["deepgemm.fp8_gemm_nt", "deepselect.topk"], description=ONLY_OP)
    assert str(run_headline(matrix.runs[0], matrix.column(0))) == "partial: 1 of 3 ops conforming (2 not yet)"
    assert module_headline(matrix.column(0, matrix.modules["deepgemm"])) == "1 of 2 ops"
    whole = matrix_of(tmp_path / "whole", GOOD)
    assert str(run_headline(whole.runs[0], whole.column(0))) == "partial: 1 of 1 ops conforming"


FP8 = passing("deepgemm.fp8_gemm_nt", "values", {})
CLAIMS = {
    "held": ([*GOOD, FP8], State.CONFORMING, "conforming to claim gemm: 2"),
    "an op not selected": (GOOD, State.INCONCLUSIVE, "inconclusive to claim gemm: 1"),
    "an op not supported": (
        [*GOOD, with_changes(FP8, status="unsupported", verdict="nonconforming")],
        State.NONCONFORMING,
        "nonconforming to claim gemm: 1",
    ),
    "an op fails": (
        [*GOOD, with_changes(FP8, **FAILURES["tail"])],
        State.NONCONFORMING,
        "nonconforming to claim gemm: 1",
    ),
    "a case did not run": (
        [*GOOD, with_changes(FP8, **FAILURES["not_run"], verdict="inconclusive")],
        State.INCONCLUSIVE,
        "inconclusive to claim gemm: 1",
    ),
    "only an op outside fails": (
        [*GOOD, FP8, passing("deepselect.topk", "values", {}, **FAILURES["tail"])],
        State.CONFORMING,
        "conforming to claim gemm: 2",
    ),
}


@pytest.mark.parametrize(("records", "state", "words"), CLAIMS.values(), ids=CLAIMS)
def test_a_claim_keeps_its_denominator(tmp_path, records, state, words):
    matrix = matrix_of(tmp_path, records, surface=["deepgemm.fp8_gemm_nt"], claim=CLAIM)
    head = run_headline(matrix.runs[0], matrix.column(0))
    assert (head.state, head.words) == (state, f"{words} of 2 ops conforming")


def test_what_is_claimed_and_missing_stays_grey_and_visible(tmp_path):
    claim = {"name": "x", "level": "core", "ops": [OP, "deepselect.topk"]}
    matrix = matrix_of(tmp_path, GOOD, claim=claim, description=ONLY_OP)
    head = run_headline(matrix.runs[0], matrix.column(0))
    assert str(head) == "nonconforming to claim x: 1 of 2 ops conforming (1 not yet, but claimed)"
    cell = matrix.cells["deepselect.topk"][0]
    assert (cell.state, cell.verdict, cell.headline()) == (State.MISSING, "nonconforming", "not yet, but claimed")


def test_a_backends_own_words_for_what_it_lacks(tmp_path):
    chip = Description(
        "chip", {"deepgemm.*": unsupported("no matrix unit", "hardware"), OP: unsupported("see roadmap")}
    )
    matrix = matrix_of(tmp_path, [unsupported_record("bf16")], description=chip, surface=["deepgemm.fp8_gemm_nt"])
    cells = {op: row[0] for op, row in matrix.cells.items()}
    assert (cells[OP].headline(), cells[OP].why_missing) == ("not yet", "not yet: see roadmap")
    assert (cells["deepgemm.fp8_gemm_nt"].headline(), cells["deepgemm.fp8_gemm_nt"].why_missing) == (
        "not in hardware",
        "hardware: no matrix unit",
    )


def test_planned_cases_without_a_result_are_not_run_and_said(tmp_path):
    matrix = matrix_of(tmp_path, GOOD[:1], planned=[r.id for r in GOOD] + ["no id"], closed=False)
    assert matrix.cells[OP][0].counts == {"pass": 1, "not_run": 1}
    assert matrix.runs[0].notes == (
        "cut off: the run was not closed, 1 of 3 planned cases have no result",
        "run.json left out: planned: 'no id' is no case id; it should read module.op/check:key=value,key=value",
    )


def test_columns_have_names_of_their_own(tmp_path):
    sim = Description("cpu", {"*": supported()}, platform="simulator")
    runs = [
        write_run(tmp_path / "a", GOOD),
        write_run(tmp_path / "b", GOOD),
        write_run(tmp_path / "c", GOOD, description=sim),
    ]
    assert [r.label for r in load_runs([*runs, runs[0]])] == ["cpu (a)", "cpu (b)", "cpu (simulator)", "cpu (a) #2"]


def test_broken_headers_cost_only_what_is_broken(tmp_path):
    run = write_run(tmp_path / "r", GOOD)
    for broken in (
        {"description": {"ops": {"*": {"supported": True}}}},
        {
            "description": [],
            "planned": 7,
            "versions": [],
            "seed": "x",
            "claim": "core",
            "level": None,
            "started": "now",
        },
        {"host": "me", "device": ["a", "b"], "command": "pytest"},
    ):
        header = {**json.loads((run / "run.json").read_text()), **broken}
        (run / "run.json").write_text(json.dumps(header))
        loaded = load_runs([run])[0]
        assert len(loaded.records) == 2
    assert any("description can't be read" in n for n in loaded.notes)
    assert any("the claim names no list of ops" in n for n in loaded.notes)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"field": "m", "multiple_of": 128}, "m % 128 = 0"),
        ({"field": "k", "le": 4096, "ge": 8}, "k ≤ 4096, k ≥ 8"),
        ({"field": "k", "lt": 9}, "k < 9"),
        ({"field": "out", "in": ["bf16", "fp32"]}, "out: bf16, fp32"),
        ({"field": "a.row_bytes", "odd": 3}, "a.row_bytes odd 3"),
        ({"field": "misuse", "not_in": ["a_of_one_axis"]}, "misuse: not a_of_one_axis"),
        ({"field": "alpha", "given": False, "reason": "why"}, "alpha not given"),
        ({"field": "c", "in": ["none"], "when": {"out": ["bf16"]}}, "c: none where out: bf16"),
    ],
)
def test_limits_as_text(row, text):
    assert limit_text(row) == text


def test_each_run_is_told_with_level_and_day(tmp_path):
    """The same count of cases says more at a higher level."""
    matrix = fold(load_runs([write_run(tmp_path / "r", GOOD)]))
    info = matrix.runs[0].info
    day = time.strftime("%Y-%m-%d", time.gmtime(info.started))
    assert f"**{matrix.runs[0].label}**, level {info.level}, {day}: " in to_markdown(matrix)
    assert f",{info.platform},{info.level}," in to_csv(matrix)
