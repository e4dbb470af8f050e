"""What a report writes: all forms agree, every link leads inside, and text from a run stays text."""

from __future__ import annotations

import csv
import html.parser
import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from conformance.protocol import Description, unsupported
from reports.artifacts import Copier
from reports.fold import fold
from reports.load import load_runs
from reports.matrix import to_csv, to_json, to_markdown, write_all
from reports.pages import write_pages
from tests.sample_run import FAILURES, SURFACE, passing, with_changes, write_run, write_sample

OP = "deepgemm.bf16_gemm_nt"
GOOD = [passing(OP, "values", {"out": out}) for out in ("bf16", "fp32")]


def matrix_of(tmp_path: Path, records, **run):
    return fold(load_runs([write_run(tmp_path / "run", records, **run)]))


class Page(html.parser.HTMLParser):
    """Collects what a page links to, loads, and shows; checks that every element is closed."""

    VOID = frozenset({"meta", "img", "input", "wbr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: Counter[str] = Counter()
        self.handlers: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.links += [v for k, v in attrs if k in ("href", "src")]
        self.ids += [v for k, v in attrs if k == "id"]
        self.handlers += [k for k, _ in attrs if k.startswith("on") or k == "style"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] not in (["script"], ["style"]):
            self.text += data


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, str]:
    root = tmp_path_factory.mktemp("sample")
    out = root / "matrix"
    return out, write_all(write_sample(root), out, [*SURFACE, "deepep.BucketBuffer.all_gather"])


def test_summary_has_a_line_a_run_and_the_paths(written):
    out, text = written
    assert "✗ cpu: partial: 56 of 62 ops conforming (1 nonconforming, 1 waived, 1 not run, 3 not yet)" in text
    assert "results.jsonl line 61 left out: cut off: no end of line" in text
    assert f"wrote {out / 'html' / 'index.html'}" in text


def test_all_links_lead_inside_the_folder_and_exist(written):
    pages = sorted((written[0] / "html").rglob("*.html"))
    assert len(pages) == 63
    root = (written[0] / "html").resolve()
    parsed = {path.resolve(): Page(path.read_text()) for path in pages}
    for path, page in parsed.items():
        assert page.tags["script"] == page.tags["style"] == 1
        assert page.handlers == []
        assert len(set(page.ids)) == len(page.ids)
        for link in page.links:
            parts = urlsplit(link)
            assert (parts.scheme, parts.netloc) == ("", "")
            target = (path.parent / unquote(parts.path)).resolve()
            assert root in target.parents
            assert target.is_file()
            if target.suffix == ".html" and parts.fragment:
                assert parts.fragment in parsed[target].ids


def test_a_failure_is_answered_on_its_page(written):
    page = Page((written[0] / "html" / "op" / f"{OP}.html").read_text())
    case = f"{OP}/values:out=bf16,c=none"
    assert case in page.ids
    for words in (
        "fail, numeric, in compare",
        "the whole last tile of n",
        "4100",
        "[127, 96]",
        "-0.8125",
        f"conformance replay {case} --seed=1",
        '"sizes": {"m": 128, "n": 128, "k": 8}',
        "reproduce.py (stand-alone reproducer)",
    ):
        assert words in page.text
    assert any(link.endswith("picture.png") for link in page.links)


def test_every_status_is_shown_in_every_form(written):
    out = written[0]
    index = Page((out / "html" / "index.html").read_text()).text
    markdown = (out / "matrix.md").read_text()
    rows = list(csv.DictReader((out / "matrix.csv").read_text().splitlines()))
    data = json.loads((out / "matrix.json").read_text())
    states = {"nonconforming", "inconclusive", "waived", "not_run", "partial", "conforming", "not_yet"}
    assert {row["state"] for row in rows} == states
    assert {cell["state"] for op in data["ops"] for cell in op["cells"]} == states
    for word in (
        "nonconforming",
        "inconclusive",
        "waived",
        "not run",
        "conforming in part",
        "not yet",
        "only m % 128 = 0",
    ):
        assert word in index
        assert word in markdown
    assert len(rows) == 4 * len(data["ops"]) == 4 * 62


def test_all_forms_agree(written):
    """One roll-up: counts by state are the same on the page, in the JSON and in the CSV."""
    out = written[0]
    count = Counter(row["state"] for row in csv.DictReader((out / "matrix.csv").read_text().splitlines()))
    assert count == Counter(
        cell["state"] for op in json.loads((out / "matrix.json").read_text())["ops"] for cell in op["cells"]
    )
    assert count == Counter(re.findall(r'<td class="cell s-(\w+)"', (out / "html" / "index.html").read_text()))
    words = Page((out / "html" / "index.html").read_text()).text
    assert f"{count['nonconforming']} nonconforming" in words


HOSTILE = "<script>alert(1)</script>\"' onload=x | `a` *b* [c](javascript:d)\n=1+1"


def test_text_from_a_run_stays_text(tmp_path):
    changes = {
        "message": HOSTILE,
        "replay": ["a", HOSTILE],
        "numerics": {HOSTILE: {HOSTILE: HOSTILE}},
        "lineage": [HOSTILE],
        "domain": {
            "sizes": {HOSTILE: [1, HOSTILE]},
            "families": [HOSTILE],
            "limits": [{"field": HOSTILE, HOSTILE: HOSTILE}],
        },
        "examples": {HOSTILE: 3},
        "duration_s": {HOSTILE: 1.0},
        "device": HOSTILE,
    }
    bad = with_changes(GOOD[0], **{**FAILURES["tail"], **changes})
    run = write_run(
        tmp_path / "r",
        [bad],
        backend=HOSTILE,
        device=HOSTILE,
        level=HOSTILE,
        versions={HOSTILE: HOSTILE},
        commit=HOSTILE,
    )
    write_all([run], tmp_path / "out", [])
    for path in (tmp_path / "out" / "html").rglob("*.html"):
        page = Page(path.read_text())
        assert page.tags["script"] == 1
        assert page.handlers == []
        assert not any(link.startswith(("javascript", "x")) for link in page.links)
    markdown = (tmp_path / "out" / "matrix.md").read_text()
    prose = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", markdown.replace("\\`", ""))
    assert "<script" not in prose
    assert "](javascript" not in prose.replace("\\]", "")
    assert "&lt;script&gt;alert" in prose
    cells = [c for row in csv.reader((tmp_path / "out" / "matrix.csv").read_text().splitlines()) for c in row]
    assert not any(c.startswith(("=", "+", "@")) for c in cells)


def test_json_is_strict(tmp_path):
    odd = replace(GOOD[0], numerics={"d": {"worst_ratio": float("nan"), "max_ulp": float("-inf")}})
    text = to_json(matrix_of(tmp_path, [odd]))
    json.loads(text, parse_constant=pytest.fail)
    assert json.loads(text)["ops"][0]["cells"][0]["worst_error_over_bound"] == "Infinity"


def test_rows_that_no_run_knows_are_shown(tmp_path):
    run = write_run(tmp_path / "r", GOOD)
    write_all([run], tmp_path / "out", ["deepep.EPBuffer.dispatch"])
    ops = {row["op"] for row in json.loads((tmp_path / "out" / "matrix.json").read_text())["ops"]}
    assert ops == {OP, "deepep.EPBuffer.dispatch"}


def test_a_table_row_stays_one_line(tmp_path):
    odd = with_changes(GOOD[0], **{**FAILURES["tail"], "message": "a|b\nc"})
    page = to_markdown(matrix_of(tmp_path, [odd]))
    table = [line for line in page.splitlines() if line.startswith("| deepgemm")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table[:1]}) == 1
    assert "a\\|b; c" in page


def test_formulas_in_csv_are_disarmed(tmp_path):
    chip = Description("chip", {OP: unsupported("", kind="=cmd()")})
    lacking = with_changes(GOOD[0], status="unsupported")
    assert "'=cmd()" in to_csv(matrix_of(tmp_path, [lacking], description=chip))


# Evidence


@pytest.fixture
def run_dir(tmp_path) -> Path:
    run = tmp_path / "run"
    (run / "artifacts" / "a").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.txt").write_text("secret")
    return run


@pytest.mark.parametrize(
    "path", ["../secret", "/etc", "artifacts/../../secret", ".", "", "artifacts/none", "a\0b", "run.json", "x" * 5000]
)
def test_no_evidence_from_outside_the_run(run_dir, tmp_path, path):
    evidence = Copier(tmp_path / "out").take(run_dir, path, "cpu")
    assert evidence.links == []
    assert evidence.notes
    assert not (tmp_path / "out").exists()


def test_no_evidence_through_a_link(run_dir, tmp_path):
    (run_dir / "artifacts" / "b").symlink_to(tmp_path / "secret")
    (run_dir / "artifacts" / "a" / "key.txt").symlink_to(tmp_path / "secret" / "key.txt")
    os.mkfifo(run_dir / "artifacts" / "a" / "pipe.txt")
    copier = Copier(tmp_path / "out")
    assert "leads outside" in copier.take(run_dir, "artifacts/b", "cpu").notes[0]
    assert copier.take(run_dir, "artifacts/a", "cpu").notes == [
        "key.txt not copied: no plain file",
        "pipe.txt not copied: no plain file",
    ]


def test_evidence_has_limits_and_kinds(run_dir, tmp_path):
    folder = run_dir / "artifacts" / "a"
    for name, size in (("a.npy", 10), ("b.html", 1), ("c.npy", 200), ("d e#?.py", 5), ("f.txt", 90)):
        (folder / name).write_bytes(b"x" * size)
    evidence = Copier(tmp_path / "out", file_limit_bytes=100, total_limit_bytes=100).take(
        run_dir, "artifacts/a", "../cpu (x)"
    )
    assert [(link.name, link.href) for link in evidence.links] == [
        ("a.npy", "files/cpu-x-/a/a.npy"),
        ("d e#?.py", "files/cpu-x-/a/d-e-.py"),
    ]
    assert [note.split(" not copied: ")[0] for note in evidence.notes] == ["b.html", "c.npy", "f.txt"]
    assert (tmp_path / "out" / "files" / "cpu-x-" / "a" / "d-e-.py").read_bytes() == b"xxxxx"


def test_a_deleted_artifact_is_said_and_costs_nothing_else(tmp_path):
    run = write_run(tmp_path / "r", [with_changes(GOOD[0], **FAILURES["tail"]), GOOD[1]])
    for file in sorted((run / "artifacts").rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    write_all([run], tmp_path / "out", [])
    text = Page((tmp_path / "out" / "html" / "op" / f"{OP}.html").read_text()).text
    assert "is gone" in text
    assert "the whole last tile of n" in text


def test_writing_again_leaves_nothing_old_and_spares_what_is_not_ours(tmp_path):
    first = write_run(tmp_path / "a", [with_changes(GOOD[0], **FAILURES["tail"])])
    second = write_run(tmp_path / "b", [passing("deepselect.topk", "values", {})])
    write_all([first], tmp_path / "out", [])
    write_all([second], tmp_path / "out", [])
    assert not (tmp_path / "out" / "html" / "files").exists()
    assert [p.name for p in (tmp_path / "out" / "html" / "op").iterdir()] == ["deepselect.topk.html"]
    (tmp_path / "mine" / "html").mkdir(parents=True)
    (tmp_path / "mine" / "html" / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match="no matrix of ours"):
        write_all([first], tmp_path / "mine")
    assert (tmp_path / "mine" / "html" / "thesis.tex").exists()


def test_a_waived_case_tells_why_it_is_waived_and_shows_all_digits(tmp_path):
    waiver = {"id": "x", "reason": "sixteen <digits>", "issue": "docs/findings.md#digits", "expiry": "2027-03-31"}
    numerics = {"out": {"elements": 2, "observed": 16777220.0, "expected": 16777215.0, "worst_ratio": 1.23456789e9}}
    odd = with_changes(GOOD[0], **{**FAILURES["tail"], "expectation": "waived", "verdict": "waived", "waiver": waiver,
                                   "numerics": numerics})
    matrix = matrix_of(tmp_path, [odd])
    assert "waiver until 2027-03-31: sixteen &lt;digits&gt; (docs/findings.md#digits)" in to_markdown(matrix).replace(
        "\\", "")
    write_pages(matrix, tmp_path / "html", Copier(tmp_path / "files"))
    page = (tmp_path / "html" / "op" / "deepgemm.bf16_gemm_nt.html").read_text()
    assert "until 2027-03-31: sixteen &lt;digits&gt; (docs/findings.md#digits)" in page
    assert "16777220.0" in page
    assert "16777215.0" in page
    assert "1.23457e+09" in page
