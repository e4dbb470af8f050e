"""The same problems whatever runs them: any order, number of workers, level, number of examples, limits, imports."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

sys.path.insert(0, str(Path(__file__).parent))

from runs import HOSTILE, Ended, run

from conformance.collect import cases_at
from conformance.engine import draw
from conformance.engine.effort import EFFORTS
from conformance.engine.limits import problem_limit
from conformance.engine.relations import drawn_case
from conformance.model import Case, Problem
from conformance.protocol import Support

EVERY = [drawn_case(c) for c in cases_at("full", ("deepselect",)) if c.check != "rejects"]
CASES = EVERY[::4]
QUERY = "--case=deepselect.topk/values:dtype=bf16,index=int32,order=index,*"
ODD = "odd = (63.0625, 1234567, 77777, 4097, 'oddly', b'odd', -31.5)\n" * 3


def digests(cases: list[Case], seed: int = 0) -> dict[str, str]:
    return {c.id: draw.first_chunk(c, seed)[1] for c in cases}


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return digests(CASES)


@pytest.fixture
def odd_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A local module of literals that no draw should know, imported in the middle of a run."""
    (tmp_path / "odd_local_module.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    import odd_local_module

    yield odd_local_module
    del sys.modules["odd_local_module"]


def test_order_does_not_matter(drawn: dict[str, str]) -> None:
    assert digests(CASES[::-1]) == drawn


def test_every_case_and_seed_draws_its_own(drawn: dict[str, str]) -> None:
    others = digests(CASES[:20], seed=1)
    assert len(set(drawn.values())) == len(drawn)
    assert not set(others.values()) & set(drawn.values())


def test_imported_literals_do_not_leak(drawn: dict[str, str], odd_module: ModuleType) -> None:
    assert digests(CASES[:30]) == {c.id: drawn[c.id] for c in CASES[:30]}


def test_literals_would_leak_unpinned(drawn: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The pin is what keeps them out: with the constants of a module let in, other problems are drawn."""
    leaked = Constants()
    leaked.add(4097)
    leaked.add(77777)
    monkeypatch.setattr(providers, "_get_local_constants", lambda: leaked)
    providers.CONSTANTS_CACHE.cache.clear()
    try:
        assert digests(CASES[:20]) != {c.id: drawn[c.id] for c in CASES[:20]}
    finally:
        providers.CONSTANTS_CACHE.cache.clear()


def test_the_pin_is_in_place() -> None:
    found = providers._get_local_constants()
    assert not any(list(found.set_for_type(t)) for t in ("integer", "float", "bytes", "string"))


def test_limits_choose_and_do_not_draw() -> None:
    """What is legal under two limits is the same, in the same order: one list is the other without some."""
    for case in CASES[:20]:
        chunk = draw.first_chunk(case, 0)[0]
        wide, narrow = (Support(True, limits=({"field": "b", "le": n},)) for n in (40, 7))
        legal = [p for p in chunk if not problem_limit(narrow, p)]
        also = [p for p in chunk if not problem_limit(wide, p)]
        assert [p for p in also if not problem_limit(narrow, p)] == legal
        assert 0 < len(legal) < len(chunk) or "b" not in case.op.sizes


def test_a_level_changes_no_problem() -> None:
    """A level decides how many run and which must; not what is drawn."""
    case = CASES[0]
    with_sizes = replace(case, explicit=({"b": 3},))
    assert draw.first_chunk(with_sizes, 0) == draw.first_chunk(case, 0)
    assert {e.level for e in EFFORTS.values()} >= {"core", "full", "extended"}


def of_run(done: Ended) -> dict[str, str]:
    assert done.code == 0, done.text
    return {i: r.draws_sha256 for i, r in done.run.records.items()}


def problems(done: Ended) -> dict[str, list[dict[str, Any]]]:
    out = defaultdict(list)
    for line in (done.path / "problems.jsonl").read_text().splitlines():
        row = json.loads(line)
        out[row["id"]].append(row["problem"])
    return out


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run(tmp_path_factory.mktemp("plain") / "run", QUERY, "-n", "2", "--examples=9", backend=HOSTILE)


def test_runs_agree(plain: Ended, tmp_path: Path) -> None:
    """Two workers, one, and another level, number of examples, limit and local module: the same digests."""
    (tmp_path / "odd_local_plugin.py").write_text(ODD)
    one = run(tmp_path / "one", QUERY, "-n", "1", "--examples=2", "--level=extended", "-p", "odd_local_plugin",
              "--backend-option=at_most_rows=5", backend=HOSTILE, more_path=str(tmp_path))
    two = of_run(plain)
    assert of_run(one) == two
    assert two == digests([c for c in EVERY if c.id in two])
    assert len(two) >= 8


def test_runs_execute_the_same_problems(plain: Ended, tmp_path: Path) -> None:
    """With a narrower limit each case goes further down the same list."""
    limit = "--backend-option=at_most_rows=5"
    narrow = run(tmp_path / "narrow", QUERY, "-n", "2", "--examples=9", limit, backend=HOSTILE)
    assert narrow.code == 0, narrow.text
    wide, few = problems(plain), problems(narrow)
    assert wide.keys() == few.keys()
    for case, mine in few.items():
        legal = [p for p in wide[case] if p["sizes"]["b"] <= 5]
        assert legal
        assert mine[: len(legal)] == legal
        assert len(mine) == 9


def test_inputs_are_the_same_bits(plain: Ended, tmp_path: Path) -> None:
    """Digests of inputs stand beside each problem and agree between runs; `--problems` repeats exactly these."""
    again = run(tmp_path / "again", QUERY, "-n", "1", f"--problems={plain.path}", "--examples=9")
    assert again.code == 0, again.text
    rows = [{json.dumps([r["id"], r["problem"]]): r["inputs"] for r in map(json.loads, f.read_text().splitlines())}
            for f in (plain.path / "problems.jsonl", again.path / "problems.jsonl")]
    assert rows[0] == rows[1]


def test_a_problem_survives_json() -> None:
    for case in CASES[:10]:
        for p in draw.first_chunk(case, 0)[0][:8]:
            text = json.dumps(p.to_json())
            assert json.dumps(Problem.from_json(json.loads(text)).to_json()) == text
