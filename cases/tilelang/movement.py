"""TileLang's data movement: T.copy, T.transpose, indexed reads, T.atomic_add."""

from __future__ import annotations

from cases.tilelang.data import BIT_FAMILIES, FAMILIES, FLOATS, FP8, INTS, REFUSED, indices, is_float
from conformance.declare import ALWAYS, Cost, From, In, Op, Out, Returned, Value, When, edges, misuse
from conformance.model import Problem, Variant
from conformance.protocol import FORMATS
from references.tilelang import movement

DTYPES = (*FLOATS, *INTS, *FP8)
MANY_DIGITS = "16777215"
"""2^24 - 1: a constant that seven decimal digits don't tell from its neighbours"""


def item_bytes(p: Problem) -> int:
    return FORMATS[p.variant.dtype].itemsize_bytes


def _copy_core(v: Variant) -> bool:
    """One byte with a fill, for its widest vectors; two bytes without; of the fills of four bytes not the infinity."""
    if v.dtype == "fp32":
        return v.fill != "-inf"
    return (v.dtype, v.fill) in (("int8", "-3"), ("fp16", "none"), ("bf16", "none"))


def _fill_exists(v: Variant) -> bool:
    """Whether the format has the fill value."""
    if v.fill == "-inf":
        return is_float(v) and v.dtype != "e4m3"
    if v.fill == "-3":
        return v.dtype != "uint8"
    return v.fill == "none" or v.dtype in ("fp32", "fp64", "int32", "int64")


COPY = Op(
    "tilelang.copy",
    doc="out[i,j] = x[i,j] by T.copy of tiles; what out has and x has not is 0, or the value of T.annotate_safe_value",
    variants=dict(dtype=DTYPES, fill=("none", "-3", "-inf", MANY_DIGITS)),
    where=_fill_exists,
    sizes=dict(m=edges(32, 64, hi=130, zero=True), n=edges(64, 128, hi=200, zero=True),
               mo=edges(32, 64, hi=130, zero=True), no=edges(64, 128, hi=200, zero=True)),
    fits=lambda p: max(p.m, p.mo) * max(p.n, p.no) <= 2**13,
    args=(In("x", From("dtype"), "m n"), Out("out", From("dtype"), "mo no"),
          Value("fill", lambda v: None if v.fill == "none" else float(v.fill))),
    families=BIT_FAMILIES,
    oracle=movement.copy,
    compile_key=("dtype", "fill"),
    cost=lambda p: Cost(flops=0, bytes=(p.m * p.n + p.mo * p.no) * item_bytes(p)),
    core=_copy_core,
    values_only=lambda v: v.fill != "none",
    sample=dict(m=9, n=12, mo=11, no=17),
    rejects=(
        misuse("out of another dtype than x", out={"dtype": "fp16"}, raises=REFUSED),
        misuse("x of one axis", x={"shape": "n"}, raises=REFUSED),
        misuse("out of three axes", out={"shape": "1 mo no"}, raises=REFUSED),
        misuse("rows of x that do not follow each other", x={"row_bytes_extra": 4}, raises=REFUSED),
        misuse("rows of out that do not follow each other", out={"row_bytes_extra": 4}, raises=REFUSED),
        misuse("None for out", out=None, raises=REFUSED),
    ),
)

TRANSPOSE = Op(
    "tilelang.transpose",
    doc="out[j,i] = x[i,j] by T.transpose of tiles; the callee allocates out",
    variants=dict(dtype=DTYPES),
    sizes=dict(m=edges(32, 64, hi=130, zero=True), n=edges(64, 128, hi=200, zero=True)),
    fits=lambda p: p.m * p.n <= 2**13,
    args=(In("x", From("dtype"), "m n"),),
    returns=(Returned("out", From("dtype"), "n m", row_align=1),),
    families=BIT_FAMILIES,
    oracle=movement.transpose,
    compile_key=("dtype",),
    cost=lambda p: Cost(flops=0, bytes=2 * p.m * p.n * item_bytes(p)),
    core=When(dtype=("fp32", "bf16", "int8")),
    sample=dict(m=9, n=12),
    rejects=(
        misuse("x of one axis", x={"shape": "n"}, raises=REFUSED),
        misuse("rows of x that do not follow each other", x={"row_bytes_extra": 4}, raises=REFUSED),
    ),
)

GATHER = Op(
    "tilelang.gather",
    doc="out[i] = x[index[i]], 0 for an index outside x: the language guards every access to a tensor",
    variants=dict(dtype=DTYPES, index=("int32", "int64")),
    sizes=dict(n=edges(128, hi=300, zero=True), k=edges(128, 256, hi=500, zero=True)),
    args=(In("x", From("dtype"), "n"), In("index", From("index"), "k", data=indices("n")),
          Out("out", From("dtype"), "k")),
    families=BIT_FAMILIES,
    oracle=movement.gather,
    compile_key=("dtype", "index"),
    cost=lambda p: Cost(flops=0, bytes=p.k * (8 + 2 * item_bytes(p))),
    core=lambda v: v.dtype == "fp32" or (v.dtype in ("bf16", "int8") and v.index == "int32"),
    values_only=lambda v: v.index == "int64" and v.dtype != "fp32",
    sample=dict(n=20, k=30),
    rejects=(
        misuse("out of another dtype than x", out={"dtype": "fp16"}, raises=REFUSED),
        misuse("x of two axes", x={"shape": "1 n"}, raises=REFUSED),
        misuse("index of two axes", index={"shape": "1 k"}, raises=REFUSED),
        misuse("out one element short", out={"shape": "k-1"}, raises=REFUSED),
    ),
)

ATOMIC_ADD = Op(
    "tilelang.atomic_add",
    doc="out[index[i]] += x[i] by T.atomic_add, in any order; an index outside out is dropped",
    variants=dict(dtype=("fp32", "fp16", "bf16", "int32"), index=("int32", "int64")),
    sizes=dict(n=edges(1, hi=40, zero=True), k=edges(128, 256, hi=500, zero=True)),
    args=(In("x", From("dtype"), "k"), In("index", From("index"), "k", data=indices("n")),
          Out("out", From("dtype"), "n", accumulates=ALWAYS)),
    families=(*FAMILIES, "one_hot", "nans"),
    oracle=movement.atomic_add,
    compile_key=("dtype", "index"),
    repeatable=False,
    cost=lambda p: Cost(flops=p.k, bytes=p.k * (8 + 2 * item_bytes(p))),
    core=lambda v: v.index == "int32" or v.dtype == "fp32",
    values_only=lambda v: v.index == "int64" and v.dtype != "fp32",
    sample=dict(n=7, k=30),
    rejects=(
        misuse("out of another dtype than x", out={"dtype": "fp16"}, raises=REFUSED),
        misuse("x of two axes", x={"shape": "1 k"}, raises=REFUSED),
        misuse("index one element short", index={"shape": "k-1"}, raises=REFUSED),
    ),
)

OPS = (COPY, TRANSPOSE, GATHER, ATOMIC_ADD)
