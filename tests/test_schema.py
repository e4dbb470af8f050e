"""The published schemas say what the code writes, and the reader survives what others write."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from conformance import results
from conformance.results import Record, error_over_bound, read_run, why_unusable
from tests.sample_run import FAILURES, passing, write_run, write_sample

SCHEMAS = Path(results.__file__).parent / "schema"
RESULT, RUN = (json.loads((SCHEMAS / f"{n}.schema.json").read_text()) for n in ("result", "run"))
GOOD = passing("deepselect.topk", "values", {"dtype": "bf16"}).to_json()


def errors(schema: dict, value: object) -> list[str]:
    return [e.message for e in Draft202012Validator(schema).iter_errors(value)]


@pytest.mark.parametrize("schema", [RESULT, RUN])
def test_a_schema_is_one(schema):
    Draft202012Validator.check_schema(schema)


def test_every_sample_line_and_header_is_valid(tmp_path):
    for run in write_sample(tmp_path):
        assert errors(RUN, json.loads((run / "run.json").read_text())) == []
        for line in (run / "results.jsonl").read_text().splitlines():
            if line.endswith("}"):
                assert errors(RESULT, json.loads(line)) == []


def test_schema_and_record_have_the_same_fields_and_words():
    assert list(RESULT["properties"]) == [f.name for f in fields(Record)]
    words = {"status": results.Status, "phase": results.Phase, "expectation": results.Expectation}
    for name, enum in words.items():
        assert RESULT["properties"][name]["enum"] == [e.value for e in enum]
    assert RESULT["properties"]["reason"]["enum"] == list(results.REASONS)
    assert RESULT["properties"]["verdict"]["enum"] == [*(v.value for v in results.Verdict), ""]
    assert RUN["properties"]["schema_version"]["const"] == results.SCHEMA_VERSION


WRONG = {
    "no op": {"op": None},
    "a status of its own": {"status": "passed"},
    "a reason of its own": {"reason": "bad luck"},
    "a phase of its own": {"phase": "link"},
    "text for a number": {"seed": "1"},
    "a list for a table": {"numerics": []},
    "variant missing": {"variant": None},
    "a yes for a count": {"attempt": True},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_schema_and_reader_refuse_the_same(change):
    raw = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    assert errors(RESULT, raw)
    assert why_unusable(raw)


def test_unknown_fields_are_for_later_versions():
    raw = {**GOOD, "mood": "good"}
    assert errors(RESULT, raw) == []
    assert why_unusable(raw) == ""


def test_an_edited_verdict_is_named(tmp_path):
    run = write_run(tmp_path / "r", [passing("deepselect.topk", "values", {}, **FAILURES["crash"])])
    file = run / "results.jsonl"
    file.write_text(file.read_text().replace('"nonconforming"', '"conforming"'))
    read = read_run(run)
    assert read.records == {}
    assert read.bad[0].why == "verdict conforming does not follow from status crash with expectation none"


def test_bad_lines_are_named_and_good_ones_used(tmp_path):
    run = write_run(tmp_path / "r", [passing("deepselect.topk", "values", {"dtype": d}) for d in ("bf16", "fp32")])
    with (run / "results.jsonl").open("ab") as f:
        f.write(
            b"[1]\n\xff\xfe\n" + b"[" * 100_000 + b"\n\n" + b'{"id": 3}\n{"seed": ' + b"9" * 400 + b'}\n{"id": "deepsel'
        )
    read = read_run(run)
    assert len(read.records) == 2
    assert [b.line for b in read.bad] == [3, 4, 5, 7, 8, 9]
    assert read.bad[0].why == "a list instead of an object"
    assert read.bad[-1].why == "cut off: no end of line"


def test_the_last_line_of_an_id_counts_within_and_between_files(tmp_path):
    one = passing("deepselect.topk", "values", {})
    run = write_run(tmp_path / "r", [passing("deepselect.topk", "values", {}, **FAILURES["crash"], finished=99.0), one])
    assert read_run(run).records[one.id].status == "pass"
    later = passing("deepselect.topk", "values", {}, **FAILURES["flaky"], finished=one.finished + 5)
    (run / "results-gw0.jsonl").write_text(json.dumps(later.to_json()) + "\n")
    assert read_run(run).records[one.id].status == "flaky"


def test_a_verdict_left_out_follows_from_the_status(tmp_path):
    run = write_run(tmp_path / "r", [passing("deepselect.topk", "values", {}, **FAILURES["oom"], verdict="")])
    assert next(iter(read_run(run).records.values())).verdict == "inconclusive"


def test_a_run_without_header_or_with_a_broken_one_is_readable(tmp_path):
    run = write_run(tmp_path / "r", [passing("deepselect.topk", "values", {})])
    for text in ('{"seed": ', "[]", "[" * 100_000):
        (run / "run.json").write_text(text)
        read = read_run(run)
        assert (len(read.records), read.info, read.bad[0].file) == (1, {}, "run.json")
    (run / "run.json").unlink()
    assert len(read_run(run).records) == 1


def test_no_run_at_all(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run directory"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("numerics", "worst"),
    [
        ({}, None),
        ({"d": {"elements": 3}}, None),
        ({"d": {"worst_ratio": 0.5}, "e": {"worst_ratio": 2}}, 2.0),
        ({"d": {"worst_ratio": "Infinity"}}, float("inf")),
        ({"d": {"worst_ratio": "NaN"}, "e": {"worst_ratio": 1.0}}, float("inf")),
        ({"d": {"worst_ratio": None}, "e": 7}, None),
    ],
)
def test_worst_error_over_bound(numerics, worst):
    assert error_over_bound(passing("deepselect.topk", "values", {}, numerics=numerics)) == worst
