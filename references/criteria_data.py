"""The limits of other people's criteria as data, with their sources; `references.criteria` computes with them.

A module's own limits are those of its own tests, as they stand; the first row that fits an op and an output counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

MERE = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp32": 2.0**-13, "e4m3": 2.0**-3, "e5m2": 2.0**-2}
"""Ascend single benchmark: the mean relative error is below this, the largest below ten times this"""

MIXED = {"fp16": (2.0**-9, 2.0**-9, 0.1), "bf16": (2.0**-6, 2.0**-6, 1.0), "fp32": (2.0**-10, 2.0**-16, 1e-2),
         "e4m3": (2.0**-2, 2.0**-4, 1.0), "e5m2": (2.0**-1, 2.0**-3, 0.1)}
"""Ascend mixed tolerance: rtol, atol, and the largest absolute error where 32 ulp is less"""
MIXED_SHARE = 0.99
"""share of elements that must be within rtol and atol"""

DOUBLE_THOUSANDTH = {"fp16": 1e-3, "fp32": 1e-4, "bf16": 4e-3}
"""one number a format: the error, absolute and relative, and the share of elements that may exceed it"""

TORCH_CLOSE = {"fp16": (1e-3, 1e-5), "bf16": (1.6e-2, 1e-5), "fp32": (1.3e-6, 1e-5), "fp64": (1e-7, 1e-7)}
"""rtol and atol of torch.testing.assert_close by dtype"""

DUAL_LIMITS = {"L0": {"mare": 10.0, "mere": 2.0, "rmse": 2.0}, "L1": {"mare": 5.0, "mere": 1.5, "rmse": 1.5},
               "L2": {"mare": 2.0, "mere": 1.2, "rmse": 1.2}}
"""Ascend dual benchmark: largest ratio of our error to that of the reference run, by level"""

DUAL_LEVELS = (("flashmla.*", "L1"), ("*_gemm*", "L2"), ("tilelang.gemm*", "L2"), ("*norm_forward*", "L2"),
               ("tilelang.reduce", "L2"), ("*", "L0"))
"""level by op, first row that fits: matmul, RMS norm and sum are L2, fused attention L1"""

FA_STEP = 0.300000011920928955078125
"""0.3 in FP32, in which FlashAttention's tests add and subtract it"""

PERCENTILES = {"p50": 0.5, "p99": 0.99, "p99_9": 0.999}


@dataclass(frozen=True)
class Own:
    """One criterion of a module's own tests. `op` and `output` are patterns; the rule says which figures count."""

    op: str
    output: str
    rule: str
    """calc_diff, allclose, torch_close, equal or flashmla"""
    source: str
    limit: float = 0.0
    """calc_diff below this; of allclose the share of elements that may be outside"""
    rtol: float = 0.0
    atol: float = 0.0
    cosine: float = 0.0
    shift: float = 0.0
    """added to both sides first"""
    equal_nan: bool = False


def _diff(op: str, limit: float, source: str, output: str = "*", shift: float = 0.0) -> Own:
    return Own(op, output, "calc_diff", source, limit=limit, shift=shift)


def _close(op: str, rtol: float, atol: float, source: str, output: str = "*") -> Own:
    return Own(op, output, "allclose", source, rtol=rtol, atol=atol)


def _mla(op: str, output: str, atol: float, rtol: float, cosine: float, source: str) -> Own:
    return Own(op, output, "flashmla", source, rtol=rtol, atol=atol, cosine=cosine)


_GEMM, _MHC = "DeepGEMM tests", "TileKernels tests/mhc"

