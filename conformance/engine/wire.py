"""Messages between a worker, its zygote and its executors, and the arena they share."""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import math
import mmap
import os
import select
import signal
import socket
import struct
import time
import weakref
from collections.abc import Iterable
from typing import Any

HEADER_BYTES = 4096
LONGEST_BYTES = 1 << 30
_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Closed(Exception):
    """The other side is gone."""


class TimedOut(Exception):
    """No answer within the limit."""


def send(sock: socket.socket, message: Any, fds: tuple[int, ...] = ()) -> None:
    """Send one JSON message, with file descriptors beside it. Raises Closed."""
    data = json.dumps(message, separators=(",", ":")).encode()
    frame = _LENGTH.pack(len(data)) + data
    try:
        if fds:
            sent = sock.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
            frame = frame[sent:]
        if frame:
            sock.sendall(frame)
    except OSError as e:
        raise Closed(str(e)) from e


def recv(sock: socket.socket, timeout_s: float | None = None, max_fds: int = 0) -> tuple[Any, list[int]]:
    """The next message and its descriptors. Raises Closed, also for what is no message, or TimedOut."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    fds: list[int] = []
    head = _exactly(sock, _LENGTH.size, end, fds, max_fds)
    length = _LENGTH.unpack(head)[0]
    if length > LONGEST_BYTES:
        msg = "something else wrote into the stream"
        raise Closed(msg)
    body = _exactly(sock, length, end, fds, max_fds)
    try:
        return json.loads(body), fds
    except ValueError as e:
        msg = f"something else wrote into the stream: {e}"
        raise Closed(msg) from e


def readable(files: Iterable[socket.socket | int], timeout_s: float | None) -> list[socket.socket | int]:
    """Those that can be read, or have ended, once one of them can; none where the time runs out.

    Not `select.select`, which takes no descriptor above 1023.
    """
    by_fd = {f if isinstance(f, int) else f.fileno(): f for f in files}
    poll = select.poll()
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(None if timeout_s is None else math.ceil(max(timeout_s, 0) * 1000))]


def _exactly(sock: socket.socket, n: int, end: float | None, fds: list[int], max_fds: int) -> bytes:
    out = bytearray()
    while len(out) < n:
        if end is not None:
            left = end - time.monotonic()
            if left <= 0 or not readable([sock], left):
                raise TimedOut
        try:
            if max_fds:
                data, got, _, _ = socket.recv_fds(sock, n - len(out), max_fds)
                fds.extend(got)
            else:
                data = sock.recv(n - len(out))
        except OSError as e:
            raise Closed(str(e)) from e
        if not data:
            msg = "end of stream"
            raise Closed(msg)
        out += data
    return bytes(out)


def said(e: BaseException, limit: int = 2000) -> str:
    """Type and text of an exception, also of one that can't say what it is."""
    try:
        return f"{type(e).__name__}: {e}"[:limit]
    except BaseException:
        return f"{type(e).__name__}, whose text can't be had"


def adopt_orphans() -> None:
    """Become the parent of what children leave behind, so that it can be ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies; leave at once if it has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(0)


def keep_to_oneself(fds: Iterable[int]) -> None:
    """Have these descriptors closed in whatever program this process starts: a lease is not handed down.

    What this process opens from now on gets higher numbers. Of a process that is killed the kernel closes files from
    the highest number down: so it lets go of a device, which its driver has open, before it lets go of the lease.
    """
    mine = list(fds)
    for fd in mine:
        os.set_inheritable(fd, False)
    while mine and (filler := os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)) < max(mine):
        pass
    if mine:
        os.close(filler)


class Arena:
    """Anonymous shared memory that grows: no name, nothing to clean up, no limit of /dev/shm."""

    def __init__(self, fd: int | None = None, nbytes: int = 1 << 22) -> None:
        if fd is None:
            fd = os.memfd_create("arena")
            os.ftruncate(fd, nbytes)
        self.fd = fd
        # One that is forgotten must not hold its descriptor and its memory.
        self._close = weakref.finalize(self, os.close, fd)
        self._map = mmap.mmap(fd, 0)
        self.view = memoryview(self._map)

    @property
    def nbytes(self) -> int:
        return len(self.view)

    def reserve(self, nbytes: int) -> None:
        """Make sure that many bytes are mapped; contents stay, views taken before stay valid."""
        if nbytes <= self.nbytes:
            return
        if os.fstat(self.fd).st_size < nbytes:
            os.ftruncate(self.fd, 1 << (nbytes - 1).bit_length())
        # The old mapping lives on as long as an array still looks at it.
        self._map = mmap.mmap(self.fd, 0)
        self.view = memoryview(self._map)

    def close(self) -> None:
        self._close()
