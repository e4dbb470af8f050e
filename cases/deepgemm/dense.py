"""DeepGEMM's dense products."""

from __future__ import annotations

from collections.abc import Callable

from cases.deepgemm import scales
from cases.deepgemm.promises import DETERMINISTIC, RECIPE_IN_PARTS, rows_alone_if_deterministic
from cases.families import FP8_GEMM_FAMILIES, GEMM_FAMILIES
from cases.laws import doubled
from cases.promises import rows_alone
from conformance.declare import Cost, Drawn, From, In, Op, Out, Tup, Value, When, edges, misuse
from conformance.model import Problem, Variant, VariantFn
from references.deepgemm import gemm

REFUSED = ("RuntimeError",)
"""every host check of the module ends in this"""

FP32_SCALES, PACKED_SCALES = When(scales=("fp32", "pow2")), When(scales="ue8m0")
GIVEN_C = When(c=("apart", "aliased", "row"))
DIMS = Value("compiled_dims", Drawn(("nk", "", "mnk", "m")))
ALPHA = Value("alpha", Drawn((None, 0.5, -2.0, 0.1)))


def _c_shape(p: Problem) -> tuple[int, int]:
    return (1 if p.variant.c == "row" else p.m, p.n)


D_AND_C = (
    Out("d", From("out"), "m n", accumulates=When(c="aliased"), row_align=16, forms=("padded", "offset")),
    In("c", From("out"), _c_shape, when=GIVEN_C, alias="d", alias_when=When(c="aliased"), row_align=16,
       forms=("padded", "offset")),
)
"""c is none, an array of its own, d itself, or one row for all (it is copied into d first, so it broadcasts)"""

REJECTS_OF_D = (
    misuse("D in FP16", d={"dtype": "fp16"}, raises=REFUSED),
    misuse("D one row short", d={"shape": "m-1 n"}, raises=REFUSED),
    misuse("D one column short", d={"shape": "m n-1"}, raises=REFUSED),
    misuse("D of one axis", d={"shape": "m"}, raises=REFUSED),
    misuse("C of another dtype than D", variant={"c": "apart", "out": "bf16"}, c={"dtype": "fp32"}, raises=REFUSED),
    misuse("C that does not broadcast to D", variant={"c": "apart"}, c={"shape": "m-1 n"}, raises=REFUSED),
)


def _plain_cost(p: Problem) -> Cost:
    return Cost(flops=2 * p.m * p.n * p.k, bytes=2 * (p.m * p.k + p.n * p.k) + 8 * p.m * p.n)


BF16_GEMM_NT = Op(
    "deepgemm.bf16_gemm_nt",
    doc="D[m,n] = alpha A[m,k] @ B[n,k].T (+ C); FP32 accumulation, one rounding",
    variants=dict(out=("bf16", "fp32"), c=("none", "apart", "aliased", "row"), a_major=("k", "m"), b_major=("k", "n")),
    where=lambda v: v.c != "row" or (v.a_major, v.b_major) == ("k", "k"),
    sizes=dict(m=edges(64, 128, 256, zero=True), n=edges(16, 64, 128, step=8, hi=256, zero=True),
               k=edges(64, 128, 576, 7168, step=8, zero=True)),
    fits=lambda p: (p.m + p.n) * p.k <= 2**18,
    args=(In("a", "bf16", "m k", major=From("a_major"), row_align=16, forms=("padded", "offset")),
          In("b", "bf16", "n k", major=From("b_major"), row_align=16, forms=("padded", "offset")),
          *D_AND_C, DIMS, ALPHA),
    families=GEMM_FAMILIES,
    oracle=gemm.bf16_gemm_nt,
    settings=(Value(DETERMINISTIC, Drawn((True, False))),),
    promises=(rows_alone_if_deterministic(of=("a", "c"), outputs=("d",)),),
    laws=(doubled("a", "bf16", output="d", when=When(c="none")),),
    cost=_plain_cost,
    sample=dict(m=24, n=40, k=136),
    rejects=(
        misuse("k of A and B differ", b={"shape": "n k+8"}, raises=REFUSED),
        misuse("A in FP16", a={"dtype": "fp16"}, raises=REFUSED),
        misuse("A in FP32", a={"dtype": "fp32"}, raises=REFUSED),
        misuse("B in FP16", b={"dtype": "fp16"}, raises=REFUSED),
        misuse("A of one axis", a={"shape": "k"}, raises=REFUSED),
        misuse("B of three axes", b={"shape": "1 n k"}, raises=REFUSED),
        *REJECTS_OF_D,
    ),
)


def _fp8_variant(v: Variant) -> bool:
    """Operands along M or N, and scales that stand transposed, go with the plain choices of the other keys."""
    if (v.a_major, v.b_major) != ("k", "k"):
        return v.c == "none" and v.scales != "pow2" and v.sfa_major == _usual_major(v)
    return v.sfa_major == _usual_major(v) or (v.scales != "ue8m0" and v.c == "none")


