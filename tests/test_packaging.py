"""What pyproject.toml lists is what there is: a package or data file that it forgets is missing where it is built."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("conformance", "cases", "references", "adapters", "reports")
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_package_is_listed() -> None:
    found = {".".join(f.parent.relative_to(ROOT).parts) for top in TOPS for f in (ROOT / top).rglob("__init__.py")}
    assert set(SETUP["packages"]) == found


@pytest.mark.parametrize("top", TOPS)
def test_every_data_file_is_listed(top: str) -> None:
    listed = [f"{package.replace('.', '/')}/{pattern}" for package, patterns in SETUP["package-data"].items()
              for pattern in patterns]
    data = [f.relative_to(ROOT).as_posix() for f in (ROOT / top).rglob("*")
            if f.is_file() and f.suffix in (".toml", ".json", ".tmpl", ".css", ".js")]
    assert [f for f in data if not any(fnmatchcase(f, pattern) for pattern in listed)] == []
