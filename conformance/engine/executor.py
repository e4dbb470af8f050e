"""The worker's side of the processes that touch a device.

A Launcher starts executors, by fork from a zygote or by spawn; an Executor is one
process, or one process a rank, with an arena each. Whatever happens to a process is
told as an outcome, never raised.
"""

from __future__ import annotations

import contextlib
import os
import select
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

from conformance.engine.serve import PHASES
from conformance.engine.wire import Arena, Closed, TimedOut, recv, send

ROOT = Path(__file__).resolve().parents[2]
KILL_WAIT_S = 2.0
MALLOC_DEBUG = {"LD_PRELOAD": "libc_malloc_debug.so.0",
                "GLIBC_TUNABLES": "glibc.malloc.check=3:glibc.malloc.perturb=165"}
"""Environment under which one byte outside a block that a callee allocated ends the process."""


class BackendBroken(Exception):
    """A backend can't be imported or constructed."""


@dataclass
class Death:
    """How a process ended: a wait status, its last phase, and the tail of what it printed."""

    status: int | None
    phase: str
    step: int
    stderr: str
    rank: int = 0

    @property
    def signal(self) -> int:
        return os.WTERMSIG(self.status) if self.status is not None and os.WIFSIGNALED(self.status) else 0

    def sentence(self) -> str:
        if self.status is None:
            how = "ended in an unknown way"
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


class Launcher:
    """Starts executor processes for one backend."""

    def __init__(self, backend: str, *, device: str, options: Mapping[str, str], fork: bool, debug_malloc: bool = False,
                 inject: str = "", start_timeout_s: float = 120.0) -> None:
        self.backend, self.device, self.options = backend, device, dict(options)
        self.can_fork, self.inject, self.start_timeout_s = fork, inject, start_timeout_s
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        if debug_malloc:
            self.env |= MALLOC_DEBUG
        self.zygote: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self.exits: dict[int, int] = {}
        self.starts = 0

    def _zygote(self) -> socket.socket:
        if self.zygote is None or self.zygote[0].poll() is not None:
            ours, theirs = socket.socketpair()
            argv = [sys.executable, "-m", "conformance.engine.zygote", str(theirs.fileno()), self.backend,
                    str(os.getpid())]
            proc = subprocess.Popen(argv, cwd=ROOT, env=self.env, stdin=subprocess.DEVNULL,
                                    pass_fds=[theirs.fileno()], start_new_session=True)
            theirs.close()
            try:
                hello, _ = recv(ours, self.start_timeout_s)
            except (Closed, TimedOut) as e:
                proc.kill()
                msg = f"backend {self.backend}: the process that imports it ended or hung ({type(e).__name__})"
                raise BackendBroken(msg) from e
            if "error" in hello:
                msg = f"backend {self.backend} can't be imported: {hello['error']}"
                raise BackendBroken(msg)
            self.zygote = proc, ours
        return self.zygote[1]

    def launch(self, fds: tuple[int, int, int], spec: Mapping[str, Any]) -> tuple[int, Any]:
        """(pid, Popen or None) of a new executor with these descriptors: socket, arena, stderr."""
        self.starts += 1
        if not self.can_fork:
            argv = [sys.executable, "-m", "conformance.engine.spawned", str(fds[0]), str(fds[1]), self.backend,
                    str(os.getpid())]
            proc = subprocess.Popen(argv, cwd=ROOT, env=self.env, stdin=subprocess.PIPE, pass_fds=fds[:2],
                                    stdout=fds[2], stderr=fds[2], start_new_session=True)
            assert proc.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                import json

                proc.stdin.write(json.dumps(spec).encode())
                proc.stdin.close()
            return proc.pid, proc
        sock = self._zygote()
        send(sock, dict(spec), fds)
        while True:
            message, _ = recv(sock, self.start_timeout_s)
            if "pid" in message:
                return message["pid"], None
            self.exits[message["exit"]] = message["status"]

    def reap(self, pid: int, proc: Any, timeout_s: float) -> int | None:
        """The wait status of a process that has ended, or None if it has not within the limit."""
        if proc is not None:
            try:
                code = proc.wait(timeout_s)
            except subprocess.TimeoutExpired:
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
            self.zygote[0].kill()
            self.zygote[0].wait()
            self.zygote = None


