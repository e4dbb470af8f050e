"""Descriptions of the chips: every row names real ops and fields, and a method that takes what the cases give."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adapters.ascend.backend import AscendBackend
from adapters.chip_data import load_file
from adapters.nvidia.backend import NvidiaBackend
from conformance import backends
from conformance.catalogue.load import MODULES
from conformance.collect import all_cases, ops
from conformance.engine import misuse
from conformance.engine.layout import row_bytes_of
from conformance.engine.limits import problem_limit, support_of, variant_limit
from conformance.engine.variants import matching
from conformance.model import Case, Op, Problem
from conformance.protocol import Description, Support
from references.bounds.profile import PROFILE, resolve

CHIPS = {"sm90": NvidiaBackend, "sm100": NvidiaBackend, "ascend950": AscendBackend}
OTHER = [("sm90", {"deepgemm": "2.6"}), ("sm100", {"deepgemm": "2.6"}), ("sm100", {"tilekernels": "1.0"})]
OPS = {op.name: op for op in ops()}
MORE_PROFILE = {"c_added", "nan_sentinel", "nan_short_row", "invalid_index", "kv_scale_clamp", "foreign_weights"}
"""keys that oracles look up by themselves"""


def described(arch: str, **options: str) -> Description:
    return CHIPS[arch].describe({"arch": arch, **options})


@pytest.mark.parametrize(("arch", "options"), [*((a, {}) for a in CHIPS), *OTHER])
def test_every_row_names_a_real_op_and_real_fields(arch: str, options: dict[str, str]) -> None:
    d = described(arch, **options)
    assert backends.without_malformed(d) == d
    assert backends.complaints(d, OPS.values()) == []
    unnamed = [name for name in OPS if "does not name" in support_of(d, name).reason]
    assert unnamed == [], "every op of the suite is spoken of"


@pytest.mark.parametrize("arch", CHIPS)
def test_every_row_has_a_source_that_the_file_lists(arch: str) -> None:
    raw = load_file(CHIPS[arch].descriptions[arch])
    rows = [row for table in raw.get("other_release", {}).values() for r in table.values() for row in r.values()]
    for row in [*raw["ops"].values(), *rows]:
        assert re.match(rf"(?:{'|'.join(raw['sources'])})\b", row["source"]), row
    assert set(raw["package"]) == set(raw["release"]) == set(MODULES)


@pytest.mark.parametrize("arch", CHIPS)
def test_what_is_not_supported_says_why_and_every_limit_on_a_choice_too(arch: str) -> None:
    for name, row in described(arch).ops.items():
        assert row.supported or (row.reason and row.kind in ("not_yet", "hardware", "by_design")), name
        for limit in row.limits:
            assert "reason" in limit or not ({"in", "given"} & set(limit)), (name, limit)


@pytest.mark.parametrize("arch", CHIPS)
def test_the_profile_has_keys_that_oracles_know(arch: str) -> None:
    profile = described(arch).profile
    resolve(profile)
    assert set(profile) <= set(PROFILE) | MORE_PROFILE
    source = load_file(CHIPS[arch].descriptions[arch])["profile"]["source"]
    assert all(key in source for key in profile)


@pytest.mark.parametrize(("arch", "name"), [
    (arch, name) for arch in CHIPS for name in OPS if support_of(described(arch), name).supported])
def test_every_op_that_a_chip_has_reaches_a_method_that_takes_its_arguments(arch: str, name: str) -> None:
    for step in OPS[name].steps:
        module, _, function = step.call.partition(".")
        adapter = importlib.import_module(CHIPS[arch].adapters[module]).Adapter
        method = getattr(adapter, function.replace(".", "__"))
        inspect.signature(method).bind(None, **{a.name: None for a in step.args})


# Facts of the chips, one each: (chip, op, variant, what else a problem says, whether it runs)
FACTS: list[tuple[str, str, dict[str, str], dict[str, Any], bool]] = [
    ("sm90", "deepgemm.fp8_gemm_nt", {"scales": "ue8m0"}, {}, False),
    ("sm90", "deepgemm.fp8_gemm_nt", {"scales": "fp32", "out": "bf16", "c": "none"}, {"recipe": None}, True),
    ("sm90", "deepgemm.fp8_gemm_nt", {"scales": "fp32", "out": "bf16", "c": "none"}, {"recipe": (1, 1, 128)}, False),
    ("sm90", "deepgemm.fp8_gemm_nt", {"scales": "fp32", "out": "bf16", "c": "apart"}, {}, False),
    ("sm90", "deepgemm.fp8_gemm_nt", {"scales": "fp32", "out": "fp32", "c": "apart"}, {"recipe": (1, 1, 128)}, True),
    ("sm90", "deepgemm.fp8_gemm_nt", {"scales": "fp32", "out": "fp32", "c": "apart"}, {"recipe": None}, False),
    ("sm90", "deepgemm.fp8_gemm_nt", {"scales": "fp32", "out": "fp32", "c": "none"}, {"recipe": (1, 1, 128)}, False),
    ("sm90", "deepgemm.fp8_gemm_nt", {"scales": "fp32", "out": "bf16", "c": "none"}, {"alpha": 0.5}, False),
    ("sm90", "deepgemm.fp8_gemm_nt", {"scales": "fp32", "a_major": "m", "b_major": "k"}, {}, False),
    ("sm90", "deepgemm.bf16_gemm_nt", {}, {"alpha": 0.5, "deterministic_algorithms": True}, False),
    ("sm90", "deepgemm.bf16_gemm_nt", {}, {"alpha": 0.5, "deterministic_algorithms": False}, True),
    ("sm90", "deepgemm.bf16_gemm_nt", {}, {"alpha": None, "deterministic_algorithms": True}, True),
    ("sm90", "deepgemm.m_grouped_bf16_gemm_nt_contiguous", {}, {"k": 72}, False),
    ("sm90", "deepgemm.m_grouped_bf16_gemm_nt_contiguous", {}, {"k": 128}, True),
    ("sm90", "flashmla.flash_mla_sparse_fwd", {}, {}, False),
    ("sm90", "deepselect.topk", {}, {}, False),
    ("sm90", "tilelang.gemm", {"dtype": "e4m3"}, {}, False),
    ("sm100", "deepgemm.fp8_gemm_nt", {"scales": "fp32"}, {}, False),
    ("sm100", "deepgemm.fp8_gemm_nt", {"scales": "ue8m0", "c": "row"}, {"alpha": 0.5}, True),
    ("sm100", "deepgemm.m_grouped_bf16_gemm_nt_contiguous", {"layout": "labels"}, {"k": 72}, True),
    ("sm100", "deepselect.topk", {"dtype": "fp32", "order": "value"}, {}, True),
    ("sm100", "flashmla.flash_mla_with_kvcache", {"h_q": "128", "extra": "fp4"}, {"s_q": 3, "page": 1}, True),
    ("sm100", "tilekernels.quant.per_token_cast", {"x": "e4m3", "num_per_channels": "128"}, {}, True),
    ("sm100", "tilekernels.quant.per_token_cast", {"x": "bf16", "num_per_channels": "16"}, {}, True),
    ("sm100", "tilelang.gemm", {"dtype": "e4m3"}, {}, True),
    ("ascend950", "deepgemm.bf16_gemm_nt", {"c": "aliased"}, {"alpha": 0.5}, True),
    ("ascend950", "deepgemm.bf16_gemm_nt", {"c": "apart"}, {}, False),
    ("ascend950", "deepgemm.fp8_gemm_nt", {"scales": "ue8m0", "c": "none"}, {"recipe": (1, 1, 32)}, True),
    ("ascend950", "deepgemm.fp8_gemm_nt", {"scales": "ue8m0", "c": "none"}, {"recipe": None}, False),
    ("ascend950", "deepgemm.fp8_gemm_nt", {"scales": "pow2", "c": "none"}, {"recipe": (1, 1, 128)}, False),
    ("ascend950", "deepgemm.m_grouped_bf16_gemm_nt_contiguous", {"layout": "labels"}, {}, False),
    ("ascend950", "deepgemm.m_grouped_bf16_gemm_nt_contiguous", {"layout": "psum"},
     {"mk_alignment_for_contiguous_layout": 128}, False),
    ("ascend950", "deepselect.topk", {"dtype": "fp32"}, {}, False),
    ("ascend950", "deepselect.topk", {"dtype": "bf16", "index": "int64"}, {}, False),
    ("ascend950", "deepselect.topk", {"dtype": "bf16", "index": "int32", "order": "index"}, {}, True),
    ("ascend950", "flashmla.flash_mla_with_kvcache", {"h_q": "64"}, {"s_q": 2, "page": 5}, False),
    ("ascend950", "flashmla.flash_mla_with_kvcache", {"h_q": "64", "extra": "none"},
     {"s_q": 1, "page": 5, "extra_page": 1}, True),
    ("ascend950", "flashmla.flash_mla_with_kvcache", {"h_q": "64", "extra": "fp8"},
     {"s_q": 1, "page": 5, "extra_page": 1}, False),
    ("ascend950", "flashmla.flash_mla_sparse_fwd", {"h_q": "128"}, {}, False),
    ("ascend950", "tilekernels.quant.per_token_cast", {"x": "bf16", "num_per_channels": "32", "scale": "packed"},
     {"h": 256}, True),
    ("ascend950", "tilekernels.quant.per_token_cast", {"x": "bf16", "num_per_channels": "32", "scale": "packed"},
     {"h": 192}, False),
    ("ascend950", "deepep.EPBuffer.dispatch", {"layout": "normal"}, {}, False),
    ("ascend950", "deepep.EPBuffer.combine", {"layout": "expanded", "reduction": "multiple"}, {}, True),
    ("ascend950", "tilelang.transpose", {}, {}, False),
    ("ascend950", "tilelang.gemm", {"dtype": "fp64"}, {}, False),
    ("ascend950", "tilelang.gemm", {"dtype": "bf16"}, {}, True),
    ("ascend950", "tilelang.elementwise", {"dtype": "bf16"}, {}, False),
]


@pytest.mark.parametrize(("arch", "name", "variant", "said", "runs"), FACTS)
def test_a_fact_of_a_chip(arch: str, name: str, variant: dict[str, str], said: dict[str, Any], runs: bool) -> None:
    op: Op = OPS[name]
    problem = Problem(name, matching(op, variant), {k: v for k, v in said.items() if k in op.sizes},
                      {k: v for k, v in said.items() if k not in op.sizes}, "normal", 1)
    support = support_of(described(arch), name)
    why = not support.supported or variant_limit(support, problem.variant) or problem_limit(support, problem)
    assert (not why) is runs, why


def test_scales_of_deepselect_and_of_its_strides_are_those_of_the_platform() -> None:
    assert described("sm100").requirements["input_row_bytes"] == 1024
    assert described("ascend950").requirements["input_row_bytes"] == 32


def test_hopper_and_ascend_compute_as_documented() -> None:
    assert described("sm90").profile["accumulator"] == "fp8_tc14_promoted"
    assert "accumulator" not in described("sm100").profile
    ascend = described("ascend950").profile
    assert (ascend["nan_sentinel"], ascend["nan_short_row"], ascend["kv_scale_clamp"]) == ("row", "checked", 0xE0)


def test_neither_is_forked_and_both_are_asked_first() -> None:
    for arch in CHIPS:
        assert (described(arch).fork_after_import, described(arch).ask_doctor) == (False, True)


def test_an_unknown_arch_or_release_is_refused_with_what_there_is() -> None:
    with pytest.raises(backends.BackendUnusable, match="there is a description of sm90, sm100"):
        backends.describe("nvidia", {"arch": "sm75"})
    with pytest.raises(backends.BackendUnusable, match=r"described for deepgemm 2\.8 and 2\.6"):
        backends.describe("nvidia", {"deepgemm": "2.4"})


@pytest.mark.parametrize("name", ["nvidia", "ascend"])
def test_describing_needs_no_framework(name: str) -> None:
    code = ("import sys; from conformance.backend_class import load_backend_class as load; "
            f"load({name!r}).describe({{}}); "
            "print([m for m in ('torch', 'torch_npu', 'tilelang') if m in sys.modules])")
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("arch", CHIPS)
def test_a_misuse_of_every_op_can_be_planted_in_a_problem_that_the_chip_takes(arch: str) -> None:
    d = described(arch)
    planted: dict[str, int] = {}
    for case in (c for c in all_cases() if c.check == "rejects"):
        support = support_of(d, case.op.name)
        if support.supported:
            def admits(p: Problem, case: Case = case, support: Support = support) -> bool:
                return not problem_limit(support, p, row_bytes_of(case.op, p, d.requirements))

            planted[case.op.name] = planted.get(case.op.name, 0) + admits(misuse.problem_of(case, 0, admits))
    assert planted
    assert {op: n for op, n in planted.items() if n < 2} == {}
