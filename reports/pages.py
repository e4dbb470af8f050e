"""The static HTML report: `index.html` with the matrix, one page an op under `op/`.

It opens from a file and asks nothing of a network; script and style stand in the page
and the page forbids any others, so that a message from a run stays text.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from conformance.identity import slug
from conformance.results import Record
from reports.artifacts import Copier
from reports.fold import WORDS, Cell, Matrix, State, module_headline, run_headline, state_of, tally, worst
from reports.frame import page
from reports.load import LoadedRun
from reports.markup import Html, breakable, tag
from reports.record_view import case_entry
from reports.speed import PAGE, write_speed

LONGEST_NAME = 120
"""characters of an op's name that a file may be called by"""
_SHAPES = {
    State.CONFORMING: '<path d="M3 8.5l3.4 3.5L13 4.5"/>',
    State.PARTIAL: '<path d="M8 2a6 6 0 1 1 0 12a6 6 0 1 1 0-12z"/><path class="solid" d="M8 2a6 6 0 0 1 0 12z"/>',
    State.NONCONFORMING: '<path d="M3.5 3.5l9 9M12.5 3.5l-9 9"/>',
    State.MISSING: '<path d="M8 2a6 6 0 1 1 0 12a6 6 0 1 1 0-12zM3.8 12.2l8.4-8.4"/>',
    State.INCONCLUSIVE: '<path d="M5 5.6a3 3 0 1 1 4.4 2.7C8.4 8.9 8 9.4 8 10.4M8 13.6v.1"/>',
    State.WAIVED: '<path d="M4 14.5V2.5h8.5l-2.2 3.3 2.2 3.2H4"/>',
    State.NOT_RUN: '<path d="M8 2.5a5.5 5.5 0 1 1 0 11a5.5 5.5 0 1 1 0-11z"/>',
    State.NOT_YET: '<path d="M4 8h8"/>',
}
_BEST_FIRST = (
    State.CONFORMING,
    State.PARTIAL,
    State.WAIVED,
    State.INCONCLUSIVE,
    State.NONCONFORMING,
    State.MISSING,
    State.NOT_RUN,
    State.NOT_YET,
)


def icon(state: State) -> Html:
    """The state's glyph; shape and word carry the meaning, colour only repeats it."""
    return tag("svg", Html(_SHAPES[state]), class_="icon", viewBox="0 0 16 16", role="img", aria_label=WORDS[state])


