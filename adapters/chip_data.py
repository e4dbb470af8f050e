"""From a description file of a chip to a `Description`: data only, read without a framework.

A file says of each op whether the chip has it, with limits, and where that is known from (`source`). `[release]`
names the release of each package that the file describes; a table of another release changes rows of it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.protocol import Description, Support

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROW_FIELDS = ("supported", "limits", "tiles", "compile_key", "settings", "path", "kind", "reason", "source")
LISTS = ("limits", "compile_key", "settings")


def load_file(path: Path) -> dict[str, Any]:
    """The file as it is. Raises OSError or tomllib.TOMLDecodeError."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def releases(raw: Mapping[str, Any], options: Mapping[str, str]) -> dict[str, str]:
    """The release of each module: what the file describes first, or what an option of the module's name asks for.

    Raises ValueError for a release that the file does not describe.
    """
    chosen = dict(raw["release"])
    for module, release in options.items():
        if module not in chosen:
            continue
        known = known_releases(raw, module)
        if release not in known:
            msg = f"option {module}={release!r}; {raw['name']} is described for {module} {' and '.join(known)}"
            raise ValueError(msg)
        chosen[module] = release
    return chosen


def known_releases(raw: Mapping[str, Any], module: str) -> list[str]:
    """The releases of a module that the file describes, the usual one first."""
    return [raw["release"][module], *raw.get("other_release", {}).get(module, {})]


def load_description(path: Path, options: Mapping[str, str]) -> Description:
    """The description in a file, for the releases that the options name. Raises ValueError for an unknown one."""
    raw = load_file(path)
    rows = dict(raw["ops"])
    chosen = releases(raw, options)
    for module, release in chosen.items():
        rows |= raw.get("other_release", {}).get(module, {}).get(release, {})
    return Description(
        name=raw["name"],
        ops={op: support_of(op, row) for op, row in rows.items()},
        requirements=raw.get("requirements", {}),
        profile={k: v for k, v in raw.get("profile", {}).items() if k != "source"},
        ranks=tuple(raw["ranks"]),
        platform=raw.get("platform", "silicon"),
        processes_per_device=raw.get("processes_per_device", 1),
        fork_after_import=False,
        ask_doctor=True,
    )


def support_of(op: str, row: Mapping[str, Any]) -> Support:
    """One row. Raises ValueError for a field that there is none of, and for a row without a source."""
    unknown = sorted(set(row) - set(ROW_FIELDS))
    if unknown or not row.get("source"):
        msg = f"{op}: " + (f"unknown fields {', '.join(unknown)}" if unknown else "a row needs a source")
        raise ValueError(msg)
    fields = {k: tuple(v) if k in LISTS else v for k, v in row.items() if k != "source"}
    return Support(**{"supported": "kind" not in row, **fields})
