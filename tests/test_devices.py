"""Runs on many devices: each has one user, dead ones cost no case, and what became of them is told."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runs import ROOT, Ended, argv, gone_within, run, start

from conformance.bench import bench_of
from conformance.collect import cases_at
from conformance.devices import Slots, chosen, device_lines
from conformance.engine import oom
from conformance.engine.attempt import Bench
from conformance.engine.devices import Board
from conformance.engine.effort import EFFORTS, Config
from conformance.engine.executor import Executor
from conformance.engine.leases import FOLDER_VARIABLE, Leases
from conformance.engine.run import run_case
from conformance.results import Record

MANY = "many_devices_backend:Many"
TOPK = "deepselect.topk/values:dtype=fp32,index=int32,order=any,values=yes,*"
PLAIN = "deepselect.topk/values:dtype=fp32,index=int32,order=any,values=yes,end=no,offset=no,output_idx=callee"
COMBINE = "deepep.EPBuffer.combine/values:layout=normal,rows=returned,bias=none,weights=yes,reduction=multiple,sync=y*"


@pytest.fixture(autouse=True)
def own_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "machine").mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "leases"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))


def options(tmp_path: Path, **more: Any) -> dict[str, str]:
    return {"dir": str(tmp_path / "machine"), **{k: str(v) for k, v in more.items()}}


def flags(tmp_path: Path, **more: Any) -> list[str]:
    return [f"--backend-option={k}={v}" for k, v in options(tmp_path, **more).items()]


def many(tmp_path: Path, *args: str, case: str = TOPK, n: int = 2, **more: Any) -> Ended:
    """A run on `n` devices."""
    return run(tmp_path / "run", f"--case={case}", "--level=full", "--examples=1", *flags(tmp_path, n=n, **more), *args,
               backend=MANY)


@contextmanager
def bench(tmp_path: Path, **more: Any) -> Iterator[Bench]:
    with bench_of(MANY, options(tmp_path, **more)) as b:
        yield b


def tried(b: Bench, tmp_path: Path, case_id: str = PLAIN, examples: int = 3, **config: Any) -> Record:
    case = next(c for c in cases_at("full", (case_id.partition(".")[0],)) if c.id.startswith(case_id.removesuffix("*")))
    effort = replace(EFFORTS["core"], examples=examples, shrink_s=5.0)
    return run_case(case, Config(b, effort, 0, tmp_path / "kept", MANY, b.launcher.options, **config))


def events(b: Bench, kind: str) -> list[dict[str, Any]]:
    assert b.devices is not None
    return [r for r in b.devices.board.read() if r["kind"] == kind]


def overlaps(tmp_path: Path) -> list[str]:
    return [p.name for p in (tmp_path / "machine").glob("overlap-*")]


def test_groups_and_singles_share_the_devices(tmp_path: Path) -> None:
    done = run(tmp_path / "run", f"--case={TOPK}", f"--case={COMBINE}", "--module=deepep,deepselect", "--level=full",
               "--examples=1", *flags(tmp_path, n=4), "-n", "2", backend="many_cpu_backend:ManyCpu")
    assert done.code == 0, done.text
    devices = {r.op: set() for r in done.run.records.values()}
    for r in done.run.records.values():
        devices[r.op].add(r.device)
    assert devices["deepep.EPBuffer.combine"] == {"0,1,2,3"}
    assert devices["deepselect.topk"] <= {"0", "1", "2", "3"}
    assert not overlaps(tmp_path)


def test_a_slot_keeps_its_device_when_its_worker_is_replaced(tmp_path: Path) -> None:
    done = many(tmp_path, "-n", "1", "--max-worker-restart=4", ends="0:worker")
    by_worker: dict[str, set[str]] = {}
    for r in done.run.records.values():
        by_worker.setdefault(r.worker, set()).add(r.device)
    lost = [r for r in done.run.records.values() if "the worker that ran it was lost" in r.message]
    assert len(lost) == 1
    assert by_worker["gw1"] == {"0"}, done.text
    assert not overlaps(tmp_path)


def test_places_go_to_those_that_come_after() -> None:
    slots, nodes = Slots(), [object() for _ in range(5)]
    assert [slots.take(n) for n in nodes[:3]] == [0, 1, 2]
    slots.free(nodes[1])
    slots.free(nodes[0])
    assert [slots.take(n) for n in nodes[3:]] == [0, 1]


def test_a_worker_a_device_and_a_dead_one_costs_one_case_its_trust(tmp_path: Path) -> None:
    done = many(tmp_path, "-n", "auto", n=3, dies="1")
    assert done.code == 6, done.text
    records = done.run.records.values()
    assert {r.worker for r in records} == {"gw0", "gw1", "gw2"}
    assert {(r.worker, r.device) for r in records if r.worker != "gw1"} <= {("gw0", "0"), ("gw2", "2")}
    assert done.run.info["device"] == ["0", "1", "2"]
    assert not overlaps(tmp_path)
    assert "device busy " in done.text
    assert "% (3 devices)" in done.text
    again = [r for r in records if r.attempt == 2]
    assert len(again) == 1
    # The call may be what killed the device: a kernel that does so now and then must not come out green.
    assert {r.id: r.status for r in records if r.status != "pass"} == {again[0].id: "mistrusted"}
    assert again[0].device in ("0", "2")
    assert "device 1 is quarantined: it did not answer after a failure; recover(0) failed, recover(1) failed, " \
           "recover(2) failed" in again[0].message
    assert [q["device"] for q in done.run.info["quarantined"]] == ["1"]
    assert done.run.info["quarantined"][0]["case"] == again[0].id
    assert f"device 1 QUARANTINED after {again[0].id}" in done.text
    after = [r for r in records if r.started > again[0].finished]
    assert after
    assert all(r.device != "1" for r in after)
    assert not list((tmp_path / "run").glob("devices-*"))


def test_with_no_device_left_the_rest_is_not_run(tmp_path: Path) -> None:
    done = many(tmp_path, n=1, dies="0")
    statuses = [r.status for r in done.run.records.values()]
    assert statuses.count("crash") == 1
    assert statuses.count("not_run") == len(statuses) - 1 > 0
    assert done.code == 1
    crash = next(r for r in done.run.records.values() if r.status == "crash")
    assert "no other device is left to try it on" in crash.message
    rest = next(r for r in done.run.records.values() if r.status == "not_run")
    assert "needs 1 device; this run has 1 (0), of which 1 are quarantined. device 0: it did not answer" in rest.message
    assert "no device was left" in done.text


def test_devices_that_never_were_are_no_verdict_on_the_ops(tmp_path: Path) -> None:
    done = many(tmp_path, unborn="0+1")
    assert {r.status for r in done.run.records.values()} == {"not_run"}
    assert done.code == 6
    assert len(done.run.info["quarantined"]) == 2


def test_a_resumed_run_gives_each_device_another_chance_and_forgets_nothing(tmp_path: Path) -> None:
    first = many(tmp_path, n=1, dies="0")
    assert [q["device"] for q in first.run.info["quarantined"]] == ["0"]
    (tmp_path / "machine" / "dead-0").unlink()
    # As if it had been cut off before its end.
    Board(tmp_path / "run" / "devices-events.jsonl").note("quarantined", "0", why="it burned", case="")
    again = many(tmp_path, "--resume", n=1, dies="0")
    statuses = [r.status for r in again.run.records.values()]
    assert statuses.count("pass") == len(statuses) - 1
    assert [q["why"][:9] for q in again.run.info["quarantined"]] == ["it did no", "it burned"]


def test_a_device_is_recovered_with_rising_force_and_a_lost_one_is_a_crash(tmp_path: Path) -> None:
    with bench(tmp_path, n=2, breaks=1, recovers=1) as b:
        record = tried(b, tmp_path)
        assert (record.status, record.reason, record.attempt) == ("crash", "signal", 1)
        assert "the device is lost" in record.message
        assert not events(b, "quarantined")
        assert {(e["device"], e["level"]) for e in events(b, "recovered")} == {("0", 1)}
        said = (tmp_path / "machine" / "recoveries").read_text().split("\n")
        assert said[:2] == ["0 0", "0 1"]
        assert record.duration_s["recover"] > 0
        # It was brought back before it was given back.
        assert not list((tmp_path / "machine").glob("dead-*"))
        b.launcher.options = options(tmp_path)
        assert tried(b, tmp_path).status == "pass"


def test_a_call_that_breaks_boards_costs_two_of_them(tmp_path: Path) -> None:
    with bench(tmp_path, n=4, breaks=1) as b:
        record = tried(b, tmp_path)
        assert (record.status, record.attempt) == ("crash", 2)
        assert sorted(e["device"] for e in events(b, "quarantined")) == ["0", "1"]
        assert "device 0 is quarantined" in record.message
        assert "device 1 is quarantined" in record.message
        b.launcher.options = options(tmp_path)
        assert tried(b, tmp_path).device == "2"


def test_a_device_on_which_nothing_starts_is_told_from_a_broken_backend(tmp_path: Path) -> None:
    with bench(tmp_path, n=3, stillborn="0") as b:
        record = tried(b, tmp_path)
        assert (record.status, record.device) == ("pass", "1")
        assert "no process starts on it, and one does on device 1" in events(b, "quarantined")[0]["why"]
    with bench(tmp_path, n=5, stillborn="0+1+2+3+4") as b:
        record = tried(b, tmp_path)
        assert record.status == "error"
        assert "planted: nothing starts on device" in record.message
        assert not events(b, "quarantined")


def test_a_process_that_can_not_be_killed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill is taken away; what a driver holds in a call behaves like that."""
    left: list[tuple[int, int]] = []
    with bench(tmp_path, n=2, hold_s=600) as b, monkeypatch.context() as patch:
        b.case_timeout_s = 0.5
        assert b.devices is not None
        real = signal.pidfd_send_signal

        def deaf(fd: int, number: int) -> None:
            left.append((os.dup(fd), number))
            b.launcher.options = options(tmp_path)

        patch.setattr(signal, "pidfd_send_signal", deaf)
        began = time.monotonic()
        record = tried(b, tmp_path)
        for fd, number in left:
            with suppress(ProcessLookupError):
                real(fd, number)
            os.close(fd)
        assert time.monotonic() - began < 30
        assert events(b, "quarantined")[0]["why"] == "a process on it does not die when it is killed"
        assert record.device == "1"


