"""A waiver waives what it names and nothing else, and a bad file says where it is bad."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

import pytest

from conformance import waivers
from conformance.results import Expectation, Record, verdict_of
from tests.sample_run import FAILURES, passing

TODAY = datetime.date(2027, 1, 15)
GOOD: Mapping[str, str] = {
    "id": '"tilelang.reduce_max/values:*"',
    "reason": '"max drops a NaN in its first operand"',
    "issue": '"https://example.org/12"',
    "expiry": "2027-06-30",
    "fingerprint": '{ status = "fail", phase = "compare", reason = ["nonfinite", "order"] }',
}


def toml(**changes: str | None) -> str:
    rows = {**GOOD, **changes}
    return "[[waiver]]\n" + "".join(f"{k} = {v}\n" for k, v in rows.items() if v is not None)


def one(**changes: str | None) -> waivers.Waiver:
    return waivers.parse(toml(**changes))[0]


def record(kind: str = "nan", op: str = "tilelang.reduce_max", check: str = "values", **changes) -> Record:
    planted = FAILURES[kind] if kind != "pass" else {}
    return passing(op, check, {"dtype": "fp32"}, **{**planted, **changes})


def test_a_good_file(tmp_path):
    file = tmp_path / "w.toml"
    file.write_text("# ours\n\n" + toml() + "\n" + toml(id='"deepselect.topk/values:dtype=bf16"'))
    first, second = waivers.load(file)
    assert first.expiry == datetime.date(2027, 6, 30)
    assert first.fingerprint == waivers.Fingerprint(("fail",), ("compare",), ("nonfinite", "order"))
    assert (first.line, second.line) == (3, 10)


def test_an_empty_file_waives_nothing():
    assert waivers.parse("") == ()


BAD = {
    "no TOML": ("[[waiver]\n", r"f: no valid TOML: .*line 1"),
    "another table": ("[waivers]\n", r"f: unknown table 'waivers'"),
    "no array": ("[waiver]\nid = 'a.b/c'\n", r"f: `waiver` must be an array"),
    "unknown key": (toml(reasons="'x'"), r"f:7: waiver 1: unknown key 'reasons'; did you mean reason\?"),
    "missing key": (toml(issue=None), r"f:1: waiver 1: no issue"),
    "empty reason": (toml(reason='" "'), r"f:3: waiver 1: reason must be text that is not empty"),
    "number for issue": (toml(issue="12"), r"f:4: waiver 1: issue must be text"),
    "everything": (toml(id='"*"'), r"f:2: waiver 1: id '\*': it must be"),
    "star inside": (toml(id='"a.*/values"'), r"f:2: waiver 1: id"),
    "quoted date": (toml(expiry='"2027-06-30"'), r"f:5: waiver 1: expiry must be a date without quotes"),
    "date and time": (toml(expiry="2027-06-30T00:00:00Z"), r"f:5: waiver 1: expiry must be a date"),
    "fingerprint text": (toml(fingerprint='"fail"'), r"f:6: waiver 1: fingerprint: must be a table"),
    "no status": (toml(fingerprint='{reason = "numeric"}'), r"f:6: waiver 1: fingerprint: no status"),
    "unwaivable": (toml(fingerprint='{status = "error"}'), r"f:6: .*status 'error' can't stand here"),
    "typo": (toml(fingerprint='{status = "fail", reason = "numric"}'), r"f:6: .*did you mean numeric\?"),
    "any failure": (toml(fingerprint='{status = "fail"}'), r"f:6: .*a fail needs its reason"),
    "band backwards": (toml(fingerprint='{status = "crash", error_band = [2, 1]}'), r"f:6: .*error_band must be"),
    "band of nan": (toml(fingerprint='{status = "crash", error_band = [nan, 1]}'), r"f:6: .*error_band must be"),
    "band of words": (toml(fingerprint='{status = "crash", error_band = ["a"]}'), r"f:6: .*error_band must be"),
    "unknown print": (toml(fingerprint='{status = "crash", band = 1}'), r"f:6: .*unknown key 'band'"),
    "twice": (toml() + toml(), r"f:8: waiver 2: .*stands already in waiver 1"),
    "second row": (toml() + "\n" + toml(expiry="7"), r"f:12: waiver 2: expiry"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_a_bad_file_says_where_and_why(text, message):
    with pytest.raises(waivers.WaiverError, match=message):
        waivers.parse(text, "f")


def test_a_missing_or_binary_file(tmp_path):
    with pytest.raises(waivers.WaiverError, match="No such file"):
        waivers.load(tmp_path / "none.toml")
    (tmp_path / "b.toml").write_bytes(b"\xff\x00")
    with pytest.raises(waivers.WaiverError, match="no UTF-8 text"):
        waivers.load(tmp_path / "b.toml")


APPLY = {
    "matching failure": (record(), {}, "waived"),
    "other op": (record(op="tilelang.reduce_sum"), {}, "none"),
    "other check": (record(check="memory"), {}, "none"),
    "other status": (record("crash"), {}, "waiver_mismatch"),
    "other reason": (record("tail"), {}, "waiver_mismatch"),
    "other phase": (record(phase="execute"), {}, "waiver_mismatch"),
    "last day": (record(), {"expiry": "2027-01-15"}, "waived"),
    "day after": (record(), {"expiry": "2027-01-14"}, "waiver_expired"),
    "expired and other": (record("crash"), {"expiry": "2027-01-14"}, "waiver_expired"),
    "pass": (record("pass"), {}, "unexpected_pass"),
    "pass after the end": (record("pass"), {"expiry": "2027-01-14"}, "none"),
    "error can't be waived": (record("error"), {}, "none"),
    "oom can't be waived": (record("oom"), {}, "none"),
    "not run": (record("not_run"), {}, "none"),
}


@pytest.mark.parametrize(("seen", "changes", "expectation"), APPLY.values(), ids=APPLY)
def test_apply(seen, changes, expectation):
    assert waivers.apply(seen, [one(**changes)], TODAY) == Expectation(expectation)


@pytest.mark.parametrize(
    ("error", "expectation"),
    [
        (4100.0, "waived"),
        (4200.0, "waived"),
        (4200.5, "waiver_mismatch"),
        (1.5, "waiver_mismatch"),
        (None, "waiver_mismatch"),
        ("NaN", "waiver_mismatch"),
    ],
)
def test_error_band(error, expectation):
    waiver = one(fingerprint='{status = "fail", reason = "numeric", error_band = [4000, 4200]}')
    seen = record("tail", numerics={} if error is None else {"d": {"worst_ratio": error}})
    assert waivers.apply(seen, [waiver], TODAY) == Expectation(expectation)


def test_a_band_up_to_infinity_takes_nan():
    waiver = one(fingerprint='{status = "fail", reason = "nonfinite", error_band = [1, inf]}')
    assert waivers.apply(record(), [waiver], TODAY) is Expectation.WAIVED


def test_any_of_several_waivers_may_fit():
    crash = one(fingerprint='{status = "crash"}')
    assert waivers.apply(record("crash"), [one(), crash], TODAY) is Expectation.WAIVED
    expired = one(expiry="2026-01-01")
    assert (
        waivers.apply(record(), [one(fingerprint='{status = "crash"}'), expired], TODAY) is Expectation.WAIVER_EXPIRED
    )


def test_a_waiver_truly_waives():
    """The verdict rule on top: only the matching, live waiver lets a failure through."""
    verdicts = {
        name: verdict_of(seen.status, waivers.apply(seen, [one(**changes)], TODAY)).value
        for name, (seen, changes, _) in APPLY.items()
    }
    assert {name for name, v in verdicts.items() if v == "waived"} == {"matching failure", "last day"}
    assert verdicts["pass"] == "nonconforming"
    assert verdicts["day after"] == verdicts["other reason"] == "nonconforming"


def test_usage_lists_what_matched_nothing():
    ours = [one(), one(id='"deepselect.*"', expiry="2026-01-01")]
    rows = waivers.usage(ours, [record(), record("pass"), record("tail")], TODAY)
    assert rows[0].by_expectation == {"waived": 1, "unexpected_pass": 1, "waiver_mismatch": 1}
    assert (rows[1].matched, rows[1].expired) == (0, True)
    assert "matched nothing; expired on 2026-01-01" in str(rows[1])
    assert waivers.unmatched(ours, [record()], TODAY) == [ours[1]]


def test_a_waiver_may_be_of_one_backend_and_its_options():
    text = """[[waiver]]
