"""The stand-in of deep_gemm against its contract; sections of the dossier on DeepGEMM in each row."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.standin_tools import BF16, FP8, FP16, FP32, I16, I32, I64, accepted, aligned, refused, standing_in, traps

NAME = "deep_gemm"


def bf16(p, *, m=8, n=8, k=64, a=None, b=None, d=None, out=BF16, **more):
    a = ones((m, k)) if a is None else a
    b = ones((n, k)) if b is None else b
    d = ones((m, n), out) if d is None else d
    p.bf16_gemm_nt(a, b, d, **more)
    return d


def ones(shape, dtype=BF16, pitch=None):
    t = aligned(shape, dtype, pitch=pitch)
    t.copy_(torch.ones(shape))
    return t


def packed(mn, words, byte=127, pitch=None):
    """int32 scales of one byte, contiguous along mn."""
    pitch = pitch or -(-mn // 4) * 4
    return torch.full((words, 4 * pitch), byte, dtype=torch.uint8).view(I32).t()[:mn]


def fp8(p, *, m=8, n=8, k=256, sfa=None, sfb=None, out=BF16, d=None, a=None, b=None, **more):
    a = ones((m, k), FP8) if a is None else a
    b = ones((n, k), FP8) if b is None else b
    sfa = torch.full((m, -(-k // 128)), 2.0) if sfa is None else sfa
    sfb = torch.full((-(-n // 128), -(-k // 128)), 4.0) if sfb is None else sfb
    d = ones((m, n), out) if d is None else d
    p.fp8_gemm_nt((a, sfa), (b, sfb), d, **more)
    return d


def grouped(p, *, m=256, n=8, k=64, groups=2, layout=None, b=None, **more):
    layout = torch.tensor([0] * 128 + [1] * 128, dtype=I32)[:m] if layout is None else layout
    if b is None:
        b = ones((groups, n, k)).contiguous()
        b *= torch.arange(1, groups + 1)[:, None, None]
    d = torch.zeros(m, n, dtype=BF16)
    p.m_grouped_bf16_gemm_nt_contiguous(ones((m, k)), b, d, layout, **more)
    return d


C_APART = torch.ones(8, 8, dtype=BF16)

REFUSED = [
    # section, architecture, call, exception
    ("2.1", "sm100", lambda p: bf16(p, a=ones((8, 64), FP16)), RuntimeError),
    ("2.1", "sm100", lambda p: bf16(p, a=None, b=ones((8, 72))), RuntimeError),
    ("2.1", "sm100", lambda p: bf16(p, d=torch.zeros(7, 8, dtype=BF16)), RuntimeError),
    ("2.1", "sm100", lambda p: bf16(p, d=torch.zeros(8, 8, dtype=FP16)), RuntimeError),
    ("2.1", "sm100", lambda p: bf16(p, d=torch.zeros(8, 8, dtype=BF16).t()), RuntimeError),
    ("2.1", "sm100", lambda p: bf16(p, a=ones((8, 64), pitch=68)[:, :64]), RuntimeError),  # pitch of 136 bytes
    ("2.1", "sm100", lambda p: bf16(p, a=aligned((8, 72), BF16)[:, 1:65]), RuntimeError),  # base off by 2 bytes
    ("2.1", "sm100", lambda p: bf16(p, c=torch.ones(8, 8)), RuntimeError),
    ("2.1", "sm100", lambda p: bf16(p, a=aligned((8, 64, 2), BF16)[..., 0]), RuntimeError),
    ("5", "sm100", lambda p: bf16(p, epilogue_class=None), TypeError),  # the stub's name of it
    ("2.1", "sm100", lambda p: p.bf16_gemm_nt(ones((8, 64)), None, ones((8, 8))), TypeError),
    ("2.1", "sm100", lambda p: bf16(p, alpha=2.0, epilogue=object()), RuntimeError),
    ("1", "sm100", lambda p: p.gemm_fp8_fp8_bf16_nt(), AttributeError),  # names of v1
    ("2.9", "ascend950", lambda p: bf16(p, c=C_APART), RuntimeError),  # C must be D
    ("2.9", "ascend950", lambda p: p.m_grouped_bf16_gemm_nt_masked(), AttributeError),
    ("2.1", "sm100", lambda p: fp8(p, recipe=(1, 128, 128), recipe_a=(1, 128), recipe_b=(128, 128)), RuntimeError),
    ("2.1", "sm100", lambda p: fp8(p, recipe_a=(1, 128)), RuntimeError),
    ("2.1", "sm100", lambda p: fp8(p, disable_ue8m0_cast=True), RuntimeError),
    ("2.1", "sm100", lambda p: fp8(p, recipe=(1, 128, 64), sfa=torch.ones(8, 4), sfb=torch.ones(1, 4)), RuntimeError),
    ("2.1", "sm100", lambda p: fp8(p, sfa=torch.ones(1, 2), sfb=torch.ones(8, 2)), RuntimeError),  # swapped
    ("2.1", "sm100", lambda p: fp8(p, k=1024, sfa=packed(8, 2).contiguous(), sfb=packed(8, 2)), RuntimeError),
    ("2.1", "sm100", lambda p: fp8(p, m=6, n=6, sfa=packed(6, 2, pitch=6), sfb=packed(6, 2), k=1024), RuntimeError),
    ("2.1", "sm100", lambda p: fp8(p, sfa=packed(8, 1).to(I16), sfb=packed(8, 1).to(I16)), RuntimeError),
    ("2.1", "sm100", lambda p: fp8(p, a=torch.ones(8, 256)), RuntimeError),
    ("2.1", "sm100", lambda p: p.fp8_gemm_nt(ones((8, 64), FP8), ones((8, 64), FP8), ones((8, 8))), TypeError),
    ("2.1", "sm90", lambda p: fp8(p, sfa=packed(8, 1), sfb=packed(8, 1)), RuntimeError),  # FP32 scales only
    ("2.2", "sm90", lambda p: fp8(p, out=FP32), RuntimeError),  # blocks of 128 rows: BF16 only
    ("2.2", "sm90", lambda p: fp8(p, c=C_APART), RuntimeError),
    ("2.2", "sm90", lambda p: fp8(p, recipe=(1, 1, 128), sfb=torch.ones(8, 2)), RuntimeError),  # FP32 with C only
    ("2.2", "sm90", lambda p: fp8(p, alpha=2.0), RuntimeError),
    ("2.1", "sm90", lambda p: fp8(p, a=aligned((256, 8), FP8).t()), RuntimeError),  # K-major only
    ("2.9", "ascend950", fp8, RuntimeError),  # gran_k 128
    ("2.9", "ascend950", lambda p: fp8(p, recipe=(1, 1, 32), sfa=packed(8, 2), sfb=packed(8, 2)), RuntimeError),
    ("2.3", "sm100", lambda p: grouped(p, layout=torch.zeros(256, dtype=I64)), RuntimeError),
    ("2.3", "sm100", lambda p: grouped(p, layout=torch.zeros(2, dtype=I32)), RuntimeError),
    ("2.3", "sm100", lambda p: grouped(p, expected_m_for_psum_layout=128), RuntimeError),
    ("2.3", "sm100", lambda p: grouped(p, b=ones((8, 64))), RuntimeError),
    ("2.3", "sm90", lambda p: grouped(p, k=72), RuntimeError),  # K % 64
    ("2.9", "ascend950", lambda p: grouped(p, use_psum_layout=False), RuntimeError),
    ("2.8", "sm100", lambda p: p.per_token_cast_to_fp8(torch.ones(4), True), AssertionError),
    ("2.8", "sm100", lambda p: p.set_num_sms(149), RuntimeError),
]


@pytest.mark.parametrize(("section", "arch", "call", "error"), REFUSED)
def test_refused(section, arch, call, error):
    refused(arch, NAME, call, error)


@pytest.mark.parametrize("arch", ["sm90", "sm100", "ascend950"])
def test_bf16_product(arch):  # 2.2
    assert (accepted(arch, NAME, bf16) == 64).all()


def test_c_apart_is_added_on_cuda_and_stays():  # 2.1
    c = torch.full((1, 8), 3.0, dtype=BF16)
    d = accepted("sm100", NAME, lambda p: bf16(p, c=c, alpha=0.5))
    assert (d == 35).all()  # alpha scales the product only
    assert (c == 3).all()


def test_c_on_d_is_added_in_place():  # 2.1, 2.9
    for arch in ("sm100", "ascend950"):
        d = torch.ones(8, 8, dtype=BF16)
        accepted(arch, NAME, lambda p, d=d: bf16(p, d=d, c=d))
        assert (d == 65).all()


def test_empty_is_done_before_dtypes_are_looked_at():  # 2.1
    accepted("sm100", NAME, lambda p: bf16(p, m=0, d=torch.zeros(0, 8, dtype=FP16)))
    assert (accepted("sm100", NAME, lambda p: bf16(p, k=0)) == 0).all()


def test_alpha_on_sm90_depends_on_determinism_and_cores():  # 2.2
    assert (accepted("sm90", NAME, lambda p: bf16(p, alpha=0.5)) == 32).all()

    def deterministic(p):
        p.use_deterministic_algorithms(True)
        bf16(p, alpha=0.5)

    def fewer(p):
        p.set_num_sms(130)
        bf16(p, alpha=0.5)

    refused("sm90", NAME, deterministic, RuntimeError)
    refused("sm90", NAME, fewer, RuntimeError)
    accepted("sm100", NAME, deterministic)


def test_an_odd_number_of_cores_is_refused_by_the_own_kernels():  # 2.1
    def odd(p):
        p.set_num_sms(131)
        bf16(p)

    refused("sm100", NAME, odd, RuntimeError)


def test_bindings_tell_no_signature():
    with standing_in("sm100", NAME) as (p, _):
        with pytest.raises(ValueError, match="no signature"):
            inspect.signature(p.bf16_gemm_nt)
        assert list(inspect.signature(p.per_token_cast_to_fp8).parameters)[1] == "use_ue8m0"


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_fp8_product_with_default_recipe(arch):  # 2.1: (1, 128, 128) with FP32 scales
    assert (accepted(arch, NAME, fp8) == 256 * 8).all()


def test_packed_scales_default_to_one_row_and_128():  # 2.1
    d = accepted("sm100", NAME, lambda p: fp8(p, sfa=packed(8, 1, 128), sfb=packed(8, 1, 129)))
    assert (d == 256 * 8).all()


def test_int16_scales_of_two_exponents_on_ascend():  # 2.9
    two = torch.full((8, 8), 128, dtype=torch.uint8).view(I16)
    d = accepted("ascend950", NAME, lambda p: fp8(p, recipe=(1, 1, 32), sfa=two, sfb=two))
    assert (d == 256 * 4).all()


def test_scales_that_are_no_powers_of_two_trap_on_sm100_only():  # 2.1
    call = lambda p: fp8(p, sfa=torch.full((8, 2), 3.0))  # noqa: E731
    traps("sm100", NAME, call, "no power of two")
    assert (accepted("sm90", NAME, call) == 256 * 12).all()


def test_the_first_label_of_a_tile_counts():  # 2.3
    labels = torch.tensor([0] * 128 + [1] * 128, dtype=I32)
    labels[100:128] = 1  # starts inside a tile: against the contract
    d = accepted("sm100", NAME, lambda p: grouped(p, layout=labels))
    assert (d[:128] == 64).all()
    assert (d[128:] == 128).all()


def test_alignment_is_a_global_setting_on_cuda_and_256_on_ascend():  # 2.3, 2.9
    ends = torch.tensor([1, 257], dtype=I32)

    def wide(p):
        p.set_mk_alignment_for_contiguous_layout(256)
        return grouped(p, m=512, layout=ends, use_psum_layout=True)

    def usual(p):
        return grouped(p, m=512, layout=ends, use_psum_layout=True)

    assert accepted("sm100", NAME, wide)[256, 0] == 128
    assert accepted("sm100", NAME, usual)[128, 0] == 128
    assert accepted("ascend950", NAME, lambda p: p.get_mk_alignment_for_contiguous_layout()) == 256
    assert accepted("ascend950", NAME, lambda p: grouped(p, m=512, layout=ends))[256, 0] == 128


def test_a_label_out_of_range_faults():
    traps("sm100", NAME, lambda p: grouped(p, layout=torch.full((256,), 2, dtype=I32)), "illegal memory access")


def test_scales_of_the_quantiser():  # 2.8, 3
    data, scales = accepted("sm100", NAME, lambda p: p.per_token_cast_to_fp8(torch.full((2, 128), 448.0), True))
    assert (data.float() == 448).all()
    assert (scales == 1).all()
