"""The run directory: locked, appended to by every worker, merged when the run closes.

Nothing is lost: a line is flushed when its case ends, and a run that was killed resumes
from the lines that stand.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from conformance.results import BadLine, Record, read_lines, read_run


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
            msg = f"run directory {path}: {e.strerror}"
            raise RunDirError(msg) from e
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            msg = f"run directory {path} is in use by another run; wait for it or name another --run-dir"
            raise RunDirError(msg) from e
        if (path / "run.json").exists() and not resume:
            msg = f"run directory {path} holds a run already; add --resume to go on with it, or name another --run-dir"
            raise RunDirError(msg)
        self.done = self._read() if resume else {}

    def _read(self) -> dict[str, Record]:
        """What need not run again: every good record but errors of ours and what did not run."""
        return {k: r for k, r in self.records().items() if r.status not in ("error", "not_run")}

    def write_info(self, info: dict[str, Any]) -> None:
        """Write run.json whole, never half."""
        tmp = self.path / ".run.json.tmp"
        tmp.write_text(json.dumps(info, indent=1, sort_keys=True) + "\n")
        tmp.replace(self.path / "run.json")

    def records(self) -> dict[str, Record]:
        """What stands in the directory now; `bad` names the lines that can't be used."""
        try:
            run = read_run(self.path)
        except FileNotFoundError:
            return {}
        self.bad = run.bad
        return run.records

    def append_problem(self, row: dict[str, Any]) -> None:
        with (self.path / "problems-merge.jsonl").open("a") as f:
            f.write(json.dumps(row) + "\n")

    def close(self, records: Iterable[Record], info: dict[str, Any]) -> None:
        """Merge the workers' files and seal the run with a manifest."""
        _replace(self.path / "results.jsonl", (r.to_json() for r in records))
        rows: dict[str, dict[str, Any]] = {}
        for file in sorted(self.path.glob("problems*.jsonl")):
            for row in read_lines(file, []):
                rows[json.dumps([row.get("id"), row.get("problem")], sort_keys=True)] = row
        _replace(self.path / "problems.jsonl", rows.values())
        for pattern in ("results-*.jsonl", "problems-*.jsonl", "now-*"):
            for file in self.path.glob(pattern):
                file.unlink()
        self.write_info({**info, "closed": True, "finished": time.time()})
        (self.path / "manifest.json").write_text(json.dumps(manifest(self.path), indent=1, sort_keys=True) + "\n")
        os.close(self._lock)


def manifest(path: Path) -> dict[str, str]:
    """sha256 of every published file by its relative name."""
    out = {}
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        name = str(file.relative_to(path))
        if name not in ("manifest.json", "lock") and not name.startswith("matrix/"):
            out[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return out


def _replace(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    tmp = path.with_name("." + path.name + ".tmp")
    with tmp.open("w") as f:
        for row in rows:
            f.write(json.dumps(row, sort_keys=True) + "\n")
        f.flush()
        os.fsync(f.fileno())
    tmp.replace(path)


class WorkerLog:
    """A worker's own files in the run directory: results, problems, and what it is on now."""

    def __init__(self, path: Path, worker: str) -> None:
        self.path, self.worker = path, worker
        self.results = self._open("results")
        self.problems = self._open("problems")

    def _open(self, kind: str) -> TextIO:
        return (self.path / f"{kind}-{self.worker}-{os.getpid()}.jsonl").open("a")

    def result(self, record: Record) -> None:
        """Append and flush. Raises RunDirError where the disk takes no more."""
        self._append(self.results, record.to_json(), flush=True)
        self.problems.flush()

    def problem(self, row: dict[str, Any]) -> None:
        self._append(self.problems, row, flush=False)

    def now(self, case_id: str) -> None:
        with contextlib.suppress(OSError):
            (self.path / f"now-{self.worker}").write_text(case_id)

    def _append(self, file: TextIO, row: dict[str, Any], *, flush: bool) -> None:
        try:
            file.write(json.dumps(row) + "\n")
            if flush:
                file.flush()
        except OSError as e:
            why = "the disk is full" if e.errno == errno.ENOSPC else e.strerror
            msg = f"{self.path}: {why}; what stands there is good, free some space and go on with --resume"
            raise RunDirError(msg) from e
