"""What a user, a disk or a plug-in can get wrong is said, with the exit code of the contract; nothing is lost."""

from __future__ import annotations

import fcntl
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runs import HOSTILE, ROOT, Ended, argv, gone_within, run

from conformance import backends
from conformance.backends import BackendUnusable
from conformance.engine.executor import ArenaPool, BackendBroken, Executor, Launcher
from conformance.journal import Journal, RunDirError, WorkerLog
from conformance.results import Record, read_run

ONE = "--case=deepselect.topk/values:dtype=fp32,index=int32,order=any,values=yes,end=no,offset=no,output_idx=callee"
FOUR = "--case=deepselect.topk/values:dtype=fp32,index=int32,order=any,values=yes,end=no,*"
STRIDES = "--case=deepselect.get_stride_requirement/*"


MISTAKES: list[tuple[list[str], list[str]]] = [
    (["--backend=cpuu"], ["unknown backend 'cpuu'", "did you mean cpu?"]),
    (["--module=deepselct"], ["unknown module 'deepselct'", "did you mean deepselect?", "tilekernels"]),
    (["--check=valeus"], ["unknown check 'valeus'", "did you mean values?", "degenerate"]),
    (["--level=cor"], ["unknown level 'cor'", "did you mean core?", "extended"]),
    (["--case=deepselect.topk/valeus:*"], ["unknown case", "did you mean deepselect.topk/values"]),
    (["--inject=sevg"], ["unknown fault 'sevg'", "did you mean segv?"]),
    (["--claim=nothing"], ["--claim=nothing"]),
    (["--shard=4/3"], ["--shard takes K/N"]),
    (["--examples=0"], ["--examples must be at least 1"]),
    (["--backend-option=knobs"], ["--backend-option takes K=V"]),
    (["--resume", "--run-dir="], ["--resume needs the --run-dir"]),
    (["--waivers=no/such/file.toml"], ["no/such/file.toml"]),
    (["--problems=no/such/run"], ["no problems.jsonl there"]),
    (["-n", "2", "--dist=loadscope"], ["--dist=loadscope does not survive a dead worker", "worksteal"]),
    (["-n", "2", "--dist=each"], ["--dist=each does not survive a dead worker"]),
    (["--run-dir=/dev/null/run"], ["run directory /dev/null/run", "Not a directory"]),
]
ASK_ALL = '''
import contextlib, io, json, sys, pytest
for args in json.load(sys.stdin):
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        code = int(pytest.main(args))
    print(json.dumps([code, told.getvalue()]))
'''


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """What each mistake is told, all in one process."""
    path = tmp_path_factory.mktemp("usage") / "run"
    lines = json.dumps([argv(path, *options)[3:] for options, _ in MISTAKES])
    done = subprocess.run([sys.executable, "-c", ASK_ALL], input=lines, cwd=ROOT, capture_output=True, text=True,
                          check=False)
    assert not path.exists() or not list(path.glob("results*"))
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("i", range(len(MISTAKES)), ids=[options[-1] for options, _ in MISTAKES])
def test_usage(i: int, answers: list[tuple[int, str]]) -> None:
    code, text = answers[i]
    assert code == 4, text
    assert [s for s in MISTAKES[i][1] if s not in text] == [], text
    assert "Traceback" not in text


@pytest.mark.parametrize(("backend", "options", "env", "said"), [
    ("no_such_module:Backend", [], {}, "No module named 'no_such_module'"),
    ("json:JSONDecoder", [], {}, "no class that inherits conformance.protocol.Backend"),
    (HOSTILE, [], {"HOSTILE_IMPORT": "raise"}, "planted: this plug-in can't be imported"),
    (HOSTILE, [], {"HOSTILE_IMPORT": "exit"}, "planted: the vendor library ends the process"),
    (HOSTILE, ["mode=describe_raises"], {}, "whose text can't be had"),
    (HOSTILE, ["mode=describe_exits"], {}, "the process ended with code 0"),
    (HOSTILE, ["mode=only_unknown_ops"], {}, "deepselect.topkk: no op of the catalogue; did you mean deepselect.topk?"),
    (HOSTILE, ["mode=malformed_limit"], {}, "unknown limit 'at_most'; known: in, not_in, lt, le, ge, multiple_of"),
    (HOSTILE, ["mode=mistyped_limit"], {}, "`le` takes a number, got 'seven'"),
    (HOSTILE, ["mode=unknown_profile_key"], {}, "profile nan_sentinal: no such key; known: accumulator"),
    (HOSTILE, ["mode=unknown_profile_value"], {}, "profile nan_sentinel='all'; known: first, row"),
    (HOSTILE, ["mode=constructor_raises"], {}, "its constructor ended"),
], ids=lambda v: "")
def test_nothing_left_to_run(backend: str, options: list[str], env: dict[str, str], said: str, tmp_path: Path) -> None:
    done = run(tmp_path / "run", ONE, *(f"--backend-option={o}" for o in options), backend=backend, **env)
    assert done.code == 6, done.text
    assert said in done.text
    assert "INTERNALERROR" not in done.text
    assert gone_within(done.mark, 2.0)


