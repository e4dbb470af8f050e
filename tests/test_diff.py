"""Two runs side by side: every kind of change is seen, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.results import Record
from reports.diff import compare, diff_runs
from reports.load import load_runs
from tests.sample_run import FAILURES, passing, with_changes, write_run

BASE = passing("deepgemm.bf16_gemm_nt", "values", {"out": "bf16"}, numerics={"d": {"worst_ratio": 0.3}})
OTHER = passing("deepselect.topk", "values", {"dtype": "bf16"})


def erring(ratio: float) -> Record:
    return replace(BASE, numerics={"d": {"worst_ratio": ratio}})


def fails(kind: str, **changes) -> Record:
    return with_changes(BASE, **{**FAILURES[kind], **changes})


def runs(tmp_path: Path, a: Record | None, b: Record | None) -> tuple[Path, Path]:
    """Two runs that share OTHER and differ in one case."""
    sides = ([r for r in (OTHER, side) if r] for side in (a, b))
    return tuple(write_run(tmp_path / name, records) for name, records in zip("ab", sides, strict=True))


UNSUPPORTED = with_changes(BASE, status="unsupported", numerics={})
SKIPPED = with_changes(BASE, status="skipped", numerics={})
WAIVED = fails("tail", expectation="waived")

CHANGES = {
    "nothing": (BASE, BASE, None, 0),
    "broken": (BASE, fails("crash"), "broken", 1),
    "newly flaky": (BASE, fails("flaky"), "broken", 1),
    "broken, waived": (BASE, WAIVED, "broken", 1),
    "broken from inconclusive": (fails("oom"), fails("crash"), "broken", 1),
    "waiver ran out": (WAIVED, fails("tail", expectation="waiver_expired"), "unwaived", 1),
    "fixed": (fails("tail"), BASE, "fixed", 0),
    "fixed waived": (WAIVED, BASE, "fixed", 0),
    "lost": (BASE, None, "lost", 1),
    "lost to unsupported": (BASE, UNSUPPORTED, "lost", 1),
    "a failure lost to unsupported": (fails("tail"), UNSUPPORTED, "lost", 1),
    "lost to not run": (BASE, fails("not_run"), "lost", 1),
    "added": (None, BASE, "added", 0),
    "added from unsupported": (UNSUPPORTED, BASE, "added", 0),
    "no run in either": (UNSUPPORTED, SKIPPED, None, 0),
    "unclear": (BASE, fails("oom"), "unclear", 6),
    "unclear failure": (fails("tail"), fails("error"), "unclear", 6),
    "changed": (fails("tail"), fails("crash"), "changed", 0),
    "error doubled": (BASE, erring(0.61), "doubled", 0),
    "error grew": (BASE, erring(0.59), None, 0),
    "error shrank": (erring(0.61), BASE, None, 0),
    "error doubled far inside": (erring(1e-5), erring(1e-3), None, 0),
}


@pytest.mark.parametrize(("a", "b", "kind", "code"), CHANGES.values(), ids=CHANGES)
def test_every_kind_of_change(tmp_path, a, b, kind, code):
    diff = diff_runs(*load_runs(runs(tmp_path, a, b)))
    assert {k: [case for case, _ in rows] for k, rows in diff.changes.items() if rows} == (
        {kind: [BASE.id]} if kind else {}
    )
    assert diff.exit_code == code


def edit_problems(run: Path, **changes) -> None:
    file = run / "problems.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**row, **changes} if row["id"] == BASE.id else row) + "\n" for row in rows))


def test_same_problem_other_bits(tmp_path):
    a, b = runs(tmp_path, BASE, BASE)
    edit_problems(b, outputs="0" * 64)
    text, code = compare(a, b)
    assert code == 0
    assert f"Same problem, other bits (1)\n  {BASE.id}: 1 of 1 problems" in text


def test_other_inputs_are_no_other_bits(tmp_path):
    a, b = runs(tmp_path, BASE, BASE)
    edit_problems(b, outputs="0" * 64, inputs="1" * 64)
    diff = diff_runs(*load_runs((a, b)))
    assert [k for k, rows in diff.changes.items() if rows] == ["inputs"]


def test_another_problem_is_not_compared(tmp_path):
    a, b = runs(tmp_path, BASE, BASE)
    edit_problems(b, outputs="0" * 64, problem={"sizes": {"m": 4}})
    diff = diff_runs(*load_runs((a, b)))
    assert (diff.problems, [k for k, rows in diff.changes.items() if rows]) == (1, [])


def test_bad_problem_lines_and_missing_files_are_said(tmp_path):
    a, b = runs(tmp_path, BASE, BASE)
    (a / "problems.jsonl").unlink()
    (b / "problems.jsonl").write_text('{"id": 3}\n{"id": "x"')
    text, code = compare(a, b)
    assert code == 0
    assert "problems.jsonl line 1 left out: no id, problem, inputs and outputs as they should be" in text
    assert "problems.jsonl line 2 left out: cut off" in text
    assert "bits were not compared" in text


def test_nothing_in_common(tmp_path):
    a = write_run(tmp_path / "a", [UNSUPPORTED])
    b = write_run(tmp_path / "b", [OTHER])
    assert compare(a, b)[1] == 5


def test_text_is_capped_and_markdown_is_whole_and_inert(tmp_path):
    before = [passing("deepselect.topk", "values", {"n": str(i)}) for i in range(30)]
    after = [with_changes(r, **FAILURES["crash"]) for r in before]
    a, b = write_run(tmp_path / "a", before, backend="<b>*x*"), write_run(tmp_path / "b", after)
    text, code = compare(a, b)
    assert code == 1
    assert "... and 10 more" in text
    page, _ = compare(a, b, markdown=True)
    assert page.count("was pass, now crash signal in execute") == 30
    assert "&lt;b&gt;\\*x\\*" in page


def test_no_run_is_an_error_of_its_own(tmp_path):
    a = write_run(tmp_path / "a", [OTHER])
    with pytest.raises(FileNotFoundError, match="no run directory"):
        compare(a, tmp_path / "none")
