"""The suite tried on itself: every fault of the library must be caught, every correct variant pass.

Faults are settings of the cpu kernels (`cases/<module>/faults.toml`), and the op-agnostic
ones of `engine/inject.py`. A fault counts as caught when one of its cases ends
nonconforming with the reason that the table names.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import itertools
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

from conformance import waivers
from conformance.bench import bench_of
from conformance.catalogue.load import MODULES, read_toml
from conformance.collect import ROOT, cases_at, check_names
from conformance.engine.attempt import Bench
from conformance.engine.inject import FAULTS
from conformance.engine.run import EFFORTS, Config, run_case
from conformance.engine.wire import die_with_parent
from conformance.model import Case
from conformance.options import split
from conformance.results import EXIT_NONCONFORMING

MOST_CASES = 60
"""cases tried for one fault, and for one correct variant"""
INJECTED_ON = ("deepselect.topk", "deepgemm.bf16_gemm_nt", "flashmla.flash_mla_sparse_fwd")
"""ops on which the op-agnostic faults are planted: callee- and caller-allocated results"""
NO_ROOM = {(fault, "flashmla.flash_mla_sparse_fwd") for fault in ("write_before", "write_behind")}
"""results that fill their memory: no byte beside them can be reached through a backend"""


@dataclass(frozen=True)
class Row:
    """One fault or correct variant on one op."""

    module: str
    name: str
    op: str
    knobs: str
    check: str
    reasons: tuple[str, ...]
    """what must catch it; empty for a correct variant"""
    profile: tuple[tuple[str, Any], ...] = ()
    inject: str = ""


@dataclass(frozen=True)
class Caught:
    """What came of one row."""

    row: Row
    outcome: str
    """killed | survived | wrong reason | right | false alarm"""
    cases: int
    problems: int
    seconds: float
    seen: str
    case: str = ""


def library(modules: Sequence[str]) -> Iterator[Row]:
    """Every row of the tables, one an op. Raises ValueError for a malformed table."""
    for module in modules:
        path = ROOT / "cases" / module / "faults.toml"
        if not path.exists():
            continue
        table = read_toml(path)
        for kind in ("fault", "variant"):
            for raw in table.get(kind, ()):
                reason = raw.get("reason", ()) if kind == "fault" else ()
                reasons = (reason,) if isinstance(reason, str) else tuple(reason)
                if kind == "fault" and not reasons:
                    msg = f"{path}: {raw.get('name')}: a fault names the reason that must catch it"
                    raise ValueError(msg)
                for op in raw["ops"]:
                    yield Row(module, raw["name"], op, raw["knobs"], raw.get("check", "values"), reasons,
                              tuple(raw.get("profile", {}).items()))


def injected(modules: Sequence[str]) -> Iterator[Row]:
    """The op-agnostic faults, on a few ops."""
    for op in INJECTED_ON:
        if op.partition(".")[0] in modules:
            for fault in (f for f in FAULTS.values() if (f.name, op) not in NO_ROOM):
                check = "memory" if fault.name in ("write_before", "write_behind", "mutate_input") else "values"
                yield Row(op.partition(".")[0], f"any:{fault.name}", op, "", check, fault.expect, inject=fault.name)


def interleaved(cases: list[Case], turn: int) -> list[Case]:
    """All cases in long steps, from a place that differs from row to row, so that variants are spread."""
    n = len(cases)
    step = next((s for s in range(n * 5 // 8, n) if math.gcd(s, n) == 1), 1)
    return [cases[(turn * 7 + i * step) % n] for i in range(n)]


_BENCH: dict[str, Bench] = {}


def bench() -> Bench:
    """This process's bench on the cpu backend, started once: knobs and faults are set at each fork."""
    if "cpu" not in _BENCH:
        stack = contextlib.ExitStack()
        _BENCH["cpu"] = stack.enter_context(bench_of("cpu", {}))
        atexit.register(stack.close)
    return _BENCH["cpu"]


