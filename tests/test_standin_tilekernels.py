"""The stand-in of tile_kernels against its contract; sections of the dossier on TileKernels in each row."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.standin_tools import BF16, FP8, FP16, I16, I32, accepted, refused, standing_in, traps

NAME = "tile_kernels"
SCORES = torch.tensor([[0.5, 2.0, 2.0, -1.0]])


def rope(p, *, query=None, cache=None, **more):
    query = torch.ones(2, 1, 64) if query is None else query
    cache = torch.cat([torch.zeros(8, 32), torch.ones(8, 32)], 1) if cache is None else cache
    p.transform.apply_rotary(query, cache, **more)
    return query


REFUSED = [
    # section, architecture, call, exception
    ("2.1", "sm100", lambda p: p.moe.topk_gate(SCORES, 5), AssertionError),
    ("2.1", "sm100", lambda p: p.moe.topk_gate(torch.zeros(1, 40), 33), AssertionError),
    ("2.1", "sm100", lambda p: p.moe.topk_gate(SCORES.to(BF16), 2), AssertionError),
    ("2.1", "sm100", lambda p: p.moe.topk_gate(torch.zeros(4, 8)[:, ::2], 2), AssertionError),
    ("2.1", "sm100", lambda p: p.moe.topk_gate(SCORES, topk=2), TypeError),  # it is called num_topk
    ("1", "sm100", lambda p: p.moe.top2_sum_gate(), AttributeError),  # of 1.0.0
    ("2.2", "sm100", lambda p: p.quant.per_token_cast(torch.ones(1, 64), "e5m6", 32), AssertionError),
    ("2.2", "sm100", lambda p: p.quant.per_token_cast(torch.ones(1, 64), "e4m3", 48), AssertionError),
    ("2.2", "sm100", lambda p: p.quant.per_token_cast(torch.ones(1, 96), "e4m3", 32), AssertionError),
    ("2.2", "sm100", lambda p: p.quant.per_token_cast(torch.ones(1, 64, dtype=FP16), "e4m3", 32), AssertionError),
    ("3.1", "sm100", lambda p: p.quant.per_token_cast(torch.ones(1, 64), "e4m3", 32, use_packed_ue8m0=True),
     AssertionError),
    ("3.1", "sm100", lambda p: p.quant.per_token_cast(torch.ones(1, 64), "e4m3", 32, round_sf=True, use_e4m3_sf=True),
     AssertionError),
    ("2.2", "sm100", lambda p: p.quant.per_token_cast(
        (torch.ones(1, 64).to(FP8), torch.ones(1, 2)), "e4m3", 16, x_block_size=(1, 32)), AssertionError),
    ("2.2", "sm100", lambda p: p.quant.per_token_cast(
        (torch.ones(1, 64).to(FP8), torch.ones(1, 2)), "e4m3", 32), AssertionError),
    ("3.1", "sm100", lambda p: p.quant.per_token_cast(
        (torch.ones(1, 64).to(FP8), torch.ones(1, 1, dtype=I16)), "e4m3", 32, x_block_size=(1, 32)), AssertionError),
    ("3.1", "ascend950", lambda p: p.quant.per_token_cast(
        (torch.ones(1, 128).to(FP8), torch.ones(1, 1, dtype=I32)), "e4m3", 32, x_block_size=(1, 32)), AssertionError),
    ("2.2", "ascend950", lambda p: p.quant.per_token_cast(torch.ones(1, 128), "e4m3", 128), AssertionError),
    ("2.2", "ascend950", lambda p: p.quant.per_token_cast(torch.ones(1, 64), "e4m3", 32), AssertionError),
    ("2.2", "ascend950", lambda p: p.quant.per_token_cast(torch.ones(1, 128), "e4m3", 32, use_e4m3_sf=True),
     AssertionError),
    ("2.2", "sm90", lambda p: p.quant.per_token_cast(torch.ones(1, 64), "e4m3", 32, stochastic_cast=True),
     RuntimeError),
    ("2.2", "sm100", lambda p: p.quant.norm_forward(torch.ones(1, 24), None, 1e-6), AssertionError),  # H % 16
    ("2.2", "sm100", lambda p: p.quant.norm_forward(torch.ones(1, 8208), None, 1e-6), AssertionError),
    ("2.2", "sm100", lambda p: p.quant.norm_forward(torch.ones(2, 24)[:, :16], None, 1e-6), AssertionError),
    ("2.2", "sm100", lambda p: p.quant.norm_forward(torch.ones(1, 16), torch.ones(16, dtype=BF16), 1e-6),
     AssertionError),
    ("2.3", "sm100", lambda p: p.engram.engram_sinkhorn_momentum_update(torch.ones(128), torch.ones(128), 0.9),
     AssertionError),
    ("2.3", "sm100", lambda p: p.engram.engram_sinkhorn_step(torch.ones(1, 128), torch.ones(1), torch.ones(128), 1e-8),
     AssertionError),
    ("2.5", "sm100", lambda p: rope(p, query=torch.ones(2, 1, 32), cache=torch.ones(8, 32)), AssertionError),
    ("2.5", "sm100", lambda p: rope(p, positions=torch.zeros(2)), AssertionError),
    ("2.5", "sm100", lambda p: rope(p, query=torch.ones(2, 1, 64, dtype=FP16)), AssertionError),
    ("2.5", "sm100", lambda p: rope(p, key=torch.ones(1, 2, 1, 64)), AssertionError),
    ("1", "sm100", lambda p: p.set_num_sms(0), AssertionError),
]


@pytest.mark.parametrize(("section", "arch", "call", "error"), REFUSED)
def test_refused(section, arch, call, error):
    refused(arch, NAME, call, error)


def test_equal_scores_go_to_the_smaller_index():  # 3.4
    assert accepted("sm100", NAME, lambda p: p.moe.topk_gate(SCORES, 3)).tolist() == [[1, 2, 0]]


def test_a_score_that_is_not_finite_traps():  # 2.1
    traps("sm100", NAME, lambda p: p.moe.topk_gate(torch.full((1, 4), torch.nan), 2), "not finite")


def test_packed_scales_are_four_in_int32_on_cuda_and_two_in_int16_on_ascend():  # 3.1
    call = lambda p: p.quant.per_token_cast(  # noqa: E731
        torch.full((3, 128), 448.0), "e4m3", 32, round_sf=True, use_packed_ue8m0=True)[1]
    cuda, ascend = accepted("sm100", NAME, call), accepted("ascend950", NAME, call)
    assert (cuda.dtype, tuple(cuda.shape)) == (I32, (3, 1))
    assert (ascend.dtype, tuple(ascend.shape)) == (I16, (3, 2))
    assert (cuda == 0x7F7F7F7F).all()
    assert (ascend == 0x7F7F).all()


def test_columns_of_scales_are_aligned_to_16_bytes_on_cuda_only():  # 3.1
    call = lambda p: p.quant.per_token_cast(  # noqa: E731
        torch.ones(3, 128), "e4m3", 32, use_tma_aligned_col_major_sf=True)[1]
    assert accepted("sm100", NAME, call).stride() == (1, 4)
    assert accepted("ascend950", NAME, call).stride() == (1, 3)


def test_the_smallest_amax_is_a_setting():  # 1
    def call(p):
        p.set_amax_clamp_for_quant("e4m3", False, 448.0)
        return p.quant.per_token_cast(torch.ones(1, 128), "e4m3", 32)[1]

    assert (accepted("sm100", NAME, call) == 1).all()
    assert accepted("sm100", NAME, lambda p: p.get_amax_clamp_for_quant("e4m3", False)) == 1e-4


def test_platform_is_told_by_config():  # 1
    for arch, device in (("sm90", "cuda"), ("ascend950", "npu")):
        with standing_in(arch, NAME):
            config = importlib.import_module("tile_kernels.config")
            assert config.get_device() == device
            assert config.is_ascend() is (device == "npu")


def test_partial_sums_are_as_many_as_the_chip_has_cores():  # 2.3
    call = lambda p: p.engram.engram_sinkhorn_step(  # noqa: E731
        torch.ones(2, 256), torch.ones(2), torch.ones(256), 0.0)[1]
    for arch, rows in (("sm90", 3 * 132), ("ascend950", 64)):
        partial = accepted(arch, NAME, call)
        assert partial.shape == (rows, 256)
        assert partial.sum(0)[0].item() == pytest.approx(2 / 256, rel=1e-6)


def test_momentum_moves_on_in_place():  # 3.5
    def call(p):
        momentum = torch.ones(256)
        return p.engram.engram_sinkhorn_momentum_update(torch.zeros(256), momentum, 0.5), momentum

    update, momentum = accepted("sm100", NAME, call)
    assert (momentum == 0.5).all()
    assert (update == 0.25).all()  # nesterov


def test_norm_input_is_x_without_a_residual():  # 3.3
    x = torch.full((1, 16), 2.0)
    out, rstd, norm_input = accepted("sm100", NAME, lambda p: p.quant.norm_forward(x, None, 0.0, with_rstd=True))
    assert norm_input is x
    assert rstd.item() == 0.5
    assert (out == 1).all()


def test_rotation_by_a_quarter():  # 3.7: cos 0, sin 1; halves are paired
    query = accepted("sm100", NAME, rope)
    assert (query[..., :32] == -1).all()
    assert (query[..., 32:] == 1).all()


def test_a_position_outside_the_table_faults():
    traps("sm100", NAME, lambda p: rope(p, seqlen_offset=7), "illegal memory access")


def test_batch_strides_are_multiples_of_8_on_cuda():  # 2.5
    query = torch.ones(2 * 68 * 2).as_strided((2, 1, 1, 64), (68, 64, 64, 1))
    refused("sm100", NAME, lambda p: rope(p, query=query), AssertionError)
    accepted("ascend950", NAME, lambda p: rope(p, query=query))
