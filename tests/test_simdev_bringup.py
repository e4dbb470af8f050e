"""First contact with a device that is 10^4 times slower: its bring-up ends in time and finds faults of its tiles."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import simbench
from runs import ROOT
from simbench import SIMDEV, attempt, sim_bench

from conformance.collect import cases_at

SLOW = "1e4"
LIMIT_S = 20 * 60.0
TELLING = 20
"""problems among which a fault must show"""
FAULTS = ("drop_k_tail", "second_k_twice", "dirty_k_tail", "swap_columns", "stale_a", "stale_b", "keep_sums",
          "drop_m_tail", "drop_n_tail", "short_m_tail", "topk_drop_tail", "topk_border_twice", "cast_stale_scale")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_tile_is_found_at_once(tmp_path: Path, fault: str) -> None:
    with sim_bench(tmp_path) as bench:
        executed, found = 0, None
        for case in cases_at("bringup", (), bench.description):
            if executed >= TELLING or found:
                break
            if case.op.name.startswith(("deepgemm.", "deepselect.")):
                r = attempt(bench, case, tmp_path, level="bringup", slow=SLOW, defect=fault)
                executed += r.examples.get("executed", 0)
                found = r if r.status not in ("pass", "unsupported", "skipped") else None
        took_s = simbench.seconds(tmp_path / "clock")
    assert found is not None, f"not among the first {executed} problems"
    assert found.status == "fail", found.message
    assert found.problem is not None
    assert took_s < LIMIT_S


def test_all_of_it_ends_in_time(tmp_path: Path) -> None:
    """Every module on a device ten thousand times slower: within 20 of its minutes, and what it has conforms."""
    clock = simbench.fake_clock(tmp_path / "clock")
    env = {**os.environ, "PYTHONPATH": simbench.without_torch(tmp_path / "none"), "PYTHONDONTWRITEBYTECODE": "1",
           "SIMDEV_STATE": str(tmp_path / "devices"), "CONFORMANCE_FAKE_CLOCK": str(clock)}
    argv = [sys.executable, "-m", "pytest", "-q", f"--backend={SIMDEV}", "--level=bringup",
            f"--run-dir={tmp_path / 'run'}", f"--backend-option=slow={SLOW}", "cases"]
    done = subprocess.run(argv, cwd=ROOT, env=env, check=False, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=300)
    assert done.returncode == 0, done.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    executed = sum(r["examples"].get("executed", 0) for r in rows if r["examples"])
    assert executed > 100
    assert {r["op"].partition(".")[0] for r in rows} > {"deepgemm", "deepselect", "flashmla"}
    assert 60 < simbench.seconds(clock) < LIMIT_S
    # A case and its parts go by the same clock.
    other = re.search(r"other (-?\d+)%", done.stdout)
    assert other, done.stdout
    assert 0 <= int(other.group(1)) <= 100
    assert not Path(tmp_path / "none" / "tried").exists()
