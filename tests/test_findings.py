"""The programs of docs/findings.md still show what the page says, and every waiver points to an entry of it."""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest

from conformance import waivers

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
ENTRY = re.compile(r"^### ([^\n]+)\n(?:(?!^### ).)*?```python\n(.*?)```\n\n```text\n(.*?)```", re.M | re.S)
PROGRAMS = {title: (code, shown.strip()) for title, code, shown in ENTRY.findall(PAGE)}


def anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-")


def run_in_child(program: Path, out: Path) -> str:
    """What a program prints, or the signal that ends it; the child has imported the package already."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        sys.stdout = os.fdopen(1, "w")
        try:
            runpy.run_path(str(program), run_name="__main__")
            sys.stdout.flush()
        finally:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"killed by {signal.Signals(-code).name}" if code < 0 else out.read_text(encoding="utf-8").strip()


@pytest.mark.parametrize("title", PROGRAMS)
def test_program_shows_what_the_page_says(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tilelang")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TILELANG_PRINT_ON_COMPILATION", "0")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code, shown = PROGRAMS[title]
    program = tmp_path / "program.py"
    program.write_text(code)
    assert run_in_child(program, tmp_path / "out") == shown


def test_every_waiver_points_to_an_entry() -> None:
    entries = {anchor(t) for t in re.findall(r"^### (.+)$", PAGE, re.M)}
    issues = {w.issue for w in waivers.load(ROOT / "waivers.toml")}
    named = {i.partition("#")[2] for i in issues if i.startswith("docs/findings.md#")}
    assert named <= entries
    # What is kept out of the backend needs no waiver.
    waivable = PAGE.partition("## torch on the CPU")[0]
    shown = {anchor(t) for t in PROGRAMS if f"### {t}\n" in waivable}
    assert shown <= named, "a finding that nothing waives"
