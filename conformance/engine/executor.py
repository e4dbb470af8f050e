"""The worker's side of the processes that touch a device.

A Launcher starts executors, by fork from a zygote or by spawn; an Executor is one
process, or one process a rank, with an arena each. Whatever happens to a process is
told as an outcome, never raised.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.engine import clock
from conformance.engine.oom import oom_kills
from conformance.engine.serve import PHASES
from conformance.engine.wire import Arena, Closed, TimedOut, readable, recv, send

ROOT = Path(__file__).resolve().parents[2]
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""1 in every executor: with a BLAS pool in each process a run takes six times as long"""
KILL_WAIT_S = 2.0
GRACE_S = 0.2
"""how long the peers of a rank that failed are heard"""
LOOK_EVERY_S = 0.5
MOST_FAILED_STARTS = 2
"""in a row, after which a backend is not tried again: a constructor that hangs would cost its limit every case"""
MOST_PRINTED_BYTES = 16 << 20
DEBUG_FILL = 0x5A
"""what memory holds under MALLOC_DEBUG, whatever `poison_pool` asks for: the complement of its `perturb`"""
MALLOC_DEBUG = {"LD_PRELOAD": "libc_malloc_debug.so.0",
                "GLIBC_TUNABLES": "glibc.malloc.check=3:glibc.malloc.perturb=" + str(DEBUG_FILL ^ 0xFF)}
"""Environment under which one byte outside a block that a callee allocated ends the process."""


class BackendBroken(Exception):
    """A backend can't be imported or constructed. `device`: on which one, where it came to that."""

    def __init__(self, message: str, device: str = "") -> None:
        super().__init__(message)
        self.device = device


class LostAtStart(BackendBroken):
    """The constructor says that its device is lost."""


@dataclass
class Death:
    """How a process ended: a wait status, its last phase, and the tail of what it printed."""

    status: int | None
    phase: str
    step: int
    stderr: str
    rank: int = 0
    oom_killed: bool = False
    """meanwhile the kernel's out-of-memory killer ended a process of this control group"""
    cut: bool = False
    """it lived on, but its connection was closed or carried something that is no message"""

    @property
    def signal(self) -> int:
        return os.WTERMSIG(self.status) if self.status is not None and os.WIFSIGNALED(self.status) else 0

    @property
    def from_outside(self) -> bool:
        """SIGKILL, or a zygote that is gone: the host or a person may have done it, and not the call."""
        return not self.cut and (self.status is None or self.signal == signal.SIGKILL)

    def sentence(self) -> str:
        if self.cut:
            how = "cut its connection to the suite"
        elif self.status is None:
            how = "ended together with the one that started it"
        elif self.signal:
            how = f"was killed by {signal.Signals(self.signal).name}"
        else:
            how = f"left with exit code {os.WEXITSTATUS(self.status)}"
        return f"the process {how} in phase {self.phase}"


@dataclass
class Outcome:
    """What one run gave, per rank: answers where there are any, else how it ended."""

    answers: list[dict[str, Any] | None]
    death: Death | None = None
    timed_out: str = ""
    run_s: float = 0.0
    first: int = 0
    """of the ranks that failed, the one that said so first: its peers may fail because of it"""


