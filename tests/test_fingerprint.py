"""The fingerprint tells every kind of accumulator apart, and fails what declares more than it does."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adapters.cpu.backend import CpuBackend
from adapters.cpu.kernels import gemm
from adapters.cpu.kernels.accumulators import CHIPS, Unit, unit_of
from adapters.cpu.kernels.knobs import Knobs
from conformance import fingerprint
from conformance.bench import bench_of
from conformance.cli import main
from conformance.collect import ops
from conformance.engine.attempt import Bench
from conformance.fingerprint import DIFFERS, SAME, STRONGER, UNTOLD, WEAKER, Measured
from conformance.protocol import supported, unsupported
from conformance.results import EXIT_CONFORMING, EXIT_INCONCLUSIVE, EXIT_NONCONFORMING, EXIT_USAGE
from references.formats import codec
from references.probes import Card, K, M, N, Probes, probes, read

ROOT = Path(__file__).resolve().parents[1]
FORMATS = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
PROBES = {fmt: probes(fmt) for fmt in FORMATS}
FREE = "free"


def through_kernels(fmt: str, knobs: str) -> Card:
    """The card of the cpu kernels under a setting."""
    p, d = PROBES[fmt], torch.empty(M, N, dtype=torch.bfloat16)
    a, b = (torch.from_numpy(x).to(torch.float32).to(FORMATS[fmt]) for x in (p.a, p.b))
    own = torch.from_numpy(p.scale).float()[:, None].expand(M, K // 128)
    scales = gemm.Scales(own, torch.ones(N, K // 128), 128, 128)
    gemm.gemm_nt(a, b, d, Knobs.parse(knobs), scales=scales if fmt == "e4m3" else None)
    return read(p, d.double().numpy())


def of_bf16(product: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Card:
    """The card of a function of a [m, k] and b [k, n], float64, whose results are rounded to BF16."""
    p = PROBES["bf16"]
    with np.errstate(all="ignore"):
        return read(p, codec.round_to(np.asarray(product(p.a, p.b.T), np.float64), "bf16"))


def seen(card: Card) -> tuple[Any, ...]:
    return card.mid, card.far, card.near, card.rounding, card.extra_bits, card.width


def agrees(card: Card, expected: tuple[Any, ...]) -> bool:
    return all(want == FREE or got == want for got, want in zip(seen(card), expected, strict=True))


# --- the data ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fmt", FORMATS)
def test_operands_are_exact_and_the_exact_results_read_as_no_loss(fmt: str) -> None:
    p = PROBES[fmt]
    for x in (p.a, p.b):
        assert np.array_equal(codec.round_to(x, fmt), x)
    wide = (p.a * p.scale[:, None]).astype(np.longdouble) @ p.b.T.astype(np.longdouble)
    card = read(p, codec.round_to(wide.astype(np.float64), "bf16"))
    assert (card.mid, card.far, card.near) == (card.limit,) * 3
    assert (card.rounding, card.extra_bits, card.width) == ("not_visible", None, None)
    assert (card.lost, card.operands_kept, card.overflow, card.odd) == (frozenset(), True, "inf", ())


def test_results_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="64"):
        read(PROBES["bf16"], np.zeros((M, N - 1)))
    with pytest.raises(KeyError):
        probes("fp16")


# --- what the cards say: numbers from the literature and from the arithmetic, none from these kernels ------

#   setting                              format: (mid, far, near, rounding, extra bits, width)
EVERY = ("bf16", "e4m3")
RIGHT = (23, 23, 23, "nearest", 0, FREE)
KERNELS: tuple[tuple[str, tuple[str, ...], tuple[Any, ...]], ...] = (
    ("", EVERY, RIGHT),
    ("tile_k=32", EVERY, RIGHT),
    ("tile_k=1", ("bf16",), (23, 23, 23, "nearest", 0, 1)),
    ("k_order=reverse", EVERY, RIGHT),
    ("k_order=pairwise", EVERY, RIGHT),
    ("split_k=2", EVERY, RIGHT),
    ("split_k=4,tile_k=64,k_order=reverse", EVERY, RIGHT),
    ("accumulator=v100", EVERY, (23, 23, 23, "toward_zero", 0, 1)),  # without extra bits no width shows
    ("accumulator=a100", EVERY, (23, 23, 23, "toward_zero", 1, 8)),
    ("accumulator=hopper", ("bf16",), (23, 23, 23, "toward_zero", 2, 16)),
    ("accumulator=hopper", ("e4m3",), (13, 23, 13, "toward_zero", 0, 128)),  # the width of a promotion
    ("accumulator=hopper_unpromoted", ("e4m3",), (13, 13, 13, "toward_zero", 0, 1)),
    ("accumulator=b200", ("bf16",), (23, 23, 23, "toward_zero", 2, 16)),
    ("accumulator=b200", ("e4m3",), (23, 23, 23, "toward_zero", 2, 32)),
    ("accumulator=bf16,tile_k=32", EVERY, (7, 7, 7, "nearest", FREE, FREE)),
    ("accumulator=bf16", EVERY, (7, 7, 7, "nearest", FREE, FREE)),
    ("accumulator=fp16", EVERY, (10, 10, 10, "nearest", FREE, FREE)),
    ("split_k=2,partial=bf16", EVERY, (23, 23, 7, "nearest", FREE, FREE)),
    ("split_k=2,partial=fp16", EVERY, (23, 23, 10, "nearest", FREE, FREE)),
    ("drop_tile=1", EVERY, (0, 0, FREE, FREE, FREE, FREE)),
)


@pytest.mark.parametrize(("knobs", "fmt", "expected"), [(k, f, e) for k, fs, e in KERNELS for f in fs])
def test_each_model_and_fault_has_its_card(knobs: str, fmt: str, expected: tuple[Any, ...]) -> None:
    card = through_kernels(fmt, knobs)
    assert agrees(card, expected), card


def added(rounded: Callable[[np.ndarray], np.ndarray], order: str = "forward") -> Callable[..., np.ndarray]:
    """A product that adds one term after the other and rounds each sum."""
    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        total = np.zeros((len(a), b.shape[1]))
        for k in range(K) if order == "forward" else reversed(range(K)):
            total = rounded(total + np.multiply.outer(a[:, k], b[k]))
        return total

    return product


def single(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(np.float64)


def toward(direction: float) -> Callable[[np.ndarray], np.ndarray]:
    """FP32 rounded up or down."""
    def rounded(x: np.ndarray) -> np.ndarray:
        near = x.astype(np.float32)
        wrong = near < x if direction > 0 else near > x
        return np.where(wrong, np.nextafter(near, np.float32(direction)), near).astype(np.float64)

    return rounded


def toward_zero(x: np.ndarray) -> np.ndarray:
    return np.where(x < 0, toward(np.inf)(x), toward(-np.inf)(x))


def torch_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (torch.from_numpy(a).bfloat16() @ torch.from_numpy(b).bfloat16()).double().numpy()


SUMS: dict[str, tuple[Callable[..., np.ndarray], tuple[Any, ...]]] = {
    "numpy fp32": (lambda a, b: a.astype(np.float32) @ b.astype(np.float32), (23, 23, 23, "nearest", FREE, FREE)),
    "numpy fp64": (lambda a, b: a @ b, (52, 52, 52, "nearest", FREE, FREE)),
    "fp32": (added(single), (23, 23, 23, "nearest", 0, 1)),
    "fp32 backwards": (added(single, "back"), (23, 23, 23, "nearest", 0, 1)),
    "fp32 toward zero": (added(toward_zero), (23, 23, 23, "toward_zero", 0, 1)),
    "fp32 toward zero, backwards": (added(toward_zero, "back"), (23, 23, 23, "toward_zero", 0, 1)),
    "fp32 up": (added(toward(np.inf)), (23, 23, 23, "up", FREE, FREE)),
    "fp32 down": (added(toward(-np.inf)), (23, 23, 23, "down", FREE, FREE)),
    "fp16": (added(lambda x: x.astype(np.float16).astype(np.float64)), (10, 10, 10, "nearest", 0, 1)),
    "torch bf16": (torch_bf16, (23, 23, 23, "nearest", FREE, FREE)),
}


@pytest.mark.parametrize("name", SUMS)
def test_each_way_to_add_has_its_card(name: str) -> None:
    product, expected = SUMS[name]
    card = of_bf16(product)
    assert agrees(card, expected), card


def flushed(what: str) -> Callable[..., np.ndarray]:
    """FP32 that counts subnormal operands (in) or products and sums (out) as zero."""
    def zeroed(x: np.ndarray, where: str) -> np.ndarray:
        return np.where(np.abs(x) < 2.0**-126, 0, x) if where in what else x

    return lambda a, b: added(lambda x: zeroed(single(x), "out"))(zeroed(a, "in"), zeroed(b, "in"))


@pytest.mark.parametrize("lost", [(), ("in",), ("out",), ("in", "out")])
def test_flushes_of_operands_and_of_results_are_told_apart(lost: tuple[str, ...]) -> None:
    assert of_bf16(flushed(" ".join(lost))).lost == frozenset(lost)


def test_saturation_and_what_no_rule_explains_are_told() -> None:
    largest = codec.max_finite("bf16")
    assert of_bf16(lambda a, b: np.clip(a @ b, -largest, largest)).overflow == "saturate"
    assert through_kernels("bf16", "output_rounding=toward_zero").overflow == "mixed"  # BF16's largest where it is cast
    odd = of_bf16(lambda a, b: np.where(np.abs(a @ b) < 2.0**-100, 1.0, a @ b)).odd
    assert len(odd) == 4, odd
    assert not through_kernels("e4m3", "flush_subnormals=yes").odd
    card = read(PROBES["e4m3"], np.where(np.abs(PROBES["e4m3"].exact) == 2.0**-6, 0, PROBES["e4m3"].exact))
    assert not card.operands_kept, "E4M3 operands of 2**-9 count"


# --- torch's own product, with and without the host's matrix unit -----------------------------------------

TORCH_CARD = """
import json, torch
from references.probes import probes, read
p = probes("bf16")
a, b = (torch.from_numpy(x).bfloat16() for x in (p.a, p.b))
c = read(p, (a @ b.T).double().numpy())
print(json.dumps([c.mid, c.far, c.near, c.rounding, sorted(c.lost)]))
"""
ISA = "ONEDNN_MAX_CPU_ISA"


def cpu_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return set(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions asked about are x86's")


@X86
@pytest.mark.skipif(ISA in os.environ, reason="somebody chose the instructions already")
def test_torch_flushes_subnormals_where_the_host_multiplies_bf16_itself() -> None:
    """AMX and VDPBF16PS flush operands and results, whatever is set; FP32 arithmetic keeps them."""
    unit = bool({"amx_bf16", "avx512_bf16"} & cpu_flags())
    assert of_bf16(torch_bf16).lost == (frozenset({"in", "out"}) if unit else frozenset())


@X86
def test_torch_keeps_subnormals_where_the_hosts_unit_is_switched_off() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), ISA: "AVX512_CORE"}
    text = subprocess.run([sys.executable, "-c", TORCH_CARD], env=env, cwd=ROOT, check=True, capture_output=True,
                          text=True, timeout=120).stdout
    assert json.loads(text) == [23, 23, 23, "nearest", []]


# --- the models themselves --------------------------------------------------------------------------------

def cut(x: Fraction, unit: Fraction) -> Fraction:
    whole = abs(x) // unit
    return whole * unit if x >= 0 else -whole * unit


def exponent(x: Fraction) -> int:
    e = x.numerator.bit_length() - x.denominator.bit_length() if x > 0 else 0
    return e if Fraction(2) ** e <= x else e - 1


def by_hand(unit: Unit, a: list[float], b: list[float]) -> Fraction:
    """One sum of the unit in exact rationals."""
    total = Fraction(0)
    products = [Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True)]
    for k in range(0, len(products), unit.width):
        addends = [total, *products[k : k + unit.width]]
        largest = max(map(abs, addends))
        if not largest:
            continue
        step = Fraction(2) ** (exponent(largest) - unit.fraction_bits)
        total = sum(cut(x, step) for x in addends)
        if total:
            total = cut(total, Fraction(2) ** (exponent(abs(total)) - unit.significant_bits + 1))
    return total


UNITS = {name: unit_of(name, fp8=fp8) for name, fp8 in (("v100", False), ("a100", False), ("hopper", False),
                                                        ("hopper_unpromoted", True), ("b200", True))}


@pytest.mark.parametrize("name", UNITS)
def test_a_model_gives_every_bit_that_exact_arithmetic_gives(name: str) -> None:
    unit = UNITS[name]
    assert unit is not None
    words = np.random.PCG64(7).random_raw(2 * 6 * 90).reshape(2, 6, 90)
    values = (words % 255 - 127.0 * (words % 2)) * np.ldexp(1.0, (words >> np.uint64(40)).astype(np.int64) % 24 - 12)
    a, b = values.astype(np.float32)
    got = unit.add(None, torch.from_numpy(a), torch.from_numpy(b).t())
    for i in range(6):
        for j in range(6):
            assert Fraction(float(got[i, j])) == by_hand(unit, a[i].tolist(), b[j].tolist())


def test_a_model_passes_infinities_and_nan_on_and_overflows() -> None:
    unit = CHIPS["hopper"].wide
    a = torch.tensor([[1.0, 2.0], [float("inf"), 1.0], [float("nan"), 1.0], [2.0**127, 2.0**127], [2.0**-140, 0.0]])
    got = unit.add(torch.ones(5, 1), a, torch.ones(2, 1))[:, 0]
    assert got[0] == 4
    assert got[1] == got[3] == float("inf")
    assert got[2].isnan()
    assert got[4] == 1
    assert unit.add(None, a, torch.ones(2, 1))[4] == 2.0**-140


def test_a_promoted_model_adds_scaled_chunks_in_fp32_and_others_take_scales_inside() -> None:
    left, right, factor = torch.tensor([[1.0, 2.0**-13]]), torch.ones(2, 1), torch.tensor([[3.0]], dtype=torch.float64)
    start = torch.tensor([[2.0**20]])
    promoted, running = CHIPS["hopper"].fp8, CHIPS["hopper_unpromoted"].fp8
    assert promoted.add(None, left, right, factor) == 3 + 3 * 2.0**-13
    assert promoted.add(start, left, right, factor) == 2.0**20 + 3
    assert running.add(None, left, right, factor) == 3 + 2.0**-12  # 13 bits below the leading one of 3
    assert running.add(start, left, right, factor) == 2.0**20


# --- the profile beside the card --------------------------------------------------------------------------

def card(**kw: Any) -> Card:
    base = Card("bf16", 23, 23, 23, 54, "nearest", 0, 1, frozenset(), True, "inf")
    return replace(base, **kw)


FP8 = card(format="e4m3", limit=25)
TC14 = replace(FP8, mid=13, near=13, rounding="toward_zero")
VERDICTS = (
    # key, declared, cards, verdict
    ("accumulator", "fp32", [card(rounding="toward_zero")], SAME),
    ("accumulator", "fp32", [card()], WEAKER),
    ("accumulator", "tc_rz_fp32", [card(rounding="toward_zero"), FP8], SAME),
    ("accumulator", "ieee_rn_fp32", [card(), FP8], SAME),
    ("accumulator", "ieee_rn_fp32", [card(), replace(FP8, rounding="toward_zero")], STRONGER),
    ("accumulator", "fp64", [card(mid=52, far=52, near=52)], SAME),
    ("accumulator", "fp64", [card()], STRONGER),
    ("accumulator", "int32", [card(mid=52, far=52, near=52)], STRONGER),
    ("accumulator", "fp32", [card(), TC14], STRONGER),
    ("accumulator", "fp8_tc14_promoted", [card(), TC14], SAME),
    ("accumulator", "fp8_tc14_promoted", [card(), FP8], WEAKER),
    ("accumulator", "fp8_tc14_promoted", [card()], UNTOLD),
    ("accumulator", "fp8_tc14_promoted", [card(), replace(TC14, far=13)], STRONGER),
    ("accumulator", "fp8_tc14_promoted", [card(mid=13, near=13), TC14], STRONGER),  # BF16 must not be narrow
    ("accumulator", "fp8_tc14_promoted", [card(), replace(TC14, mid=12, near=12)], STRONGER),
    ("accumulator", "fp32", [card(mid=7, far=7, near=7)], STRONGER),
    ("accumulator", "fp8_tc14_promoted", [card(mid=0)], STRONGER),
    ("partial", "fp32", [card(), FP8], SAME),
    ("partial", "fp32", [card(), replace(FP8, near=7)], STRONGER),
    ("partial", "bf16", [card(near=7), FP8], SAME),
    ("partial", "bf16", [card(near=10), FP8], WEAKER),
    ("partial", "fp16", [card(near=7), FP8], STRONGER),
    ("partial", "bf16", [card(near=5)], STRONGER),
    ("partial", "fp32", [card(mid=7, far=7, near=7)], UNTOLD),
    ("partial", "fp32", [card(), TC14], SAME),
    ("subnormals", "keep", [card(), FP8], SAME),
    ("subnormals", "keep", [card(lost=frozenset({"in"}))], STRONGER),
    ("subnormals", "flush_in", [card(lost=frozenset({"out"}))], STRONGER),
    ("subnormals", "flush_out", [card(), replace(FP8, lost=frozenset({"out"}))], SAME),
    ("subnormals", "flush", [card(lost=frozenset({"in", "out"}))], SAME),
    ("subnormals", "flush", [card(lost=frozenset({"out"}))], WEAKER),
    ("overflow", "inf", [card()], SAME),
    ("overflow", "inf", [card(overflow="saturate")], DIFFERS),
    ("overflow", "saturate", [card(), FP8], DIFFERS),
    ("overflow", "saturate", [card(overflow="saturate"), replace(FP8, overflow="saturate")], SAME),
    ("overflow", "inf", [card(), replace(FP8, overflow="saturate")], DIFFERS),
)


@pytest.mark.parametrize(("key", "declared", "cards", "verdict"), VERDICTS)
def test_declared_against_measured(key: str, declared: str, cards: list[Card], verdict: str) -> None:
    row = next(r for r in fingerprint.profile_rows({key: declared}, cards) if r.key == key)
    assert row.verdict == verdict, row
    found = [Measured("m.x", c) for c in cards]
    fails = verdict in (STRONGER, DIFFERS)
    assert fingerprint.code_of(found, [row]) == (EXIT_NONCONFORMING if fails else EXIT_CONFORMING)
    text = fingerprint.page("x", found, [row])
    assert ("does not do what it declares: " + key in text) == fails


def test_promises_that_do_not_hold_fail_and_those_not_made_do_not() -> None:
    def verdicts(**kw: Any) -> list[str]:
        return [r.verdict for r in fingerprint.promise_rows(Measured("m.x", kw.pop("card", FP8), **kw))]

    assert verdicts(rows_alone=True) == [SAME, SAME, SAME]
    assert verdicts(rows_alone=None) == [SAME, UNTOLD, SAME]
    assert verdicts(rows_alone=False) == [SAME, STRONGER, SAME]
    assert verdicts(rows_alone=False, promised=(True, False)) == [SAME, SAME, SAME]
    assert verdicts(deterministic=False, rows_alone=True) == [STRONGER, SAME, SAME]
    assert verdicts(deterministic=True, rows_alone=True, promised=(False, True)) == [WEAKER, SAME, SAME]
    assert verdicts(rows_alone=True, card=replace(FP8, operands_kept=False)) == [SAME, SAME, STRONGER]
    assert verdicts(rows_alone=True, card=card(odd=("sum beyond: nan",))) == [SAME, SAME, DIFFERS]


# --- through the executor ---------------------------------------------------------------------------------

class Uneven(CpuBackend):
    """The cpu backend; with option `uneven` it splits K where a batch is small, and so gives other bits there."""

    def run(self, op: str, kwargs: dict[str, Any]) -> Any:
        if "uneven" in self.options and kwargs["d"].shape[0] < int(self.options["uneven"]):
            self.adapter("deepgemm")._knobs = replace(self.knobs, split_k=2)
        else:
            self.adapter("deepgemm")._knobs = self.knobs
        return super().run(op, kwargs)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as m:
        m.setenv("PYTHONPATH", str(ROOT / "tests"))
        with bench_of("test_fingerprint:Uneven", {}) as bench:
            yield bench


OPS = {op.name: op for op in ops(("deepgemm",)) if op.name in fingerprint.OPS}
BF16, FP8_OP = OPS


def measured(bench: Bench, op: str, knobs: str = "", inject: str = "", **options: str) -> Measured:
    bench.launcher.options, bench.launcher.inject = {"knobs": knobs, **options}, inject
    return fingerprint.measure(bench, OPS[op])


@pytest.mark.parametrize(("op", "knobs"), [(BF16, ""), (FP8_OP, "accumulator=bf16,flush_subnormals=yes")])
def test_the_executor_gives_the_card_that_the_kernel_gives(bench: Bench, op: str, knobs: str) -> None:
    m = measured(bench, op, knobs)
    assert m.card == through_kernels(fingerprint.OPS[op], knobs)
    assert (m.deterministic, m.rows_alone, m.promised, m.why, m.notes) == (True, True, (True, True), "", [])


def test_the_first_call_wrong_is_no_card_to_trust(bench: Bench) -> None:
    m = measured(bench, BF16, inject="first_call_wrong")
    assert m.card is not None
    assert not m.deterministic
    rows = [*fingerprint.profile_rows({}, [m.card]), *fingerprint.promise_rows(m)]
    assert fingerprint.code_of([m], rows) == EXIT_NONCONFORMING


@pytest.mark.parametrize(("op", "below"), [(BF16, "2"), (FP8_OP, "64")])
def test_a_row_that_depends_on_its_batch_is_seen(bench: Bench, op: str, below: str) -> None:
    m = measured(bench, op, uneven=below)
    assert m.card is not None
    assert (m.deterministic, m.rows_alone) == (True, False)
    assert fingerprint.code_of([m], fingerprint.promise_rows(m)) == EXIT_NONCONFORMING


@pytest.mark.parametrize(("inject", "knobs", "says"), [("segv", "", "SIGSEGV"), ("", "accumulator=fp12", "fp12")])
def test_calls_that_end_badly_are_inconclusive(bench: Bench, inject: str, knobs: str, says: str) -> None:
    m = measured(bench, BF16, knobs, inject)
    assert m.card is None
    assert says in m.why
    assert fingerprint.code_of([m], []) == EXIT_INCONCLUSIVE
    assert m.why in fingerprint.page("cpu", [m], [])


def test_calls_that_do_something_else_wrong_leave_the_card_in_doubt(bench: Bench) -> None:
    m = measured(bench, BF16, inject="mutate_input")
    assert m.notes
    assert fingerprint.code_of([m], fingerprint.promise_rows(m)) != EXIT_CONFORMING


def test_the_probes_take_the_form_that_a_backend_asks_for(bench: Bench) -> None:
    packed = supported(limits=({"field": "scales", "in": ["ue8m0"]}, {"field": "recipe", "given": True},
                               {"field": "recipe", "in": [[1, 1, 32]]}, {"field": "out", "in": ["fp32"]},
                               {"field": "m", "multiple_of": 8}))
    of_packed = replace(bench, description=replace(bench.description, ops={FP8_OP: packed}))
    m = measured(of_packed, FP8_OP)
    assert m.card is not None
    assert agrees(m.card, (23, 23, 23, "nearest", 0, 32)), m.card  # a block of the walk has one scale
    assert "scales=ue8m0" in m.form
    assert "recipe=(1, 1, 32)" in m.form
    assert m.rows_alone, "one row is not legal, 40 are"
    none = supported(limits=({"field": "k", "le": 512, "reason": "small memory"},))
    too_small = replace(bench, description=replace(bench.description, ops={BF16: none}))
    m = measured(too_small, BF16)
    assert not m.supported
    assert "small memory" in m.why


def test_an_op_that_is_not_there_counts_for_nothing(bench: Bench) -> None:
    without = replace(bench, description=replace(bench.description, ops={
        **bench.description.ops, FP8_OP: unsupported("no FP8 here", "hardware")}))
    m = fingerprint.measure(without, OPS[FP8_OP])
    assert (m.supported, m.why) == (False, "no FP8 here")
    good = Measured(BF16, card())
    rows = fingerprint.profile_rows({}, [card()])
    assert fingerprint.code_of([good, m], rows) == EXIT_CONFORMING
    assert fingerprint.code_of([m], []) == EXIT_INCONCLUSIVE
    raw = fingerprint.to_json("cpu", [good, m], rows)
    assert json.loads(json.dumps(raw))["ops"][FP8_OP]["card"] is None


def test_the_command_on_a_backend_without_products(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    file = tmp_path / "card.json"
    code = main(["fingerprint", "--backend=numpy_backend:NumpyBackend", f"--json={file}"])
    assert code == EXIT_INCONCLUSIVE
    assert "no op gave a result" in capsys.readouterr().out
    assert [o["supported"] for o in json.loads(file.read_text())["ops"].values()] == [False, False]
    assert main(["fingerprint", "--backend=cpux"]) == EXIT_USAGE
    assert main(["fingerprint"]) == EXIT_USAGE


def test_the_probes_hold_what_their_tables_say() -> None:
    p: Probes = PROBES["bf16"]
    row = p.exact[9]  # 2**10
    assert [row[p.columns["mid", 0, x, 1.0]] for x in (1.0, -1.0, 0.75, -0.75)] == [1.0, -1.0, 0.75, -0.75]
    assert [row[p.columns["extra", e, s]] for e in (1, 2, 3) for s in (1.0, -1.0)] == [1] * 6
    assert [row[p.columns["width", w, s]] for w in (2, 16, 256) for s in (1.0, -1.0)] == [1] * 6


@pytest.mark.parametrize("fmt", FORMATS)
def test_sums_that_are_all_rounding_error_show_every_order(fmt: str) -> None:
    p = PROBES[fmt]
    rows, columns = slice(len(p.m) + len(p.rows), M), slice(len(p.columns), N)
    given = {}
    for name, order in (("forward", np.arange(K)), ("back", np.arange(K)[::-1]),
                        ("even first", np.argsort(np.arange(K) % 2, kind="stable"))):
        total = np.zeros((M, N), np.float32)[rows, columns]
        for k in order:
            total = total + np.multiply.outer(p.a[rows, k], p.b[columns, k]).astype(np.float32)
        given[name] = codec.bits(codec.encode(total.astype(np.float64), "bf16"))
    assert p.exact[rows, columns].size >= 20
    assert np.abs(p.exact[rows, columns]).max() < 2.0**-20
    for one, other in (("forward", "back"), ("forward", "even first"), ("back", "even first")):
        assert np.mean(given[one] != given[other]) > 0.8
        assert (given[one][-1] != given[other][-1]).any(), "the row that is tried alone"
