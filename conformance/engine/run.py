"""One case from its first draw to its record."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from conformance.engine import comparability, draw, kept_outputs, misuse, relations, tiles
from conformance.engine.attempt import Attempt, Attempts, Clock
from conformance.engine.care import Losses
from conformance.engine.checks import CHECKS, Check, counted
from conformance.engine.clock import monotonic
from conformance.engine.compiled import refusal, run_compile
from conformance.engine.devices import DeviceGone, TooFewDevices
from conformance.engine.diagnose import Further, further
from conformance.engine.effort import Config
from conformance.engine.evidence import Evidence, evidence_of
from conformance.engine.executor import BackendBroken
from conformance.engine.judge import Finding, rejected_share
from conformance.engine.keep import keep
from conformance.engine.layout import row_bytes_of
from conformance.engine.limits import problem_limit, support_of, variant_limit
from conformance.engine.patterns import pattern_of
from conformance.engine.shrink import Shrinker
from conformance.engine.timing import TimingRun
from conformance.identity import seed_of
from conformance.model import Case, Problem
from conformance.results import Record
from conformance.speed import TimedCase

DIAGNOSED = ("values", "layout", "degenerate")
"""checks whose failures are of one call and show in its values"""
AFTER_THE_CALL = ("execute", "compare", "teardown")
MAX_UNSUPPORTED = 256
"""drawn problems in a row outside the limits, after which a case is unsupported"""

REPEATS_OF_CHANCE, ENOUGH_OF_CHANCE = 3, 2
"""other data that what only statistics reject is tried with, and how many of them have to show it too"""


def run_case(case: Case, config: Config) -> Record:
    """Try one case and say how it went. Raises nothing but interrupts.

    A case that lost its device for good is tried once more, on another one.
    """
    clock, losses = Clock(), Losses(config.bench.devices, case.op.ranks)
    started, begun = time.time(), monotonic()
    while True:
        record = Record(case.id, case.op.module, case.op.name, dict(case.variant), case.check, config.effort.level,
                        "error", seed=config.seed, backend=config.backend, started=started,
                        attempt=losses.attempts + 1)
        runner = TimingRun(case, config.bench, config.seed, record, clock) if isinstance(case, TimedCase) else _CaseRun(
            case, config, record, clock)
        try:
            try:
                runner.go()
            finally:
                runner.close()
        except TooFewDevices as e:
            record.status, record.message = "not_run", str(e)
        except DeviceGone as e:
            if losses.again(e, runner.attempts):
                continue
            losses.tell(record)
        except BackendBroken as e:
            if losses.elsewhere(e, runner.attempts):
                continue
            record.status, record.phase, record.message = "error", "collect", str(e)
        except Exception as e:
            text = f"the suite failed: {type(e).__name__}: {e}\n{traceback.format_exc()}"
            record.status, record.message = "error", text
        break
    losses.note(record)
    record.duration_s = {k: round(v, 6) for k, v in clock.items()}
    record.finished = started + monotonic() - begun  # by the clock of its parts, which may be a simulated one
    record.replay = ["conformance", "replay", case.id, f"--backend={config.backend}", f"--seed={config.seed}",
                     f"--level={config.effort.level}",
                     *([f"--examples={config.effort.examples}"] if config.effort.redrawn else []),
                     *(f"--backend-option={k}={v}" for k, v in config.options.items())]
    return record


class _CaseRun:
    def __init__(self, case: Case, config: Config, record: Record, clock: Clock) -> None:
        self.case, self.config, self.record, self.clock = case, config, record, clock
        self.check: Check = CHECKS[case.check]
        self.attempts: Attempts | None = None
        self.support = support_of(config.bench.description, case.op.name)
        self.lineage: list[Problem] = []
        self.related = relations.relation_of(case) is not None
        self.compared = False
        """whether a relation had anything to compare yet"""
        self.asides: dict[str, str] = {}
        """what a reader should know and no verdict hangs on, by kind"""
        self.across: list[Problem] = []
        """problems that cross the backend's own tiles, beside those that all backends share"""
        self.unwatched = False
        """whether memory that the callee allocated went unwatched"""

    def close(self) -> None:
        if self.attempts is not None:
            self.attempts.close()

    def go(self) -> None:
        case, config, record = self.case, self.config, self.record
        apart = refusal(case.check, config.bench.description.platform)
        if apart or case.check == "compile":
            self.compile_only(apart)
            return
        with self.clock.timed("draw"):
            if case.check == "rejects":
                # The digest is of what all backends share; some have to plant the misuse in another variant.
                record.draws_sha256 = draw.digest([misuse.problem_of(case, config.seed)])
                first = [misuse.problem_of(case, config.seed, lambda p: not self.outside(p))]
            elif not config.effort.drawn:
                first = draw.explicit(self.drawn_case, config.seed)
                record.draws_sha256 = draw.digest(first)
            else:
                first = self.chunk(0)
                record.draws_sha256 = draw.digest(first)
        reason = self.support.reason if not self.support.supported else variant_limit(self.support, case.variant)
        if not reason and case.op.ranks not in (1, *config.bench.description.ranks):
            reason = f"needs {case.op.ranks} ranks; this backend forms groups of {config.bench.description.ranks}"
        if config.bench.inline and case.op.ranks > 1:
            record.status, record.message = "skipped", "a group of ranks needs --isolation=process"
            return
        if reason:
            record.status, record.message = "unsupported", reason
            record.domain = {"kind": self.support.kind if not self.support.supported else "limit"}
            return
        missing = config.bench.unusable.get(case.op.module)
        if missing:
            record.status, record.message = "not_run", missing
            return
        self.attempts = Attempts(config.bench, case.op, self.clock, debug_malloc=self.check.debug_malloc)
        self.attempts.lease_devices(record)
        if config.fixed is None and config.effort.drawn:
            self.across = [p for p in tiles.problems(case, self.support.tiles, config.seed)
                           if not self.outside(p) and config.effort.admits(case.op, p)]
        executed, skipped, outside = 0, 0, ""
        for problem in self.problems(first):
            if executed >= self.enough() or skipped >= MAX_UNSUPPORTED:
                break
            outside = self.outside(problem)
            # A misuse stands in the op's sample, which is small by declaration.
            large = case.check != "rejects" and not config.effort.admits(case.op, problem)
            if outside or large:
                skipped += 1
                continue
            last = executed + 1 == self.wanted + len(self.across)
            attempt = self.attempt(problem, settle=self.check.settle_last and last)
            worst = self.worst(attempt)
            if worst is not None and worst.status == "unsupported":
                # This runtime can't express a tensor of this problem; others it may.
                outside = worst.message
                skipped += 1
                continue
            executed += 1
            self.note(attempt)
            if config.watch is not None:
                config.watch(attempt)
                continue
            stands = self.stands(attempt)
            if stands is not None:
                self.failed(stands)
                break
            self.lineage.append(problem)
        record.examples = {"executed": executed, "unsupported": skipped}
        if not executed:
            # Too large for the level says nothing about the backend.
            record.status = "unsupported" if outside else "skipped"
            record.message = outside or "no drawn problem is small enough for this level"
        elif record.status == "error" and not record.message:
            self.passed()
        record.message = "\n".join(filter(None, (record.message, *self.asides.values())))

    def compile_only(self, apart: str) -> None:
        """The check `compile`, or why a check does not apply to this platform."""
        case, config, record = self.case, self.config, self.record
        reason = apart or (self.support.reason if not self.support.supported
                           else variant_limit(self.support, case.variant))
        if reason:
            record.status, record.message = "unsupported", reason
            kind = "by_design" if apart else "limit" if self.support.supported else self.support.kind
            record.domain = {"kind": kind}
            return
        self.attempts = Attempts(config.bench, case.op, self.clock)
        self.attempts.lease_devices(record)
        record.domain = {"limits": [dict(r) for r in self.support.limits]}
        run_compile(case, record, self.attempts, config.seed, config.run_dir, self.clock, confirm=config.confirm)

    def outside(self, problem: Problem) -> str:
        """Which of the backend's limits the problem is outside of, or an empty string."""
        asked = any(str(row["field"]).endswith(".row_bytes") for row in self.support.limits)
        rows = row_bytes_of(self.case.op, problem, self.config.bench.description.requirements) if asked else {}
        return problem_limit(self.support, problem, rows)

    @property
    def wanted(self) -> int:
        return self.config.effort.problems_of(self.case)

    def enough(self) -> int:
        """How many problems: more than asked for while none of them could have failed."""
        n = self.wanted + len(self.across)
        vacuous = (self.must_be_able_to_fail() and not self.record.vacuity) or (self.related and not self.compared)
        return n * 4 if vacuous else n

    def must_be_able_to_fail(self) -> bool:
        return self.case.check in ("values", "layout") and any(draw.arrays_of(self.case.op))

    @property
    def drawn_case(self) -> Case:
        """The case whose problems are drawn: a relation or misuse draws those of its op's variant."""
        return relations.drawn_case(self.case)

    def chunk(self, index: int) -> list[Problem]:
        """Drawn problems, a chunk at a time."""
        recall = self.config.bench.recall
        return (recall.chunk if recall else draw.chunk)(self.drawn_case, self.config.seed, index)

    def problems(self, first: list[Problem]) -> Iterator[Problem]:
        if self.case.check == "rejects":
            return iter(first)
        if self.config.fixed is not None:
            return iter(self.config.fixed.get(self.case.id, []))
        if not self.config.effort.drawn:
            return iter(first)
        later = (self.chunk(i) for i in range(1, 64))
        return chain(self.across, draw.explicit(self.drawn_case, self.config.seed), first, chain.from_iterable(later))

    def attempt(self, problem: Problem, *, fresh: bool = False, settle: bool = False,
                shrinking: bool = False) -> Attempt:
        assert self.attempts is not None
        if self.case.check == "rejects":
            return misuse.run_misuse(self.attempts, problem)
        plan, relate, compared = relations.plan_of(self.case, self.check)
        out = self.attempts.run(problem, fresh=fresh, settle=settle, shrinking=shrinking, plan=plan, relate=relate)
        out.compared = compared()
        return out

    def note(self, attempt: Attempt) -> None:
        self.compared |= attempt.compared
        self.unwatched |= any(s.callee_allocates and not s.pool_watched for s in attempt.seen)
        self.config.log_problem({"id": self.case.id, "problem": attempt.problem.to_json(), **attempt.digests})
        sizes = self.record.domain.setdefault("sizes", {})
        for name, n in attempt.problem.sizes.items():
            lo, hi = (min(n), max(n)) if isinstance(n, list) else (n, n)
            old = sizes.get(name, [lo, hi])
            sizes[name] = [min(old[0], lo), max(old[1], hi)]
        self.record.domain["limits"] = [dict(r) for r in self.support.limits]
        if not self.record.vacuity and len(attempt.seen) > 1 and not attempt.findings:
            with self.clock.timed("compare"):
                self.record.vacuity = rejected_share(attempt.expected[1], attempt.seen[0])
        if self.case.check == "values":
            with self.clock.timed("compare"):
                if self.config.criteria:
                    comparability.note(self.record, attempt, self.config.reference_run)
            self.keep_outputs(attempt)
        for seen in attempt.seen[-1:]:
            for output, figures in seen.numerics.items():
                mine = self.record.numerics.setdefault(output, {"elements": 0})
                mine["elements"] += figures["elements"]
                if figures.get("worst_ratio", 0) >= mine.get("worst_ratio", 0):
                    mine.update({k: v for k, v in figures.items() if k != "elements"})
            self.record.numerics.setdefault("_", {"elements": 0})["elements"] += seen.elements

    def keep_outputs(self, attempt: Attempt) -> None:
        """Where they are asked for. What can't be kept changes no verdict; it is said at the end."""
        try:
            if self.config.keep_outputs:
                kept_outputs.store(self.config.run_dir, self.case.id, attempt)
        except OSError as e:
            self.asides["kept"] = f"outputs could not be kept: {e.strerror or e}"

    def passed(self) -> None:
        record = self.record
        elements = record.numerics.pop("_", {"elements": 0})["elements"]
        record.status = "pass"
        if not elements and self.case.check not in ("degenerate", "rejects"):
            record.status, record.message = "mistrusted", "no element was judged, so this could not have failed"
        elif self.related and not self.compared:
            record.status, record.message = "mistrusted", "no problem gave the two runs anything to compare"
        elif self.case.check == "memory" and self.unwatched:
            record.status = "mistrusted"
            record.message = "this backend can't fill what callees allocate: an element left unwritten would not show"
        elif self.must_be_able_to_fail() and not record.vacuity:
            record.status = "mistrusted"
            record.message = "results of other data would have passed in every problem: this could not have failed"

    def failed(self, attempt: Attempt) -> None:
        """Confirm alone, shrink, keep, and tell."""
        first = attempt.problem
        worst = self.worst(attempt)
        assert worst is not None
        if not self.config.confirm:
            self.tell(worst, worst.status, attempt, first, "")
            return
        seen = self.evidence(attempt, worst)
        alone = self.attempt(first, fresh=True, settle=True)
        again = self.worst(alone)
        story = ""
        if again is None:
            story, again, alone = self.only_in_sequence(attempt)
        if again is None and worst.outside:
            self.tell(worst, "error", attempt, first, f"something outside may have killed it: {story}; run it again")
            return
        if again is None:
            self.tell(worst, "flaky", attempt, first, story)
            return
        if worst.reason in ("unwritten", "numeric", "nonfinite") and again.reason == "late_write":
            worst = again
        if story:
            self.tell(again, again.status, alone, first, story)
            return
        minimal = first if self.case.check == "rejects" else self.shrink(first, again)
        final = alone if minimal == first else self.attempt(minimal, fresh=True, settle=again.reason == "late_write")
        found = self.worst(final)
        if found is None or found.bug != again.bug:
            final, found = alone, again
        self.tell(found, found.status, final, first, self.diagnosed(self.evidence(final, found), seen))

    def evidence(self, attempt: Attempt, finding: Finding) -> Evidence | None:
        """What a diagnosis goes by, while the arrays stand; None where none is wanted, or none can be made."""
        if self.config.diagnose is None or self.case.check not in DIAGNOSED:
            return None
        with contextlib.suppress(Exception):  # no verdict hangs on a diagnosis
            return evidence_of(attempt, finding)
        return None

    def diagnosed(self, small: Evidence | None, first: Evidence | None) -> str:
        """What kind of fault it may be, in a line; empty where nothing can be said."""
        if small is None or self.config.diagnose is None:
            return ""
        told = None
        with self.clock.timed("diagnose"), contextlib.suppress(Exception):  # no verdict hangs on a diagnosis
            told = self.config.diagnose(self.case.op, *self.asked_of(small, first), self.support.tiles.values())
        if told is None:
            return ""
        self.record.diagnosis = told.to_json()
        return f"diagnosis: {told.sentence()}"

    def asked_of(self, small: Evidence, first: Evidence | None) -> tuple[list[Evidence], Further | None]:
        """The evidence of a failure, and more problems that the backend may be asked about."""
        more = [first] if first is not None and first.example.problem != small.example.problem else []
        problems = [p for p in (*self.chunk(0), *draw.explicit(self.drawn_case, self.config.seed))
                    if p != small.example.problem and not self.outside(p)
                    and self.config.effort.admits(self.case.op, p)]
        return [small, *more], further(self.config.bench, self.case.op, problems)

    def stands(self, attempt: Attempt) -> Attempt | None:
        """The failure that counts, or None. What only statistics say has to show with two of three other data."""
        worst = self.worst(attempt)
        if worst is None:
            return None
        if not worst.by_chance:
            return attempt
        seeds = [seed_of(attempt.problem.seed, "again", i) for i in range(REPEATS_OF_CHANCE)]
        again = [self.attempt(replace(attempt.problem, seed=s)) for s in seeds]
        failed = [a for a in again if self.worst(a) is not None]
        certain = [a for a in failed if not self.worst(a).by_chance]
        if certain or len(failed) >= ENOUGH_OF_CHANCE:
            return (certain or failed)[0]
        seed, sentence = attempt.problem.seed, worst.message.partition("\n")[0]
        told = f"taken for chance, as {len(failed)} of {REPEATS_OF_CHANCE} other data show it: {sentence} (seed {seed})"
        self.asides[f"chance at {seed}"] = told
        return None

    def worst(self, attempt: Attempt) -> Finding | None:
        found = replace(attempt, findings=counted(self.check, attempt.findings)).worst
        if found is not None and self.check.debug_malloc and found.bug == ("crash", "signal") and (
                found.phase in AFTER_THE_CALL and not found.outside):
            text = "the call wrote outside a block of memory: after it had returned, with the heap being watched, "
            return replace(found, status="fail", reason="oob_write", message=text + found.message)
        return found

    def only_in_sequence(self, attempt: Attempt) -> tuple[str, Finding | None, Attempt]:
        """A failure that does not show alone: does it show after the calls that came before?"""
        assert self.attempts is not None
        self.attempts.ready(fresh=True)
        for before in self.lineage[-20:]:
            self.attempt(before)
        again = self.attempt(attempt.problem)
        found = self.worst(again)
        if found is None:
            return "it showed once, neither alone nor after the same calls again", None, attempt
        self.record.lineage = [str(p.to_json()) for p in self.lineage[-20:]]
        return f"it shows only after other calls ({len(self.record.lineage)} before it)", found, again

    def shrink(self, problem: Problem, bug: Finding) -> Problem:
        assert self.attempts is not None
        attempts, start, recovered_s = self.attempts, self.attempts.deaths, self.attempts.recovering_s

        def fails(candidate: Problem) -> bool:
            if self.outside(candidate):
                return False
            # Every example of a failing case gets a process of its own: state of the call before can't help it.
            settle = bug.reason == "late_write"
            found = self.worst(self.attempt(candidate, fresh=True, settle=settle, shrinking=True))
            return found is not None and found.bug == bug.bug

        with self.clock.timed("shrink"):
            return Shrinker(self.case.op, fails, problem, monotonic() + self.config.effort.shrink_s,
                            lambda: attempts.deaths - start, lambda: attempts.recovering_s - recovered_s).run()

    def tell(self, finding: Finding, status: str, attempt: Attempt, first: Problem, story: str) -> None:
        record, config = self.record, self.config
        record.status, record.phase = status, finding.phase
        record.reason = finding.reason if status != "error" else None
        record.problem = attempt.problem.to_json()
        where = ""
        if finding.judgement is not None and finding.judgement.bad.any():
            where = f"\nwrong: {pattern_of(finding.judgement.bad)}"
        text = f"{finding.message}{where}" + (f"\n{story}" if story else "")
        record.message = text
        for seen in attempt.seen[-1:]:
            told = {name: row["criteria"] for name, row in record.numerics.items() if "criteria" in row}
            mine = {name: {**row, **({"criteria": told[name]} if name in told else {})}
                    for name, row in seen.numerics.items()}
            record.numerics = mine or record.numerics
        record.numerics.pop("_", None)
        if not config.confirm:
            return
        try:
            record.artifacts = keep(config.run_dir, self.case.id, attempt, finding, first=first.to_json(),
                                    seed=config.seed, backend=config.backend, options=config.options, message=text,
                                    requirements=dict(config.bench.description.requirements))
        except (OSError, ValueError, LookupError, TypeError) as e:
            # What is wrong was found before: no verdict hangs on its evidence.
            why = getattr(e, "strerror", None) or f"{type(e).__name__}: {e}"
            record.message += f"\nthe evidence could not be kept: {why}; the replay command makes it again"
