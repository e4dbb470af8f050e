"""Problems and the oracle's answers that are kept for another try."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.collect import cases_at
from conformance.engine import draw
from conformance.engine.example import Example, build
from conformance.engine.recall import Recall

CASE = next(c for c in cases_at("core", ("deepgemm",)) if c.op.name == "deepgemm.bf16_gemm_nt" and c.check == "values")
PROBLEM, OTHER = draw.chunk(CASE, 0, 0)[:2]


def made(recall: Recall, problem=PROBLEM, judged=True, requirements=None) -> Example:
    return recall.example(problem, judged, requirements or {}, lambda: build(CASE.op, problem, {}, judged=judged))


def test_what_is_asked_again_is_the_same_and_belongs_to_no_memory() -> None:
    recall = Recall()
    first = made(recall)
    first.arenas.append("of the first try")
    again = made(recall)
    assert again.codes is first.codes
    assert again.arenas == again.before == again.after == []
    fresh = build(CASE.op, PROBLEM, {}, judged=True)
    assert all(np.array_equal(again.codes[n], fresh.codes[n]) for n in fresh.codes)


def test_what_differs_is_made_anew() -> None:
    recall = Recall()
    codes = made(recall).codes
    for other in ({"problem": OTHER}, {"judged": False}, {"requirements": {"row_bytes": 64}}):
        assert made(recall, **other).codes is not codes
    recall.forget()
    assert made(recall).codes is not codes


def test_an_answer_is_kept_by_example_and_profile() -> None:
    recall, asked = Recall(), []

    def answer(example: Example, profile) -> object:
        def make() -> dict:
            asked.append(profile)
            return CASE.op.oracle(example.problem, example.inputs, profile)

        return recall.answer(example, profile, make)

    example = made(recall)
    first = answer(example, {"p": "bf16"})
    assert answer(made(recall), {"p": "bf16"}) is first
    assert answer(example, {"p": "fp16"}) is not first
    assert answer(made(recall, problem=OTHER), {"p": "bf16"}) is not first
    assert len(asked) == 3
    with pytest.raises(ValueError, match="read-only"):
        first["d"].value[...] = 0
    with pytest.raises(ValueError, match="read-only"):
        example.codes["a"][...] = 0


def test_past_its_limit_it_keeps_nothing_and_still_answers() -> None:
    recall = Recall(most_bytes=0)
    first, again = made(recall), made(recall)
    assert first.codes is not again.codes
    a, b = (recall.answer(e, {}, lambda e=e: CASE.op.oracle(e.problem, e.inputs, {})) for e in (first, again))
    assert a is not b
    assert recall.kept_bytes == 0
    first.codes["a"][...] = 0


def test_chunks_are_those_that_are_drawn() -> None:
    recall = Recall()
    assert recall.chunk(CASE, 5, 1) == draw.chunk(CASE, 5, 1)
    assert recall.chunk(CASE, 5, 1) is recall.chunk(CASE, 5, 1)
    assert recall.chunk(CASE, 6, 1) != recall.chunk(CASE, 5, 1)
