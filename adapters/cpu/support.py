"""What the `cpu` backend runs, with its limits: data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.protocol import Support, supported

REQUIREMENTS: Mapping[str, int] = {"input_row_bytes": 64, "output_row_bytes": 32}
"""Bytes that row strides of deepselect must be multiples of."""

PROFILE: Mapping[str, Any] = {}
"""Numerics keys that differ from the strict default: none."""

OPS: Mapping[str, Support] = {
    "deepselect.topk": supported(),
    "deepselect.get_stride_requirement": supported(),
    "deepgemm.bf16_gemm_nt": supported(),
    "deepgemm.fp8_gemm_nt": supported(),
    "deepgemm.m_grouped_bf16_gemm_nt_contiguous": supported(),
    "deepgemm.per_token_cast_to_fp8": supported(),
    "tilekernels.moe.topk_gate": supported(),
    "tilekernels.quant.norm_forward": supported(),
    "tilekernels.quant.per_token_cast": supported(),
    "tilekernels.transform.apply_rotary": supported(),
}
