"""Files of a run directory, read as a stranger's: what they hold is data, whatever it is.

Only plain files are opened (a pipe or a device would never end). Text that can't be written again and nesting that
no reader gets through are taken out here, once, so that nothing behind has to think of them.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEEPEST = 64
"""levels of lists and objects in one another; ours have 6"""
LONGEST_NUMBER = 40
"""digits; a seed has 20, and what is much longer overflows every float made of it later"""


@dataclass(frozen=True)
class BadLine:
    """What can't be used; line 0 stands for the file as a whole."""

    file: str
    line: int
    why: str


def is_plain(file: Path) -> bool:
    """Whether this is a file with an end. A link to one is one. False where there is nothing."""
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except (OSError, ValueError):
        return False


def plain_files(folder: Path, pattern: str, bad: list[BadLine]) -> list[Path]:
    """Plain files of that pattern in a folder, in order; `bad` gets the rest."""
    found = sorted(folder.glob(pattern))
    bad += [BadLine(f.name, 0, "no plain file") for f in found if not is_plain(f)]
    return [f for f in found if is_plain(f)]


def parsed(text: bytes) -> Any:
    """A JSON value with nothing in it that readers stumble over. Raises ValueError.

    A lone half of a surrogate pair, which no encoding can write, becomes U+FFFD.
    """
    try:
        return _tidied(json.loads(text, parse_int=_bounded_int), DEEPEST)
    except RecursionError as e:
        raise ValueError(_TOO_DEEP) from e


_HALF = re.compile("[\ud800-\udfff]")
_TOO_DEEP = f"nested deeper than {DEEPEST} levels"


def _tidied(value: Any, left: int) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else _HALF.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, (dict, list)):
        if not left:
            raise ValueError(_TOO_DEEP)
        if isinstance(value, dict):
            return {_tidied(k, 1): _tidied(v, left - 1) for k, v in value.items()}
        return [_tidied(v, left - 1) for v in value]
    return value


def _bounded_int(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        msg = f"a number of {len(digits)} digits"
        raise ValueError(msg)
    return int(digits)


def numbered_lines(file: Path, bad: list[BadLine]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) for every good line of a .jsonl file; `bad` gets the others. Raises OSError."""
    with file.open("rb") as f:
        for n, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                raw = parsed(line)
            except ValueError as e:
                bad.append(BadLine(file.name, n, str(e) if line.endswith(b"\n") else "cut off: no end of line"))
                continue
            if isinstance(raw, dict):
                yield n, raw
            else:
                bad.append(BadLine(file.name, n, f"a {type(raw).__name__} instead of an object"))


def read_lines(file: Path, bad: list[BadLine]) -> Iterator[dict[str, Any]]:
    """`numbered_lines` without the numbers; a file that can't be read is named in `bad` too."""
    try:
        for _, raw in numbered_lines(file, bad):
            yield raw
    except OSError as e:
        bad.append(BadLine(file.name, 0, e.strerror or str(e)))


def manifest(folder: Path) -> dict[str, str]:
    """sha256 of every published file of a run by its relative name."""
    out = {}
    for file in sorted(p for p in folder.rglob("*") if is_plain(p)):
        name = str(file.relative_to(folder))
        if name not in ("manifest.json", "lock") and not name.startswith("matrix/"):
            out[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return out


def changed_files(folder: Path) -> list[BadLine]:
    """Files of a closed run that are not what its manifest says; evidence apart, whose loss is told elsewhere."""
    path = folder / "manifest.json"
    if not path.exists():
        return []
    try:
        if not is_plain(path) or not isinstance(listed := parsed(path.read_bytes()), dict):
            return [BadLine(path.name, 0, "no list of files")]
    except (OSError, ValueError) as e:
        return [BadLine(path.name, 0, str(e))]
    out = []
    for name, digest in listed.items():
        file = folder / name
        if name.startswith("artifacts/"):
            continue
        if ".." in file.parts or not is_plain(file):
            out.append(BadLine(name, 0, "deleted since the run was closed"))
        elif hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            out.append(BadLine(name, 0, "edited since the run was closed"))
    return out
