"""What is said of noisy times holds as often as it is said to: simulated clocks, thousands of runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from conformance.engine import timing_stats as stats
from conformance.engine.timing_stats import Block, change, interval, more_blocks

TRUE_S = 1e-3
SAMPLES, FIRST, MOST = 15, 6, 16


def a_run(rng: np.random.Generator, *, sample: float, block: float = 0.0, process: float = 0.0,
          per_executor: int = 1, time_s: float = TRUE_S) -> list[Block]:
    """The blocks of one run on a clock with these relative noises, and with them a second stage as a run has it."""
    blocks: list[Block] = []

    def add() -> None:
        executor = len(blocks) // per_executor
        if len(blocks) % per_executor == 0:
            add.factor = math.exp(process * rng.standard_normal())  # type: ignore[attr-defined]
        factor = add.factor * math.exp(block * rng.standard_normal())  # type: ignore[attr-defined]
        blocks.append(Block(executor, float(np.median(
            time_s * factor * np.exp(sample * rng.standard_normal(SAMPLES))))))

    while len(blocks) < FIRST:
        add()
    total, spread, df = more_blocks(blocks, MOST)
    while len(blocks) < total:
        add()
    a_run.last = interval(blocks, spread, df)  # type: ignore[attr-defined]
    return blocks


@pytest.mark.parametrize(("noise", "seed"), [
    ({"sample": 0.10}, 1), ({"sample": 0.0, "block": 0.10}, 2), ({"sample": 0.10, "block": 0.03, "process": 0.03}, 3)])
def test_the_interval_covers_the_time_as_often_as_it_says(noise: dict, seed: int) -> None:
    rng = np.random.default_rng(seed)
    hit = 0
    for _ in range(1000):
        a_run(rng, **noise)
        found = a_run.last  # type: ignore[attr-defined]
        hit += found.low_s <= TRUE_S <= found.high_s
    print(hit)
    assert 930 <= hit <= 970


def test_blocks_that_share_a_process_widen_the_interval_where_processes_differ() -> None:
    rng = np.random.default_rng(4)
    hits = {0.0: 0, 0.10: 0}
    for process in hits:
        for _ in range(400):
            a_run(rng, sample=0.02, process=process, per_executor=2)
            found = a_run.last  # type: ignore[attr-defined]
            hits[process] += found.low_s <= TRUE_S <= found.high_s
    assert hits[0.0] >= 370
    assert hits[0.10] >= 350


def test_a_slow_down_of_a_tenth_is_found_and_none_is_made_up() -> None:
    rng = np.random.default_rng(5)
    found = false = 0
    for _ in range(1000):
        before = [b.median_s for b in a_run(rng, sample=0.10)]
        after = [b.median_s for b in a_run(rng, sample=0.10, time_s=1.1 * TRUE_S)]
        same = [b.median_s for b in a_run(rng, sample=0.10)]
        found += change(before, after).slower
        false += change(before, same).slower
    print(found, false)
    assert found >= 950
    assert false <= 65


def test_noise_that_no_number_of_blocks_mends_is_unstable() -> None:
    rng = np.random.default_rng(6)
    a_run(rng, sample=0.0, block=0.5)
    assert a_run.last.unstable  # type: ignore[attr-defined]
    a_run(rng, sample=0.02)
    assert not a_run.last.unstable  # type: ignore[attr-defined]


def test_a_steady_clock_gives_a_point() -> None:
    found = interval([Block(0, 2e-6), Block(1, 2e-6)])
    assert (found.low_s, found.high_s) == pytest.approx((2e-6, 2e-6))
    assert change([1.0, 1.0], [1.1, 1.1]).slower
    assert not change([1.0, 1.0], [1.0, 1.0]).slower
    assert change([1.1, 1.1], [1.0, 1.0]).faster


@pytest.mark.parametrize(("df", "p", "t"), [(1, 0.975, 12.7062), (5, 0.975, 2.5706), (10, 0.95, 1.8125),
                                            (30, 0.975, 2.0423)])
def test_quantiles_are_those_of_the_tables(df: int, p: float, t: float) -> None:
    assert stats.t_quantile(p, df) == pytest.approx(t, abs=1e-3)


@pytest.mark.parametrize(("d1", "d2", "f"), [(2, 3, 9.5521), (1, 10, 4.9646), (5, 20, 2.7109)])
def test_tails_of_f_are_those_of_the_tables(d1: int, d2: int, f: float) -> None:
    assert stats.f_tail(f, d1, d2) == pytest.approx(0.05, abs=1e-4)


def test_that_one_kind_of_round_is_the_longest_everywhere_is_no_chance() -> None:
    rng = np.random.default_rng(8)
    # Each round may be held up as long as it likes: what was never seen before is no more so than the others.
    shares = [[stats.rank_share(t[0], t[1:].tolist()) for t in np.exp(2 * rng.standard_normal((6, 16)))]
              for _ in range(2000)]
    likely = np.array([stats.all_high(s) for s in shares])
    assert likely.min() > 1e-5
    assert np.mean(likely < 0.1) == pytest.approx(0.1, abs=0.025)
    assert stats.all_high([15.5 / 16] * 6) < 1e-6
    assert stats.all_high([0.5] * 6) == pytest.approx(0.5, abs=1e-9)


def test_one_block_has_no_interval() -> None:
    with pytest.raises(ValueError, match="two blocks"):
        interval([Block(0, 1.0)])
    with pytest.raises(ValueError, match="two blocks"):
        change([1.0], [1.0, 1.0])