class Launcher:
    """Starts executor processes for one backend."""

    def __init__(self, backend: str, *, device: str, options: Mapping[str, str], fork: bool, debug_malloc: bool = False,
                 inject: str = "", start_timeout_s: float = 120.0) -> None:
        self.backend, self.device, self.options = backend, device, dict(options)
        self.can_fork, self.inject, self.start_timeout_s = fork, inject, start_timeout_s
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        self.env |= dict.fromkeys(THREAD_VARIABLES, "1")
        if debug_malloc:
            self.env |= MALLOC_DEBUG
        self.zygote: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self.exits: dict[int, int] = {}
        self.starts = 0
        self.broken: list[str] = []
        """why the last starts failed, one after the other"""

    def _zygote(self) -> socket.socket:
        if self.zygote is not None and self.zygote[0].poll() is not None:
            self.close()
        if self.zygote is None:
            ours, theirs = socket.socketpair()
            printed = os.memfd_create("zygote")
            argv = [sys.executable, "-m", "conformance.engine.zygote", str(theirs.fileno()), self.backend,
                    str(os.getpid())]
            proc = subprocess.Popen(argv, cwd=ROOT, env=self.env, stdin=subprocess.DEVNULL,
                                    stdout=printed, stderr=printed, pass_fds=[theirs.fileno()], start_new_session=True)
            theirs.close()
            wrong = ""
            try:
                hello, _ = recv(ours, self.start_timeout_s)
                if "error" in hello:
                    wrong = f"can't be imported: {hello['error']}"
            except (Closed, TimedOut) as e:
                how = "hung" if isinstance(e, TimedOut) else "ended"
                wrong = f"can't be imported: the process that does it {how}.\n{_tail(printed)}"
            finally:
                os.close(printed)
            if wrong:
                end_group(proc)
                ours.close()
                msg = f"backend {self.backend} {wrong}"
                raise BackendBroken(msg)
            self.zygote = proc, ours
        return self.zygote[1]

    def launch(self, fds: tuple[int, ...], spec: Mapping[str, Any]) -> tuple[int, Any]:
        """(pid, Popen or None) of a new executor with these descriptors: socket, arena, stderr, and the lease's."""
        self.starts += 1
        if len(self.broken) >= MOST_FAILED_STARTS:
            raise BackendBroken(self.broken[-1])
        if not self.can_fork:
            argv = [sys.executable, "-m", "conformance.engine.spawned", str(fds[0]), str(fds[1]), self.backend,
                    str(os.getpid())]
            proc = subprocess.Popen(argv, cwd=ROOT, env=self.env, stdin=subprocess.PIPE,
                                    pass_fds=(*fds[:2], *fds[3:]),
                                    stdout=fds[2], stderr=fds[2], start_new_session=True)
            assert proc.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                import json

                proc.stdin.write(json.dumps({**spec, "lease_fds": fds[3:]}).encode())
                proc.stdin.close()
            return proc.pid, proc
        for _ in range(2):
            try:
                return self._forked(fds, spec), None
            except (Closed, TimedOut) as e:
                # Somebody killed the zygote, or a module's import did; a new one has one try.
                self.close()
                how = "hung" if isinstance(e, TimedOut) else "ended"
        msg = f"backend {self.backend}: the process that forks executors {how} as it loaded {spec.get('module')!r}"
        raise BackendBroken(msg)

    def _forked(self, fds: tuple[int, ...], spec: Mapping[str, Any]) -> int:
        sock = self._zygote()
        send(sock, dict(spec), fds)
        while True:
            message, _ = recv(sock, self.start_timeout_s)
            if "pid" in message:
                return message["pid"]
            self.exits[message["exit"]] = message["status"]

    def reap(self, pid: int, proc: Any, timeout_s: float) -> int | None:
        """The wait status of a process that has ended, or None if it has not within the limit."""
        if proc is not None:
            if proc.returncode is None and not ended(pid, timeout_s):
                return None
            # As long as it is not waited for, the number of its group can't be another's.
            end_group(proc)
            code = proc.returncode
            if code is None:
                return None
            return code << 8 if code >= 0 else -code
        end = time.monotonic() + timeout_s
        while pid not in self.exits and self.zygote is not None:
            try:
                message, _ = recv(self.zygote[1], max(end - time.monotonic(), 0.001))
            except (Closed, TimedOut):
                return None
            self.exits[message["exit"]] = message["status"]
        return self.exits.pop(pid, None)

    def close(self) -> None:
        if self.zygote is not None:
            self.zygote[1].close()
            end_group(self.zygote[0])
            self.zygote = None
        self.exits.clear()


