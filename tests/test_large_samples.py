"""Samples of large products judge what they say, element by element, and find what is said of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from references.formats import codec
from references.large import sampling

Array = np.ndarray
F4 = np.float32


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def real(codes: Array, fmt: str = "bf16") -> Array:
    return np.asarray(codec.decode(codes, fmt), np.float64)


def normal(m: int, n: int, k: int, seed: int) -> tuple[Array, Array, Array]:
    r = rng(seed)
    a, b = (codec.encode(r.standard_normal(shape), "bf16") for shape in ((m, k), (n, k)))
    return a, b, real(a) @ real(b).T


def mask(plan: sampling.Plan) -> Array:
    judged = np.zeros((plan.m, plan.n), bool)
    judged[plan.rows], judged[:, plan.columns] = True, True
    for down, across in plan.spans():
        judged[np.ix_(down, across)] = True
    return judged


PLANNED = [(200, 300, (64, 128)), (64, 64, (64, 64)), (65, 1, (64, 8)), (7, 300, (1, 32)), (0, 4, (8, 8))]


@pytest.mark.parametrize(("m", "n", "tile"), PLANNED)
def test_a_plan_has_the_ends_and_both_sides_of_every_edge(m, n, tile):
    plan = sampling.sample_plan(m, n, tile, 5, 3)
    assert plan.judged == mask(plan).sum()
    for lines, size, step in ((plan.rows, m, tile[0]), (plan.columns, n, tile[1])):
        if m and n:
            edges = range(step, size, step)
            wanted = {0, size - 1} | {x for e in edges for x in (e - 1, e, e + 1) if x < size}
            assert wanted <= set(lines.tolist()) <= set(range(size))
            assert len(lines) <= len(wanted) + 3
            assert all(x < y for x, y in pairwise(lines))


def test_plans_follow_their_seed():
    one, same, other = (sampling.sample_plan(4000, 4000, (128, 128), seed, 8) for seed in (1, 1, 2))
    assert np.array_equal(one.rows, same.rows)
    assert np.array_equal(one.tiles, same.tiles)
    assert not np.array_equal(one.rows, other.rows)
    assert not np.array_equal(one.tiles, other.tiles)


@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize("exchangeable", [True, False])
def test_right_results_pass_the_sample(out, exchangeable):
    a, b, _ = normal(150, 170, 700, 3)
    got = (codec.decode(a, "bf16").astype(F4) @ codec.decode(b, "bf16").astype(F4).T).astype(np.float64)
    plan = sampling.sample_plan(150, 170, (64, 64), 3, 4)
    result = sampling.check_sampled(a, b, codec.encode(got, out), plan, out=out, exchangeable=exchangeable)
    assert result.ok
    assert result.judged == plan.judged
    assert 0 < result.worst <= 1


def test_the_sample_sees_exactly_what_it_judges():
    a, b, c = normal(150, 170, 300, 4)
    plan = sampling.sample_plan(150, 170, (64, 64), 4, 1)
    judged = mask(plan)
    assert 0.1 < judged.mean() < 0.9
    r = rng(4)
    places = np.stack([r.integers(150, size=60), r.integers(170, size=60)], axis=1)
    wrong = c.copy()
    wrong[places[:, 0], places[:, 1]] += 1.0
    wrong[0, 0] = np.nan
    result = sampling.check_sampled(a, b, codec.encode(wrong, "bf16"), plan, out="bf16")
    seen = np.zeros_like(judged)
    seen[result.wrong[:, 0], result.wrong[:, 1]] = True
    at = np.zeros_like(judged)
    at[places[:, 0], places[:, 1]], at[0, 0] = True, True
    np.testing.assert_array_equal(seen, at & judged)
    assert result.worst == np.inf
    assert result.worst_at == (0, 0)


def test_a_fault_of_a_whole_tile_is_always_sampled():
    a, b, c = normal(192, 256, 256, 6)
    plan = sampling.sample_plan(192, 256, (64, 64), 6, 0)
    for i in range(0, 192, 64):
        for j in range(0, 256, 64):
            wrong = c.copy()
            wrong[i : i + 64, j : j + 64] -= real(a[i : i + 64, -8:]) @ real(b[j : j + 64, -8:]).T
            assert not sampling.check_sampled(a, b, codec.encode(wrong, "bf16"), plan, out="bf16").ok
    assert sampling.touched(plan, 64, 64) == 1.0


def test_what_a_sample_finds_is_what_is_said():
    plan = sampling.sample_plan(150, 170, (64, 64), 4, 1)
    judged = mask(plan)
    hits = [judged[i : i + 9, j : j + 5].any() for i in range(142) for j in range(166)]
    lines = sampling.Plan(150, 170, (64, 64), plan.rows, plan.columns, plan.tiles[:0])
    only = mask(lines)
    exactly = np.mean([only[i : i + 9, j : j + 5].any() for i in range(142) for j in range(166)])
    assert sampling.touched(plan, 9, 5) == pytest.approx(exactly)
    assert exactly <= np.mean(hits)
    r = rng(9)
    for sure, thinning in zip(sampling.smallest_detectable(plan, 0.95), (1.0, 0.5), strict=True):
        visible = judged.ravel()
        tries = 1000
        found = sum(bool((visible[r.choice(visible.size, sure.elements, replace=False)]
                          & (r.random(sure.elements) < thinning)).any()) for _ in range(tries))
        assert found / tries >= 0.95 - 5 * (0.95 * 0.05 / tries) ** 0.5
        fewer = 1 - (1 - visible.mean() * thinning) ** (sure.elements - 1)
        assert fewer < 0.95


def test_samples_refuse_what_they_can_not_judge():
    a, b, c = normal(20, 20, 8, 1)
    codes = codec.encode(c, "bf16")
    plan = sampling.sample_plan(20, 20, (8, 8), 1, 1)
    with pytest.raises(ValueError, match="do not fit"):
        sampling.check_sampled(a, b[:, :4], codes, plan, out="bf16")
    a[0, 0] = codec.encode(np.array(np.nan), "bf16")
    with pytest.raises(ValueError, match="finite"):
        sampling.check_sampled(a, b, codes, plan, out="bf16")
    for tile, count in (((0, 8), 1), ((8, 8), -1)):
        with pytest.raises(ValueError, match="no sample"):
            sampling.sample_plan(20, 20, tile, 1, count)
    for bad in (0.0, 1.0):
        with pytest.raises(ValueError, match="probability"):
            sampling.smallest_detectable(plan, bad)
