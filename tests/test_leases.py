"""Leases: one holder a device, whole sets without deadlock, nothing left behind, a word to those that wait."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.engine.devices import Board, DevicePool, TooFewDevices
from conformance.engine.leases import FOLDER_VARIABLE, GivenUp, LeaseError, Leases, lease_folder, order

SEEDS = int(os.environ.get("DEVICES_SEEDS", "4"))
"""100 for a release"""
DEVICES = tuple(map(str, range(8)))
LIMIT_S = 60.0


def forked(body: Callable[[], None]) -> int:
    """A process that runs this and leaves with 0, or 1 where it raises."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        body()
        code = 0
    except BaseException as e:
        sys.stderr.write(f"{type(e).__name__}: {e}\n")
    finally:
        os._exit(code)


def all_well(pids: list[int]) -> bool:
    """Whether every process leaves with 0 in time; none is left."""
    end, left, good = time.monotonic() + LIMIT_S, set(pids), True
    while left and time.monotonic() < end:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                good &= status == 0
        time.sleep(0.005)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return good and not left


def used(folder: Path, devices: list[str], seconds: float) -> None:
    """Use them as a driver that allows one process a device."""
    for d in devices:
        os.close(os.open(folder / f"used-{d}", os.O_CREAT | os.O_EXCL))
    time.sleep(seconds)
    for d in devices:
        (folder / f"used-{d}").unlink()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_eight_workers_on_eight_devices_neither_meet_nor_lock(tmp_path: Path, seed: int) -> None:
    def worker(slot: int) -> None:
        rng = random.Random(f"{seed} {slot}")
        pool = DevicePool(DEVICES, Leases(tmp_path, "many"), Board(), slot)
        for _ in range(12):
            lease = pool.take(rng.choice((1, 1, 1, 2, 4, 8)))
            used(tmp_path, lease.devices, rng.random() * 0.003)
            lease.close()

    assert all_well([forked(lambda s=slot: worker(s)) for slot in range(8)])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_sets_in_any_order_end(tmp_path: Path, seed: int) -> None:
    """Sets that overlap in every way, of runs that know nothing of each other."""
    def worker(slot: int) -> None:
        rng = random.Random(f"{seed} {slot} any")
        leases = Leases(tmp_path, "many")
        for _ in range(12):
            lease = leases.take(rng.sample(DEVICES, rng.choice((1, 2, 3, 5))))
            assert lease.devices == sorted(lease.devices)
            used(tmp_path, lease.devices, rng.random() * 0.003)
            lease.close()

    assert all_well([forked(lambda s=slot: worker(s)) for slot in range(8)])


def test_several_processes_share_a_device_that_allows_it(tmp_path: Path) -> None:
    leases = Leases(tmp_path, "many", per_device=2)
    first, second = leases.take(["0"]), leases.take(["0"])
    with pytest.raises(GivenUp):
        leases.take(["0"], unwanted=lambda: True)
    first.close()
    leases.take(["0"]).close()
    second.close()


def test_kill_9_leaves_no_lease(tmp_path: Path) -> None:
    def hold() -> None:
        Leases(tmp_path, "many").take(["0", "1", "2"])
        (tmp_path / "held").touch()
        time.sleep(600)

    pid = forked(hold)
    while not (tmp_path / "held").exists():
        time.sleep(0.005)
    with pytest.raises(GivenUp):
        Leases(tmp_path, "many").take(["1"], unwanted=lambda: True)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    began = time.monotonic()
    Leases(tmp_path, "many").take(["0", "1", "2"]).close()
    assert time.monotonic() - began < 1.0


def test_a_process_that_outlives_its_worker_keeps_the_device(tmp_path: Path) -> None:
    lease = Leases(tmp_path, "many").take(["0"])
    pid = forked(lambda: time.sleep(600))
    lease.close()
    with pytest.raises(GivenUp):
        Leases(tmp_path, "many").take(["0"], unwanted=lambda: True)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    Leases(tmp_path, "many").take(["0"]).close()


def test_who_waits_is_not_overtaken(tmp_path: Path) -> None:
    """A group gets its devices though their workers take them again at once."""
    def busy(device: str) -> None:
        leases = Leases(tmp_path, "many")
        while not (tmp_path / "stop").exists():
            lease = leases.take([device])
            time.sleep(0.01)
            lease.close()

    pids = [forked(lambda d=d: busy(d)) for d in DEVICES[:4]]
    time.sleep(0.2)
    began = time.monotonic()
    for _ in range(5):
        Leases(tmp_path, "many").take(DEVICES[:4]).close()
    took = time.monotonic() - began
    (tmp_path / "stop").touch()
    assert all_well(pids)
    assert took < 5.0


def test_a_wait_is_told_with_who_and_what_ends_it(tmp_path: Path) -> None:
    lease = Leases(tmp_path, "many", holder="a run in /runs/a").take(["3"])
    told: list[str] = []
    with pytest.raises(GivenUp):
        Leases(tmp_path, "many").take(["3"], told.append, lambda: bool(told))
    lease.close()
    assert told[0].startswith(f"waiting for device 3, leased by process {os.getpid()} (a run in /runs/a) for ")
    assert told[0].endswith("; it is free when that ends")


def test_devices_have_one_order_on_the_machine() -> None:
    assert sorted(["10", "9", "b", "2", "a"], key=order) == ["2", "9", "10", "a", "b"]


def test_a_folder_that_can_not_be_had_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(LeaseError, match=FOLDER_VARIABLE):
        lease_folder()


def test_the_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    there = tmp_path / "elsewhere"
    there.mkdir()
    (tmp_path / f"conformance-leases-{os.getuid()}").symlink_to(there)
    with pytest.raises(LeaseError, match="no folder of this user"):
        lease_folder()


@pytest.mark.parametrize(("slot", "ranks", "want"), [
    (0, 1, ["0"]), (5, 1, ["5"]), (9, 1, ["1"]), (5, 2, ["4", "5"]), (5, 4, ["4", "5", "6", "7"]),
    (3, 8, list(DEVICES)), (7, 3, ["5", "6", "7"]),
])
def test_a_slot_has_its_own_devices(tmp_path: Path, slot: int, ranks: int, want: list[str]) -> None:
    assert DevicePool(DEVICES, Leases(tmp_path, "many"), Board(), slot).choice(ranks) == want


def test_a_quarantined_device_is_passed_over_and_too_few_are_told(tmp_path: Path) -> None:
    board = Board(tmp_path / "events")
    pool = DevicePool(("0", "1", "2", "3"), Leases(tmp_path, "many"), board, 2)
    board.note("quarantined", "2", why="it burns", case="")
    assert pool.choice(1) == ["3"]
    assert pool.choice(2) == ["1", "3"]
    with pytest.raises(TooFewDevices, match=r"needs 4 devices; this run has 4 .* 1 are quarantined. device 2: it b"):
        pool.take(4)


def test_who_waits_for_a_device_that_is_given_up_gets_another(tmp_path: Path) -> None:
    board = Board(tmp_path / "events")
    held = Leases(tmp_path, "many").take(["1"])
    told: list[str] = []

    def hears(sentence: str) -> None:
        told.append(sentence)
        board.note("quarantined", "1", why="it burns", case="")

    pool = DevicePool(("0", "1"), Leases(tmp_path, "many"), board, 1, hears)
    lease = pool.take(1)
    assert lease.devices == ["0"]
    lease.close()
    held.close()
