"""Run directories of strangers: whatever they hold, reports end, stay in their folder, and hide nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.collect import UsageError
from conformance.foreign import DEEPEST, is_plain, manifest, parsed
from conformance.merge import merge_runs
from conformance.results import read_run
from reports.diff import compare
from reports.fold import State, fold, run_headline
from reports.load import load_runs
from reports.matrix import write_all
from tests.sample_run import FAILURES, passing, with_changes, write_run

ROOT = Path(__file__).resolve().parents[1]
OP = "deepgemm.bf16_gemm_nt"
GOOD = [passing(OP, "values", {"out": out}) for out in ("bf16", "fp32")]
BAD = [GOOD[0], with_changes(GOOD[1], **FAILURES["tail"])]


def deep(n: int) -> Any:
    value: Any = 1
    for _ in range(n):
        value = [value]
    return value


def seal(run: Path) -> Path:
    """The manifest that a run gets when it is closed."""
    (run / "manifest.json").write_text(json.dumps(manifest(run)))
    return run


def edit(**changes: Any) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        info = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**info, **changes}))

    return apply


def add_line(**changes: Any) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        with (run / "results.jsonl").open("a") as f:
            f.write(json.dumps({**GOOD[0].to_json(), **changes}) + "\n")

    return apply


def a_pipe(name: str) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return apply


HOSTILE: dict[str, Callable[[Path], None]] = {
    "an op that is a path": edit(claim={"name": "x", "ops": ["../../../pwned", "a/b", ".."]}),
    "an op with a long name": edit(claim={"name": "x", "ops": ["a" * 300]}),
    "a case with a long name": add_line(id=f"m.{'a' * 300}/values"),
    "half a surrogate pair in a message": add_line(message="x \ud800 y"),
    "half a surrogate pair in run.json": edit(device="\ud800", host={"\udfff": "\ud801"}),
    "a deep problem": add_line(problem={"x": deep(900)}),
    "a deep limit": add_line(domain={"limits": [{"field": deep(300)}]}),
    "a deep claim": edit(claim={"name": deep(900), "ops": [OP]}),
    "results in a pipe": a_pipe("results-gw0.jsonl"),
    "problems in a pipe": a_pipe("problems-gw0.jsonl"),
    "run.json in a pipe": a_pipe("run.json"),
    "a manifest in a pipe": a_pipe("manifest.json"),
    "results without an end": lambda run: (run / "results-x.jsonl").symlink_to("/dev/zero"),
    "problems in a folder": lambda run: (run / "problems-x.jsonl").mkdir(),
    "a long artifact": add_line(artifacts="artifacts/" + "x" * 300),
    "an artifact with a zero byte": add_line(artifacts="artifacts/\0"),
    "a manifest of paths": lambda run: (run / "manifest.json").write_text('{"../../x": 1, "/etc/passwd": ""}'),
}
DRIVE = """
import sys
from pathlib import Path
from conformance.merge import merge_runs
from conformance.collect import UsageError
from reports.diff import compare
from reports.matrix import write_all
run, out = Path(sys.argv[1]), Path(sys.argv[2])
print(write_all([run, run], out / "matrix", []))
print(compare(run, run))
try:
    print(merge_runs([run], out / "merged"))
except UsageError as e:
    print(e)
