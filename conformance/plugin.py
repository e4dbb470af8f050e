"""The pytest plug-in: makes an item of every case, runs it, and closes the run.

On the controller it reads the backend's description once, owns the run directory, and
decides the exit code; a worker runs cases and appends records. Loaded by `conftest.py`
and by the console script, never by an entry point.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance import backends, waivers
from conformance.bench import THREAD_VARIABLES
from conformance.collect import ROOT, UsageError, cases_at, ops, ops_by_file
from conformance.engine.attempt import Bench
from conformance.engine.executor import ArenaPool, Launcher
from conformance.engine.run import EFFORTS, Config, run_case
from conformance.engine.wire import die_with_parent
from conformance.identity import matches
from conformance.journal import Journal, RunDirError, WorkerLog, differing
from conformance.model import Case, Problem
from conformance.options import OPTIONS, backend_options, check_usage, shard_of, split
from conformance.progress import Progress, bad_line
from conformance.protocol import description_from_json, description_to_json
from conformance.results import (
    EXIT_INCONCLUSIVE,
    EXIT_INTERNAL,
    EXIT_NOTHING_RUN,
    SCHEMA_VERSION,
    Record,
    exit_code,
    read_lines,
    verdict_of,
)

RUN_DIR_ERROR = "conformance run directory"
SURVIVING_DIST = ("no", "load", "worksteal")
_RUN = pytest.StashKey["Run"]()


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
    except (UsageError, backends.UnknownBackend, RunDirError, waivers.WaiverError) as e:
        raise pytest.UsageError(str(e)) from None
    except backends.BackendUnusable as e:
        pytest.exit(f"inconclusive: {e}", returncode=EXIT_INCONCLUSIVE)
    config.stash[_RUN] = run
    config.pluginmanager.register(run, "conformance-run")


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
                raise pytest.UsageError(msg)
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
        self.user_properties.append(("conformance", {"id": record.id, "status": record.status,
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
    import shlex

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


class Run:
    """What controller and worker share: the selection."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        o = config.getoption
        self.backend: str = o("--backend")
        self.level: str = o("--level")
        self.modules, self.checks, self.queries = split(o("--module")), split(o("--check")), list(o("--case"))
        self.options = backend_options(o("--backend-option"))
        self.shard = shard_of(o("--shard"))
        self.done: frozenset[str] = frozenset()
        self._selected: list[Case] | None = None

    def legal(self) -> list[Case]:
        """The cases that the options name, done or not."""
        k, n = self.shard
        out = []
        for case in cases_at(self.level, self.modules):
            if self.modules and case.op.module not in self.modules:
                continue
            if self.checks and case.check not in self.checks:
                continue
            if self.queries and not any(matches(q, case.id) for q in self.queries):
                continue
            out.append(case)
        return out[k - 1 :: n]

    def selected(self) -> list[Case]:
        if self._selected is None:
            self._selected = [c for c in self.legal() if c.id not in self.done]
        return self._selected


class Worker(Run):
    """Runs cases and writes records; with -n 0 the controller is its own worker."""

    def __init__(self, config: pytest.Config, handed: dict[str, Any]) -> None:
        super().__init__(config)
        self.done = frozenset(handed["done"])
        if getattr(config, "workerinput", None):
            die_with_parent(handed["controller"])
        self.name = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self.run_dir = Path(handed["run_dir"])
        self.handed = handed
        self.waivers = waivers.parse(handed["waivers"]) if handed["waivers"] else ()
        self._log: WorkerLog | None = None
        self._config: Config | None = None

    def engine_config(self) -> Config:
        if self._config is None:
            o = self.config.getoption
            description = description_from_json(self.handed["description"])
            effort = EFFORTS[self.level]
            if o("--examples") is not None:
                effort = replace(effort, examples=o("--examples"))
            if o("--shrink-budget") is not None:
                effort = replace(effort, shrink_s=o("--shrink-budget"))
            launchers = [Launcher(self.backend, device=self.device(), options=self.options,
                                  fork=description.fork_after_import, debug_malloc=debug, inject=o("--inject") or "")
                         for debug in (False, True)]
            profile = {**description.profile, "requirements": dict(description.requirements)}
            bench = Bench(description, launchers[0], launchers[1], ArenaPool(), profile, o("--case-timeout"),
                          o("--compile-timeout"), inline=o("--isolation") == "inline")
            self._log = WorkerLog(self.run_dir, self.name)
            fixed = {k: [Problem.from_json(p) for p in v] for k, v in self.handed["fixed"].items()} if (
                self.handed["fixed"] is not None) else None
            self._config = Config(bench, effort, o("--seed"), self.run_dir, self.backend, self.options,
                                  self._log.problem, fixed)
        return self._config

    def device(self) -> str:
        listed = split(self.config.getoption("--devices"))
        slot = int("".join(c for c in self.name if c.isdigit()) or 0)
        return "0" if listed in (["auto"], []) else listed[slot % len(listed)]

    def execute(self, case: Case) -> Record:
        config = self.engine_config()
        assert self._log is not None
        self._log.now(case.id)
        record = run_case(case, config)
        record.worker, record.device = self.name, config.bench.launcher.device
        expectation = waivers.apply(record, self.waivers, datetime.date.today())
        record.expectation = expectation.value
        if expectation.value != "none":
            record.waiver = waivers.described(record.id, self.waivers)
        required = case.op.name in self.handed["claimed"]
        record.verdict = verdict_of(record.status, record.expectation, required=required).value
        self._log.result(record)
        return record

    def pytest_sessionfinish(self) -> None:
        if self._config is not None:
            self._config.bench.launcher.close()
            self._config.bench.debug_launcher.close()


