"""The stand-in of flash_mla against its contract; sections of the dossier on FlashMLA in each row."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from tests.standin_tools import BF16, FP16, FP32, I32, I64, accepted, aligned, refused, standing_in, traps

NAME = "flash_mla"


def prefill(p, *, s_q=1, h_q=64, topk=128, s_kv=8, q_dtype=BF16, index_dtype=I32, d=512, kv_pitch=512, **more):
    q = aligned((s_q, h_q, d), q_dtype)
    kv = aligned((s_kv, d), BF16, pitch=kv_pitch).unsqueeze(1)
    kv.fill_(1.0)
    indices = torch.full((s_q * topk + 8,), -1, dtype=index_dtype)
    indices = indices[-indices.data_ptr() % 32 // index_dtype.itemsize:][: s_q * topk].reshape(s_q, 1, topk)
    indices[..., :4] = torch.arange(4)
    given = {"sm_scale": 0.5, **more}
    return p.flash_mla_sparse_fwd(q, kv, indices, **given)


def decode(p, *, b=1, s_q=1, h_q=64, topk=64, pages=2, page=2, width=528, index_dtype=I32, slot=1, meta=None, **more):
    q = aligned((b, s_q, h_q, 512), BF16)
    cache = aligned((pages, page, 1, width), torch.uint8)
    cache[..., 512:] = 127
    cache[..., :512] = 0x38  # 1.0 as e4m3
    indices = torch.full((b * s_q * topk + 8,), -1, dtype=index_dtype)
    indices = indices[-indices.data_ptr() % 32 // index_dtype.itemsize:][: b * s_q * topk].reshape(b, s_q, topk)
    indices[..., 0] = slot
    meta = p.get_mla_metadata()[0] if meta is None else meta
    given = {"q": q, "k_cache": cache, "block_table": None, "cache_seqlens": None, "head_dim_v": 512,
             "tile_scheduler_metadata": meta, "indices": indices, **more}
    return p.flash_mla_with_kvcache(**given)


REFUSED = [
    # section, architecture, call, exception
    ("2.2", "sm90", decode, RuntimeError),  # compute capability 10 only
    ("2.2", "sm90", prefill, RuntimeError),
    ("2.3", "sm100", lambda p: prefill(p, softmax_scale=0.5), TypeError),  # it is called sm_scale here
    ("2.3", "sm100", lambda p: prefill(p, q_dtype=FP16), RuntimeError),
    ("2.3", "sm100", lambda p: prefill(p, index_dtype=I64), RuntimeError),
    ("2.3", "sm100", lambda p: prefill(p, topk=64), RuntimeError),  # 128 at least with 64 heads
    ("2.3", "sm100", lambda p: prefill(p, h_q=128, topk=1344), RuntimeError),  # whole 128s above 1280
    ("2.3", "sm100", lambda p: prefill(p, h_q=32), RuntimeError),
    ("2.3", "sm100", lambda p: prefill(p, d_v=256), RuntimeError),
    ("2.3", "sm100", lambda p: prefill(p, attn_sink=torch.zeros(64, dtype=BF16)), RuntimeError),
    ("2.3", "sm100", lambda p: prefill(p, topk_length=torch.zeros(1, dtype=I64)), RuntimeError),
    ("2.3", "ascend950", lambda p: prefill(p, h_q=128), RuntimeError),
    ("2.3", "ascend950", lambda p: prefill(p, kv_pitch=520), RuntimeError),  # kv.stride(0) must be 512
    ("2.2", "sm100", lambda p: decode(p, indices=None), AssertionError),
    ("2.2", "sm100", lambda p: decode(p, causal=True), AssertionError),
    ("2.2", "sm100", lambda p: decode(p, is_fp8_kvcache=False), AssertionError),
    ("2.2", "sm100", lambda p: decode(p, num_splits=torch.zeros(2, dtype=I32)), AssertionError),
    ("2.2", "sm100", lambda p: decode(p, index_dtype=I64), RuntimeError),
    ("2.2", "sm100", lambda p: decode(p, topk=100), RuntimeError),
    ("2.2", "sm100", lambda p: decode(p, width=656), RuntimeError),  # V3.2's tokens
    ("2.2", "sm100", lambda p: decode(p, width=584), RuntimeError),  # V4.0's tokens
    ("2.2", "sm100", lambda p: decode(p, width=288), RuntimeError),  # FP4 as the main cache
    ("2.2", "sm100", lambda p: decode(p, topk_length=torch.zeros(2, dtype=I32)), RuntimeError),
    ("2.2", "sm100", lambda p: decode(p, extra_topk_length=torch.zeros(1, dtype=I32)), RuntimeError),
    ("2.2", "sm100", lambda p: decode(p, head_dim_v=576), RuntimeError),
    ("2.2", "ascend950", lambda p: decode(p, s_q=2), RuntimeError),
    ("2.2", "ascend950", lambda p: decode(p, page=1), RuntimeError),
    ("2.2", "ascend950", lambda p: decode(p, h_q=128), RuntimeError),
]


@pytest.mark.parametrize(("section", "arch", "call", "error"), REFUSED)
def test_refused(section, arch, call, error):
    refused(arch, NAME, call, error)


@pytest.mark.parametrize("arch", ["sm100", "ascend950"])
def test_prefill_of_zeros_is_the_mean_and_natural_log(arch):  # 3: q = 0
    out, max_logits, lse = accepted(arch, NAME, prefill)
    assert (out == 1).all()
    assert (max_logits == 0).all()
    assert lse[0, 0].item() == pytest.approx(math.log(4))


def test_decode_gives_the_row_and_an_lse_by_head():  # 2.2, 3: one valid token
    out, lse = accepted("sm100", NAME, lambda p: decode(p, b=2, s_q=3))
    assert out.shape == (2, 3, 64, 512)
    assert (out == 1).all()
    assert lse.shape == (2, 64, 3)
    assert not lse.is_contiguous()
    assert (lse == 0).all()


def test_a_row_without_a_token_has_an_infinite_lse():  # 2.2
    out, lse = accepted("sm100", NAME, lambda p: decode(p, slot=-1))
    assert (out == 0).all()
    assert (lse == math.inf).all()


def test_only_minus_one_is_skipped_on_cuda_every_negative_on_ascend():  # 2.2
    traps("sm100", NAME, lambda p: decode(p, slot=-2), "illegal memory access")
    assert (accepted("ascend950", NAME, lambda p: decode(p, slot=-2))[1] == math.inf).all()
    traps("ascend950", NAME, lambda p: decode(p, slot=4), "illegal memory access")


def test_metadata_is_bound_to_its_first_call():  # 2.1
    with standing_in("sm100", NAME) as (p, _):
        meta, nothing = p.get_mla_metadata(torch.zeros(1), 128, num_heads_k=1)  # every argument is ignored
        assert nothing is None
        assert not meta.have_initialized
        decode(p, meta=meta)
        assert meta.config.topk == 64
        decode(p, meta=meta)
        with pytest.raises(AssertionError):
            decode(p, meta=meta, topk=128)
        with pytest.raises(AssertionError):
            decode(p, meta=meta, enable_batch_invariant=True)


@pytest.mark.parametrize(("defects", "left"), [((), False), (("metadata_flag_first",), True)])
def test_what_a_refused_first_call_leaves(defects, left):  # 6.6
    with standing_in("sm100", NAME, defects=frozenset(defects)) as (p, _):
        meta, _ = p.get_mla_metadata()
        with pytest.raises(RuntimeError):
            decode(p, meta=meta, topk=100)
        assert meta.have_initialized is left


def test_splitting_fills_the_metadata_on_cuda_only():  # 2.1, 2.2
    for arch, split in (("sm100", True), ("ascend950", False)):
        with standing_in(arch, NAME) as (p, _):
            meta, _ = p.get_mla_metadata()
            decode(p, meta=meta, topk=704)
            assert (meta.num_splits is not None) is split


def test_releases_differ_in_their_signature_and_page_layout():  # 1, 2.8
    with standing_in("sm100", NAME, releases={"flash_mla": "W24"}) as (p, rig):
        parameters = inspect.signature(p.flash_mla_with_kvcache).parameters
        assert p.__version__ == "1.0.0"
        assert parameters["is_fp8_kvcache"].default is False
        assert "enable_batch_invariant" not in parameters
        page = torch.full((1, 2 * 528), 0x38, dtype=torch.uint8)
        page[:, 2 * 512:] = 128  # all rows, then all scales: the value is 2
        out, _ = decode(p, k_cache=page.reshape(1, 2, 1, 528), is_fp8_kvcache=True)
        rig.device.synchronize()
        assert (out == 2).all()


def test_default_scale_is_that_of_512_dims():  # 2.2
    q = aligned((1, 1, 64, 512), BF16)
    q.fill_(1.0)
    lse = accepted("sm100", NAME, lambda p: decode(p, q=q))[1]
    assert lse[0, 0, 0].item() == pytest.approx(512 * 512**-0.5, rel=1e-3)


def test_dense_functions_are_known_but_not_computed():
    with standing_in("sm100", NAME) as (p, _), pytest.raises(NotImplementedError, match="signature only"):
        p.flash_attn_varlen_func(1, 2, 3, 4, 5, 6, 7)


def test_sink_does_not_alter_lse():  # 2.2, 7
    sink = torch.zeros(64, dtype=FP32)
    out, lse = accepted("sm100", NAME, lambda p: decode(p, attn_sink=sink))
    assert (out == 0.5).all()
    assert (lse == 0).all()
