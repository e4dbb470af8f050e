"""Case ids, queries, and the words for a name that does not exist."""

from __future__ import annotations

import pytest

from conformance.collect import all_cases
from conformance.identity import matches, parse_id, seed_of, selects, slug, unknown


def test_every_id_follows_the_grammar_and_is_unique() -> None:
    ids = [c.id for c in all_cases()]
    assert len(ids) == len(set(ids)) > 500
    for case in all_cases():
        op, check, keys = parse_id(case.id)
        assert (op, check, keys) == (case.op.name, case.check, dict(case.variant))


NO_IDS = ["", "topk", "m.f", "m.f/values:", "m.f/values:a", "m.f/values:A=b", "m.f/values:a=b c", "m.f/values:a=b,",
          "m.f/values;a=b"]


@pytest.mark.parametrize("text", NO_IDS)
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(ValueError, match="no case id"):
        parse_id(text)


@pytest.mark.parametrize(("query", "case_id", "yes"), [
    ("m.f/values", "m.f/values", True), ("m.f/values", "m.f/values:a=b", False), ("m.f/*", "m.f/values:a=b", True),
    ("*", "m.f/values", True), ("m.g*", "m.f/values", False), ("m.f/values:a=b", "m.f/values:a=b", True),
])
def test_queries(query: str, case_id: str, yes: bool) -> None:
    assert matches(query, case_id) is yes


def test_unknown_names_the_nearest() -> None:
    text = unknown("module", "depgemm", ["deepgemm", "deepep"])
    assert "did you mean deepgemm?" in text
    assert "deepep" in text


def test_slugs_are_safe_and_differ() -> None:
    a, b = slug("m.f/values:a=" + "x" * 200), slug("m.f/values:a=" + "x" * 199 + "y")
    assert a != b
    assert "/" not in a
    assert len(a) < 100


def test_seed_of_is_fixed() -> None:
    # Published problems depend on it: this value must never change.
    assert seed_of(0, "m.f/values", 1) == 0x24385FF82781A0DC


IDS = [f"m.op/{check}:a={i},b={i % 2}" for check in ("rejects", "values") for i in range(40)]


@pytest.mark.parametrize(("word", "said"), [
    ("m.op/valeus", "did you mean m.op/values:a=0,b=0? (80 in all)"),
    ("m.op/values:a=17,b=x", "did you mean m.op/values:a=17,b=1? (80 in all)"),
    ("quite other", "known are those of m.op"),
])
def test_an_unknown_case_is_told_the_nearest_of_its_op(word: str, said: str) -> None:
    assert unknown("case", word, IDS) == f"unknown case {word!r}; {said}"


@pytest.mark.parametrize(("query", "wanted"), [
    ("m.op/values:a=1,b=1", 1), ("m", 80), ("m.op", 80), ("m.op/values", 40), ("m.o", 0), ("m.op/val", 0), ("", 0),
    ("m.op/values:a=1*", 11), ("m.op/values:a=1", 0)])
def test_a_selection_takes_whole_names(query: str, wanted: int) -> None:
    assert sum(selects(query, i) for i in IDS) == wanted
