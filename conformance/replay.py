"""Try one case, or one kept problem, again; as often as asked."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance import backends
from conformance.bench import bench_of
from conformance.collect import UsageError, check_names, find_case
from conformance.diagnosis import Diagnoser
from conformance.engine.bringup import LEVEL
from conformance.engine.effort import EFFORTS, Config, Effort
from conformance.engine.run import run_case
from conformance.model import Case, Problem
from conformance.options import backend_options
from conformance.plugin import told
from conformance.results import EXIT_INCONCLUSIVE, Record, exit_code, verdict_of


def replay_id(case_id: str, backend: str, options: list[str], seed: int, repeat: int, dump: str | None,
              level: str = "full", examples: int | None = None) -> int:
    """Run the case as a run of that level does, on the same problems, `repeat` times. Returns the exit code."""
    check_names("level", [level], EFFORTS)
    effort = EFFORTS[level].with_examples(examples)
    description = None
    if level == LEVEL:
        try:
            description = backends.describe(backend, backend_options(options))
        except backends.BackendUnusable as e:
            print(e)
            return EXIT_INCONCLUSIVE
    case = find_case(case_id, level, description)
    return _replay(case, backend, backend_options(options), seed, repeat, dump, None, effort)


def replay_file(path: Path, backend: str | None, options: list[str], repeat: int, dump: str | None) -> int:
    """Run the one problem of a kept problem.json. Raises UsageError for a file that is none."""
    try:
        note = json.loads(path.read_text())
        problem = Problem.from_json(note["problem"])
        case = find_case(note["id"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        msg = f"{path}: no problem.json of a kept failure: {type(e).__name__}: {e}"
        raise UsageError(msg) from e
    chosen = {**note.get("options", {}), **backend_options(options)}
    # A kept problem runs whatever its size: it did once.
    effort = replace(EFFORTS["full"], max_work=math.inf)
    return _replay(case, backend or note["backend"], chosen, note.get("seed", 0), repeat, dump, problem, effort)


def _replay(case: Case, backend: str, options: dict[str, str], seed: int, repeat: int, dump: str | None,
            problem: Problem | None, effort: Effort) -> int:
    records: list[Record] = []
    where = Path(dump) if dump else Path(tempfile.mkdtemp(prefix="replay-"))
    try:
        with bench_of(backend, options) as bench, contextlib.closing(Diagnoser()) as diagnoser:
            bench.case_timeout_s = effort.call_s
            fixed: dict[str, Any] | None = {case.id: [problem]} if problem else None
            config = Config(bench, effort, seed, where, backend, options, fixed=fixed, diagnose=diagnoser)
            for _ in range(repeat):
                record = run_case(case, config)
                record.verdict = verdict_of(record.status, "none").value
                records.append(record)
    except backends.BackendUnusable as e:
        print(e)
        return EXIT_INCONCLUSIVE
    worst = next((r for r in records if r.status != "pass"), records[0])
    print(told(worst) if worst.status != "pass" else f"pass: {case.id}, {worst.examples.get('executed', 0)} problems")
    if worst.artifacts:
        print(f"in {where}")
    if repeat > 1:
        print(", ".join(f"{n} of {repeat} {status}" for status, n in Counter(r.status for r in records).items()))
    return exit_code(records)
