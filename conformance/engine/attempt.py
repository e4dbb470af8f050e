"""One problem tried once: a decoy run and a judged run, both judged, oracle beside device."""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conformance.engine import judge, observe, oracle
from conformance.engine.care import DeviceCare, beyond_memory, short_of_memory
from conformance.engine.clock import monotonic
from conformance.engine.devices import DevicePool
from conformance.engine.example import Example, build, digests, place, start_cursors
from conformance.engine.executor import ArenaPool, Executor, Launcher, LostAtStart
from conformance.engine.inline import InlineExecutor
from conformance.engine.judge import Finding, Seen
from conformance.engine.recall import Recall
from conformance.model import Op, Problem
from conformance.protocol import Description
from conformance.results import Record
from references.expected import Expected


@dataclass
class Bench:
    """Where a worker's cases run: launchers, arenas, what the backend says, and the limits."""

    description: Description
    launcher: Launcher
    debug_launcher: Launcher
    pool: ArenaPool
    profile: Mapping[str, Any]
    case_timeout_s: float = 20.0
    compile_timeout_s: float = 300.0
    settle_s: float = 0.25
    devices: DevicePool | None = None
    """where the backend has devices of its own, each used by one case at a time"""
    inline: bool = False
    """run in this process: for debuggers"""
    timing: Any = None
    """how cases are timed; None for the usual"""
    rates: Any = None
    """peaks of the device, looked up and measured before the first timed case"""
    unusable: Mapping[str, str] = field(default_factory=dict)
    """modules that doctor found unusable, with the reason: their cases are not run"""
    recall: Recall | None = None
    """keeps problems and the oracle's answers where many settings are tried on the same ones"""


@dataclass
class Attempt:
    """What trying one problem gave."""

    problem: Problem
    findings: list[Finding] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)
    expected: list[Mapping[Any, Expected]] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    run_s: float = 0.0
    compared: bool = False
    """whether a relation between two runs had anything to compare"""

    @property
    def worst(self) -> Finding | None:
        """The gravest; of several that are, one of the last example, for the decoys come before the problem itself."""
        return min(self.findings, key=lambda f: (*_severity(f), f.by_chance, -f.example), default=None)


_ORDER = ("error", "crash", "timeout", "oom", "fail", "flaky", "unsupported")
_REASON_ORDER = ("oob_write", "contract", "dtype", "shape", "layout", "exception", "missing_output", "late_write",
                 # A count that stays as it was may follow from a lost token, and never the other way round.
                 "token_lost", "token_duplicated", "unwritten", "input_mutated", "alias")


def _severity(f: Finding) -> tuple[int, int]:
    reason = _REASON_ORDER.index(f.reason) if f.reason in _REASON_ORDER else len(_REASON_ORDER)
    return _ORDER.index(f.status), reason


class Clock(defaultdict[str, float]):
    """Seconds by phase."""

    def __init__(self) -> None:
        super().__init__(float)

    def timed(self, phase: str) -> _Timer:
        return _Timer(self, phase)


class _Timer:
    def __init__(self, clock: Clock, phase: str) -> None:
        self.clock, self.phase = clock, phase

    def __enter__(self) -> None:
        self.start = monotonic()

    def __exit__(self, *_: object) -> None:
        self.clock[self.phase] += monotonic() - self.start


