"""The pytest plug-in: options, and an item of every case.

Loaded by `conftest.py` and by the console script, never by an entry point.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance import backends, waivers
from conformance.collect import ROOT, UsageError, ops_by_file
from conformance.controller import CASE_PROPERTY, RUN_DIR_ERROR, Controller
from conformance.devices import auto_workers
from conformance.engine.leases import LeaseError
from conformance.journal import RunDirError
from conformance.model import Case
from conformance.options import OPTIONS, split
from conformance.results import EXIT_INCONCLUSIVE, EXIT_USAGE, Record
from conformance.worker import Run, Worker

_RUN = pytest.StashKey[Run]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "conformance of kernel modules")
    for name, kw in OPTIONS:
        group.addoption(name, **kw)


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--backend")
    if not name:
        return
    worker_input = getattr(config, "workerinput", None)
    try:
        check_roots()
        run = Worker(config, worker_input["conformance"]) if worker_input else Controller(config)
    except (UsageError, backends.UnknownBackend, RunDirError, LeaseError, waivers.WaiverError) as e:
        raise pytest.UsageError(str(e)) from None
    except backends.BackendUnusable as e:
        pytest.exit(f"inconclusive: {e}", returncode=EXIT_INCONCLUSIVE)
    config.stash[_RUN] = run
    config.pluginmanager.register(run, "conformance-run")


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto`: what the backend's devices take; on the host as many as xdist says, one a core."""
    return auto_workers(config) if config.getoption("--backend") else None


def check_roots() -> None:
    """All five packages must come from one checkout: a foreign `adapters` may shadow ours."""
    for name in ("conformance", "cases", "references", "adapters", "reports"):
        module = sys.modules.get(name)
        found = module and getattr(module, "__file__", None)
        if found and Path(found).resolve().parent.parent != ROOT:
            msg = f"package {name} comes from {Path(found).parent}, not from this checkout; uninstall the other one"
            raise UsageError(msg)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    with contextlib.suppress(ValueError):
        relative = file_path.relative_to(ROOT / "cases").as_posix()
        module = relative.partition("/")[0]
        chosen = split(parent.config.getoption("--module"))
        if (not chosen or module in chosen) and relative in ops_by_file((module,)):
            if not parent.config.getoption("--backend"):
                msg = "cases need a backend: add --backend=cpu (tests of the suite itself: pytest tests)"
                pytest.exit(msg, returncode=EXIT_USAGE)
            return CaseFile.from_parent(parent, path=file_path)
    return None


class CaseFile(pytest.File):
    """The cases of one declaration file."""

    def collect(self) -> Iterator[pytest.Item]:
        run = self.config.stash[_RUN]
        relative = self.path.relative_to(ROOT / "cases").as_posix()
        names = {op.name for op in ops_by_file((relative.partition("/")[0],))[relative]}
        for case in run.selected():
            if case.op.name in names:
                yield CaseItem.from_parent(self, name=case.id, case=case)


class CaseFailed(Exception):
    """A case that is not conforming; carries its record."""

    def __init__(self, record: Record) -> None:
        super().__init__(record.message)
        self.record = record


class CaseItem(pytest.Item):
    """One case."""

    def __init__(self, *, case: Case, **kw: Any) -> None:
        super().__init__(**kw)
        self.case = case
        self.record: Record | None = None

    def runtest(self) -> None:
        try:
            self.record = record = self.config.stash[_RUN].execute(self.case)
        except RunDirError as e:
            # The controller ends the run: what no disk takes need not be tried.
            self.user_properties.append((RUN_DIR_ERROR, str(e)))
            raise
        self.user_properties.append((CASE_PROPERTY, {"id": record.id, "status": record.status,
                                                     "verdict": record.verdict}))
        if record.status in ("unsupported", "skipped", "not_run"):
            pytest.skip(record.message or record.status)
        if record.status != "pass" or record.verdict == "nonconforming":
            raise CaseFailed(record)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        if isinstance(excinfo.value, CaseFailed):
            return told(excinfo.value.record)
        if isinstance(excinfo.value, RunDirError):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo, style))

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


def told(record: Record) -> str:
    """A failure on one screen."""
    lines = [f"{record.status}" + (f" ({record.reason})" if record.reason else "") +
             (f" in phase {record.phase}" if record.phase else "") + f": {record.id}"]
    if record.expectation != "none":
        lines.append(f"expectation: {record.expectation}")
    lines.append(record.message[:2500])
    if record.problem:
        lines.append("problem: " + json.dumps({k: v for k, v in record.problem.items() if k not in ("op", "variant")}))
    if record.artifacts:
        lines.append(f"kept in: {record.artifacts}")
    lines.append("replay: " + shlex.join(record.replay))
    return "\n".join(lines)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    if call.when != "call" or not isinstance(item, CaseItem) or item.record is None:
        return
    if item.record.verdict == "waived":
        report = outcome.get_result()
        report.outcome = "skipped"
        report.wasxfail = f"waived: {item.record.message.splitlines()[0] if item.record.message else ''}"
