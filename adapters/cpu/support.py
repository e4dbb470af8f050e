"""What the `cpu` backend runs, with its limits: data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.protocol import Support, supported

REQUIREMENTS: Mapping[str, int] = {"input_row_bytes": 64, "output_row_bytes": 32}
"""Bytes that row strides of deepselect must be multiples of."""

PROFILE: Mapping[str, Any] = {}
"""Numerics keys that differ from the strict default: none."""

_C_FLOATS = ("fp32", "fp16", "fp64")
_C_INTS = ("int8", "uint8", "int16", "int32", "int64")


def _c_dtype(*formats: str, field: str = "dtype", reason: str = "TileLang's target c has no type for bf16 and fp8",
             ) -> Mapping[str, Any]:
    return {"field": field, "in": formats, "reason": reason}


_C_TYPES = _c_dtype(*_C_FLOATS, *_C_INTS)
_C_FUNCTIONS = (
    "exp", "exp2", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sigmoid", "sin", "cos", "tan", "atan", "sinh",
    "cosh", "tanh", "erf", "floor", "ceil", "trunc", "round", "nearbyint", "isnan",
)
TILELANG: Mapping[str, Support] = {
    "tilelang.copy": supported(limits=(_C_TYPES,), compile_key=("dtype", "fill")),
    "tilelang.transpose": supported(limits=(_C_TYPES,), compile_key=("dtype",)),
    "tilelang.gather": supported(limits=(_C_TYPES,), compile_key=("dtype", "index")),
    "tilelang.atomic_add": supported(limits=(_C_TYPES,), compile_key=("dtype", "index")),
    "tilelang.gemm": supported(
        limits=(_c_dtype("fp32", "fp16", "fp64", "int8"),),
        compile_key=("dtype", "out", "transpose_a", "transpose_b", "init"),
    ),
    "tilelang.reduce": supported(limits=(_C_TYPES,), compile_key=("dtype", "kind", "dim", "clear")),
    "tilelang.elementwise": supported(
        limits=(
            _c_dtype("fp32", "fp64", reason="TileLang's target c has functions of float and double only"),
            _c_dtype(*_C_FUNCTIONS, field="function", reason="TileLang's target c has no rule for it"),
        ),
        compile_key=("dtype",),
    ),
    "tilelang.arithmetic": supported(limits=(_C_TYPES,), compile_key=("dtype",)),
    "tilelang.clamp": supported(limits=(_c_dtype(*_C_FLOATS),), compile_key=("dtype",)),
    "tilelang.cast": supported(
        limits=(_C_TYPES, _c_dtype(*_C_FLOATS, *_C_INTS, "bool", field="out")), compile_key=("dtype", "out")
    ),
}
"""The suite's TileLang programs, compiled by the real TileLang for target c."""

OPS: Mapping[str, Support] = {
    **TILELANG,
    "deepselect.topk": supported(),
    "deepselect.get_stride_requirement": supported(),
    "deepgemm.bf16_gemm_nt": supported(),
    "deepgemm.fp8_gemm_nt": supported(),
    "deepgemm.m_grouped_bf16_gemm_nt_contiguous": supported(),
    "deepgemm.per_token_cast_to_fp8": supported(),
    "deepep.EPBuffer.combine": supported(),
    "deepep.EPBuffer.dispatch": supported(),
    "deepep.PPBuffer.recv": supported(),
    "tilekernels.engram.engram_sinkhorn_momentum_update": supported(),
    "tilekernels.engram.engram_sinkhorn_step": supported(),
    "tilekernels.moe.topk_gate": supported(),
    "tilekernels.quant.norm_forward": supported(),
    "tilekernels.quant.per_token_cast": supported(),
    "tilekernels.transform.apply_rotary": supported(),
    "flashmla.flash_mla_sparse_fwd": supported(),
    "flashmla.flash_mla_with_kvcache": supported(),
    "flashmla.get_mla_metadata": supported(),
}
