"""TileKernels' rotary embedding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cases.families import ROW_FAMILIES
from conformance.declare import Cost, Drawn, From, In, Op, Value, When, choices, edges, misuse
from conformance.engine.arrays import Draw
from conformance.model import Problem
from conformance.protocol import FORMATS
from references.tilekernels import rope

REFUSED = ("AssertionError",)
FORMS = ("padded", "offset")
OFFSETS = (0, 3, 32)
TOKENS = 128
"""most tokens of a sequence; with the largest offset they reach the table's last row"""
ROW_BYTES = 32
"""outer strides are multiples of 8 elements"""


def tokens(p: Problem) -> tuple[int, ...]:
    return (p.b, p.s) if p.variant.batch == "yes" else (p.s,)


def heads(size: str) -> Callable[[Problem], tuple[int, ...]]:
    return lambda p: (*tokens(p), p.sizes[size], p.d)


def positions(d: Draw) -> np.ndarray:
    """Rows of the table that the offset leaves in it: the first, the last, and any between, in no order."""
    last = d.sizes["table_rows"] - 1 - d.problem.values["seqlen_offset"]
    kind = d.integers(0, 4, salt=3)
    # Row 257 has the first number that BF16 and a byte can't hold.
    rows = np.where(kind == 0, last, np.where(kind == 1, 0, np.where(kind == 4, min(last, 257), d.integers(0, last))))
    return rows.astype(d.format)


APPLY_ROTARY = Op(
    "tilekernels.transform.apply_rotary",
    doc="pairs of each head turned in place by the angle of the token's position",
    variants=dict(x=("bf16", "fp32"), batch=("no", "yes"), key=("no", "yes"), positions=("none", "int32", "int64"),
                  interleaved=("no", "yes")),
    sizes=dict(b=edges(1, 3, hi=4, zero=True), s=edges(1, 2, 64, TOKENS, hi=TOKENS, zero=True),
               heads=edges(1, 2, 8, 32, 64, hi=65, zero=True), kv_heads=edges(1, 2, 8, zero=True), d=choices(64, 128),
               table_rows=edges(TOKENS + max(OFFSETS), 256, lo=TOKENS + max(OFFSETS), hi=320)),
    fits=lambda p: p.b * p.s * max(p.heads, p.kv_heads) * p.d <= 2**16,
    args=(In("query", From("x"), heads("heads"), row_align=ROW_BYTES, role="inout", forms=FORMS),
          In("cos_sin_cache", "fp32", "table_rows d", row_align=16, forms=FORMS),
          In("key", From("x"), heads("kv_heads"), row_align=ROW_BYTES, role="inout", forms=FORMS, when=When(key="yes")),
          In("positions", From("positions"), tokens, when=When(positions=("int32", "int64")), data=positions,
             forms=FORMS),
          Value("interleaved", lambda v: v.interleaved == "yes"),
          Value("conjugate", Drawn((False, True))),
          Value("seqlen_offset", Drawn(OFFSETS))),
    families=ROW_FAMILIES,
    oracle=rope.apply_rotary,
    cost=lambda p: Cost(flops=3 * p.b * p.s * (p.heads + p.kv_heads) * p.d,
                        bytes=2 * FORMATS[p.variant.x].itemsize_bytes * p.b * p.s * (p.heads + p.kv_heads) * p.d),
    sample=dict(b=2, s=5, heads=3, kv_heads=2, d=64, table_rows=300),
    rejects=(
        misuse("query in FP16", query={"dtype": "fp16"}, raises=REFUSED),
        misuse("query of two axes", query={"shape": "s d"}, raises=REFUSED),
        misuse("query wider than the table", query={"shape": "s heads 128"}, raises=REFUSED),
        misuse("32 columns", query={"shape": "s heads 32"}, cos_sin_cache={"shape": "table_rows 32"}, raises=REFUSED),
        misuse("256 columns", query={"shape": "s heads 256"}, cos_sin_cache={"shape": "table_rows 256"},
               raises=REFUSED),
        misuse("table in BF16", cos_sin_cache={"dtype": "bf16"}, raises=REFUSED),
        misuse("table of one axis", cos_sin_cache={"shape": "d"}, raises=REFUSED),
        misuse("key of another dtype than query", variant={"x": "bf16", "key": "yes"}, key={"dtype": "fp32"},
               raises=REFUSED),
        misuse("key of fewer axes than query", variant={"batch": "yes", "key": "yes"}, key={"shape": "s kv_heads d"},
               raises=REFUSED),
        misuse("positions one token short", variant={"positions": "int64", "batch": "no"}, positions={"shape": "s-1"},
               raises=REFUSED),
        misuse("positions in FP32", variant={"positions": "int64"}, positions={"dtype": "fp32"}, raises=REFUSED),
    ),
)

OPS = (APPLY_ROTARY,)