def test_kill_9_of_a_run_leaves_no_lease(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    more = [f"--case={TOPK}", "--level=full", "--examples=1", *flags(tmp_path, n=2, hold_s=600), "-n", "2"]
    proc = start(argv(tmp_path / "run", *more, backend=MANY), mark)
    machine, end = tmp_path / "machine", time.monotonic() + 60
    while len(list(machine.glob("inuse-*"))) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(proc.pid, signal.SIGKILL)
    proc.communicate()
    assert gone_within(mark, 10)
    began = time.monotonic()
    Leases(tmp_path / "leases", "many").take(["0", "1"]).close()
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("workers", ["0", "1"])
def test_two_runs_take_turns_and_the_wait_is_told(tmp_path: Path, workers: str) -> None:
    (tmp_path / "leases").mkdir()
    held = Leases(tmp_path / "leases", "many", holder="a run in /runs/other").take(["0"])
    mark = uuid.uuid4().hex
    more = [f"--case={PLAIN}", "--level=full", "--examples=1", *flags(tmp_path, n=1), "-n", workers]
    proc = start(argv(tmp_path / "run", *more, backend=MANY), mark)
    assert proc.stdout is not None
    try:
        line = next(line for line in proc.stdout if line.startswith("waiting"))
    finally:
        held.close()
    rest, _ = proc.communicate(timeout=60)
    assert f"waiting for device 0, leased by process {os.getpid()} (a run in /runs/other)" in line
    assert proc.returncode == 0, rest


def test_memory_is_looked_at_before_a_case(tmp_path: Path) -> None:
    with bench(tmp_path, memory=64) as b:
        record = tried(b, tmp_path)
        assert record.status == "unsupported"
        assert "MiB; the device has 0.0 MiB in all" in record.message
        assert record.duration_s.get("device", 0) == 0
    with bench(tmp_path, memory=1 << 34) as b:
        assert tried(b, tmp_path).status == "pass"


def test_what_can_not_be_expressed_shifts_no_answer_to_a_later_problem(tmp_path: Path) -> None:
    ran: list[dict[str, Any]] = []
    with bench(tmp_path, odd="no") as b:
        record = tried(b, tmp_path, examples=16, log_problem=ran.append)
    assert record.status == "pass", record.message
    assert record.examples["executed"] == 16
    assert record.examples["unsupported"] > 0
    assert all(r["problem"]["sizes"]["b"] % 2 == 0 for r in ran)


def test_the_kernels_out_of_memory_killer_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "machine"
    (group / "memory.events").write_text("low 0\noom 4\noom_kill 4\n")
    (tmp_path / "own").write_text("0::/machine\n")
    monkeypatch.setattr(oom, "CGROUPS", tmp_path)
    monkeypatch.setattr(oom, "OWN_GROUP", tmp_path / "own")
    with bench(tmp_path, n=2, ends="0:kernel") as b:
        record = tried(b, tmp_path, confirm=False)
        assert record.status == "oom", record.message
        assert "out-of-memory killer" in record.message
    with bench(tmp_path, n=2, ends="1:kernel") as b:
        assert b.devices is not None
        b.devices.slot = 1
        monkeypatch.setattr(oom, "OWN_GROUP", tmp_path / "not there")
        assert tried(b, tmp_path, confirm=False).status == "crash"


@pytest.mark.parametrize(("files", "count"), [
    ({"own": "0::/a/b\n", "a/b/memory.events": "oom 9\noom_kill 3\noom_group_kill 7\n"}, 3),
    ({"own": "0::/a/b\n", "memory.events": "oom_kill 2\n"}, 2),
    ({"own": "4:memory:/x\n0::/\n", "memory/x/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"}, 5),
    ({"own": "4:memory:/x\n"}, 0),
    ({}, 0),
])
def test_the_count_of_kills_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str],
                                     count: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(oom, "CGROUPS", tmp_path)
    monkeypatch.setattr(oom, "OWN_GROUP", tmp_path / "own")
    assert oom.oom_kills() == count


