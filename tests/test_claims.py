"""What a verdict is relative to: the whole claim, whatever was selected, and the waivers of this run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.collect import cases_at
from conformance.merge import merge_runs
from tests.runs import run

STRIDES = "deepselect.get_stride_requirement"
OPTIONS = ("--level=core", f"--case={STRIDES}/values")
SPOILT = (*OPTIONS, "--backend-option=knobs=fault=stride_in_elements", "--shrink-budget=0")
WAIVER = f"""
[[waiver]]
id = "{STRIDES}/values"
reason = "given in elements"
issue = "an issue"
expiry = 2099-12-31
fingerprint = {{ status = "fail", reason = "contract" }}
"""


def test_a_selection_does_not_shrink_the_claim(tmp_path: Path) -> None:
    claim = tmp_path / "claim"
    claim.write_text(f"{STRIDES}\n")
    claimed = {c.id for c in cases_at("core") if c.op.name == STRIDES}
    whole = run(tmp_path / "whole", "--level=core", f"--case={STRIDES}*", f"--claim={claim}")
    assert whole.code == 0
    parts = [run(tmp_path / f"part{k}", *OPTIONS, f"--claim={claim}", f"--shard={k}/2") for k in (1, 2)]
    assert [p.code for p in parts] == [6, 5], "claimed and not selected; the other shard has nothing to run"
    assert merge_runs([p.path for p in parts], tmp_path / "merged")[1] == 6
    rows = [json.loads(line) for line in (tmp_path / "merged" / "results.jsonl").read_text().splitlines()]
    assert {r["id"]: r["verdict"] for r in rows} == {
        i: "conforming" if i.endswith("/values") else "inconclusive" for i in claimed}
    assert len(rows) == len(claimed) == 2


def test_an_old_waiver_does_not_outlive_its_run(tmp_path: Path) -> None:
    waivers = tmp_path / "waivers.toml"
    waivers.write_text(WAIVER)
    with_waiver = f"--waivers={waivers}"
    folder = tmp_path / "run"
    assert run(folder, *SPOILT, with_waiver).code == 0
    again = run(folder, *SPOILT, "--resume")
    assert again.code == 1, "no waiver file is loaded by default"
    (record,) = again.run.records.values()
    assert (record.expectation, record.verdict, record.waiver) == ("none", "nonconforming", None)
    assert run(folder, *SPOILT, "--resume", with_waiver).code == 0
    waivers.write_text(WAIVER.replace("2099", "2001"))
    assert run(folder, *SPOILT, "--resume", with_waiver).code == 1, "it has expired"


@pytest.mark.parametrize(("row", "word"), [
    ('{"id": "x"}', "no problem"), ('{"problem": [1]}', "no problem"), ("[]", "instead of an object"),
    ('{"id": "x", "problem": {"op":', "line 1"),
])
def test_problems_that_are_none_are_usage(row: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "problems.jsonl").write_text(row + "\n")
    done = run(tmp_path / "run", *OPTIONS, f"--problems={tmp_path}")
    assert done.code == 4
    assert word in done.text
    assert not (tmp_path / "run").exists()
