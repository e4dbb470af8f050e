"""The devices of a run: which a case gets, how one is brought back, and when one is given up.

A device that no longer answers after a failure is recovered with rising force; where that fails
it is quarantined: the run goes on on the others. What happened stands in a file of the run
directory, for every worker to see and for the summary to tell.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.engine.leases import GivenUp, Lease, Leases, order

ALIVE_TIMEOUT_S = 5.0
RECOVER_TIMEOUT_S = 300.0
LEVELS = (0, 1, 2)
"""of `Backend.recover`: the context, the device, the board"""
EVENTS_FILE = "devices-events.jsonl"
Ask = Callable[[str, dict[str, Any], float], Any]
"""(device, request, limit in seconds) -> the answer of a new process on that device, or None"""


class DeviceGone(BaseException):
    """A device does not come back and is quarantined. No Exception: a shrink must not take it for the bug."""

    def __init__(self, device: str, why: str) -> None:
        super().__init__(f"device {device} is quarantined: {why}")
        self.device, self.why = device, why


class TooFewDevices(Exception):
    """A case needs more devices than the run has, or has left; the message says so."""


@dataclass
class Board:
    """What happened to devices in this run, shared by its workers: lines of one file, or a list without one."""

    path: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    _size: int = 0

    def note(self, kind: str, device: str, **more: Any) -> None:
        row = {"kind": kind, "device": device, "at": time.time(), **more}
        if self.path is None:
            self.rows.append(row)
            return
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(fd, (json.dumps(row) + "\n").encode())
        finally:
            os.close(fd)

    def read(self) -> list[dict[str, Any]]:
        """Every event so far."""
        if self.path is not None and self.path.exists() and self.path.stat().st_size != self._size:
            data = self.path.read_bytes()
            self._size = len(data)
            self.rows = [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
        return self.rows

    def quarantined(self) -> dict[str, str]:
        """Why, by device."""
        return {r["device"]: r["why"] for r in self.read() if r["kind"] == "quarantined"}


@dataclass
class DevicePool:
    """The devices of a run as one worker sees them. `slot`: the worker's place, which outlives its process."""

    devices: tuple[str, ...]
    leases: Leases
    board: Board
    slot: int = 0
    waiting: Callable[[str], None] = lambda sentence: None
    """hears what is waited for, and an empty string when it is had"""
    avoided: dict[str, str] = field(default_factory=dict)
    """devices on which a process could not be started here, and why: they or the backend may be at fault"""

    def healthy(self) -> list[str]:
        gone = self.board.quarantined()
        return [d for d in sorted(self.devices, key=order) if d not in gone]

    def choice(self, ranks: int) -> list[str]:
        """The devices for a case: the slot's own, or the aligned block that it stands in. Raises TooFewDevices."""
        healthy = self.healthy()
        if len(healthy) < ranks:
            raise TooFewDevices(self._too_few(ranks, len(healthy)))
        # Where all were avoided, none is: then it is the backend's fault, which the next start tells.
        usable = [d for d in healthy if d not in self.avoided]
        usable = usable if len(usable) >= ranks else healthy
        all_devices = sorted(self.devices, key=order)
        own = all_devices[self.slot % len(all_devices)]
        at = usable.index(own) if own in usable else self.slot % len(usable)
        start = min(at // ranks * ranks, len(usable) - ranks)
        return usable[start : start + ranks]

    def _too_few(self, ranks: int, left: int) -> str:
        has = f"this run has {len(self.devices)} ({', '.join(self.devices)})"
        gone = "; ".join(f"device {d}: {why}" for d, why in self.board.quarantined().items())
        lost = f", of which {len(self.devices) - left} are quarantined. {gone}" if gone else ""
        return f"needs {ranks} device{'s' if ranks > 1 else ''}; {has}{lost}"

    def take(self, ranks: int) -> Lease:
        """Wait for the devices of a case. Raises TooFewDevices, LeaseError."""
        while True:
            chosen = self.choice(ranks)
            try:
                lease = self.leases.take(chosen, self.waiting, lambda c=chosen: self._gone(c))
            except GivenUp:
                continue
            if not self._gone(chosen):
                self.waiting("")
                return lease
            lease.close()

    def _gone(self, devices: Sequence[str]) -> bool:
        gone = self.board.quarantined()
        return any(d in gone for d in devices)

    def works(self, devices: Sequence[str]) -> None:
        """A process runs on these: so those where none could be started are at fault themselves."""
        for device in devices:
            self.avoided.pop(device, None)
        for device, why in self.avoided.items():
            if device not in self.board.quarantined():
                self.board.note("quarantined", device, why=f"no process starts on it, and one does on device "
                                                           f"{devices[0]}: {why}"[:600], case="")
        self.avoided.clear()

    def revive(self, device: str, ask: Ask, case: str) -> None:
        """Bring a device back that did not answer. Raises DeviceGone when all levels of recovery fail."""
        tried = []
        for level in LEVELS:
            said = ask(device, {"cmd": "recover", "level": level}, RECOVER_TIMEOUT_S)
            if said is None or not said.get("recover"):
                tried.append(f"recover({level}) " + ("gave no answer" if said is None else said.get("why") or "failed"))
                continue
            answer = ask(device, {"cmd": "alive"}, ALIVE_TIMEOUT_S)
            if answer is not None and answer.get("alive"):
                self.board.note("recovered", device, level=level, case=case)
                return
            tried.append(f"after recover({level}) it did not answer")
        self.quarantine(device, f"it did not answer after a failure; {', '.join(tried)}", case)

    def quarantine(self, device: str, why: str, case: str) -> None:
        """Give a device up. Raises DeviceGone."""
        self.board.note("quarantined", device, why=why, case=case)
        raise DeviceGone(device, why)
