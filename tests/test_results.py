"""The verdict rule and the exit code, as tables."""

from __future__ import annotations

import pytest

from conformance.results import Record, exit_code, verdict_of

VERDICTS = [
    # status, expectation, required, deterministic -> verdict
    ("pass", "none", False, True, "conforming"),
    ("pass", "unexpected_pass", False, True, "nonconforming"),
    ("pass", "unexpected_pass", False, False, "conforming"),
    ("fail", "none", False, True, "nonconforming"),
    ("fail", "waived", False, True, "waived"),
    ("fail", "waiver_expired", False, True, "nonconforming"),
    ("fail", "waiver_mismatch", False, True, "nonconforming"),
    ("crash", "none", False, True, "nonconforming"),
    ("crash", "waived", False, True, "waived"),
    ("timeout", "none", False, True, "nonconforming"),
    ("flaky", "none", False, True, "nonconforming"),
    ("error", "none", False, True, "inconclusive"),
    ("oom", "none", False, True, "inconclusive"),
    ("mistrusted", "none", False, True, "inconclusive"),
    ("unsupported", "none", False, True, "not_applicable"),
    ("unsupported", "none", True, True, "nonconforming"),
    ("not_run", "none", False, True, "not_run"),
    ("not_run", "none", True, True, "inconclusive"),
    ("skipped", "none", False, True, "not_run"),
]


@pytest.mark.parametrize(("status", "expectation", "required", "deterministic", "verdict"), VERDICTS)
def test_verdict(status: str, expectation: str, required: bool, deterministic: bool, verdict: str) -> None:
    assert verdict_of(status, expectation, required=required, deterministic=deterministic).value == verdict


def _records(*statuses: str) -> list[Record]:
    out = []
    for s in statuses:
        r = Record("m.f/values", "m", "m.f", {}, "values", "core", s)
        r.verdict = verdict_of(s, "none").value
        out.append(r)
    return out


@pytest.mark.parametrize(("statuses", "code"), [
    (("pass",), 0),
    (("pass", "unsupported", "skipped"), 0),
    (("pass", "fail", "error"), 1),
    (("pass", "error"), 6),
    (("pass", "mistrusted"), 6),
    (("unsupported", "not_run"), 5),
    ((), 5),
    (("oom", "crash"), 1),
])
def test_exit_code(statuses: tuple[str, ...], code: int) -> None:
    assert exit_code(_records(*statuses)) == code


def test_waived_alone_is_conforming() -> None:
    r = _records("fail")[0]
    r.expectation, r.verdict = "waived", verdict_of("fail", "waived").value
    assert exit_code([r]) == 0


def test_record_survives_json() -> None:
    r = Record("m.f/values", "m", "m.f", {"a": "b"}, "values", "core", "pass", seed=7, domain={"sizes": {"m": [1, 2]}})
    assert Record.from_json({**r.to_json(), "unknown": 1}) == r
