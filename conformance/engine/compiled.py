"""The check `compile`: one program, compiled for the backend's target in a child process; nothing is run.

What can't have come from this very program is no pass: an artefact without bytes, one without the entry that was asked
for (each call asks for a new name, so a cache's stale artefact lacks it), and one whose code never touches an array
of the call (a program that was lowered to nothing).
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.engine.attempt import Attempts, Clock
from conformance.engine.draw import digest as digest_of
from conformance.engine.draw import values_of
from conformance.engine.example import build
from conformance.engine.executor import Outcome
from conformance.engine.judge import Finding
from conformance.engine.layout import RankPlan
from conformance.engine.observe import ended_badly
from conformance.engine.variants import matching
from conformance.identity import seed_of
from conformance.model import COMPILER, Case, Problem
from conformance.protocol import arg_to_json
from conformance.results import Record

ONLY_COMPILES = "this backend compiles and runs nothing; only the check `compile` applies to it"
RUNS = "this backend runs what it compiles; the check `compile` is for backends of platform compiler"
MOST_MESSAGE = 4000


def refusal(check: str, platform: str) -> str:
    """Why a check does not apply to a backend of this platform, or an empty string."""
    if (check == "compile") == (platform == COMPILER):
        return ""
    return RUNS if check == "compile" else ONLY_COMPILES


def problem_of(case: Case, seed: int) -> Problem:
    """The small ordinary problem whose arguments the program is compiled for."""
    variant = matching(case.op, dict(case.variant))
    values = {name: choices[0] for name, choices in values_of(case.op, variant)}
    sizes = {**{n: s.lo for n, s in case.op.sizes.items()}, **case.op.sample}
    return Problem(case.op.name, variant, sizes, values, case.op.families[0], seed_of(seed, case.id))


def run_compile(case: Case, record: Record, attempts: Attempts, seed: int, run_dir: Path, clock: Clock,
                *, confirm: bool = True) -> None:
    """Compile the case's program and write into the record how that went."""
    problem = problem_of(case, seed)
    record.draws_sha256 = digest_of([problem])
    with clock.timed("draw"):
        plan = build(case.op, problem, attempts.bench.description.requirements).plans[0]
    found = _once(case, plan, attempts, record, clock)
    if found is not None and confirm:
        again = _once(case, plan, attempts, record, clock, fresh=True)
        if again is None:
            found = replace(found, status="error" if found.outside else "flaky",
                            message=f"{found.message}\nit showed once, and not when compiled again in a new process")
        else:
            found = again
    record.examples = {"executed": 1, "unsupported": 0}
    if found is None:
        record.status = "pass"
        return
    record.status, record.phase, record.message = found.status, found.phase, found.message
    record.reason = None if found.status in ("error", "mistrusted") else found.reason
    record.problem = problem.to_json()
    if confirm:
        record.artifacts = _keep(run_dir, case, record)


def _once(case: Case, plan: RankPlan, attempts: Attempts, record: Record, clock: Clock, *,
          fresh: bool = False) -> Finding | None:
    step = plan.steps[0]
    entry = f"k{secrets.token_hex(8)}"
    request = {"cmd": "compile", "op": step.call.op, "entry": entry,
               "args": {n: arg_to_json(a) for n, a in step.call.args.items()}}
    executor = attempts.ready(fresh)
    executor.send([request])
    with clock.timed("compile"):
        outcome = executor.collect(attempts.bench.case_timeout_s, attempts.bench.compile_timeout_s)
    answer = outcome.answers[0]
    if outcome.death is not None or outcome.timed_out:
        attempts.deaths += 1
        executor.kill()
    if answer is None or "artefact" not in answer:
        return _refused(outcome)
    record.artefact = answer["artefact"]
    arrays = {a.arg.name for a in plan.arrays.values()}
    return judged(record.artefact, entry, arrays)


def _refused(outcome: Outcome) -> Finding:
    found = ended_badly(outcome)
    assert found is not None
    if found.reason == "exception":
        e = outcome.answers[0]["exception"]  # type: ignore[index]
        text = f"{e['type']}: {e['message']}"
        cut = text if len(text) <= MOST_MESSAGE else f"{text[:MOST_MESSAGE // 4]}\n...\n{text[-MOST_MESSAGE:]}"
        return Finding("fail", "compile", "compile", f"it does not compile: {cut}")
    return found


def judged(artefact: dict[str, Any], entry: str, arrays: set[str]) -> Finding | None:
    """What is wrong with an artefact, whose program must touch all these arrays."""
    if not artefact["nbytes"]:
        return Finding("fail", "compile", "compile", "the compiler reported success and made an empty artefact")
    if not artefact["named"]:
        return Finding("fail", "compile", "compile", f"the artefact has no entry {entry}, which this compile was asked "
                       "for: it was made from another program, by a stale cache for one")
    if artefact["uses"] is None:
        return Finding("mistrusted", "compile", None, "the backend does not tell which arguments the code uses: a "
                       "program lowered to nothing would not show")
    untouched = sorted(arrays - set(artefact["uses"]))
    if untouched:
        return Finding("fail", "compile", "compile", f"the compiled code never touches {', '.join(untouched)}: "
                       "the program, or a part of it, was lowered to nothing")
    return None


def _keep(run_dir: Path, case: Case, record: Record) -> str | None:
    """The compiler's words in full, beside the record; None where no disk takes them."""
    from conformance.identity import slug

    folder = Path("artifacts") / slug(case.id)
    try:
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
        log = (record.artefact or {}).get("log", "")
        (run_dir / folder / "compile.log").write_text(f"{case.id}\n{record.message}\n{log}\n")
    except OSError as e:
        record.message += f"\nthe compiler's log could not be kept: {e.strerror}"
        return None
    return str(folder)
