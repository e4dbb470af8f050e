"""Adapters of the public packages: which public function a call reaches, and with which arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.protocol import Group, ModuleUnusable
from tests import chip_fakes as fake

A, B, D, C = (object() for _ in range(4))


def reached(arch: str, op: str, kwargs: dict[str, Any], *modules: Any, r: fake.Recorder, **options: str) -> Any:
    with fake.installed(*modules):
        return fake.backend(arch, **options).run(op, kwargs)


@pytest.mark.parametrize(("op", "given", "expected"), [
    ("deepgemm.bf16_gemm_nt", dict(a=A, b=B, d=D, c=None, compiled_dims="mnk", alpha=None),
     dict(a=A, b=B, d=D, compiled_dims="mnk")),
    ("deepgemm.bf16_gemm_nt", dict(a=A, b=B, d=D, c=C, compiled_dims="", alpha=0.5),
     dict(a=A, b=B, d=D, c=C, compiled_dims="", alpha=0.5)),
    ("deepgemm.fp8_gemm_nt", dict(a=(A, B), b=(B, C), d=D, recipe=[1, 1, 128], recipe_a=None, compiled_dims="nk"),
     dict(a=(A, B), b=(B, C), d=D, recipe=(1, 1, 128), compiled_dims="nk", disable_ue8m0_cast=False)),
    ("deepgemm.fp8_gemm_nt", dict(a=(A, B), b=(B, C), d=D, recipe_a=[1, 32], recipe_b=[1, 32], alpha=-2.0),
     dict(a=(A, B), b=(B, C), d=D, recipe_a=(1, 32), recipe_b=(1, 32), compiled_dims="nk", disable_ue8m0_cast=False,
          alpha=-2.0)),
    ("deepgemm.m_grouped_bf16_gemm_nt_contiguous",
     dict(a=A, b=B, d=D, grouped_layout=C, use_psum_layout=True, ensure_zero_padding=False,
          expected_m_for_psum_layout=4096),
     dict(a=A, b=B, d=D, grouped_layout=C, compiled_dims="nk", use_psum_layout=True, ensure_zero_padding=False,
          expected_m_for_psum_layout=4096)),
    ("deepgemm.per_token_cast_to_fp8", dict(x=A, use_ue8m0=True, gran_k=32, use_packed_ue8m0=True),
     dict(x=A, use_ue8m0=True, gran_k=32, use_packed_ue8m0=True)),
])
def test_deepgemm(op: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    r = fake.Recorder()
    reached("sm100", op, given, fake.deep_gemm(r), r=r)
    assert r.calls == [(op.partition(".")[2], (), expected)]


def test_deepgemm_2_6_is_called_without_what_came_later() -> None:
    r = fake.Recorder()
    reached("sm100", "deepgemm.bf16_gemm_nt", dict(a=A, b=B, d=D, alpha=None), fake.deep_gemm(r, "2.6"), r=r,
            deepgemm="2.6")
    assert r.calls == [("bf16_gemm_nt", (), dict(a=A, b=B, d=D, compiled_dims="nk"))]


def test_deepgemm_on_ascend_takes_two_exponents_a_word() -> None:
    r, rows, groups = fake.Recorder(), 3, 9  # 288 columns: 9 groups of 32, so 3 words of four, 5 of two
    data = torch.zeros((rows, 288), dtype=torch.uint8).view(torch.float8_e4m3fn)
    exponents = torch.arange(rows * 12, dtype=torch.uint8).reshape(rows, 12)
    words = exponents.view(torch.int32)
    columns = words.t().contiguous().t()
    assert columns.stride() == (1, 3)
    reached("ascend950", "deepgemm.fp8_gemm_nt", dict(a=(data, words), b=(data, columns), d=D, recipe=[1, 1, 32]),
            fake.deep_gemm(r, "ascend-0.1"), r=r)
    (_, _, got), = r.calls
    for operand in ("a", "b"):
        scales = got[operand][1]
        assert (scales.dtype, tuple(scales.shape)) == (torch.int16, (rows, -(-groups // 2)))
        assert scales.contiguous().view(torch.uint8).tolist() == exponents[:, :10].tolist()
    assert got["a"][0] is data
    assert got["recipe"] == (1, 1, 32)


def test_fp32_scales_stay_what_they_are_on_ascend() -> None:
    r, scales = fake.Recorder(), torch.ones((3, 9))
    data = torch.zeros((3, 288), dtype=torch.uint8).view(torch.float8_e4m3fn)
    reached("ascend950", "deepgemm.fp8_gemm_nt", dict(a=(data, scales), b=(data, scales), d=D, recipe=[1, 1, 32]),
            fake.deep_gemm(r, "ascend-0.1"), r=r)
    assert r.calls[0][2]["a"][1] is scales


def test_deepgemm_settings_are_read_from_the_package_and_written_to_it() -> None:
    r = fake.Recorder()
    with fake.installed(fake.deep_gemm(r)):
        backend = fake.backend("sm90")
        assert backend.get_settings("deepgemm") == {"mk_alignment_for_contiguous_layout": 128,
                                                    "deterministic_algorithms": False}
        backend.set_settings("deepgemm", {"mk_alignment_for_contiguous_layout": 256, "deterministic_algorithms": True})
        assert backend.get_settings("deepgemm") == {"mk_alignment_for_contiguous_layout": 256,
                                                    "deterministic_algorithms": True}
        with pytest.raises(ValueError, match="no setting 'num_warps'"):
            backend.set_settings("deepgemm", {"num_warps": 4})
    assert r.calls == [("use_deterministic_algorithms", (True,), {})]


def test_deepselect() -> None:
    r = fake.Recorder()
    given = dict(input=A, topk=8, sorted=True, sorted_index=False, return_value=True, indices_type=torch.int32,
                 abort_when_nan_found=False, idx_oob_fill_value=0, value_oob_fill_value=0.1, end=B)
    got = reached("sm100", "deepselect.topk", given, fake.deep_select(r), r=r)
    rest = {k: v for k, v in given.items() if k not in ("input", "topk")}
    assert r.calls == [("topk", (A, 8), rest)]
    assert got == ("values", "indices")
    assert reached("sm100", "deepselect.get_stride_requirement", {}, fake.deep_select(r), r=r) == (1024, 32)


def test_flashmla() -> None:
    r, meta = fake.Recorder(), object()
    lib = fake.flash_mla(r)
    reached("sm100", "flashmla.get_mla_metadata", dict(cache_seqlens=A, num_heads_k=1), lib, r=r)
    reached("sm100", "flashmla.flash_mla_with_kvcache",
            dict(q=A, k_cache=B, block_table=None, cache_seqlens=None, head_dim_v=512, tile_scheduler_metadata=meta,
                 softmax_scale=None, indices=C, extra_k_cache=D, extra_indices_in_kvcache=C, extra_topk_length=A,
                 enable_batch_invariant=True), lib, r=r)
    reached("sm100", "flashmla.flash_mla_sparse_fwd", dict(q=A, kv=B, indices=C, sm_scale=0.5, topk_length=D), lib, r=r)
    assert r.calls == [
        ("get_mla_metadata", (), dict(cache_seqlens=A, num_heads_k=1)),
        ("flash_mla_with_kvcache", (A, B, None, None, 512, meta),
         dict(indices=C, extra_k_cache=D, extra_indices_in_kvcache=C, extra_topk_length=A,
              enable_batch_invariant=True)),
        ("flash_mla_sparse_fwd", (A, B, C, 0.5), dict(topk_length=D)),
    ]


@pytest.mark.parametrize(("op", "given", "call"), [
    ("moe.topk_gate", dict(scores=A, num_topk=6), ("moe.topk_gate", (A, 6), {})),
    ("quant.norm_forward", dict(x=A, weight=None, eps=0.5, residual=B, out_scale=1.1, residual_out=C, with_rstd=True),
     ("quant.norm_forward", (A, None, 0.5), dict(residual=B, out_scale=1.1, residual_out=C, with_rstd=True))),
    ("transform.apply_rotary", dict(query=A, cos_sin_cache=B, key=C, interleaved=True, conjugate=False,
                                      seqlen_offset=3),
     ("transform.apply_rotary", (A, B), dict(key=C, interleaved=True, conjugate=False, seqlen_offset=3))),
    ("engram.engram_sinkhorn_momentum_update", dict(grad=A, momentum_buffer=B, beta1=0.9, nesterov=False),
     ("engram.engram_sinkhorn_momentum_update", (A, B, 0.9), dict(nesterov=False))),
    ("engram.engram_sinkhorn_step", dict(matrix=A, row_scale=B, col_scale=C, eps=1e-8),
     ("engram.engram_sinkhorn_step", (A, B, C, 1e-8), {})),
    ("engram.engram_sinkhorn_step_reduce", dict(col_sumsq_partial=A, col_sumsq=B),
     ("engram.engram_sinkhorn_step_reduce", (A, B), {})),
    ("quant.per_token_cast", dict(x=A, fmt="e4m3", num_per_channels=128, round_sf=True, use_packed_ue8m0=True,
                                  out=(B, C)),
     ("quant.per_token_cast", (A, "e4m3", 128),
      dict(use_tma_aligned_col_major_sf=False, round_sf=True, use_packed_ue8m0=True, out=(B, C)))),
])
def test_tilekernels(op: str, given: dict[str, Any], call: tuple[Any, ...]) -> None:
    r = fake.Recorder()
    reached("sm90", f"tilekernels.{op}", given, *fake.tile_kernels(r), r=r)
    assert r.calls == [call]


def test_tilekernels_1_0_is_called_without_what_came_later() -> None:
    r = fake.Recorder()
    given = dict(x=A, fmt="e4m3", num_per_channels=128, round_sf=False, use_packed_ue8m0=False, use_e4m3_sf=False)
    reached("sm90", "tilekernels.quant.per_token_cast", given, *fake.tile_kernels(r, "1.0"), r=r, tilekernels="1.0")
    assert r.calls == [("quant.per_token_cast", (A, "e4m3", 128), dict(
        use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False))]


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("groups", [4, 5, 6, 7])
def test_packed_scales_of_tilekernels_on_ascend_come_back_four_to_a_word(groups: int, column_major: bool) -> None:
    t, words = 5, -(-groups // 2)
    exponents = torch.arange(1, 1 + t * 2 * words, dtype=torch.uint8).reshape(t, 2 * words)
    sf = exponents.view(torch.int16)
    sf = sf.t().contiguous().t() if column_major else sf
    r = fake.Recorder()
    x = torch.zeros((t, 32 * groups), dtype=torch.bfloat16)
    data, got = reached(
        "ascend950", "tilekernels.quant.per_token_cast",
        dict(x=x, fmt="e4m3", num_per_channels=32, round_sf=True, use_packed_ue8m0=True,
             use_tma_aligned_col_major_sf=column_major), *fake.tile_kernels(r, cast=("data", sf)), r=r)
    assert data == "data"
    assert got.dtype == torch.int32
    assert got.stride() == ((1, t) if column_major else (-(-groups // 4), 1))
    back = got.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).view(t, -1)[:, :groups]
    assert back.tolist() == exponents[:, :groups].tolist()


def test_given_packed_scales_on_ascend_are_written_in_place() -> None:
    t, groups = 3, 6
    sf = torch.full((t, 5), -1, dtype=torch.int32)[:, :2]  # padded rows
    out = torch.empty((t, 192), dtype=torch.uint8), sf

    def cast(x: Any, *args: Any, out: Any, **kwargs: Any) -> Any:
        assert out[1].dtype == torch.int16
        assert tuple(out[1].shape) == (t, 3)
        out[1].copy_(torch.tensor([[0x0201, 0x0403, 0x0605]], dtype=torch.int16).expand(t, 3))
        return out

    r = fake.Recorder()
    got = reached("ascend950", "tilekernels.quant.per_token_cast",
                  dict(x=torch.zeros((t, 32 * groups)), fmt="e4m3", num_per_channels=32, round_sf=True,
                       use_packed_ue8m0=True, out=out), *fake.tile_kernels(r, cast=cast), r=r)
    assert got[1] is sf
    assert sf.contiguous().view(torch.uint8)[0, :groups].tolist() == [1, 2, 3, 4, 5, 6]


def test_scales_of_an_input_on_ascend_go_two_to_a_word() -> None:
    t = 2
    exponents = torch.arange(t * 4, dtype=torch.uint8).reshape(t, 4)
    codes = torch.zeros((t, 64), dtype=torch.int8)  # 128 columns of FP4, four groups of 32
    r = fake.Recorder()
    reached("ascend950", "tilekernels.quant.per_token_cast",
            dict(x=(codes, exponents.view(torch.int32)), fmt="e4m3", num_per_channels=32, x_block_size=[1, 32]),
            *fake.tile_kernels(r), r=r)
    (_, (x, _, _), kwargs), = r.calls
    assert x[0] is codes
    assert kwargs["x_block_size"] == (1, 32)
    assert tuple(x[1].shape) == (t, 2)
    assert x[1].contiguous().view(torch.uint8).tolist() == exponents.tolist()


def test_deepep_calls_methods_of_the_object_with_the_group_of_the_backend(tmp_path: Any) -> None:
    r = fake.Recorder()
    group = Group(0, 1, 0, 0, str(tmp_path / "meet"), 0, 20.0)
    with fake.installed(fake.deep_ep(r)):
        backend = fake.backend("sm90", group)
        try:
            buffer = backend.run("deepep.EPBuffer", dict(num_max_tokens_per_rank=8, hidden=64, num_topk=2,
                                                         deterministic=True))
            world = backend.adapter("deepep").group()
            got = backend.run("deepep.EPBuffer.dispatch", dict(
                buffer=buffer, x=A, topk_idx=B, topk_weights=C, num_experts=4, do_cpu_sync=False, do_expand=True))
            backend.run("deepep.EPBuffer.combine", dict(buffer=buffer, x=A, handle="handle", bias=(B, C)))
            pipe = backend.run("deepep.PPBuffer", dict(num_max_tensor_bytes=64, num_max_inflight_tensors=2))
            backend.run("deepep.PPBuffer.send", dict(buffer=pipe, x=A, dst_rank_idx=1))
            backend.run("deepep.PPBuffer.recv", dict(buffer=pipe, x=B, src_rank_idx=3))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    assert got == ("x", "idx", "w", "handle", "event")
    assert r.calls == [
        ("EPBuffer", (world,), dict(num_max_tokens_per_rank=8, hidden=64, num_topk=2, deterministic=True,
                                    num_cpu_timeout_secs=10, num_gpu_timeout_secs=10)),
        ("dispatch", (buffer, A), dict(topk_idx=B, topk_weights=C, num_experts=4, do_cpu_sync=False, do_expand=True)),
        ("combine", (buffer, A, "handle"), dict(bias=(B, C))),
        ("PPBuffer", (world, 64, 2), dict(num_gpu_timeout_secs=10)),
        ("send", (pipe, A, 1), {}),
        ("recv", (pipe, B, 3), {}),
    ]


def test_what_a_handle_holds_is_read_as_tensors() -> None:
    r, prefix = fake.Recorder(), torch.tensor([1, 3], dtype=torch.int32)
    handle = SimpleNamespace(psum=prefix, per_expert=[4, 0, 8], num_sms=7)
    with fake.installed(fake.deep_ep(r)):
        names = ["psum", "per_expert", "num_sms"]
        got = fake.backend("sm90").run("deepep.EPHandle.read", dict(handle=handle, names=names))
    assert got[0] is prefix
    assert [(t.dtype, t.tolist()) for t in got[1:]] == [(torch.int32, [4, 0, 8]), (torch.int32, [7])]


def test_a_wait_gives_what_the_event_gives() -> None:
    with fake.installed(fake.deep_ep(fake.Recorder())):
        event = SimpleNamespace(wait=lambda: ("x", None))
        assert fake.backend("sm90").run("deepep.EventOverlap.wait", dict(event=event)) == ("x", None)


def test_programs_come_in_the_text_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, Any]] = []

    def compile(program: Any, **kwargs: Any) -> Any:
        compiled.append((str(program), kwargs["target"]))
        return lambda *tensors: None

    monkeypatch.setattr("tilelang.compile", compile)
    x = torch.zeros(300)
    for arch in ("sm90", "ascend950"):
        fake.backend(arch).run("tilelang.gather", dict(x=x, index=torch.zeros(8, dtype=torch.int64), out=x[:8]))
    (cuda, first), (ascend, second) = compiled
    assert (first, second) == ("cuda", "ascend")
    assert "SimtVF" not in cuda
    assert cuda != ascend


def test_a_target_that_no_program_is_written_for_is_refused() -> None:
    backend = fake.backend("sm90")
    backend.tilelang_target = "pto"
    with pytest.raises(ModuleUnusable, match="not written for this: unknown target 'pto'"):
        backend.adapter("tilelang")
