"""What processes wait for, and the memory they share."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from conformance.engine.wire import Arena, readable, recv, send

SELECT_LIMIT = 1024


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    yield here, there
    here.close()
    there.close()


def test_what_can_be_read_or_has_ended(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    begun = time.monotonic()
    assert readable([here], 0.02) == []
    assert time.monotonic() - begun >= 0.02
    assert readable([], 0.0) == []
    send(there, {"x": 1})
    assert readable([here, there.fileno()], None) == [here]
    assert recv(here, 1.0)[0] == {"x": 1}
    there.shutdown(socket.SHUT_WR)
    assert readable([here], 1.0) == [here]


def test_descriptors_that_select_does_not_take(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, SELECT_LIMIT + 8), hard))
    try:
        os.dup2(here.fileno(), SELECT_LIMIT + 4)
        send(there, {})
        assert readable([SELECT_LIMIT + 4], 1.0) == [SELECT_LIMIT + 4]
        os.close(SELECT_LIMIT + 4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_forgotten_arena_holds_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena()
    arena.reserve(1 << 23)
    assert len(os.listdir("/proc/self/fd")) > before
    del arena
    assert len(os.listdir("/proc/self/fd")) == before
    closed = Arena()
    closed.close()
    closed.close()
    del closed
    assert len(os.listdir("/proc/self/fd")) == before