@dataclass
class _Rank:
    pid: int
    proc: Any
    sock: socket.socket
    stderr_fd: int
    arena: Arena


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
                 module: str = "") -> None:
        self.module = module
        self.launcher, self.size, self.attempt = launcher, ranks, launcher.starts
        self.alive = True
        self.runs = 0
        self.folder = tempfile.mkdtemp(prefix="ranks-") if ranks > 1 else None
        self.ranks = [self._start(i, a, call_timeout_s) for i, a in enumerate(pool.take(ranks))]
        for rank in self.ranks:
            self._hello(rank)

    def _start(self, index: int, arena: Arena, timeout_s: float) -> _Rank:
        ours, theirs = socket.socketpair()
        stderr_fd = os.memfd_create("stderr")
        spec: dict[str, Any] = {"device": self.launcher.device, "options": self.launcher.options,
                                "inject": self.launcher.inject, "group": None, "module": self.module}
        if self.size > 1:
            spec["group"] = {"rank": index, "size": self.size, "local_rank": index, "node": 0,
                             "rendezvous": f"{self.folder}/meet", "attempt": self.attempt, "timeout_s": timeout_s}
        arena.view[0] = arena.view[1] = 0
        pid, proc = self.launcher.launch((theirs.fileno(), arena.fd, stderr_fd), spec)
        theirs.close()
        return _Rank(pid, proc, ours, stderr_fd, arena)

    def _hello(self, rank: _Rank) -> None:
        try:
            recv(rank.sock, self.launcher.start_timeout_s)
        except (Closed, TimedOut) as e:
            tail = self._stderr(rank)
            how = "hung" if isinstance(e, TimedOut) else "ended"
            self.kill()
            msg = f"backend {self.launcher.backend}: its constructor {how}.\n{tail}"
            raise BackendBroken(msg) from e

    @property
    def arenas(self) -> list[Arena]:
        return [r.arena for r in self.ranks]

    def send(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Hand each rank its request, without waiting for answers."""
        for rank, request in zip(self.ranks, requests, strict=True):
            with contextlib.suppress(Closed):
                send(rank.sock, request)

    def collect(self, timeout_s: float, compile_timeout_s: float = 0.0) -> Outcome:
        """The answers of one run. The first rank that dies or is late ends the whole group.

        Compiling has a limit of its own: it does not count against the call's.
        """
        begun = time.monotonic()
        end = begun + timeout_s
        answers: list[dict[str, Any] | None] = [None] * self.size
        waiting = {r.sock: i for i, r in enumerate(self.ranks)}
        while waiting:
            ready = select.select(list(waiting), [], [], max(end - time.monotonic(), 0))[0]
            if not ready and any(self.phase(i) == "compile" for i in waiting.values()):
                timeout_s = compile_timeout_s + timeout_s
                end, compile_timeout_s = begun + timeout_s, 0.0
                ready = select.select(list(waiting), [], [], max(end - time.monotonic(), 0))[0]
            if not ready:
                where = ", ".join(self._where(i) for i in waiting.values())
                self.kill()
                return Outcome(answers, timed_out=f"no answer within {timeout_s:.3g} s ({where})")
            for sock in ready:
                index = waiting[sock]
                try:
                    answers[index], _ = recv(sock, KILL_WAIT_S + max(end - time.monotonic(), 0))
                except (Closed, TimedOut):
                    death = self._death(index)
                    self.kill()
                    return Outcome(answers, death)
                del waiting[sock]
                if self.size > 1 and not answers[index].get("steps"):
                    # A rank that failed leaves its peers waiting for the whole transport timeout.
                    self.kill()
                    return Outcome(answers)
        self.runs += 1
        return Outcome(answers, run_s=max(a["run_s"] for a in answers if a))

    def _where(self, index: int) -> str:
        arena = self.ranks[index].arena
        phase = PHASES[min(arena.view[0], len(PHASES) - 1)]
        name = f"rank {index} in " if self.size > 1 else "in "
        return f"{name}phase {phase}" + (f", step {arena.view[1]}" if arena.view[1] else "")

    def phase(self, index: int = 0) -> str:
        return PHASES[min(self.ranks[index].arena.view[0], len(PHASES) - 1)]

    def _death(self, index: int) -> Death:
        rank = self.ranks[index]
        status = self.launcher.reap(rank.pid, rank.proc, KILL_WAIT_S)
        return Death(status, self.phase(index), rank.arena.view[1], self._stderr(rank), index)

    @staticmethod
    def _stderr(rank: _Rank, nbytes: int = 4000) -> str:
        size = os.fstat(rank.stderr_fd).st_size
        return os.pread(rank.stderr_fd, nbytes, max(size - nbytes, 0)).decode(errors="replace").strip()

    def kill(self) -> None:
        """End every process of this executor and free what it held."""
        if not self.alive:
            return
        self.alive = False
        for rank in self.ranks if hasattr(self, "ranks") else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
        for rank in self.ranks if hasattr(self, "ranks") else ():
            rank.sock.close()
            self.launcher.reap(rank.pid, rank.proc, KILL_WAIT_S)
            os.close(rank.stderr_fd)
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    close = kill
