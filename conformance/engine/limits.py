"""What a backend can run: patterns of op names, and rows of limits on problems."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from conformance.model import Problem
from conformance.protocol import Description, Support, unsupported

_TESTS = {
    "in": lambda x, v: x in v, "not_in": lambda x, v: x not in v,
    "lt": lambda x, v: x < v, "le": lambda x, v: x <= v, "ge": lambda x, v: x >= v,
    "multiple_of": lambda x, v: x % v == 0,
}
SAYS = ("field", "reason", "when", "given")
"""keys of a row that are no test of a value; `given` is looked at apart, for it is about values that are None"""
_WORDS = {"in": "must be one of", "not_in": "must be none of",
          "lt": "must be below", "le": "must be at most", "ge": "must be at least",
          "multiple_of": "must be a multiple of"}


def support_of(description: Description, op: str) -> Support:
    """The entry of the longest matching pattern; an op that none names is not supported yet."""
    best = max((p for p in description.ops if fnmatchcase(op, p)), key=len, default=None)
    return description.ops[best] if best else unsupported(f"backend {description.name} does not name {op} yet")


def variant_limit(support: Support, variant: Mapping[str, str]) -> str:
    """Why this variant is outside the limits whatever the sizes, or an empty string."""
    return _first_broken(support, variant.get)


def problem_limit(support: Support, problem: Problem, row_bytes: Mapping[str, int] | None = None) -> str:
    """Why this problem is outside the limits, or an empty string."""
    rows = row_bytes or {}

    def look_up(field: str) -> Any:
        if field in problem.variant:
            return problem.variant[field]
        if field.endswith(".row_bytes"):
            return rows.get(field.removesuffix(".row_bytes"))
        if field in problem.sizes:
            return problem.sizes[field]
        value = problem.values.get(field)
        return [list(value)] if isinstance(value, (list, tuple)) else value  # one value, not one a rank

    for row in support.limits:
        if "given" in row and row["field"] in problem.values and _holds_when(row, look_up):
            got = problem.values[row["field"]]
            if (got is not None) != row["given"]:
                told = "must be given" if row["given"] else f"={got} must not be given"
                return f"{row['field']}{'' if told[0] == '=' else ' '}{told}" + _why(row)
    return _first_broken(support, look_up)


def _first_broken(support: Support, look_up: Any) -> str:
    for row in support.limits:
        got = look_up(row["field"])
        if got is None or not _holds_when(row, look_up):
            continue
        for test, allowed in row.items():
            if test in SAYS:
                continue
            values = got if isinstance(got, list) else [got]
            if not all(_TESTS[test](v, allowed) for v in values):
                listed = ", ".join(map(str, allowed)) if test in ("in", "not_in") else allowed
                return f"{row['field']}={got} {_WORDS[test]} {listed}" + _why(row)
    return ""


def _holds_when(row: Mapping[str, Any], look_up: Any) -> bool:
    """Whether a row is about this problem: `when` lists the values that some other fields must have.

    A field of which nothing is known yet does not have them.
    """
    return all(look_up(field) in allowed for field, allowed in row.get("when", {}).items())


def _why(row: Mapping[str, Any]) -> str:
    return f": {row['reason']}" if "reason" in row else ""


def check_limits(description: Description) -> list[str]:
    """What is malformed in a description's limits: unknown tests, rows without a field."""
    wrong = []
    for name, support in description.ops.items():
        for row in support.limits:
            if "field" not in row:
                wrong.append(f"{name}: a limit without a field: {dict(row)}")
            wrong.extend(f"{name}: unknown limit {t!r}; known: {', '.join(_TESTS)}"
                         for t in row if t not in SAYS and t not in _TESTS)
    return wrong
