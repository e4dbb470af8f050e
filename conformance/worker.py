"""What runs cases: the selection that the options make, and a worker that tries and records them."""

from __future__ import annotations

import datetime
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance import waivers
from conformance.budget import Budget, left_out
from conformance.collect import cases_at, timing_cases
from conformance.diagnosis import Diagnoser
from conformance.engine import clock
from conformance.engine.attempt import Bench
from conformance.engine.bringup import LEVEL
from conformance.engine.compiled import refusal
from conformance.engine.devices import EVENTS_FILE, Board, DevicePool
from conformance.engine.effort import EFFORTS, Config
from conformance.engine.executor import ArenaPool, Launcher
from conformance.engine.leases import Leases, lease_folder
from conformance.engine.order import most_telling
from conformance.engine.run import run_case
from conformance.engine.wire import die_with_parent
from conformance.identity import selects
from conformance.journal import WorkerLog
from conformance.model import Case, Problem
from conformance.options import backend_options, reference_run, shard_of, split
from conformance.protocol import Description, description_from_json
from conformance.results import Record, verdict_of


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
        self.budget_text: str = o("--time-budget") or ""
        self.description: Description | None = None
        self.done: frozenset[str] = frozenset()
        self.timing: bool = o("--timing")
        self.scale = "small"
        """of timed workloads: what the backend's description asks for"""
        self._selected: list[Case] | None = None
        self.platform = "silicon"

    def legal(self) -> list[Case]:
        """The cases that the options name, done or not."""
        k, n = self.shard
        return self._named()[k - 1 :: n]

    def unselected(self, claimed: Collection[str]) -> list[Case]:
        """The cases that a claim of these ops is about and the options leave out; of a shard its part of them."""
        if not claimed or self.timing:
            return []
        k, n = self.shard
        named = {c.id for c in self._named()}
        others = [c for c in cases_at(self.level, (), self.description) if c.op.name in claimed and c.id not in named
                  and not refusal(c.check, self.platform)]
        return others[k - 1 :: n]

    def _named(self) -> list[Case]:
        out = []
        cases = timing_cases(self.scale, self.modules) if self.timing else cases_at(
            self.level, self.modules, self.description)
        for case in cases:
            if self.modules and case.op.module not in self.modules:
                continue
            if self.checks and case.check not in self.checks:
                continue
            named = [q for q in self.queries if selects(q, case.id)]
            if self.queries and not named:
                continue
            # What can't apply to a backend of this kind is left out, unless it is asked for by its check.
            if refusal(case.check, self.platform) and not self.checks and not any(f"/{case.check}" in q for q in named):
                continue
            out.append(case)
        return out

    def selected(self) -> list[Case]:
        if self._selected is None:
            self._selected = [c for c in self.legal() if c.id not in self.done]
            if self.budget_text and self.level != LEVEL:
                self._selected = most_telling(self._selected)
        return self._selected

    @property
    def ordered(self) -> bool:
        """Whether the order of the cases matters, and not only which there are."""
        return bool(self.budget_text) or self.level == LEVEL

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.ordered:
            place = {c.id: i for i, c in enumerate(self.selected())}
            items.sort(key=lambda item: place.get(item.name, -1))


def not_run(case: Case, run: Run, message: str, required: bool) -> Record:
    """The record of a planned case that did not run."""
    record = Record(case.id, case.op.module, case.op.name, dict(case.variant), case.check, run.level, "not_run",
                    message=message, backend=run.backend, seed=run.config.getoption("--seed"))
    record.verdict = verdict_of(record.status, "none", required=required).value
    return record


def scale_of(description: Mapping[str, Any]) -> str:
    """Which workloads a backend is timed on: those of models on silicon, unless its description says `small`."""
    silicon = description["platform"] == "silicon"
    return description["peaks"].get("sizes") or ("model" if silicon else "small")


