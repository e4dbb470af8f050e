"""Rehearsals: right adapters pass on three chips; each of the planted mistakes is found, by the sign that is named."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from conformance.collect import UsageError, ops
from conformance.engine.effort import EFFORTS
from conformance.model import Case
from conformance.rehearse import Rehearsal, class_of, covering, open_rehearsal, wrong_calls
from tests.mistaken_backend import CALLS, OWN

BACKENDS = {"sm90": "MistakenSM90", "sm100": "MistakenSM100", "ascend950": "MistakenAscend950"}
BY_NAME = {op.name: op for op in ops()}


@pytest.fixture(scope="module")
def rehearsals() -> Any:
    """Rehearsals by architecture, each started once."""
    made: dict[str, Rehearsal] = {}
    with ExitStack() as stack:
        def get(arch: str) -> Rehearsal:
            if arch not in made:
                path = f"tests.mistaken_backend:{BACKENDS[arch]}"
                made[arch] = stack.enter_context(open_rehearsal(path, examples=1))
            return made[arch]

        yield get


@dataclass(frozen=True)
class Planted:
    """A mistake, where it is tried, and a part of the sentence that must tell it (or one of two, with | between)."""

    mistake: str
    op: str
    told: str
    arch: str = "sm100"
    variant: tuple[tuple[str, str], ...] = ()
    most: int = 2
    examples: int = 1


def on(mistake: str, op: str, told: str, arch: str = "sm100", most: int = 2, examples: int = 1,
       **variant: str) -> Planted:
    return Planted(mistake, op, told, arch, tuple(variant.items()), most, examples)


TOPK, GEMM, FP8 = "deepselect.topk", "deepgemm.bf16_gemm_nt", "deepgemm.fp8_gemm_nt"
GROUPED, CAST8 = "deepgemm.m_grouped_bf16_gemm_nt_contiguous", "deepgemm.per_token_cast_to_fp8"
DECODE, PREFILL, METADATA = (f"flashmla.{n}" for n in (
    "flash_mla_with_kvcache", "flash_mla_sparse_fwd", "get_mla_metadata"))
CAST, NORM = "tilekernels.quant.per_token_cast", "tilekernels.quant.norm_forward"
ROPE, GATE = "tilekernels.transform.apply_rotary", "tilekernels.moe.topk_gate"
MOMENTUM = "tilekernels.engram.engram_sinkhorn_momentum_update"
DISPATCH, COMBINE, PIPE = "deepep.EPBuffer.dispatch", "deepep.EPBuffer.combine", "deepep.PPBuffer.recv"

PLANTED = [
    on("topk_renamed", TOPK, "unexpected keyword argument 'sort_index'"),
    on("topk_offset_dropped", TOPK, "fail", offset="yes"),
    on("topk_end_int64", TOPK, "int64", end="yes"),
    on("topk_input_copied", TOPK, "input", most=6),
    on("topk_index_type_dropped", TOPK, "fail", index="int32"),
    on("topk_index_type_dropped", TOPK, "indices_type", arch="ascend950"),
    on("topk_output_fresh", TOPK, "fail", output_idx="caller"),
    on("topk_results_swapped", TOPK, "fail", values="yes"),
    on("topk_fill_dropped", TOPK, "fail", end="yes"),
    on("gemm_operands_swapped", GEMM, "fail"),
    on("gemm_c_dropped", GEMM, "fail", c="apart"),
    on("gemm_hint_dropped", GEMM, "compiled_dims was changed", most=6),
    on("gemm_wrong_function", GEMM, "also reached deep_gemm.bf16_gemm_nn", c="none"),
    on("gemm_alpha_renamed", GEMM, "incompatible function arguments", most=6),
    on("gemm_called_twice", GEMM, "2 times, not once", c="none"),
    on("fp8_scales_swapped", FP8, "fail", scales="pow2"),
    on("fp8_recipe_dropped", FP8, "fail", arch="sm90", out="fp32"),
    on("fp8_scales_row_major", FP8, "fail", examples=6, scales="ue8m0"),
    on("fp8_scales_left_in_int32", FP8, "Unsupported", arch="ascend950", scales="ue8m0"),
    on("grouped_layout_int64", GROUPED, "int64"),
    on("grouped_psum_dropped", GROUPED, "fail", layout="psum"),
    on("grouped_expected_m_dropped", GROUPED, "expected_m_for_psum_layout was changed", layout="psum", examples=6),
    on("grouped_alignment_not_set", GROUPED, "setting mk_alignment_for_contiguous_layout is 128", examples=6),
    on("settings_not_set", GEMM, "setting deterministic_algorithms is False", examples=6),
    on("cast_gran_k_dropped", CAST8, "fail", most=6),
    on("decode_lengths_swapped", DECODE, "fail", extra="fp8", topk_length="yes"),
    on("decode_old_num_splits", DECODE, "num_splits must be None"),
    on("decode_sink_dropped", DECODE, "fail", attn_sink="yes"),
    on("decode_invariance_dropped", DECODE, "enable_batch_invariant was changed", split="never"),
    on("decode_lse_in_base_2", DECODE, "softmax_lse", attn_sink="no"),
    on("metadata_kept", METADATA, "0 times, not once|metadata was made for"),
    on("prefill_scale_renamed", PREFILL, "sm_scale", h_q="64"),
    on("prefill_indices_int64", PREFILL, "int64", h_q="64"),
    on("prefill_results_reordered", PREFILL, "fail", h_q="64"),
    on("cast_round_dropped", CAST, "fail", scale="packed"),
    on("cast_columns_dropped", CAST, "fail", sf_order="column"),
    on("norm_residuals_swapped", NORM, "fail", residual_out="caller"),
    on("norm_scale_dropped", NORM, "fail", most=4),
    on("rope_key_dropped", ROPE, "fail", key="yes"),
    on("rope_positions_int32", ROPE, "positions was given another dtype", positions="int64"),
    on("rope_offset_dropped", ROPE, "fail", most=6),
    on("momentum_nesterov_dropped", MOMENTUM, "fail", nesterov="no"),
    on("momentum_not_in_place", MOMENTUM, "fail"),
    on("gate_renamed", GATE, "missing a required argument: 'num_topk'"),
    on("dispatch_not_waited_for", DISPATCH, "async_with_compute_stream=True was added", epilogue="inline", cached="no"),
    on("dispatch_stale_handle", COMBINE, "fail", rows="given", most=1),
    on("combine_biases_in_a_list", COMBINE, "fail", bias="two", most=1),
    on("combine_weights_dropped", COMBINE, "fail", weights="yes", most=1),
    on("pipe_sends_a_copy", PIPE, "x was copied", most=1),
    on("pipe_wrong_peer", PIPE, "fail", most=1),
    on("synchronize_missing", GEMM, "fail", c="none"),
    on("view_loses_strides", TOPK, "fail", most=6),
]


def cases_for(rehearsal: Rehearsal, p: Planted) -> list[Case]:
    legal = rehearsal.cases_of(BY_NAME[p.op], ("values",))
    found = covering([c for c in legal if set(p.variant) <= set(dict(c.variant).items())], p.most)
    assert found, p
    return found


def is_told(p: Planted, findings: Iterable[str]) -> bool:
    return any(part in sentence for sentence in findings for part in p.told.split("|"))


RIGHT: dict[tuple[str, str], bool] = {}
"""(architecture, case) -> whether the right adapter passes it; each is tried once"""


@pytest.mark.parametrize("p", PLANTED, ids=lambda p: f"{p.mistake}-{p.arch}")
def test_a_planted_mistake_is_told_and_the_right_adapter_is_not(rehearsals, p):
    rehearsal, op, findings = rehearsals(p.arch), BY_NAME[p.op], {}
    cases = cases_for(rehearsal, p)
    rehearsal.config.effort = EFFORTS["core"].with_examples(p.examples)
    rehearsal.with_options({"mistake": p.mistake})
    for case in cases:
        findings |= rehearsal.of(op, [case]).findings
        if is_told(p, findings):
            break
    assert is_told(p, findings), findings
    rehearsal.with_options({})
    if (p.arch, case.id) not in RIGHT:
        found = rehearsal.of(op, [case])
        assert found.right, found.findings
        assert found.calls
        RIGHT[p.arch, case.id] = True


def test_every_mistake_is_planted():
    assert {p.mistake for p in PLANTED} == {*CALLS, *OWN}
    assert len({p.mistake for p in PLANTED}) >= 20


def test_names_that_nothing_stands_in_for():
    with pytest.raises(UsageError, match="rehearsal of backend"):
        class_of("nvdia")
    with pytest.raises(UsageError, match="architecture"):
        class_of("nvidia", "sm80")
    assert class_of("nvidia", "sm90").endswith("RehearsedSM90")
    assert class_of("nvidia") == class_of("nvidia", "sm100")


def call(**args: Any) -> dict[str, Any]:
    return {"name": "deep_select.topk", "args": args, "helper": False, "other": [], "state": {}}


def array(**kw: Any) -> dict[str, Any]:
    return {"dtype": "int32", "shape": [2], "stride": [1], "at": 7, **kw}


@pytest.mark.parametrize(("got", "told"), [
    (array(), ""), (array(at=8), "copied"), (array(dtype="int64"), "another dtype"),
    (array(stride=[2]), "another stride"), (array(shape=[3]), "another shape"), (None, "replaced"),
])
def test_what_is_said_of_a_tensor(got, told):
    asked = {"name": "deepselect.topk", "args": {"end": array()}}
    said = list(wrong_calls(asked, [call(end=got)], {}, {}))
    assert [told in s for s in said] == ([True] if told else [])
    allowed = {("deepselect.topk", "end", told if told in ("copied", "replaced") else f"given {told}"): "a reason"}
    assert not list(wrong_calls(asked, [call(end=got)], {}, allowed))


def test_a_call_too_many_and_one_too_few():
    asked = {"name": "deepselect.topk", "args": {}}
    other = {**call(), "name": "deep_select.other"}
    assert list(wrong_calls(asked, [call(), other], {}, {})) == ["deepselect.topk also reached deep_select.other"]
    assert not list(wrong_calls(asked, [call(), {**other, "helper": True}], {}, {}))
    assert list(wrong_calls(asked, [], {}, {})) == ["deepselect.topk reached deep_select.topk 0 times, not once"]
