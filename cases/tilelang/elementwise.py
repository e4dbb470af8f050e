"""TileLang's operations on one element at a time: functions, operators, T.clamp, T.cast."""

from __future__ import annotations

from cases.tilelang.data import (
    BIT_FAMILIES,
    FAMILIES,
    FLOATS,
    FP8,
    INTS,
    REFUSED,
    differs_by_data,
    divisor,
    is_float,
    nans_in_operand,
    telling_arguments,
    ties_of_out,
)
from conformance.declare import INF, Cost, Drawn, From, In, Op, Out, Value, When, edges, misuse
from conformance.model import Problem, Variant
from conformance.protocol import FORMATS
from references.formats.spec import float_spec
from references.tilelang import arithmetic, elementwise

FUNCTIONS = (
    "exp", "exp2", "exp10", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sigmoid", "sin", "cos", "tan", "atan",
    "sinh", "cosh", "tanh", "erf", "floor", "ceil", "trunc", "round", "nearbyint", "abs", "isnan", "isinf", "isfinite",
)  # fmt: skip
FLOAT_OPERATORS = ("add", "sub", "mul", "div", "max", "min")
INT_OPERATORS = ("add", "sub", "mul", "max", "min", "floordiv", "floormod", "truncdiv", "truncmod", "bitand", "bitor",
                 "bitxor", "shl", "shr")
N = edges(128, 256, hi=600, zero=True)


def _cost(p: Problem) -> Cost:
    return Cost(flops=p.n, bytes=3 * p.n * FORMATS[p.variant.dtype].itemsize_bytes)


DTYPE_OF_OUT = misuse("out of another dtype than x", out={"dtype": "int32"}, raises=REFUSED)
SHORT_OUT = misuse("out one element short", out={"shape": "n-1"}, raises=REFUSED)
FLAT_X = misuse("x of two axes", x={"shape": "1 n"}, raises=REFUSED)

ELEMENTWISE = Op(
    "tilelang.elementwise",
    doc="out[i] = T.<function>(x[i]); a predicate gives 1 or 0",
    variants=dict(function=FUNCTIONS, dtype=FLOATS),
    sizes=dict(n=N),
    args=(In("x", From("dtype"), "n", data=telling_arguments), Out("out", From("dtype"), "n"),
          Value("function", From("function"))),
    families=BIT_FAMILIES,
    oracle=elementwise.elementwise,
    compile_key=("function", "dtype"),
    cost=_cost,
    core=lambda v: v.dtype == "fp32" or (v.dtype == "bf16" and v.function in ("exp", "rsqrt", "tanh")),
    values_only=lambda v: v.function not in ("exp", "sin", "nearbyint"),
    sample=dict(n=20),
    rejects=(DTYPE_OF_OUT, FLAT_X, SHORT_OUT),
)


def _operator_exists(v: Variant) -> bool:
    if is_float(v):
        return v.function in FLOAT_OPERATORS
    return v.function in INT_OPERATORS and v.data == "plain"


def _core_operator(v: Variant) -> bool:
    few = v.data == "plain" and v.function in ("add", "div", "max", "floordiv", "shr")
    return v.dtype in ("fp32", "int32") or (v.dtype in ("fp16", "bf16", "int8") and few)


ARITHMETIC = Op(
    "tilelang.arithmetic",
    doc="out[i] = a[i] function b[i]; integers with floor or C semantics, shifts, bit operations",
    variants=dict(function=(*FLOAT_OPERATORS, *INT_OPERATORS[5:]), data=("plain", "nan"), dtype=(*FLOATS, *INTS)),
    where=_operator_exists,
    sizes=dict(n=N),
    args=(In("a", From("dtype"), "n", data=nans_in_operand), In("b", From("dtype"), "n", data=divisor),
          Out("out", From("dtype"), "n"), Value("function", From("function"))),
    families=FAMILIES,
    oracle=arithmetic.arithmetic,
    compile_key=("function", "dtype"),
    cost=_cost,
    core=_core_operator,
    values_only=lambda v: differs_by_data(v) or v.function != "add",
    sample=dict(n=20),
    rejects=(
        misuse("b of another dtype than a", b={"dtype": "int32"}, raises=REFUSED),
        misuse("a of two axes", a={"shape": "1 n"}, raises=REFUSED),
        misuse("b one element short", b={"shape": "n-1"}, raises=REFUSED),
    ),
)

CLAMP = Op(
    "tilelang.clamp",
    doc="out[i] = T.clamp(x[i], low, high): NaN stays NaN, high where low > high",
    variants=dict(dtype=FLOATS),
    sizes=dict(n=N),
    args=(In("x", From("dtype"), "n", data=telling_arguments), Out("out", From("dtype"), "n"),
          Value("low", Drawn((-1.25, 0.0, -INF, 0.1, 3.0))), Value("high", Drawn((2.0, 0.0, INF, 0.7, -2.0)))),
    families=BIT_FAMILIES,
    oracle=elementwise.clamp,
    compile_key=("dtype",),
    cost=_cost,
    core=When(dtype=("fp32", "fp16", "bf16")),
    sample=dict(n=20),
    rejects=(DTYPE_OF_OUT, FLAT_X, SHORT_OUT),
)

CORE_CASTS = frozenset({
    ("fp32", "fp16"), ("fp32", "bf16"), ("fp32", "e4m3"), ("fp32", "e5m2"), ("fp32", "int8"), ("fp32", "int32"),
    ("fp16", "fp32"), ("bf16", "fp32"), ("fp64", "fp16"), ("int8", "fp32"), ("int64", "int32"),
})
PLAIN_CASTS = frozenset({
    ("fp32", "fp16"), ("fp32", "int8"), ("fp32", "bf16"), ("fp32", "e4m3"), ("fp64", "fp32"), ("int64", "int32"),
    ("int8", "fp32"), ("uint8", "int16"), ("fp16", "int64"), ("bf16", "uint8"), ("e5m2", "fp64"),
})
"""every format once, for the checks that are not about values"""


def _cast_exists(v: Variant) -> bool:
    """Ties are of casts to a float format with fewer significant bits."""
    source, target = float_spec(v.dtype), float_spec(v.out)
    ties = source is not None and target is not None and target.p < source.p
    return v.dtype != v.out and (v.data == "plain" or ties)


CAST = Op(
    "tilelang.cast",
    doc="out[i] = T.cast(x[i]): floats to nearest even, to integers toward zero, integers modulo",
    variants=dict(out=(*FLOATS, *INTS, *FP8, "bool"), dtype=(*FLOATS, *INTS, *FP8), data=("plain", "ties")),
    where=_cast_exists,
    sizes=dict(n=N),
    args=(In("x", From("dtype"), "n", data=ties_of_out), Out("out", From("out"), "n")),
    families=BIT_FAMILIES,
    oracle=elementwise.cast,
    compile_key=("out", "dtype"),
    cost=_cost,
    core=lambda v: (v.dtype, v.out) in CORE_CASTS,
    values_only=lambda v: differs_by_data(v) or (v.dtype, v.out) not in PLAIN_CASTS,
    sample=dict(n=20),
    rejects=(
        misuse("x of two axes", x={"shape": "1 n"}, raises=REFUSED),
        misuse("out of two axes", out={"shape": "1 n"}, raises=REFUSED),
        misuse("out one element short", out={"shape": "n-1"}, raises=REFUSED),
    ),
)

OPS = (ELEMENTWISE, ARITHMETIC, CLAMP, CAST)
