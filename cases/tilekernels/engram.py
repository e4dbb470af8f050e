"""The optimiser of TileKernels' n-gram memory."""

from __future__ import annotations

import numpy as np

from cases.families import ROW_FAMILIES
from conformance.declare import Cost, Drawn, From, In, Op, Out, Returned, Step, Token, Value, edges, misuse
from conformance.engine.arrays import Draw
from conformance.protocol import FORMATS
from references.tilekernels import engram

REFUSED = ("AssertionError",)
BLOCK = 256
"""what lengths and columns must be multiples of"""

MOMENTUM_UPDATE = Op(
    "tilekernels.engram.engram_sinkhorn_momentum_update",
    doc="the running mean of gradients moved on in place; returns it, or it moved on once more",
    variants=dict(grad=("bf16", "fp32"), momentum=("bf16", "fp32"), nesterov=("yes", "no")),
    sizes=dict(blocks=edges(1, 2, 16, hi=40, zero=True)),
    args=(In("grad", From("grad"), lambda p: (BLOCK * p.blocks,), forms=("offset",)),
          In("momentum_buffer", From("momentum"), lambda p: (BLOCK * p.blocks,), role="inout", forms=("offset",)),
          Value("beta1", Drawn((0.9, 0.95, 0.5))),
          Value("nesterov", lambda v: v.nesterov == "yes")),
    returns=(Returned("update", "fp32", lambda p: (BLOCK * p.blocks,)),),
    families=ROW_FAMILIES,
    oracle=engram.engram_sinkhorn_momentum_update,
    cost=lambda p: Cost(flops=6 * BLOCK * p.blocks, bytes=BLOCK * p.blocks * (
        4 + FORMATS[p.variant.grad].itemsize_bytes + 2 * FORMATS[p.variant.momentum].itemsize_bytes)),
    sample=dict(blocks=3),
    rejects=(
        misuse("gradient in FP16", grad={"dtype": "fp16"}, raises=REFUSED),
        misuse("momentum in FP16", momentum_buffer={"dtype": "fp16"}, raises=REFUSED),
        misuse("gradient of two axes", grad={"shape": "3 256"}, momentum_buffer={"shape": "3 256"}, raises=REFUSED),
        misuse("momentum shorter than the gradient", momentum_buffer={"shape": "512"}, raises=REFUSED),
        misuse("128 elements", grad={"shape": "128"}, momentum_buffer={"shape": "128"}, raises=REFUSED),
    ),
)


def scales(d: Draw) -> np.ndarray:
    """Positive fp32 numbers between 2**-7 and 2**8."""
    return np.ldexp(1 + d.uniform(), d.integers(-7, 7, salt=3)).astype(np.float32)


SINKHORN_STEP = Op(
    "tilekernels.engram.engram_sinkhorn_step",
    doc="rows scaled to norm 1 in place of their scale; then the columns' sums of squares, from partial sums",
    sizes=dict(r=edges(1, 2, 64, hi=150, zero=True), d=edges(256, 1024, step=256)),
    fits=lambda p: p.r * p.d <= 2**16,
    steps=(
        Step("step", "tilekernels.engram.engram_sinkhorn_step",
             (In("matrix", "fp32", "r d", forms=("offset",)),
              In("row_scale", "fp32", "r", role="inout", data=scales),
              In("col_scale", "fp32", "d", data=scales),
              Value("eps", Drawn((1e-8, 1e-3)))),
             (Returned("row_norm", "fp32", "r"), Returned("partial", "fp32", kind="token"))),
        Step("reduce", "tilekernels.engram.engram_sinkhorn_step_reduce",
             (Token("col_sumsq_partial", of="partial"), Out("col_sumsq", "fp32", "d")), ()),
    ),
    families=ROW_FAMILIES,
    oracle=engram.engram_sinkhorn_step,
    cost=lambda p: Cost(flops=8 * p.r * p.d, bytes=4 * p.r * p.d),
    sample=dict(r=5, d=256),
    rejects=(
        misuse("matrix in BF16", raises=REFUSED, **{"step/matrix": {"dtype": "bf16"}}),
        misuse("matrix of one axis", raises=REFUSED, **{"step/matrix": {"shape": "d"}}),
        misuse("128 columns", raises=REFUSED,
               **{"step/matrix": {"shape": "r 128"}, "step/col_scale": {"shape": "128"}}),
        misuse("a row scale one row short", raises=REFUSED, **{"step/row_scale": {"shape": "r-1"}}),
        misuse("a column scale of other columns", raises=REFUSED, **{"step/col_scale": {"shape": "d+256"}}),
        misuse("sums of other columns", raises=REFUSED, **{"reduce/col_sumsq": {"shape": "d+256"}}),
        misuse("sums in BF16", raises=REFUSED, **{"reduce/col_sumsq": {"dtype": "bf16"}}),
    ),
)

OPS = (MOMENTUM_UPDATE, SINKHORN_STEP)
