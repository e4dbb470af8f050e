"""`conformance selftest`: every fault of the library must be killed, every correct variant pass."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from queue import Empty
from typing import Any

from conformance.catalogue.load import MODULES
from conformance.collect import check_names
from conformance.engine.effort import EFFORTS
from conformance.engine.wire import die_with_parent
from conformance.options import split
from conformance.results import EXIT_NONCONFORMING
from conformance.selftest.journal import Journal
from conformance.selftest.library import Row, library
from conformance.selftest.report import text, write, wrong_ones
from conformance.selftest.trial import Caught, try_rows

PARTS = ("tabled", "injected", "apart")
TELL_EVERY_S, WAIT_S = 20.0, 0.2
LOST_S = 30.0
"""how long after the last process nothing may come before what is missing counts as lost"""
MOST_ROWS = 24
"""rows of an op that one process tries side by side"""
FAULTS_A_VARIANT = 8
"""faults that take about as long as one correct variant"""


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("conformance selftest")
    p.add_argument("--module", default="", help="only these modules: a,b")
    p.add_argument("--fault", default="", help="only rows whose name contains this")
    p.add_argument("--parts", default=",".join(PARTS), help="tabled: settings of the cpu kernels; injected: what any "
                   "op can have; apart: what was written without knowing the suite (default: all)")
    p.add_argument("--level", default="core", choices=sorted(EFFORTS))
    p.add_argument("--seed", type=int, default=0, help="the first seed")
    p.add_argument("--seeds", type=int, default=1, help="how many")
    p.add_argument("-n", "--processes", type=int, default=2)
    p.add_argument("--compare", action="store_true", help="also what other rules say of the same problems")
    p.add_argument("--out", type=Path, default=None, metavar="DIR",
                   help="write each row there as it ends, then selftest.html, .md and .json")
    p.add_argument("--resume", action="store_true", help="go on with what stands in --out")
    args = p.parse_args(argv)
    modules, parts = split(args.module) or list(MODULES), split(args.parts)
    check_names("module", modules, MODULES)
    check_names("part", parts, PARTS)
    rows = library(modules, only=args.fault, parts=parts)
    seeds = range(args.seed, args.seed + args.seeds)
    print(f"{len(rows)} rows, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}, {args.processes} processes", flush=True)
    journal = Journal(args.out, {"level": args.level, "compare": args.compare}, resume=args.resume)
    results = run_rows(rows, seeds, args.processes, args.level, args.compare, journal)
    print(text(results))
    if args.out is not None:
        print(f"wrote {write(results, args.out, 'conformance selftest ' + ' '.join(argv))}")
    return EXIT_NONCONFORMING if any(not r.good for r in results) else 0


def run_rows(rows: Sequence[Row], seeds: Sequence[int], processes: int, level: str, compare: bool,
             journal: Journal) -> list[Caught]:
    """Try every row with every seed, ops side by side, telling at once of each that is not as it must be."""
    context = multiprocessing.get_context("spawn")
    tasks = [(row, seed) for seed in seeds for row in rows]
    place = {task: n for n, task in enumerate(tasks)}
    done = journal.done(tasks)
    progress = _Progress(len(tasks), len(done))
    queue = context.Queue()
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(queue,)) as pool:
        for some in (seeds[:1], seeds[1:]):
            # What killed a fault at the first seed is what it meets first at the others.
            killers = {c.row: c.case for c in done.values() if c.outcome == "killed"}
            left = [t for n, t in enumerate(tasks) if n not in done and t[1] in some]
            running = {pool.submit(_try_rows, part, level, seed, compare and seed == seeds[0],
                                   [killers.get(row, "") for row in part]) for seed, part in batches(left)}
            for caught in _as_they_end(running, queue, len(left)):
                done[place[caught.row, caught.seed]] = caught
                journal.note(caught)
                for line in wrong_ones([caught]):
                    print(line, flush=True)
                progress.tell(len(done))
    return [done[n] for n in sorted(done)]


def _as_they_end(running: set[Future[None]], queue: Any, rows: int) -> Iterator[Caught]:
    """What the processes tell of so many rows. Raises what one of them raised, and RuntimeError for a row lost.

    What a process tells may come after its end is seen, so the rows are counted.
    """
    silent_since = time.monotonic()
    while rows:
        try:
            caught = queue.get(timeout=WAIT_S)
        except Empty:
            if not running and time.monotonic() - silent_since > LOST_S:
                msg = f"{rows} rows have ended and were not told of; --resume with --out tries them again"
                raise RuntimeError(msg) from None
        else:
            rows, silent_since = rows - 1, time.monotonic()
            yield caught
        for f in [f for f in running if f.done()]:
            f.result()
            running.remove(f)
            silent_since = time.monotonic()


class _Progress:
    """Says now and then how many rows are done, and how long the others will take."""

    def __init__(self, rows: int, before: int) -> None:
        self.rows, self.before = rows, before
        self.started = self.told = time.monotonic()

    def tell(self, done: int) -> None:
        now = time.monotonic()
        if now - self.told > TELL_EVERY_S and done > self.before:
            self.told = now
            left_s = (now - self.started) / (done - self.before) * (self.rows - done)
            print(f"{done}/{self.rows} rows, {left_s / 60:.0f} min left", flush=True)


def batches(tasks: Sequence[tuple[Row, int]]) -> list[tuple[int, list[Row]]]:
    """Rows of one op at one seed together, those that take longest first: a variant has to pass everything."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row, seed in tasks:
        groups.setdefault((seed, row.op), []).append(row)
    parts = [(seed, rows[i::-(-len(rows) // MOST_ROWS)]) for (seed, _), rows in groups.items()
             for i in range(-(-len(rows) // MOST_ROWS))]
    return sorted(parts, key=lambda part: (part[0], -sum(1 if r.fault else FAULTS_A_VARIANT for r in part[1])))


_TOLD: Any = None


def _begin(queue: Any) -> None:
    global _TOLD
    die_with_parent()
    _TOLD = queue


def _try_rows(rows: list[Row], level: str, seed: int, compare: bool, killed_by: list[str]) -> None:
    for caught in try_rows(rows, level, seed, compare=compare, killed_by=killed_by):
        _TOLD.put(caught)
