"""Killed at any moment, a run leaves no process behind and resumes to what it would have been; shards merge to it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runs import HOSTILE, ROOT, Ended, argv, gone_within, marked, run, start

MOMENTS = int(os.environ.get("KILL_MOMENTS", "1"))
"""how many seeded moments each kind of process is killed at; 20 for a release"""
WRONG = "--backend-option=fp32.int32.any.yes.no.yes.callee=mutate_input"
OPTIONS = ("-n", "2", "--examples=3", "--shrink-budget=0", WRONG,
           "--case=deepselect.topk/values:dtype=fp32,index=int32,order=any,*",
           "--case=deepselect.topk/values:dtype=fp32,index=int32,order=index,*")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    done = run(tmp_path_factory.mktemp("undisturbed") / "run", *OPTIONS, backend=HOSTILE)
    assert done.code == 1, done.text
    assert gone_within(done.mark, 2.0)
    return done


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kinds(mark: str, controller: int) -> dict[str, list[int]]:
    """The processes of a run by what they are: a zygote is the child of a worker, an executor of a zygote."""
    found: dict[str, list[int]] = {"controller": [controller], "worker": [], "zygote": [], "executor": []}
    parents, zygote = {}, set()
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            parents[pid] = parent_of(pid)
            if b"conformance.engine.zygote" in Path(f"/proc/{pid}/cmdline").read_bytes():
                zygote.add(pid)
    for pid, parent in parents.items():
        if pid in zygote:
            found["executor" if parent in zygote else "zygote"].append(pid)
        elif parent == controller and b"conformance.engine" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            found["worker"].append(pid)
    return found


def strike(proc: subprocess.Popen[str], mark: str, kind: str, rng: random.Random, run_dir: Path) -> bool:
    """Kill one process of this kind at a drawn moment between the first result and the last. False where none lived."""
    end = time.monotonic() + 120
    while not any(f.stat().st_size for f in run_dir.glob("results-*")):
        if proc.poll() is not None or time.monotonic() > end:
            return False
        time.sleep(0.01)
    time.sleep(rng.uniform(0.0, 1.0))
    while proc.poll() is None:
        with contextlib.suppress(OSError):
            victims = kinds(mark, proc.pid)[kind]
            if victims:
                os.kill(rng.choice(victims), signal.SIGKILL)
                return True
    return False


@pytest.mark.parametrize("kinds_struck", ["controller", "worker", "zygote executor"])
def test_killed_and_resumed(kinds_struck: str, undisturbed: Ended, tmp_path: Path) -> None:
    struck = 0
    for moment in range(MOMENTS):
        rng = random.Random(f"{kinds_struck} {moment}")
        path, mark = tmp_path / f"run{moment}", uuid.uuid4().hex
        proc = start(argv(path, *OPTIONS, backend=HOSTILE), mark)
        for kind in kinds_struck.split():
            struck += strike(proc, mark, kind, rng, path)
        if kinds_struck == "controller":
            assert gone_within(mark, 2.0), "a process outlives the controller"
        text, _ = proc.communicate(timeout=240)
        assert gone_within(mark, 2.0), "a process outlives the run"
        again = run(path, *OPTIONS, "--resume", backend=HOSTILE)
        assert again.code == 1, again.text
        assert again.verdicts() == undisturbed.verdicts(), f"moment {moment}\n{text}\n{again.text}"
        assert sorted(again.run.info["planned"]) == sorted(undisturbed.run.info["planned"])
        assert again.run.info["closed"]
    assert struck


def test_interrupted(undisturbed: Ended, tmp_path: Path) -> None:
    """Ctrl-C: exit 2, what was found is kept, and the rest comes with --resume."""
    path, mark = tmp_path / "run", uuid.uuid4().hex
    proc = start(argv(path, *OPTIONS, backend=HOSTILE), mark)
    while proc.poll() is None and not any(f.stat().st_size for f in path.glob("results-*")):
        time.sleep(0.01)
    proc.send_signal(signal.SIGINT)
    text, _ = proc.communicate(timeout=120)
    assert proc.returncode == 2, text
    assert gone_within(mark, 2.0)
    kept = Ended(2, text, path)
    assert any(r.status == "not_run" for r in kept.run.records.values())
    assert any(r.status == "pass" for r in kept.run.records.values())
    again = run(path, *OPTIONS, "--resume", backend=HOSTILE)
    assert again.code == 1, again.text
    assert again.verdicts() == undisturbed.verdicts()


TIMES = ("started", "finished", "duration_s", "worker", "lineage", "device", "replay", "numerics")


def without_times(done: Ended) -> dict[str, Any]:
    return {i: {k: v for k, v in r.to_json().items() if k not in TIMES[:4]} for i, r in done.run.records.items()}


def rows(path: Path) -> list[str]:
    return sorted(json.dumps(json.loads(line), sort_keys=True) for line in path.read_text().splitlines())


def test_shards_merge_to_the_run(undisturbed: Ended, tmp_path: Path) -> None:
    parts = [run(tmp_path / f"part{k}", *OPTIONS, f"--shard={k}/3", backend=HOSTILE) for k in (1, 2, 3)]
    counts = [len(p.run.records) for p in parts]
    assert sum(counts) == len(undisturbed.run.records)
    assert max(counts) - min(counts) <= 1
    out = tmp_path / "merged"
    argv_ = [sys.executable, "-m", "conformance.cli", "merge", *(str(p.path) for p in parts), "--out", str(out)]
    merged = subprocess.run(argv_, cwd=ROOT, capture_output=True, text=True, check=False)
    assert merged.returncode == undisturbed.code, merged.stdout + merged.stderr
    whole = Ended(merged.returncode, merged.stdout, out)
    assert without_times(whole) == without_times(undisturbed)
    assert rows(out / "problems.jsonl") == rows(undisturbed.path / "problems.jsonl")
    assert sorted(p.name for p in (out / "artifacts").iterdir()) == sorted(
        p.name for p in (undisturbed.path / "artifacts").iterdir())
    twice = subprocess.run(argv_, cwd=ROOT, capture_output=True, text=True, check=False)
    assert twice.returncode == 4, "it must not write over a run"


def test_other_runs_do_not_mix(undisturbed: Ended, tmp_path: Path) -> None:
    """What differs in seed or options is neither resumed nor merged."""
    resumed = run(undisturbed.path, *OPTIONS, "--resume", "--seed=1", backend=HOSTILE)
    assert resumed.code == 4
    assert "differs in seed (0 and 1)" in resumed.text
    other = run(tmp_path / "other", "--case=deepselect.get_stride_requirement/values", "--seed=1")
    argv_ = [sys.executable, "-m", "conformance.cli", "merge", str(undisturbed.path), str(other.path), "--out",
             str(tmp_path / "out")]
    merged = subprocess.run(argv_, cwd=ROOT, capture_output=True, text=True, check=False)
    assert merged.returncode == 4
    assert "no shard of the run" in merged.stderr
