"""A shrink finds the border of a fault and spends few deaths on it: each may cost a device its reset."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from conformance.collect import cases_at
from conformance.engine.draw import explicit
from conformance.engine.shrink import MAX_DEATHS, Shrinker
from conformance.model import Problem

ENDLESS = float("inf")
by_id = {c.id: c for c in cases_at("full", ("deepgemm", "deepselect"))}
GEMM = by_id["deepgemm.bf16_gemm_nt/values:out=bf16,c=none,a_major=k,b_major=k"]


def start() -> Problem:
    return replace(explicit(GEMM, 0)[0], sizes={"m": 257, "n": 256, "k": 504}, family="cancellation")


def shrunk(shows: Callable[[Problem], bool], problem: Problem, most: int = MAX_DEATHS) -> tuple[Problem, int, int]:
    """What it comes down to, how many runs died, and how many there were."""
    runs: list[bool] = []

    def fails(p: Problem) -> bool:
        assert len(runs) < 1000
        runs.append(shows(p))
        return runs[-1]

    shrinker = Shrinker(GEMM.op, fails, problem, ENDLESS, lambda: 0 if sum(runs) < most else MAX_DEATHS)
    return shrinker.run(), sum(runs), len(runs)


@pytest.mark.parametrize("seed", range(20))
def test_border_in_one_dimension(seed: int) -> None:
    """A fault from some size on, and more than a tile of k: exactly that size, within 25 deaths, in under 200 runs."""
    choice = random.Random(seed)
    name = choice.choice(("m", "n"))
    border = choice.randrange(2, 257) // GEMM.op.sizes[name].step * GEMM.op.sizes[name].step

    def shows(p: Problem) -> bool:
        return p.sizes[name] >= border and p.sizes["k"] > 48

    least, deaths, runs = shrunk(shows, start())
    other = "n" if name == "m" else "m"
    assert least.sizes == {name: max(border, GEMM.op.sizes[name].lo), other: GEMM.op.sizes[other].lo, "k": 56}
    assert deaths <= MAX_DEATHS
    assert runs < 200


@pytest.mark.parametrize("seed", range(20))
def test_border_in_three_dimensions(seed: int) -> None:
    choice = random.Random(seed)
    border = {"m": choice.randrange(2, 258), "n": 8 * choice.randrange(1, 33), "k": 8 * choice.randrange(1, 64)}

    def shows(p: Problem) -> bool:
        return all(p.sizes[n] >= b for n, b in border.items())

    least, deaths, _ = shrunk(shows, start())
    assert least.sizes == border
    assert deaths <= MAX_DEATHS


def test_the_budget_of_deaths_holds() -> None:
    _, deaths, _ = shrunk(lambda p: p.sizes["m"] >= 200, start(), most=3)
    assert deaths == 3


def test_nothing_is_run_twice() -> None:
    seen: list[Problem] = []

    def shows(p: Problem) -> bool:
        assert p not in seen
        seen.append(p)
        return p.sizes["m"] >= 70

    shrunk(shows, start())
