"""One case on an op's page: a line with a mark for each run, and what each run says of it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conformance.identity import parse_id
from conformance.results import Record
from reports.artifacts import Copier, Evidence
from reports.fold import State, domain_of, state_of
from reports.load import LoadedRun
from reports.markup import Html, join, tag

_TITLES = {"worst_ratio": "error over bound", "index": "worst at"}
_QUIET = (State.CONFORMING, State.PARTIAL, State.NOT_YET, State.NOT_RUN)


def case_entry(
    case: str,
    seen: Mapping[int, Record],
    runs: Sequence[LoadedRun],
    copier: Copier,
    icon: Callable[[State], Html],
    *,
    unfolded: bool,
) -> Html:
    """The entry of a case; its anchor is the case id."""
    _, check, keys = parse_id(case)
    states = {i: state_of(record) for i, record in seen.items()}
    marks = (
        tag("span", icon(states[i]), class_=f"mark s-{states[i].value}", title=f"{run.label}: {seen[i].status}")
        if i in seen
        else tag("span", icon(State.NOT_RUN), class_="mark s-not_run", title=f"{run.label}: not selected")
        for i, run in enumerate(runs)
    )
    order = sorted(seen, key=lambda i: (list(State).index(states[i]), i))
    loud = order[0]
    message = seen[loud].message if states[loud] not in (State.CONFORMING, State.PARTIAL) else ""
    variant = ", ".join(f"{k}={v}" for k, v in keys.items())
    return tag(
        "details",
        tag(
            "summary",
            tag("span", *marks, class_="marks"),
            tag("code", tag("b", check), f" {variant}" if variant else ""),
            tag("span", message.partition("\n")[0], class_="why") if message else None,
        ),
        tag(
            "div",
            *(_record(seen[i], runs[i], copier, icon, quiet=len(seen) > 1 and states[i] in _QUIET) for i in order),
            class_="body",
        ),
        class_="case",
        id=case,
        open=unfolded,
        data_states=" ".join(sorted({s.value for s in states.values()})),
        data_text=f"{case} {message}",
    )


def _record(
    record: Record,
    run: LoadedRun,
    copier: Copier,
    icon: Callable[[State], Html],
    *,
    quiet: bool = False,
) -> Html:
    """What one run says of a case; folded where it is `quiet`."""
    state = state_of(record)
    evidence = copier.take(run.path, record.artifacts, run.label) if record.artifacts else Evidence()
    words = [
        record.status,
        *([record.reason] if record.reason else []),
        *([f"in {record.phase}"] if record.phase else []),
    ]
    if record.expectation != "none":
        words.append(record.expectation.replace("_", " "))
    head = tag("h4", run.label, tag("span", icon(state), ", ".join(words), class_=f"badge s-{state.value}"))
    body = join(
        tag("p", record.message, class_="message" + " lines" * ("\n" in record.message)) if record.message else None,
        _section("waiver", tag("p", waiver_text(record)) if record.waiver else None),
        _numerics(record.numerics),
        _criteria(record.numerics),
        _section(
            "picture",
            *(
                tag("img", src=_up(p.href), alt=f"where the error sits: {p.name}", class_="picture", loading="lazy")
                for p in evidence.of_kind("picture")
            ),
        ),
        _section("minimal problem", tag("pre", _json(record.problem)) if record.problem else None),
        _section(
            "evidence",
            tag("div", *(_file(link.name, link.href, link.kind) for link in evidence.links), class_="files")
            if evidence.links
            else None,
        ),
        *(tag("p", note, class_="note") for note in evidence.notes),
        _section("what the compiler said", tag("pre", str(record.artefact["log"]))
                 if isinstance(record.artefact, dict) and record.artefact.get("log") else None),
        _section("replay", tag("pre", shlex.join(map(str, record.replay))) if record.replay else None, copy=True),
        _facts(record),
    )
    if quiet:
        return tag("details", tag("summary", head), body, class_="record")
    return tag("div", head, body, class_="record")


def waiver_text(record: Record) -> str:
    """`until <day>: <reason> (<issue>)` of the waiver that names the case; `?` for what it does not say."""
    said = {k: str((record.waiver or {}).get(k) or "?") for k in ("expiry", "reason", "issue")}
    return f"until {said['expiry']}: {said['reason']} ({said['issue']})"


def _up(href: str) -> str:
    return f"../{href}"


def _file(name: str, href: str, kind: str) -> Html:
    label = f"{name} (stand-alone reproducer)" if kind == "script" else name
    return tag("a", label, href=_up(href))


def _section(title: str, *content: Html | None, copy: bool = False) -> Html | None:
    content = tuple(c for c in content if c is not None)
    return join(tag("h5", title, data_copy=copy), *content) if content else None


_EXACT = ("observed", "expected")
"""figures that may differ in their last digit only"""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any, *, exact: bool = False) -> str:
    if isinstance(value, float):
        return repr(value) if exact else f"{value:.6g}"
    return value if isinstance(value, str) else _json(value)


def _numerics(numerics: Mapping[str, Any]) -> Html | None:
    """A table, one row an output, one column for every key that any output has."""
    rows = {name: row for name, row in numerics.items() if isinstance(row, dict)}
    keys = list(dict.fromkeys(k for row in rows.values() for k in row if k != "criteria"))
    if not keys:
        return None
    head = tag("tr", tag("th", "output"), *(tag("th", _TITLES.get(k, k.replace("_", " "))) for k in keys))
    body = (
        tag("tr", tag("td", tag("code", name)),
            *(tag("td", _text(row[k], exact=k in _EXACT) if k in row else "") for k in keys))
        for name, row in rows.items()
    )
    return tag("div", tag("table", head, *body), class_="numbers")


def _criteria(numerics: Mapping[str, Any]) -> Html | None:
    """What other projects' criteria say of the same results, folded away: information, never a verdict."""
    told = [(name, criterion, entry) for name, row in numerics.items() if isinstance(row, dict)
            for criterion, entry in (row.get("criteria") if isinstance(row.get("criteria"), dict) else {}).items()
            if isinstance(entry, dict)]
    if not told:
        return None
    head = tag("tr", *(tag("th", h) for h in ("output", "criterion", "does not hold in", "largest value", "limit")))
    body = (
        tag("tr", tag("td", tag("code", name)), tag("td", criterion),
            tag("td", f"{_text(e.get('rejected', 0))} of {_text(e.get('problems', 0))} problems"),
            *(tag("td", _text(e[k]) if k in e else "") for k in ("worst", "limit")))
        for name, criterion, e in told
    )
    return tag("details", tag("summary", "What other criteria say (they decide nothing)"),
               tag("div", tag("table", head, *body), class_="numbers"))


def _artefact(a: Mapping[str, Any] | None) -> str:
    """`cubin, 11368 bytes, sha256 ...` of what a compiler made."""
    if not isinstance(a, dict):
        return ""
    return f"{a.get('kind', '?')}, {a.get('nbytes', '?')} bytes, sha256 {a.get('sha256', '?')}"


def _facts(record: Record) -> Html:
    domain = domain_of((record,), None)
    spent = {k: v for k, v in record.duration_s.items() if isinstance(v, (int, float)) and v >= 0.0005}
    facts = {
        "problems": ", ".join(f"{n} {what}" for what, n in record.examples.items()),
        "domain": domain.text(),
        "data": ", ".join(domain.families),
        "time": ", ".join(f"{k} {v:.3g} s" for k, v in spent.items()),
        "artefact": _artefact(record.artefact),
        "vacuity": "" if record.vacuity is None else f"{record.vacuity:.3g}",
        "seed": record.seed or "",
        "attempt": record.attempt if record.attempt > 1 else "",
        "ran before": ", ".join(map(str, record.lineage)),
    }
    return tag("dl", *(x for k, v in facts.items() if v for x in (tag("dt", k), tag("dd", str(v)))))