id = "tilelang.cast/*"
on = { backend = "compiler", target = ["ascend", "other"] }
reason = "no rule"
issue = "x"
expiry = 2999-01-01
fingerprint = { status = "fail", reason = "compile" }
"""
    (waiver,) = waivers.parse(text)
    today = datetime.date(2026, 1, 1)

    def record(backend: str, target: str, status: str) -> Record:
        r = Record("tilelang.cast/compile:dtype=fp32", "tilelang", "tilelang.cast", {}, "compile", "core", status,
                   reason="compile" if status == "fail" else None, backend=backend)
        r.replay = ["conformance", "replay", r.id, f"--backend-option=target={target}"]
        return r

    assert waivers.apply(record("compiler", "ascend", "fail"), (waiver,), today).value == "waived"
    assert waivers.apply(record("compiler", "ascend", "pass"), (waiver,), today).value == "unexpected_pass"
    assert waivers.apply(record("compiler", "sm_90a", "pass"), (waiver,), today).value == "none"
    assert waivers.apply(record("other", "ascend", "fail"), (waiver,), today).value == "none"
    assert waivers.unmatched((waiver,), [record("compiler", "sm_90a", "pass")], today) == []
    with pytest.raises(waivers.WaiverError, match="on must be a table"):
        waivers.parse(text.replace('backend = "compiler", ', ""))