def try_row(row: Row, seed: int, turn: int) -> Caught:
    """Run the row's cases until it is caught; many of them for a correct variant."""
    started = time.monotonic()
    mine = (c for c in cases_at("core", (row.module,)) if c.op.name == row.op)
    cases = [c for c in mine if (c.check == row.check or not row.reasons) and not waivers.is_known(c.id)]
    base = bench()
    profile = {**base.profile, **dict(row.profile)}
    mine = replace(base, profile=profile, case_timeout_s=3.0 if row.inject == "hang" else base.case_timeout_s)
    for launcher in (mine.launcher, mine.debug_launcher):
        launcher.options, launcher.inject = {"knobs": row.knobs} if row.knobs else {}, row.inject
    late = row.inject == "late_write"
    config = Config(mine, replace(EFFORTS["core"], shrink_s=0.0), seed, Path("/dev/null"), "cpu", confirm=late)
    tried, problems, caught = 0, 0, ""
    seen: Counter[str] = Counter()
    for case in itertools.islice(interleaved(cases, turn), MOST_CASES if row.reasons else MOST_CASES // 2):
        record = run_case(case, config)
        tried += 1
        problems += record.examples.get("executed", 0)
        if record.status in ("pass", "unsupported"):
            continue
        seen[record.reason or record.status] += 1
        if not row.reasons or {record.status, record.reason} & set(row.reasons):
            caught = case.id
            break
    if row.reasons:
        outcome = "killed" if caught else "wrong reason" if seen else "survived"
    else:
        outcome = "false alarm" if seen else "right" if problems else "not run"
    return Caught(row, outcome, tried, problems, time.monotonic() - started, ", ".join(seen), caught)


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("conformance selftest")
    p.add_argument("--module", default="", help="only these modules: a,b")
    p.add_argument("--fault", default="", help="only rows whose name contains this")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("-n", "--processes", type=int, default=2)
    p.add_argument("--no-injected", action="store_true", help="without the op-agnostic faults")
    args = p.parse_args(argv)
    modules = split(args.module) or list(MODULES)
    check_names("module", modules, MODULES)
    rows = [r for r in (*library(modules), *(() if args.no_injected else injected(modules)))
            if args.fault in r.name]
    print(f"{len(rows)} rows on {args.processes} processes", flush=True)
    results = run_rows(rows, args.seed, args.processes)
    print(report(results))
    return EXIT_NONCONFORMING if any(r.outcome not in ("killed", "right") for r in results) else 0


def run_rows(rows: Sequence[Row], seed: int, processes: int) -> list[Caught]:
    """Try every row, side by side, telling each that is not as it must be."""
    context = multiprocessing.get_context("spawn")
    out = []
    with ProcessPoolExecutor(processes, mp_context=context, initializer=die_with_parent) as pool:
        futures = [pool.submit(try_row, row, seed, i) for i, row in enumerate(rows)]
        for i, f in enumerate(futures, 1):
            c = f.result()
            out.append(c)
            if c.outcome not in ("killed", "right"):
                print(f"{c.outcome}: {c.row.name} on {c.row.op} ({c.row.check}): saw {c.seen or 'nothing'}, table says "
                      f" {', '.join(c.row.reasons) or 'right'}{'; ' + c.case if c.case else ''}", flush=True)
            elif i % 20 == 0:
                print(f"{i}/{len(rows)}", flush=True)
    return out


def report(results: Sequence[Caught]) -> str:
    """A table a module: kills, survivors, false alarms; and how soon."""
    rows = []
    for module in dict.fromkeys(r.row.module for r in results):
        mine = [r for r in results if r.row.module == module]
        count = Counter(r.outcome for r in mine)
        problems = sorted(r.problems for r in mine if r.outcome == "killed")
        rows.append((module, count["killed"], count["survived"], count["wrong reason"], count["right"],
                     count["false alarm"], count["not run"],
                     problems[len(problems) // 2] if problems else "-", problems[-1] if problems else "-",
                     f"{sum(r.seconds for r in mine):.0f} s"))
    head = ("module", "killed", "survived", "other reason", "right", "false alarms", "not run", "problems to the kill",
            "at most", "time")
    return tabulate(rows, head, tablefmt="github")
