"""The page of times: rooflines, every timed case with its interval and shares, and what is claimed of the chips."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from conformance.catalogue.peaks import Claim, chips, claims
from reports.frame import page, table
from reports.load import LoadedRun
from reports.markup import Html, tag
from reports.roofline import roofline, share_bar
from reports.speed_data import NONE, Timed, figure, share_text, time_text, timed_in, word

PAGE = "speed.html"
_MARK = {"meets": "conforming", "below": "inconclusive", "too fast": "nonconforming", "not comparable": "not_run"}


def speed_body(runs: Sequence[LoadedRun]) -> list[Html]:
    """What stands on the page; empty where no run has a time."""
    timed = [timed_in(run.records) for run in runs]
    if not any(timed):
        return []
    out = [tag("p", tag("a", "← matrix", href="index.html"), class_="crumb"), tag("h1", "Times")]
    for run, cases in zip(runs, timed, strict=True):
        if cases:
            out += [tag("h2", run.label), tag("p", _about(cases), class_="lead")]
            plot = roofline(cases)
            out += [plot] if plot is not None else []
            out.append(table(("op", "workload", "time", "95 % interval", "rate", "as the module counts",
                               "of the roofline", "", "of what was attained", "of the published peak", "verdict"),
                              [_row(t) for t in cases]))
    out += [tag("h2", "Published speeds"), tag("p", _RULE, class_="lead"),
            table(("module", "what", "chip", "published", "share of peak", "here", "verdict", "source"),
                   [row for c in claims() for row in _claim_rows(c, runs, timed)])]
    return out


_RULE = ("A claim is met where the slow end of the interval is at most two points below the claimed share of the "
         "matrix unit's published peak, on the claimed chip and work. Too fast: even the slow end is above the peak, "
         "so counting or clock is wrong. Anything else says nothing about the claim.")


def _about(cases: Sequence[Timed]) -> str:
    sources = sorted({word(t.perf.get("peak"), "source") for t in cases} - {""})
    clocks = sorted({word(t.perf, "clock") for t in cases} - {""})
    unstable = sum(t.unstable for t in cases)
    return (f"{len(cases)} timed cases by the clock {' and '.join(clocks)}, {unstable} of them unstable. "
            f"Peaks: {'; '.join(sources) or 'unknown'}.")


def _row(t: Timed) -> Html:
    perf = t.perf
    roof = figure(perf, "fraction_roofline")
    own = perf.get("own")
    verdict = word(perf, "verdict") or "not comparable"
    unstable = tag("b", " unstable") if t.unstable else None
    return tag(
        "tr",
        tag("th", t.record.op, scope="row"),
        tag("td", word(perf, "workload")),
        tag("td", time_text(t.time_s)),
        tag("td", f"{time_text(t.low_s)} to {time_text(t.high_s)}", unstable),
        tag("td", _rate(perf, word(perf, "bound"))),
        tag("td", _rate(own, "flops" if figure(own, "flops") else "bytes"), title=word(own, "rule") or None),
        tag("td", share_text(roof)),
        tag("td", share_bar(roof)),
        tag("td", share_text(figure(perf, "fraction_attainable"))),
        tag("td", share_text(figure(perf, "fraction_nominal"))),
        tag("td", verdict, title=word(perf, "why") or None, class_=f"s-{_MARK.get(verdict, 'not_run')} word"),
    )


def _rate(table: object, bound: str) -> str:
    flops, moved = figure(table, "tflops"), figure(table, "gb_s")
    if bound == "flops" and flops:
        return f"{flops:.4g} TFLOPS"
    return f"{moved:.4g} GB/s" if moved else NONE


def _claim_rows(claim: Claim, runs: Sequence[LoadedRun], timed: Sequence[Sequence[Timed]]) -> list[Html]:
    """A row for each run that says something of this claim, else one that says why none does."""
    found = [(run.label, row) for run, cases in zip(runs, timed, strict=True) for t in cases for row in t.claims
             if (word(row, "what"), row.get("chips")) == (claim.what, list(claim.chips))
             and word(row, "source") == claim.source and t.record.op == claim.op]
    graded = [(label, row) for label, row in found if word(row, "verdict") in ("meets", "below", "too fast")]
    if graded:
        return [_claim_row(claim, f"{share_text(figure(row, 'low'))} on {label}", word(row, "verdict"),
                           word(row, "why")) for label, row in graded]
    why = claim.why or (word(found[0][1], "why") if found else "no run of these timed it")
    return [_claim_row(claim, NONE, "not comparable", why)]


def _claim_row(claim: Claim, here: str, verdict: str, why: str) -> Html:
    shares = {share_text(s) for c in claim.chips if (s := claim.of_peak(chips()[c])) is not None}
    published = f"{claim.figure:g} {claim.unit}" if claim.figure else claim.text or "no figure"
    return tag("tr", tag("th", claim.module, scope="row"), tag("td", claim.what),
               tag("td", ", ".join(claim.chips) or NONE), tag("td", published),
               tag("td", ", ".join(sorted(shares)) or NONE), tag("td", here),
               tag("td", f"{verdict}: {why}", class_=f"s-{_MARK[verdict]} word"), tag("td", claim.source))


def write_speed(runs: Sequence[LoadedRun], folder: Path) -> bool:
    """Write the page where there is something to say; whether there was."""
    body = speed_body(runs)
    if body:
        (folder / PAGE).write_text(page("Times", *body), encoding="utf-8")
    return bool(body)
