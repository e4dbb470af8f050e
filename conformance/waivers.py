"""Waivers: known nonconformities, each by name, with a reason, an issue, an end and a fingerprint.

A file reads

    [[waiver]]
    id = "tilelang.reduce_max/values:*"       # an id, or any prefix with * behind it
    reason = "max drops a NaN in the first operand"
    issue = "https://example.org/issues/12"
    expiry = 2027-06-30                        # its last day
    fingerprint = { status = "fail", phase = "compare", reason = "nonfinite", error_band = [1.0, 8.0] }

    on = { backend = "compiler", target = "ascend" }   # may be absent: only of runs of this backend with these options

`phase` and `error_band` may be absent (any), and so may `reason` unless the status is
fail; status, phase and reason may also be lists. A failure that looks different from
the fingerprint is not waived.
"""

from __future__ import annotations

import datetime
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from conformance.identity import matches, nearest
from conformance.results import NONCONFORMING, REASONS, Expectation, Phase, Record, Status, error_over_bound

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WAIVABLE = tuple(sorted(s.value for s in NONCONFORMING))
"""Only these can be waived: what is inconclusive says nothing about the op."""

_QUERY = re.compile(r"[A-Za-z0-9_]+\.[A-Za-z0-9_./:=,+-]*\*?")
_KEYS = ("id", "reason", "issue", "expiry", "fingerprint")
_OPTIONAL = ("on",)
_WORDS = {"status": WAIVABLE, "phase": tuple(p.value for p in Phase), "reason": REASONS}


class WaiverError(ValueError):
    """A waiver file that can't be used; the message names the file, the line and the rule."""


@dataclass(frozen=True)
class Fingerprint:
    """What the waived failure looks like. An empty tuple, or no band, admits anything."""

    status: tuple[str, ...]
    phase: tuple[str, ...] = ()
    reason: tuple[str, ...] = ()
    error_band: tuple[float, float] | None = None
    """smallest and largest worst error over bound, both included"""

    def fits(self, record: Record) -> bool:
        for allowed, seen in ((self.status, record.status), (self.phase, record.phase), (self.reason, record.reason)):
            if allowed and seen not in allowed:
                return False
        if self.error_band is None:
            return True
        ratio = error_over_bound(record)
        return ratio is not None and self.error_band[0] <= ratio <= self.error_band[1]


@dataclass(frozen=True)
class Waiver:
    id: str
    """the query"""
    reason: str
    issue: str
    expiry: datetime.date
    fingerprint: Fingerprint
    line: int = 0
    """where it stands in its file; 0 where that is not known"""
    on: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """`backend`, and options of it, that a run must have, each with the values that count; empty for any"""

    def expired(self, today: datetime.date) -> bool:
        return today > self.expiry

    def names(self, record: Record) -> bool:
        """Whether it is about this record: its case, and the backend that ran it."""
        return matches(self.id, record.id) and self.ran_by(record)

    def ran_by(self, record: Record) -> bool:
        """Whether the record is of a run that the waiver is about."""
        return all(any(record.backend == v if key == "backend" else f"--backend-option={key}={v}" in record.replay
                       for v in values) for key, values in self.on)


def load(path: Path) -> tuple[Waiver, ...]:
    """Reads a waiver file. Raises WaiverError for one that is missing, broken or incomplete."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise WaiverError(f"{path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise WaiverError(f"{path}: no UTF-8 text (byte {e.start})") from e
    return parse(text, str(path))


@cache
def known_findings() -> tuple[str, ...]:
    """Queries of the cases that the project's own file waives: they fail with nothing wrong beside what is known."""
    path = Path(__file__).resolve().parents[1] / "waivers.toml"
    return tuple(w.id for w in load(path)) if path.exists() else ()


def is_known(case_id: str) -> bool:
    """Whether a case is one of `known_findings`."""
    return any(matches(query, case_id) for query in known_findings())