class Controller(Worker):
    """Owns the run directory and the exit code."""

    def __init__(self, config: pytest.Config) -> None:
        Run.__init__(self, config)
        o = config.getoption
        check_usage(level=self.level, modules=self.modules, checks=self.checks, queries=self.queries,
                    inject=o("--inject"), examples=o("--examples"), resume=o("--resume"), run_dir=o("--run-dir"))
        dist = o("dist", "no")
        if dist not in SURVIVING_DIST:
            msg = f"--dist={dist} does not survive a dead worker; use one of {', '.join(SURVIVING_DIST)}"
            raise UsageError(msg)
        for variable in THREAD_VARIABLES:
            os.environ[variable] = "1"
        self.progress: Progress | None = None
        self.lost: dict[str, str] = {}
        self.broken = ""
        """why the run directory takes no more"""
        self.failures, self.interrupted = 0, False
        waiver_file = o("--waivers")
        waiver_text = ""
        if waiver_file:
            waivers.load(Path(waiver_file))
            waiver_text = Path(waiver_file).read_text()
        description = backends.describe(self.backend, self.options)
        if o("--collect-only"):
            self.journal = None
        else:
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            name = self.backend.rpartition(":")[2] if ":" in self.backend else self.backend
            self.journal = Journal(Path(o("--run-dir") or f"runs/{name}-{stamp}"), resume=o("--resume"))
        planned = [c.id for c in self.legal()]
        fixed = _read_problems(o("--problems"))
        handed = {
            "done": sorted(self.journal.done) if self.journal else [],
            "run_dir": str(self.journal.path.resolve()) if self.journal else "",
            "description": description_to_json(description), "waivers": waiver_text,
            "claimed": claimed_ops(o("--claim")), "fixed": fixed, "controller": os.getpid(),
        }
        Worker.__init__(self, config, handed)
        self.info = run_info(self, description, planned)
        self.complaints = backends.complaints(description, ops(self.modules))
        if self.journal:
            before = self.journal.before
            if before:
                field = differing(before, self.info)
                if field:
                    self.journal.release()
                    msg = f"--resume: the run in {self.journal.path} began otherwise; it differs in {field}"
                    raise UsageError(msg)
                self.info["planned"] = list(dict.fromkeys([*before.get("planned", ()), *planned]))
                self.info["started"] = before.get("started", self.info["started"])
            self.journal.write_info(self.info)

    def pytest_configure_node(self, node: Any) -> None:
        """Called by xdist for each worker before it starts."""
        node.workerinput["conformance"] = self.handed

    def pytest_report_header(self) -> str:
        where = f", run directory {self.journal.path}" if self.journal else ""
        more = f", {len(self.done)} done before" if self.done else ""
        seed = self.config.getoption("--seed")
        lines = [f"conformance: backend {self.backend}, level {self.level}, seed {seed}{more}{where}"]
        lines += [bad_line(b) for b in (self.journal.bad[:5] if self.journal else ())]
        return "\n".join(lines)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and self.journal and self.progress is None:
            total = len(self.selected())
            self.progress = Progress(reporter, self.run_dir, total, live=reporter._tw.hasmarkup)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        verdict = _property(report)
        if verdict is None or report.when != "call":
            return None
        if hasattr(report, "wasxfail"):
            return "xfailed", "", ""
        return report.outcome, "", ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if self.progress is None:
            self.pytest_collection_finish(None)  # type: ignore[arg-type]
        found = _property(report)
        self.failures += bool(report.failed)
        if not self.broken and (why := _property(report, RUN_DIR_ERROR)):
            self.broken = why
            for loop in (self.session, self.config.pluginmanager.getplugin("dsession")):
                if loop is not None:
                    loop.shouldstop = why
            return
        if report.when == "call" and found is not None and self.progress is not None:
            self.progress.done(found["verdict"])
        elif report.failed and "::" in report.nodeid and found is None:
            self.lost[report.nodeid.split("::", 1)[1]] = str(report.longrepr)[:500]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        Worker.pytest_sessionfinish(self)
        if self.journal is None:
            return
        self.records = self.final_records()
        try:
            self.journal.close(self.records.values(), self.info)
        except RunDirError as e:
            self.broken = self.broken or str(e)
        if self.broken:
            session.exitstatus = EXIT_INTERNAL
            return
        # A run that -x or --maxfail ended was not interrupted: its verdict is that of what it found.
        maxfail = self.config.getoption("maxfail") or 0
        enough = not self.interrupted and 0 < maxfail <= self.failures
        kept = (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR)
        if not enough and (exitstatus in kept or session.exitstatus in kept):
            return
        code = exit_code(self.records.values())
        if code == EXIT_NOTHING_RUN and self.complaints:
            code = EXIT_INCONCLUSIVE
        session.exitstatus = code

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.interrupted = excinfo.type is KeyboardInterrupt

    def final_records(self) -> dict[str, Record]:
        """Every planned case: what stands in the directory, else why it has no record."""
        assert self.journal is not None
        found = self.journal.records()
        for case in self.legal():
            if case.id in found:
                continue
            status, message = "not_run", "the run ended before it"
            if case.id in self.lost:
                status, message = "error", f"the worker that ran it was lost: {self.lost[case.id]}"
            record = Record(case.id, case.op.module, case.op.name, dict(case.variant), case.check, self.level, status,
                            message=message, backend=self.backend, seed=self.config.getoption("--seed"))
            record.verdict = verdict_of(status, "none", required=case.op.name in self.handed["claimed"]).value
            found[case.id] = record
        return found

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.journal is None or not hasattr(self, "records"):
            return
        from conformance.summary import write_summary

        if self.broken:
            terminalreporter.write_line(self.broken)
            return
        for c in self.complaints[:10]:
            terminalreporter.write_line(f"the description of {self.backend} names {c}")
        write_summary(terminalreporter, self.journal.path, self.records, self.journal.bad, self.waivers)