"""


@pytest.mark.parametrize("strange", HOSTILE, ids=str)
def test_reports_end_and_stay_in_their_folder(tmp_path: Path, strange: str) -> None:
    run = write_run(tmp_path / "in" / "run", BAD)
    HOSTILE[strange](run)
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", DRIVE, str(run), str(out)], cwd=ROOT, capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"in", "out"}
    assert {p.name for p in out.iterdir()} <= {"matrix", "merged"}
    assert {p.name for p in (out / "matrix").iterdir()} == {"matrix.md", "matrix.json", "matrix.csv", "html"}
    assert {p.name for p in (out / "matrix" / "html").iterdir() if p.is_dir()} <= {"op", "files"}
    if strange != "run.json in a pipe":
        rows = json.loads((out / "matrix" / "matrix.json").read_text())["ops"]
        states = {row["op"]: row["cells"][0]["state"] for row in rows}
        assert states[OP] == "nonconforming", "what is strange hides nothing else"


def test_every_page_that_is_linked_is_there(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", GOOD)
    edit(claim={"name": "x", "ops": ["../up", "a" * 300]})(run)
    write_all([run], tmp_path / "out", [])
    html = tmp_path / "out" / "html"
    links = {part.partition('"')[0].partition("#")[0] for part in (html / "index.html").read_text().split('href="')[1:]}
    assert len(links) == 3
    assert all((html / link).is_file() for link in links)


def test_nesting_and_halves() -> None:
    assert parsed(b'"a \\ud800 b"') == "a \N{REPLACEMENT CHARACTER} b"
    assert parsed('"\N{GRINNING FACE} \\ud83d\\ude00"'.encode()) == "\N{GRINNING FACE} \N{GRINNING FACE}"
    assert parsed(json.dumps(deep(DEEPEST)).encode()) == deep(DEEPEST)
    for n in (DEEPEST + 1, 100_000):
        with pytest.raises(ValueError, match="nested deeper"):
            parsed(b"[" * n + b"]" * n)
    assert not is_plain(Path("/dev/zero"))


def headline(run: Path):
    (loaded,) = load_runs([run])
    return run_headline(loaded, fold([loaded]).column(0)), loaded


def test_a_red_run_does_not_turn_green_by_an_edit(tmp_path: Path) -> None:
    run = seal(write_run(tmp_path / "run", BAD, claim={"name": "gemm", "ops": [OP]}))
    head, loaded = headline(run)
    assert (head.state, loaded.edited) == (State.NONCONFORMING, False)
    before = write_run(tmp_path / "before", GOOD)
    (run / "results.jsonl").write_text("".join(json.dumps(r.to_json()) + "\n" for r in GOOD))
    head, loaded = headline(run)
    assert head.state is State.INCONCLUSIVE
    assert "edited since it was closed" in str(head)
    assert any("results.jsonl was edited since the run was closed" in note for note in loaded.notes)
    assert compare(before, run)[1] == 6
    with pytest.raises(UsageError, match=r"results\.jsonl was edited"):
        merge_runs([run], tmp_path / "merged")


def test_a_newer_schema_is_not_guessed_at(tmp_path: Path) -> None:
    for version in (2, "1", None):
        run = write_run(tmp_path / f"run{version}", GOOD, claim={"name": "gemm", "ops": [OP]}, schema_version=version)
        head, loaded = headline(run)
        assert head.state is State.INCONCLUSIVE
        assert {r.status for r in loaded.records} == {"not_run"}
        assert any("this suite reads up to 1" in note for note in loaded.notes)
        with pytest.raises(UsageError, match="use the suite that wrote it"):
            merge_runs([run], tmp_path / "merged")


def test_merging_a_shard_that_was_cut_off_says_what_is_missing(tmp_path: Path) -> None:
    claim = {"name": "gemm", "ops": [OP]}
    whole = write_run(tmp_path / "a", GOOD[:1], claim=claim)
    cut = write_run(tmp_path / "b", [], planned=[GOOD[1].id, "no id"], closed=False, claim=claim)
    text, code = merge_runs([whole, cut], tmp_path / "out")
    assert code == 6, "a claimed case without a result is inconclusive"
    assert "1 of them planned and without a result" in text
    lost = read_run(tmp_path / "out").records[GOOD[1].id]
    assert (lost.status, lost.verdict) == ("not_run", "inconclusive")


def test_merging_follows_no_link_out_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    run = write_run(tmp_path / "run", BAD)
    folder = next((run / "artifacts").iterdir())
    (folder / "key.txt").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe.txt")
    merge_runs([run], tmp_path / "out")
    names = {p.name for p in (tmp_path / "out" / "artifacts").rglob("*")}
    assert "observed.npy" in names
    assert not names & {"key.txt", "pipe.txt"}


def test_evidence_of_names_that_read_alike_is_kept_apart(tmp_path: Path) -> None:
    """Labels and file names lose their odd characters; what becomes the same name is not overwritten."""
    runs = []
    for n, name in enumerate(("x y", "x?y")):
        run = write_run(tmp_path / name, BAD, backend="b")
        folder = next((run / "artifacts").iterdir())
        (folder / "a b.txt").write_text(f"{n} first")
        (folder / "a?b.txt").write_text(f"{n} second")
        runs.append(run)
    write_all(runs, tmp_path / "out", [])
    found = {p.read_text() for p in (tmp_path / "out" / "html" / "files").rglob("a*.txt")}
    assert found == {"0 first", "0 second", "1 first", "1 second"}


def test_a_record_that_is_not_ours_is_read_by_its_id(tmp_path: Path) -> None:
    """Fields beside the id can't move a failure to another op."""
    moved = replace(BAD[1], op="deepgemm.other", module="elsewhere", check="layout", variant={})
    (loaded,) = load_runs([write_run(tmp_path / "run", [GOOD[0], moved])])
    assert fold([loaded]).cells[OP][0].state is State.NONCONFORMING
