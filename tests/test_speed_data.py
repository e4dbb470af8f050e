"""Peaks and claims as data, the work that is counted, and the verdicts that follow."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from conformance.catalogue import peaks
from conformance.catalogue.load import required_checks
from conformance.catalogue.peaks import Claim, attained, chip_named, chips, claims
from conformance.collect import ops, speeds, timing_cases, timings_of
from conformance.engine.grade import Rates, grade, published
from conformance.engine.timing_data import DataSets, problem_of
from conformance.engine.timing_stats import Interval
from conformance.model import Cost
from conformance.speed import TimedCase

ASCEND, H200, B200 = "ascend-950dt", "h200-sxm", "b200-sxm"


def case_named(op: str, workload: str) -> TimedCase:
    return next(c for c in timing_cases() if c.op.name == op and c.workload is not None and c.workload.name == workload)


GEMM = case_named("deepgemm.bf16_gemm_nt", "m4096_n7168_k16384")
FLOPS = 2 * 4096 * 7168 * 16384


def interval_of(time_s: float, half: float = 0.001) -> Interval:
    return Interval(time_s, time_s * (1 - half), time_s * (1 + half), 6, 6)


def graded(time_s: float, chip: str, case: TimedCase = GEMM, half: float = 0.001, cost: Cost | None = None) -> dict:
    return grade(interval_of(time_s, half), cost or Cost(FLOPS, 4e8), None, case, published({"chip": chip}, ""))


# --- data -----------------------------------------------------------------------------------------------------

def test_every_peak_is_its_units_times_their_clock() -> None:
    for c in chips().values():
        if c.engine:
            made = c.engine["units"] * c.engine["bf16_flop_per_cycle"] * c.engine["clock_ghz"] / 1000
            assert made == pytest.approx(c.tflops["bf16"], rel=2e-4), c.id


def test_cube_plus_vector_is_no_peak() -> None:
    c = chips()[ASCEND]
    assert (c.tflops["bf16"], c.tflops["fp8"], c.tflops["fp4"]) == (432.5, 865.1, 1730.2)
    for name, figure in c.not_a_peak.items():
        assert figure == pytest.approx(c.tflops[name] + c.vector_tflops["fp16"], abs=0.1)
        assert c.flops(name) == c.tflops[name] * 1e12


def test_what_sources_contradict_each_other_about_is_not_graded() -> None:
    for name in (ASCEND, "ascend-950pr", "ascend-atlas350"):
        assert chips()[name].flops("int8") is None
    exchanges = [c for c in claims() if c.module == "deepep" and ASCEND in c.chips]
    assert len(exchanges) == 10
    assert all("contradiction" in c.why for c in exchanges)


def test_claims_agree_with_the_peaks_they_name() -> None:
    compared = [c for c in claims() if not c.why]
    assert len(compared) == 7
    for c in compared:
        case_named(c.op, c.workload)
        for chip in c.chips:
            stated, own = c.of_peak(chips()[chip]), c.figure / chips()[chip].tflops[c.peak]
            assert stated == pytest.approx(own, abs=0.004)


def test_a_device_is_a_chip_only_by_its_whole_name() -> None:
    assert chip_named("NVIDIA H200") is chips()[H200]
    assert chip_named("NVIDIA H200 NVL") is None
    assert published({}, "NVIDIA H200").nominal["bytes"] == 4.8e12
    assert published({}, "NVIDIA H200 NVL").nominal == {}
    with pytest.raises(ValueError, match=r"peaks\.toml has"):
        published({"chip": "h300"}, "")


def test_measured_products_stay_below_the_peaks() -> None:
    for a in attained():
        assert a.tflops < chips()[a.chip].tflops[a.format]


@pytest.mark.parametrize(("text", "message"), [
    ('[[claim]]\nmodule = "deepgemm"\nwhat = "x"\nwhy = "y"\n', "no source"),
    ('[[claim]]\nmodule = "deepgem"\nwhat = "x"\nwhy = "y"\nsource = "z"\n', "unknown module"),
    ('[[claim]]\nmodule = "deepgemm"\nwhat = "x"\nsource = "z"\n', "either why"),
    ('[[claim]]\nmodule = "deepgemm"\nwhat = "x"\nfigur = 3\nsource = "z"\n', "unknown field 'figur'"),
    ('[[claim]]\nmodule = "deepgemm"\nwhat = "x"\nchips = ["h99"]\nwhy = "y"\nsource = "z"\n', "unknown chip"),
])
def test_a_malformed_claim_is_told(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "claims.toml").write_text(text)
    (tmp_path / "peaks.toml").write_bytes((peaks.HERE / "peaks.toml").read_bytes())
    monkeypatch.setattr(peaks, "HERE", tmp_path)
    with pytest.raises(ValueError, match=message):
        claims.__wrapped__()


# --- verdicts -------------------------------------------------------------------------------------------------

def test_the_published_time_meets_the_published_claim() -> None:
    found = graded(2229.9e-6, ASCEND)
    assert found["verdict"] == "meets"
    assert found["fraction_nominal"] == pytest.approx(0.9975, abs=2e-4)
    assert found["claims"][0]["low"] == pytest.approx(0.9975 / 1.001, abs=2e-4)


def test_two_points_less_than_claimed_is_below() -> None:
    peak_s = FLOPS / 432.5e12
    assert graded(peak_s / 0.9795, ASCEND)["verdict"] == "meets"
    assert graded(peak_s / 0.9770, ASCEND)["verdict"] == "below"
    # The slow end counts: the same time with a wider interval is below.
    assert graded(peak_s / 0.99, ASCEND, half=0.02)["verdict"] == "below"


def test_faster_than_the_peak_is_impossible() -> None:
    found = graded(FLOPS / 432.5e12 / 1.05, ASCEND)
    assert found["verdict"] == "too fast"
    assert "above the published peak" in found["why"]
    # Within the interval it may be noise.
    assert graded(FLOPS / 432.5e12 / 1.005, ASCEND, half=0.02)["verdict"] != "too fast"
    # 486.6 would be a matrix and a vector unit together: against that this would pass.
    assert graded(FLOPS / 486e12, ASCEND)["verdict"] == "too fast"


def test_more_bytes_than_memory_moves_is_impossible_only_beyond_the_cache() -> None:
    topk = case_named("deepselect.topk", "b4096_topk512_n65536")
    large, small = Cost(0, 1e9), Cost(0, 1e7)
    assert graded(1e9 / 6e12, H200, topk, cost=large)["verdict"] == "too fast"
    assert graded(1e7 / 6e12, H200, topk, cost=small)["verdict"] == "not comparable"
    assert graded(1e9 / 4e12, H200, topk, cost=large)["bound"] == "bytes"


def test_a_claim_is_about_its_own_chip_and_a_steady_time() -> None:
    assert graded(1e-3, B200)["verdict"] == "not comparable"
    assert "published of ascend-950dt; this is b200-sxm" in graded(1e-3, B200)["why"]
    assert graded(2229.9e-6, ASCEND, half=0.1)["verdict"] == "not comparable"


def test_a_measured_peak_grades_nothing_and_still_knows_the_impossible() -> None:
    rates = Rates(source="measured in the run", attained={"bytes": 1e10, "bf16": 1e11, "fp32": 5e10})

    def at(flops_s: float) -> dict:
        return grade(interval_of(FLOPS / flops_s), Cost(FLOPS, 4e8), None, GEMM, rates)

    honest = at(0.6e11)
    assert honest["verdict"] == "not comparable"
    assert honest["fraction_nominal"] is None
    assert honest["fraction_attainable"] == pytest.approx(0.6)
    assert honest["fraction_roofline"] == pytest.approx(0.6)
    assert at(3e11)["verdict"] == "not comparable"
    assert at(5e11)["verdict"] == "too fast"


# --- work -----------------------------------------------------------------------------------------------------

def test_every_op_whose_class_is_timed_has_workloads_of_both_scales() -> None:
    for op in ops():
        scales = {c.workload.scale for c in timings_of(op) if c.workload is not None}
        assert scales == ({"small", "model"} if required_checks(op.name)["timing"] is True else set()), op.name


@pytest.mark.parametrize(("op", "workload", "flops", "nbytes"), [
    ("deepgemm.bf16_gemm_nt", "m128_n256_k512", 2 * 128 * 256 * 512, 2 * (128 + 256) * 512 + 2 * 128 * 256),
    ("deepgemm.fp8_gemm_nt", "m128_n128_k512", 2 * 128 * 128 * 512,
     (128 + 128) * 512 + 4 * 128 * 4 + 4 * 1 * 4 + 2 * 128 * 128),
    ("deepselect.topk", "b16_topk512_n16384", 0, 16 * 16384 * 2 + 16 * 512 * 4),
    ("deepselect.topk", "b4_topk512_n32768", 0, 4 * 32768 * 4 + 4 * 512 * (4 + 8)),
    ("tilekernels.moe.topk_gate", "t1024_e256", 0, 1024 * 256 * 4 + 1024 * 8 * 8),
    ("flashmla.flash_mla_sparse_fwd", "h64_s4_kv512_topk128", 2 * 64 * (512 + 512) * 4 * 128, None),
    ("flashmla.flash_mla_with_kvcache", "h64_b2_s1_topk128_extra512_fp4", 2 * 64 * 1024 * 2 * (128 + 512), None),
    ("tilelang.copy", "m256_n256_mo256_no256", 0, 2 * 256 * 256 * 4),
])
def test_work_is_counted_as_one_would_by_hand(op: str, workload: str, flops: float, nbytes: float | None) -> None:
    case = case_named(op, workload)
    problem = problem_of(case, 0)
    assert case.speed is not None
    cost = case.speed.counted(problem, DataSets(case, problem, {}).first.codes)
    assert cost.flops == flops
    assert nbytes is None or cost.bytes == nbytes


@pytest.mark.parametrize("case", list(timing_cases("small")), ids=lambda c: f"{c.op.name}-{c.workload.name}")
def test_data_sets_fit_each_other_and_are_not_zeros(case: TimedCase) -> None:
    """Whatever is told of a call by its data, such as blocks of zeros, ordinary data does not show."""
    sets = DataSets(case, problem_of(case, 0), {"input_row_bytes": 64, "output_row_bytes": 32})
    first, second, unseen = (sets.make(n) for n in (0, 1, 7))
    assert [p.buffers for p in first.plans] == [p.buffers for p in second.plans] == [p.buffers for p in unseen.plans]
    different = [k for k, a in first.codes.items() if a.tobytes() not in (second.codes[k].tobytes(), b"")]
    assert different
    assert unseen.codes[different[0]].tobytes() not in (first.codes[different[0]].tobytes(),
                                                        second.codes[different[0]].tobytes())
    big = max(first.codes.values(), key=lambda a: a.nbytes)
    assert (big.view("uint8") != 0).mean() > 0.2


def test_rolled_rows_are_other_data_of_the_same_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.engine.timing_data.LARGE_BYTES", 0)
    case = case_named("deepgemm.fp8_gemm_nt", "m128_n128_k512")
    sets = DataSets(case, problem_of(case, 0), {})
    one, two = sets.make(1).codes, sets.make(2).codes
    assert one["a"].shape == two["a"].shape
    assert len({one["a"].tobytes(), two["a"].tobytes(), sets.first.codes["a"].tobytes()}) == 3
    assert sorted(one["a"].sum(axis=1).tolist()) == sorted(sets.first.codes["a"].sum(axis=1).tolist())


def test_workloads_name_only_what_ops_have() -> None:
    for op in ops():
        for w in speeds(op.module)[op.name].workloads if timings_of(op) else ():
            assert math.isfinite(sum(v if isinstance(v, int) else sum(v) for v in w.sizes.values()))


def test_a_claim_says_its_share_of_peak() -> None:
    c = Claim("deepgemm", "x", "y", ("h800-sxm",), 3000, "GB/s", peak="hbm", why="z")
    assert c.of_peak(chips()["h800-sxm"]) == pytest.approx(3000 / 3350)