def _property(report: Any, key: str = "conformance") -> Any:
    return next((v for k, v in getattr(report, "user_properties", ()) if k == key), None)


def _read_problems(run: str | None) -> dict[str, list[Any]] | None:
    if not run:
        return None
    file = Path(run) / "problems.jsonl"
    if not file.exists():
        msg = f"--problems={run}: no problems.jsonl there; name a run directory that was closed"
        raise UsageError(msg)
    out: dict[str, list[Any]] = {}
    for row in read_lines(file, []):
        out.setdefault(row["id"], []).append(row["problem"])
    return out


def claimed_ops(claim: str | None) -> list[str]:
    """The ops a claim lists. Raises UsageError."""
    if claim is None:
        return []
    known = [op.name for group in ops_by_file().values() for op in group]
    if claim == "all":
        return known
    if not Path(claim).exists():
        msg = f"--claim={claim}: neither `all` nor a file with an op a line"
        raise UsageError(msg)
    from conformance.collect import check_names

    listed = [w for line in Path(claim).read_text().splitlines() if (w := line.split("#")[0].strip())]
    check_names("op", listed, known)
    return listed


def run_info(run: Controller, description: Any, planned: list[str]) -> dict[str, Any]:
    """What run.json says."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    packages = {}
    claimed = run.handed["claimed"]
    for name in ("conformance", "pytest", "hypothesis", "numpy", "torch", "tilelang", "pytest-xdist"):
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "schema_version": SCHEMA_VERSION, "suite_version": packages.get("conformance", "unknown"), "commit": _commit(),
        "command": sys.argv, "seed": run.config.getoption("--seed"), "level": run.level,
        "claim": {"name": run.config.getoption("--claim"), "ops": claimed} if claimed else None,
        "backend": run.backend, "backend_options": run.options, "device": run.device(),
        "description": description_to_json(description), "versions": {**packages, **description.versions},
        "host": {"system": platform.system(), "machine": platform.machine(), "python": platform.python_version(),
                 "cores": os.cpu_count()},
        "planned": planned, "started": time.time(), "finished": None, "closed": False,
    }


def _commit() -> str:
    import subprocess

    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True,
                              check=False)
        return done.stdout.strip() or "unknown"
    return "unknown"


