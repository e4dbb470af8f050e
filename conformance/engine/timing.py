"""One timed case: blocks of samples, results judged with the buffers that were timed, and what gives a cheat away.

Every block has an executor of its own where starting one is cheap, else two share one. The number
of blocks is settled after the first few. Nothing else runs meanwhile.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.catalogue.peaks import chips
from conformance.engine import judge, observe, oracle
from conformance.engine.attempt import Attempts, Bench, Clock
from conformance.engine.example import Example, place, start_cursors
from conformance.engine.executor import Executor, Outcome
from conformance.engine.grade import Rates, grade, rates_of
from conformance.engine.judge import Finding
from conformance.engine.layout import row_bytes_of
from conformance.engine.leases import Lease
from conformance.engine.limits import problem_limit, support_of, variant_limit
from conformance.engine.timing_clock import ClockChecks, moved_finding
from conformance.engine.timing_data import DataSets, last_bytes, problem_of, some_rows
from conformance.engine.timing_stats import Block, all_high, interval, more_blocks, rank_share
from conformance.identity import seed_of
from conformance.model import Problem
from conformance.results import Record
from conformance.speed import TimedCase

UNSEEN_RATIO = 1.3
"""how much longer data that was never seen before may take than data that was"""
BY_CHANCE, PERHAPS = 1e-5, 0.05
"""error probability of saying that results were kept; up to the other one, more blocks are taken to decide it"""
LAG_SHARE = 0.5
LEAST_LAG_S = 2e-4


@dataclass(frozen=True)
class Plan:
    """How a case is timed."""

    first_blocks: int = 6
    most_blocks: int = 16
    samples: int = 15
    warm_rounds: int = 60
    warm_s: float = 0.5
    """after which a block begins although its warm-up is not steady; it is told how many were"""
    sets: int = 2
    """of buffers on the device, taken in turn"""
    data: int = 3
    """data sets that go round"""
    unseen: int = 2
    """data sets of a block that no call has seen before, for a round each"""
    flush_bytes: int = 0
    """0: twice the chip's cache, 512 MiB where it is not known, 64 MiB on a host"""
    span_s: float = 0.02
    spans: int = 3
    oracle_s: float = 120.0
    """after which no further results are judged, once each data set and one unseen have been"""


HOST_FLUSH_BYTES, FLUSH_BYTES = 64 << 20, 512 << 20


@dataclass
class Measured:
    """What was taken so far."""

    blocks: list[Block] = field(default_factory=list)
    clock: str = ""
    samples: int = 0
    unseen: list[float] = field(default_factory=list)
    """times on data never seen before over the median of their block"""
    places: list[float] = field(default_factory=list)
    """where such a time stands among those of its block, 1 for the longest"""
    in_a_row: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    """seconds that reading results took longer the first time than the second"""
    checks: ClockChecks = field(default_factory=ClockChecks)
    steady: int = 0
    judged: int = 0
    cost: Any = None
    own: Any = None


