"""What other people's criteria say of the judged results, beside the verdict and without a part in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from conformance.engine import kept_outputs
from conformance.engine.attempt import Attempt
from conformance.results import Record
from references.criteria import criteria
from references.expected import Expected, Within
from references.formats import codec

MOST_ELEMENTS = 1 << 22
"""of one output; larger ones are left out, for the criteria would take longer than the judgement"""


def note(record: Record, attempt: Attempt, reference_run: Path | None = None) -> None:
    """Add what each cheap criterion says of the judged run to `record.numerics[output]["criteria"]`.

    By criterion: `problems` told of, `rejected` of them, and the `worst` value that is a number. Only outputs whose
    value the oracle gives as a number have any. With a reference run whose outputs of the same call were kept, every
    criterion is told, the ratios of errors among them. Raises nothing: no verdict hangs on what other rules say.
    """
    if len(attempt.seen) != len(attempt.examples) or not attempt.seen or len(attempt.expected) != len(attempt.seen):
        return
    seen = attempt.seen[-1]
    theirs = {} if reference_run is None else kept_outputs.load(reference_run, record.id, attempt)
    for name, want in attempt.expected[-1].items():
        if not _applies(want, seen.outputs.get(name)):
            continue
        fmt, other = seen.formats[name], theirs.get(name)
        try:
            told = criteria(codec.decode(seen.outputs[name], fmt), want.value, fmt, op=record.op, output=str(name),
                            unspecified=want.unspecified, brief=other is None,
                            reference=None if other is None else codec.decode(other, fmt))
        except Exception as e:  # information only: no verdict hangs on it, and the result tells what went wrong
            told = {f"none: {type(e).__name__}": {"value": None, "holds": None}}
        into = record.numerics.setdefault(name, {"elements": 0}).setdefault("criteria", {})
        for criterion, entry in told.items():
            _add(into.setdefault(criterion, {"problems": 0, "rejected": 0}), entry)


def _applies(want: Expected, codes: np.ndarray | None) -> bool:
    return isinstance(want, Within) and codes is not None and codes.size <= MOST_ELEMENTS


def _add(row: dict[str, Any], entry: dict[str, Any]) -> None:
    row["problems"] += entry["holds"] is not None
    row["rejected"] += entry["holds"] is False
    value = entry["value"]
    if isinstance(value, (int, float)) and value >= row.get("worst", value):
        row["worst"] = value
    if isinstance(entry.get("limit"), (int, float)):
        row["limit"] = entry["limit"]
    if "level" in entry:
        row["level"] = entry["level"]
