"""Problems that cross a backend's own tiles: which sizes they have, and that they come beside all others."""

from __future__ import annotations

from conformance.collect import cases_at
from conformance.engine.tiles import past, problems
from conformance.model import Size

by_id = {c.id: c for c in cases_at("full", ("deepgemm", "deepselect"))}
GEMM = by_id["deepgemm.bf16_gemm_nt/values:out=bf16,c=none,a_major=k,b_major=k"]


def test_past() -> None:
    assert [past(Size((), 0, 300, 8), n) for n in (0, 7, 8, 95, 96, 400)] == [8, 8, 16, 96, 104, 296]
    assert past(Size((64, 128), 64, 128, 0), 64) == 128
    assert past(Size((64, 128), 64, 128, 0), 128) == 128


def test_every_declared_dimension_is_crossed() -> None:
    first, second = problems(GEMM, {"m": 96, "n": 160, "k": 48}, 0)
    assert first.sizes == {"m": 97, "n": 168, "k": 56}
    assert second.sizes == {"m": 145, "n": 248, "k": 80}
    assert first.family == GEMM.op.families[0]
    assert problems(GEMM, {"m": 96, "n": 160, "k": 48}, 0) == [first, second]


def test_others_have_none() -> None:
    assert problems(GEMM, {}, 0) == []
    assert problems(GEMM, {"rows": 7}, 0) == []
    assert problems(by_id[GEMM.id.replace("/values", "/memory")], {"m": 96}, 0) == []


def test_what_the_contract_rules_out_is_left_out() -> None:
    """k past a tile of 7168 leaves no room for this m and n."""
    assert problems(GEMM, {"m": 200, "n": 200, "k": 7168}, 0) == []
