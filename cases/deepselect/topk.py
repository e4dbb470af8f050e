"""DeepSelect: row-wise top-k, and the strides it asks for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cases.control import lengths, offsets
from cases.families import SELECT_FAMILIES
from conformance.declare import (
    INF,
    INT_MAX,
    INT_MIN,
    NAN,
    Cost,
    Drawn,
    DType,
    From,
    In,
    Op,
    Out,
    Requirement,
    Returned,
    Size,
    Value,
    When,
    edges,
    misuse,
)
from conformance.model import Problem
from references.deepselect import select, strides
from references.formats import codec


def hostile_beyond_end(problem: Problem, codes: dict[str, np.ndarray]) -> None:
    """In every second problem what lies behind a row's end is +inf or NaN: it must not matter."""
    if "end" not in codes or problem.seed % 2:
        return
    x = codec.bits(codes["input"])
    code = {"bf16": (0x7F80, 0xFFC0), "fp32": (0x7F800000, 0xFFC00000)}[problem.variant.dtype][problem.seed // 2 % 2]
    x[np.arange(x.shape[1]) >= codes["end"][:, None]] = code


def _beside(sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Rows twice as long as what is chosen of them; else so many choices that results have gaps between rows."""
    return {"vocab": 2 * sizes["topk"] + 37} if "topk" in sizes else {"topk": 9}


TOPK = Op(
    "deepselect.topk",
    doc="k largest of each row; which of equal values is free",
    variants=dict(dtype=("bf16", "fp32"), index=("int32", "int64"), order=("any", "index", "value"),
                  values=("yes", "no"), end=("no", "yes"), offset=("no", "yes"), output_idx=("callee", "caller")),
    where=lambda v: v.order != "value" or (v.dtype == "fp32" and v.values == "yes"),
    sizes=dict(b=edges(1, 6, 7, hi=64), topk=edges(512, 1024, 4096),
               vocab=edges(1, 4096, 8192, 16384, 524288, hi=524289)),
    fits=lambda p: p.b * p.vocab <= 2**22,
    args=(In("input", From("dtype"), "b vocab", row_align=Requirement("input_row_bytes"), forms=("padded", "offset")),
          Value("topk", Size("topk")),
          Value("sorted", lambda v: v.order == "value"),
          Value("sorted_index", lambda v: v.order == "index"),
          Value("return_value", lambda v: v.values == "yes"),
          Value("indices_type", DType("index")),
          Value("abort_when_nan_found", False),
          Value("idx_oob_fill_value", Drawn((0, -1, INT_MIN, INT_MAX))),
          Value("value_oob_fill_value", Drawn((0.1, -INF, INF, NAN, 1e39))),
          In("end", "int32", "b", when=When(end="yes"), data=lengths("vocab", around="topk")),
          In("output_idx_offset", "int32", "b", when=When(offset="yes"), data=offsets),
          Out("output_idx", From("index"), "b topk", row_align=32, when=When(output_idx="caller"),
              forms=("padded", "offset"))),
    returns=(Returned("values", From("dtype"), "b topk", row_align=32, when=When(values="yes")),
             Returned("indices", From("index"), "b topk", row_align=32, same_as="output_idx")),
    families=SELECT_FAMILIES,
    oracle=select.topk,
    arrange=hostile_beyond_end,
    repeatable=False,
    cost=lambda p: Cost(flops=0, bytes=p.b * (p.vocab * 4 + p.topk * 12)),
    beside=_beside,
    sample=dict(b=2, topk=8, vocab=96),
    rejects=(
        misuse("topk of 0", topk=0, raises=("RuntimeError", "ValueError")),
        misuse("topk negative", topk=-1, raises=("RuntimeError", "ValueError")),
        misuse("topk of 4097", topk=4097, raises=("RuntimeError", "ValueError")),
        misuse("begin given", begin={"dtype": "int32", "shape": "b"}, raises=("AssertionError", "ValueError")),
        misuse("hint given", hint={"dtype": "int32", "shape": "b"}, raises=("AssertionError", "ValueError")),
        misuse("input in fp16", input={"dtype": "fp16"}, raises=("RuntimeError", "TypeError")),
        misuse("input of one axis", input={"shape": "vocab"}, raises=("RuntimeError", "ValueError")),
        misuse("input rows 16 bytes off the required stride", input={"row_bytes_extra": 16},
               raises=("RuntimeError", "ValueError")),
        misuse("output rows 4 bytes off the required stride", variant={"output_idx": "caller", "index": "int32"},
               output_idx={"row_bytes_extra": 4}, raises=("RuntimeError", "ValueError")),
        misuse("output_idx of another dtype than indices_type", variant={"output_idx": "caller", "index": "int32"},
               output_idx={"dtype": "int64"}, raises=("AssertionError", "TypeError", "RuntimeError")),
        misuse("output_idx one column short", variant={"output_idx": "caller"}, output_idx={"shape": "b topk-1"},
               raises=("RuntimeError", "ValueError")),
        misuse("end in int64", variant={"end": "yes"}, end={"dtype": "int64"}, raises=("RuntimeError", "TypeError")),
        misuse("end one row short", variant={"end": "yes"}, end={"shape": "b-1"},
               raises=("RuntimeError", "ValueError")),
        misuse("offset in int64", variant={"offset": "yes"}, output_idx_offset={"dtype": "int64"},
               raises=("RuntimeError", "TypeError")),
        misuse("sorted together with sorted_index", variant={"order": "value"}, sorted_index=True,
               raises=("RuntimeError", "ValueError")),
        misuse("sorted without values", variant={"order": "value"}, return_value=False,
               raises=("RuntimeError", "ValueError")),
        misuse("sorted bf16", variant={"dtype": "bf16", "order": "any", "values": "yes"}, sorted=True,
               raises=("RuntimeError", "TypeError")),
        misuse("fill value beyond int32", idx_oob_fill_value=2**31,
               raises=("TypeError", "RuntimeError", "OverflowError")),
        misuse("NaN with abort asked for", kind="trap", abort_when_nan_found=True, input={"fill": "nans"}),
    ),
)

STRIDES = Op(
    "deepselect.get_stride_requirement",
    doc="bytes that the row strides of input and outputs must be multiples of",
    returns=(Returned("input_row_bytes", kind="int"), Returned("output_row_bytes", kind="int")),
    oracle=strides.get_stride_requirement,
)

OPS = (TOPK, STRIDES)
