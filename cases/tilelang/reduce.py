"""TileLang's reductions: T.reduce_sum and its sisters, on tiles along one axis."""

from __future__ import annotations

from cases.tilelang.data import FAMILIES, FLOATS, INTS, REFUSED, differs_by_data, is_float, reduced
from conformance.declare import Cost, From, In, Op, Out, Value, When, edges, misuse
from conformance.model import Problem, Variant
from conformance.protocol import FORMATS
from references.tilelang import reduce

BITWISE = ("bitand", "bitor", "bitxor")


def _exists(v: Variant) -> bool:
    """Bit operations are of integers, NaN is of floats; narrow integers are not combined with every flag."""
    if is_float(v):
        return v.kind not in BITWISE
    return v.data == "plain" and (v.dtype == "int32" or (v.dim, v.clear) == ("1", "yes"))


CORE = {
    "fp32": {("sum", "1", "yes"), ("sum", "0", "yes"), ("sum", "1", "no"), ("max", "1", "yes"), ("min", "1", "yes"),
             ("absmax", "1", "yes")},
    "fp16": {("sum", "1", "yes")},
    "bf16": {("sum", "1", "yes"), ("max", "1", "yes")},
    "int32": {("bitxor", "0", "yes")},
    "int8": {("max", "1", "yes")},
}
"""kind, dim, clear by dtype"""


def _core(v: Variant) -> bool:
    nan_too = v.data == "plain" or (v.dtype, v.dim, v.clear) == ("fp32", "1", "yes")
    return (v.kind, v.dim, v.clear) in CORE.get(v.dtype, ()) and nan_too


def _kept(p: Problem) -> tuple[int]:
    return (p.n if p.variant.dim == "0" else p.m,)


REDUCE = Op(
    "tilelang.reduce",
    doc="out = x reduced along dim by T.reduce_<kind> of tiles; clear=no combines with what stands in out",
    variants=dict(kind=("sum", "max", "min", "absmax", *BITWISE), data=("plain", "nan"), dtype=(*FLOATS, *INTS),
                  dim=("1", "0"), clear=("yes", "no")),
    where=_exists,
    sizes=dict(m=edges(32, 64, hi=130, zero=True), n=edges(64, 128, hi=300, zero=True)),
    fits=lambda p: p.m * p.n <= 2**13,
    args=(In("x", From("dtype"), "m n", data=reduced(lambda v: int(v.dim))),
          Out("out", From("dtype"), _kept, accumulates=When(clear="no")),
          Value("kind", From("kind")), Value("dim", lambda v: int(v.dim)), Value("clear", lambda v: v.clear == "yes")),
    families=(*FAMILIES, "one_hot", "cancellation", "ascending", "descending", "tail_max"),
    oracle=reduce.reduce,
    compile_key=("kind", "dtype", "dim", "clear"),
    cost=lambda p: Cost(flops=p.m * p.n, bytes=p.m * p.n * FORMATS[p.variant.dtype].itemsize_bytes),
    core=_core,
    values_only=differs_by_data,
    sample=dict(m=20, n=24),
    rejects=(
        misuse("out of another dtype than x", out={"dtype": "int32"}, raises=REFUSED),
        misuse("x of one axis", x={"shape": "n"}, raises=REFUSED),
        misuse("out of two axes", out={"shape": "1 m"}, raises=REFUSED),
        misuse("rows of x that do not follow each other", x={"row_bytes_extra": 4}, raises=REFUSED),
        misuse("out shorter than the rows of x", variant={"kind": "sum", "dtype": "fp32", "dim": "1"},
               out={"shape": "m-15"}, raises=REFUSED),
    ),
)

OPS = (REDUCE,)
