"""The DeepGEMM oracles: accept every legal computation order, reject single wrong elements."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from conformance.model import Problem, Variant
from references.deepgemm import gemm
from references.expected import Inputs, Within
from references.formats import codec

STRICT: dict[str, Any] = {}


def problem(variant: dict[str, str], family: str = "", **values: Any) -> Problem:
    return Problem("deepgemm.op", Variant(variant), {}, values, family, 0)


def bf16(x: np.ndarray) -> np.ndarray:
    """Codes by torch, not by the suite's codec."""
    return torch.tensor(np.asarray(x, np.float32)).to(torch.bfloat16).view(torch.uint16).numpy()


def e4m3(x: np.ndarray) -> np.ndarray:
    return torch.tensor(np.asarray(x, np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def value_of(codes: np.ndarray, dtype: torch.dtype = torch.bfloat16) -> np.ndarray:
    return torch.tensor(codes).view(dtype).double().numpy()


def output(x: np.ndarray, out: str) -> np.ndarray:
    return x.astype(np.float32) if out == "fp32" else bf16(x)


# --- legal orders in fp32 ---------------------------------------------------------------------------------

def sequential(p: np.ndarray) -> np.ndarray:
    acc = np.zeros(p.shape[:-1], np.float32)
    for k in range(p.shape[-1]):
        acc = acc + p[..., k]
    return acc


def tree(p: np.ndarray) -> np.ndarray:
    while p.shape[-1] > 1:
        if p.shape[-1] % 2:
            p = np.concatenate([p, np.zeros_like(p[..., :1])], axis=-1)
        p = p[..., 0::2] + p[..., 1::2]
    return p[..., 0] if p.shape[-1] else np.zeros(p.shape[:-1], np.float32)


def blocked(p: np.ndarray, width: int, inner: Any) -> np.ndarray:
    parts = [inner(p[..., k : k + width]) for k in range(0, p.shape[-1], width)]
    return sequential(np.stack(parts, axis=-1)) if parts else np.zeros(p.shape[:-1], np.float32)


ORDERS = {
    "sequential": sequential,
    "reverse": lambda p: sequential(p[..., ::-1]),
    "tree": tree,
    "blocks of 32": lambda p: blocked(p, 32, tree),
    "split 4": lambda p: blocked(p, max(1, -(-p.shape[-1] // 4)), sequential),
    "strided lanes": lambda p: tree(np.stack([sequential(p[..., i::8]) for i in range(8)], axis=-1)),
    "fp64": lambda p: p.astype(np.float64).sum(axis=-1).astype(np.float32),
}


def with_c(order: Any, p: np.ndarray, c: np.ndarray | None, first: bool) -> np.ndarray:
    if c is None:
        return order(p)
    if first:
        return order(np.concatenate([c[..., None], p], axis=-1))
    return order(p) + c


def factors(family: str, rng: np.random.Generator, rows: int, k: int) -> np.ndarray:
    x = rng.standard_normal((rows, k))
    if family == "positive":
        return np.abs(x)
    if family == "ill_scaled":
        return x * 2.0 ** rng.integers(-20, 20, (rows, 1))
    if family == "integers":
        return rng.integers(-4, 5, (rows, k)).astype(float)
    if family == "heavy":
        return x * 2.0 ** rng.integers(-12, 12, (rows, k))
    if family == "subnormal":
        return x * 2.0**-70
    return x


FAMILIES = ("normal", "positive", "ill_scaled", "integers", "heavy", "subnormal", "cancelling")


def pair(family: str, rng: np.random.Generator, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    if family != "cancelling":
        return factors(family, rng, m, k), factors(family, rng, n, k)
    half = -(-k // 2)
    a, b = factors("normal", rng, m, half), factors("normal", rng, n, half)
    tiny = (rng.random((n, half)) < 0.1) * 2.0**-6
    return np.concatenate([a, a], 1)[:, :k], np.concatenate([b, tiny - b], 1)[:, :k]


def judged(within: Within, codes: np.ndarray, out: str) -> np.ndarray:
    return within.judge(codes, out).bad


# --- bf16 GEMM --------------------------------------------------------------------------------------------

def bf16_case(family: str, seed: int, size: tuple[int, int, int], out: str, c_mode: str):
    rng = np.random.default_rng(seed)
    m, n, k = size
    a, b = pair(family, rng, m, n, k)
    arrays = {"a": bf16(a), "b": bf16(b)}
    formats = {"a": "bf16", "b": "bf16"}
    c = None
    if c_mode != "none":
        name = "c" if c_mode == "apart" else "d"
        arrays[name] = output(rng.standard_normal((m, n)) * 4, out)
        formats[name] = out
        c = codec.decode(arrays[name], out).astype(np.float32)
    want = gemm.bf16_gemm_nt(problem({"out": out, "c": c_mode}, family), Inputs(arrays, formats), STRICT)["d"]
    a, b = (value_of(arrays[x]).astype(np.float32) for x in "ab")
    with np.errstate(under="ignore"):
        return want, a[:, None, :] * b[None, :, :], c


@pytest.mark.parametrize("c_mode", ["none", "apart", "aliased"])
@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_legal_order_is_accepted(family: str, out: str, c_mode: str) -> None:
    for seed, k in enumerate((0, 1, 2, 7, 33, 128, 200, 515)):
        want, p, c = bf16_case(family, seed, (5, 6, k), out, c_mode)
        for name, order in ORDERS.items():
            for first in (True, False):
                got = with_c(order, p, c, first)
                assert not judged(want, output(got, out), out).any(), (name, k, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_matmul_is_accepted(dtype: torch.dtype) -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        a, b = bf16(rng.standard_normal((33, 300))), bf16(rng.standard_normal((17, 300)))
        inputs = Inputs({"a": a, "b": b}, dict.fromkeys("ab", "bf16"))
        want = gemm.bf16_gemm_nt(problem({"out": "bf16", "c": "none"}, "normal"), inputs, STRICT)["d"]
        ta, tb = (torch.tensor(x).view(torch.bfloat16).to(dtype) for x in (a, b))
        got = (ta @ tb.T).to(torch.bfloat16).view(torch.uint16).numpy()
        assert not judged(want, got, "bf16").any()


def test_value_and_bound_against_fractions() -> None:
    for family in FAMILIES:
        for out in ("bf16", "fp32"):
            rng = np.random.default_rng(3)
            a, b = pair(family, rng, 3, 4, 37)
            arrays = {"a": bf16(a), "b": bf16(b), "c": output(rng.standard_normal((3, 4)), out)}
            inputs = Inputs(arrays, {"a": "bf16", "b": "bf16", "c": out})
            want = gemm.bf16_gemm_nt(problem({"out": out, "c": "apart"}), inputs, STRICT)["d"]
            a, b = value_of(arrays["a"]), value_of(arrays["b"])
            c = codec.decode(arrays["c"], out)
            for i, j in np.ndindex(3, 4):
                terms = [Fraction(x) * Fraction(y) for x, y in zip(a[i], b[j], strict=True)]
                terms.append(Fraction(float(c[i, j])))
                exact, size = sum(terms), sum(map(abs, terms))
                acc = Fraction(39, 2**24) * size + 38 * Fraction(1, 2**149)
                at_most = np.array(float(abs(exact) + acc))
                half = Fraction(float(codec.half_ulp(at_most, out))) if out == "bf16" else 0
                assert abs(Fraction(float(want.value[i, j])) - exact) <= max(half, acc)
                assert want.bound[i, j] <= float(acc + half) * (1 + 1e-9)


def neighbours_of_the_limit(want: Within, i: tuple[int, ...], out: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the last number inside the bound and of the first outside, above the value."""
    limit = want.value[i] + want.bound[i]
    inside = codec.encode(np.array([limit]), out, rounding="toward_zero")
    if codec.decode(inside, out)[0] > limit:
        inside = step(inside, out, -1)
    while codec.decode(step(inside, out, 1), out)[0] <= limit:
        inside = step(inside, out, 1)
    return inside, step(inside, out, 1)


def step(codes: np.ndarray, out: str, by: int) -> np.ndarray:
    if out == "fp32":
        return np.nextafter(codes, np.float32(by * np.inf))
    key = codes.view(np.int16).astype(int)
    key = np.where(key < 0, -(key & 0x7FFF), key) + by
    return np.where(key < 0, 0x8000 | -key, key).astype(np.uint16)


@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_element_just_outside_is_rejected(family: str, out: str) -> None:
    want, p, c = bf16_case(family, 11, (5, 6, 96), out, "apart")
    good = output(with_c(sequential, p, c, True), out)
    for i in np.ndindex(5, 6):
        inside, outside = neighbours_of_the_limit(want, i, out)
        for codes, bad in ((inside, 0), (outside, 1)):
            got = good.copy()
            got[i] = codes[0]
            verdict = judged(want, got, out)
            assert verdict.sum() == bad
            assert bool(verdict[i]) == bool(bad)


def truncated(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def rounded_every_step(p: np.ndarray) -> np.ndarray:
    acc = np.zeros(p.shape[:-1])
    for k in range(p.shape[-1]):
        acc = value_of(bf16(acc + p[..., k]))
    return acc


FAULTS = {
    "tail dropped": lambda p: bf16(sequential(p[..., :-8])),
    "one k doubled": lambda p: bf16(sequential(np.concatenate([p, p[..., :1]], -1))),
    "rows swapped": lambda p: bf16(sequential(p)[[1, 0, *range(2, len(p))]]),
    "columns shifted": lambda p: bf16(np.roll(sequential(p), 1, axis=1)),
    "bf16 accumulator": lambda p: bf16(rounded_every_step(p)),
    "bf16 partials": lambda p: bf16(blocked(p, 32, lambda part: value_of(bf16(sequential(part))).astype(np.float32))),
    "truncated output": lambda p: truncated(sequential(p)),
    "unwritten": lambda p: np.full(p.shape[:2], 0x7FC0, np.uint16),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_rejected(fault: str) -> None:
    for seed in range(5):
        want, p, _ = bf16_case("normal", seed, (16, 16, 256), "bf16", "none")
        assert judged(want, FAULTS[fault](p), "bf16").any()


def test_c_rounded_apart_needs_to_be_declared() -> None:
    seen = False
    for seed in range(10):
        want, p, c = bf16_case("normal", seed, (16, 16, 64), "bf16", "apart")
        twice = bf16(value_of(bf16(sequential(p))) + c)
        seen |= bool(judged(want, twice, "bf16").any())
        rng = np.random.default_rng(seed)
        a, b = pair("normal", rng, 16, 16, 64)
        arrays = {"a": bf16(a), "b": bf16(b), "c": bf16(rng.standard_normal((16, 16)) * 4)}
        inputs, profile = Inputs(arrays, dict.fromkeys("abc", "bf16")), {"c_added": "after_rounding"}
        loose = gemm.bf16_gemm_nt(problem({"out": "bf16", "c": "apart"}, "normal"), inputs, profile)["d"]
        assert not judged(loose, twice, "bf16").any()
    assert seen


@pytest.mark.parametrize("alpha", [2.0, 0.3, -1.5, 0.0])
def test_alpha_scales_the_product_only(alpha: float) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        a, b = pair("integers" if seed % 2 else "normal", rng, 6, 7, 70)
        arrays = {"a": bf16(a), "b": bf16(b), "c": bf16(rng.standard_normal((1, 7)))}
        inputs = Inputs(arrays, dict.fromkeys("abc", "bf16"))
        want = gemm.bf16_gemm_nt(problem({"out": "bf16", "c": "apart"}, alpha=alpha), inputs, STRICT)["d"]
        a, b, c = (value_of(arrays[x]).astype(np.float32) for x in "abc")
        product = tree(a[:, None] * b[None])
        assert not judged(want, bf16(product * np.float32(alpha) + c), "bf16").any()
        assert judged(want, bf16((product + c) * np.float32(alpha)), "bf16").any()
        assert judged(want, bf16(product + c), "bf16").any()


def test_integers_must_be_bit_exact() -> None:
    want, p, _ = bf16_case("integers", 0, (8, 8, 128), "bf16", "none")
    assert not want.bound.any()
    good = bf16(sequential(p))
    assert not judged(want, good, "bf16").any()
    assert judged(want, step(good.reshape(-1), "bf16", -1).reshape(good.shape), "bf16").all()


def test_special_values_follow_ieee() -> None:
    specials = np.array([0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -0.0])
    for seed in range(40):
        rng = np.random.default_rng(seed)
        a, b = rng.choice([0.0, 1.0, -2.0], (6, 9)), rng.choice([0.0, 1.0, -2.0], (7, 9))
        for x in (a, b):
            hit = rng.random(x.shape) < 0.08
            x[hit] = rng.choice(specials, int(hit.sum()))
        inputs = Inputs({"a": bf16(a), "b": bf16(b)}, dict.fromkeys("ab", "bf16"))
        want = gemm.bf16_gemm_nt(problem({"out": "fp32", "c": "none"}), inputs, STRICT)["d"]
        with np.errstate(invalid="ignore"):
            plain = np.array([[sum((x * y for x, y in zip(r, s, strict=True)), 0.0) for s in b] for r in a])
        np.testing.assert_array_equal(want.value, plain)
        assert not judged(want, plain.astype(np.float32), "fp32").any()
        flipped = np.where(np.isnan(plain), 0, np.where(np.isinf(plain), -plain, plain)).astype(np.float32)
        np.testing.assert_array_equal(judged(want, flipped, "fp32"), ~np.isfinite(plain))


def test_overflow_is_judged_only_where_the_order_does_not_decide() -> None:
    a = np.array([[2.0**127, 2.0**127, 0], [2.0**127, 2.0**127, -(2.0**127)], [2.0**126, 2.0**126, -(2.0**126)]])
    inputs = Inputs({"a": bf16(a), "b": bf16(np.ones((1, 3)))}, dict.fromkeys("ab", "bf16"))
    want = gemm.bf16_gemm_nt(problem({"out": "fp32", "c": "none"}), inputs, STRICT)["d"]
    bad = judged(want, np.array([[np.nan], [np.nan], [np.nan]], np.float32), "fp32")
    np.testing.assert_array_equal(bad[:, 0], [True, False, True])
    assert not judged(want, np.array([[np.inf], [np.inf], [2.0**126]], np.float32), "fp32").any()
    assert judged(want, np.array([[3e38], [0], [np.inf]], np.float32), "fp32")[[0, 2]].all()


def test_flushing_must_be_declared() -> None:
    a, b = bf16(np.full((1, 64), 2.0**-64)), bf16(np.full((1, 64), 2.0**-64))
    inputs, zero = Inputs({"a": a, "b": b}, dict.fromkeys("ab", "bf16")), np.zeros((1, 1), np.uint16)
    kept = problem({"out": "bf16", "c": "none"})
    assert judged(gemm.bf16_gemm_nt(kept, inputs, STRICT)["d"], zero, "bf16").all()
    assert not judged(gemm.bf16_gemm_nt(kept, inputs, {"subnormals": "flush"})["d"], zero, "bf16").any()
    assert judged(gemm.bf16_gemm_nt(kept, inputs, {"subnormals": "flush"})["d"], bf16(np.ones((1, 1))), "bf16").all()


# --- fp8 GEMM ---------------------------------------------------------------------------------------------

def scales_for(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """fp32 values; powers of two for ue8m0."""
    if kind == "ue8m0":
        return 2.0 ** rng.integers(-6, 7, shape).astype(np.float32)
    return (rng.random(shape) * 2.0 ** rng.integers(-6, 7, shape)).astype(np.float32)


def coded(scale: np.ndarray, kind: str) -> np.ndarray:
    if kind == "fp32":
        return scale
    exponents = (np.log2(scale) + 127).astype(np.uint8)
    return np.pad(exponents, ((0, 0), (0, -scale.shape[1] % 4)), constant_values=255)


class Fp8:
    """One FP8 problem, its oracle, and legal ways to compute it."""

    def __init__(self, kind: str, seed: int, size: tuple[int, int, int], out: str = "bf16", c: bool = False,
                 family: str = "normal", profile: dict[str, Any] = STRICT) -> None:
        rng = np.random.default_rng(seed)
        m, n, self.k = size
        a, b = pair(family, rng, m, n, self.k)
        blocks = -(-self.k // 128)
        sa = scales_for(kind, rng, (m, blocks))
        sb = scales_for(kind, rng, (n if kind == "ue8m0" else -(-n // 128), blocks))
        arrays = {"a": e4m3(a), "b": e4m3(b), "a_scale": coded(sa, kind), "b_scale": coded(sb, kind)}
        scale_format = "fp32" if kind == "fp32" else "e8m0x4"
        formats = {"a": "e4m3", "b": "e4m3", "a_scale": scale_format, "b_scale": scale_format, "c": out}
        self.c = None
        if c:
            arrays["c"] = output(rng.standard_normal((m, n)) * 3, out)
            self.c = codec.decode(arrays["c"], out).astype(np.float32)
        self.arrays, self.out = arrays, out
        variant = {"out": out, "c": "apart" if c else "none", "scales": kind}
        self.want = gemm.fp8_gemm_nt(problem(variant, family), Inputs(arrays, formats), profile)["d"]
        self.a, self.b = (value_of(arrays[x], torch.float8_e4m3fn).astype(np.float32) for x in "ab")
        self.sa, self.sb = sa, sb if kind == "ue8m0" else np.repeat(sb, 128, axis=0)[:n]

    def promoted(
        self, order: Any, scale_first: bool = True, sa: Any = None, sb: Any = None, drop: int = 0
    ) -> np.ndarray:
        """Partial sums of 128, each scaled and added in fp32."""
        sa, sb = self.sa if sa is None else sa, self.sb if sb is None else sb
        parts = []
        for g, k in enumerate(range(0, self.k, 128)):
            end = min(k + 128, self.k - drop)
            part = order(self.a[:, None, k:end] * self.b[None, :, k:end])
            x, y = sa[:, None, g], sb[None, :, g]
            parts.append(part * (x * y) if scale_first else (part * x) * y)
        d = sequential(np.stack(parts, -1)) if parts else np.zeros((len(self.a), len(self.b)), np.float32)
        return d if self.c is None else d + self.c

    def dequantised(self, order: Any) -> np.ndarray:
        """Elements scaled first, then one long sum."""
        a = self.a * np.repeat(self.sa, 128, 1)[:, : self.k]
        b = self.b * np.repeat(self.sb, 128, 1)[:, : self.k]
        return with_c(order, a[:, None] * b[None], self.c, True)

    def bad(self, d: np.ndarray) -> np.ndarray:
        return judged(self.want, output(d, self.out), self.out)


@pytest.mark.parametrize("kind", ["fp32", "ue8m0"])
@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize("family", ["normal", "positive", "heavy", "integers"])
def test_fp8_orders_are_accepted(kind: str, out: str, family: str) -> None:
    for seed, k in enumerate((0, 16, 128, 144, 300, 576)):
        case = Fp8(kind, seed, (5, 6, k), out, c=bool(seed % 2), family=family)
        for name, order in ORDERS.items():
            for scale_first in (True, False):
                assert not case.bad(case.promoted(order, scale_first)).any(), name
            assert not case.bad(case.dequantised(order)).any(), name


@pytest.mark.parametrize("kind", ["fp32", "ue8m0"])
def test_fp8_faults_are_rejected(kind: str) -> None:
    for seed in range(5):
        case = Fp8(kind, seed, (130, 140, 300))
        assert case.bad(case.promoted(tree, drop=4)).any()
        assert case.bad(case.promoted(tree, sa=np.roll(case.sa, 1, axis=1))).any()
        assert case.bad(case.promoted(tree, sa=np.roll(case.sa, 1, axis=0))).any()
        assert case.bad(case.promoted(tree, sb=np.roll(case.sb, 1, axis=1))).any()
        assert case.bad(case.promoted(tree, sa=np.ones_like(case.sa))).any()
        if kind == "fp32":
            rounded = value_of(bf16(case.sa)).astype(np.float32)
            assert case.bad(case.promoted(tree, sa=rounded)).any()


def test_fp8_value_against_plain_loops() -> None:
    for kind in ("fp32", "ue8m0"):
        case = Fp8(kind, 5, (4, 3, 260))
        for i, j in np.ndindex(4, 3):
            exact = float(sum(
                Fraction(float(case.a[i, k])) * Fraction(float(case.b[j, k]))
                * Fraction(float(case.sa[i, k // 128])) * Fraction(float(case.sb[j, k // 128])) for k in range(260)
            ))
            off = abs(case.want.value[i, j] - exact)
            assert off <= (1e-12 if case.want.bound[i, j] else codec.half_ulp(np.array(exact), "bf16"))


def test_fp8_one_element_just_outside_is_rejected() -> None:
    case = Fp8("fp32", 2, (6, 5, 300))
    good = output(case.promoted(sequential), "bf16")
    for i in np.ndindex(6, 5):
        got = good.copy()
        got[i] = neighbours_of_the_limit(case.want, i, "bf16")[1][0]
        assert judged(case.want, got, "bf16")[i]
        assert judged(case.want, got, "bf16").sum() == 1


def test_fp8_power_of_two_scales_of_integers_are_bit_exact() -> None:
    case = Fp8("ue8m0", 4, (6, 5, 128), family="integers")
    assert not case.want.bound.any()
    assert not case.bad(case.promoted(tree)).any()


def fourteen_bits(p: np.ndarray) -> np.ndarray:
    """A matrix unit that keeps 13 fraction bits below the largest of 32 addends and the running sum, truncating."""
    acc = np.zeros(p.shape[:-1])
    for k in range(0, p.shape[-1], 32):
        addends = np.concatenate([p[..., k : k + 32].astype(np.float64), acc[..., None]], axis=-1)
        unit = 2.0 ** (np.floor(np.log2(np.abs(addends).max(axis=-1, keepdims=True) + 1e-300)) - 13)
        total = (np.trunc(addends / unit) * unit).sum(axis=-1)
        unit = 2.0 ** (np.floor(np.log2(np.abs(total) + 1e-300)) - 13)
        acc = np.trunc(total / unit) * unit
    return acc.astype(np.float32)


def test_fourteen_bit_accumulation_must_be_declared() -> None:
    for seed in range(4):
        profile = {"accumulator": "fp8_tc14_promoted"}
        for family in ("normal", "positive"):
            declared = Fp8("fp32", seed, (16, 16, 512), family=family, profile=profile)
            assert not declared.bad(declared.promoted(fourteen_bits)).any()
        strict = Fp8("fp32", seed, (16, 16, 512), out="fp32")
        assert strict.bad(strict.promoted(fourteen_bits)).any()


def test_fp8_extreme_scales() -> None:
    """UE8M0 at both ends: exact where the product of the scales is in range, free where it is not, NaN for 255."""
    a = e4m3(np.ones((5, 128)))
    scale = np.array([[0], [254], [254], [255], [1]], np.uint8)
    other = np.array([[254], [127]], np.uint8)
    arrays = {"a": a, "b": e4m3(np.ones((2, 128))), "a_scale": scale, "b_scale": other}
    formats = {"a": "e4m3", "b": "e4m3", "a_scale": "e8m0x4", "b_scale": "e8m0x4"}
    given = problem({"out": "fp32", "c": "none", "scales": "ue8m0"})
    want = gemm.fp8_gemm_nt(given, Inputs(arrays, formats), STRICT)["d"]
    d = np.array([[128, 2.0**-120], [np.inf] * 2, [np.inf] * 2, [np.nan] * 2, [256, 2.0**-119]], np.float32)
    assert not judged(want, d, "fp32").any()
    assert not judged(want, np.where(np.arange(2) == 0, np.nan, d).astype(np.float32), "fp32")[1:4].any()
    assert judged(want, np.zeros((5, 2), np.float32), "fp32")[[0, 3, 4]].all()
    assert judged(want, np.nextafter(d, np.float32(0)), "fp32")[[0, 4]].all()


def test_chance_bounds_partial_sums_of_random_data_only() -> None:
    a, b = pair("normal", np.random.default_rng(0), 8, 8, 1024)
    inputs = Inputs({"a": bf16(a), "b": bf16(b)}, dict.fromkeys("ab", "bf16"))
    random, hard = (
        gemm.bf16_gemm_nt(problem({"out": "fp32", "c": "none"}, f), inputs, STRICT)["d"] for f in ("normal", "one_hot")
    )
    assert (random.bound < hard.bound / 2).all()


def test_small_scales_may_underflow_by_themselves() -> None:
    rng = np.random.default_rng(0)
    case = Fp8("fp32", 0, (4, 4, 256), out="fp32")
    tiny = (rng.random(case.sa.shape) * 2.0**-80).astype(np.float32)
    arrays = {**case.arrays, "a_scale": tiny, "b_scale": case.arrays["b_scale"] * np.float32(2.0**-60)}
    formats = {"a": "e4m3", "b": "e4m3", "a_scale": "fp32", "b_scale": "fp32"}
    given = problem({"out": "fp32", "c": "none", "scales": "fp32"})
    case.want = gemm.fp8_gemm_nt(given, Inputs(arrays, formats), STRICT)["d"]
    sb = np.repeat(arrays["b_scale"], 128, axis=0)[:4]
    for first in (True, False):
        assert not case.bad(case.promoted(tree, first, sa=tiny, sb=sb)).any()


# --- grouped ----------------------------------------------------------------------------------------------

def grouped(seed: int, layout: str, sizes: list[int], alignment: int = 128):
    rng = np.random.default_rng(seed)
    groups, n, k = len(sizes), 9, 40
    starts, ends, at = [], [], 0
    for size in sizes:
        starts.append(at)
        ends.append(at + size)
        at = -(-(at + size) // alignment) * alignment
    rows = at + 5
    labels = np.full(rows, -1, np.int32)
    for g, (start, end) in enumerate(zip(starts, ends, strict=True)):
        labels[start:end] = g
    a, b = bf16(rng.standard_normal((rows, k))), bf16(rng.standard_normal((groups, n, k)))
    given = labels if layout == "labels" else np.array(ends, np.int32)
    inputs = Inputs({"a": a, "b": b, "grouped_layout": given}, {"a": "bf16", "b": "bf16", "grouped_layout": "int32"})
    values = {} if alignment == 128 else {"mk_alignment_for_contiguous_layout": alignment}
    want = gemm.m_grouped_bf16_gemm_nt_contiguous(problem({"layout": layout}, **values), inputs, STRICT)["d"]
    d = np.full((rows, n), 7.0, np.float32)
    a, b = value_of(a).astype(np.float32), value_of(b).astype(np.float32)
    for row, g in enumerate(labels):
        if g >= 0:
            d[row] = tree(a[None, row] * b[g])
    return want, labels, d


@pytest.mark.parametrize("layout", ["labels", "psum"])
@pytest.mark.parametrize("alignment", [128, 64])
def test_grouped_rows_use_their_group(layout: str, alignment: int) -> None:
    for seed, sizes in enumerate(([3, 0, 130], [0, 1], [128, 128], [65, 64, 63, 0])):
        want, labels, d = grouped(seed, layout, sizes, alignment)
        assert not judged(want, bf16(d), "bf16").any()
        bad = judged(want, bf16(d + 9), "bf16")
        np.testing.assert_array_equal(bad.all(axis=1), labels >= 0)
        np.testing.assert_array_equal(bad.any(axis=1), labels >= 0)


def test_grouped_neighbours_row_is_rejected() -> None:
    want, labels, d = grouped(1, "labels", [2, 2])
    assert judged(want, bf16(np.roll(d, 1, axis=0)), "bf16")[labels >= 0].any(axis=1).all()


def test_all_padding_is_unspecified() -> None:
    want, _, d = grouped(0, "labels", [0, 0])
    assert not judged(want, bf16(d * np.nan), "bf16").any()


@pytest.mark.parametrize(("alpha", "free"), [(0.5, True), (-0.25, True), (1.0, False), (2.0, False)])
def test_a_sum_past_the_range_may_not_come_back_by_alpha(alpha: float, free: bool) -> None:
    """fp32 sums of 1.5 * 2**128 are infinite; alpha of 0.5 leaves infinity, or a finite number where it comes first."""
    arrays = {"a": bf16(np.full((1, 2), 2.0**64)), "b": bf16(np.full((1, 2), 0.75 * 2.0**64))}
    p = problem({"out": "bf16", "c": "none"}, "overflow", alpha=alpha)
    want = gemm.bf16_gemm_nt(p, Inputs(arrays, {"a": "bf16", "b": "bf16"}), STRICT)["d"]
    largest, infinite = bf16(np.full((1, 1), np.copysign(3.3895e38, alpha))), bf16(np.full((1, 1), alpha * np.inf))
    assert not judged(want, infinite, "bf16").any()
    assert judged(want, largest, "bf16").any() != free
