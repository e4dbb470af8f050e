"""The compatibility matrix of any number of runs, as Markdown, JSON, CSV and static HTML."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from conformance.results import SCHEMA_VERSION, Record, error_over_bound
from reports.artifacts import Copier
from reports.fold import GLYPHS, WORDS, Cell, Matrix, State, fold, module_headline, run_headline, state_of
from reports.load import LoadedRun, load_runs
from reports.markup import md, md_code
from reports.pages import write_pages
from reports.record_view import waiver_text

_MARKER = ".conformance-matrix"


def write_all(run_dirs: Sequence[Path], out_dir: Path, surface: Iterable[str] = ()) -> str:
    """Writes matrix.md, matrix.json, matrix.csv and html/index.html into `out_dir`.

    surface: the ops that get a row even where no run knows them, such as all that
    are declared. Returns a summary: a line for each run, its notes, and the paths.
    Raises FileNotFoundError for a path that is no run, FileExistsError where `html/`
    holds something else than an earlier matrix.
    """
    out_dir = Path(out_dir)
    matrix = fold(load_runs([Path(p) for p in run_dirs]), surface)
    html = out_dir / "html"
    _clear(html)
    paths = [out_dir / f"matrix.{kind}" for kind in ("md", "json", "csv")]
    for path, text in zip(paths, (to_markdown(matrix), to_json(matrix), to_csv(matrix)), strict=True):
        path.write_text(text, encoding="utf-8")
    paths.append(write_pages(matrix, html, Copier(html)))
    return summary(matrix) + "\n" + "\n".join(f"wrote {p}" for p in paths)


def _clear(html: Path) -> None:
    """An empty folder for the pages: an earlier matrix goes, anything else stays and is an error."""
    if html.is_dir() and any(html.iterdir()):
        if not (html / _MARKER).is_file():
            msg = f"{html} is not empty and holds no matrix of ours; name another folder"
            raise FileExistsError(msg)
        shutil.rmtree(html)
    html.mkdir(parents=True, exist_ok=True)
    (html / _MARKER).touch()


def summary(matrix: Matrix) -> str:
    """A line for each run, its notes indented under it."""
    lines = []
    for i, run in enumerate(matrix.runs):
        head = run_headline(run, matrix.column(i))
        lines.append(f"{GLYPHS[head.state]} {run.label}: {head}")
        lines += [f"    {note}" for note in run.notes]
    return "\n".join(lines)


def _cell_text(cell: Cell) -> str:
    sub = cell.subline()
    return f"{GLYPHS[cell.state]} {md(cell.headline())}" + (f" ({md(sub)})" if sub else "")


def to_markdown(matrix: Matrix) -> str:
    """Summary, the matrix, then every case that needs a word, run by run."""
    heads = []
    for i, run in enumerate(matrix.runs):
        head = run_headline(run, matrix.column(i))
        heads.append(f"- {GLYPHS[head.state]} **{md(run.label)}**, {md(_of(run))}: {md(head)}")
        heads += [f"  - {md(note)}" for note in run.notes]
    rows = []
    for module, ops in matrix.modules.items():
        columns = range(len(matrix.runs))
        rows.append([f"**{md(module)}**", *(f"**{module_headline(matrix.column(i, ops))}**" for i in columns)])
        rows += [[md(op), *map(_cell_text, matrix.cells[op])] for op in ops]
    table = tabulate(rows, ["op", *(md(r.label) for r in matrix.runs)], tablefmt="github", disable_numparse=True)
    legend = ", ".join(f"{GLYPHS[s]} {WORDS[s]}" for s in State)
    domains = [
        [md(op), md(run.label), md(cell.domain.text())]
        for op, cells in matrix.cells.items()
        for run, cell in zip(matrix.runs, cells, strict=True)
        if cell.domain.ran_on()
    ]
    parts = ["# Compatibility matrix", "\n".join(heads), table, legend]
    for i, run in enumerate(matrix.runs):
        records = [r for c in matrix.column(i) for r in c.records]
        for state in (State.NONCONFORMING, State.INCONCLUSIVE, State.WAIVED):
            lines = [_md_case(r) for r in records if state_of(r) is state]
            if lines:
                parts += [f"## {md(run.label)}: {WORDS[state]}", "\n".join(lines)]
    if domains:
        parts += [
            "## What each cell was run on",
            tabulate(domains, ["op", "run", "domain"], tablefmt="github", disable_numparse=True),
        ]
    return "\n\n".join(parts) + "\n"


def _of(run: LoadedRun) -> str:
    """Level and day of a run: the same cell says more at a higher level."""
    day = time.strftime("%Y-%m-%d", time.gmtime(run.info.started)) if run.info.started > 0 else "no date"
    return f"level {run.info.level}, {day}"


def _md_case(record: Record) -> str:
    error = error_over_bound(record)
    words = [record.status, record.reason, record.phase, None if record.expectation == "none" else record.expectation]
    text = f"- {md_code(record.id)}: {md(', '.join(w for w in words if w))}"
    if error is not None:
        text += f", worst error {error:.3g} x bound"
    if record.waiver:
        text += f"\n  - waiver {md(waiver_text(record))}"
    if record.message:
        lines = (line.strip().rstrip(";") for line in record.message.splitlines())
        text += f"\n  - {md('; '.join(filter(None, lines)))}"
    if record.replay:
        text += f"\n  - replay: {md_code(shlex.join(map(str, record.replay)))}"
    return text


def to_json(matrix: Matrix) -> str:
    """Strict JSON: {schema_version, runs: [...], ops: [{op, module, cells: [one a run]}]}.

    NaN and infinities are strings.
    """
    runs = []
    for i, run in enumerate(matrix.runs):
        head = run_headline(run, matrix.column(i))
        info = run.info
        runs.append(
            {
                "label": run.label,
                "path": run.path.name,
                "state": head.state.value,
                "summary": str(head),
                "notes": list(run.notes),
                "backend": info.backend,
                "platform": info.platform,
                "device": info.device,
                "level": info.level,
                "claim": None
                if info.claim is None
                else {"name": info.claim.name, "level": info.claim.level, "ops": info.claim.ops},
                "suite_version": info.suite_version,
                "commit": info.commit,
                "seed": info.seed,
                "versions": dict(info.versions),
                "started": info.started,
                "finished": info.finished,
                "closed": info.closed,
            }
        )
    ops = [
        {"op": op, "module": op.partition(".")[0], "cells": [_cell_json(c) for c in cells]}
        for op, cells in matrix.cells.items()
    ]
    return (
        json.dumps(_finite({"schema_version": SCHEMA_VERSION, "runs": runs, "ops": ops}), indent=1, allow_nan=False)
        + "\n"
    )


def _cell_json(cell: Cell) -> dict[str, Any]:
    domain = cell.domain
    return {
        "state": cell.state.value,
        "verdict": cell.verdict,
        "required": cell.required,
        "cases": cell.total,
        "conforming": cell.passed,
        "counts": cell.counts,
        "reasons": cell.reasons,
        "worst_error_over_bound": cell.worst_error,
        "domain": {
            "sizes": domain.sizes,
            "dtypes": domain.dtypes,
            "families": domain.families,
            "limits": domain.limits,
            "path": domain.path,
        },
        "why_missing": cell.why_missing if cell.state in (State.NOT_YET, State.MISSING) else "",
        "records": [r.to_json() for r in cell.records],
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def to_csv(matrix: Matrix) -> str:
    """One line a cell; text that a spreadsheet would take for a formula gets a leading apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        (
            "module",
            "op",
            "run",
            "platform",
            "level",
            "state",
            "verdict",
            "cases",
            "conforming",
            "counts",
            "reasons",
            "worst_error_over_bound",
            "domain",
            "why_missing",
        )
    )
    for op, cells in matrix.cells.items():
        for run, cell in zip(matrix.runs, cells, strict=True):
            error = cell.worst_error
            row = (
                op.partition(".")[0],
                op,
                run.label,
                run.info.platform,
                run.info.level,
                cell.state.value,
                cell.verdict,
                cell.total,
                cell.passed,
                _pairs(cell.counts),
                _pairs(cell.reasons),
                "" if error is None else f"{error:.6g}",
                cell.domain.text(),
                cell.why_missing if cell.state in (State.NOT_YET, State.MISSING) else "",
            )
            writer.writerow(
                [f"'{v}" if isinstance(v, str) and v[:1] in ("=", "+", "-", "@", "\t", "\r") else v for v in row]
            )
    return out.getvalue()


def _pairs(counts: dict[str, int]) -> str:
    return " ".join(f"{name}={n}" for name, n in counts.items())
