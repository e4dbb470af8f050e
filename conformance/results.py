"""What a run publishes: statuses, the verdict rule, the result record and its reader."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from conformance.foreign import BadLine, is_plain, numbered_lines, parsed, plain_files

SCHEMA_VERSION = 1


class Status(str, Enum):
    PASS = "pass"
    FAIL = "fail"
    CRASH = "crash"
    TIMEOUT = "timeout"
    ERROR = "error"
    OOM = "oom"
    UNSUPPORTED = "unsupported"
    SKIPPED = "skipped"
    NOT_RUN = "not_run"
    MISTRUSTED = "mistrusted"
    FLAKY = "flaky"


class Phase(str, Enum):
    COLLECT = "collect"
    COMPILE = "compile"
    PREPARE = "prepare"
    ENQUEUE = "enqueue"
    EXECUTE = "execute"
    COMPARE = "compare"
    TEARDOWN = "teardown"


class Verdict(str, Enum):
    CONFORMING = "conforming"
    NONCONFORMING = "nonconforming"
    WAIVED = "waived"
    NOT_APPLICABLE = "not_applicable"
    INCONCLUSIVE = "inconclusive"
    NOT_RUN = "not_run"


class Expectation(str, Enum):
    NONE = "none"
    WAIVED = "waived"
    WAIVER_EXPIRED = "waiver_expired"
    WAIVER_MISMATCH = "waiver_mismatch"
    UNEXPECTED_PASS = "unexpected_pass"


REASONS = (
    "numeric", "nonfinite", "dtype", "shape", "layout", "unwritten", "oob_write", "input_mutated", "late_write",
    "alias", "nondeterministic", "no_exception", "wrong_exception", "exception", "signal", "exit", "compile",
    "missing_output", "token_lost", "token_duplicated", "index_range", "order", "law", "contract", "settings_leak",
    "too_fast", "perf_floor",
)
"""Why a case did not pass: a closed list."""

NONCONFORMING = frozenset({Status.FAIL, Status.CRASH, Status.TIMEOUT, Status.FLAKY})
INCONCLUSIVE = frozenset({Status.ERROR, Status.OOM, Status.MISTRUSTED})

EXIT_CONFORMING, EXIT_NONCONFORMING, EXIT_INTERRUPTED, EXIT_INTERNAL = 0, 1, 2, 3
EXIT_USAGE, EXIT_NOTHING_RUN, EXIT_INCONCLUSIVE = 4, 5, 6


@dataclass
class Record:
    """One result line. Later fields may be absent in files of older schemas."""

    id: str
    module: str
    op: str
    variant: dict[str, Any]
    check: str
    level: str
    status: str
    phase: str | None = None
    reason: str | None = None
    expectation: str = "none"
    verdict: str = ""
    message: str = ""
    problem: dict[str, Any] | None = None
    seed: int = 0
    draws_sha256: str = ""
    examples: dict[str, int] = field(default_factory=dict)
    """executed, unsupported, drawn"""
    replay: list[str] = field(default_factory=list)
    backend: str = ""
    device: str = ""
    worker: str = ""
    attempt: int = 1
    duration_s: dict[str, float] = field(default_factory=dict)
    numerics: dict[str, Any] = field(default_factory=dict)
    vacuity: float | None = None
    """share of elements that the results of other data would have failed; 0 where nothing could fail"""
    perf: dict[str, Any] | None = None
    artefact: dict[str, Any] | None = None
    """of the check `compile`: kind, nbytes, sha256, uses, log"""
    diagnosis: dict[str, Any] | None = None
    """known kinds of fault that give the same wrong numbers: certain, tried, settings, also, matches"""
    waiver: dict[str, Any] | None = None
    """reason, issue and expiry of the waiver that was applied"""
    lineage: list[str] = field(default_factory=list)
    domain: dict[str, Any] = field(default_factory=dict)
    """smallest and largest of each size that ran, families, and the backend's limits"""
    artifacts: str | None = None
    """folder below the run directory: problem, arrays, picture, script"""
    started: float = 0.0
    finished: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if v is not None}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Record:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in raw.items() if k in known})


def verdict_of(status: str, expectation: str, *, required: bool = False, deterministic: bool = True) -> Verdict:
    """The verdict rule. `required`: the claim requires this case; `deterministic`: not statistical."""
    s, e = Status(status), Expectation(expectation)
    if e in (Expectation.WAIVER_EXPIRED, Expectation.WAIVER_MISMATCH):
        return Verdict.NONCONFORMING
    if e is Expectation.UNEXPECTED_PASS and deterministic:
        return Verdict.NONCONFORMING
    if s in NONCONFORMING:
        return Verdict.WAIVED if e is Expectation.WAIVED else Verdict.NONCONFORMING
    if s is Status.PASS:
        return Verdict.CONFORMING
    if s is Status.UNSUPPORTED:
        return Verdict.NONCONFORMING if required else Verdict.NOT_APPLICABLE
    if s is Status.NOT_RUN:
        return Verdict.INCONCLUSIVE if required else Verdict.NOT_RUN
    if s in INCONCLUSIVE:
        return Verdict.INCONCLUSIVE
    return Verdict.NOT_RUN


