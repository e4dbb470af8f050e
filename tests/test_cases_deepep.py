"""What the cases of DeepEP are made of: routing of every kind, and sizes that agree with it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from cases.deepep import combine, dispatch, routing
from conformance.catalogue.load import functions
from conformance.collect import full_cases
from conformance.engine.draw import first_chunk
from conformance.engine.example import Example, build
from conformance.model import Case, Op, Problem


def drawn(op: Op, every: int = 6, each: int = 5) -> list[tuple[Op, Problem]]:
    cases: list[Case] = [c for c in full_cases(op) if c.check in ("values", "degenerate")]
    return [(op, p) for c in cases[::every] for p in first_chunk(c, 0)[0][:each]]


PROBLEMS = [*drawn(dispatch.DISPATCH), *drawn(combine.COMBINE)]


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return [build(op, p, {}) for op, p in PROBLEMS]


def ids_of(e: Example) -> list[np.ndarray]:
    return [e.codes[f"dispatch/topk_idx@{r}"] for r in range(routing.RANKS)]


def test_ids_of_a_token_are_distinct_and_in_range(examples: list[Example]) -> None:
    for e in examples:
        for ids in ids_of(e):
            assert ids.max(initial=-1) < routing.num_experts(e.problem)
            for row in ids:
                assert max(Counter(row[row >= 0].tolist()).values(), default=1) == 1


def test_every_kind_of_routing_occurs_and_means_something(examples: list[Example]) -> None:
    busy = [e for e in examples if sum(e.problem.t) > 8]
    assert {routing.kind_of(e.problem) for e in busy} == set(routing.KINDS)
    for e in busy:
        local = routing.local_experts(e.problem)
        owners = {int(i) // local for ids in ids_of(e) for i in ids[ids >= 0]}
        if routing.kind_of(e.problem) == "one_rank":
            assert len(owners) <= 1
    assert any((ids < 0).all(axis=1).any() for e in busy for ids in ids_of(e)), "no token without an expert"
    assert any(max(e.problem.t) == routing.most_tokens(e.problem) for e in busy), "no rank at the declared maximum"
    assert {min(ids.min(initial=0) for ids in ids_of(e)) for e in busy} >= {-7, -1}


def test_ranks_without_tokens_are_tried_in_degenerate_only(examples: list[Example]) -> None:
    assert any(0 in e.problem.t for e in examples)
    for op in (dispatch.DISPATCH, combine.COMBINE):
        case = next(c for c in full_cases(op) if c.check == "values")
        assert all(0 not in p.t for p in first_chunk(case, 0)[0])


def test_rows_follow_from_the_problem_as_from_its_ids(examples: list[Example]) -> None:
    for e in examples:
        assert [routing.rows_of(e.problem, r) for r in range(routing.RANKS)] == list(
            routing.derived(e.problem, e.inputs)["rows"])
        assert sum(routing.derived(e.problem, e.inputs)["rows"]) <= routing.capacity(e.problem)


def test_a_decoy_has_the_routing_of_the_judged_run() -> None:
    for op, p in PROBLEMS[::7]:
        first, second = build(op, p, {}, judged=False), build(op, p, {})
        assert all(map(np.array_equal, ids_of(first), ids_of(second)))
        assert sum(p.t) == 0 or not all(np.array_equal(first.codes[k], second.codes[k]) for k in first.codes)


def test_rows_handed_to_combine_are_nan_where_they_belong_to_no_token(examples: list[Example]) -> None:
    seen = 0
    for e in examples:
        for rank in range(routing.RANKS):
            x = e.codes.get(f"combine/x@{rank}")
            if x is None:
                continue
            inside = combine.belongs(e.problem, e.codes, rank)
            assert (x[~inside] == combine.BF16_NAN).all()
            local = routing.local_experts(e.problem)
            pairs = sum(int((ids[ids >= 0] // local == rank).sum()) for ids in ids_of(e))
            tokens = sum(int(((ids >= 0) & (ids // local == rank)).any(axis=1).sum()) for ids in ids_of(e))
            assert inside.sum() == (pairs if e.problem.variant.layout == "expanded" else tokens)
            seen += int((~inside).any())
    assert seen


def test_sizes_spread_over_what_decides_code_paths() -> None:
    for op in (dispatch.DISPATCH, combine.COMBINE):
        problems = [p for o, p in drawn(op, every=3, each=12) if o is op]
        for name in ("k", "h", "spare_experts"):
            assert {p.sizes[name] for p in problems} >= set(op.sizes[name].points) - {7168}


def test_the_catalogue_lists_the_public_surface_once() -> None:
    names = [f.name for f in functions("deepep")]
    assert len(names) == len(set(names)) == 65
    assert all(f.signature for f in functions("deepep"))

