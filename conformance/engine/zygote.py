"""A single-threaded process that has imported a backend and touched no device: it forks executors.

Started as `python -m conformance.engine.zygote FD NAME`. Forking takes milliseconds
where starting anew would import a framework each time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from typing import Any

from conformance.backend_class import load_backend_class
from conformance.engine.serve import start
from conformance.engine.wire import (
    Closed,
    adopt_orphans,
    die_with_parent,
    keep_to_oneself,
    readable,
    recv,
    said,
    send,
)

FATAL_SIGNALS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT")


def reset_signals() -> None:
    """Undo handlers that imports installed: symbolising a stack costs nearly a second a death."""
    for name in FATAL_SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    try:
        backend_class = load_backend_class(sys.argv[2])
    except BaseException as e:
        send(sock, {"error": said(e)})
        return
    reset_signals()
    adopt_orphans()
    send(sock, {"ready": os.getpid()})
    children: dict[int, int] = {}
    loaded: set[str] = set()
    while True:
        for fd in readable([sock, *children], None):
            if fd is sock:
                try:
                    request, fds = recv(sock, max_fds=8)
                except Closed:
                    end_orphans(children)
                    return
                preload(backend_class, request.get("module", ""), loaded)
                pid = fork(sock, request, fds, backend_class, children)
                children[os.pidfd_open(pid)] = pid
                send(sock, {"pid": pid})
            else:
                pid = children.pop(fd)
                os.close(fd)
                # Until it is waited for, its number can't be another process's. What it forked goes with it:
                # a copy of its socket would keep the worker from seeing that it is gone.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                status = reaped(pid)
                if not children:
                    end_orphans(children)
                send(sock, {"exit": pid, "status": status})


def reaped(pid: int) -> int | None:
    """The wait status of a child that has ended; None where it can't be had, as while somebody traces it."""
    for _ in range(100):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.01)
    return None


def end_orphans(children: dict[int, int]) -> None:
    """Kill what executors left behind outside their process groups."""
    known = set(children.values())
    for _ in range(100):
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as f:
                left = [pid for pid in map(int, f.read().split()) if pid not in known]
        except OSError:
            return
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                reaped(pid)


def preload(backend_class: Any, module: str, loaded: set[str]) -> None:
    """Import a module's adapter here once, not in every executor. What fails here fails there too, and is told."""
    if module and module not in loaded:
        loaded.add(module)
        with contextlib.suppress(BaseException):
            backend_class.preload(module)
        reset_signals()


def fork(sock: socket.socket, request: dict[str, Any], fds: list[int], backend_class: Any,
         children: dict[int, int]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    die_with_parent(parent)
    os.setsid()
    sock.close()
    for fd in children:
        with contextlib.suppress(OSError):
            os.close(fd)
    executor_fd, arena_fd, stderr_fd, *lease = fds
    keep_to_oneself(lease)
    os.dup2(stderr_fd, 1)
    os.dup2(stderr_fd, 2)
    start(executor_fd, arena_fd, backend_class, request)
    raise AssertionError


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))
    main()
