"""The confusion table of a selftest, as text and as a page."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from conformance.selftest.journal import to_json
from conformance.selftest.rules import COLUMNS, OURS
from conformance.selftest.trial import Caught
from reports.frame import page, table
from reports.markup import md, tag

Table = tuple[tuple[str, ...], list[tuple[Any, ...]]]
KINDS = ("killed", "survived", "wrong reason", "no evidence", "right", "false alarm", "not run")


def grouped(results: Iterable[Caught], key: Callable[[Caught], Any]) -> dict[Any, list[Caught]]:
    out: dict[Any, list[Caught]] = {}
    for r in results:
        out.setdefault(key(r), []).append(r)
    return out


def confusion(results: Sequence[Caught]) -> Table:
    """A row a module: what became of faults and variants, over all seeds; and how soon."""
    rows = []
    groups = grouped(results, lambda r: r.row.group)
    for name, mine in (*groups.items(), *([("all", list(results))] if len(groups) > 1 else ())):
        count = Counter(r.outcome for r in mine)
        problems = sorted(r.problems for r in mine if r.outcome == "killed")
        rows.append((name, *(count[k] for k in KINDS), f"{statistics.median(problems):g}" if problems else "-",
                     problems[-1] if problems else "-", f"{sum(r.comparisons for r in mine if not r.row.fault):,}",
                     f"{sum(r.seconds for r in mine):.0f} s"))
    return ("group", "killed", "survived", "other reason", "no evidence", "right", "false alarms", "not run",
            "problems to the kill", "at most", "comparisons of variants", "time"), rows


def by_row(results: Sequence[Caught]) -> Table:
    """A row a fault or variant: at how many seeds it ended as it must, the smallest margin, how soon."""
    rows = []
    for row, mine in grouped(results, lambda r: r.row).items():
        margins = [r.margin for r in mine if r.margin is not None]
        problems = [r.problems for r in mine]
        rows.append((row.group, row.name, row.op, row.check, f"{sum(r.good for r in mine)} of {len(mine)}",
                     _number(min(margins)) if margins else "-", f"{statistics.median(problems):g}", max(problems),
                     ", ".join(sorted({r.seen for r in mine if r.seen})), row.doc))
    return ("group", "row", "op", "check", "as it must", "smallest margin", "problems", "at most", "seen as",
            "what it is"), rows


def _number(x: float) -> str:
    return "no error is allowed" if not math.isfinite(x) or x > 1e6 else f"{x:.3g}"


def comparison(results: Sequence[Caught]) -> Table:
    """Faults caught and correct variants rejected by each rule, on the same problems of the check `values`."""
    rows = []
    with_rules = [r for r in results if r.rules.seen]
    groups = grouped(with_rules, lambda r: r.row.op.rpartition(".")[0])
    for name, mine in (*groups.items(), ("all", with_rules)):
        for data in ("ordinary", "all"):
            cells = [_cell(mine, rule, data) for rule in (OURS, *COLUMNS)]
            rows.append((name, data, *cells))
    return ("module", "data", OURS, *COLUMNS), rows


def _cell(results: Sequence[Caught], rule: str, data: str) -> str:
    """`caught/faults` and, if any, `(FA rejected/variants)`; of rows that the rule could be applied to."""
    said = [(r.row.fault, r.rules.verdict(rule, data)) for r in results]
    faults = [v for fault, v in said if fault and v is not None]
    variants = [v for fault, v in said if not fault and v is not None]
    if not faults and not variants:
        return "-"
    alarms = f" (FA {sum(variants)}/{len(variants)})" if any(variants) else ""
    return f"{sum(faults)}/{len(faults)}{alarms}"


def wrong_ones(results: Sequence[Caught]) -> list[str]:
    """A line for each row that did not end as it must."""
    return [f"{r.outcome}: {r.row.name} on {r.row.op} ({r.row.check}), seed {r.seed}: saw {r.seen or 'nothing'}, the "
            f"table says {', '.join(r.row.reasons) or 'right'}{'; ' + r.case if r.case else ''}"
            for r in results if not r.good]


def text(results: Sequence[Caught]) -> str:
    """What ends on the screen."""
    parts = [_plain(confusion(results))]
    if any(r.rules.seen for r in results):
        parts += ["Faults caught by each rule on the same problems (FA: correct variants rejected):",
                  _plain(comparison(results))]
    return "\n\n".join(parts)


def _plain(table: Table) -> str:
    return tabulate(table[1], table[0], tablefmt="github")


def sections(results: Sequence[Caught], command: str) -> Iterator[tuple[str, str, Table | None]]:
    """(heading, text, table) of each part of a page."""
    faults, variants = ({r.row for r in results if r.row.fault is kind} for kind in (True, False))
    seeds = len({r.seed for r in results})
    yield ("The suite tried on itself",
           f"{command}: {len(faults)} faults and {len(variants)} correct variants at {seeds} "
           f"seed{'s' if seeds > 1 else ''}. A fault is killed when a case ends nonconforming with the reason that the "
           "library names; a variant is right when every one of its cases passes.", confusion(results))
    if any(r.rules.seen for r in results):
        yield ("Beside other rules",
               "Faults caught of those that a rule can be applied to, on the same problems; FA: correct variants that "
               "it rejects. Ordinary data are normally distributed, all are every family.", comparison(results))
    wrong = wrong_ones(results)
    yield ("Not as they must be", "" if wrong else "None.", (("row",), [(w,) for w in wrong]) if wrong else None)
    yield "Every row", "", by_row(results)


def write(results: Sequence[Caught], folder: Path, command: str) -> Path:
    """`selftest.md` and `selftest.html` with every table, `selftest.json` with every row; returns the path of the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = list(sections(results, command))
    lines, body = [], []
    for level, (heading, said, told) in enumerate(parts):
        lines += [f"{'#' if not level else '##'} {heading}", "", md(said), ""]
        body += [tag("h1" if not level else "h2", heading), tag("p", said, class_="lead") if said else None]
        if told is not None:
            head, rows = told
            lines += [_plain((head, [tuple(md(x) if isinstance(x, str) else x for x in row) for row in rows])), ""]
            body.append(table(head, [tag("tr", *(tag("td", x) for x in row)) for row in rows]))
    (folder / "selftest.md").write_text("\n".join(lines), encoding="utf-8")
    (folder / "selftest.json").write_text(json.dumps([to_json(r) for r in results], indent=1) + "\n")
    path = folder / "selftest.html"
    path.write_text(page(parts[0][0], *body), encoding="utf-8")
    return path