class Worker(Run):
    """Runs cases and writes records; with -n 0 the controller is its own worker."""

    def __init__(self, config: pytest.Config, handed: dict[str, Any]) -> None:
        super().__init__(config)
        self.done = frozenset(handed["done"])
        self.scale = scale_of(handed["description"])
        self.platform = handed["description"]["platform"]
        self.description = description_from_json(handed["description"])
        self.budget = Budget(handed["deadline"])
        if getattr(config, "workerinput", None):
            die_with_parent(handed["controller"])
        self.name = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self.run_dir = Path(handed["run_dir"])
        self.handed = handed
        self.waivers = waivers.parse(handed["waivers"]) if handed["waivers"] else ()
        self._log: WorkerLog | None = None
        self._config: Config | None = None
        self._on = ""
        self.diagnoser = Diagnoser()

    def engine_config(self) -> Config:
        if self._config is None:
            o = self.config.getoption
            description = description_from_json(self.handed["description"])
            effort = EFFORTS[self.level].with_examples(o("--examples"))
            if o("--shrink-budget") is not None:
                effort = replace(effort, shrink_s=o("--shrink-budget"))
            launchers = [Launcher(self.backend, device="0", options=self.options,
                                  fork=description.fork_after_import, debug_malloc=debug, inject=o("--inject") or "")
                         for debug in (False, True)]
            profile = {**description.profile, "requirements": dict(description.requirements)}
            call_s = o("--case-timeout") or effort.call_s
            bench = Bench(description, launchers[0], launchers[1], ArenaPool(), profile, call_s, o("--compile-timeout"),
                          inline=o("--isolation") == "inline", unusable=self.handed.get("unusable", {}))
            self._log = WorkerLog(self.run_dir, self.name)
            if self.handed["devices"] is not None:
                leases = Leases(lease_folder(), description.name, description.processes_per_device,
                                f"a run in {self.run_dir}")
                bench.devices = DevicePool(tuple(self.handed["devices"]), leases, Board(self.run_dir / EVENTS_FILE),
                                           self.handed["slot"],
                                           self.waiting)
            fixed = {k: [Problem.from_json(p) for p in v] for k, v in self.handed["fixed"].items()} if (
                self.handed["fixed"] is not None) else None
            self._config = Config(bench, effort, o("--seed"), self.run_dir, self.backend, self.options,
                                  self._log.problem, fixed, keep_outputs=o("--keep-outputs"),
                                  reference_run=reference_run(o("--reference-run")), diagnose=self.diagnoser)
        return self._config

    def waiting(self, sentence: str) -> None:
        """Say what is waited for; an empty sentence when it is had."""
        assert self._log is not None
        self._log.now(sentence or self._on)

    def execute(self, case: Case) -> Record:
        config = self.engine_config()
        assert self._log is not None
        if not self.budget.fits(case):
            # Not written down: a case without a line is what --resume goes on with.
            return not_run(case, self, left_out(self.budget_text), case.op.name in self.handed["claimed"])
        self._on = case.id
        self._log.now(case.id)
        if self.budget.deadline_s is not None:
            shrink_s = min(config.effort.shrink_s, max(self.budget.left_s(), 0.0))
            config = replace(config, effort=replace(config.effort, shrink_s=shrink_s))
        if any(selects(w.id, case.id) for w in self.waivers):
            config = replace(config, diagnose=None)  # its cause is known
        began = clock.monotonic()
        record = run_case(case, config)
        self.budget.took(case, clock.monotonic() - began)
        record.worker = self.name
        if config.bench.devices is None:
            record.device = config.bench.launcher.device
        self.judge(record)
        self._log.result(record)
        return record

    def judge(self, record: Record) -> None:
        """The verdict under this run's waivers and claim, also of a record that stood there before."""
        expectation = waivers.apply(record, self.waivers, datetime.date.today())
        record.expectation = expectation.value
        record.waiver = waivers.described(record, self.waivers) if expectation.value != "none" else None
        required = record.op in self.handed["claimed"] and not refusal(record.check, self.platform)
        record.verdict = verdict_of(record.status, record.expectation, required=required).value

    def pytest_sessionfinish(self) -> None:
        self.diagnoser.close()
        if self._config is not None:
            self._config.bench.launcher.close()
            self._config.bench.debug_launcher.close()
