"""The executor's side of timing: calls one at a time on fresh data, and what a clock must agree with.

Sets of buffers stay on the device; before a round one of them gets other data, its outputs are
poisoned and the caches flushed, all untimed. The backend takes the time. What it says is checked
here: rounds against the host's clock, many calls in a row against the time until the device is
idle, and results as they stand the moment the clock has stopped.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from conformance.engine.serve import Server, _Run
from conformance.protocol import TensorArg, TokenArg, TupleArg, arg_from_json

PROBE_BYTES = 64
STEADY = 0.02
"""three medians in a row that agree so closely end the warm-up"""
WARM_ROUNDS = 5
MOST_SPAN_CALLS = 4096
BARRIER_S = 60.0
SETTLE_S = 0.002


class Barrier:
    """Where the ranks of a group wait for each other: a count a rank in a shared file."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, 8 * size)
        self.map = mmap.mmap(fd, 8 * size)
        os.close(fd)
        self.rank, self.size, self.count = rank, size, 0

    def wait(self) -> None:
        """Raises TimeoutError where a rank does not come."""
        self.count += 1
        struct.pack_into("=q", self.map, 8 * self.rank, self.count)
        end = time.monotonic() + BARRIER_S
        while min(struct.unpack_from(f"={self.size}q", self.map)) < self.count:
            if time.monotonic() > end:
                msg = f"a rank of the group did not come to the barrier within {BARRIER_S:.0f} s"
                raise TimeoutError(msg)
            time.sleep(0)


class BufferSet(_Run):
    """The buffers of one call on the device, which every data set of the problem fits."""

    def __init__(self, server: Server, request: Mapping[str, Any], all_buffers: list[Any]) -> None:
        super().__init__(server, request, [])
        for b in request["buffers"]:
            buf = self.backend.alloc(b["nbytes"], b["align"])
            self.buffers.append(buf)
            all_buffers.append(buf)
        self.results: dict[int, Any] = {}
        self.pending: list[tuple[int, Callable[[], Any] | None]] = []
        self.once: set[int] = set()
        """steps that take neither tensors nor objects: made once, used by every call"""

    def load(self, request: Mapping[str, Any]) -> None:
        """Put a data set in place; outputs hold poison again."""
        self.request = request
        for b, buf in zip(request["buffers"], self.buffers, strict=True):
            self.backend.write(buf, 0, self.arena.view[b["at"] : b["at"] + b["nbytes"]])

    def call(self, index: int, *, compile: bool = False) -> None:
        """One step; its results are what later steps take."""
        raw = self.request["steps"][index]
        args = {n: arg_from_json(a) for n, a in raw["args"].items()}
        if index in self.once:
            return
        if not any(isinstance(a, (TensorArg, TokenArg, TupleArg)) for a in args.values()):
            self.once.add(index)
        kwargs = {n: self.materialise(a) for n, a in args.items()}
        if compile:
            self.server.phase("compile", index)
            self.backend.compile(raw["op"], kwargs)
        self.keep(index, self.server.call(raw["op"], kwargs, raw.get("outs", [])))

    def ready(self, index: int) -> Callable[[], Any]:
        """A step as a call without arguments, everything looked up before: what is timed is the call."""
        raw = self.request["steps"][index]
        kwargs = {n: self.materialise(arg_from_json(a)) for n, a in raw["args"].items()}
        op, outs = raw["op"], raw.get("outs", [])
        return lambda: self.server.call(op, kwargs, outs)

    def keep(self, index: int, value: Any) -> None:
        self.results[index] = value
        names = self.request["steps"][index].get("returns", [])
        for name, leaf in zip(names, _leaves(value), strict=False):
            self.tokens[name] = leaf

    def probe(self) -> list[bytes]:
        """The last bytes of everything that may have been written, as they are now."""
        out = [self._bytes(buf, max(b["last"] - PROBE_BYTES, 0), PROBE_BYTES)
               for b, buf in zip(self.request["buffers"], self.buffers, strict=True) if b.get("last")]
        for value in self.results.values():
            for leaf in _leaves(value):
                with suppress(TypeError):
                    spec, buf, offset, _ = self.backend.inspect(leaf)
                    span = spec.span_bytes()
                    n = min(span, PROBE_BYTES)
                    out.append(self._bytes(buf, offset + span - n, n))
        return out

    def _bytes(self, buf: Any, at: int, n: int) -> bytes:
        area = bytearray(n)
        self.backend.read(buf, at, memoryview(area))
        return bytes(area)

    def answer(self) -> dict[str, Any]:
        """Everything that came of the last call, as the answer to a run has it."""
        self.held, steps = [], []
        for b, buf in zip(self.request["buffers"], self.buffers, strict=True):
            self.backend.read(buf, 0, self.arena.view[b["back"] : b["back"] + b["nbytes"]])
        for index, raw in enumerate(self.request["steps"]):
            leaves: list[dict[str, Any]] = []
            structure = self.read_result(self.results[index], raw.get("returns", []), leaves)
            steps.append({"structure": structure, "leaves": leaves})
        late = self.late(self.held, SETTLE_S)
        return {"steps": steps, "pool_watched": False, "held_changed": False, "late": late, "settings_leak": [],
                "arena_bytes": self.arena.nbytes, "run_s": 0.0}


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for v in value for leaf in _leaves(v)]
    return [value]


