"""What a selftest has tried so far: a line for each row and seed, written as it ends, so that a killed one goes on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conformance.collect import UsageError
from conformance.selftest.library import Row
from conformance.selftest.rules import Rules
from conformance.selftest.trial import Caught

FILE = "selftest.jsonl"


def key_of(row: Row, seed: int) -> str:
    """Changes with whatever of a row decides what is tried."""
    return json.dumps([{k: v for k, v in asdict(row).items() if k != "doc"}, seed])


def to_json(c: Caught) -> dict[str, Any]:
    row = c.row
    return {"group": row.group, "row": row.name, "op": row.op, "check": row.check, "fault": row.fault, "seed": c.seed,
            "outcome": c.outcome, "seen": c.seen, "case": c.case, "problems": c.problems, "cases": c.cases,
            "comparisons": c.comparisons, "seconds": round(c.seconds, 3), "message": c.message[:500],
            "margin": None if c.margin is None or not math.isfinite(c.margin) else c.margin,
            "rules": [[rule, data, n, c.rules.rejected[rule, data]] for (rule, data), n in c.rules.seen.items()]}


def from_json(row: Row, raw: Mapping[str, Any]) -> Caught:
    rules = Rules()
    for rule, data, seen, rejected in raw["rules"]:
        rules.seen[rule, data], rules.rejected[rule, data] = seen, rejected
    return Caught(row, raw["seed"], raw["outcome"], raw["cases"], raw["problems"], raw["comparisons"], raw["seconds"],
                  raw["seen"], raw["case"], raw["margin"], raw["message"], rules)


class Journal:
    """The file in a folder, or nothing without one. `about`: what all lines have in common."""

    def __init__(self, folder: Path | None, about: Mapping[str, Any], *, resume: bool) -> None:
        """Raises UsageError where the folder holds another selftest, or one that was not meant to go on."""
        self.path = folder / FILE if folder else None
        self.about = dict(about)
        self._lines: dict[str, Any] = {}
        if self.path is None:
            if resume:
                msg = "--resume goes on with what stands in a folder; name it with --out"
                raise UsageError(msg)
            return
        if self.path.exists() and self.path.stat().st_size:
            self._lines = self._read(resume)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._append({"about": self.about})

    def _read(self, resume: bool) -> dict[str, Any]:
        assert self.path is not None
        if not resume:
            msg = f"{self.path} holds a selftest: --resume goes on with it, another --out begins a new one"
            raise UsageError(msg)
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        try:
            head, *rows = map(json.loads, whole.splitlines())
            about, lines = head["about"], {r["key"]: r["caught"] for r in rows}
        except (ValueError, KeyError, TypeError) as e:
            msg = f"{self.path} is no selftest's: {type(e).__name__}: {e}"
            raise UsageError(msg) from e
        differs = [k for k in self.about if about.get(k) != self.about[k]]
        if differs:
            k = differs[0]
            msg = f"{self.path} began with {k} {about.get(k)!r}, and this is {self.about[k]!r}; name another --out"
            raise UsageError(msg)
        if len(whole) < len(data):  # it was killed in the middle of a line
            os.truncate(self.path, len(whole))
        return lines

    def done(self, tasks: Sequence[tuple[Row, int]]) -> dict[int, Caught]:
        """What was tried before, by its place among these."""
        found = {i: self._lines.get(key_of(row, seed)) for i, (row, seed) in enumerate(tasks)}
        return {i: from_json(tasks[i][0], raw) for i, raw in found.items() if raw is not None}

    def note(self, caught: Caught) -> None:
        self._append({"key": key_of(caught.row, caught.seed), "caught": to_json(caught)})

    def _append(self, row: Mapping[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a") as f:
                f.write(json.dumps(row) + "\n")
                f.flush()
