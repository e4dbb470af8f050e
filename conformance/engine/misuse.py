"""Calls that must be refused, each followed by a good one in the same process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

from conformance.engine import oracle
from conformance.engine.attempt import Attempt, Attempts
from conformance.engine.draw import values_of
from conformance.engine.example import Example
from conformance.engine.executor import Outcome
from conformance.engine.judge import Finding, compare
from conformance.engine.observe import ended_badly, observe
from conformance.engine.variants import every_matching
from conformance.identity import seed_of
from conformance.model import Case, Misuse, Op, Problem

MOST_VALUES = 256
"""combinations of drawn values that are looked at for one that a backend takes"""
ROUNDER, LONG = (64, 128), 32
"""multiples that sizes from LONG on are rounded up to, for backends that take no others"""


def misuse_of(op: Op, name: str) -> Misuse:
    return next(m for m in op.rejects if m.name == name)


def problem_of(case: Case, seed: int, admits: Callable[[Problem], bool] = lambda p: True) -> Problem:
    """The small ordinary problem that the misuse is planted in.

    admits: what a backend can run; of the variants and values that the misuse leaves open the first that are
    admitted, and the plainest where none are.
    """
    return next((p for p in _hosts(case, seed) if admits(p)), next(_hosts(case, seed)))


def _hosts(case: Case, seed: int) -> Iterator[Problem]:
    """The problems that the misuse could be planted in, the plainest first; then those of rounder sizes."""
    op, m = case.op, misuse_of(case.op, case.variant["misuse"])
    sample = {**{n: s.lo for n, s in op.sizes.items()}, **op.sample}
    for step in (1, *ROUNDER):
        sizes = {n: -(-s // step) * step if isinstance(s, int) and s >= LONG else s for n, s in sample.items()}
        for variant in every_matching(op, m.variant):
            choices = dict(values_of(op, variant))
            for values in islice(product(*choices.values()), MOST_VALUES):
                yield Problem(op.name, variant, sizes, dict(zip(choices, values, strict=True)), op.families[0],
                              seed_of(seed, case.id), {}, m.name)


def run_misuse(attempts: Attempts, problem: Problem) -> Attempt:
    """Make the bad call and then a good one; the findings say what was not as it must be."""
    op = attempts.op
    m = misuse_of(op, problem.misuse)
    out = Attempt(problem)
    with attempts.clock.timed("draw"):
        bad = attempts.example(problem, judged=True, overrides=m.overrides)
    executor = attempts.ready(fresh=True)
    with attempts.clock.timed("draw"):
        request = attempts._requests(executor, [bad], settle=False)[0]
    executor.send(request)
    attempts.sent += 1
    with attempts.clock.timed("run"):
        outcome = executor.collect(attempts.limit_s(False), attempts.bench.compile_timeout_s)
    out.examples.append(bad)
    out.findings.extend(_refusal(attempts, m, bad, outcome))
    died = outcome.death is not None or bool(outcome.timed_out)
    if died:
        attempts.deaths += 1
        attempts.suspect = True
    if not out.findings and m.kind != "trap":
        good = attempts.run(problem)
        out.seen, out.digests, out.expected = good.seen, good.digests, good.expected
        before = len(out.examples)
        out.examples.extend(good.examples)
        for f in good.findings:
            if f.example >= 0:
                f.example += before
            f.message = f"after the refused call, a good one: {f.message}"
        out.findings.extend(good.findings)
    return out


def _exceptions(bad: Example, outcome: Outcome) -> list[dict[str, Any]]:
    """What refused the bad call: of a misuse in one step of a sequence, that step only."""
    told = []
    for plan, a in zip(bad.plans, outcome.answers, strict=True):
        if a and "exception" in a and not any(s.refused for s in plan.steps):
            told.append(a["exception"])
        told += [s["refused"] for s in (a or {}).get("steps", ()) if "refused" in s]
    return told


def _other_steps(attempts: Attempts, m: Misuse, bad: Example, outcome: Outcome) -> list[Finding]:
    """The steps around the refused one must be right."""
    seen = observe(bad, outcome)
    if not seen.findings:
        refused = tuple(f"{s.name}/" for plan, a in zip(bad.plans, outcome.answers, strict=True)
                        for s, step in zip(plan.steps, a["steps"], strict=True) if s.refused or "skipped" in step)
        expected = oracle.ask(attempts.op, bad, attempts.bench.profile)
        kept = {key: e for key, e in expected.items()
                if not any(n.startswith(refused) for n in (key if isinstance(key, tuple) else (key,)))}
        # What stands in one key with an output of the refused call can't be judged without it.
        lost = {n for key in expected.keys() - kept.keys() for n in (key if isinstance(key, tuple) else (key,))}
        seen.outputs = {n: a for n, a in seen.outputs.items() if n not in lost and not n.startswith(refused)}
        compare(bad, seen, kept, attempts.bench.profile)
    for f in seen.findings:
        f.message = f"{m.doc}, which was refused; but beside that call: {f.message}"
    return seen.findings


def _refusal(attempts: Attempts, m: Misuse, bad: Any, outcome: Any) -> list[Finding]:
    ended = ended_badly(outcome)
    told = _exceptions(bad, outcome)
    if told and m.kind != "trap" and ended is not None and ended.status in ("crash", "timeout", "oom"):
        # One rank refused, but another one died or hung over the same call.
        ended.message = f"{m.doc}: refused by one rank, but: {ended.message}"
        return [ended]
    if told:
        e = told[0]
        if "Exception" not in e["mro"]:
            return [Finding("fail", "enqueue", "wrong_exception",
                            f"{m.doc}: raised {e['type']}, which callers of `except Exception` don't catch")]
        if m.raises and not set(m.raises) & set(e["mro"]):
            return [Finding("fail", "enqueue", "wrong_exception",
                            f"{m.doc}: raised {e['type']} ({e['message'][:200]}); documented: {' or '.join(m.raises)}")]
        return [] if ended else _other_steps(attempts, m, bad, outcome)
    if ended is not None:
        if m.kind == "trap" and ended.status == "crash":
            return []
        if ended.status == "oom":
            ended = Finding("fail", ended.phase, "no_exception", f"asked for memory first: {ended.message}")
        ended.message = f"{m.doc}: {ended.message}"
        return [ended]
    if m.kind != "limit":
        return [Finding("fail", "enqueue", "no_exception", f"{m.doc}: the call returned as if nothing were wrong")]
    seen = observe(bad, outcome)
    if not seen.findings:
        compare(bad, seen, oracle.ask(attempts.op, bad, attempts.bench.profile), attempts.bench.profile)
    return seen.findings
