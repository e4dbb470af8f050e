"""A backend on the host as if it had devices: each used by one process at a time, and able to die.

Options: `dir`, a folder that stands for the machine; `n`, how many devices; `dies`, devices that are lost by the first
deepselect call on them; `breaks`, the least number of rows from which a call loses any device; `recovers`, the level
of `recover` that brings one back; `unborn`, devices on which the constructor says that they are lost; `stillborn`,
devices on which the constructor raises; `memory`, bytes of a device; `hold_s`, how long each call takes; `ends`,
`device:what` with what = worker or kernel, which ends the worker of the first call on that device, or the executor
as the kernel's out-of-memory killer would; `odd=no`, it can't express an input of an odd number of rows.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy_backend import NumpyBackend

from conformance.protocol import Backend, Description, DeviceLost, Group, TensorSpec, Unrepresentable


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Devices(Backend):
    """What is to be mixed in. Writes `overlap-<device>` where two processes meet on a device."""

    @classmethod
    def describe(cls, options: Mapping[str, str]) -> Description:
        return replace(super().describe({}), name="many", host=False, ranks=(1, 2, 4, 8))

    @classmethod
    def devices(cls, options: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(map(str, range(int(options.get("n", "2")))))

    def __init__(self, *, device: str, options: Mapping[str, str], group: Group | None) -> None:
        super().__init__(device=device, options={}, group=group)
        self.many, self.folder = dict(options), Path(options["dir"])
        self.lock = os.open(self.folder / f"inuse-{device}", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            (self.folder / f"overlap-{device}").touch()
            raise
        if device in self._listed("stillborn"):
            msg = f"planted: nothing starts on device {device}"
            raise RuntimeError(msg)
        if device in self._listed("unborn"):
            msg = "planted: not on the bus"
            raise DeviceLost(msg)

    def _listed(self, option: str) -> list[str]:
        return self.many.get(option, "").split("+")

    @property
    def dead(self) -> Path:
        return self.folder / f"dead-{self.device}"

    def _first(self, what: str) -> bool:
        try:
            os.close(os.open(self.folder / f"{what}-{self.device}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def memory(self) -> tuple[int, int] | None:
        return (int(self.many["memory"]) // 2, int(self.many["memory"])) if "memory" in self.many else None

    def view(self, buf: Any, offset: int, spec: TensorSpec) -> Any:
        if self.many.get("odd") == "no" and len(spec.shape) == 2 and spec.shape[0] % 2:
            msg = f"planted: no {spec.shape[0]} rows"
            raise Unrepresentable(msg)
        return super().view(buf, offset, spec)

    def alive(self) -> bool:
        return not self.dead.exists()

    def recover(self, level: int) -> bool:
        with (self.folder / "recoveries").open("a") as f:
            f.write(f"{self.device} {level}\n")
        if level < int(self.many.get("recovers", "99")):
            return False
        self.dead.unlink(missing_ok=True)
        return True

    def run(self, op: str, kwargs: dict[str, Any]) -> Any:
        time.sleep(float(self.many.get("hold_s", "0")))
        device, _, what = self.many.get("ends", "").partition(":")
        if device == self.device and self._first("ended"):
            if what == "kernel":
                counter = self.folder / "memory.events"
                counter.write_text(counter.read_text().replace("oom_kill 4", "oom_kill 5"))
                os.kill(os.getpid(), signal.SIGKILL)
            os.kill(parent_of(os.getppid()), signal.SIGKILL)
        lost = self.device in self._listed("dies") and self._first("died")
        if op.startswith("deepselect") and "breaks" in self.many:
            lost |= kwargs["input"].shape[0] >= int(self.many["breaks"])
        if lost:
            self.dead.touch()
        if self.dead.exists():
            msg = "planted: the device fell off the bus"
            raise DeviceLost(msg)
        return super().run(op, kwargs)


class Many(Devices, NumpyBackend):
    """One op, soon started."""
