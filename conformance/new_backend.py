"""`conformance new-backend NAME`: a package of a new backend, made of templates, that runs at once."""

from __future__ import annotations

import importlib.util
import json
import keyword
import re
import sys
from pathlib import Path
from typing import Any

from conformance.backend_class import known_backends
from conformance.collect import ROOT, UsageError, check_names

TEMPLATES = Path(__file__).resolve().parent / "templates"


def kinds() -> dict[str, Any]:
    """What can be written, by the name of the interface it starts from."""
    return json.loads((TEMPLATES / "files.json").read_text())


def class_name(name: str) -> str:
    """`my_chip` becomes `MyChip`."""
    return "".join(part.capitalize() for part in name.split("_"))


def write_backend(name: str, abi: str, parent: Path) -> str:
    """Write `parent/name`; returns what to do next. Raises UsageError, and then nothing was written."""
    known = kinds()
    check_names("abi", [abi], known)
    check_name(name)
    target = parent / name
    if target.exists():
        msg = f"{target} exists already; nothing is overwritten, so name another backend or another --out"
        raise UsageError(msg)
    kind = known[abi]
    words = {"name": name, "Class": class_name(name), "order": _filled(kind["order"], {"name": name})}
    made = {_filled(to, words): _filled((TEMPLATES / source).read_text(), words)
            for to, source in kind["files"].items()}
    for to, text in made.items():
        file = target / to
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    backend = f"{name}.backend:{words['Class']}"
    return "\n".join([
        f"wrote {target} ({len(made)} files; it needs {kind['needs']}). Next:",
        f"  cd {target}",
        f"  conformance doctor --backend {backend} --require deepselect",
        f"  conformance run --backend={backend} --module=deepselect --level=bringup",
        f"{ROOT / 'docs' / 'adding-a-backend.md'} leads from there to a matrix",
    ])


def check_name(name: str) -> None:
    """Raises UsageError for a name that can't be a new package."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        msg = f"{name!r} can't be a package's name; use lower-case letters, digits and _, beginning with a letter"
        raise UsageError(msg)
    if name in known_backends():
        msg = f"there is a backend {name} already; choose another name"
        raise UsageError(msg)
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        msg = f"{name} is the name of a package that can be imported already; choose another one"
        raise UsageError(msg)


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    return text
