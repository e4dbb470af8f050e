"""DeepGEMM's products of many groups in one array of rows."""

from __future__ import annotations

from cases.deepgemm import groups
from cases.deepgemm.dense import REFUSED
from cases.deepgemm.promises import GROUPS_ALONE
from cases.families import GEMM_FAMILIES
from conformance.declare import Cost, Drawn, From, In, Op, Out, Value, When, choices, edges, misuse
from conformance.model import Problem
from references.deepgemm import gemm

PSUM = When(layout="psum")


def _cost(p: Problem) -> Cost:
    m = groups.rows(p)
    return Cost(flops=2 * m * p.n * p.k, bytes=2 * (m * p.k + p.groups * p.n * p.k + m * p.n))


M_GROUPED_BF16_GEMM_NT_CONTIGUOUS = Op(
    "deepgemm.m_grouped_bf16_gemm_nt_contiguous",
    doc="D[row] = A[row] @ B[group of row].T; rows stand group after group, each group on a multiple of the alignment",
    variants=dict(layout=("labels", "psum"), b_major=("k", "n")),
    sizes=dict(blocks=edges(1, 4, hi=6, zero=True), groups=choices(1, 2, 3, 4, 8, 129),
               n=edges(16, 64, 128, step=8), k=edges(64, 128, 576, step=8)),
    fits=lambda p: (groups.rows(p) + p.groups * p.n) * p.k <= 2**18,
    args=(In("a", "bf16", lambda p: (groups.rows(p), p.k), row_align=16, forms=("padded", "offset")),
          In("b", "bf16", "groups n k", major=From("b_major"), row_align=16, forms=("offset",)),
          Out("d", "bf16", lambda p: (groups.rows(p), p.n), row_align=16, forms=("padded", "offset"),
              kept=groups.untouched),
          In("grouped_layout", "int32", lambda p: (p.groups if p.variant.layout == "psum" else groups.rows(p),),
             data=groups.layout),
          Value("compiled_dims", Drawn(("nk", "", "mnk", "m"))),
          Value("use_psum_layout", lambda v: v.layout == "psum"),
          Value("ensure_zero_padding", Drawn((True, False)), when=PSUM),
          Value("expected_m_for_psum_layout", Drawn((None, 1, 4096)), when=PSUM)),
    families=GEMM_FAMILIES,
    oracle=gemm.m_grouped_bf16_gemm_nt_contiguous,
    settings=(Value(groups.ALIGNMENT, Drawn((128, 256))),),
    promises=(GROUPS_ALONE,),
    cost=_cost,
    beside=lambda sizes: {"blocks": 1, "n": 16} if sizes.get("k", 0) > 512 else {},
    everywhere=({"k": 576},),
    sample=dict(blocks=2, groups=3, n=24, k=72),
    rejects=(
        misuse("k of A and B differ", b={"shape": "groups n k+8"}, raises=REFUSED),
        misuse("n of B and D differ", b={"shape": "groups n+8 k"}, raises=REFUSED),
        misuse("A in FP16", a={"dtype": "fp16"}, raises=REFUSED),
        misuse("B in FP16", b={"dtype": "fp16"}, raises=REFUSED),
        misuse("B of two axes", b={"shape": "n k"}, raises=REFUSED),
        misuse("no group", b={"shape": "0 n k"}, raises=REFUSED),
        misuse("D in FP16", d={"dtype": "fp16"}, raises=REFUSED),
        misuse("D of other rows than A", d={"shape": "blocks n"}, raises=REFUSED),
        misuse("labels in int64", grouped_layout={"dtype": "int64"}, raises=REFUSED),
        misuse("fewer labels than rows", variant={"layout": "labels"}, grouped_layout={"shape": "groups"},
               raises=REFUSED),
        misuse("more ends than groups", variant={"layout": "psum"}, grouped_layout={"shape": "groups+1"},
               raises=REFUSED),
        misuse("expected rows without ends", variant={"layout": "labels"}, expected_m_for_psum_layout=128,
               raises=REFUSED),
    ),
)

OPS = (M_GROUPED_BF16_GEMM_NT_CONTIGUOUS,)