def end_group(proc: subprocess.Popen[bytes]) -> bool:
    """Kill a process that leads a group of its own, and all of the group. Whether it is gone.

    What is stuck in a driver does not die; it is not waited for.
    """
    if proc.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(proc.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            proc.wait(KILL_WAIT_S)
    return proc.returncode is not None


def _checked(answer: Any) -> dict[str, Any]:
    """An answer to a run. Raises Closed for a message that is none."""
    if not isinstance(answer, dict) or "run_s" not in answer:
        msg = "something else wrote into the stream"
        raise Closed(msg)
    return answer


def ended(pid: int, timeout_s: float) -> bool:
    """Whether a child that nobody has waited for ends within the limit."""
    fd = os.pidfd_open(pid)
    try:
        return bool(readable([fd], timeout_s))
    finally:
        os.close(fd)


def _tail(fd: int, nbytes: int = 4000) -> str:
    """The last of what was printed into a memfd."""
    size = os.fstat(fd).st_size
    return os.pread(fd, nbytes, max(size - nbytes, 0)).decode(errors="replace").strip("\0 \n")


@dataclass
class _Rank:
    pid: int
    proc: Any
    sock: socket.socket
    stderr_fd: int
    arena: Arena
    pid_fd: int | None
    """names this process and no later one of the same number; None where it was gone at once"""
    device: str = ""
    memory: list[int] | None = None
    """[free, total] bytes of the device as it started"""
    ended: bool = False


@dataclass
class ArenaPool:
    """Arenas outlive executors: their pages are touched once a worker, not once a case."""

    arenas: list[Arena] = field(default_factory=list)

    def take(self, n: int) -> list[Arena]:
        while len(self.arenas) < n:
            self.arenas.append(Arena())
        return self.arenas[:n]


class Executor:
    """One process, or a group of ranks, that runs calls until it dies or is closed."""

    def __init__(self, launcher: Launcher, pool: ArenaPool, ranks: int = 1, call_timeout_s: float = 20.0,
                 module: str = "", devices: Sequence[str] = (), lease_fds: Sequence[int] = ()) -> None:
        """`devices`: one a rank, else the launcher's; each process holds the lease of its own."""
        self.module = module
        self.devices = list(devices) or [launcher.device] * ranks
        self.lease_fds = list(lease_fds)
        self.oom_kills = oom_kills()
        self.launcher, self.size, self.attempt = launcher, ranks, launcher.starts
        self.alive = True
        self.stuck: list[str] = []
        """devices whose process did not die when it was killed: it is left behind, and holds its device"""
        self.runs = 0
        self.calls: list[str] = []
        """what the run under way calls, in order"""
        self.folder = tempfile.mkdtemp(prefix="ranks-") if ranks > 1 else None
        self.ranks: list[_Rank] = []
        try:
            for i, a in enumerate(pool.take(ranks)):
                self.ranks.append(self._start(i, a, call_timeout_s))
            for rank in self.ranks:
                self._hello(rank)
        except LostAtStart:
            self.kill()
            raise
        except BackendBroken as e:
            self.kill()
            if len(launcher.broken) < MOST_FAILED_STARTS:
                launcher.broken.append(str(e))
            raise
        launcher.broken.clear()

    def _start(self, index: int, arena: Arena, timeout_s: float) -> _Rank:
        ours, theirs = socket.socketpair()
        stderr_fd = os.memfd_create("stderr")
        spec: dict[str, Any] = {"device": self.devices[index], "options": self.launcher.options,
                                "inject": self.launcher.inject, "group": None, "module": self.module}
        if self.size > 1:
            spec["group"] = {"rank": index, "size": self.size, "local_rank": index, "node": 0,
                             "rendezvous": f"{self.folder}/meet", "attempt": self.attempt, "timeout_s": timeout_s}
        arena.view[0] = arena.view[1] = 0
        try:
            pid, proc = self.launcher.launch(
                (theirs.fileno(), arena.fd, stderr_fd, *self.lease_fds[index : index + 1]), spec)
        except BackendBroken:
            ours.close()
            os.close(stderr_fd)
            raise
        finally:
            theirs.close()
        pid_fd = None
        with contextlib.suppress(ProcessLookupError):
            pid_fd = os.pidfd_open(pid)
        return _Rank(pid, proc, ours, stderr_fd, arena, pid_fd, self.devices[index])

    def _hello(self, rank: _Rank) -> None:
        try:
            hello, _ = recv(rank.sock, self.launcher.start_timeout_s)
        except (Closed, TimedOut) as e:
            tail = _tail(rank.stderr_fd)
            how = "hung" if isinstance(e, TimedOut) else "ended"
            msg = f"backend {self.launcher.backend}: its constructor {how}.\n{tail}"
            raise BackendBroken(msg, rank.device) from e
        if "lost" in hello:
            msg = f"backend {self.launcher.backend}: its constructor says that device {rank.device} is lost: "
            raise LostAtStart(msg + str(hello["lost"]), rank.device)
        rank.memory = hello.get("memory")

    @property
    def arenas(self) -> list[Arena]:
        return [r.arena for r in self.ranks]

    def send(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Hand each rank its request, without waiting for answers."""
        self.calls = [step["op"] for step in requests[0].get("steps", ())]
        for rank, request in zip(self.ranks, requests, strict=True):
            with contextlib.suppress(Closed):
                send(rank.sock, request)

    @property
    def memory(self) -> list[list[int] | None]:
        """[free, total] bytes of each rank's device as it started, None where unknown."""
        return [r.memory for r in self.ranks]

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """The first rank's answer to a question that is no run. None where there is none in time; then it is gone."""
        rank = self.ranks[0]
        # What recovery takes is the device's own time; whether it answers at all is asked in real time.
        now = clock.monotonic if request["cmd"] == "recover" else time.monotonic
        end = now() + timeout_s
        with contextlib.suppress(Closed, TimedOut):
            send(rank.sock, request)
            while (left := end - now()) > 0:
                if self._ready({0}, min(left, LOOK_EVERY_S)):
                    answer = recv(rank.sock, KILL_WAIT_S)[0]
                    if isinstance(answer, dict):
                        return answer
                    break
        self.kill()
        return None

    def collect(self, timeout_s: float, compile_timeout_s: float = 0.0) -> Outcome:
        """The answers of one run. The first rank that dies or is late ends the whole group.

        Compiling has a limit of its own: it does not count against the call's.
        """
        begun = clock.monotonic()
        end = begun + timeout_s
        answers: list[dict[str, Any] | None] = [None] * self.size
        waiting = set(range(self.size))
        while waiting:
            looked = clock.monotonic()
            ready = self._ready(waiting, min(max(end - looked, 0), LOOK_EVERY_S))
            now = clock.monotonic()
            if not ready:
                self._forget_printed()
                if compile_timeout_s > 0 and any(self.phase(i) == "compile" for i in waiting):
                    compile_timeout_s -= now - looked
                    end += now - looked
                elif now >= end:
                    where = ", ".join(self._where(i) for i in sorted(waiting))
                    self.kill()
                    return Outcome(answers, timed_out=f"no answer within {now - begun:.3g} s ({where})")
            for index in ready:
                try:
                    answers[index] = _checked(recv(self.ranks[index].sock, KILL_WAIT_S)[0])
                except (Closed, TimedOut):
                    death = self._death(index)
                    self.kill()
                    return Outcome(answers, death)
                waiting.discard(index)
                if self.size > 1 and not answers[index].get("steps"):
                    # A rank that failed leaves its peers waiting for the whole transport timeout.
                    death = self._first_death(waiting, answers)
                    self.kill()
                    return Outcome(answers, death, first=index)
        self.runs += 1
        return Outcome(answers, run_s=max(a["run_s"] for a in answers if a))

    def _first_death(self, waiting: set[int], answers: list[dict[str, Any] | None]) -> Death | None:
        """The first of the others that dies, or None: a rank may fail only because a peer did."""
        end = time.monotonic() + GRACE_S
        while waiting and time.monotonic() < end:
            for index in self._ready(waiting, max(end - time.monotonic(), 0)):
                try:
                    answers[index] = _checked(recv(self.ranks[index].sock, KILL_WAIT_S)[0])
                except (Closed, TimedOut):
                    return self._death(index)
                waiting.discard(index)
        return None

    def _ready(self, waiting: set[int], timeout_s: float) -> list[int]:
        """The ranks that have answered or ended. What a rank forked may hold its socket open after its end."""
        looked_at = {fd: i for i in waiting for fd in (self.ranks[i].sock, self.ranks[i].pid_fd) if fd is not None}
        return sorted({looked_at[fd] for fd in readable(looked_at, timeout_s)})

    def _where(self, index: int) -> str:
        arena = self.ranks[index].arena
        phase = PHASES[min(arena.view[0], len(PHASES) - 1)]
        name = f"rank {index} in " if self.size > 1 else "in "
        step = arena.view[1]
        said = 1 < len(self.calls) > step and phase not in ("compare", "teardown")
        return f"{name}phase {phase}" + (f" of {self.calls[step]}" if said else "")

    def phase(self, index: int = 0) -> str:
        return PHASES[min(self.ranks[index].arena.view[0], len(PHASES) - 1)]

    def _death(self, index: int) -> Death:
        rank, phase = self.ranks[index], self.phase(index)
        # A process that ends closes its socket a moment before it is gone; one that lives on has cut the connection.
        cut = rank.pid_fd is not None and not readable([rank.pid_fd], KILL_WAIT_S / 4)
        if cut:
            signal.pidfd_send_signal(rank.pid_fd, signal.SIGKILL)
        status = self.launcher.reap(rank.pid, rank.proc, KILL_WAIT_S)
        rank.ended = True
        killed = status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        by_kernel = killed and oom_kills() > self.oom_kills
        return Death(status, phase, rank.arena.view[1], _tail(rank.stderr_fd), index, by_kernel, cut)

    def _forget_printed(self) -> None:
        """Give back what was printed, where it is much: it is memory."""
        for rank in self.ranks:
            size = os.fstat(rank.stderr_fd).st_blocks * 512
            if size > MOST_PRINTED_BYTES:
                # The writer goes on at its old place, behind a hole that takes no memory.
                os.ftruncate(rank.stderr_fd, 0)

    def kill(self) -> None:
        """End every process of this executor and free what it held."""
        if not self.alive:
            return
        self.alive = False
        for rank in self.ranks:
            if rank.proc is not None:
                end_group(rank.proc)
            elif rank.pid_fd is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank.pid_fd, signal.SIGKILL)
        for rank in self.ranks:
            rank.sock.close()
            if not rank.ended:
                self.launcher.reap(rank.pid, rank.proc, KILL_WAIT_S)
            if rank.pid_fd is not None and not readable([rank.pid_fd], 0):
                self.stuck.append(rank.device)
            os.close(rank.stderr_fd)
            if rank.pid_fd is not None:
                os.close(rank.pid_fd)
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    close = kill
