"""Case ids, queries on them, and the seeds that follow from them."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable
from itertools import takewhile

_PAIR = r"[a-z0-9_]+=[a-z0-9_.+-]+"
ID = re.compile(rf"(?P<op>[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+)/(?P<check>[a-z]+)(:(?P<keys>{_PAIR}(,{_PAIR})*))?")


def parse_id(text: str) -> tuple[str, str, dict[str, str]]:
    """(op, check, variant keys) of a case id. Raises ValueError saying the grammar."""
    m = ID.fullmatch(text)
    if not m:
        msg = f"{text!r} is no case id; it should read module.op/check:key=value,key=value"
        raise ValueError(msg)
    keys = dict(pair.split("=", 1) for pair in (m["keys"] or "").split(",") if pair)
    return m["op"], m["check"], keys


def matches(query: str, case_id: str) -> bool:
    """A query is an id, or any prefix of one with `*` behind it."""
    return case_id.startswith(query[:-1]) if query.endswith("*") else case_id == query


def selects(query: str, case_id: str) -> bool:
    """As `matches`; a module, an op, or an op and a check stand for all their cases."""
    return matches(query, case_id) or (case_id.startswith(query) and case_id[len(query)] in "./:" and bool(query))


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean` for the closest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else ""


def unknown(kind: str, word: str, known: Iterable[str], limit: int = 30) -> str:
    """The message for a name that does not exist: the nearest, and the known ones as far as these are few."""
    names = sorted(known)
    close, ops = _nearest_id(word, names), sorted({n.partition("/")[0] for n in names})
    if len(names) <= limit:
        shown = f"known: {', '.join(names)}"
    elif close:
        shown = f"({len(names)} in all)"
    elif len(ops) < len(names):
        shown = f"known are those of {', '.join(ops)}"
    else:
        shown = f"known: {', '.join(names[:limit])}, ... ({len(names)} in all)"
    return " ".join(filter(None, (f"unknown {kind} {word!r};", close, shown)))


def _nearest_id(word: str, names: list[str]) -> str:
    """As `nearest`; of a case id the case of its op that begins alike for longest."""
    mine = [n for n in names if n.startswith(word.partition("/")[0] + "/")]
    if not mine:
        return nearest(word, names)
    alike = {n: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(n, word, strict=False))) for n in mine}
    return f"did you mean {max(mine, key=alike.__getitem__)}?"


def slug(case_id: str) -> str:
    """A folder name for a case: readable, unique, short."""
    digest = hashlib.sha256(case_id.encode()).hexdigest()[:8]
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", case_id)[:80] + "-" + digest


def seed_of(*parts: object) -> int:
    """A 64-bit seed from the parts; the same on every machine."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
