"""Faults that any op can have, planted between the engine and a backend that works.

They prove that the engine tells them apart. `every` of them is listed in FAULTS with the
reason or status it must end in.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap
from typing import Any

from conformance.protocol import Backend


@dataclass(frozen=True)
class Fault:
    name: str
    doc: str
    expect: tuple[str, ...]
    """statuses, or reasons of a fail, any of which is right"""
    check: str = "values"
    """the check that must see it"""


FAULTS = {
    f.name: f
    for f in (
        Fault("segv", "ends with SIGSEGV", ("signal",)),
        Fault("abort", "ends with SIGABRT", ("signal",)),
        Fault("exit", "leaves the process with code 7", ("exit",)),
        Fault("hang", "never returns", ("timeout",)),
        Fault("raise", "raises an exception on a legal call", ("exception",)),
        Fault("allocate", "allocates without end", ("oom",)),
        Fault("write_before", "writes a byte in front of its output", ("oob_write",), "memory"),
        Fault("write_behind", "writes a byte behind its output", ("oob_write",), "memory"),
        Fault("unwritten", "leaves the last element of its output as it was", ("unwritten", "numeric")),
        Fault("untouched", "writes nothing at all", ("unwritten", "numeric")),
        Fault("stale", "gives what the call before gave", ("numeric", "order", "index_range", "contract")),
        Fault("mutate_input", "flips a bit of an input", ("input_mutated",), "memory"),
        Fault("late_write", "returns 50 ms before its output stands", ("late_write",)),
        Fault("first_call_wrong", "is wrong on its first call only", ("numeric", "nonfinite", "order", "index_range")),
        Fault("one_element", "flips the top bits of one element", ("numeric", "nonfinite", "order", "index_range")),
        Fault("zeros", "gives zeros", ("numeric", "order", "index_range", "token_duplicated")),
        Fault("accepts", "swallows what it refuses a bad call with", ("no_exception",), "rejects"),
        Fault("refuses_by_exit", "refuses a bad call with SystemExit", ("wrong_exception",), "rejects"),
        Fault("refuses_by_segv", "meets a bad call with SIGSEGV", ("signal",), "rejects"),
        Fault("wrong_after_refusal", "is wrong on the call after a refused one",
              ("numeric", "nonfinite", "order", "index_range"), "rejects"),
        Fault("dead_after_refusal", "refuses every call after a refused one", ("exception",), "rejects"),
    )
}


class Injected:
    """A backend's `run` with one fault."""

    def __init__(self, backend: Backend, name: str) -> None:
        if name not in FAULTS:
            msg = f"unknown fault {name!r}; known: {', '.join(FAULTS)}"
            raise ValueError(msg)
        self.backend, self.name, self.calls, self.refused = backend, name, 0, False
        self.last: dict[tuple[str, int], bytes] = {}
        self.hoard: list[mmap] = []
        self.fill = 0xA5
        """what stands in memory that a callee allocates and does not write"""

    def run(self, op: str, kwargs: dict[str, Any], outs: list[str]) -> Any:
        self.calls += 1
        if self.name in _BEFORE:
            _BEFORE[self.name](self)
        before = [(t, _bytes(self.backend, t)) for t in (kwargs.get(n) for n in outs) if t is not None]
        try:
            result = self.backend.run(op, kwargs)
        except Exception:
            self.refused = True
            if self.name in _REFUSED:
                return _REFUSED[self.name](self)
            raise
        self.backend.synchronize()
        tensors = _tensors(self.backend, [kwargs.get(n) for n in outs]) or _tensors(self.backend, result)
        if self.name in _AFTER and tensors:
            inputs = [v for n, v in kwargs.items() if n not in outs]
            _AFTER[self.name](self, op, tensors, before, _tensors(self.backend, inputs))
        return result


def _tensors(backend: Backend, value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in _tensors(backend, v)]
    try:
        spec, *_ = backend.inspect(value)
    except TypeError:
        return []
    return [value] if spec.span_bytes() else []


def _place(backend: Backend, tensor: Any) -> tuple[Any, int, int, int]:
    spec, buf, offset, nbytes = backend.inspect(tensor)
    item = spec.itemsize_bytes
    last = sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True))
    return buf, offset, (last + 1) * item, nbytes


def _bytes(backend: Backend, tensor: Any) -> bytes:
    buf, offset, span, _ = _place(backend, tensor)
    out = bytearray(span)
    backend.read(buf, offset, memoryview(out))
    return bytes(out)


def _elements(backend: Backend, tensor: Any) -> list[int]:
    """Bytes from the first element of a tensor to each of them."""
    spec, *_ = backend.inspect(tensor)
    steps = [0]
    for n, s in zip(spec.shape, spec.strides, strict=True):
        steps = [r + i * s for r in steps for i in range(n)]
    return [r * spec.itemsize_bytes for r in steps]


def _write(backend: Backend, tensor: Any, data: bytes, shift: int = 0) -> None:
    buf, offset, _, nbytes = _place(backend, tensor)
    if offset + shift >= 0 and offset + shift + len(data) <= nbytes:
        backend.write(buf, offset + shift, memoryview(bytearray(data)))


