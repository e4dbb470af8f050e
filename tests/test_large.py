"""Large products: exact data are exact, every planted error is found and located, and right results never fail."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch

from references.formats import codec
from references.large import __main__ as costs
from references.large import exact, projection

Array = np.ndarray
F4 = np.float32


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def real(codes: Array, fmt: str = "bf16") -> Array:
    return np.asarray(codec.decode(codes, fmt), np.float64)


# --- the data ---------------------------------------------------------------------------------------------

SHAPES = [(5, 6, 0), (5, 6, 1), (5, 6, 2), (33, 48, 3), (33, 48, 101), (64, 48, 1000), (20, 30, 4097)]
OUTPUTS = ["bf16", "fp16", "fp32", "int32", "e4m3"]


@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_the_data_keep_what_they_promise(m, n, k, out):
    a, b = (real(x) for x in exact.exact_operands(m, n, k, out, 7))
    c = a @ b.T
    assert a.shape == (m, k)
    assert b.shape == (n, k)
    assert np.abs(c).max(initial=0) <= exact.limit(out) < exact.PRIME / 2
    assert (np.abs(a) @ np.abs(b).T).max(initial=0) < 2**24
    assert np.all(a != 0)
    assert np.all(b != 0)
    assert max(np.abs(a).max(initial=0), 0) <= exact.LARGEST_A
    assert max(np.abs(b).max(initial=0), 0) <= exact.LARGEST_B
    np.testing.assert_array_equal(real(exact.exact_product(m, n, k, out, 7), out), c)


@pytest.mark.parametrize("out", OUTPUTS)
def test_the_limit_is_that_of_the_format(out):
    whole = np.arange(exact.limit(out) + 2).astype(np.float64)
    np.testing.assert_array_equal(codec.round_to(whole, out), whole)


def test_the_modulus_is_a_prime_below_2_to_the_22():
    assert exact.PRIME < 2**22
    assert np.all(exact.PRIME % np.arange(2, 2049) != 0)


def test_the_longest_k_is_still_exact():
    a, b = exact.exact_operands(2, 2, exact.MAX_K, "fp32", 1)
    c = real(a) @ real(b).T
    assert projection.project(a, b, c.astype(F4), out="fp32", seed=1).ok
    with pytest.raises(ValueError, match="at most"):
        exact.exact_operands(2, 2, exact.MAX_K + 1, "fp32", 1)


def test_rows_do_not_depend_on_the_pieces_they_are_made_in():
    for side in "ab":
        whole = exact.exact_rows(side, range(300), 77, "bf16", 5)
        np.testing.assert_array_equal(whole[131:200], exact.exact_rows(side, range(131, 200), 77, "bf16", 5))
    a, b = exact.exact_operands(300, 300, 77, "bf16", 5)
    np.testing.assert_array_equal(real(a), exact.exact_rows("a", range(300), 77, "bf16", 5))
    np.testing.assert_array_equal(real(b), whole)
    assert not np.array_equal(whole, exact.exact_rows("b", range(300), 77, "bf16", 6))


@pytest.mark.parametrize("in_format", ["bf16", "fp16", "fp32", "e4m3", "int8"])
def test_operands_are_the_same_in_every_format_that_holds_them(in_format):
    known = exact.exact_operands(9, 7, 50, "fp32", 3)
    for codes, other in zip(exact.exact_operands(9, 7, 50, "fp32", 3, in_format), known, strict=True):
        np.testing.assert_array_equal(real(codes, in_format), real(other))


TOO_SMALL = [("bf16", "e2m1"), ("bf16", "e5m2"), ("e2m1", "bf16"), ("uint8", "bf16")]


@pytest.mark.parametrize(("out", "in_format"), TOO_SMALL)
def test_formats_that_hold_too_little_are_refused(out, in_format):
    with pytest.raises(ValueError, match="whole numbers"):
        exact.exact_operands(4, 4, 8, out, 0, in_format)


def in_order(products: Array, add: Callable[[Array], Array]) -> Array:
    total = np.zeros(products.shape[:-1], F4)
    for i in range(products.shape[-1]):
        total = add(total + products[..., i])
    return total


def kept(bits: int) -> Callable[[Array], Array]:
    """An accumulator of fewer bits, cut."""
    def cut(x: Array) -> Array:
        unit = np.ldexp(1.0, np.frexp(x)[1] - bits)
        return (np.trunc(x / unit) * unit).astype(F4)
    return cut


@pytest.mark.parametrize("seed", range(3))
def test_fp32_sums_are_exact_in_any_order_and_narrower_ones_are_not(seed):
    a, b = (real(x) for x in exact.exact_operands(16, 16, 4096, "bf16", seed))
    c = a @ b.T
    products = (a[:, None, :] * b[None, :, :]).astype(F4)
    shuffled = products[..., rng(seed).permutation(4096)]
    for order in (products, products[..., ::-1], shuffled, np.sort(products), np.sort(products)[..., ::-1]):
        np.testing.assert_array_equal(in_order(order, lambda x: x), c)
    for bits in (8, 11, 14):
        assert np.mean(in_order(products, kept(bits)) != c) > 0.9
    first = in_order(products[..., :2048], lambda x: x)
    second = in_order(products[..., 2048:], lambda x: x)
    stored = codec.round_to(first, "bf16") + codec.round_to(second, "bf16")
    assert np.mean(stored != c) > 0.9


@pytest.mark.parametrize("k", [2, 64, 65, 1001])
def test_leaving_out_columns_of_one_half_moves_every_element(k):
    a, b = (real(x) for x in exact.exact_operands(40, 40, k, "bf16", k))
    c = codec.round_to(a @ b.T, "bf16")
    lost = [np.array([i]) for i in {*range(0, k, max(1, k // 64)), k // 2 - 1, k // 2, k - 1}]
    lost += [np.arange(k - t, k) for t in (1, 2, 7, 16, k // 2) if 0 < t <= k - k // 2]
    lost += [np.arange(t) for t in (1, 16, k // 2) if t <= k // 2]
    for columns in lost:
        rest = np.setdiff1d(np.arange(k), columns)
        assert np.all(codec.round_to(a[:, rest] @ b[:, rest].T, "bf16") != c)


@pytest.mark.parametrize(("out", "narrow"), [("fp32", "bf16"), ("fp32", "fp16"), ("fp16", "bf16"), ("int32", "fp16")])
def test_results_need_more_bits_than_a_narrower_output_has(out, narrow):
    c = real(exact.exact_product(64, 64, 1024, out, 2), out)
    assert np.mean(codec.round_to(c, narrow) != c) > 0.7


# --- 1000 wrong tiles -------------------------------------------------------------------------------------

M, N, K, TILE = 176, 208, 320, 16


class Product:
    """Exact data with C of this and of another seed, as floats and as codes."""

    def __init__(self, seed: int, out: str) -> None:
        self.out = out
        self.a, self.b = exact.exact_operands(M, N, K, out, seed)
        self.ra, self.rb = real(self.a), real(self.b)
        self.c = self.ra @ self.rb.T
        self.stale = real(exact.exact_product(M, N, K, out, seed + 1000), out)


def stale(p, r, i, j):
    return p.stale[i, j]


def zero(p, r, i, j):
    return np.zeros((TILE, TILE))


def one_ulp(p, r, i, j):
    tile = p.c[i, j].copy()
    at = tuple(r.integers(TILE, size=2))
    tile[at] += r.choice([-1, 1]) * codec.ulp(tile[at], p.out)
    return tile


def doubled(p, r, i, j):
    return 2 * p.c[i, j]


def halved(p, r, i, j):
    return p.c[i, j] / 2


def neighbour(p, r, i, j):
    return p.c[i, slice(j.start - TILE, j.start)] if j.start else p.c[i, slice(j.stop, j.stop + TILE)]


def turned(p, r, i, j):
    return p.c[i, j].T


def k_tail(p, r, i, j):
    end = K - int(r.integers(1, TILE + 1))
    return p.ra[i, :end] @ p.rb[j, :end].T


def k_step_twice(p, r, i, j):
    step = slice(start := TILE * int(r.integers(K // TILE)), start + TILE)
    return p.c[i, j] + p.ra[i, step] @ p.rb[j, step].T


def stale_k_step(p, r, i, j):
    """One step of k multiplies the a of the step before."""
    step = slice(start := TILE * int(r.integers(1, K // TILE)), start + TILE)
    before = slice(start - TILE, start)
    return p.c[i, j] + (p.ra[i, before] - p.ra[i, step]) @ p.rb[j, step].T


def not_a_number(p, r, i, j):
    tile = p.c[i, j].copy()
    tile[tuple(r.integers(TILE, size=2))] = r.choice([np.nan, np.inf, -np.inf])
    return tile


PLANTS = (stale, zero, one_ulp, doubled, halved, neighbour, turned, k_tail, k_step_twice, stale_k_step, not_a_number)
PLANTED = 1000


def differing(x: Array, y: Array) -> tuple[Array, Array]:
    wrong = ~(x == y)
    return np.flatnonzero(wrong.any(axis=1)), np.flatnonzero(wrong.any(axis=0))


@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_every_one_of_1000_planted_tiles_is_found_and_located(out):
    products = [Product(seed, out) for seed in range(4)]
    r, found = rng(11), 0
    for number in range(PLANTED // 2):
        p, plant = products[number % 4], PLANTS[number % len(PLANTS)]
        i, j = (slice(at := TILE * int(r.integers(size // TILE)), at + TILE) for size in (M, N))
        c = p.c.copy()
        c[i, j] = plant(p, r, i, j)
        if plant is neighbour:  # the two change places
            c[i, slice(j.start - TILE, j.start) if j.start else slice(j.stop, j.stop + TILE)] = p.c[i, j]
        codes = codec.encode(c, out)
        rows, columns = differing(real(codes, out), p.c)
        assert rows.size, plant.__name__
        located = projection.project(p.a, p.b, codes, out=out, seed=number)
        np.testing.assert_array_equal(located.rows, rows, plant.__name__)
        np.testing.assert_array_equal(located.columns, columns, plant.__name__)
        found += not located.ok
    assert found == PLANTED // 2


def test_wrong_elements_far_apart_are_boxed_and_examined():
    p = Product(1, "bf16")
    c = codec.encode(p.c, "bf16")
    for at in ((3, 7), (90, 7), (171, 200)):
        c[at] ^= 1
    located = projection.project(p.a, p.b, c, out="bf16", seed=5)
    np.testing.assert_array_equal(located.rows, [3, 90, 171])
    np.testing.assert_array_equal(located.columns, [7, 200])
    expected = projection.examine(p.a, p.b, located)
    wrong = real(c[np.ix_(located.rows, located.columns)]) != expected
    np.testing.assert_array_equal(np.argwhere(wrong), [[0, 0], [1, 0], [2, 1]])


# --- right results, and what has to be refused -----------------------------------------------------------

@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_right_results_never_fail(m, n, k, out):
    a, b = exact.exact_operands(m, n, k, out, 3)
    c = exact.exact_product(m, n, k, out, 3)
    assert all(projection.project(a, b, c, out=out, seed=seed).ok for seed in range(20))


def test_a_kernel_of_another_library_passes():
    a, b = exact.exact_operands(130, 70, 515, "bf16", 8)
    ta, tb = (torch.from_numpy(x).view(torch.bfloat16) for x in (a, b))
    c = (ta @ tb.T).view(torch.uint16).numpy()
    assert projection.project(a, b, c, out="bf16", seed=8).ok
    assert projection.project(b, a, np.ascontiguousarray(c.T), out="bf16", seed=9).ok


@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_is_right(m, n):
    a, b = exact.exact_operands(m, n, 8, "bf16", 0)
    assert projection.project(a, b, np.zeros((m, n), np.uint16), out="bf16", seed=0).ok


def test_an_error_of_the_prime_itself_is_found():
    p = Product(2, "fp32")
    for error in (exact.PRIME, -exact.PRIME, 2 * exact.PRIME, 0.5, 2.0**60):
        c = p.c.astype(F4)
        c[5, 9] += F4(error)
        located = projection.project(p.a, p.b, c, out="fp32", seed=1)
        assert (located.rows.tolist(), located.columns.tolist()) == ([5], [9])


def test_one_projection_misses_as_often_as_its_prime_says():
    """1/p and 1/p**2 for a prime so small that it shows; five standard deviations."""
    a, b = exact.exact_operands(4, 40, 12, "e4m3", 1)
    c = real(a) @ real(b).T
    c[2, 5] += 1 if c[2, 5] < 15 else -1
    c[2, 17] += 2 if c[2, 17] < 14 else -2
    codes = codec.encode(c, "e4m3")
    tries, prime = 1000, 31
    for count in (1, 2):
        results = [projection.project(a, b, codes, out="e4m3", seed=i, count=count, prime=prime) for i in range(tries)]
        mean = tries * prime**-count
        assert abs(sum(x.ok for x in results) - mean) <= 5 * mean**0.5


@pytest.mark.parametrize("spoil", [0.5, np.nan, np.inf])
def test_operands_that_are_not_whole_are_refused(spoil):
    p = Product(0, "bf16")
    for name in ("a", "b"):
        operands = {"a": p.a.copy(), "b": p.b.copy()}
        operands[name][3, 4] = codec.encode(np.array(spoil), "bf16")
        with pytest.raises(ValueError, match=f"operand {name} is not"):
            projection.project(**operands, c=codec.encode(p.c, "bf16"), out="bf16", seed=0)


def test_operands_that_do_not_keep_the_promise_are_refused():
    """A right kernel gets no blame for data that are not exact ones."""
    a = codec.encode(rng(0).integers(1, 9, (20, 64)).astype(np.float64), "bf16")
    c = codec.encode(real(a) @ real(a).T, "bf16")
    with pytest.raises(ValueError, match="promise"):
        projection.project(a, a, c, out="bf16", seed=0)
    large = codec.encode(np.full((3, 64), 512.0), "bf16")
    with pytest.raises(ValueError, match="need not be exact"):
        projection.project(large, large, codec.encode(np.zeros((3, 3)), "bf16"), out="bf16", seed=0)
    with pytest.raises(ValueError, match="modulo"):
        projection.project(a, a, c, out="bf16", seed=0, most=exact.PRIME)
    with pytest.raises(ValueError, match="modulo"):
        projection.project(a, a[:, :5], c, out="bf16", seed=0)


def test_memory_is_bounded():
    m, n, k = 256, 1536, 4096
    a, b = exact.exact_operands(m, n, k, "bf16", 1)
    c = exact.exact_product(m, n, k, "bf16", 1)
    c[7, 8] ^= 1
    tracemalloc.start()
    try:
        assert not projection.project(a, b, c, out="bf16", seed=1).ok
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20 < n * k * 8 / 2
    finally:
        tracemalloc.stop()


def test_the_table_of_costs_is_made():
    made = costs.row(96, 128, 160)
    assert len(made) == len(costs.HEAD)
    assert made[0] == "96, 128, 160"