@pytest.mark.parametrize(("mode", "said"), [
    ("unknown_op", "deepselect.topkk: no op of the catalogue; did you mean deepselect.topk?"),
    ("unknown_field", "a limit on 'batch', which is no variant key, size, drawn value or <arg>.row_bytes"),
    ("describe_prints", "1 passed"),
    ("describe_leaves_a_child", "1 passed"),
])
def test_the_rest_goes_on(mode: str, said: str, tmp_path: Path) -> None:
    done = run(tmp_path / "run", ONE, "--examples=1", f"--backend-option=mode={mode}", backend=HOSTILE)
    assert done.code == 0, done.text
    assert said in done.text
    assert gone_within(done.mark, 2.0)


def test_a_malformed_op_costs_no_other(tmp_path: Path) -> None:
    done = run(tmp_path / "run", ONE, STRIDES, "--examples=1", "--backend-option=mode=malformed_limit", backend=HOSTILE)
    assert done.code == 0, done.text
    assert {r.op: r.status for r in done.run.records.values()} == {
        "deepselect.topk": "unsupported", "deepselect.get_stride_requirement": "pass"}


def test_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A description or constructor that hangs ends at its limit; the second time nobody waits for it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setattr(backends, "DESCRIBE_TIMEOUT_S", 0.05)
    with pytest.raises(BackendUnusable, match="gave no answer within"):
        backends.describe(HOSTILE, {})
    launcher = Launcher(HOSTILE, device="0", options={"mode": "constructor_hangs"}, fork=True)
    launcher._zygote()
    launcher.start_timeout_s = 0.3
    for _ in range(4):
        with pytest.raises(BackendBroken, match="its constructor hung"):
            Executor(launcher, ArenaPool())
    assert launcher.starts == 4
    assert len(launcher.broken) == 2
    launcher.close()


