"""Reads runs for a report: what a column is called, what was planned, what can't be trusted.

A run directory is data from elsewhere. Nothing in it is executed, every field is
taken by kind, and whatever can't be used ends as a note a reader sees.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance.engine.limits import support_of
from conformance.foreign import BadLine, changed_files, numbered_lines, plain_files
from conformance.identity import matches, parse_id
from conformance.protocol import Description, Support, description_from_json
from conformance.results import Record, Run, Status, read_run, verdict_of


@dataclass(frozen=True)
class Claim:
    """What a verdict is relative to: every case of these ops at this level."""

    name: str
    level: str
    ops: tuple[str, ...]
    """names, or prefixes with `*`"""

    def requires(self, op: str) -> bool:
        return any(matches(q, op) for q in self.ops)


@dataclass(frozen=True)
class RunInfo:
    """The fields of run.json; an absent one is empty."""

    schema_version: int
    suite_version: str
    commit: str
    command: tuple[str, ...]
    seed: int
    level: str
    claim: Claim | None
    host: Mapping[str, Any]
    device: str
    backend: str
    description: Description | None
    versions: Mapping[str, str]
    planned: tuple[str, ...]
    started: float
    finished: float
    closed: bool

    @property
    def platform(self) -> str:
        return self.description.platform if self.description else ""

    def support(self, op: str) -> Support | None:
        """What the backend declares of an op; None where its description is not known."""
        return support_of(self.description, op) if self.description else None


@dataclass(frozen=True)
class LoadedRun:
    """One column of a report. `notes` are sentences on what is missing or was left out."""

    label: str
    path: Path
    info: RunInfo
    records: tuple[Record, ...]
    notes: tuple[str, ...]
    edited: bool = False
    """files are not what they were when the run was closed: nothing in them proves that it conforms"""

    @property
    def cut_off(self) -> bool:
        return not self.info.closed


def op_of(record: Record) -> str:
    """`module.name` of a record, from its id."""
    return parse_id(record.id)[0]


def module_of(op: str) -> str:
    return op.partition(".")[0]


def load_runs(paths: Sequence[Path]) -> list[LoadedRun]:
    """Every run, in the order given, each under a label of its own.

    Raises FileNotFoundError for a path that is no run directory.
    """
    runs = [_load(Path(p)) for p in paths]
    labels = [r.label for r in runs]
    taken: dict[str, int] = {}
    unique = []
    for run in runs:
        label = run.label if labels.count(run.label) == 1 else f"{run.label} ({run.path.resolve().name})"
        taken[label] = taken.get(label, 0) + 1
        unique.append(replace(run, label=label if taken[label] == 1 else f"{label} #{taken[label]}"))
    return unique


def _load(path: Path) -> LoadedRun:
    run = read_run(path)
    notes: list[str] = []
    info = _info(run, notes)
    records: dict[str, Record] = {}
    for record in run.records.values():
        try:
            parse_id(record.id)
        except ValueError as e:
            run.bad.append(BadLine("results", 0, str(e)))
        else:
            records[record.id] = record
    lost = _add_lost(info, records, run.bad)
    changed = changed_files(path)
    notes += [f"{b.file} was {b.why}" if b.why.endswith("closed") else f"{b.file}: {b.why}" for b in changed]
    if not info.closed:
        notes.append(f"cut off: the run was not closed, {lost} of {len(info.planned)} planned cases have no result")
    elif lost:
        notes.append(f"{lost} of {len(info.planned)} planned cases have no result")
    notes += [f"{b.file}{f' line {b.line}' if b.line else ''} left out: {b.why}" for b in run.bad]
    label = (info.description.name if info.description else info.backend) or path.resolve().name
    if info.platform not in ("", "silicon"):
        label += f" ({info.platform})"
    ordered = tuple(sorted(records.values(), key=lambda r: r.id))
    return LoadedRun(label, path, info, ordered, tuple(notes), bool(changed))


def _add_lost(info: RunInfo, records: dict[str, Record], bad: list[BadLine]) -> int:
    """Gives every planned case without a result a `not_run` record; returns how many."""
    lost = 0
    for case in info.planned:
        if case in records:
            continue
        try:
            op, check, keys = parse_id(case)
        except ValueError as e:
            bad.append(BadLine("run.json", 0, f"planned: {e}"))
            continue
        lost += 1
        required = info.claim is not None and info.claim.requires(op)
        records[case] = Record(
            case,
            module_of(op),
            op,
            keys,
            check,
            info.level,
            Status.NOT_RUN.value,
            backend=info.backend,
            verdict=verdict_of("not_run", "none", required=required).value,
            message="planned, but no result was written",
        )
    return lost


def _of(kind: type, value: Any, default: Any) -> Any:
    return value if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool) else default


def _info(run: Run, notes: list[str]) -> RunInfo:
    raw = run.info
    command = raw.get("command", ())
    backends = sorted({r.backend for r in run.records.values() if r.backend})
    return RunInfo(
        schema_version=_of(int, raw.get("schema_version"), 0),
        suite_version=_of(str, raw.get("suite_version"), ""),
        commit=_of(str, raw.get("commit"), ""),
        command=(command,) if isinstance(command, str) else tuple(map(str, _of(list, command, ()))),
        seed=_of(int, raw.get("seed"), 0),
        level=_of(str, raw.get("level"), ""),
        claim=_claim(raw.get("claim"), _of(str, raw.get("level"), ""), notes),
        host=_of(dict, raw.get("host"), {}) or {"name": _of(str, raw.get("host"), "")},
        device=_of(str, raw.get("device"), "") or ", ".join(map(str, _of(list, raw.get("device"), ()))),
        backend=_of(str, raw.get("backend"), "") or ", ".join(backends),
        description=_description(raw.get("description"), notes),
        versions={str(k): str(v) for k, v in _of(dict, raw.get("versions"), {}).items()},
        planned=tuple(p for p in _of(list, raw.get("planned"), ()) if isinstance(p, str)),
        started=float(_of((int, float), raw.get("started"), 0.0)),  # type: ignore[arg-type]
        finished=float(_of((int, float), raw.get("finished"), 0.0)),  # type: ignore[arg-type]
        closed=bool(raw.get("closed")),
    )


def _claim(raw: Any, level: str, notes: list[str]) -> Claim | None:
    if not raw:
        return None
    if isinstance(raw, dict) and isinstance(raw.get("ops"), list):
        return Claim(str(raw.get("name", "")), str(raw.get("level", level)), tuple(map(str, raw["ops"])))
    notes.append("run.json: the claim names no list of ops; the run is shown as one without a claim")
    return None


def _description(raw: Any, notes: list[str]) -> Description | None:
    if raw is None:
        return None
    try:
        return description_from_json(raw)
    except (TypeError, KeyError, AttributeError, ValueError) as e:
        notes.append(
            f"run.json: the description can't be read ({type(e).__name__}: {e}); declared limits are not shown"
        )
        return None


@dataclass(frozen=True)
class Digests:
    """Digests of what went into and came out of one executed problem; `outputs` is empty where the run died."""

    id: str
    inputs: str
    outputs: str


def read_problems(path: Path, bad: list[BadLine]) -> dict[str, Digests]:
    """Every executed problem of a run by a digest of (case id, problem); the last one of a kind counts."""
    problems: dict[str, Digests] = {}
    for file in plain_files(path, "problems*.jsonl", bad):
        for line, raw in numbered_lines(file, bad):
            case, problem = raw.get("id"), raw.get("problem")
            digests = [raw.get(name, "") for name in ("inputs", "outputs")]
            if (
                not isinstance(case, str)
                or not isinstance(problem, dict)
                or not all(isinstance(d, str) for d in digests)
            ):
                bad.append(BadLine(file.name, line, "no id, problem, inputs and outputs as they should be"))
                continue
            key = hashlib.sha256(json.dumps([case, problem], sort_keys=True).encode()).hexdigest()
            problems[key] = Digests(case, *digests)
    return problems


def known_ops(surface: Iterable[str], runs: Sequence[LoadedRun]) -> list[str]:
    """All ops a report has rows for: the public surface, what was claimed, planned or run."""
    names = set(surface)
    for run in runs:
        names.update(op_of(r) for r in run.records)
        names.update(op for op in (run.info.claim.ops if run.info.claim else ()) if not op.endswith("*"))
    return sorted(names)