class Timing(_Run):
    """Answers a request to time one call: a block of samples."""

    def go(self) -> dict[str, Any]:
        request, server = self.request, self.server
        server.phase("prepare")
        self.examples: list[Mapping[str, Any]] = request["examples"]
        self.timed: list[int] = request["timed"]
        for module, settings in self.examples[0].get("settings", {}).items():
            self.settings_before[module] = self.backend.get_settings(module)
            self.backend.set_settings(module, settings)
        group = self.backend.group
        self.barrier = Barrier(f"{group.rendezvous}.times{request['block']}", group.rank, group.size) if group else None
        self.sets = [BufferSet(server, self.examples[0], self.buffers) for _ in range(request["sets"])]
        self.plan: list[tuple[int, bool]] = []
        self.reset()
        self.first_calls()
        server.phase("execute")
        rounds, steady = self.warm_up(request["warm_rounds"], request["warm_s"])
        samples = self.rounds([(e, bool(a)) for e, a in request["schedule"]])
        measured = {name: list(values) for name, values in self.seen.items()}
        readbacks = self.readbacks
        spans = [self.span(samples.seconds, request["span_s"]) for _ in range(request["spans"])]
        server.phase("compare")
        return {"steps": [1], "samples": list(samples.seconds), "clock": samples.clock, "warm_rounds": rounds,
                "steady": steady, **measured, "spans": spans, "readbacks": readbacks, "arena_bytes": self.arena.nbytes}

    def restore_settings(self) -> None:
        for module, before in self.settings_before.items():
            named = self.examples[0]["settings"][module]
            self.backend.set_settings(module, {k: v for k, v in before.items() if k in named})

    def forget(self) -> None:
        super().forget()
        for s in getattr(self, "sets", ()):
            s.forget()
            s.results = {}
        self.calls: list[Callable[[], Any]] = []

    def reset(self) -> None:
        self.at = -1
        self.seen: dict[str, list[Any]] = {"enter": [], "return": [], "wall": [], "lag": [], "moved": []}
        self.readbacks: list[dict[str, Any]] = []

    def first_calls(self) -> None:
        """Every step once on every set, compiled: nothing of that is in a sample."""
        started = time.perf_counter()
        for i, s in enumerate(self.sets):
            s.load(self.examples[i % len(self.examples)])
            if self.barrier:
                self.barrier.wait()
            for index in range(len(s.request["steps"])):
                s.call(index, compile=i == 0)
            self.backend.synchronize()
        self.compile_s += time.perf_counter() - started

    def rounds(self, plan: list[tuple[int, bool]]) -> Any:
        """Time these rounds: (data set, whether all results are read back)."""
        self.plan = plan
        self.reset()
        self.calls = [self.timed_call(s) for s in self.sets]
        samples = self.backend.time(self.calls, len(plan), self.before)
        self.after()
        if len(self.seen["enter"]) != len(plan):
            msg = f"Backend.time was asked for {len(plan)} rounds and made {len(self.seen['enter'])} calls"
            raise ValueError(msg)
        if len(samples.seconds) != len(plan) or not all(s >= 0 for s in samples.seconds):
            msg = f"Backend.time was asked for {len(plan)} samples and gave {samples!r:.200}"
            raise ValueError(msg)
        return samples

    def timed_call(self, s: BufferSet) -> Callable[[], Any]:
        seen = self.seen

        def call() -> Any:
            calls = s.pending
            seen["enter"].append(time.perf_counter())
            for index, ready in calls:
                if ready is None:
                    s.call(index)
                else:
                    s.keep(index, ready())
            seen["return"].append(time.perf_counter())
            return None

        return call

    def before(self) -> None:
        """Between two rounds: look at what the last one left, then make the next one ready."""
        self.after()
        self.at += 1
        s = self.sets[self.at % len(self.sets)]
        s.load(self.examples[self.plan[self.at][0]])
        for index in range(self.timed[0]):
            s.call(index)
        s.pending = self.pending(s)
        self.backend.synchronize()
        self.backend.flush_caches(self.request["flush_bytes"])
        if self.barrier:
            self.backend.synchronize()
            self.barrier.wait()

    def pending(self, s: BufferSet) -> list[tuple[int, Callable[[], Any] | None]]:
        """The timed steps; the first is looked up now, one that takes another's result when that is there."""
        return [(index, s.ready(index) if n == 0 else None) for n, index in enumerate(self.timed)]

    def after(self) -> None:
        if self.at < 0 or not len(self.seen["wall"]) <= self.at < len(self.seen["enter"]):
            return
        self.seen["wall"].append(time.perf_counter() - self.seen["enter"][self.at])
        s = self.sets[self.at % len(self.sets)]
        begun = time.perf_counter()
        first = s.probe()
        between = time.perf_counter()
        second = s.probe()
        # Work put off until somebody looks shows in the first look only.
        self.seen["lag"].append((between - begun) - (time.perf_counter() - between))
        example, audit = self.plan[self.at]
        if audit:
            self.readbacks.append({"round": self.at, "example": example, **s.answer()})
            second = s.probe()
        self.seen["moved"].append(first != second)

    def warm_up(self, most: int, most_s: float) -> tuple[int, bool]:
        """(rounds, whether three medians in a row agreed). All ranks of a group take as many, the least."""
        end = time.monotonic() + most_s
        least = 3 * WARM_ROUNDS
        most = least if self.barrier else most
        medians: list[float] = []
        data = self.request["warm_data"]
        rounds = 0
        while rounds < most and (rounds < least or time.monotonic() < end):
            seconds = sorted(self.rounds([((rounds + i) % data, False) for i in range(WARM_ROUNDS)]).seconds)
            rounds += WARM_ROUNDS
            medians.append(seconds[len(seconds) // 2])
            last = medians[-3:]
            if len(last) == 3 and max(last) <= (1 + STEADY) * min(last) and self.barrier is None:
                return rounds, True
        return rounds, False

    def span(self, seconds: tuple[float, ...], least_s: float) -> list[float]:
        """[calls, seconds by the backend's clock, seconds until the device was idle by the host's], all in a row."""
        usual = sorted(seconds)[len(seconds) // 2]
        walls = sorted(self.seen["wall"])
        n = int(min(max(least_s / max(usual, walls[0], 1e-7), 3), MOST_SPAN_CALLS))
        if self.barrier:
            n = 3
        s = self.sets[0]
        began: list[float] = []

        def many() -> None:
            began.append(time.perf_counter())
            for _ in range(n):
                for index, ready in s.pending:
                    if ready is None:
                        s.call(index)
                    else:
                        s.keep(index, ready())

        def before() -> None:
            self.backend.synchronize()
            if self.barrier:
                self.barrier.wait()

        if s.request is not self.examples[0]:
            s.load(self.examples[0])
        for index in range(self.timed[0]):
            s.call(index)
        s.pending = self.pending(s)
        took = self.backend.time([many], 1, before)
        self.backend.synchronize()
        return [n, took.seconds[0], time.perf_counter() - began[0]]
