"""The public surface of the modules, as data: which functions there are, and what each class of op is checked for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from conformance.model import CHECKS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
MODULES = ("tilelang", "deepgemm", "deepep", "tilekernels", "flashmla", "deepselect")


@dataclass(frozen=True)
class Function:
    """One public function. `reason`, if there is one, says why it is declared out."""

    name: str
    op_class: str
    signature: str = ""
    reason: str = ""


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file. Raises ValueError naming file and place."""
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as e:
        msg = f"{path}: {e}"
        raise ValueError(msg) from e


@cache
def classes() -> Mapping[str, Mapping[str, bool | str]]:
    """Class of op -> check -> True, or the sentence why it does not apply."""
    table = read_toml(HERE / "classes.toml")
    for name, row in table.items():
        missing = [c for c in CHECKS if c not in row]
        if missing or set(row) - set(CHECKS):
            msg = f"classes.toml: {name} must say something of each check, and of no other; missing {missing}"
            raise ValueError(msg)
    return table


@cache
def functions(module: str) -> tuple[Function, ...]:
    """Every public function of a module. A row without a class has the file's `default_class`."""
    path = HERE / f"{module}.toml"
    if not path.exists():
        return ()
    table = read_toml(path)
    out = []
    for row in table.get("function", ()):
        op_class = row.get("class", table["default_class"])
        if op_class not in classes():
            msg = f"{path.name}: {row['name']}: unknown class {op_class!r}; known: {', '.join(classes())}"
            raise ValueError(msg)
        out.append(Function(row["name"], op_class, row.get("signature", ""), row.get("reason", "")))
    return tuple(out)


def package_of(module: str) -> str:
    """The name under which Python imports a module's package."""
    return str(read_toml(HERE / f"{module}.toml").get("package", module))


def required_checks(op: str) -> Mapping[str, bool | str]:
    """What the catalogue requires of an op. Raises KeyError where it does not cover it."""
    for f in functions(op.partition(".")[0]):
        if f.name == op:
            return classes()[f.op_class]
    msg = f"{op} stands in no catalogue file; add it to conformance/catalogue/{op.partition('.')[0]}.toml"
    raise KeyError(msg)