def parse(text: str, name: str = "waivers") -> tuple[Waiver, ...]:
    """`load` for text; `name` stands for the file in messages."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise WaiverError(f"{name}: no valid TOML: {e}") from e
    where = _Where(name, text)
    for key in raw:
        if key != "waiver":
            raise WaiverError(f"{name}: unknown table {key!r}; every waiver is a [[waiver]]")
    rows = raw.get("waiver", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise WaiverError(f"{name}: `waiver` must be an array of tables, written [[waiver]]")
    waivers = tuple(_waiver(row, where, n) for n, row in enumerate(rows))
    first: dict[tuple[Any, ...], int] = {}
    for n, waiver in enumerate(waivers):
        same = first.setdefault((waiver.id, waiver.fingerprint, waiver.on), n)
        if same != n:
            raise where.error(n, "id", f"{waiver.id!r} with this fingerprint stands already in waiver {same + 1}")
    return waivers


class _Where:
    """Finds the line of a waiver's key, for messages."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.lines = name, text.splitlines()
        self.heads = [i for i, s in enumerate(self.lines) if re.match(r"\s*\[\[\s*waiver\s*\]\]", s)]

    def line(self, row: int, key: str = "") -> int:
        if row >= len(self.heads):
            return 0
        start = self.heads[row]
        end = self.heads[row + 1] if row + 1 < len(self.heads) else len(self.lines)
        if key:
            for i in range(start + 1, end):
                if re.match(rf"\s*(\[waiver\.)?[\"']?{re.escape(key)}\b", self.lines[i]):
                    return i + 1
        return start + 1

    def error(self, row: int, key: str, what: str) -> WaiverError:
        line = self.line(row, key)
        place = f"{self.name}:{line}" if line else self.name
        return WaiverError(f"{place}: waiver {row + 1}: {what}")


def _waiver(raw: Mapping[str, Any], where: _Where, row: int) -> Waiver:
    for key in raw:
        known = (*_KEYS, *_OPTIONAL)
        if key not in known:
            raise where.error(row, key, f"unknown key {key!r}; {nearest(key, known)} known: {', '.join(known)}")
    for key in _KEYS:
        if key not in raw:
            raise where.error(row, "", f"no {key}")
    for key in ("id", "reason", "issue"):
        if not isinstance(raw[key], str) or not raw[key].strip():
            raise where.error(row, key, f"{key} must be text that is not empty, got {raw[key]!r}")
    if not _QUERY.fullmatch(raw["id"]):
        rule = "it must be a case id, or a prefix with * behind it that names at least the module"
        raise where.error(row, "id", f"id {raw['id']!r}: {rule}")
    expiry = raw["expiry"]
    if not isinstance(expiry, datetime.date) or isinstance(expiry, datetime.datetime):
        raise where.error(row, "expiry", f"expiry must be a date without quotes, such as 2027-06-30, got {expiry!r}")
    fingerprint = _fingerprint(raw["fingerprint"], where, row)
    on = raw.get("on", {})
    values = {k: tuple(v) if isinstance(v, list) else (v,) for k, v in on.items()} if isinstance(on, dict) else {}
    if "on" in raw and not (values.get("backend") and all(isinstance(v, str) for vs in values.values() for v in vs)):
        raise where.error(row, "on", f"on must be a table of texts, `backend` and options of it, got {on!r}")
    return Waiver(raw["id"], raw["reason"].strip(), raw["issue"].strip(), expiry, fingerprint, where.line(row),
                  tuple(sorted(values.items())))


