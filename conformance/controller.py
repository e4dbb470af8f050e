"""The controller of a run: owns the run directory, tells how it goes, and decides the exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conformance import backends, waivers
from conformance.budget import left_out, minutes, told
from conformance.collect import ROOT, UsageError, check_names, ops, ops_by_file
from conformance.devices import Slots, chosen_devices, device_lines, devices_info, set_up, share_cores
from conformance.engine import clock
from conformance.engine.devices import EVENTS_FILE, Board
from conformance.foreign import BadLine, read_lines
from conformance.journal import RUNS_VARIABLE, Journal, RunDirError, differing
from conformance.model import COMPILER, Problem
from conformance.options import check_usage, reference_run, split
from conformance.progress import Progress, bad_line
from conformance.protocol import description_to_json
from conformance.results import (
    EXIT_INCONCLUSIVE,
    EXIT_INTERNAL,
    EXIT_NOTHING_RUN,
    SCHEMA_VERSION,
    Record,
    exit_code,
    verdict_of,
)
from conformance.worker import Run, Worker, scale_of

CASE_PROPERTY = "conformance"
"""user property of a test report that carries id, status and verdict of its case"""
RUN_DIR_ERROR = "conformance run directory"
"""user property that says why the run directory takes no more"""
SURVIVING_DIST = ("no", "load", "worksteal")


class Controller(Worker):
    """Owns the run directory and the exit code."""

    def __init__(self, config: pytest.Config) -> None:
        Run.__init__(self, config)
        o = config.getoption
        check_usage(level=self.level, modules=self.modules, checks=self.checks, queries=self.queries,
                    inject=o("--inject"), examples=o("--examples"), resume=o("--resume"), run_dir=o("--run-dir"),
                    timing=self.timing, workers=o("numprocesses", None) or 0)
        dist = o("dist", "no")
        if dist not in SURVIVING_DIST:
            msg = f"--dist={dist} does not survive a dead worker; use one of {', '.join(SURVIVING_DIST)}"
            raise UsageError(msg)
        self.progress: Progress | None = None
        self.lost: dict[str, str] = {}
        self.broken = ""
        """why the run directory takes no more"""
        self.failures, self.interrupted = 0, False
        self.untried: set[str] = set()
        """what a worker came to and did not begin; of these, those without a line did not fit the budget"""
        self.begun_s, self.begun_at = clock.monotonic(), time.time()
        self.device_rows: list[dict[str, Any]] = []
        waiver_file = o("--waivers")
        waiver_text = ""
        if waiver_file:
            waivers.load(Path(waiver_file))
            waiver_text = Path(waiver_file).read_text()
        # Whatever may be a mistake of the user's comes before the run directory is made.
        reference_run(o("--reference-run"))
        fixed, claimed = _read_problems(o("--problems")), claimed_ops(o("--claim"))
        budget_s = 60 * minutes(self.budget_text) if self.budget_text else None
        ready = set_up(config)
        self.description = description = ready.description
        self.scale = scale_of(description_to_json(description))
        self.platform = description.platform
        if claimed and self.platform == COMPILER:
            msg = f"--claim={o('--claim')}: {self.backend} compiles and runs nothing, so there is nothing to claim"
            raise UsageError(msg)
        planned = [c.id for c in (*self.legal(), *self.unselected(claimed))]
        found = None if o("--collect-only") else backends.asked_first(
            self.backend, self.options, description, next((d for d in split(o("--devices")) if d != "auto"), "0"))
        devices = None if o("--collect-only") else chosen_devices(config, ready)
        self.slots = Slots()
        if self.ordered and getattr(config.option, "maxschedchunk", 1) is None:
            config.option.maxschedchunk = 1  # else workers get long stretches, and the order is lost
        if o("--collect-only"):
            self.journal = None
        else:
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            name = self.backend.rpartition(":")[2] if ":" in self.backend else self.backend
            own = Path(os.environ.get(RUNS_VARIABLE) or "runs") / f"{name}-{stamp}"
            self.journal = Journal(Path(o("--run-dir") or own), resume=o("--resume"))
        handed = {
            "done": sorted(self.journal.done) if self.journal else [],
            "run_dir": str(self.journal.path.resolve()) if self.journal else "",
            "description": description_to_json(description), "waivers": waiver_text,
            "unusable": {m: why for m, why in (found or {}).get("modules", {}).items() if why},
            "claimed": claimed, "fixed": fixed, "controller": os.getpid(), "devices": devices, "slot": 0,
            "deadline": None if budget_s is None else clock.monotonic() + budget_s,
        }
        share_cores(config)
        Worker.__init__(self, config, handed)
        self.info = run_info(self, description, planned, found)
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
            self.forget_events(before)
            self.journal.write_info(self.info)

    def forget_events(self, before: dict[str, Any]) -> None:
        """What devices did in a run that was cut off is kept in run.json; each has another chance in this one."""
        if self.handed["devices"]:
            events = Board(self.run_dir / EVENTS_FILE)
            self.info |= devices_info(events.read(), before)
            (self.run_dir / EVENTS_FILE).unlink(missing_ok=True)

    def pytest_configure_node(self, node: Any) -> None:
        """Called by xdist for each worker before it starts."""
        node.workerinput["conformance"] = {**self.handed, "slot": self.slots.take(node)}

    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        """Called by xdist before it starts the one that takes the place of a dead worker."""
        self.slots.free(node)

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
            if self.handed["devices"] and self.config.getoption("tx", None):
                self.progress.watch()

    def waiting(self, sentence: str) -> None:
        """Without workers: said at once, past the capture of the test that waits."""
        super().waiting(sentence)
        capture = self.config.pluginmanager.getplugin("capturemanager")
        if sentence and self.progress is not None:
            with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
                self.progress.say(sentence)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        verdict = _property(report)
        if verdict is None or report.when != "call":
            return None
        if hasattr(report, "wasxfail"):
            return "xfailed", "", ""
        # The short summary prints the word; nothing else does, for the progress has lines of its own.
        return report.outcome, "", report.outcome.upper() if report.failed else ""

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
            if found["status"] == "not_run":
                self.untried.add(found["id"])
        elif report.failed and "::" in report.nodeid and found is None:
            self.lost[report.nodeid.split("::", 1)[1]] = str(report.longrepr)[:500]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        Worker.pytest_sessionfinish(self)
        if self.journal is None:
            return
        self.records = self.final_records()
        self.device_rows = Board(self.run_dir / EVENTS_FILE).read()
        if self.handed["devices"]:
            self.info |= devices_info(self.device_rows, self.info)
        if self.progress is not None:
            self.progress.stop()
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
        if code == EXIT_NOTHING_RUN and (self.complaints or self.info.get("quarantined")):
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
        for record in found.values():
            # What was ended before this run stands under its waivers, not under those of that day.
            self.judge(record)
        legal, claimed = self.legal(), self.handed["claimed"]
        for i, case in enumerate((*legal, *self.unselected(claimed))):
            if case.id in found:
                continue
            status, message = "not_run", "the run ended before it" if i < len(legal) else "claimed, but not selected"
            if case.id in self.untried:
                message = left_out(self.budget_text)
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
        if self.budget_text:
            terminalreporter.write_line(told(self.budget_text, self.records.values()))
        write_summary(terminalreporter, self.journal.path, self.records, self.journal.bad, self.waivers)
        mine = [r for r in self.records.values() if r.started >= self.begun_at]
        for line in device_lines(self.device_rows, self.handed["devices"], mine, self.seats(),
                                 clock.monotonic() - self.begun_s):
            terminalreporter.write_line(line)

    def seats(self) -> int:
        """How many workers run side by side."""
        return max(len(self.config.getoption("tx", None) or ()), 1)


def _property(report: Any, key: str = CASE_PROPERTY) -> Any:
    return next((v for k, v in getattr(report, "user_properties", ()) if k == key), None)


def _read_problems(run: str | None) -> dict[str, list[Any]] | None:
    if not run:
        return None
    file = Path(run) / "problems.jsonl"
    if not file.exists():
        msg = f"--problems={run}: no problems.jsonl there; name a run directory that was closed"
        raise UsageError(msg)
    out: dict[str, list[Any]] = {}
    bad: list[BadLine] = []
    for row in read_lines(file, bad):
        case_id, problem = row.get("id"), row.get("problem")
        try:
            Problem.from_json(problem)
        except (TypeError, KeyError, ValueError, AttributeError):
            bad.append(BadLine(file.name, 0, f"what stands there for {case_id!r} is no problem"))
        out.setdefault(str(case_id), []).append(problem)
    if bad:
        msg = f"--problems={run}: {bad_line(bad[0])}; {len(bad)} such lines, so the run can't be repeated exactly"
        raise UsageError(msg)
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
    listed = [w for line in Path(claim).read_text().splitlines() if (w := line.split("#")[0].strip())]
    check_names("op", listed, known)
    return listed


def run_info(run: Controller, description: Any, planned: list[str], found: dict[str, Any] | None = None,
             ) -> dict[str, Any]:
    """What run.json says; `found` is doctor's report, where the run asked for one."""
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
        "backend": run.backend, "backend_options": run.options, "device": run.handed["devices"] or "host",
        "description": description_to_json(description), "doctor": found,
        "versions": {**packages, **description.versions, **(found or {}).get("versions", {})},
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
