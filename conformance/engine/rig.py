"""One process that runs the cpu kernels with one setting after another: what a diagnosis holds a failure against."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from conformance.engine import judge, kinds, observe
from conformance.engine.attempt import Bench
from conformance.engine.clock import monotonic
from conformance.engine.evidence import copied
from conformance.engine.example import Example, digests, place, start_cursors
from conformance.engine.executor import Executor
from conformance.model import Op
from references.expected import Array

SETTABLE = "adapters.cpu.settable:SettableBackend"
"""the backend that a diagnosis runs on: the cpu kernels, with knobs as a setting"""
START_LIMIT_S, CALL_LIMIT_S = 20.0, 2.0
"""for the first call of all, while a process group comes up; for any other: a fault may hang"""
SECOND_TILE = ("drop_tile=1", "double_tile=1", "stale_tile=1")
"""all the same where one tile holds the whole axis"""


class Rig:
    """A new process where a setting kills the old one."""

    def __init__(self, bench: Bench, op: Op) -> None:
        self.bench, self.op = bench, op
        self.executor: Executor | None = None
        self.apart_s = 0.0
        """what compilers took, and the first group to come up"""
        self.start_s = 0.0
        """of the first group, compilers included"""

    def outputs(self, examples: Sequence[Example], knobs: str) -> dict[str, Array] | None:
        """What the last of these calls gives, made in order; None where it gives nothing of the declared form.

        Codes by name; they stand in the arena until the next call.
        """
        return self._receive(self._send(examples, knobs))

    def each(self, examples: Sequence[Example], settings: Iterable[str]) -> Iterator[dict[str, Array] | None]:
        """`outputs` of one setting after another, copied; the next one runs while the caller looks at this one."""
        sent: list[Example] | None = None
        try:
            for knobs in (*settings, None):
                before, found = sent, None if sent is None else self._receive(sent)
                found = copied(found) if found else None
                sent = None if knobs is None else self._send(examples, knobs)
                if before is not None:
                    yield found
        finally:
            if sent is not None:
                self._receive(sent)

    def axes(self, examples: Sequence[Example]) -> list[str]:
        """The tile knobs that decide which block of one of these problems is the first one."""
        def cuts(axis: str, example: Example) -> bool:
            knobs = (f"drop_tile=0,{axis}={n}" for n in (kinds.SMALLEST_TILE, kinds.LARGEST_TILE))
            first, second = (digests(self.outputs([example], k) or {}) for k in knobs)
            return first != second

        return [a for a in kinds.AXES if any(cuts(a, e) for e in examples)]

    def reach(self, example: Example, axes: Sequence[str]) -> dict[str, int]:
        """By axis, the smallest tile of those that a diagnosis tries that holds all that is walked of this problem."""
        return {a: self._whole(example, a) for a in axes}

    def _whole(self, example: Example, axis: str) -> int:
        sizes = sorted(kinds.SIZES)
        low, high = 0, len(sizes) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._one_tile(example, f"{axis}={sizes[middle]}") else (middle + 1, high)
        return sizes[low]

    def _one_tile(self, example: Example, tile: str) -> bool:
        first, *others = (f"{knob},{tile}" for knob in SECOND_TILE)
        same = digests(self.outputs([example], first) or {})
        return all(digests(self.outputs([example], knobs) or {}) == same for knobs in others)

    def _send(self, examples: Sequence[Example], knobs: str) -> list[Example]:
        if self.executor is None or not self.executor.alive:
            self.executor = Executor(self.bench.launcher, self.bench.pool, self.op.ranks, CALL_LIMIT_S, self.op.module)
        executor = self.executor
        again = [replace(e, before=[], after=[], arenas=[]) for e in examples]
        cursors = start_cursors(self.op.ranks)
        requests = [place(e, executor.arenas, cursors) for e in again]
        for i, per_rank in enumerate(requests):
            for rank, r in enumerate(per_rank):
                own = r["settings"].get(self.op.module, {})
                r |= {"settings": {self.op.module: {**own, "knobs": knobs}}, "hold": i + 1 < len(requests),
                      "arena_bytes": executor.arenas[rank].nbytes}
                if i == 0:
                    r["results_at"] = cursors[rank]
            executor.send(per_rank)
        return again

    def _receive(self, again: Sequence[Example]) -> dict[str, Array] | None:
        found = None
        for example in again:
            executor = self.executor
            if executor is None:
                return None
            begun = monotonic()
            outcome = executor.collect(self._limit_s(executor), self.bench.compile_timeout_s)
            if self.start_s:
                self.apart_s += max((a.get("compile_s", 0.0) for a in outcome.answers if a), default=0.0)
            else:
                self.start_s = self.apart_s = monotonic() - begun
            if observe.ended_badly(outcome):
                # Answers that are still due would be taken for those of the next setting.
                self.close()
                return None
            seen = observe.observe(example, outcome)
            found = None if any(f.reason in judge.STRUCTURE_REASONS for f in seen.findings) else seen.outputs
        return found

    def _limit_s(self, executor: Executor) -> float:
        """A later group comes up about as fast as the first one, and a call that hangs in it must not take 20 s."""
        if not self.start_s:
            return START_LIMIT_S
        return CALL_LIMIT_S if executor.runs else CALL_LIMIT_S + self.start_s

    def close(self) -> None:
        if self.executor is not None:
            self.executor.kill()
            self.executor = None
