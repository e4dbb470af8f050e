"""The catalogue, the declarations and the generated docs agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.catalogue.load import MODULES, classes, functions, required_checks
from conformance.collect import CORE, ROOT, all_cases, cases_at, core_rows, find_case, full_cases, ops, timings_of
from conformance.coverage import check_table, coverage_text, write_docs
from conformance.engine.checks import CHECKS
from conformance.engine.draw import explicit
from conformance.engine.variants import all_variants, pairwise
from conformance.model import CHECKS as NAMES


@pytest.mark.parametrize("module", MODULES)
def test_every_module_lists_its_public_functions(module: str) -> None:
    listed = functions(module)
    assert listed
    names = [f.name for f in listed]
    assert len(names) == len(set(names))
    assert all(f.name.startswith(module + ".") for f in listed)


def test_every_declared_op_stands_in_the_catalogue() -> None:
    assert {op.name for op in ops()} <= {f.name for m in MODULES for f in functions(m) if not f.reason}


def test_every_cell_is_executed_or_has_a_sentence() -> None:
    for op in ops():
        made = {c.check for c in (*full_cases(op), *timings_of(op))}
        for check, needed in required_checks(op.name).items():
            right = check in made if needed is True else len(str(needed)) > 10 and check not in made
            assert right, (op.name, check)


def test_checks_are_described_once() -> None:
    assert tuple(CHECKS) == NAMES
    assert all(set(row) == set(NAMES) for row in classes().values())


def test_coverage_page_is_current(tmp_path: Path) -> None:
    write_docs(tmp_path / "coverage.md")
    assert (tmp_path / "coverage.md").read_text() == (ROOT / "docs" / "coverage.md").read_text(), (
        "run: conformance coverage --write-docs docs/coverage.md")


def test_coverage_names_every_function() -> None:
    text = coverage_text()
    for m in MODULES:
        for f in functions(m):
            assert f.name in text
    assert "does not apply" in check_table()


def test_core_level_is_current() -> None:
    from conformance.core_level import rows

    assert list(core_rows()) == rows(), "run: python -m conformance.core_level"
    assert CORE.exists()


def test_core_level_has_size_assignments() -> None:
    rows = core_rows()
    assert all(len(r.get("sizes", ())) <= 16 for r in rows)
    assert sum(bool(r.get("sizes")) for r in rows) > len(rows) // 4
    assert len(list(cases_at("core"))) == len(rows)


def test_pairwise_shows_every_legal_pair() -> None:
    for op in ops():
        tried = [v for v in all_variants(op) if not op.values_only(v)]
        every = {frozenset(p) for v in tried for p in _pairs(dict(v))}
        shown = {frozenset(p) for v in pairwise(op) for p in _pairs(dict(v))}
        assert every == shown, op.name


def _pairs(v: dict[str, str]) -> set[tuple[tuple[str, str], ...]]:
    from itertools import combinations

    items = tuple(v.items())
    return set(combinations(items, 2)) if len(items) > 1 else {(i,) for i in items}


def test_all_cases_has_every_module() -> None:
    assert {c.op.module for c in all_cases()} == set(MODULES)


def test_the_readme_tells_how_much_is_covered() -> None:
    covered, out, left = map(int, re.findall(r"\d+", coverage_text().splitlines()[-1]))
    told = " ".join((ROOT / "README.md").read_text().split())
    assert f"Of the modules' {covered + out + left} public functions {covered} are covered so far, {out} are" in told
    assert f"are declared out with a reason and {left} are open" in told


def test_ops_with_few_cases_show_every_number_at_core() -> None:
    by_op: dict[str, list[tuple[str, int]]] = {}
    for row in core_rows():
        if row["check"] == "values":
            by_op.setdefault(row["op"], []).extend(n for a in row.get("sizes", ()) for n in a.items())
    assert {"blocks", "groups", "n", "k"} == {name for name, _ in by_op["deepgemm.m_grouped_bf16_gemm_nt_contiguous"]}
    assert ("k", 576) in by_op["deepgemm.m_grouped_bf16_gemm_nt_contiguous"]
    assert {"t", "experts", "num_topk"} == {name for name, _ in by_op["tilekernels.moe.topk_gate"]}


def test_the_first_numbers_of_a_case_are_of_different_sizes() -> None:
    case = find_case("tilekernels.moe.topk_gate/values")
    assert [next(iter(a)) for a in case.explicit[:3]] == ["t", "experts", "num_topk"]
    assert {n for a in case.explicit for n in a.items()} == {
        (name, p) for name, size in case.op.sizes.items() for p in size.points}


def test_every_expert_is_chosen_in_some_problem() -> None:
    case = find_case("tilekernels.moe.topk_gate/values", "core")
    problems = explicit(case, 0)
    assert any(p.num_topk == p.experts > 1 for p in problems)
    assert len({p.family for p in problems}) == len(case.op.families)  # in turn, so that none is left out


@pytest.mark.parametrize("name", ["deepselect.topk", "deepgemm.bf16_gemm_nt", "tilelang.gemm"])
def test_core_shows_each_family_with_each_setting(name: str) -> None:
    """A NaN beside an offset, say: with families in step with cases some pairs never met."""
    cases = [c for c in cases_at("core", (name.partition(".")[0],)) if c.op.name == name and c.check == "values"]
    met = {(p.family, s) for c in cases for p in explicit(c, 0) for s in dict(c.variant).items()}
    settings = {s for c in cases for s in dict(c.variant).items()}
    slots = {s: sum(len(c.explicit) for c in cases if s in dict(c.variant).items()) for s in settings}
    for s in settings:
        shown = {f for f in cases[0].op.families if (f, s) in met}
        assert len(shown) >= min(len(cases[0].op.families), slots[s] * 3 // 4), (s, set(cases[0].op.families) - shown)
