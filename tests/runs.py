"""Runs of the suite as a user starts them: in processes of their own, marked so that what is left of them shows."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from conformance.results import Run, read_run

ROOT = Path(__file__).resolve().parents[1]
HOSTILE = "hostile_backend:Hostile"
MARK = "CONFORMANCE_TEST_MARK"


def environment(mark: str, **more: str) -> dict[str, str]:
    """An environment in which the hostile plug-in is found; `mark` is handed down to every process of the run."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "tests"), MARK: mark, "PYTHONDONTWRITEBYTECODE": "1", **more}


def marked(mark: str) -> list[int]:
    """Every living process that was started with this mark, whoever its parent is by now."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def gone_within(mark: str, seconds: float, but: int = 0) -> bool:
    """Whether at most `but` marked processes are left after so long."""
    end = time.monotonic() + seconds
    while len(marked(mark)) > but:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def argv(run_dir: Path, *more: str, backend: str = "cpu") -> list[str]:
    """The command line of a run of deepselect."""
    return [sys.executable, "-m", "pytest", "-q", "--rootdir", str(ROOT), f"--backend={backend}", "--module=deepselect",
            f"--run-dir={run_dir}", *more, "cases"]


@dataclass
class Ended:
    """A run that is over."""

    code: int
    text: str
    path: Path
    mark: str = ""
    _run: Run | None = field(default=None, repr=False)

    @property
    def run(self) -> Run:
        if self._run is None:
            self._run = read_run(self.path)
        return self._run

    def verdicts(self) -> dict[str, str]:
        return {i: r.verdict for i, r in self.run.records.items()}


def start(args: list[str], mark: str, **env: str) -> subprocess.Popen[str]:
    """Start a command from the root of the checkout, in a session of its own."""
    # A shell starts background jobs with interrupts ignored, and a child inherits that; a handler it does not inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(args, cwd=ROOT, env=environment(mark, **env), stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, before)


def run(run_dir: Path, *more: str, backend: str = "cpu", timeout_s: float = 240.0, more_path: str = "",
        **env: str) -> Ended:
    """Run to the end; `more_path` is a folder of modules that the run finds."""
    mark = uuid.uuid4().hex
    if more_path:
        env["PYTHONPATH"] = f"{ROOT / 'tests'}{os.pathsep}{more_path}"
    proc = start(argv(run_dir, *more, backend=backend), mark, **env)
    text, _ = proc.communicate(timeout=timeout_s)
    return Ended(proc.returncode, text, run_dir, mark)