def _fingerprint(raw: Any, where: _Where, row: int) -> Fingerprint:
    def error(what: str) -> WaiverError:
        return where.error(row, "fingerprint", f"fingerprint: {what}")

    if not isinstance(raw, dict):
        raise error(f"must be a table of status, phase, reason, error_band, got {raw!r}")
    known = (*_WORDS, "error_band")
    for key in raw:
        if key not in known:
            raise error(f"unknown key {key!r}; {nearest(key, known)} known: {', '.join(known)}")
    words: dict[str, tuple[str, ...]] = {}
    for key, allowed in _WORDS.items():
        given = raw.get(key, [])
        words[key] = tuple(given) if isinstance(given, list) else (given,)
        for word in words[key]:
            if word not in allowed:
                hint = nearest(str(word), allowed)
                raise error(f"{key} {word!r} can't stand here; {hint} known: {', '.join(allowed)}")
    if not words["status"]:
        raise error(f"no status; one of {', '.join(WAIVABLE)}")
    if Status.FAIL.value in words["status"] and not words["reason"]:
        raise error("a fail needs its reason, or the waiver would cover every wrong result")
    return Fingerprint(**words, error_band=_band(raw["error_band"], error) if "error_band" in raw else None)


def _band(raw: Any, error: Any) -> tuple[float, float]:
    ok = isinstance(raw, list) and len(raw) == 2 and all(type(x) in (int, float) for x in raw)
    if not ok or not 0 <= raw[0] <= raw[1]:
        raise error(
            f"error_band must be [smallest, largest] error over bound with 0 <= smallest <= largest, got {raw!r}"
        )
    return float(raw[0]), float(raw[1])


def apply(record: Record, waivers: Iterable[Waiver], today: datetime.date) -> Expectation:
    """What the waivers make of one record.

    A pass under a waiver that has not expired is `unexpected_pass`. What is neither a
    pass nor nonconforming (unsupported, error, oom, ...) can't be waived: `none`.
    """
    mine = [w for w in waivers if w.names(record)]
    alive = [w for w in mine if not w.expired(today)]
    if record.status == Status.PASS:
        return Expectation.UNEXPECTED_PASS if alive else Expectation.NONE
    if not mine or Status(record.status) not in NONCONFORMING:
        return Expectation.NONE
    if any(w.fingerprint.fits(record) for w in alive):
        return Expectation.WAIVED
    fits_expired = any(w.fingerprint.fits(record) for w in mine)
    return Expectation.WAIVER_EXPIRED if fits_expired or not alive else Expectation.WAIVER_MISMATCH


@dataclass(frozen=True)
class Usage:
    """What one waiver did in a run: how many cases it names, by expectation (taken alone)."""

    waiver: Waiver
    by_expectation: Mapping[str, int]
    expired: bool

    @property
    def matched(self) -> int:
        return sum(self.by_expectation.values())

    def __str__(self) -> str:
        what = ", ".join(f"{n} {word}" for word, n in self.by_expectation.items()) or "matched nothing"
        until = f"expired on {self.waiver.expiry}" if self.expired else f"until {self.waiver.expiry}"
        return f"{self.waiver.id}: {what}; {until}; {self.waiver.issue}; {self.waiver.reason}"


def usage(waivers: Sequence[Waiver], records: Iterable[Record], today: datetime.date) -> list[Usage]:
    """One row a waiver, in file order; those that name no case of these records have `matched` 0."""
    counts: list[Counter[str]] = [Counter() for _ in waivers]
    for record in records:
        for waiver, count in zip(waivers, counts, strict=True):
            if waiver.names(record):
                count[apply(record, (waiver,), today).value] += 1
    return [Usage(w, dict(c), w.expired(today)) for w, c in zip(waivers, counts, strict=True)]


def unmatched(waivers: Sequence[Waiver], records: Iterable[Record], today: datetime.date) -> list[Waiver]:
    """The waivers about runs of this backend that name no case of these records."""
    mine = list(records)
    return [u.waiver for u in usage(waivers, mine, today)
            if not u.matched and (not u.waiver.on or any(u.waiver.ran_by(r) for r in mine))]


def described(record: Record, waivers: Iterable[Waiver]) -> dict[str, str]:
    """Reason, issue and expiry of the first waiver that is about this record; empty where none is."""
    for w in waivers:
        if w.names(record):
            return {"id": w.id, "reason": w.reason, "issue": w.issue, "expiry": w.expiry.isoformat()}
    return {}
