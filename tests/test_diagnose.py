"""A failure is held against the faults of the cpu kernels: the right kind is named, and never a wrong one for sure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from conformance.bench import bench_of
from conformance.collect import find_case
from conformance.diagnosis import Diagnoser
from conformance.engine import draw, kinds
from conformance.engine.attempt import Attempt, Attempts, Bench, Clock
from conformance.engine.diagnose import Further, _Search, diagnose
from conformance.engine.evidence import Evidence, Score, direct, evidence_of, score, wrong_in
from conformance.engine.example import Example, build, digests
from conformance.engine.executor import ArenaPool
from conformance.engine.judge import Finding
from conformance.engine.kinds import Candidate
from conformance.engine.rig import SETTABLE, Rig
from conformance.engine.told import Diagnosis, Match
from conformance.model import Op, Problem
from references.expected import Exact, Expected, Joint, Judgement, Within
from references.formats import codec

GEMM = find_case("deepgemm.bf16_gemm_nt/values:out=fp32,c=none,a_major=k,b_major=k", "core")
FIRST = draw.first_chunk(GEMM, 0)[0][0]
REACH = {"tile_k": 40}
TABLE = {"fault": [
    {"name": "tail", "ops": ["x.y"], "knobs": "drop_tail=yes", "reason": "numeric", "doc": "The tail."},
    {"name": "one_far", "ops": ["x.y"], "knobs": "mask_shift=1", "reason": ["numeric"], "doc": "One too far."},
    {"name": "one_short", "ops": ["x.y"], "knobs": "mask_shift=-1", "reason": "numeric", "doc": "One short."},
    {"name": "own", "ops": ["x.y"], "knobs": "fault=own", "reason": "numeric"},
    {"name": "crash", "ops": ["x.y"], "knobs": "fault=crash", "reason": "signal"},
    {"name": "misuse", "ops": ["x.y"], "knobs": "fault=misuse", "reason": "numeric", "check": "rejects"},
    {"name": "other", "ops": ["x.z"], "knobs": "fault=other", "reason": "numeric"},
]}


def test_candidates_are_the_rows_and_their_neighbourhood() -> None:
    rows = kinds.kinds_of("x.y", TABLE)
    assert [r["name"] for r in rows] == ["tail", "one_far", "one_short", "own"]
    found = kinds.candidates(rows, ["tile_k"], [12], largest=40)
    by_knobs = {c.knobs: c for c in found}
    assert len(by_knobs) == len(found)
    assert [c.rank for c in found] == sorted(c.rank for c in found)
    tiles = [int(kinds.parse(k)["tile_k"]) for k in by_knobs if "tile_k" in k]
    assert sorted(tiles) == [8, 12, 16, 24, 32, 40]  # none but the smallest that holds all of the axis
    assert by_knobs["drop_tail=yes,tile_k=12"].rank < by_knobs["drop_tail=yes,tile_k=24"].rank
    assert by_knobs["mask_shift=-1"].name == "one_short"  # not a neighbour of one_far
    assert by_knobs["mask_shift=2"].kind == by_knobs["mask_shift=-1"].kind == "mask_shift"


@pytest.mark.parametrize(("knobs", "kind"), [
    ("drop_tail=yes,tile_k=32", "drop_tail"), ("fault=own,split_k=3", "own"), ("split_k=3", "split_k=3"),
    ("tile_k=32,accumulator=bf16", "accumulator"),
])
def test_a_kind_is_the_fault_without_its_parameters(knobs: str, kind: str) -> None:
    assert kinds.kind_of(knobs) == kind


def test_tiles_that_hold_all_of_an_axis_are_one() -> None:
    assert kinds.clipped("drop_tile=0,tile_k=64", REACH) == kinds.clipped("drop_tile=0,tile_k=256", REACH)
    assert kinds.clipped("drop_tile=0,tile_k=32", REACH) != kinds.clipped("drop_tile=0,tile_k=64", REACH)
    assert kinds.clipped("tile_m=64,tile_k=64", REACH) == "tile_m=64,tile_k=40"


def test_a_dropped_tail_and_a_dropped_last_tile_are_twins() -> None:
    assert kinds.twin("drop_tail=yes,tile_k=64") == "tile_k=64,drop_tile=-1"
    assert kinds.twin(kinds.twin("drop_tail=yes,tile_k=64")) == "tile_k=64,drop_tail=yes"
    assert kinds.twin("double_tile=0") == ""


def evidence(want: Expected, observed: np.ndarray, fmt: str, reason: str = "numeric", **kw: object) -> Evidence:
    example = Example(GEMM.op, Problem("x.y", GEMM.variant, {}, {}, "integers", 0), {}, {}, [], True)
    names = want.outputs if isinstance(want, Joint) else ("d",)
    key = names if isinstance(want, Joint) else "d"
    e = Evidence(example, (), {key: want}, {n: observed for n in names}, dict.fromkeys(names, fmt), {}, reason, False)
    e.wrong = wrong_in(e, e.outputs) or {}
    return replace(e, **kw)


def fp32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_an_element_is_explained_by_what_is_wrong_there_in_the_same_way() -> None:
    e = evidence(Within(np.array([1.0, 2.0, 3.0, 4.0]), np.full(4, 0.5)), fp32(9.0, 2.0, 30.0, np.nan), "fp32")
    assert score(e, {"d": fp32(9.25, 2.1, 30.0, np.nan)}) == Score(3, 3, 1, 1)
    assert score(e, {"d": fp32(1.0, 2.0, 3.0, 4.0)}) == Score(0, 3, 1, 1)
    assert score(e, {"d": fp32(9.75, 9.0, 30.0, np.inf)}) == Score(1, 3, 0, 1)
    near = evidence(Within(np.array([1.0]), np.array([0.5])), fp32(1.6), "fp32")
    assert score(near, {"d": fp32(1.4)}).explained == 0  # near, and allowed
    assert not score(e, None).full
    assert not score(e, {"d": fp32(9.0)}).full
    assert not score(e, {}).full


def test_exact_outputs_are_explained_by_the_same_bits() -> None:
    e = evidence(Exact(np.array([1, 2, 3], np.int32)), np.array([1, 5, 6], np.int32), "int32")
    assert score(e, {"d": np.array([1, 5, 7], np.int32)}) == Score(1, 2, 1, 1)


def test_a_run_that_was_right_counts_against_what_is_wrong_there() -> None:
    e = evidence(Exact(np.array([1, 2], np.int32)), np.array([1, 2], np.int32), "int32", "")
    assert score(e, {"d": np.array([1, 2], np.int32)}).share == 1.0
    assert score(e, {"d": np.array([1, 3], np.int32)}).share == 0.0


def test_rows_in_another_order_are_the_same_unless_order_is_what_is_wrong() -> None:
    def check(got: dict[str, np.ndarray]) -> dict[str, Judgement]:
        return {"i": Judgement(got["i"] >= 8)}

    want = Joint({"i": (2, 3)}, check)
    observed = np.array([[9, 1, 2], [3, 4, 5]], np.int32)
    other = {"i": np.array([[1, 2, 9], [5, 3, 4]], np.int32)}
    assert score(evidence(want, observed, "int32"), other).full
    assert not score(evidence(want, observed, "int32", "order"), other).full


def named(e: Evidence) -> set[str]:
    return {kind for kind, _, _, s in direct(e) if s.full}


def test_what_any_op_can_have_shows_in_the_arrays() -> None:
    want = Exact(np.array([1, 2, 3], np.int32))
    assert named(evidence(want, np.zeros(3, np.int32), "int32")) == {"zeros"}
    old = np.array([4, 5, 6], np.int32)
    assert named(evidence(want, old, "int32", previous={"d": old})) == {"stale"}
    assert named(evidence(want, np.full(3, 7, np.int32), "int32", "unwritten")) == {"untouched"}
    assert named(evidence(want, np.array([1, 2, 7], np.int32), "int32", "unwritten")) == {"one_element", "unwritten"}
    assert named(evidence(want, np.array([1, 2 ^ 0x700000, 3], np.int32), "int32")) == {"one_element"}
    assert named(evidence(want, np.array([1, 2 ^ 0x700001, 3], np.int32), "int32")) == set()
    assert named(evidence(want, old, "int32", first_call=True)) == {"first_call_wrong"}


@pytest.mark.parametrize("finding", [
    Finding("crash", "execute", "signal", ""), Finding("timeout", "execute", None, ""),
    Finding("fail", "execute", "exception", ""), Finding("fail", "execute", "oob_write", ""),
    Finding("fail", "compare", "numeric", "", example=3),
])
def test_what_is_not_about_values_is_not_diagnosed(finding: Finding) -> None:
    assert evidence_of(Attempt(problem(8, 8, 8)), finding) is None


def problem(m: int, n: int, k: int) -> Problem:
    return replace(FIRST, sizes={"m": m, "n": n, "k": k}, values={**FIRST.values, "alpha": None}, family="normal")


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with bench_of(SETTABLE, {}) as made:
        yield made


SIZES = ((4, 8, 104), (4, 8, 128), (6, 16, 136), (4, 8, 72))


def observed(bench: Bench, knobs: str = "", inject: str = "", sizes: tuple[tuple[int, int, int], ...] = SIZES) -> list[
        Evidence]:
    """What calls with these settings give, each in a process of its own."""
    bench.launcher.options, bench.launcher.inject = {"knobs": knobs}, inject
    attempts = Attempts(bench, GEMM.op, Clock())
    try:
        runs = (attempts.run(problem(*s), fresh=True) for s in sizes)
        return [e for a in runs if (e := evidence_of(a, a.worst)) is not None]
    finally:
        attempts.close()
        bench.launcher.options, bench.launcher.inject = {}, ""


def told(bench: Bench, seen: list[Evidence], op: Op = GEMM.op, **kw: object) -> Diagnosis:
    found = diagnose(op, seen, lambda: bench, limit_s=60.0, **kw)
    assert found is not None
    return found


@pytest.mark.parametrize(("knobs", "kind"), [
    ("drop_tail=yes,tile_k=64,tile_m=24", "left_out"),
])
def test_settings_that_no_table_has_are_named_and_no_other_kind_is_certain(bench: Bench, knobs: str, kind: str) -> None:
    seen = observed(bench, knobs)
    assert seen[0].count
    found = told(bench, seen)
    assert found.matches[0].kind == kind, found.sentence()
    assert found.matches[0].full
    tile = dict(p.split("=") for p in knobs.split(","))["tile_k"]
    assert f"tile_k={tile}" in found.matches[0].knobs
    assert found.certain, found.sentence()
    assert f"of {seen[0].count} wrong elements" in found.sentence()
    left_out = told(bench, seen, without=kind)
    assert not left_out.certain, left_out.sentence()


def test_a_twin_that_fits_is_told(bench: Bench) -> None:
    seen = observed(bench, "drop_tail=yes,tile_k=64", sizes=tuple(s for s in SIZES if s[2] % 64))
    found = told(bench, seen)
    assert found.certain
    assert {found.matches[0].knobs, found.also} == {"drop_tail=yes,tile_k=64", "tile_k=64,drop_tile=-1"}
    assert found.sentence().endswith("fits as well")


@pytest.mark.parametrize(("fault", "k", "certain"), [
    ("zeros", 288, True), ("stale", 8, True), ("one_element", 8, False), ("untouched", 8, False)])
def test_planted_faults_are_named(bench: Bench, fault: str, k: int, certain: bool) -> None:
    """What adds to poison leaves poison too, so that `untouched` has a second; a tile of all of K leaves zeros.

    Of `one_element` there are too few wrong elements to be certain of anything.
    """
    found = told(bench, observed(bench, inject=fault, sizes=((2, 8, 8), (2, 8, 16), (2, 8, k))))
    assert found.matches[0].kind == fault, found.sentence()
    assert found.certain == certain, found.sentence()


def test_the_backend_is_asked_for_what_tells_two_kinds_apart(bench: Bench) -> None:
    """A tail and a last tile of 64: the same unless K is whole tiles. The one that is, is not wrong."""
    fault = "drop_tail=yes,tile_k=64"
    seen = observed(bench, fault, sizes=((2, 8, 72), (2, 8, 136), (2, 8, 80)))
    assert told(bench, seen).also
    asked = []

    def ask(p: Problem) -> Evidence | None:
        asked.append(p.sizes["k"])
        return next(iter(observed(replace(bench, pool=ArenaPool()), fault, sizes=((2, 8, p.sizes["k"]),))), None)

    more = Further([problem(2, 8, 128), problem(2, 8, 200)], ask, bench.description.requirements)
    found = told(bench, seen, further=more)
    assert (kinds.kind_of(found.matches[0].knobs), found.certain) == ("drop_tail", True), found.sentence()
    assert not found.also
    assert asked == [128]


def by_numpy(e: Evidence, tile_k: int) -> Evidence:
    """The same call made without the cpu kernels, and without what stands behind the last full tile of K."""
    a, b = (codec.decode(e.example.codes[n], "bf16") for n in ("a", "b"))
    k = a.shape[1] // tile_k * tile_k
    made = replace(e, outputs={"d": (a[:, :k] @ b[:, :k].T).astype(np.float32)})
    made.wrong = wrong_in(made, made.outputs) or {}
    return replace(made, reason="numeric" if made.count else "")


def test_what_other_code_gets_wrong_in_the_same_way_is_named_too(bench: Bench) -> None:
    plain = observed(bench)
    assert [by_numpy(e, 8).count for e in plain] == [0] * len(plain)
    seen = [by_numpy(e, 64) for e in plain]
    assert [bool(e.count) for e in seen] == [True, False, True, True]
    found = told(bench, seen)
    assert kinds.kind_of(found.matches[0].knobs) == "drop_tail", found.sentence()
    assert found.matches[0].full


def test_nothing_is_said_where_the_kernels_as_they_should_be_give_the_same(bench: Bench) -> None:
    seen = observed(bench, sizes=SIZES[:1])
    wrong = replace(seen[0], expected={"d": Within(np.zeros(seen[0].outputs["d"].shape), np.array(0.0))},
                    reason="numeric")
    wrong.wrong = wrong_in(wrong, wrong.outputs) or {}
    assert wrong.count
    assert diagnose(GEMM.op, [wrong], lambda: bench) is None
    assert diagnose(GEMM.op, seen, lambda: bench) is None  # all right


def test_it_raises_nothing(bench: Bench) -> None:
    def broken() -> Bench:
        raise RuntimeError

    assert diagnose(GEMM.op, observed(bench, "drop_tail=yes", sizes=SIZES[:1]), broken) is None
    assert diagnose(GEMM.op, [], lambda: bench) is None


def test_the_kernels_are_asked_for_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def missing(*_: object) -> None:
        asked.append(1)
        raise ImportError

    monkeypatch.setattr("conformance.diagnosis.bench_of", missing)
    diagnoser, seen = Diagnoser(), observed(bench, "drop_tail=yes", sizes=SIZES[:1])
    assert diagnoser(GEMM.op, seen) is diagnoser(GEMM.op, seen) is None
    assert len(asked) == 1
    diagnoser.close()


def test_a_setting_that_ends_its_run_explains_nothing_and_the_next_one_runs(bench: Bench) -> None:
    rig = Rig(bench, GEMM.op)
    seen = observed(bench, "drop_tail=yes", sizes=SIZES[:1])
    try:
        assert rig.outputs([seen[0].example], "no_such=1") is None
        assert score(seen[0], rig.outputs([seen[0].example], "drop_tail=yes")).full
    finally:
        rig.close()


def test_settings_one_ahead_give_what_they_give_one_by_one(bench: Bench) -> None:
    calls = [observed(bench, "drop_tail=yes", sizes=SIZES[:1])[0].example]
    settings = ["drop_tail=yes", "no_such=1", "", "drop_tile=0,tile_k=32", "no_such=1"]
    rig = Rig(bench, GEMM.op)
    try:
        ahead = list(rig.each(calls, settings))
        assert [found is None for found in ahead] == [False, True, False, False, True]
        for knobs, found in zip(settings, ahead, strict=True):
            assert digests(rig.outputs(calls, knobs) or {}) == digests(found or {})
        some = rig.each(calls, settings)
        next(some)
        some.close()  # with a call under way
        assert digests(rig.outputs(calls, "") or {}) == digests(ahead[2] or {})
    finally:
        rig.close()


@pytest.mark.parametrize(("k", "reach"), [(8, 8), (72, 72), (100, 104), (128, 128), (129, 136), (300, 256)])
def test_the_tile_that_holds_the_whole_axis_is_found(bench: Bench, k: int, reach: int) -> None:
    rig = Rig(bench, GEMM.op)
    example = build(GEMM.op, problem(4, 8, k), bench.description.requirements)
    try:
        assert rig.axes([example]) == (["tile_k"] if k > kinds.SMALLEST_TILE else [])
        short = build(GEMM.op, problem(4, 8, 8), bench.description.requirements)
        assert rig.axes([short, example]) == rig.axes([example, short]) == rig.axes([example])
        assert rig.reach(example, ["tile_k"]) == {"tile_k": reach}
    finally:
        rig.close()


def test_the_tile_that_a_row_names_is_left_to_the_kernel_too() -> None:
    rows = kinds.kinds_of("x.y", {"fault": [
        {"name": "lost", "ops": ["x.y"], "knobs": "tile_m=2,drop_tail=yes", "reason": "numeric"}]})
    assert {c.knobs: c.rank for c in kinds.candidates(rows, [])} == {"tile_m=2,drop_tail=yes": 0, "drop_tail=yes": 1}


def test_fewer_changed_parameters_are_tried_first() -> None:
    rows = kinds.kinds_of("x.y", {"fault": [
        {"name": "dropped", "ops": ["x.y"], "knobs": "drop_tile=-1", "reason": "numeric"},
        {"name": "too_far", "ops": ["x.y"], "knobs": "mask_shift=1", "reason": "numeric"}]})
    order = [c.knobs for c in kinds.candidates(rows, ["tile_k"])]
    assert order.index("mask_shift=2") < order.index("drop_tile=0,tile_k=16") < order.index("drop_tile=-1,tile_k=24")


def test_where_time_runs_out_what_was_refuted_stands_behind_what_was_not_tried(bench: Bench) -> None:
    """The two are the same on the first problem; time runs out before both met the second one."""
    seen = observed(bench, "drop_tail=yes,tile_k=64", sizes=SIZES[:2])

    class Short(_Search):
        @property
        def spent_s(self) -> float:
            return 0.0 if len(self.known) < 3 else math.inf

    rig = Rig(bench, GEMM.op)
    try:
        search = Short(GEMM.op, rig, (), 1.0, "")
        tried = [Candidate("left_out", k, "", k, 0) for k in ("drop_tile=-1,tile_k=64", "drop_tail=yes,tile_k=64")]
        best = search._narrowed([(search._score(seen[0], c), c) for c in tried], seen[1:])
    finally:
        rig.close()
    assert search.cut
    assert [len(m.scores) for m in best] == [2, 1]
    assert best[0].share < best[1].share == 1


def test_what_was_not_tried_in_time_is_said_and_nothing_is_certain(bench: Bench) -> None:
    found = diagnose(GEMM.op, observed(bench, "stale_tile=1,tile_k=64"), lambda: bench, limit_s=0.0)
    assert found is not None
    assert found.tried < found.settings
    assert not found.certain
    assert "tried in time" in found.sentence()


def test_words_and_record() -> None:
    match = Match("drop_tail", "k_tail", "The tail is dropped. More.", "drop_tail=yes", 0, (Score(3, 3, 5, 5),))
    found = Diagnosis((match,), True, "row 1 of d", 4, 4, 0.1)
    assert found.sentence() == ("matches k tail (knobs=drop_tail=yes): explains 3 of 3 wrong elements and 5 of 5 right "
                                "ones (The tail is dropped)")
    assert found.to_json()["matches"] == [{"kind": "k_tail", "knobs": "drop_tail=yes", "share": 1.0, "explained": 3,
                                           "wrong": 3, "left_right": 5, "right": 5}]
    poor = replace(found, matches=(replace(match, scores=(Score(1, 3, 5, 5),)),), certain=False)
    assert poor.sentence() == "no known kind; wrong elements: row 1 of d"
