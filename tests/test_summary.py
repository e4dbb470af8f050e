"""The end of a run fits a screen, however much is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conformance.results import Record
from conformance.summary import SHOWN_FAILURES, alike_findings, where_time_went, write_summary


class Screen:
    """Remembers what a terminal would show."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write_line(self, text: str) -> None:
        self.lines += text.splitlines()

    def section(self, title: str) -> None:
        self.lines.append(title)


def record(op: str, n: int, status: str = "fail", reason: str | None = "numeric", **more: Any) -> Record:
    name = f"{op}/values:x={n}"
    return Record(name, op.partition(".")[0], op, {"x": str(n)}, "values", "core", status, reason=reason, backend="cpu",
                  verdict="conforming" if status == "pass" else "nonconforming",
                  replay=["conformance", "replay", name], **more)


def test_findings_of_one_kind_share_a_line_the_most_frequent_first() -> None:
    found = [record("deepgemm.a", 0), record("deepgemm.b", 1), record("deepgemm.b", 2), record("deepgemm.b", 3),
             record("deepgemm.b", 4, reason="nonfinite"), record("deepgemm.b", 5, status="crash", reason=None)]
    assert [(r.id, more) for r, more in alike_findings(found)] == [
        ("deepgemm.b/values:x=1", 2), ("deepgemm.a/values:x=0", 0), ("deepgemm.b/values:x=4", 0),
        ("deepgemm.b/values:x=5", 0)]


def test_thousands_of_failures_fit_a_screen_and_every_one_is_counted(tmp_path: Path) -> None:
    found = {r.id: r for i in range(20) for r in (record(f"deepgemm.op{i}", n) for n in range(100))}
    screen = Screen()
    write_summary(screen, tmp_path, found, (), ())
    shown = [line for line in screen.lines if line.startswith("fail")]
    assert len(shown) == SHOWN_FAILURES
    assert sum("and 99 more of this op" in line for line in screen.lines) == SHOWN_FAILURES
    assert "... and 800 more, of 8 other kinds" in screen.lines
    assert len(screen.lines) < 45


def test_shares_of_the_time_add_up() -> None:
    done = record("deepgemm.a", 0, status="pass", reason=None, started=100.0, finished=110.0,
                  duration_s={"draw": 1.0, "oracle": 2.0, "run": 3.0, "compare": 1.0, "start": 2.0, "device": 9.0})
    assert "other 12%" in where_time_went([done])
    assert "start-up of processes 2 s" in where_time_went([done])


def test_a_timing_pass_ends_in_its_times_the_furthest_from_the_roofline_first(tmp_path: Path) -> None:
    perf = {"time_s": 2e-3, "low_s": 1.9e-3, "high_s": 2.1e-3, "workload": "small", "fraction_roofline": 0.25,
            "verdict": "not comparable", "unstable": False}
    timed = [Record(f"deepgemm.op{i}/timing:workload=small", "deepgemm", f"deepgemm.op{i}", {}, "timing", "core",
                    "pass", verdict="conforming", backend="cpu",
                    perf={**perf, "fraction_roofline": share, "unstable": i == 1})
             for i, share in enumerate((0.5, 0.0034))]
    screen = Screen()
    write_summary(screen, tmp_path, {r.id: r for r in timed}, (), ())
    rows = [line.split() for line in screen.lines if line.startswith("deepgemm.op")]
    assert rows == [["deepgemm.op1", "small", "2", "ms", "0.34%", "not", "comparable", "unstable"],
                    ["deepgemm.op0", "small", "2", "ms", "50.0%", "not", "comparable"]]
    assert screen.lines[-1].endswith("speed.html")
