"""TileLang's T.gemm on tiles."""

from __future__ import annotations

from cases.families import GEMM_FAMILIES
from cases.tilelang.data import REFUSED
from conformance.declare import Cost, From, In, Op, Out, Value, When, edges, misuse
from conformance.model import Problem, Variant
from conformance.protocol import FORMATS
from references.tilelang import gemm

OUTS = {"fp32": ("fp32",), "fp16": ("fp32", "fp16"), "bf16": ("fp32", "bf16"), "fp64": ("fp64",), "int8": ("int32",),
        "e4m3": ("fp32",), "e5m2": ("fp32",)}
"""formats that the sum is stored in, by format of the operands"""

CORE = frozenset({
    ("fp16", "fp32", "no", "yes", "clear"), ("fp16", "fp32", "yes", "no", "clear"),
    ("fp16", "fp16", "no", "no", "c"), ("fp32", "fp32", "no", "no", "c"),
    ("fp32", "fp32", "no", "yes", "clear_accum"), ("int8", "int32", "no", "yes", "clear"),
    ("bf16", "fp32", "no", "yes", "clear"), ("bf16", "bf16", "no", "no", "c"),
    ("e4m3", "fp32", "no", "yes", "clear"),
})
"""dtype, out, transpose_a, transpose_b, init"""


def _a_shape(p: Problem) -> tuple[int, int]:
    return (p.k, p.m) if p.variant.transpose_a == "yes" else (p.m, p.k)


def _b_shape(p: Problem) -> tuple[int, int]:
    return (p.n, p.k) if p.variant.transpose_b == "yes" else (p.k, p.n)


def _bytes(p: Problem) -> int:
    v: Variant = p.variant
    return (p.m + p.n) * p.k * FORMATS[v.dtype].itemsize_bytes + 2 * p.m * p.n * FORMATS[v.out].itemsize_bytes


GEMM = Op(
    "tilelang.gemm",
    doc="c = op(a) @ op(b), or c += that, by T.gemm of tiles; FP32 (integers: int32) accumulation, one rounding",
    variants=dict(dtype=tuple(OUTS), out=("fp32", "fp16", "bf16", "fp64", "int32"), transpose_a=("no", "yes"),
                  transpose_b=("no", "yes"), init=("clear", "clear_accum", "c")),
    where=lambda v: v.out in OUTS[v.dtype],
    sizes=dict(m=edges(64, hi=130, zero=True), n=edges(64, hi=130, zero=True),
               k=edges(32, 64, 512, hi=520, zero=True)),
    fits=lambda p: p.m * p.n * p.k <= 2**18,
    args=(In("a", From("dtype"), _a_shape, along=lambda v: -2 if v.transpose_a == "yes" else -1),
          In("b", From("dtype"), _b_shape, along=lambda v: -1 if v.transpose_b == "yes" else -2),
          Out("c", From("out"), "m n", accumulates=When(init="c")),
          Value("transpose_a", lambda v: v.transpose_a == "yes"),
          Value("transpose_b", lambda v: v.transpose_b == "yes"),
          Value("init", From("init"))),
    families=GEMM_FAMILIES,
    oracle=gemm.gemm,
    compile_key=("dtype", "out", "transpose_a", "transpose_b", "init"),
    cost=lambda p: Cost(flops=2 * p.m * p.n * p.k, bytes=_bytes(p)),
    core=lambda v: (v.dtype, v.out, v.transpose_a, v.transpose_b, v.init) in CORE,
    sample=dict(m=20, n=24, k=40),
    rejects=(
        misuse("b of another dtype than a", b={"dtype": "fp16"}, raises=REFUSED),
        misuse("a of one axis", a={"shape": "k"}, raises=REFUSED),
        misuse("b of three axes", b={"shape": "1 k n"}, raises=REFUSED),
        misuse("rows of a that do not follow each other", a={"row_bytes_extra": 4}, raises=REFUSED),
        misuse("k of a and b differ", b={"shape": "k-1 n"}, raises=REFUSED),
        misuse("c one row short", c={"shape": "m-1 n"}, raises=REFUSED),
        misuse("c one column short", c={"shape": "m n-1"}, raises=REFUSED),
        misuse("None for b", b=None, raises=REFUSED),
    ),
)

OPS = (GEMM,)
