"""The control arrays of the DeepGEMM cases are legal; settings that problems name are set, kept and restored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cases.deepgemm import dense, grouped, groups, scales
from conformance.engine.arrays import Draw, array_seed
from conformance.engine.limits import problem_limit
from conformance.engine.serve import Server
from conformance.engine.wire import Arena
from conformance.model import Problem, Variant
from conformance.protocol import Backend, supported
from references.expected import Inputs
from references.formats import codec

SEEDS = range(60)


def grouped_problem(layout: str, seed: int, blocks: int = 4, members: int = 3, step: int = 128) -> Problem:
    return Problem("deepgemm.g", Variant({"layout": layout}), {"blocks": blocks, "groups": members, "n": 8, "k": 8},
                   {groups.ALIGNMENT: step}, "normal", seed)


def drawn_layout(p: Problem) -> np.ndarray:
    shape = (p.groups if p.variant.layout == "psum" else groups.rows(p),)
    return groups.layout(Draw("grouped_layout", 0, shape, "int32", p, array_seed(p, "grouped_layout")))


@pytest.mark.parametrize("step", [128, 256])
def test_groups_start_on_multiples_of_the_alignment(step: int) -> None:
    some = set()
    for seed in SEEDS:
        p = grouped_problem("labels", seed << 8, step=step)
        labels = drawn_layout(p)
        assert labels.min() >= -1
        assert labels.max() < p.groups
        starts = np.flatnonzero((labels[1:] != labels[:-1]) & (labels[1:] >= 0)) + 1
        assert not np.any(starts % step)
        owned = labels[labels >= 0]
        assert np.all(np.diff(owned) >= 0)
        some |= {len(np.unique(owned)), "padding" if (labels < 0).any() else "full"}
    assert {1, 2, 3, "padding", "full"} <= some


def test_ends_fit_their_blocks() -> None:
    empty = behind = 0
    for seed in SEEDS:
        p = grouped_problem("psum", seed << 8)
        ends, start = drawn_layout(p), 0
        for end in ends.tolist():
            assert end >= start
            empty += end == start
            start = -(-end // 128) * 128
        assert start <= groups.rows(p)
        behind += start < groups.rows(p)
    assert empty
    assert behind


@pytest.mark.parametrize("layout", ["labels", "psum"])
def test_untouched_rows_are_whole_blocks_of_no_group(layout: str) -> None:
    given = np.array([100, 128, 300], np.int32)
    if layout == "labels":
        given = np.full(4 * 128, -1, np.int32)
        given[:100], given[128:300] = 0, 2
    mask = groups.untouched(grouped_problem(layout, 0), Inputs({"grouped_layout": given}, {"grouped_layout": "int32"}))
    assert mask[:, 0].reshape(4, 128).all(axis=1).tolist() == [False, False, False, True]
    assert mask.sum() == 128


@pytest.mark.parametrize("kind", ["fp32", "pow2", "ue8m0"])
def test_scales_are_positive_and_normal_as_far_as_the_format_goes(kind: str) -> None:
    fmt = "e8m0x4" if kind == "ue8m0" else "fp32"
    for seed in SEEDS:
        p = Problem("deepgemm.f", Variant({"scales": kind}), {"m": 6, "n": 8, "k": 640},
                    {"recipe": None, "recipe_a": None}, "normal", seed)
        value = codec.decode(scales.near(Draw("a_scale", 0, scales.shape_a(p), fmt, p, seed)), fmt)
        assert np.all((value >= (2.0**-127 if kind == "ue8m0" else 2.0**-126)) & (value < 2.0**127))
        if kind != "fp32":
            assert np.all(np.frexp(value)[0] == 0.5)
    assert scales.shape_a(p) == (6, 8 if kind == "ue8m0" else 5)


def test_a_recipe_in_parts_is_the_same_granularity() -> None:
    values: dict[str, Any] = {"recipe": (1, 1, 32), "recipe_a": None, "recipe_b": None}
    p = Problem("deepgemm.f", Variant({"scales": "ue8m0"}), {"m": 6, "n": 8, "k": 640}, values, "normal", 0)
    other, _ = dense.RECIPE_IN_PARTS.second(p, {})
    assert other.values["recipe"] is None
    assert scales.granularity(other) == scales.granularity(p) == (1, 1, 32)


def test_a_limit_on_a_value_that_is_a_tuple() -> None:
    op = supported(limits=({"field": "recipe", "in": [[1, 128, 128]]},))
    p = Problem("deepgemm.f", Variant({}), {}, {"recipe": (1, 128, 128)}, "normal", 0)
    assert problem_limit(op, p) == ""
    assert "recipe" in problem_limit(op, Problem("deepgemm.f", Variant({}), {}, {"recipe": (1, 1, 32)}, "normal", 0))
    assert {v.name for v in grouped.OPS[0].settings} == {groups.ALIGNMENT}


class WithSettings(Backend):
    """A backend of no memory whose one call reads a setting, and alters it when told to."""

    def __init__(self) -> None:
        self.settings = {"rows": 128, "other": 1}

    def get_settings(self, module: str) -> dict[str, Any]:
        return dict(self.settings)

    def set_settings(self, module: str, settings: Any) -> None:
        self.settings.update(settings)

    def run(self, op: str, kwargs: dict[str, Any]) -> Any:
        seen = self.settings["rows"]
        if op == "m.fails":
            raise ValueError(op)
        if op == "m.leaks":
            self.settings["rows"] = 7
        return seen

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize(("op", "left"), [("m.reads", 256), ("m.leaks", 7), ("m.fails", None)])
def test_settings_are_set_for_a_call_and_restored_after_it(op: str, left: int | None) -> None:
    backend = WithSettings()
    arena = Arena()
    server = Server(arena, backend, {})
    answer = server.run({"arena_bytes": arena.nbytes, "buffers": [], "settings": {"m": {"rows": 256}}, "poison": 0,
                         "steps": [{"op": op, "args": {}, "returns": ["n"]}]})
    assert backend.settings == {"rows": 128, "other": 1}
    if left is None:
        assert answer["exception"]["type"] == "ValueError"
    else:
        assert answer["steps"][0]["leaves"][0]["value"] == 256
        assert answer["settings_leak"] == ([] if left == 256 else ["m.rows"])