def exit_code(records: Iterable[Record]) -> int:
    """1 if anything is nonconforming, else 6 if inconclusive, else 5 if nothing ran, else 0."""
    verdicts = [(Verdict(r.verdict), Status(r.status)) for r in records]
    if any(v is Verdict.NONCONFORMING for v, _ in verdicts):
        return EXIT_NONCONFORMING
    if any(v is Verdict.INCONCLUSIVE for v, _ in verdicts):
        return EXIT_INCONCLUSIVE
    if not any(s not in (Status.UNSUPPORTED, Status.SKIPPED, Status.NOT_RUN) for _, s in verdicts):
        return EXIT_NOTHING_RUN
    return EXIT_CONFORMING


@dataclass
class Run:
    """One run directory as read: `info` is run.json, `records` the last good line of each id.

    `bad` names what could not be used; line 0 stands for the file as a whole.
    """

    path: Path
    info: dict[str, Any] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    bad: list[BadLine] = field(default_factory=list)


def newer_schema(info: Mapping[str, Any]) -> str:
    """Why a run of this run.json can't be read; empty where it can. Fields may be added within a version."""
    version = info.get("schema_version", SCHEMA_VERSION)
    if isinstance(version, int) and version <= SCHEMA_VERSION:
        return ""
    return f"schema version {version!r}, and this suite reads up to {SCHEMA_VERSION}: use the suite that wrote it"


def read_run(path: Path) -> Run:
    """Reads a run directory as data: run.json and every results*.jsonl, of a run cut off as well.

    Within one file the later line of an id counts; between files the one that finished
    later. Of a run of a newer schema no result is read, for its words may mean something else.
    Raises FileNotFoundError where there is neither of the two.
    """
    run = Run(path)
    files = plain_files(path, "results*.jsonl", run.bad)
    if not files and not is_plain(path / "run.json"):
        msg = f"{path}: no run directory, it has neither run.json nor results.jsonl"
        raise FileNotFoundError(msg)
    try:
        if not is_plain(path / "run.json"):
            msg = "no such file"
            raise ValueError(msg)
        info = parsed((path / "run.json").read_bytes())
        if isinstance(info, dict):
            run.info = info
        else:
            run.bad.append(BadLine("run.json", 0, f"a {type(info).__name__} instead of an object"))
    except (OSError, ValueError) as e:
        run.bad.append(BadLine("run.json", 0, getattr(e, "strerror", None) or str(e)))
    if why := newer_schema(run.info):
        run.bad.append(BadLine("run.json", 0, f"{why}; no result was read"))
        return run
    for file in files:
        for record in _records_of(file, run.bad).values():
            before = run.records.get(record.id)
            if before is None or record.finished >= before.finished:
                run.records[record.id] = record
    return run


def _records_of(file: Path, bad: list[BadLine]) -> dict[str, Record]:
    """The last good record of each id in one file; `bad` gets the rest, by line."""
    records: dict[str, Record] = {}
    try:
        for line, raw in numbered_lines(file, bad):
            why = why_unusable(raw)
            if why:
                bad.append(BadLine(file.name, line, why))
                continue
            record = Record.from_json({k: v for k, v in raw.items() if v is not None})
            record.verdict = record.verdict or verdict_of(record.status, record.expectation).value
            records[record.id] = record
    except OSError as e:
        bad.append(BadLine(file.name, 0, e.strerror or str(e)))
    return records


_REQUIRED = ("id", "module", "op", "variant", "check", "level", "status")
_JSON_KINDS: dict[str, type] = {"str": str, "int": int, "float": float, "dict": dict, "list": list}
_KINDS = {f.name: _JSON_KINDS[str(f.type).split(" ", 1)[0].split("[", 1)[0]] for f in fields(Record)}
_WORDS: dict[str, frozenset[str]] = {
    "status": frozenset(s.value for s in Status),
    "phase": frozenset(p.value for p in Phase),
    "reason": frozenset(REASONS),
    "expectation": frozenset(e.value for e in Expectation),
    "verdict": frozenset(v.value for v in Verdict) | {""},
}


def why_unusable(raw: Mapping[str, Any]) -> str:
    """What is wrong with a result line, in one sentence; empty where it is usable.

    A verdict that no reading of the verdict rule gives for its status is an edited line.
    """
    missing = [name for name in _REQUIRED if name not in raw]
    if missing:
        return f"no {', '.join(missing)}"
    for name, kind in _KINDS.items():
        value = raw.get(name)
        if value is None and name not in _REQUIRED:
            continue
        if not isinstance(value, (float, int) if kind is float else kind) or isinstance(value, bool):
            return f"{name} is a {type(value).__name__}, not a {kind.__name__}"
        if name in _WORDS and value not in _WORDS[name]:
            return f"{name} {value!r} is none of the known ones"
    status, expectation, verdict = raw["status"], raw.get("expectation") or "none", raw.get("verdict")
    rule = {verdict_of(status, expectation, required=r, deterministic=d) for r in (False, True) for d in (False, True)}
    if verdict and verdict not in rule:
        return f"verdict {verdict} does not follow from status {status} with expectation {expectation}"
    return ""


LARGEST_RATIO = 1e308
"""stands for infinity in a result line, whose numbers are finite"""


def error_over_bound(record: Record) -> float | None:
    """The `worst_ratio` of all outputs of a record (NaN counts as infinite), None where none is known."""
    worst = None
    for output in record.numerics.values():
        try:
            ratio = float(output["worst_ratio"])
        except (TypeError, KeyError, ValueError):
            continue
        ratio = float("inf") if math.isnan(ratio) or ratio >= LARGEST_RATIO else ratio
        worst = ratio if worst is None else max(worst, ratio)
    return worst
