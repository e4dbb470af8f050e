"""TileKernels' RMS norm."""

from __future__ import annotations

from cases.families import ROW_FAMILIES
from conformance.declare import Cost, Drawn, From, In, Op, Out, Returned, Value, When, edges, misuse
from conformance.model import Problem, Variant
from conformance.protocol import FORMATS
from references.tilekernels import norm

REFUSED = ("AssertionError",)
FORMS = ("padded", "offset")
STRIDE_ITEMS = 16
"""outer strides are multiples of this many elements"""


def lead(p: Problem) -> tuple[int, ...]:
    return (p.b, p.t) if p.variant.batch == "yes" else (p.t,)


def rows(p: Problem) -> tuple[int, ...]:
    return (*lead(p), p.h)


def stride_bytes(v: Variant) -> int:
    return STRIDE_ITEMS * FORMATS[v.x].itemsize_bytes


def norm_input(v: Variant) -> str | None:
    """Which argument comes back as the third result: x itself without a residual."""
    if v.residual == "no":
        return "x"
    return "residual_out" if v.residual_out == "caller" else None


def tokens(p: Problem) -> int:
    return p.t * (p.b if p.variant.batch == "yes" else 1)


OF, OUTPUTS = ("x", "residual"), ("out", "norm_input")

NORM_FORWARD = Op(
    "tilekernels.quant.norm_forward",
    doc="r * rstd * (weight * out_scale) with r = x (+ residual) and rstd = 1 / sqrt(mean(r**2) + eps), row by row",
    variants=dict(x=("bf16", "fp32"), batch=("no", "yes"), weight=("yes", "no"), residual=("no", "yes"),
                  residual_out=("callee", "caller"), out=("callee", "caller"), with_rstd=("no", "yes")),
    where=lambda v: v.residual == "yes" or v.residual_out == "callee",
    sizes=dict(b=edges(1, 3, lo=1, hi=4, zero=True), t=edges(1, 4, 64, hi=130, zero=True),
               h=edges(16, 128, 512, 4096, 8192, step=16)),
    fits=lambda p: tokens(p) * p.h <= 2**15 or (p.t <= 2 and p.b <= 2),
    args=(In("x", From("x"), rows, row_align=stride_bytes, forms=FORMS),
          In("weight", From("x"), "h", when=When(weight="yes")),
          Value("weight", None, when=When(weight="no")),
          Value("eps", Drawn((1e-6, 0.5, 1e-5, 1e-12))),
          In("residual", From("x"), rows, row_align=stride_bytes, when=When(residual="yes"), forms=FORMS),
          Value("out_scale", Drawn((1.0, 1.1, -2.0, 0.5))),
          Out("out", From("x"), rows, row_align=stride_bytes, when=When(out="caller"), forms=FORMS),
          Out("residual_out", From("x"), rows, row_align=stride_bytes, when=When(residual_out="caller"), forms=FORMS),
          Value("with_rstd", lambda v: v.with_rstd == "yes")),
    returns=(Returned("out", From("x"), rows, row_align=1, same_as="out"),
             Returned("rstd", "fp32", lead, when=When(with_rstd="yes")),
             Returned("norm_input", From("x"), rows, same_as=norm_input)),
    everywhere=({"h": 4096, "t": 8},),
    families=ROW_FAMILIES,
    oracle=norm.norm_forward,
    cost=lambda p: Cost(flops=5 * tokens(p) * p.h,
                        bytes=2 * FORMATS[p.variant.x].itemsize_bytes * tokens(p) * p.h
                        * (2 if p.variant.residual == "yes" else 1)),
    sample=dict(b=2, t=5, h=144),
    rejects=(
        misuse("x in FP16", x={"dtype": "fp16"}, raises=REFUSED),
        misuse("x of one axis", x={"shape": "h"}, raises=REFUSED),
        misuse("weight of another dtype than x", variant={"x": "bf16"}, weight={"dtype": "fp32"}, raises=REFUSED),
        misuse("weight one element short", weight={"shape": "h-1"}, raises=REFUSED),
        misuse("residual of another dtype than x", variant={"x": "bf16", "residual": "yes"}, residual={"dtype": "fp32"},
               raises=REFUSED),
        misuse("residual one row short", variant={"residual": "yes"}, residual={"shape": "t-1 h"}, raises=REFUSED),
        misuse("out of another dtype than x", variant={"x": "bf16", "out": "caller"}, out={"dtype": "fp32"},
               raises=REFUSED),
        misuse("out one row short", variant={"out": "caller"}, out={"shape": "t-1 h"}, raises=REFUSED),
        misuse("residual_out one row short", variant={"residual_out": "caller"}, residual_out={"shape": "t-1 h"},
               raises=REFUSED),
    ),
)

OPS = (NORM_FORWARD,)