class Attempts:
    """Tries problems of one op on an executor, and starts a new one when it is gone or must be fresh."""

    def __init__(self, bench: Bench, op: Op, clock: Clock, *, debug_malloc: bool = False) -> None:
        self.bench, self.op, self.clock = bench, op, clock
        self.care: DeviceCare | None = None
        """of the devices that are leased for this case"""
        self.launcher = bench.debug_launcher if debug_malloc else bench.launcher
        self.debug_malloc = debug_malloc
        self.executor: Executor | InlineExecutor | None = None
        self.deaths = 0
        self.times: list[float] = []
        self.first_times: list[float] = []
        """of the first run in a process, which imports and warms up"""
        self.hung = False
        self.suspect = False
        """whether something failed since the devices were last seen to answer"""
        self.recovering_s = 0.0
        """what bringing devices back has taken, by the clock of limits"""
        self.sent = 0
        """runs that were asked for"""

    def limit_s(self, shrinking: bool) -> float:
        """How long a run may take. Making a hang small must end: then ten times the usual is hung already."""
        full = self.bench.case_timeout_s
        if not (shrinking and self.hung):
            return full
        usual = float(np.median(self.times)) if self.times else full / 100
        return min(full, max(10 * usual, 4 * max(self.first_times, default=0.0), 0.2) + 0.2)

    def ready(self, fresh: bool) -> Executor | InlineExecutor:
        """An executor to run on; `fresh`: that has run nothing. Raises BackendBroken, DeviceGone."""
        self.examine()
        if self.executor is not None and (not self.executor.alive or (fresh and self.executor.runs)):
            self.end()
        if self.executor is None:
            with self.clock.timed("start"):
                try:
                    self.executor = self._start()
                except LostAtStart as e:
                    if self.care is None:
                        raise
                    self.care.revive(e.device)
                    self.executor = self._start()
                if self.care is not None:
                    self.care.works()
        return self.executor

    def _start(self) -> Executor | InlineExecutor:
        bench, op = self.bench, self.op
        devices, fds = (self.care.lease.devices, self.care.lease.fds) if self.care else ([], [])
        if bench.inline:
            return InlineExecutor(self.launcher, bench.pool, *devices)
        return Executor(self.launcher, bench.pool, op.ranks, bench.case_timeout_s, op.module, devices, fds)

    def lease_devices(self, record: Record) -> None:
        """Wait for the devices that the case needs, where the backend has any. Raises TooFewDevices, LeaseError."""
        pool = self.bench.devices
        if pool is None:
            return
        with self.clock.timed("wait"):
            lease = pool.take(self.op.ranks)
        self.care = DeviceCare(pool, lease, self.launcher, self.bench.pool, self.op.module, record.id)
        record.device = ",".join(lease.devices)

    def end(self) -> None:
        """Kill the executor. A device whose process can't be killed is given up. Raises DeviceGone."""
        executor, self.executor = self.executor, None
        if executor is not None:
            executor.kill()
            if self.care is not None:
                self.care.stuck(executor.stuck)

    def examine(self) -> None:
        """After a failure: whether the devices still answer, and what it takes. Raises DeviceGone."""
        if self.suspect and self.care is not None and not self.bench.inline:
            self.suspect = False
            begun = monotonic()
            try:
                with self.clock.timed("recover"):
                    self.end()
                    self.executor = self.care.examine()
            finally:
                self.recovering_s += monotonic() - begun

    def close(self) -> None:
        """End the case's processes and let go of its devices. Raises DeviceGone."""
        try:
            self.examine()
        finally:
            try:
                self.end()
            finally:
                if self.care is not None:
                    self.care.lease.close()

    def example(self, problem: Problem, *, judged: bool, **kw: Any) -> Example:
        needs, recall = self.bench.description.requirements, self.bench.recall
        if recall is None or kw:
            return build(self.op, problem, needs, judged=judged, **kw)
        return recall.example(problem, judged, needs, lambda: build(self.op, problem, needs, judged=judged))

    def run(self, problem: Problem, *, fresh: bool = False, settle: bool = False, shrinking: bool = False,
            plan: Callable[[Attempts, Problem], list[Example]] | None = None,
            relate: Callable[[list[Seen]], list[Finding]] | None = None) -> Attempt:
        """Try one problem: by default a decoy and the judged run."""
        out = Attempt(problem)
        with self.clock.timed("draw"):
            out.examples = plan(self, problem) if plan else [
                self.example(problem, judged=False), self.example(problem, judged=True)]
        executor = self.ready(fresh)
        with self.clock.timed("draw"):
            requests = self._requests(executor, out.examples, settle)
        needed = [max(sum(b["nbytes"] for b in r[rank]["buffers"]) for r in requests) for rank in range(self.op.ranks)]
        too_large = beyond_memory(needed, executor.memory)
        if too_large:
            out.findings.append(Finding("unsupported", "prepare", None, too_large))
            return out
        for r in requests:
            executor.send(r)
        self.sent += 1
        with self.clock.timed("oracle"):
            for example in out.examples:
                if not self._ask_oracle(example, out):
                    executor.kill()
                    return out
        for i, example in enumerate(out.examples):
            with self.clock.timed("run"):
                outcome = executor.collect(self.limit_s(shrinking), self.bench.compile_timeout_s)
            compile_s = max((a.get("compile_s", 0.0) for a in outcome.answers if a), default=0.0)
            self.clock["compile"] += compile_s
            self.clock["run"] -= compile_s
            self.clock["device"] += outcome.run_s * self.op.ranks
            out.run_s += outcome.run_s
            bad = observe.ended_badly(outcome)
            if bad:
                self._note_death(executor, bad, len(out.examples) - i - 1)
                bad.example = i
                if bad.status == "oom":
                    bad.message += short_of_memory(needed, executor.memory)
                out.findings.append(bad)
                break
            self.times.append(outcome.run_s)
            if executor.runs == 1:
                self.first_times.append(outcome.run_s)
            with self.clock.timed("compare"):
                out.seen.append(self._judge(example, outcome, out.expected[i], out))
                for f in out.seen[-1].findings:
                    f.example = i
        if relate and len(out.seen) == len(out.examples) and not out.findings:
            with self.clock.timed("compare"):
                out.findings.extend(relate(out.seen))
        if out.seen:
            out.digests = {"inputs": digests(out.examples[-1].codes), "outputs": digests(out.seen[-1].outputs)}
        return out

    def _requests(self, executor: Executor, examples: list[Example], settle: bool) -> list[list[dict[str, Any]]]:
        cursors = start_cursors(self.op.ranks)
        requests = [place(e, executor.arenas, cursors) for e in examples]
        for i, per_rank in enumerate(requests):
            for rank, r in enumerate(per_rank):
                # What is held is freed after the run that follows. A debugging allocator speaks up at that moment,
                # so under one nothing outlives its problem.
                r["hold"] = not self.debug_malloc or i + 1 < len(requests)
                r["arena_bytes"] = executor.arenas[rank].nbytes
                if i == 0:
                    r["results_at"] = cursors[rank]
                if settle and i == len(requests) - 1:
                    r["settle_s"] = self.bench.settle_s
        return requests

    def _ask_oracle(self, example: Example, out: Attempt) -> bool:
        try:
            with np.errstate(all="ignore"):
                out.expected.append(self._answer(example))
        except Exception as e:
            where = traceback.format_exc(limit=-3)
            text = f"the oracle raised {type(e).__name__}: {e}\n{where}"
            out.findings.append(Finding("error", "compare", None, text))
            return False
        return True

    def _answer(self, example: Example) -> Mapping[Any, Expected]:
        profile, recall = self.bench.profile, self.bench.recall
        if recall is None:
            return oracle.ask(self.op, example, profile)
        return recall.answer(example, profile, lambda: oracle.ask(self.op, example, profile))

    def _judge(self, example: Example, outcome: Any, expected: Mapping[Any, Expected], out: Attempt) -> Seen:
        seen = observe.observe(example, outcome)
        structural = any(f.reason in judge.STRUCTURE_REASONS for f in seen.findings)
        if not structural:
            try:
                with np.errstate(all="ignore"):
                    judge.compare(example, seen, expected, self.bench.profile)
            except Exception as e:
                where = traceback.format_exc(limit=-3)
                text = f"judging raised {type(e).__name__}: {e}\n{where}"
                seen.findings.append(Finding("error", "compare", None, text))
        if seen.late:
            seen.fail("late_write", "the result still changed after the call had said that it was done", "execute")
        out.findings.extend(seen.findings)
        return seen

    def _note_death(self, executor: Executor | InlineExecutor, bad: Finding, under_way: int) -> None:
        if bad.status == "unsupported" and executor.alive:
            # Their answers would be taken for those of the next problem.
            for _ in range(under_way):
                executor.collect(self.bench.case_timeout_s, self.bench.compile_timeout_s)
            return
        self.hung |= bad.status == "timeout"
        if bad.status in ("crash", "timeout", "oom") or not executor.alive:
            self.deaths += 1
        executor.kill()
        self.suspect = True


def with_seed(problem: Problem, seed: int) -> Problem:
    return replace(problem, seed=seed)
