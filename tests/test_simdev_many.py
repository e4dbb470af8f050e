"""Many simulated devices: leases hold on the device's own word, deaths are few, a lost device costs no other case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import simbench
from runs import ROOT
from simbench import CAST, GEMM, SIMDEV, TOPK, attempt, sim_bench

SEEDS = int(os.environ.get("SIMDEV_SEEDS", "2"))
"""how many times eight workers meet on eight devices; 100 for a release"""
WORKERS, ROUNDS, KILLED = 8, 12, 9
RESET_S = 20.0

WORKER = """
import os, random, signal, sys
from pathlib import Path
from simdev.runtime import Device
from conformance.engine.devices import Board, DevicePool
from conformance.engine.leases import Leases
from conformance.engine.wire import keep_to_oneself

state, leases, seed, slot, first, rounds = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
pool = DevicePool(tuple(map(str, range(8))), Leases(leases, "simdev"), Board(), slot)
for i in range(first, rounds):
    choice = random.Random(seed * 1000003 + slot * 1009 + i)
    ranks = choice.choice((1, 1, 2, 4, 8))
    lease = pool.take(ranks)
    assert len(lease.devices) == ranks
    keep_to_oneself(lease.fds)
    # Opening a device that anybody else has gives an error: nobody's word but the device's is trusted.
    held = [Device(state, int(d)) for d in lease.devices]
    blocks = [d.alloc(1 << 20) for d in held]
    if choice.random() < 0.1:
        print(i, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    for d, block in zip(held, blocks):
        assert d.free(block) == 0
        d.call("close")
    lease.close()
"""


@pytest.mark.parametrize("seed", range(SEEDS))
def test_eight_workers_on_eight_devices(tmp_path: Path, seed: int) -> None:
    """Cases of 1, 2, 4 and 8 ranks, some of which die with all they hold: no overlap, no deadlock, none is missed."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "tests"), str(ROOT)))}
    (tmp_path / "leases").mkdir()

    def started(slot: int, first: int) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", WORKER, str(tmp_path / "devices"), str(tmp_path / "leases"), str(seed), str(slot),
                str(first), str(ROUNDS)]
        return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    running = {slot: started(slot, 0) for slot in range(WORKERS)}
    try:
        while running:
            for slot, process in list(running.items()):
                told, _ = process.communicate(timeout=60)
                del running[slot]
                if process.returncode == -KILLED:
                    running[slot] = started(slot, int(told.split()[-1]) + 1)
                else:
                    assert process.returncode == 0, told
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


def test_a_lease_outlives_what_is_opened_under_it(tmp_path: Path) -> None:
    """The kernel closes the files of a killed process from the highest number down: the lease must be the lowest."""
    program = ("import os, sys; from conformance.engine.wire import keep_to_oneself\n"
               "held = [os.open(os.devnull, os.O_RDONLY) for _ in range(9)]\n"
               "for fd in (held[0], held[3], held[7]): os.close(fd)\n"
               "keep_to_oneself([held[2], held[8]])\n"
               "assert os.open(os.devnull, os.O_RDONLY) > held[8]\n"
               "assert not os.get_inheritable(held[2])\n"
               "keep_to_oneself([])\n")
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


@pytest.mark.parametrize(("case", "defect", "argument", "least"), [
    (GEMM, "dies", 2, {"m": 97, "n": 8, "k": 56}), (GEMM, "dies", 3, {"m": 193, "n": 8, "k": 56}),
    (TOPK, "dies", 2, {"b": 1, "topk": 1, "vocab": 769}), (CAST, "dies", 2, {"m": 1, "n": 385}),
    (TOPK, "hang", 2, {"b": 1, "topk": 1, "vocab": 769}),
])
def test_minimal_within_25_deaths(tmp_path: Path, case: str, defect: str, argument: int, least: dict[str, int]) -> None:
    """A fault that takes the device along, a reset of 20 s each time, comes down to its tile in the usual budget."""
    with sim_bench(tmp_path) as bench:
        r = attempt(bench, simbench.cases()[case], tmp_path, shrink_s=60.0, defect=defect, argument=str(argument))
        resets = (simbench.seconds(tmp_path / "clock")) // RESET_S if defect == "dies" else 0
    assert r.status == ("crash" if defect == "dies" else "timeout"), r.message
    assert r.problem is not None
    assert r.problem["sizes"] == least
    assert simbench.chip(tmp_path / "devices" / "device0").deaths <= 25
    assert defect == "hang" or resets == simbench.chip(tmp_path / "devices" / "device0").deaths


def test_a_device_that_stays_lost_costs_itself_alone(tmp_path: Path) -> None:
    """One of two devices dies at its first launch for good: it is given up, and every case has its verdict."""
    env = {**os.environ, "PYTHONPATH": simbench.without_torch(tmp_path / "none"), "PYTHONDONTWRITEBYTECODE": "1",
           "SIMDEV_STATE": str(tmp_path / "devices"), "CONFORMANCE_LEASE_DIR": str(tmp_path),
           "CONFORMANCE_FAKE_CLOCK": str(simbench.fake_clock(tmp_path / "clock"))}
    argv = [sys.executable, "-m", "pytest", "-q", "-n", "2", f"--backend={SIMDEV}", "--level=full", "--examples=2",
            "--module=deepselect", f"--run-dir={tmp_path / 'run'}", "--backend-option=count=2",
            "--backend-option=defect=stays_lost", "--backend-option=on=1",
            "--case=deepselect.topk/values:dtype=fp32,index=int32,order=any,values=yes,*", "cases"]
    done = subprocess.run(argv, cwd=ROOT, env=env, check=False, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=240)
    assert done.returncode == 6, done.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    # It died of a call: the case that made it holds on the other device, but is no pass.
    assert sorted(r["status"] for r in rows) == ["mistrusted"] + ["pass"] * (len(rows) - 1)
    assert {r["device"] for r in rows} == {"0"}
    assert "quarantined" in (tmp_path / "run" / "run.json").read_text()
    assert simbench.chip(tmp_path / "devices" / "device1").resets == 2