def page_name(op: str) -> str:
    """The file of an op's page, without suffix. A run may name what it likes an op, a path for one."""
    return op if re.fullmatch(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*", op) and len(op) <= LONGEST_NAME else slug(op)


def write_pages(matrix: Matrix, folder: Path, copier: Copier) -> Path:
    """Writes the pages and copies the evidence; returns the path of index.html."""
    (folder / "op").mkdir(parents=True, exist_ok=True)
    for op, cells in matrix.cells.items():
        (folder / "op" / f"{page_name(op)}.html").write_text(_op_page(matrix.runs, op, cells, copier), encoding="utf-8")
    index = folder / "index.html"
    has_times = write_speed(matrix.runs, folder)
    index.write_text(_index(matrix, has_times), encoding="utf-8")
    return index


def _index(matrix: Matrix, has_times: bool = False) -> str:
    cells = [cell for row in matrix.cells.values() for cell in row]
    modules = matrix.modules
    where = f"{len(matrix.cells)} ops in {len(modules)} modules on {len(matrix.runs)} run{'s' * (len(matrix.runs) > 1)}"
    count = Counter(c.state for c in cells)
    return page(
        "Compatibility matrix",
        tag("h1", "Compatibility matrix"),
        tag("p", f"{where}: {tally(count, _BEST_FIRST)}.", class_="lead"),
        tag("p", tag("a", "Times, rooflines and published speeds", href=PAGE)) if has_times else None,
        tag("ul", *(_run_card(run, matrix.column(i)) for i, run in enumerate(matrix.runs)), class_="runs"),
        _filters(count, "cells", "find an op"),
        tag(
            "div",
            tag(
                "table",
                tag("thead", tag("tr", tag("th", "op", scope="col"), *map(_column_head, matrix.runs))),
                *(_module_rows(matrix, module, ops) for module, ops in modules.items()),
                class_="matrix",
            ),
            class_="scroll",
            tabindex="0",
            role="region",
            aria_label="matrix",
        ),
        _legend(),
    )


def _legend() -> Html:
    return tag(
        "footer",
        "A cell opens its cases. n/m: cases that conform, or are what the word behind says, of all that are known for "
        "the op; under it the domain, by the op's own names of sizes. ",
        "In part: all that ran conforms, but something is unsupported, was not run, or lies outside what the backend "
        "declares. Waived: fails as a named waiver says. Inconclusive: no verdict about the op could be reached. "
        "Not yet: the backend does not declare it.",
    )


def _filters(count: Mapping[State, int], what: str, find: str) -> Html:
    chips = [
        tag(
            "button",
            icon(s),
            f"{count[s]} {WORDS[s]}",
            class_=f"chip s-{s.value}",
            type="button",
            data_filter=s.value,
            aria_pressed="false",
            disabled=True,
        )
        for s in State
        if count[s]
    ]
    everything = tag(
        "button",
        f"all {sum(count.values())} {what}",
        class_="chip",
        type="button",
        data_filter="",
        aria_pressed="true",
        disabled=True,
    )
    box = tag("input", class_="find", type="search", placeholder=find, aria_label=find, hidden=True)
    return tag("div", everything, *chips, box, class_="filters")


def _column_head(run: LoadedRun) -> Html:
    return tag("th", run.label, tag("small", " · ".join(filter(None, (run.info.device, run.info.level)))), scope="col")


def _module_rows(matrix: Matrix, module: str, ops: Sequence[str]) -> Html:
    heads = (tag("td", module_headline(matrix.column(i, ops))) for i in range(len(matrix.runs)))
    rows = [tag("tr", tag("th", module, scope="rowgroup"), *heads, class_="module")]
    for op in ops:
        cells = matrix.cells[op]
        link = tag("a", breakable(op.removeprefix(module + ".")), href=f"op/{page_name(op)}.html")
        rows.append(
            tag(
                "tr",
                tag("th", link, scope="row"),
                *(_cell(cell, i) for i, cell in enumerate(cells)),
                class_="op",
                data_states=_words(c.state for c in cells),
                data_text=op,
            )
        )
    return tag("tbody", *rows, data_group=True)


def _cell(cell: Cell, column: int) -> Html:
    subline, ran_on = cell.subline(), cell.domain.ran_on()
    return tag(
        "td",
        tag(
            "a",
            icon(cell.state),
            tag("b", cell.headline()),
            tag("small", subline) if subline else None,
            tag("small", ran_on, class_="domain") if ran_on else None,
            href=f"op/{page_name(cell.op)}.html#run-{column}",
            title=cell.domain.text() or cell.why_missing or None,
        ),
        class_=f"cell s-{cell.state.value}",
    )


def _words(states: Iterable[State]) -> str:
    return " ".join(sorted({s.value for s in states}))


def _run_card(run: LoadedRun, cells: Sequence[Cell]) -> Html:
    head = run_headline(run, cells)
    info = run.info
    facts = {
        "device": info.device,
        "level": info.level,
        "started": _utc(info.started),
        "suite": " ".join(filter(None, (info.suite_version, info.commit[:12]))),
        "seed": info.seed,
        "host": ", ".join(f"{k} {v}" for k, v in info.host.items() if v),
        "versions": ", ".join(f"{k} {v}" for k, v in info.versions.items()),
        "command": " ".join(info.command),
        "run": run.path.name,
    }
    shown = ((tag("dt", k), tag("dd", v)) for k, v in facts.items() if v not in ("", None))
    return tag(
        "li",
        tag(
            "h3", run.label, tag("small", " · ".join(filter(None, (info.device, info.level, _utc(info.started)[:10]))))
        ),
        tag("p", icon(head.state), head.words, class_=f"verdict s-{head.state.value}"),
        tag("p", head.detail, class_="detail") if head.detail else None,
        _bar(Counter(c.state for c in cells)),
        *_notes(run.notes),
        tag(
            "details", tag("summary", "about this run"), tag("dl", *(x for pair in shown for x in pair)), class_="meta"
        ),
        class_="run",
    )


def _notes(notes: Sequence[str], most: int = 3) -> list[Html]:
    shown = [tag("p", note, class_="note") for note in notes[:most]]
    if len(notes) > most:
        rest = (tag("p", note, class_="note") for note in notes[most:])
        shown.append(tag("details", tag("summary", f"{len(notes) - most} more notes"), *rest, class_="meta"))
    return shown


def _utc(seconds: float) -> str:
    try:
        when = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc) if seconds else None
    except (ValueError, OverflowError, OSError):
        return ""
    return f"{when:%Y-%m-%d %H:%M} UTC" if when else ""