@pytest.mark.parametrize("options", [(STRIDES, "--shard=3/3"), (ONE, "--backend-option=at_most_rows=0")])
def test_nothing_executed(options: tuple[str, ...], tmp_path: Path) -> None:
    assert run(tmp_path / "run", *options, backend=HOSTILE).code == 5


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A closed run of four cases, one of them nonconforming."""
    done = run(tmp_path_factory.mktemp("finished") / "run", FOUR, "--examples=1", "--shrink-budget=0",
               "--backend-option=fp32.int32.any.yes.no.yes.callee=mutate_input", backend=HOSTILE)
    assert done.code == 1, done.text
    return done


def resume(path: Path) -> Ended:
    return run(path, FOUR, "--examples=1", "--shrink-budget=0", "--resume",
               "--backend-option=fp32.int32.any.yes.no.yes.callee=mutate_input", backend=HOSTILE)


def test_spoilt_results(finished: Ended, tmp_path: Path) -> None:
    """Of three spoilt lines each is named; the good one is used, the others run again."""
    path = tmp_path / "run"
    shutil.copytree(finished.path, path)
    lines = (path / "results.jsonl").read_text().splitlines()
    good = next(line for line in lines if '"fail"' not in line)
    others = [line for line in lines if line != good]
    edited = others[0].replace('"verdict": "nonconforming"', '"verdict": "conforming"').replace(
        '"status": "pass"', '"status": "great"')
    (path / "results.jsonl").write_text("\n".join([good, edited, "[1, 2]", others[1][: len(others[1]) // 2]]))
    again = resume(path)
    for said in ("results.jsonl line 2: ", "results.jsonl line 3: a list instead of an object",
                 "results.jsonl line 4: cut off", "results.jsonl: edited since the run was closed"):
        assert said in again.text
    assert again.code == 1
    assert again.verdicts() == finished.verdicts()
    assert again.run.bad == []
    before, after = (read_run(p).records[json.loads(good)["id"]] for p in (finished.path, path))
    assert before.finished == after.finished


def test_deleted_artifact(finished: Ended, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(finished.path, path)
    record = next(r for r in finished.run.records.values() if r.artifacts)
    shutil.rmtree(path / str(record.artifacts))
    again = resume(path)
    assert again.code == 1
    assert f"deleted; `conformance replay {record.id}` makes it again" in again.text
    assert again.verdicts() == finished.verdicts()
    out = tmp_path / "merged"
    merge = [sys.executable, "-m", "conformance.cli", "merge", str(path), "--out", str(out)]
    merged = subprocess.run(merge, cwd=ROOT, capture_output=True, text=True, check=False)
    assert merged.returncode == 1
    assert "makes it again" in merged.stdout


def test_directory_in_use(finished: Ended, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    with (path / "lock").open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        done = run(path, ONE)
    assert done.code == 4
    assert "in use by another run" in done.text
    done = run(finished.path, ONE)
    assert done.code == 4
    assert "holds a run already; add --resume" in done.text


def record(i: int) -> Record:
    return Record(f"deepselect.topk/values:i={i}", "deepselect", "deepselect.topk", {"i": str(i)}, "values", "full",
                  "pass", verdict="conforming", message="x" * 100)


def fill(log: WorkerLog) -> None:
    for i in range(100):
        log.problem({"id": record(i).id, "problem": {"n": i}})
        log.result(record(i))


def test_full_disk_keeps_whole_lines(tmp_path: Path) -> None:
    """A line that does not fit is not begun; what stands is read without complaint; closing says what is wrong."""
    journal = Journal(tmp_path, resume=False)
    journal.write_info({"seed": 0})
    log = WorkerLog(tmp_path, "gw0")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(RunDirError, match="the disk takes no more"):
            fill(log)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(RunDirError, match="the disk takes no more"):
            journal.close(journal.records().values(), {"seed": 0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found = read_run(tmp_path)
    assert found.bad == []
    written = len(found.records)
    assert 2 < written < 100
    assert not list(tmp_path.glob(".*.tmp"))
    again = Journal(tmp_path, resume=True)
    assert len(again.done) == written
    again.close(again.records().values(), {"seed": 0})
    assert len(read_run(tmp_path).records) == written


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_full_disk(workers: tuple[str, ...], finished: Ended, tmp_path: Path) -> None:
    """A run whose disk fills up says so, ends with 3, and goes on later from what it had."""
    options = (FOUR, "--examples=1", "--shrink-budget=0",
               "--backend-option=fp32.int32.any.yes.no.yes.callee=mutate_input")
    full = run(tmp_path / "run", *options, *workers, "-p", "full_disk", backend=HOSTILE, FULL_DISK_BYTES="2500")
    assert full.code == 3, full.text
    assert "the disk takes no more" in full.text
    assert "INTERNALERROR" not in full.text
    assert gone_within(full.mark, 2.0)
    assert full.run.bad == []
    again = resume(tmp_path / "run")
    assert again.code == 1, again.text
    assert again.verdicts() == finished.verdicts()


@pytest.mark.parametrize("workers", [("-n", "0"), ("-n", "2")], ids=["one process", "two workers"])
def test_stop_at_the_first(workers: tuple[str, ...], tmp_path: Path) -> None:
    """-x is no interruption: the exit code is that of the finding."""
    done = run(tmp_path / "run", FOUR, *workers, "-x", "--examples=1", "--shrink-budget=0",
               "--backend-option=mode=raises_mute", backend=HOSTILE)
    assert done.code == 1, done.text
    assert any(r.status == "not_run" for r in done.run.records.values())


def test_lost_worker(tmp_path: Path) -> None:
    """A case that takes its worker with it is an error, inconclusive; the others run on a new worker."""
    done = run(tmp_path / "run", FOUR, "-n", "2", "--examples=1",
               "--backend-option=fp32.int32.any.yes.no.no.caller=kill_worker", backend=HOSTILE)
    assert done.code == 6, done.text
    lost = [r for r in done.run.records.values() if r.status == "error"]
    assert [r.variant["output_idx"] for r in lost] == ["caller"]
    assert "worker" in lost[0].message
    assert sum(r.status == "pass" for r in done.run.records.values()) == 3
    assert gone_within(done.mark, 2.0)
    assert (done.path / "manifest.json").exists()