class TimingRun:
    """Times one case and fills its record."""

    def __init__(self, case: TimedCase, bench: Bench, seed: int, record: Record, clock: Clock,
                 plan: Plan | None = None) -> None:
        self.case, self.bench, self.seed, self.record, self.clock = case, bench, seed, record, clock
        self.plan = plan or bench.timing or Plan()
        self.attempts = Attempts(bench, case.op, clock)
        self.done = Measured()
        self.known: dict[int, Any] = {}
        self.pick = np.random.default_rng(seed_of(seed, case.id, "rows"))
        self.rates: Rates | None = None

    def close(self) -> None:
        self.attempts.close()

    def go(self) -> None:
        record, case = self.record, self.case
        problem = problem_of(case, self.seed)
        reason = self.outside(problem)
        if reason or self.bench.inline:
            record.status = "unsupported" if reason else "skipped"
            record.message = reason or "timing needs --isolation=process"
            record.domain = {"kind": "limit"} if reason else {}
            return
        self.attempts.lease_devices(record)
        self.rates = rates_of(self.bench, self.attempts.care.lease if self.attempts.care else Lease())
        with self.clock.timed("draw"):
            self.sets = DataSets(case, problem, self.bench.description.requirements)
            assert case.speed is not None
            self.done.cost = case.speed.counted(problem, self.sets.first.codes)
            self.done.own = case.speed.own(problem, self.sets.first.codes) if case.speed.own else None
        record.domain = {"sizes": {k: [min(v), max(v)] if isinstance(v, list) else [v, v]
                                   for k, v in problem.sizes.items()}, "families": [problem.family]}
        record.problem = problem.to_json()
        finding = self.measure()
        record.examples = {"executed": self.done.judged, "unsupported": 0}
        if finding is None:
            finding = self.suspicious()
        if len(self.done.blocks) > 1:
            self.describe()
            if finding is None and record.perf and record.perf["verdict"] == "too fast":
                finding = Finding("fail", "compare", "too_fast", record.perf["why"])
        if finding is not None:
            record.status, record.phase, record.message = finding.status, finding.phase, finding.message
            record.reason = finding.reason if finding.status != "error" else None
            return
        record.status, record.message = "pass", self.sentence()

    def outside(self, problem: Problem) -> str:
        """Why the backend does not run this workload, or an empty string."""
        case, description = self.case, self.bench.description
        support = support_of(description, case.op.name)
        if not support.supported:
            return support.reason
        if case.op.ranks not in (1, *description.ranks):
            return f"needs {case.op.ranks} ranks; this backend forms groups of {description.ranks}"
        asked = any(str(row["field"]).endswith(".row_bytes") for row in support.limits)
        rows = row_bytes_of(case.op, problem, description.requirements) if asked else {}
        assert case.of is not None
        return variant_limit(support, case.of) or problem_limit(support, problem, rows)

    # --- blocks -----------------------------------------------------------------------------------------------

    def measure(self) -> Finding | None:
        """Take every block; the first thing that is wrong ends it."""
        plan, done = self.plan, self.done
        total = plan.first_blocks
        self.spread: float | None = None
        self.df = 0
        while len(done.blocks) < total:
            finding = self.block(len(done.blocks))
            if finding is not None:
                return finding
            if len(done.blocks) == plan.first_blocks:
                total, self.spread, self.df = more_blocks(done.blocks, plan.most_blocks)
        for number in range(total, total + plan.most_blocks):
            if not self.kept_perhaps():
                break
            finding = self.block(number)
            # These decide about data never seen before; how long the call takes was settled.
            del done.blocks[total:]
            if finding is not None:
                return finding
        return None

    def kept_perhaps(self) -> bool:
        """Whether unseen data took longer, and neither chance nor certainty explains it yet."""
        chance = all_high(self.done.places)
        return float(np.median(self.done.unseen)) > UNSEEN_RATIO and BY_CHANCE <= chance < PERHAPS

    @property
    def shared(self) -> int:
        """Blocks an executor."""
        return 1 if self.bench.description.fork_after_import else 2

    def block(self, number: int) -> Finding | None:
        """Take one block and judge what it left."""
        executor = self.attempts.ready(fresh=number % self.shared == 0)
        assert isinstance(executor, Executor)
        with self.clock.timed("draw"):
            plan = self.plan
            numbers = [*range(plan.data), *(plan.data + plan.unseen * number + i for i in range(plan.unseen))]
            examples = [self.sets.make(n) for n in numbers]
            requests = self.requests(executor, examples, number)
        executor.send(requests)
        self.attempts.sent += 1
        bench = self.bench
        limit_s = bench.case_timeout_s * (self.plan.warm_rounds + self.plan.samples + 16)
        with self.clock.timed("run"):
            outcome = executor.collect(limit_s, bench.compile_timeout_s)
        bad = observe.ended_badly(outcome)
        if bad is not None:
            self.attempts.suspect = True
            return bad
        answers = [a for a in outcome.answers if a]
        seconds = np.max([a["samples"] for a in answers], axis=0)
        unseen = [i for i, (e, _) in enumerate(self.schedule(number)) if e >= self.plan.data]
        usual = float(np.median(np.delete(seconds, unseen)))
        done = self.done
        done.clock, done.samples = answers[0]["clock"], done.samples + len(seconds) - len(unseen)
        if usual <= 0:
            return Finding("fail", "execute", "too_fast", "the backend's clock says that the call takes no time at all")
        done.blocks.append(Block(number // self.shared, usual))
        done.unseen += [float(seconds[i]) / usual for i in unseen]
        done.places += [rank_share(float(seconds[i]), np.delete(seconds, unseen).tolist()) for i in unseen]
        done.steady += all(a["steady"] for a in answers)
        done.lags.append(max(float(np.median(a["lag"])) for a in answers))
        done.in_a_row.append(max(min(s[1] / s[0] for s in a["spans"]) for a in answers))
        for answer in answers:
            done.checks.note(answer)
            finding = moved_finding(answer)
            if finding is not None:
                return finding
        return self.judge(examples, answers)

    def schedule(self, number: int) -> list[tuple[int, int]]:
        """(data set, whether results are read back) of each round: data go round, a few have data never seen before.

        Results are read back in a random round of each data set, so that no call knows whether it is judged.
        """
        plan = self.plan
        rng = np.random.default_rng(seed_of(self.seed, self.case.id, "rounds", number))
        order = [i % plan.data for i in range(plan.samples)]
        for e in range(plan.unseen):
            order.insert(int(rng.integers(plan.samples // 3, len(order) + 1)), plan.data + e)
        audits = {e: int(rng.choice([i for i, x in enumerate(order) if x == e])) for e in set(order)}
        return [(e, int(audits[e] == i)) for i, e in enumerate(order)]

    def requests(self, executor: Executor, examples: list[Example], number: int) -> list[dict[str, Any]]:
        """A request a rank."""
        ranks = self.case.op.ranks
        cursors = start_cursors(ranks)
        placed = []
        for e in examples:
            e.before, e.after = [], []
            requests = place(e, executor.arenas, cursors)
            last_bytes(e, requests)
            placed.append(requests)
        plan = self.plan
        same = {"cmd": "time", "block": number, "timed": self.timed_steps(examples[0]), "sets": plan.sets,
                "hold": False, "schedule": self.schedule(number), "warm_rounds": plan.warm_rounds,
                "warm_s": plan.warm_s, "warm_data": plan.data, "flush_bytes": self.flush_bytes(),
                "span_s": plan.span_s, "spans": plan.spans,
                "steps": [{"op": s["op"]} for s in placed[0][0]["steps"]]}
        return [{**same, "examples": [p[rank] for p in placed], "arena_bytes": executor.arenas[rank].nbytes,
                 "results_at": cursors[rank]} for rank in range(ranks)]

    def timed_steps(self, example: Example) -> list[int]:
        names = [s.name for s in example.plans[0].steps]
        calls = [s.call.op for s in example.plans[0].steps]
        assert self.case.speed is not None
        if self.case.speed.timed:
            return [i for i, n in enumerate(names) if n in self.case.speed.timed]
        return list(range(calls.index(self.case.op.name), len(names)))

    def flush_bytes(self) -> int:
        if self.plan.flush_bytes:
            return self.plan.flush_bytes
        if self.bench.description.peaks.get("sizes") == "small":
            return HOST_FLUSH_BYTES
        chip = chips().get(self.rates.chip) if self.rates else None
        return int(2 * chip.cache_mb * 2**20) if chip and chip.cache_mb else FLUSH_BYTES

    # --- results ----------------------------------------------------------------------------------------------

    def judge(self, examples: list[Example], answers: list[Mapping[str, Any]]) -> Finding | None:
        """Every result that was read back, by the oracle of its own data."""
        by_round = [{b["round"]: b for b in a["readbacks"]} for a in answers]
        enough = self.clock["oracle"] + self.clock["compare"] > self.plan.oracle_s
        for index in by_round[0]:
            parts = [b[index] for b in by_round]
            number = parts[0]["example"]
            if enough and (number in self.known or number > self.plan.data) and self.done.judged > self.plan.data:
                continue
            finding = self.judge_one(examples[number], Outcome(list(parts)), number)
            self.done.judged += 1
            if finding is not None:
                return finding
        return None

    def judge_one(self, example: Example, outcome: Outcome, number: int) -> Finding | None:
        assert self.case.speed is not None
        profile = self.bench.profile
        try:
            with self.clock.timed("compare"), np.errstate(all="ignore"):
                seen = observe.observe(example, outcome)
                if seen.late:
                    seen.fail("late_write", "the result still changed after the clock had stopped", "execute")
            if not seen.findings:
                part, few = some_rows(self.case.speed, example, seen, self.pick)
                whole = part is example and number < self.plan.data
                with self.clock.timed("oracle"), np.errstate(all="ignore"):
                    expected = self.known.get(number) if whole else None
                    if expected is None:
                        expected = oracle.ask(self.case.op, part, profile)
                    self.known[number] = expected if whole and self.sets.nbytes < 1 << 26 else None
                with self.clock.timed("compare"), np.errstate(all="ignore"):
                    judge.compare(part, few, expected, profile)
                    seen = few
        except Exception as e:
            text = f"judging a timed result raised {type(e).__name__}: {e}\n{traceback.format_exc(limit=-3)}"
            return Finding("error", "compare", None, text)
        self.record.numerics = seen.numerics or self.record.numerics
        worst = next(iter(seen.findings), None)
        if worst is not None:
            worst.message = "after timing, on the buffers that were timed: " + worst.message
        return worst

    # --- what gives a cheat away ------------------------------------------------------------------------------

    def suspicious(self) -> Finding | None:
        """What only shows over all blocks."""
        done = self.done
        if not done.blocks:
            return None
        # One time alone may be long for any reason; that it is among the longest of every block has only one.
        if float(np.median(done.unseen)) > UNSEEN_RATIO and all_high(done.places) < BY_CHANCE:
            return Finding("fail", "execute", "too_fast",
                           f"on data that it has never seen the call takes {float(np.median(done.unseen)):.3g} times "
                           f"as long: results are kept instead of computed")
        usual = float(np.median([b.median_s for b in done.blocks]))
        wrong = done.checks.finding(done.clock, usual)
        if wrong is not None:
            return wrong
        lag = float(np.median(done.lags))
        if lag > LEAST_LAG_S and lag > LAG_SHARE * usual:
            return Finding("fail", "execute", "too_fast",
                           f"looking at the result took {lag:.3g} s longer the first time than the second, where the "
                           f"call was timed at {usual:.3g} s: work is done behind the clock")
        return None

    def describe(self) -> None:
        """The figures of the record."""
        done, case = self.done, self.case
        assert self.rates is not None
        assert case.workload is not None
        found = interval(done.blocks, self.spread, self.df)
        perf: dict[str, Any] = {
            "workload": case.workload.name, "scale": case.workload.scale, "clock": done.clock,
            "time_s": found.time_s, "low_s": found.low_s, "high_s": found.high_s, "half_width": found.half_width,
            "unstable": found.unstable, "blocks": found.blocks, "executors": found.executors, "samples": done.samples,
            "process_spread": found.process_spread, "steady_blocks": done.steady,
            "block_medians_s": [b.median_s for b in done.blocks],
            "in_a_row_s": float(np.median(done.in_a_row)), "unseen_ratio": float(np.median(done.unseen)),
            "flush_bytes": self.flush_bytes(), "judged": done.judged, "load": round(os.getloadavg()[0], 2),
        }
        perf |= grade(found, done.cost, done.own, case, self.rates)
        self.record.perf = perf

    def sentence(self) -> str:
        perf = self.record.perf
        assert perf is not None
        text = f"{perf['time_s']:.3g} s [{perf['low_s']:.3g}, {perf['high_s']:.3g}] by the {perf['clock']} clock"
        return text + (f"; unstable: half-width {perf['half_width']:.0%}" if perf["unstable"] else "")
