"""Which process may use which device of this machine: file locks in a folder that all runs share.

A lock ends with the last process that holds it, however that ends; nothing is ever stale. The
executors of a case hold it too: a process in a driver call that can't be killed keeps its device
from the next user for as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOLDER_VARIABLE = "CONFORMANCE_LEASE_DIR"
FIRST_POLL_S, LONGEST_POLL_S = 0.002, 0.05
TELL_AFTER_S = 1.0
"""a wait below that is not worth a word: another case of the same run is about to end"""

LONGEST_SILENCE_S = 30.0


class LeaseError(Exception):
    """The folder of leases can't be used; the message says why and what to do."""


class GivenUp(Exception):
    """What was waited for is no longer wanted."""


def order(device: str) -> tuple[bool, int, str]:
    """The one order in which every process of the machine takes devices, so that no two wait for each other."""
    return (False, int(device), "") if device.isdecimal() else (True, 0, device)


def lease_folder() -> Path:
    """The folder of this user's leases, made where there is none. Raises LeaseError."""
    named = os.environ.get(FOLDER_VARIABLE)
    path = Path(named) if named else Path(tempfile.gettempdir()) / f"conformance-leases-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=bool(named), exist_ok=True)
        found = path.lstat() if not named else path.stat()
        if not stat.S_ISDIR(found.st_mode) or (not named and found.st_uid != os.getuid()):
            msg = f"device leases: {path} is no folder of this user; name another one in {FOLDER_VARIABLE}"
            raise LeaseError(msg)
    except OSError as e:
        msg = f"device leases: {path}: {e.strerror}; name a folder that can be written in {FOLDER_VARIABLE}"
        raise LeaseError(msg) from e
    return path


@dataclass
class Lease:
    """Devices that are ours until `close`, in the order of their ranks, with a locked descriptor each."""

    devices: list[str] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Let go. By closing, never by unlocking: that would take it from an executor that still lives."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []


@dataclass
class Leases:
    """Takes devices of one kind. `per_device`: how many processes may share one."""

    folder: Path
    kind: str
    per_device: int = 1
    holder: str = ""
    """who takes them, for those that wait"""
    waited_s: float = 0.0

    def take(self, devices: Sequence[str], waiting: Callable[[str], None] = lambda sentence: None,
             unwanted: Callable[[], bool] = lambda: False) -> Lease:
        """All of these, taken one after the other in their order. Waits as long as it takes.

        `waiting` hears a sentence when a wait gets long. Raises GivenUp as soon as `unwanted`, LeaseError.
        """
        begun = time.monotonic()
        lease = Lease()
        try:
            for device in sorted(devices, key=order):
                lease.fds.append(self._one(device, waiting, unwanted))
                lease.devices.append(device)
        except BaseException:
            lease.close()
            raise
        finally:
            self.waited_s += time.monotonic() - begun
        return lease

    def _one(self, device: str, waiting: Callable[[str], None], unwanted: Callable[[], bool]) -> int:
        # Who waits holds the turnstile: a worker that gives a device back can't overtake it to take it again.
        turn = self._open(device, "turn")
        try:
            wait = _Wait(lambda: self._sentence(device), waiting, unwanted)
            while not _locked(turn):
                wait.pause()
            while True:
                for i in range(self.per_device):
                    fd = self._open(device, str(i))
                    if _locked(fd):
                        self._sign(fd)
                        return fd
                    os.close(fd)
                wait.pause()
        finally:
            os.close(turn)

    def _path(self, device: str, part: str) -> Path:
        plain = re.sub(r"[^A-Za-z0-9_.+-]", "_", f"{self.kind}-{device}")
        return self.folder / f"{plain}.{part}"

    def _open(self, device: str, part: str) -> int:
        path = self._path(device, part)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            msg = f"device leases: {path}: {e.strerror}; name a folder that can be written in {FOLDER_VARIABLE}"
            raise LeaseError(msg) from e

    def _sign(self, fd: int) -> None:
        text = json.dumps({"pid": os.getpid(), "holder": self.holder, "since": time.time()})
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, text.encode(), 0)

    def _sentence(self, device: str) -> str:
        """Who holds it, and what ends the wait."""
        who = []
        for i in range(self.per_device):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                note = json.loads(self._path(device, str(i)).read_bytes())
                who.append(f"process {note['pid']} ({note['holder']}) for {time.time() - note['since']:.0f} s")
        held = " and ".join(who) or "another process"
        return f"waiting for device {device}, leased by {held}; it is free when that ends"


class _Wait:
    """Pauses that grow, a word when they have grown long, and a way out."""

    def __init__(self, sentence: Callable[[], str], waiting: Callable[[str], None],
                 unwanted: Callable[[], bool]) -> None:
        self.sentence, self.waiting, self.unwanted = sentence, waiting, unwanted
        self.begun = self.told = time.monotonic()
        self.next_s, self.tell_s = FIRST_POLL_S, TELL_AFTER_S

    def pause(self) -> None:
        if self.unwanted():
            raise GivenUp
        now = time.monotonic()
        if now - self.told >= self.tell_s:
            self.told, self.tell_s = now, min(self.tell_s * 2, LONGEST_SILENCE_S)
            self.waiting(self.sentence())
        time.sleep(self.next_s)
        self.next_s = min(self.next_s * 1.5, LONGEST_POLL_S)


def _locked(fd: int) -> bool:
    """Whether the lock is ours now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