def _stop(signum: int) -> Callable[[Injected], None]:
    return lambda self: os.kill(os.getpid(), signum)


def _hang(self: Injected) -> None:
    while True:
        time.sleep(1)


def _raise(self: Injected) -> None:
    msg = "planted: this call is refused"
    raise RuntimeError(msg)


def _allocate(self: Injected) -> None:
    nbytes = 64 << 20
    try:
        while True:  # never touched, and twice as much each time: a limit is met before memory is
            self.hoard.append(mmap(-1, nbytes))
            nbytes *= 2
    except OSError as e:
        raise MemoryError(str(e)) from e


def _dead(self: Injected) -> None:
    if self.refused:
        msg = "planted: nothing works any more"
        raise RuntimeError(msg)


def _leave(self: Injected) -> None:
    raise SystemExit(7)


_BEFORE: dict[str, Callable[[Injected], None]] = {
    "segv": _stop(signal.SIGSEGV), "abort": _stop(signal.SIGABRT), "exit": lambda self: os._exit(7),
    "hang": _hang, "raise": _raise, "allocate": _allocate, "dead_after_refusal": _dead,
}
_REFUSED: dict[str, Callable[[Injected], Any]] = {
    "accepts": lambda self: None, "refuses_by_exit": _leave, "refuses_by_segv": _stop(signal.SIGSEGV),
}


def _behind(self: Injected, op: str, outs: list[Any], before: Any, ins: list[Any]) -> None:
    _write(self.backend, outs[0], b"\x00", _place(self.backend, outs[0])[2])


def _ahead(self: Injected, op: str, outs: list[Any], before: Any, ins: list[Any]) -> None:
    _write(self.backend, outs[0], b"\x00", -1)


def _unwritten(self: Injected, op: str, outs: list[Any], before: Any, ins: list[Any]) -> None:
    item = self.backend.inspect(outs[0])[0].itemsize_bytes
    span = _place(self.backend, outs[0])[2]
    tail = before[0][1][-item:] if before else bytes([self.fill]) * item
    _write(self.backend, outs[0], tail, span - item)


def _untouched(self: Injected, op: str, outs: list[Any], before: Any, ins: list[Any]) -> None:
    for i, t in enumerate(outs):
        _write(self.backend, t, before[i][1] if i < len(before) else bytes([self.fill]) * _place(self.backend, t)[2])


def _stale(self: Injected, op: str, outs: list[Any], before: Any, ins: list[Any]) -> None:
    for i, t in enumerate(outs):
        fresh = _bytes(self.backend, t)
        old = self.last.get((op, i))
        if old is not None and len(old) == len(fresh):
            mixed, item = bytearray(fresh), self.backend.inspect(t)[0].itemsize_bytes
            # What lies between the rows is nobody's result: putting that back too would be another fault.
            for at in _elements(self.backend, t):
                mixed[at : at + item] = old[at : at + item]
            _write(self.backend, t, bytes(mixed))
        self.last[op, i] = fresh


def _mutate(self: Injected, op: str, outs: list[Any], before: Any, ins: list[Any]) -> None:
    if ins:
        first = _bytes(self.backend, ins[0])[0]
        _write(self.backend, ins[0], bytes([first ^ 1]))


def _late(self: Injected, op: str, outs: list[Any], before: Any, ins: list[Any]) -> None:
    right = [(t, _bytes(self.backend, t)) for t in outs]
    _untouched(self, op, outs, before, ins)

    def finish() -> None:
        for t, data in right:
            _write(self.backend, t, data)

    threading.Timer(0.05, finish).start()


def _flip(self: Injected, op: str, outs: list[Any], before: Any, ins: list[Any]) -> None:
    item = self.backend.inspect(outs[-1])[0].itemsize_bytes
    data = bytearray(_bytes(self.backend, outs[-1])[:item])
    data[-1] ^= 0x70
    _write(self.backend, outs[-1], bytes(data))


def _first(self: Injected, op: str, outs: list[Any], before: Any, ins: list[Any]) -> None:
    if self.calls == 1:
        _flip(self, op, outs, before, ins)


def _after(self: Injected, op: str, outs: list[Any], before: Any, ins: list[Any]) -> None:
    if self.refused:
        _flip(self, op, outs, before, ins)


def _zeros(self: Injected, op: str, outs: list[Any], before: Any, ins: list[Any]) -> None:
    for t in outs:
        spec, buf, offset, _ = self.backend.inspect(t)
        for at in _elements(self.backend, t):
            self.backend.write(buf, offset + at, memoryview(bytearray(spec.itemsize_bytes)))


_AFTER: dict[str, Callable[..., None]] = {
    "write_behind": _behind, "write_before": _ahead, "unwritten": _unwritten, "untouched": _untouched,
    "stale": _stale, "mutate_input": _mutate, "late_write": _late, "first_call_wrong": _first,
    "one_element": _flip, "zeros": _zeros, "wrong_after_refusal": _after,
}
