"""Bounds hold for computed results in many orders, and are tight enough to catch what is wrong."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from references.bounds import attention, basic, gemm, profile, quantise, vector
from references.bounds.constants import ACCUMULATORS, FUNCTIONS, PROBABILITIES, U32, UNIT_ROUNDOFF
from references.formats import codec

F4 = np.float32


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def round_float(x: np.ndarray, fmt: str) -> np.ndarray:
    return codec.round_to(np.asarray(x, np.float64), fmt)


def family(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """bf16 values of one kind of data."""
    r = rng(seed)
    x = r.standard_normal(shape)
    if name == "positive":
        x = np.abs(x)
    elif name == "scaled":
        x *= 2.0 ** r.integers(-20, 20, shape)
    elif name == "cancelling":
        half = x[..., : shape[-1] // 2]
        x = np.concatenate([half, half if seed % 2 else -half], axis=-1)
    return round_float(x, "bf16")


# --- sums of products -------------------------------------------------------------------------------------

def sequential(p):
    total = F4(0) * p[..., 0]
    for i in range(p.shape[-1]):
        total = total + p[..., i]
    return total


def backwards(p):
    return sequential(p[..., ::-1])


def pairwise(p):
    while p.shape[-1] > 1:
        if p.shape[-1] % 2:
            p = np.concatenate([p, np.zeros((*p.shape[:-1], 1), F4)], axis=-1)
        p = p[..., 0::2] + p[..., 1::2]
    return p[..., 0]


def split(p, parts=8):
    return sequential(np.stack([sequential(c) for c in np.array_split(p, min(parts, p.shape[-1]), axis=-1)], axis=-1))


def blocked(p, width=16):
    chunks = [p[..., i : i + width] for i in range(0, p.shape[-1], width)]
    return sequential(np.stack([pairwise(c) for c in chunks], axis=-1))


def truncating(p, width=16, extra_bits=2, kept=24):
    """A tensor core: align a block and the accumulator to the largest exponent, cut, add, cut the sum."""
    total = np.zeros(p.shape[:-1])
    p = p.astype(np.float64)
    for i in range(0, p.shape[-1], width):
        terms = np.concatenate([p[..., i : i + width], total[..., None]], axis=-1)
        largest = np.frexp(np.abs(terms).max(axis=-1))[1]
        unit = np.ldexp(1.0, largest - kept - extra_bits)
        total = (np.trunc(terms / unit[..., None]) * unit[..., None]).sum(axis=-1)
        unit = np.ldexp(1.0, np.frexp(total)[1] - kept)
        total = np.trunc(total / unit) * unit
    return total


ORDERS = {f.__name__: f for f in (sequential, backwards, pairwise, split, blocked, truncating)}
ORDERS["truncating, no extra bits"] = lambda p: truncating(p, width=4, extra_bits=0)
FAMILIES = ("normal", "positive", "scaled", "cancelling")


def operands(name: str, k: int):
    a, b = family(name, (12, k), 1), family("positive" if name == "positive" else "normal", (9, k), 2)
    products = (a[:, None] * b[None]).astype(F4)  # exact: 16 significand bits
    return a, b, products


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("k", [2, 8, 512])
def test_a_dot_product_in_any_order_is_within_its_bound(order, name, k):
    a, b, products = operands(name, k)
    value, size = a @ b.T, np.abs(a) @ np.abs(b.T)
    total = ORDERS[order](products).astype(np.float64)
    assert np.all(np.abs(total - value) <= basic.dot(size, k))
    for out in ("bf16", "fp32"):
        assert np.all(np.abs(round_float(total, out) - value) <= gemm.dense(value, size, k, out))


@pytest.mark.parametrize("name", ["normal", "positive"])
def test_a_random_order_magnitude_is_smaller_and_still_holds(name):
    a, b, products = operands(name, 2048)
    value, size = a @ b.T, np.abs(a) @ np.abs(b.T)
    likely = basic.magnitude(size, value, (a * a) @ (b * b).T)
    assert np.all(likely <= size)
    assert np.median(likely / size) < (0.2 if name == "normal" else 1.01)
    for order in (sequential, backwards, pairwise, truncating):
        assert np.all(np.abs(order(products) - value) <= basic.dot(likely, 2048))


def test_bad_sums_leave_the_bound():
    k = 2048
    a, b, products = operands("normal", k)
    value, size = a @ b.T, np.abs(a) @ np.abs(b.T)
    bound = gemm.dense(value, basic.magnitude(size, value, (a * a) @ (b * b).T), k, "bf16")

    def share_outside(total):
        return np.mean(np.abs(round_float(total, "bf16") - value) > bound)

    narrow = np.zeros(value.shape)
    for i in range(k):
        narrow = round_float(narrow + products[..., i], "bf16")
    assert share_outside(sequential(products)) == 0
    assert share_outside(narrow) > 0.5
    assert share_outside(sequential(products[..., :-1])) > 0.3
    assert np.mean(np.abs(codec.round_to(value, "bf16", rounding="toward_zero") - value) > bound) > 0.1


def test_stored_partials_need_their_declaration():
    a, b, products = operands("normal", 1024)
    value, size = a @ b.T, np.abs(a) @ np.abs(b.T)
    partials = [round_float(sequential(c), "bf16") for c in np.array_split(products, 8, axis=-1)]
    error = np.abs(np.sum(partials, axis=0) - value)
    known = sum(np.abs(p) for p in partials)
    assert np.all(error <= basic.dot(size, 1024, splits=8, partial="bf16"))
    assert np.all(error <= basic.dot(size, 1024, splits=8, partial="bf16", partial_magnitude=known))
    assert np.mean(error > basic.dot(size, 1024)) > 0.3
    np.testing.assert_array_equal(basic.dot(size, 1024, splits=8), basic.dot(size, 1024))


def test_edges_of_the_dot_bound():
    np.testing.assert_array_equal(basic.dot(np.zeros(2), 0), [0, 0])
    np.testing.assert_array_equal(basic.dot(np.zeros(3), np.array([0, 1, 2])), [0, 2.0**-149, 2.0**-148])
    assert basic.dot(1.0, 100, "int32") == 0
    assert basic.dot(1.0, 100, "int32", splits=4) == 0
    assert basic.dot(1.0, 1, exact_products=False) == basic.gamma(2, U32) + 2.0**-149
    assert basic.dot(0.0, 1, flush=True) == 2.0**-126
    assert basic.dot(1.0, 1000, "fp64") < 1e-12
    with pytest.raises(KeyError):
        basic.dot(1.0, 4, "fp12")
    with pytest.raises(ValueError, match="no bound"):
        basic.gamma(256, UNIT_ROUNDOFF["bf16"])


def test_gamma_is_the_growth_of_n_roundings():
    n, u = 50, Fraction(1, 2**8)
    assert Fraction(float(basic.gamma(n, 2.0**-8))) >= (1 + u) ** n - 1 > n * u


def test_products_of_fp32_inputs_are_rounded_too():
    a, b = rng(3).standard_normal((2, 40, 8)).astype(F4)
    value = np.array([float(sum(Fraction(float(x)) * Fraction(float(y)) for x, y in zip(*row, strict=True)))
                      for row in zip(a, b, strict=True)])
    size = (np.abs(a).astype(np.float64) * np.abs(b)).sum(axis=-1)
    for order in (sequential, pairwise):
        assert np.all(np.abs(order(a * b) - value) <= basic.dot(size, 8, exact_products=False))


def test_converted_inputs():
    a, b = rng(4).standard_normal((2, 64, 128))
    rounded_a, rounded_b = (np.rint(x / t) * t for x in (a, b) for t in [2.0 ** (np.frexp(x)[1] - 11)])
    error = np.abs((rounded_a * rounded_b).sum(-1) - (a * b).sum(-1))
    size, value, square = np.abs(a * b).sum(-1), (a * b).sum(-1), ((a * b) ** 2).sum(-1)
    hard = basic.converted_inputs(size, "tf32")
    likely = basic.converted_inputs(size, "tf32", value, square)
    assert np.all(error <= likely)
    assert np.all(likely <= hard)
    assert error.max() > 0.02 * likely.max()


# --- one rounding -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("fmt", ["bf16", "e4m3", "e5m2", "fp16"])
def test_one_rounding_of_anything_near_is_within_its_bound(fmt):
    dtype = codec.storage(fmt)
    numbers = codec.decode(np.arange(1 << (8 * dtype.itemsize)).astype(f"u{dtype.itemsize}").view(dtype), fmt)
    numbers = numbers[np.isfinite(numbers) & (np.abs(numbers) < codec.max_finite(fmt))]
    gap = codec.ulp(numbers, fmt)
    for near in (0.0, 0.25, 0.5, 0.75):
        for error in (0.0, 0.3, 2.0):
            value = numbers + near * gap
            for exact in (value - error * gap, value + error * gap):
                stored = codec.round_to(exact, fmt, overflow="saturate")
                inside = np.abs(exact) <= codec.max_finite(fmt)
                bound = basic.rounded(value, error * gap, fmt)
                assert np.all((np.abs(stored - value) <= bound)[inside])


def test_rounding_near_a_binade_edge_counts_the_wider_binade():
    below = np.nextafter(2.0, 0)
    assert basic.rounding(below, "bf16") == 2.0**-8
    assert basic.rounding(below, "bf16", 1e-15) == 2.0**-7
    assert basic.rounding(2.0, "bf16") == 2.0**-7
    assert basic.rounding(0.0, "bf16") == 2.0**-134
    assert basic.rounding(1e39, "bf16") == 2.0**121


# --- block scales -----------------------------------------------------------------------------------------

def scaled_operands(name: str, k: int):
    a, b = (codec.round_to(np.clip(family(name, (8, k), s), -448, 448), "e4m3") for s in (5, 6))
    scales = np.abs(rng(7).standard_normal((8, k // 128))).astype(F4) + F4(0.1)
    return (a * b).astype(F4).reshape(8, -1, 128), scales, F4(0.7)


@pytest.mark.parametrize("name", ["normal", "positive", "scaled"])
def test_block_scaled_products_in_their_legitimate_forms(name):
    products, scales, other = scaled_operands(name, 1024)
    exact = products.astype(np.float64) * scales[..., None].astype(np.float64) * float(other)
    value, size = exact.sum((1, 2)), np.abs(exact).sum((1, 2))
    bound = gemm.block_scaled(value, size, 1024, "fp32")
    forms = {
        "chunk sums, then both scales": sequential(sequential(products) * scales * other),
        "product of the scales first": backwards(pairwise(products) * (scales * other)),
        "scales on every product": sequential((products * scales[..., None] * other).reshape(8, -1)),
    }
    for form, total in forms.items():
        assert np.all(np.abs(total - value) <= bound), form
    shifted = sequential(sequential(products) * np.roll(scales, 1, axis=1) * other)
    assert np.mean(np.abs(shifted - value) > bound) > 0.5


@pytest.mark.parametrize("name", ["normal", "positive", "scaled"])
def test_a_14_bit_unit_needs_its_own_term(name):
    products, scales, other = scaled_operands(name, 1024)
    exact = products.astype(np.float64) * scales[..., None].astype(np.float64) * float(other)
    value, size = exact.sum((1, 2)), np.abs(exact).sum((1, 2))
    chunks = truncating(products, width=32, extra_bits=0, kept=14)
    total = sequential((chunks.astype(F4) * scales * other).astype(F4))
    hard = gemm.tensor_core_14_bit_any_data(exact.reshape(8, -1))
    assert np.all(np.abs(total - value) <= hard + basic.dot(size, 1024 + 20))
    norm = np.sqrt((gemm.chunk_magnitude(exact.sum(2), (exact**2).sum(2)) ** 2).sum(1))
    error = np.abs(total - value)
    if name != "scaled":
        assert np.all(error <= gemm.block_scaled(value, size, 1024, "fp32", accumulator="fp8_tc14_promoted",
                                                 chunk_norm=norm))
    if name == "positive":  # cuts that all go one way; with random signs they stay below the worst case of fp32
        assert np.any(error > gemm.block_scaled(value, size, 1024, "fp32"))
    with pytest.raises(ValueError, match="chunk_norm"):
        gemm.block_scaled(value, size, 1024, "fp32", accumulator="fp8_tc14_promoted")


def test_dequantised_integers_and_indexer_logits():
    y = rng(8).integers(-(2**24), 2**24, 500)
    s, t = F4(0.0123), F4(0.77)
    value = y * float(s) * float(t)
    got = (y.astype(F4) * s) * t
    assert np.all(np.abs(got - value) <= gemm.integer_dequantised(value, "fp32"))
    q, k = (family("normal", (16, 32), s) for s in (1, 2))
    w = rng(9).standard_normal((16, 1)).astype(F4)
    dots = np.einsum("hd,nd->hn", q, k)
    error = basic.dot(np.abs(q) @ np.abs(k).T, 32)
    value = (w * np.maximum(dots, 0)).sum(0)
    got = sequential((w * np.maximum(sequential((q[:, None] * k[None]).astype(F4)), F4(0))).T)
    bound = gemm.weighted_relu_logits(value, w.astype(np.float64), np.maximum(dots, 0), error, "fp32")
    assert np.all(np.abs(got - value) <= bound)
    assert np.all(bound < 1e-3 * np.abs(w).sum())


# --- attention --------------------------------------------------------------------------------------------

def attend(q, k, v, scale, block, p="bf16", fault=""):
    """Online softmax in fp32 over key blocks."""
    top = np.full(q.shape[0], -np.inf, F4)
    total, out = np.zeros(q.shape[0], F4), np.zeros((q.shape[0], v.shape[1]), F4)
    for i in range(0, k.shape[0], block):
        s = sequential((q[:, None] * k[None, i : i + block]).astype(F4)) * F4(scale)
        new = np.maximum(top, s.max(1))
        old = np.exp(top - new)
        weights = np.exp(s - new[:, None])
        total = total * (F4(1) if fault == "l not rescaled" else old) + sequential(weights)
        rounding = "toward_zero" if fault == "p truncated" else "nearest_even"
        weights = codec.round_to(weights, p, rounding=rounding).astype(F4)
        out = out * old[:, None] + sequential(weights[:, None, :] * v[i : i + block].T.astype(F4)[None])
        top = new
    lse = top + np.log(total)
    return out / total[:, None], lse / F4(np.log(2)) if fault == "base 2" else lse


def attention_reference(q, k, v, scale):
    s = q @ k.T * scale
    top = s.max(1)
    p = np.exp(s - top[:, None])
    w = p / p.sum(1, keepdims=True)
    spread = scale * np.sqrt((q * q) @ (k * k).T)
    return s, top, w, w @ v, top + np.log(p.sum(1)), attention.score_error(s, q.shape[1], spread)


def attention_case(data: str):
    q, k, v = (family("normal", shape, s) for s, shape in enumerate([(10, 32), (96, 32), (96, 24)]))
    q = q * {"peaky": 8.0, "uniform": 0.0}.get(data, 1.0)
    return q, k, v + (4.0 if data == "biased" else 0.0), 32**-0.5


@pytest.mark.parametrize("data", ["normal", "peaky", "uniform", "biased"])
@pytest.mark.parametrize("block", [7, 32, 96])
@pytest.mark.parametrize("p", ["fp32", "bf16", "fp16"])
def test_attention_in_blocks_is_within_its_bounds(data, block, p):
    q, k, v, scale = attention_case(data)
    *_, top, w, o, lse, delta = attention_reference(q, k, v, scale)
    got, got_lse = attend(q, k, v, scale, block, p)
    blocks = -(-96 // block)
    for random_v in (False, True):
        error = attention.output(w, v, o, delta, p=p, blocks=blocks, random_v=random_v)
        assert np.all(np.abs(got - o) <= error)
        assert np.all(np.abs(round_float(got, "bf16") - o) <= basic.rounded(o, error, "bf16"))
    assert np.all(np.abs(got_lse - lse) <= attention.lse(w, lse, top, delta))


def test_errors_of_scores_that_conspire_are_admitted():
    """One key in ten has V = 1: raising its score and lowering the others moves O by more than sum w |v| delta."""
    v = np.zeros((10, 1))
    v[0] = 1
    w, delta = np.full((1, 10), 0.1), np.full((1, 10), 1e-2)
    o = w @ v
    moved = w * np.exp(delta * np.sign(v.T - o))
    moved = moved / moved.sum() @ v
    error = attention.output(w, v, o, delta, p="fp32")
    assert 0.85 * error < abs(moved - o) < error


def test_random_v_lets_rounding_errors_of_p_average_out():
    v = rng(1).standard_normal((2000, 16))
    w = np.full((1, 2000), 1 / 2000)
    worst, likely = (attention.output(w, v, w @ v, np.zeros((1, 2000)), random_v=r) for r in (False, True))
    assert np.all((0.1 * worst < likely) & (likely < 0.3 * worst))


def test_attention_faults_leave_the_bounds():
    q, k, v, scale = attention_case("normal")
    *_, top, w, o, lse, delta = attention_reference(q, k, v, scale)
    bound = basic.rounded(o, attention.output(w, v, o, delta, blocks=3, random_v=True), "bf16")
    on_lse = attention.lse(w, lse, top, delta)

    def share_outside(block=32, n=96, **kw):
        got, got_lse = attend(q, k[:n], v[:n], scale, block, **kw)
        return np.mean(np.abs(round_float(got, "bf16") - o) > bound), np.mean(np.abs(got_lse - lse) > on_lse)

    assert share_outside() == (0, 0)
    assert min(share_outside(n=95)) > 0.3
    assert min(share_outside(fault="l not rescaled")) > 0.5
    assert share_outside(fault="base 2")[1] == 1
    assert share_outside(p="e4m3")[0] > 0.1


def test_attention_bounds_of_masked_and_empty_rows():
    s = np.array([[0.0, -np.inf, 2.0], [-np.inf] * 3])
    w, v = np.array([[0.1, 0.0, 0.9], [0.0, 0.0, 0.0]]), np.ones((3, 2))
    delta = attention.score_error(s, 16, np.ones_like(s))
    assert delta[0, 1] == 0
    assert np.all(delta[1] == 0)
    error = attention.output(w, v, w @ v, delta, random_v=True)
    assert np.all(error[1] == 0)
    assert np.all((error[0] > 0) & (error[0] < 0.01))
    lse = attention.lse(w, np.array([2.1, -np.inf]), np.array([2.0, -np.inf]), delta, l_from="rounded")
    assert lse[1] == 0
    assert 2.0**-9 < lse[0] < 2.0**-7
    for value, sink in ((2.1, -np.inf), (2.1, np.inf), (-np.inf, 0.0), (np.inf, 0.0), (-np.inf, -np.inf)):
        whole = attention.with_sink(w @ v, error, np.array([value] * 2), np.zeros(2), sink)
        assert np.all(np.isfinite(whole) & (whole >= 0))


def test_attention_with_a_sink():
    q, k, v, scale = attention_case("normal")
    *_, top, w, o, lse, delta = attention_reference(q, k, v, scale)
    sink = np.linspace(-3, 8, 10)
    got, got_lse = attend(q, k, v, scale, 32)
    got = got * (F4(1) / (F4(1) + np.exp(sink.astype(F4) - got_lse)))[:, None]
    f = 1 / (1 + np.exp(sink - lse))[:, None]
    error = attention.output(w, v, o, delta)
    bound = attention.with_sink(o, error, lse, attention.lse(w, lse, top, delta), sink)
    assert np.all(np.abs(got - o * f) <= bound)
    assert np.mean(np.abs(got - o) > bound) > 0.5
    parts = attention.split_partials(np.full((4, 10), 0.25), np.full((4, 10, 24), 0.5))
    np.testing.assert_array_equal(parts, np.full((10, 24), 0.5))


# --- rows and elements ------------------------------------------------------------------------------------

@pytest.mark.parametrize("n", [1, 9, 256])
def test_softmax_and_normalisation(n):
    x = (rng(n).standard_normal((30, n)) * 12).astype(F4)
    exact = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    w = exact / exact.sum(1, keepdims=True)
    e = np.exp(x - x.max(1, keepdims=True))
    for total in (sequential(e), pairwise(e)):
        bound = vector.softmax(w, (x.max(1, keepdims=True) - x).astype(np.float64), n)
        assert np.all(np.abs(e / total[:, None] - w) <= bound)
        assert np.all(bound < 1e-3 * w + 1e-30)
    k = min(n, 8)
    top = e[:, :k].astype(np.float64)
    assert np.all(np.abs(e[:, :k] / sequential(e[:, :k])[:, None] - top / top.sum(1, keepdims=True))
                  <= vector.normalised(top / top.sum(1, keepdims=True), k))


def test_gates_over_their_whole_range():
    x = np.concatenate([np.linspace(-100, 100, 4001), [-1000, 1000, 0.0]]).astype(F4)
    exact = x.astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        sigmoid = 1 / (1 + np.exp(-exact))
        got = F4(1) / (F4(1) + np.exp(-x))
        assert np.all(np.abs(got - sigmoid) <= vector.sigmoid(sigmoid, exact))
        plus = np.sqrt(np.logaddexp(0, exact))
        careful = np.sqrt(np.where(x > 20, x, np.log1p(np.exp(x))))
        naive = np.sqrt(np.where(x > 20, x, np.log(F4(1) + np.exp(x))))
        assert np.all(np.abs(careful - plus) <= vector.softplus_sqrt(plus, exact))
        assert np.all(np.abs(naive - plus) <= vector.softplus_sqrt(plus, exact, log1p=False))
        assert np.any(np.abs(naive - plus) > vector.softplus_sqrt(plus, exact))
        up = rng(2).standard_normal(x.size).astype(F4) * F4(1e3)
        value = exact * sigmoid * up.astype(np.float64)
        got = x / (F4(1) + np.exp(-x)) * up
        bound = vector.swiglu(value, exact, "fp32")
        assert np.all(np.isfinite(bound))
        assert np.all(np.abs(got - value) <= bound)
        assert np.all(np.abs(round_float(got, "bf16") - value) <= vector.swiglu(value, exact, "bf16"))


def test_rms_norm_rope_combine():
    x = family("scaled", (20, 384), 3).astype(F4)
    w = family("normal", (384,), 4).astype(F4)
    exact = x.astype(np.float64)
    value = exact / np.sqrt((exact**2).mean(1, keepdims=True) + 1e-6) * w
    for order in (sequential, pairwise):
        rstd = F4(1) / np.sqrt(order(x * x) / F4(384) + F4(1e-6))
        got = x * rstd[:, None] * w
        assert np.all(np.abs(got - value) <= vector.rms_norm(value, 384, "fp32"))
        assert np.all(np.abs(round_float(got, "bf16") - value) <= vector.rms_norm(value, 384, "bf16"))
    no_eps_or_n = exact / np.sqrt((exact**2).sum(1, keepdims=True) / 380) * w
    assert np.any(np.abs(no_eps_or_n - value) > vector.rms_norm(value, 384, "fp32"))

    a, b = x[:10], x[10:]
    cos, sin = np.cos(x[:10]), np.sin(x[:10])
    value = a.astype(np.float64) * cos - b.astype(np.float64) * sin
    size = np.abs(a.astype(np.float64) * cos) + np.abs(b.astype(np.float64) * sin)
    assert np.all(np.abs((a * cos - b * sin) - value) <= vector.rope(value, size, "fp32"))
    assert np.mean(np.abs((a * cos + b * sin) - value) > vector.rope(value, size, "bf16")) > 0.5

    y = family("normal", (8, 50), 5).astype(F4)
    weight = np.abs(rng(6).standard_normal((8, 1))).astype(F4)
    value = (y.astype(np.float64) * weight).sum(0)
    size = np.abs(y.astype(np.float64) * weight).sum(0)
    flat = sequential((y * weight).T)
    assert np.all(np.abs(round_float(flat, "bf16") - value) <= vector.combine(value, size, 8, "bf16"))
    nodes = np.stack([(y.astype(np.float64) * weight)[i : i + 4].sum(0) for i in (0, 4)])
    two_hops = round_float(round_float(nodes, "bf16").sum(0), "bf16")
    assert np.all(np.abs(two_hops - value) <= vector.combine(value, size, 8, "bf16", hops=[(nodes, "bf16")]))
    assert np.any(np.abs(two_hops - value) > vector.combine(value, size, 8, "bf16"))


def test_sinkhorn_prenorm_and_elementwise():
    x = rng(1).standard_normal((50, 4, 4)).astype(F4) * 3
    want, got = np.exp(x.astype(np.float64)), np.exp(x)
    for _ in range(10):
        for axis in (-1, -2):
            want, got = want / want.sum(axis, keepdims=True), got / got.sum(axis, keepdims=True)
    assert np.all(np.abs(got - want) <= vector.sinkhorn(want, float(np.abs(x).max()), 4, 10))
    short = np.exp(x.astype(np.float64))
    for axis in (-1, -2) * 3:
        short = short / short.sum(axis, keepdims=True)
    assert np.any(np.abs(short - want) > vector.sinkhorn(want, float(np.abs(x).max()), 4, 10))

    a, b, products = operands("normal", 128)
    rstd = 1 / np.sqrt((a * a).mean(1, keepdims=True))
    size = np.abs(a) @ np.abs(b.T)
    got = sequential(products) * (F4(1) / np.sqrt(sequential((a * a).astype(F4)) / F4(128)))[:, None]
    value = a @ b.T * rstd
    assert np.all(np.abs(got - value) <= vector.rms_norm_of_product(value, basic.dot(size, 128), rstd, 128))
    y = np.exp(x.astype(np.float64)) / 3
    assert np.all(np.abs(np.exp(x) / F4(3) - y) <= basic.elementwise(y, "fp32", relative=basic.function("exp", x)))


# --- quantisation -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_codes_of_every_recipe_and_no_other(fmt):
    x = family("normal", (64, 128), 3).astype(F4)
    amax = np.abs(x).max(1, keepdims=True)
    plain = quantise.scales(amax, fmt)
    for scale, unrounded in ((plain[0], amax), (plain[1], amax), (quantise.power_of_two_up(plain[0]), None)):
        allowed = quantise.codes(x, scale, fmt, unrounded)
        assert len(allowed) == (2 if unrounded is None else 3)
        for got in allowed:
            assert quantise.off_grid(x, scale, got, fmt).max() <= 1 + 2.0**-18
        cut = codec.encode(x / scale, fmt, rounding="toward_zero")
        assert np.mean(np.all([cut != c for c in allowed], axis=0)) > 0.2
    agree = [np.mean(a == b) for a in allowed for b in allowed]
    assert min(agree) == 1  # a power of two: every recipe is exact


def test_scales():
    amax = np.array([448.0, np.nextafter(F4(448), F4(500)), 1e-4, 3.0], F4)
    np.testing.assert_array_equal(quantise.power_of_two_up(amax / F4(448)), [1, 2, 2.0**-22, 2.0**-7])
    one, other = quantise.scales(np.abs(rng(0).standard_normal(10000)).astype(F4), "e4m3")
    assert 0.2 < np.mean(one != other) < 0.8
    np.testing.assert_array_equal(quantise.power_of_two_up(one), quantise.power_of_two_up(other))


# --- tables -----------------------------------------------------------------------------------------------

def test_every_row_names_its_source():
    for table in (ACCUMULATORS, FUNCTIONS, PROBABILITIES):
        assert all(row.source for row in table.values())


def test_profile():
    full = profile.resolve({"p": "fp32", "requirements": {"input_row_bytes": 64}})
    assert full["p"] == "fp32"
    assert full["requirements"] == {"input_row_bytes": 64}
    assert full["accumulator"] == "fp32"


@pytest.mark.parametrize(("declared", "said"), [
    ({"subnormals": "lost"}, "profile subnormals='lost'; known: keep"),
    ({"own_key": 3}, "profile own_key: no such key"),
    ({"kv_scale_clamp": 256}, "profile kv_scale_clamp=256; known: 0 to 255"),
    ({"kv_scale_clamp": True}, "profile kv_scale_clamp=True"),
    ({"hops": "bf16"}, "profile hops='bf16'; a list of formats"),
    ({"hops": ["bf17"]}, "a list of formats"),
])
def test_a_profile_that_can_not_be_meant(declared, said):
    with pytest.raises(ValueError, match=said):
        profile.resolve(declared)


def test_profiles_that_are_legal():
    assert profile.mistakes({"hops": ["bf16"], "kv_scale_clamp": 224, "nan_sentinel": "row"}) == []
    assert all(profile.mistakes({key: default}) == [] for key, (default, _) in profile.PROFILE.items())
