"""The end of a run: a summary that fits a screen, and the matrix beside it."""

from __future__ import annotations

import datetime
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from conformance.collect import ops
from conformance.foreign import BadLine
from conformance.progress import bad_line, duration
from conformance.results import Record
from conformance.waivers import unmatched
from reports.matrix import write_all

SHOWN_FAILURES = 12
PHASES = ("draw", "oracle", "compile", "run", "compare")


def write_summary(reporter: Any, run_dir: Path, records: Mapping[str, Record], bad: Iterable[BadLine],
                  waivers: Iterable[Any]) -> None:
    """Print the verdict, the findings that count, where the time went, and where the matrix is."""
    line = reporter.write_line
    reporter.section("conformance")
    for b in list(bad)[:5]:
        line(bad_line(b))
    try:
        text = write_all([run_dir], run_dir / "matrix", [op.name for op in ops()])
    except OSError as e:
        text = f"the matrix could not be written: {e}; conformance matrix {run_dir} tries again"
    findings = [r for r in records.values() if r.verdict == "nonconforming"]
    for r in findings[:SHOWN_FAILURES]:
        line(f"{r.status:8} {r.reason or '':14} {r.id}")
        if r.expectation != "none":
            line(f"         {r.expectation}")
    if len(findings) > SHOWN_FAILURES:
        line(f"... and {len(findings) - SHOWN_FAILURES} more")
    if findings:
        line("the first again: " + shlex.join(findings[0].replay))
    unsure = [r for r in records.values() if r.verdict == "inconclusive"]
    for r in unsure[:SHOWN_FAILURES // 2]:
        line(f"{r.status:8} {r.id}: {r.message.splitlines()[0][:120] if r.message else ''}")
    idle = [w.id for w in unmatched(tuple(waivers), records.values(), datetime.date.today())]
    if idle:
        line(f"waivers that named no case of this run: {', '.join(idle[:5])}")
    line(where_time_went(records.values()))
    line(text)


def where_time_went(records: Iterable[Record]) -> str:
    """The workers' summed seconds by phase, passing cases only, start-up apart."""
    spent: Counter[str] = Counter()
    total = 0.0
    for r in records:
        if r.status == "pass" and r.finished:
            total += r.finished - r.started
            spent.update(r.duration_s)
    start = spent.pop("start", 0.0)
    total -= start + spent["wait"] + spent["recover"]
    named = sum(spent[p] for p in PHASES)
    share = (total - named) / total if total > 0 else 0.0
    parts = ", ".join(f"{p} {duration(spent[p])}" for p in PHASES)
    return f"time in passing cases: {parts}; other {share:.0%}; start-up of processes {duration(start)}"
