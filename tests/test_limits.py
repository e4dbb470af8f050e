"""Limits of a backend: rows that must all hold, looked up in variant, sizes, values and row strides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.backends import complaints
from conformance.collect import all_cases, ops
from conformance.engine.layout import row_bytes_of
from conformance.engine.limits import check_limits, problem_limit, support_of, variant_limit
from conformance.engine.misuse import problem_of
from conformance.engine.variants import matching
from conformance.model import Problem
from conformance.protocol import Description, Support, supported, unsupported

TOPK = next(op for op in ops(("deepselect",)) if op.name == "deepselect.topk")
VARIANT = matching(TOPK, {"dtype": "bf16", "output_idx": "callee"})
PROBLEM = Problem(TOPK.name, VARIANT, {"b": 3, "topk": 8, "vocab": 100}, {}, "normal", 1)


@pytest.mark.parametrize(("row", "holds"), [
    ({"field": "vocab", "le": 100}, True), ({"field": "vocab", "lt": 100}, False),
    ({"field": "vocab", "multiple_of": 16}, False), ({"field": "topk", "multiple_of": 8}, True),
    ({"field": "b", "not_in": [1, 2]}, True), ({"field": "dtype", "not_in": ["bf16"]}, False),
    ({"field": "b", "ge": 4}, False), ({"field": "b", "in": [1, 3]}, True),
    ({"field": "dtype", "in": ["fp32"]}, False), ({"field": "dtype", "in": ["bf16", "fp32"]}, True),
    ({"field": "input.row_bytes", "multiple_of": 64}, True), ({"field": "input.row_bytes", "multiple_of": 1024}, False),
    ({"field": "input.row_bytes", "le": 128}, False), ({"field": "no_such_size", "le": 0}, True),
])
def test_limit(row: dict[str, object], holds: bool) -> None:
    rows = row_bytes_of(TOPK, PROBLEM, {"input_row_bytes": 64})
    assert rows["input"] == 256
    assert (problem_limit(supported(limits=(row,)), PROBLEM, rows) == "") is holds


@pytest.mark.parametrize(("row", "holds"), [
    ({"field": "vocab", "lt": 50, "when": {"dtype": ["fp32"]}}, True),
    ({"field": "vocab", "lt": 50, "when": {"dtype": ["bf16"]}}, False),
    ({"field": "vocab", "lt": 50, "when": {"dtype": ["bf16"], "b": [1, 2]}}, True),
    ({"field": "alpha", "given": False}, True), ({"field": "alpha", "given": True}, False),
    ({"field": "recipe", "given": True}, True), ({"field": "recipe", "given": False}, False),
    ({"field": "recipe", "given": False, "when": {"b": [4]}}, True),
    ({"field": "recipe", "in": [[1, 1, 128]]}, True), ({"field": "recipe", "in": [[1, 1, 32]]}, False),
    ({"field": "not_drawn", "given": True}, True),
])
def test_a_row_may_hold_in_some_problems_only_or_be_about_none(row: dict[str, object], holds: bool) -> None:
    problem = replace(PROBLEM, values={"alpha": None, "recipe": (1, 1, 128)})
    assert (problem_limit(supported(limits=(row,)), problem) == "") is holds


def test_of_a_variant_alone_only_what_is_known_counts() -> None:
    s = supported(limits=({"field": "index", "in": ["int64"], "when": {"vocab": [100]}},
                          {"field": "alpha", "given": True}))
    assert variant_limit(s, VARIANT) == ""
    s = supported(limits=({"field": "index", "in": [], "when": {"dtype": ["bf16"]}, "reason": "why"},))
    assert variant_limit(s, VARIANT).endswith(": why")


def test_every_row_must_hold_and_the_first_broken_one_is_named() -> None:
    s = supported(limits=({"field": "b", "le": 3}, {"field": "vocab", "lt": 50}))
    assert problem_limit(s, PROBLEM) == "vocab=100 must be below 50"


def test_a_variant_is_judged_without_sizes() -> None:
    s = supported(limits=({"field": "dtype", "in": ["fp32"]}, {"field": "vocab", "lt": 1}))
    assert "dtype=bf16" in variant_limit(s, VARIANT)
    assert variant_limit(supported(limits=({"field": "vocab", "lt": 1},)), VARIANT) == ""


def test_the_longest_pattern_counts_and_what_none_names_is_not_yet() -> None:
    d = Description("x", {"deepselect.*": unsupported("later"), "deepselect.topk": supported()})
    assert support_of(d, "deepselect.topk").supported
    assert support_of(d, "deepselect.get_stride_requirement").reason == "later"
    other = support_of(d, "deepgemm.bf16_gemm_nt")
    assert (other.supported, other.kind) == (False, "not_yet")


@pytest.mark.parametrize(("support", "said"), [
    (supported(tiles={"M": 96, "n": 160}), "a tile of 'M', which is no size; sizes: k, m, n"),
    (supported(compile_key=("dtype",)), "a compile key 'dtype', which is no variant key, size or value"),
    (supported(tiles={"m": 96}, compile_key=("out", "k", "compiled_dims")), ""),
])
def test_tiles_and_compile_keys_name_what_there_is(support: Support, said: str) -> None:
    d = Description("x", {"deepgemm.bf16_gemm_nt": support})
    told = [text for text in complaints(d, ops(("deepgemm",))) if "deepgemm.bf16_gemm_nt" in text]
    assert [said in text for text in told] == ([True] if said else [])


def test_malformed_limits_are_named() -> None:
    d = Description("x", {"a.b": supported(limits=({"le": 3}, {"field": "m", "about": 3}))})
    assert len(check_limits(d)) == 2


FP8 = next(op for op in ops(("deepgemm",)) if op.name == "deepgemm.fp8_gemm_nt")


@pytest.mark.parametrize(("limits", "variant", "values"), [
    ((), {"scales": "fp32", "c": "none"}, {}),
    (({"field": "scales", "in": ["pow2", "ue8m0"]},), {"scales": "pow2", "c": "none"}, {}),
    (({"field": "scales", "in": ["ue8m0"]}, {"field": "recipe", "given": True},
      {"field": "recipe", "in": [[1, 1, 128]]}), {"scales": "ue8m0"}, {"recipe": (1, 1, 128)}),
    (({"field": "scales", "in": ["none of these"]},), {"scales": "fp32", "c": "none"}, {}),
])
def test_a_misuse_is_planted_in_what_the_backend_takes(limits: tuple[dict[str, object], ...], variant: dict[str, str],
                                                       values: dict[str, object]) -> None:
    case = next(c for c in all_cases(("deepgemm",)) if c.id == "deepgemm.fp8_gemm_nt/rejects:misuse=a_in_bf16")
    plain = problem_of(case, 7)
    got = problem_of(case, 7, lambda p: not problem_limit(supported(limits=limits), p))
    assert {k: got.variant[k] for k in variant} == variant
    assert {k: got.values[k] for k in values} == values
    assert (got.sizes, got.seed, got.misuse) == (plain.sizes, plain.seed, plain.misuse)


@pytest.mark.parametrize(("field", "told"), [
    ("input", True), ("abort_when_nan_found", True), ("sorted", True), ("idx_oob_fill_value", False),
    ("vocab", False), ("input.row_bytes", False), ("topk", False)])
def test_a_limit_on_what_is_never_drawn_is_a_mistake(field: str, told: bool) -> None:
    description = Description("x", {"deepselect.topk": supported(limits=({"field": field, "le": 8},))})
    assert any(f"a limit on '{field}'" in c for c in complaints(description, [TOPK])) is told
