"""No tolerance is picked by hand: what decides a verdict compares with bounds, and their numbers stand in one table."""

from __future__ import annotations

import ast
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from references.bounds import constants

ROOT = Path(__file__).parent.parent
TABLE = "references/bounds/constants.py"
INFORMS = ("references/criteria", "references/large/__main__.py")
"""what other projects judge by, reported and never used to pass; what only measures"""
ENGINE = ("judge", "checks", "relations", "misuse", "run", "compiled", "patterns")


def judging() -> list[Path]:
    files = [*ROOT.glob("references/**/*.py"), *ROOT.glob("cases/**/*.py"),
             *(ROOT / f"conformance/engine/{name}.py" for name in ENGINE)]
    names = {f: f.relative_to(ROOT).as_posix() for f in files}
    return sorted(f for f, name in names.items() if name != TABLE and not name.startswith(INFORMS))


def loose_numbers(source: str) -> list[str]:
    """Comparisons with a float literal in them; powers of two with a named exponent are no literals."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare):
            continue
        powers = {id(n.left) for n in ast.walk(node) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Pow)
                  and not isinstance(n.right, (ast.Constant, ast.UnaryOp))}
        parts = [n for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, float)]
        if any(id(n) not in powers for n in parts):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("file", judging(), ids=lambda f: f.relative_to(ROOT).as_posix())
def test_no_float_literal_in_a_comparison(file: Path) -> None:
    assert loose_numbers(file.read_text()) == []


@pytest.mark.parametrize(("source", "found"), [
    ("error < 1e-3", 1), ("abs(a - b) <= 0.01 * abs(b)", 1), ("x == 0.5", 1), ("a < 2.0**-40 * b", 1),
    ("f(x, 0.5) > y", 1), ("0 < rate < 1e6", 1), ("x > -1.0", 1),
    ("error <= bound", 0), ("x < 2.0**spec.p * unit", 0), ("n == 0", 0), ("x = 0.5", 0), ("f(0.5)", 0),
])
def test_the_check_sees(source: str, found: int) -> None:
    assert len(loose_numbers(source)) == found


def test_every_row_of_the_table_has_a_source() -> None:
    tables = {name: t for name, t in vars(constants).items() if isinstance(t, dict) and name != "FLOATS"}
    rows = [(f"{name}[{key!r}]", row) for name, t in tables.items() for key, row in t.items() if is_dataclass(row)]
    assert len(rows) > 20
    for name, row in rows:
        assert "source" in {f.name for f in fields(row)}, name
        assert len(row.source) >= 4, name