OWN: tuple[Own, ...] = (
    _diff("deepgemm.legacy.*", 1e-3, _GEMM),
    _diff("deepgemm.cublaslt_gemm_*", 6e-7, f"{_GEMM}/test_bf16.py"),
    _diff("deepgemm.batched_sy[rm][km]", 6e-7, f"{_GEMM}/test_bf16.py"),
    _diff("deepgemm.*bf16_gemm_*", 1e-5, f"{_GEMM}/test_bf16.py"),
    _diff("deepgemm.*fp8_fp4_gemm_*", 1e-2, f"{_GEMM}/test_fp8_fp4.py, there against the unquantised product"),
    _diff("deepgemm.*fp4_gemm_*", 2e-2, f"{_GEMM}/test_fp4.py, there against the unquantised product"),
    _diff("deepgemm.*fp8_gemm_*", 1e-3, f"{_GEMM}/test_fp8_fp4.py, there against the unquantised product"),
    _diff("deepgemm.einsum", 1e-5, f"{_GEMM}/test_einsum.py"),
    _diff("deepgemm.fp8_einsum", 1e-3, f"{_GEMM}/test_einsum.py"),
    _diff("deepgemm.fp8_fp4_*mqa_logits", 3e-5, f"{_GEMM}/test_attention.py, against the dequantised values"),
    _diff("deepgemm.tf32_hc_prenorm_gemm", 1e-8, f"{_GEMM}/test_hyperconnection.py"),
    _diff("deepgemm.bf16_mega_gate", 1e-11, _GEMM, "*weight*"),
    _diff("deepep.EPBuffer.combine", 5e-6, "DeepEP tests of V1; V2 asks for equal bits", "combined_x", 1.0),
    _diff("deepep.EPBuffer.combine", 1e-9, "DeepEP tests of V1; V2 asks for equal bits", "*weights", 1.0),
    Own("deepep.*", "*", "equal", "DeepEP tests/elastic"),
    Own("deepselect.*", "*", "equal", "DeepSelect tests/test.py"),
    _mla("flashmla.flash_mla_sparse_fwd", "out", 8e-4, 3.01 / 128, 1e-5, "FlashMLA tests/test-sparse-prefill.py"),
    _mla("flashmla.flash_mla_sparse_fwd", "*", 1e-6, 2.01 / 65536, 1e-7, "FlashMLA tests/test-sparse-prefill.py"),
    _mla("flashmla.flash_mla_with_kvcache", "out", 1e-3, 2.01 / 128, 5e-6, "FlashMLA tests/test-sparse-decode.py"),
    _mla("flashmla.flash_mla_with_kvcache", "*lse", 1e-6, 8.01 / 65536, 1e-7, "FlashMLA tests/test-sparse-decode.py"),
    _mla("flashmla.fused_norm_rope_attn_rope_cast.*", "*l[os][eg]*", 1e-5, 4.01 / 65536, 1e-7,
         "FlashMLA tests/test-fused-norm-rope-attn-rope-cast.py"),
    _mla("flashmla.flash_attn_varlen_*", "*lse", 1e-6, 2.01 / 65536, 1e-7, "FlashMLA tests/test_fmha_sm100.py"),
    _mla("flashmla.flash_attn_varlen_*", "*", 1e-3, 8.01 / 128, 7e-6, "FlashMLA tests/test_fmha_sm100.py"),
    _diff("tilekernels.transform.apply_rotary", 1e-8, "TileKernels tests/transform/test_rope.py"),
    _close("tilekernels.quant.norm_forward", 2e-6, 1e-7, "TileKernels tests/quant/test_norm_forward.py", "rstd"),
    Own("tilekernels.quant.norm_forward", "out", "torch_close", "TileKernels tests/quant/test_norm_forward.py"),
    _close("tilekernels.quant.swiglu_backward*", 1e-4, 1e-4, "TileKernels tests/quant", "weight_grad"),
    Own("tilekernels.quant.*", "*", "equal", "TileKernels tests/quant"),
    _diff("tilekernels.engram.engram_gate_fwd", 2e-10, "TileKernels tests/engram"),
    _diff("tilekernels.engram.engram_gate_bwd", 1e-8, "TileKernels tests/engram"),
    _diff("tilekernels.engram.grad_w_reduce", 1e-10, "TileKernels tests/engram"),
    _close("tilekernels.engram.engram_sinkhorn_step*", 3e-6, 1e-5, "TileKernels tests/engram", "col_sumsq"),
    Own("tilekernels.engram.engram_sinkhorn_momentum_update", "*", "equal", "TileKernels tests/engram"),
    Own("tilekernels.engram.engram_sinkhorn_*", "*", "torch_close", "TileKernels tests/engram"),
    Own("tilekernels.engram.*", "*", "equal", "TileKernels tests/engram"),
    _close("tilekernels.moe.moe_topk_gate_backward", 1e-5, 1e-5, "TileKernels tests/moe, atol times the largest"),
    Own("tilekernels.moe.*", "*weights", "torch_close", "TileKernels tests/moe"),
    Own("tilekernels.moe.*", "*", "equal", "TileKernels tests/moe"),
    _close("tilekernels.mhc.mhc_head_compute_mix_*", 1e-4, 1e-5, _MHC),
    _close("tilekernels.mhc.mhc_pre_split_mixes_*", 1e-5, 2e-5, _MHC),
    _close("tilekernels.mhc.mhc_pre_apply_mix_*", 1e-3, 1e-2, _MHC),
    Own("tilekernels.mhc.*", "*", "torch_close", _MHC),
    Own("tilelang.*", "*", "allclose", "TileLang Profiler.assert_allclose, defaults: 1 % may be anything", limit=0.01,
        rtol=1e-2, atol=1e-2, equal_nan=True),
)
"""Every limit that a module's own tests set, most particular first."""


@cache
def own_of(op: str, output: str) -> Own | None:
    """The first row of `OWN` that fits; without an output's name, the main one (`out`) where a module tells them apart.

    op: `module.name`; output: as declared. None where the module's tests set no limit.
    """
    return next((row for row in OWN if fnmatchcase(op, row.op) and fnmatchcase(output or "out", row.output)), None)


@cache
def level_of(op: str) -> str:
    """Level of the dual benchmark for an op (`module.name`)."""
    return next(level for pattern, level in DUAL_LEVELS if fnmatchcase(op, pattern))
