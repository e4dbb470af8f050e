"""Evidence of a case: what may be linked from a page, and copying it beside the page.

A path in a result line is a stranger's word. Only plain files of known kinds directly
in a folder inside the run directory are taken, never through a link.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

KINDS = {".png": "picture", ".py": "script", ".json": "data", ".npy": "array", ".txt": "text", ".log": "text"}
"""What is copied. HTML and SVG are not: a browser would run what they carry."""

MIB = 1 << 20
LONGEST_NAME = 120


@dataclass(frozen=True)
class Link:
    name: str
    href: str
    """relative to the report's folder, quoted for a URL"""
    kind: str
    size_bytes: int


@dataclass
class Evidence:
    links: list[Link] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[Link]:
        return [link for link in self.links if link.kind == kind]


def folder_of(run_dir: Path, artifacts: str) -> Path:
    """The case's folder. Raises ValueError for one that is not inside the run directory or is gone."""
    root = run_dir.resolve()
    relative = Path(artifacts)
    if "\0" in artifacts or relative.is_absolute() or ".." in relative.parts:
        raise ValueError(f"artifacts {artifacts!r} is no path inside the run directory")
    folder = (root / relative).resolve()
    if root not in folder.parents:
        raise ValueError(f"artifacts {artifacts!r} leads outside the run directory")
    if not folder.is_dir():
        raise ValueError(f"artifacts {artifacts!r} is gone")
    return folder


@dataclass
class Copier:
    """Copies evidence into `root/files/` until the limits are reached."""

    root: Path
    file_limit_bytes: int = 4 * MIB
    total_limit_bytes: int = 256 * MIB
    files_per_case: int = 40
    used_bytes: int = 0
    _owners: dict[Path, Path] = field(default_factory=dict)
    """what each path below root is a copy of; on a file system that ignores case too"""

    def take(self, run_dir: Path, artifacts: str, place: str) -> Evidence:
        """Copies one case's folder to `files/<place>/<folder name>/`; what stays behind is noted."""
        evidence = Evidence()
        try:
            folder = folder_of(run_dir, artifacts)
            entries = sorted(folder.iterdir())
        except (OSError, ValueError) as e:
            evidence.notes.append(str(e))
            return evidence
        target = self._own(Path("files") / _plain(place) / _plain(folder.name), folder)
        for entry in entries:
            why = self._why_left(entry, len(evidence.links))
            if why:
                evidence.notes.append(f"{entry.name} not copied: {why}")
                continue
            copy = self._own(target / _plain(entry.name), entry)
            link = Link(entry.name, quote(copy.as_posix()), KINDS[entry.suffix], entry.stat().st_size)
            (self.root / target).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(entry, self.root / copy, follow_symlinks=False)
            self.used_bytes += link.size_bytes
            evidence.links.append(link)
        return evidence

    def _own(self, wanted: Path, source: Path) -> Path:
        """A path that no other source has: two names may read the same once they are plain."""
        path, n = wanted, 1
        while self._owners.setdefault(Path(str(path).lower()), source) != source:
            n += 1
            path = wanted.with_name(f"{wanted.stem}-{n}{wanted.suffix}")
        return path

    def _why_left(self, entry: Path, taken: int) -> str:
        if entry.is_symlink() or not entry.is_file():
            return "no plain file"
        if entry.suffix not in KINDS:
            return f"kind {entry.suffix or 'without a suffix'} is not shown here"
        size = entry.stat().st_size
        if size > self.file_limit_bytes:
            return f"{size / MIB:.1f} MiB, the limit is {self.file_limit_bytes / MIB:.0f} MiB"
        if self.used_bytes + size > self.total_limit_bytes or taken >= self.files_per_case:
            return "the report's limit is reached"
        return ""


def _plain(name: str) -> str:
    """A file name without surprises; `..` and an empty one can't come out of it."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", name).lstrip(".-")[-LONGEST_NAME:] or "x"