def _usual_major(v: Variant) -> str:
    return "m" if v.scales == "ue8m0" else "k"


def _scaled(name: str, rows: str, shape: Callable[[Problem], tuple[int, int]],
            scale_major: VariantFn) -> tuple[Tup, Tup]:
    """(data, scales) as one argument: scales as FP32 of either major, or packed, whose words stand along the rows."""
    data = In(name, "e4m3", f"{rows} k", major=From(f"{name}_major"), row_align=16, forms=("padded", "offset"))
    fp32 = In(f"{name}_scale", "fp32", shape, major=lambda v: 1 if scale_major(v) == "k" else 0,
              row_align=lambda v: 4 if scale_major(v) == "k" else 16, data=scales.near, when=FP32_SCALES)
    packed = In(f"{name}_scale", "e8m0x4", shape, major=0, row_align=16, data=scales.near, when=PACKED_SCALES,
                forms=("padded", "offset"))
    return Tup(name, (data, fp32), FP32_SCALES), Tup(name, (data, packed), PACKED_SCALES)


FP8_GEMM_NT = Op(
    "deepgemm.fp8_gemm_nt",
    doc="D[m,n] = alpha sum over K blocks of SFA SFB (A @ B.T) (+ C), A and B in E4M3",
    variants=dict(out=("bf16", "fp32"), c=("none", "apart", "aliased", "row"), scales=("fp32", "pow2", "ue8m0"),
                  sfa_major=("k", "m"), a_major=("k", "m"), b_major=("k", "n")),
    where=_fp8_variant,
    sizes=dict(m=edges(64, 128, 256, zero=True), n=edges(16, 64, 128, step=8, hi=256, zero=True),
               k=edges(32, 128, 512, 576, 1152, 7168, step=16, zero=True)),
    fits=lambda p: (p.m + p.n) * p.k <= 2**18,
    args=(*_scaled("a", "m", scales.shape_a, From("sfa_major")),
          *_scaled("b", "n", scales.shape_b, lambda v: "k"),
          *D_AND_C,
          Value("recipe", Drawn((None, (1, 128, 128), (1, 1, 128))), when=When(scales="fp32")),
          Value("recipe", Drawn((None, (1, 128, 128), (1, 1, 128), (1, 1, 32))), when=When(scales="pow2")),
          Value("recipe", Drawn((None, (1, 1, 128), (1, 1, 32))), when=PACKED_SCALES),
          Value("recipe_a", Drawn((None,))),
          Value("recipe_b", Drawn((None,))),
          DIMS, ALPHA),
    families=FP8_GEMM_FAMILIES,
    oracle=gemm.fp8_gemm_nt,
    promises=(rows_alone("m", of=("a", "a_scale", "c"), outputs=("d",)), RECIPE_IN_PARTS),
    cost=lambda p: Cost(flops=2 * p.m * p.n * p.k, bytes=(p.m + p.n) * p.k * 1.2 + 8 * p.m * p.n),
    sample=dict(m=24, n=40, k=528),
    rejects=(
        misuse("k of A and B differ", b={"shape": "n k+16"}, raises=REFUSED),
        misuse("A in BF16", a={"dtype": "bf16"}, raises=REFUSED),
        misuse("B in FP16", b={"dtype": "fp16"}, raises=REFUSED),
        misuse("A of one axis", a={"shape": "k"}, raises=REFUSED),
        misuse("scales of A one row short", a_scale={"shape": "m-1 5"}, raises=REFUSED),
        misuse("scales of A one block of K short", a_scale={"shape": "m 4"}, raises=REFUSED),
        misuse("scales of B for each row where blocks are due", b_scale={"shape": "n 5"}, recipe=(1, 128, 128),
               raises=REFUSED),
        misuse("scales of A in BF16", a_scale={"dtype": "bf16"}, raises=REFUSED),
        misuse("packed scales one word short", variant={"scales": "ue8m0"}, a_scale={"shape": "m 4"}, raises=REFUSED),
        misuse("packed scales with a stride that is no multiple of 4", variant={"scales": "ue8m0"},
               a_scale={"row_bytes_extra": 4}, raises=REFUSED),
        misuse("recipe and recipes of each operand", recipe=(1, 128, 128), recipe_a=(1, 128), recipe_b=(128, 128),
               raises=REFUSED),
        misuse("a recipe for A only", recipe_a=(1, 128), raises=REFUSED),
        misuse("a scale for 64 columns", recipe=(1, 128, 64), a_scale={"shape": "m 9"}, b_scale={"shape": "1 9"},
               raises=REFUSED),
        misuse("A without scales", a=None, raises=("TypeError", "RuntimeError")),
        *REJECTS_OF_D,
    ),
)

OPS = (BF16_GEMM_NT, FP8_GEMM_NT)
