"""The page of times and the comparison of two runs: what stands there, and what a forged run can't put there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from conformance.results import Record
from reports.diff import diff_runs
from reports.load import load_runs
from reports.matrix import write_all
from reports.speed_data import share_text, time_text
from tests.sample_run import write_run

OP = "deepgemm.bf16_gemm_nt"


def perf(time_s: float = 1e-3, **more: Any) -> dict[str, Any]:
    return {"workload": "m4096_n7168_k16384", "clock": "device_event", "time_s": time_s, "low_s": 0.99 * time_s,
            "high_s": 1.01 * time_s, "unstable": False, "block_medians_s": [0.995 * time_s, time_s, 1.005 * time_s],
            "flops": 9.6e11, "bytes": 4e8, "bound": "flops", "unit": "bf16", "tflops": 960.0, "gb_s": 400.0,
            "peak": {"source": "a data sheet", "published": True, "flops_s": 9.894e14, "bytes_s": 4.8e12},
            "attained": {"flops_s": 8e14, "bytes_s": 4e12}, "fraction_roofline": 0.97, "fraction_nominal": 0.97,
            "fraction_attainable": 1.2, "verdict": "not comparable", "why": "published of another chip", "claims": [],
            **more}


def record(name: str = "m4096_n7168_k16384", **more: Any) -> Record:
    case = f"{OP}/timing:workload={name}"
    return Record(case, "deepgemm", OP, {"workload": name}, "timing", "full", "pass", verdict="conforming",
                  perf=perf(**more))


def run_of(folder: Path, *records: Record) -> Path:
    write_run(folder, list(records))
    return folder


def page_of(tmp_path: Path, *records: Record) -> str:
    write_all([run_of(tmp_path / "run", *records)], tmp_path / "out", [OP])
    return (tmp_path / "out" / "html" / "speed.html").read_text()


def plots(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(m) for m in re.findall(r'<svg class="roofline".*?</svg>', page, re.DOTALL)]


def test_a_run_with_times_has_a_page_that_the_matrix_links(tmp_path: Path) -> None:
    page = page_of(tmp_path, record(), record("m128_n7168_k16384", time_s=2e-4, flops=3e10))
    assert 'href="speed.html"' in (tmp_path / "out" / "html" / "index.html").read_text()
    assert "990 µs to 1.01 ms" in page
    assert "97.0%" in page
    (plot,) = plots(page)
    dots = plot.findall(".//circle")
    assert len(dots) == 2
    assert len(plot.findall("line[@class='roof']")) == 2
    assert "989 TFLOPS" in "".join(plot.itertext())


def test_the_plot_has_no_scripts_and_no_colours_of_its_own(tmp_path: Path) -> None:
    page = page_of(tmp_path, record())
    (plot,) = plots(page)
    assert {e.tag for e in plot.iter()} <= {"svg", "title", "line", "text", "g", "circle"}
    assert not any(k in ("fill", "stroke", "style", "onload") for e in plot.iter() for k in e.attrib)
    assert "prefers-color-scheme: dark" in page


def test_higher_is_faster_and_right_is_more_work_a_byte(tmp_path: Path) -> None:
    page = page_of(tmp_path, record("a"), record("b", time_s=2e-3), record("c", bytes=8e8))
    a, b, c = plots(page)[0].findall(".//circle")
    assert float(a.get("cy")) < float(b.get("cy"))
    assert float(c.get("cx")) < float(a.get("cx"))
    assert a.get("cy") == c.get("cy")


def test_no_dot_stands_above_a_roof_that_it_is_below(tmp_path: Path) -> None:
    plot = plots(page_of(tmp_path, record()))[0]
    level = next(e for e in plot.findall("line[@class='roof']") if e.get("y1") == e.get("y2"))
    assert float(level.get("y1")) < float(plot.find(".//circle").get("cy"))


def test_a_run_without_times_has_no_page(tmp_path: Path) -> None:
    plain = Record(f"{OP}/values:out=bf16", "deepgemm", OP, {"out": "bf16"}, "values", "full", "pass",
                   verdict="conforming")
    write_all([run_of(tmp_path / "run", plain)], tmp_path / "out", [OP])
    assert not (tmp_path / "out" / "html" / "speed.html").exists()
    assert "speed.html" not in (tmp_path / "out" / "html" / "index.html").read_text()


def test_claims_say_what_was_found_or_why_nothing_was(tmp_path: Path) -> None:
    claim = {"what": "dense GEMM, bf16", "chips": ["ascend-950dt"], "verdict": "below",
             "why": "90.1% of peak at the least",
             "low": 0.901, "claimed": 0.998,
             "source": "DeepGEMM-Ascend README, Performance (CANN 9.20, msprof, cold L2), M4096 N7168 K16384"}
    page = page_of(tmp_path, record(claims=[claim], verdict="below"))
    assert "below: 90.1% of peak at the least" in page
    assert "an open contradiction" in page
    assert "the suite has no such op" in page


@pytest.mark.parametrize("forged", [
    {"time_s": "fast"}, {"time_s": -1.0}, {"time_s": True}, {"low_s": None}, {"time_s": 1e400}, {"high_s": 0}])
def test_a_figure_that_is_none_leaves_its_case_out(forged: dict[str, Any], tmp_path: Path) -> None:
    bad = record("bad")
    bad.perf = {**(bad.perf or {}), **forged}
    page = page_of(tmp_path, record("good"), bad)
    assert "1 timed cases" in page


def test_text_of_a_run_stays_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    peak = {"source": evil, "flops_s": 1e15, "bytes_s": "x"}
    page = page_of(tmp_path, record(workload=evil, unit=evil, why=evil, peak=peak, own=[1], claims=[evil, 3]))
    assert evil not in page
    assert "&lt;script&gt;" in page


def test_a_slower_run_is_told_and_noise_is_not(tmp_path: Path) -> None:
    a = run_of(tmp_path / "a", record("x"), record("y"), record("z"))
    b = run_of(tmp_path / "b", record("x", time_s=1.1e-3), record("y", time_s=1.001e-3), record("z", time_s=0.8e-3))
    found = diff_runs(*load_runs([a, b]))
    assert [case for case, _ in found.changes["slower"]] == [f"{OP}/timing:workload=x"]
    assert "1 ms -> 1.1 ms, 1.100 times" in found.changes["slower"][0][1]
    assert [case for case, _ in found.changes["faster"]] == [f"{OP}/timing:workload=z"]


def test_times_by_two_clocks_are_not_compared(tmp_path: Path) -> None:
    a, b = run_of(tmp_path / "a", record()), run_of(tmp_path / "b", record(time_s=2e-3, clock="host"))
    assert not diff_runs(*load_runs([a, b])).changes["slower"]


def test_figures_are_short() -> None:
    assert [time_text(s) for s in (1.5, 2.2299e-3, 4.56e-6, 7e-9)] == ["1.5 s", "2.23 ms", "4.56 µs", "7 ns"]
    assert [share_text(s) for s in (None, 0.9975, 0.0012)] == ["-", "99.8%", "0.12%"]