def _bar(count: Counter[State]) -> Html:
    """Shares of the states as one bar, best first; the sentence above says the same in words."""
    total, x, parts = sum(count.values()) or 1, 0.0, []
    for state in _BEST_FIRST:
        width = 100 * count[state] / total
        if width:
            parts.append(tag("rect", x=f"{x:.3f}", y=0, width=f"{width:.3f}", height=8, class_=f"s-{state.value}"))
        x += width
    return tag("svg", *parts, class_="bar", viewBox="0 0 100 8", preserveAspectRatio="none", aria_hidden="true")


def _op_page(runs: Sequence[LoadedRun], op: str, cells: Sequence[Cell], copier: Copier) -> str:
    cases: dict[str, dict[int, Record]] = {}
    for i, cell in enumerate(cells):
        for record in cell.records:
            cases.setdefault(record.id, {})[i] = record
    states = {case: worst(map(state_of, seen.values())) for case, seen in cases.items()}
    ranked = sorted(cases, key=lambda case: (list(State).index(states[case]), case))
    entries = [
        case_entry(case, cases[case], runs, copier, icon, unfolded=n == 0 and states[case] is State.NONCONFORMING)
        for n, case in enumerate(ranked)
    ]
    count = Counter(states.values())
    return page(
        op,
        tag("p", tag("a", "← matrix", href="../index.html"), class_="crumb"),
        tag("h1", breakable(op)),
        tag("p", f"{len(cases)} cases on {len(runs)} run{'s' * (len(runs) > 1)}.", class_="lead"),
        tag(
            "ul",
            *(_cell_card(run, cell, i) for i, (run, cell) in enumerate(zip(runs, cells, strict=True))),
            class_="runs",
        ),
        *(
            (_filters(count, "cases", "find a case"), *entries)
            if entries
            else (tag("p", "No run has a case of this op."),)
        ),
    )


def _cell_card(run: LoadedRun, cell: Cell, column: int) -> Html:
    domain = cell.domain
    error = cell.worst_error
    facts = {
        "cases": ", ".join(f"{n} {status}" for status, n in cell.counts.items()),
        "declared": "; ".join(domain.limits) or ("no limits" if cell.support and cell.support.supported else ""),
        "sizes": ", ".join(f"{k} {lo}" if lo == hi else f"{k} {lo}..{hi}" for k, (lo, hi) in domain.sizes.items()),
        "dtypes": ", ".join(domain.dtypes),
        "data": ", ".join(domain.families),
        "path": domain.path if cell.support and cell.support.supported else "",
        "worst error": f"{error:.3g} of the bound".replace("inf", "∞") if error is not None else "",
        "why": cell.why_missing if cell.state in (State.NOT_YET, State.MISSING) else "",
    }
    shown = ((tag("dt", k), tag("dd", v)) for k, v in facts.items() if v)
    sub = cell.subline()
    return tag(
        "li",
        tag("h3", run.label, tag("small", " · ".join(filter(None, (run.info.device, run.info.level))))),
        tag(
            "p",
            icon(cell.state),
            tag("span", cell.headline(), f": {sub}" if sub else ""),
            class_=f"verdict s-{cell.state.value}",
        ),
        tag("dl", *(x for pair in shown for x in pair)),
        class_="run",
        id=f"run-{column}",
    )