def test_devices_are_chosen_by_name(tmp_path: Path) -> None:
    assert chosen("auto", ("0", "1")) == ("0", "1")
    assert chosen("1,1,0", ("0", "1")) == ("1", "0")
    done = many(tmp_path, "--devices=1,9")
    assert done.code == 4
    assert "--devices=1,9: no device 9; there are 0, 1" in done.text
    done = many(tmp_path, "--devices=1", case=PLAIN)
    assert done.code == 0, done.text
    assert {r.device for r in done.run.records.values()} == {"1"}


def test_the_host_has_no_devices_to_choose(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "--devices=1", backend="cpu")
    assert done.code == 4
    assert "runs on the host and has no devices to choose from" in done.text


def test_no_device_is_inconclusive(tmp_path: Path) -> None:
    done = many(tmp_path, "-n", "auto", n=0)
    assert done.code == 6
    assert "finds no device on this machine" in done.text
    assert "Traceback" not in done.text


def test_the_summary_counts_what_happened() -> None:
    rows = [{"kind": "recovered", "device": "1", "level": 0, "at": 0.0}] * 2 + [
        {"kind": "quarantined", "device": "1", "why": "it burns", "case": "a/b", "at": 0.0}]
    record = Record("a/b", "a", "a", {}, "b", "core", "pass", duration_s={"device": 30.0})
    assert device_lines(rows, ["0", "1"], [record], 2, 60.0) == [
        "device busy 25% (2 devices)", "device 1 did not answer and was recovered 2 times",
        "device 1 QUARANTINED after a/b: it burns"]
    assert device_lines([], None, [record], 2, 30.0) == ["device busy 50% (the host, 2 at a time)"]


def test_events_of_other_workers_are_seen(tmp_path: Path) -> None:
    mine, other = Board(tmp_path / "events"), Board(tmp_path / "events")
    other.note("quarantined", "3", why="it burns", case="")
    assert mine.quarantined() == {"3": "it burns"}
    with (tmp_path / "events").open("a") as f:
        f.write(json.dumps({"kind": "quarantined", "device": "4"}))
    assert mine.quarantined() == {"3": "it burns"}


def test_an_executor_is_asked_and_a_silent_one_is_ended(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        executor = Executor(b.launcher, b.pool, devices=["1"])
        assert executor.ask({"cmd": "alive"}, 5.0) == {"alive": True}
        (tmp_path / "machine" / "dead-1").touch()
        assert executor.ask({"cmd": "alive"}, 5.0) == {"alive": False}
        assert executor.ask({"cmd": "recover", "level": 1}, 5.0) == {"recover": False}
        assert executor.ask({"cmd": "no such thing"}, 5.0) is None
        assert not executor.alive
