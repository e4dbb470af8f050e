"""A case and the devices it has: are they well, what became of them, and what that means for the case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from conformance.engine.devices import ALIVE_TIMEOUT_S, DeviceGone, DevicePool
from conformance.engine.executor import ArenaPool, BackendBroken, Executor, Launcher
from conformance.engine.leases import Lease
from conformance.results import Record

if TYPE_CHECKING:
    from conformance.engine.attempt import Attempts

MOST_LOSSES = 2
"""devices that one case may cost: a call that breaks boards would else break them all"""
MOST_FAILED_DEVICES = 3
"""devices on which no process starts, after which it is the backend that is broken"""
MIB = 1 << 20


@dataclass
class DeviceCare:
    """Watches over the devices that one case has leased."""

    pool: DevicePool
    lease: Lease
    launcher: Launcher
    arenas: ArenaPool
    module: str
    case: str

    def examine(self) -> Executor | None:
        """Ask each device, in a new process on it, whether it answers; recover it where not. Raises DeviceGone.

        Returns that process where it is one that the case can go on with.
        """
        for device in self.lease.devices:
            executor, answer = self._asked(device, {"cmd": "alive"}, ALIVE_TIMEOUT_S)
            if answer is None or not answer.get("alive"):
                self._end(executor)
                self.revive(device)
            elif len(self.lease.devices) == 1:
                return executor
            else:
                self._end(executor)
        return None

    def revive(self, device: str) -> None:
        """Recover a device. Raises DeviceGone where that fails."""
        self.pool.revive(device, self._answer, self.case)

    def works(self) -> None:
        self.pool.works(self.lease.devices)

    def stuck(self, devices: Sequence[str]) -> None:
        """Give up devices that are held by a process which does not die. Raises DeviceGone."""
        for device in devices:
            self.pool.quarantine(device, "a process on it does not die when it is killed", self.case)

    def _answer(self, device: str, request: dict[str, Any], limit_s: float) -> dict[str, Any] | None:
        executor, answer = self._asked(device, request, limit_s)
        self._end(executor)
        return answer

    def _asked(self, device: str, request: dict[str, Any],
               limit_s: float) -> tuple[Executor | None, dict[str, Any] | None]:
        """A new process on one device and what it says; None where none starts or it says nothing."""
        fds = [fd for d, fd in zip(self.lease.devices, self.lease.fds, strict=True) if d == device]
        try:
            executor = Executor(self.launcher, self.arenas, module=self.module, devices=[device], lease_fds=fds)
        except BackendBroken:
            # It is the device that is asked about: what fails here says nothing about the backend.
            self.launcher.broken.clear()
            return None, None
        return executor, executor.ask(request, limit_s)

    def _end(self, executor: Executor | None) -> None:
        if executor is not None:
            executor.kill()
            self.stuck(executor.stuck)


@dataclass
class Losses:
    """What one case cost, and whether it has another try."""

    pool: DevicePool | None
    ranks: int
    gone: list[DeviceGone] = field(default_factory=list)
    """devices that were lost after a call of this case"""

    @property
    def attempts(self) -> int:
        return len(self.gone)

    def again(self, e: DeviceGone, attempts: Attempts | None) -> bool:
        """Whether the case is tried once more, after it has lost a device for good."""
        if attempts is None or not attempts.sent:
            # Nothing of the case had run: it is not at fault. Too few devices are told when they are taken.
            return True
        self.gone.append(e)
        return len(self.gone) < MOST_LOSSES and len(self._healthy()) >= self.ranks

    def elsewhere(self, e: BackendBroken, attempts: Attempts | None) -> bool:
        """Whether a process may start on another device where it did not on this one."""
        if self.pool is None or not e.device or attempts is None:
            return False
        self.pool.avoided[e.device] = str(e)
        usable = [d for d in self._healthy() if d not in self.pool.avoided]
        if len(self.pool.avoided) >= MOST_FAILED_DEVICES or len(usable) < self.ranks:
            return False
        attempts.launcher.broken.clear()
        return True

    def tell(self, record: Record) -> None:
        """A case that may not be tried again: it is the call's crash, unless something worse was told."""
        if record.status == "error":
            record.status, record.phase, record.reason = "crash", "execute", "signal"
            record.message = "the device is lost"
        if len(self.gone) < MOST_LOSSES:
            record.message += ("\nwhether the call or the device is at fault can't be told: "
                               f"no other {'devices are' if self.ranks > 1 else 'device is'} left to try it on")

    def note(self, record: Record) -> None:
        """Say in the record what was lost over it. What holds on another device is no pass: the call may be why."""
        if self.gone and record.status == "pass":
            record.status = "mistrusted"
            record.message = ("it holds here, but a device was lost for good after a call of this case; whether the "
                              "call or the device is at fault can't be told: run it again")
        for e in self.gone:
            record.message = f"{record.message}\n{e}".strip()

    def _healthy(self) -> list[str]:
        return self.pool.healthy() if self.pool is not None else []


def beyond_memory(needed: Sequence[int], memory: Sequence[list[int] | None]) -> str:
    """Why these buffers, bytes a rank, can't ever stand on their devices, or an empty string."""
    for n, known in zip(needed, memory, strict=True):
        if known is not None and n > known[1]:
            return f"its buffers need {n / MIB:.1f} MiB; the device has {known[1] / MIB:.1f} MiB in all"
    return ""


def short_of_memory(needed: Sequence[int], memory: Sequence[list[int] | None]) -> str:
    """What was free as the process started, where that was known; else an empty string."""
    said = [f"{known[0] / MIB:.1f} of {known[1] / MIB:.1f} MiB were free; its buffers need {n / MIB:.1f} MiB"
            for n, known in zip(needed, memory, strict=True) if known is not None]
    return f"; as the process started {said[0]}" if said else ""
