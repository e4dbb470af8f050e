"""The run directory: locked, appended to by every worker, merged when the run closes.

Nothing is lost: a line is flushed when its case ends, and a run that was killed resumes
from the lines that stand.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from conformance.engine.devices import EVENTS_FILE
from conformance.foreign import BadLine, changed_files, manifest, plain_files, read_lines
from conformance.results import Record, read_run

SAME = ("schema_version", "backend", "backend_options", "level", "seed", "description", "claim")
"""fields of run.json in which the parts of one run agree: shards of it, and what is gone on with"""

RUNS_VARIABLE = "CONFORMANCE_RUNS"
"""Environment variable that names the folder in which a run makes its directory where --run-dir names none: the
console script, which changes to the checkout, sets it to `runs` where the user stands."""


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The first field in which two run.json can't be parts of one run, with both values; empty where there is none."""
    for field in SAME:
        x, y = (json.dumps(info.get(field), sort_keys=True) for info in (a, b))
        if x != y:
            return field if len(x) + len(y) > 200 else f"{field} ({x} and {y})"
    return ""


class RunDirError(Exception):
    """A run directory that can't be used; the message says why and what to do."""


class Journal:
    """The controller's hold on a run directory."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self.bad: list[BadLine] = []
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as e:
            raise RunDirError(_why(path, e)) from e
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            self.release()
            msg = f"run directory {path} is in use by another run; wait for it or name another --run-dir"
            raise RunDirError(msg) from e
        if (path / "run.json").exists() and not resume:
            self.release()
            msg = f"run directory {path} holds a run already; add --resume to go on with it, or name another --run-dir"
            raise RunDirError(msg)
        self.before: dict[str, Any] = {}
        """run.json of the run that is gone on with"""
        self.done = self._read() if resume else {}

    def _read(self) -> dict[str, Record]:
        """What need not run again: every good record but errors of ours and what did not run."""
        return {k: r for k, r in self.records().items() if r.status not in ("error", "not_run")}

    def write_info(self, info: dict[str, Any]) -> None:
        """Write run.json whole, never half. Raises RunDirError."""
        try:
            # A manifest of an earlier close would call the lines false that are written from now on.
            (self.path / "manifest.json").unlink(missing_ok=True)
            _write_whole(self.path / "run.json", [json.dumps(info, indent=1, sort_keys=True) + "\n"])
        except OSError as e:
            raise RunDirError(_why(self.path, e)) from e

    def records(self) -> dict[str, Record]:
        """What stands in the directory now; `bad` names the lines that can't be used."""
        try:
            run = read_run(self.path)
        except FileNotFoundError:
            return {}
        self.before = self.before or run.info
        found = [*run.bad, *changed_files(self.path), *lost_evidence(self.path, run.records.values())]
        self.bad = list(dict.fromkeys([*self.bad, *found]))
        return run.records

    def append_problem(self, row: dict[str, Any]) -> None:
        with (self.path / "problems-merge.jsonl").open("a") as f:
            f.write(json.dumps(row) + "\n")

    def close(self, records: Iterable[Record], info: dict[str, Any]) -> None:
        """Merge the workers' files and seal the run with a manifest. Raises RunDirError; then they stay as they are."""
        try:
            self._close(records, info)
        except OSError as e:
            raise RunDirError(_why(self.path, e)) from e
        finally:
            self.release()

    def _close(self, records: Iterable[Record], info: dict[str, Any]) -> None:
        rows: dict[str, dict[str, Any]] = {}
        for file in plain_files(self.path, "problems*.jsonl", []):
            for row in read_lines(file, []):
                rows[json.dumps([row.get("id"), row.get("problem")], sort_keys=True)] = row
        _write_whole(self.path / "problems.jsonl", (json.dumps(row, sort_keys=True) + "\n" for row in rows.values()))
        lines = (json.dumps(r.to_json(), sort_keys=True) + "\n" for r in records)
        _write_whole(self.path / "results.jsonl", lines)
        self.write_info({**info, "closed": True, "finished": time.time()})
        # Only now that everything stands in the merged files.
        for pattern in ("results-*.jsonl", "problems-*.jsonl", "now-*", EVENTS_FILE):
            for file in self.path.glob(pattern):
                file.unlink()
        text = json.dumps(manifest(self.path), indent=1, sort_keys=True) + "\n"
        _write_whole(self.path / "manifest.json", [text])

    def release(self) -> None:
        """Let go of the directory."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _why(path: Path, e: OSError) -> str:
    if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (f"run directory {path}: the disk takes no more ({e.strerror}); what stands there is good, "
                "free some space and go on with --resume")
    return f"run directory {path}: {e.strerror or e}"


def lost_evidence(path: Path, records: Iterable[Record]) -> list[BadLine]:
    """Artifact folders that records name and that are gone."""
    return [BadLine(r.artifacts[:200], 0, f"deleted; `conformance replay {r.id}` makes it again")
            for r in records if r.artifacts and not os.path.isdir(path / r.artifacts)]


def _write_whole(path: Path, lines: Iterable[str]) -> None:
    """All of a file or nothing of it. Raises OSError."""
    tmp = path.with_name("." + path.name + ".tmp")
    try:
        with tmp.open("w") as f:
            f.writelines(lines)
            f.flush()
            os.fsync(f.fileno())
        tmp.replace(path)
    except OSError:
        tmp.unlink(missing_ok=True)
        raise


class WorkerLog:
    """A worker's own files in the run directory: results, problems, and what it is on now."""

    def __init__(self, path: Path, worker: str) -> None:
        self.path, self.worker = path, worker
        self.results = self._open("results")
        self.problems = self._open("problems")
        self.pending: list[dict[str, Any]] = []

    def _open(self, kind: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            return os.open(self.path / f"{kind}-{self.worker}-{os.getpid()}.jsonl", flags, 0o644)
        except OSError as e:
            raise RunDirError(_why(self.path, e)) from e

    def result(self, record: Record) -> None:
        """Append, the problems first: a case that has its line has all of it. Raises RunDirError."""
        self._append(self.problems, self.pending)
        self.pending = []
        self._append(self.results, [record.to_json()])

    def problem(self, row: dict[str, Any]) -> None:
        """Note a problem that ran; it is written with the result of its case."""
        self.pending.append(row)

    def now(self, case_id: str) -> None:
        with contextlib.suppress(OSError):
            (self.path / f"now-{self.worker}").write_text(case_id)

    def _append(self, fd: int, rows: Iterable[dict[str, Any]]) -> None:
        """Whole lines or none. Raises RunDirError."""
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        size = os.fstat(fd).st_size
        try:
            while data:
                data = data[os.write(fd, data):]
        except OSError as e:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, size)
            raise RunDirError(_why(self.path, e)) from e
