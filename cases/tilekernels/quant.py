"""TileKernels' cast to FP8 and FP4 with a scale for each few columns of a row."""

from __future__ import annotations

import numpy as np

from cases.families import CAST_FAMILIES
from conformance.declare import Cost, From, In, Op, Out, Requirement, Returned, Tup, Value, When, edges, misuse
from conformance.engine.arrays import Draw, encode
from conformance.model import Problem, Variant
from references.tilekernels import cast

REFUSED = ("AssertionError",)
"""every host check of the module is an assertion"""

PLAIN = ("bf16", "fp32")
CODES = {"e4m3": "e4m3", "e2m1": "e2m1x2_lo"}
SCALES = {"fp32": "fp32", "pow2": "fp32", "packed": "e8m0x4", "e4m3": "e4m3"}
PACK = 4
"""exponents in one int32"""
EXPONENT_BIAS, EXPONENT_NAN = 127, 255

INPUTS = (
    ("bf16", "none", "none"),
    ("fp32", "none", "none"),
    ("e4m3", "fp32", "1x128"),
    ("e4m3", "fp32_column", "128x128"),
    ("e4m3", "packed", "32x32"),
    ("e4m3", "packed_column", "1x32"),
    ("e2m1", "packed", "1x32"),
    ("e2m1", "e4m3", "1x16"),
)
"""x, its own scales and their order, and the block each of these is for"""


def legal(v: Variant) -> bool:
    """The product of all keys, cut where two of them meet in no path of the documented algorithm."""
    if (v.x, v.x_sf, v.x_block_size) not in INPUTS:
        return False
    if v.out == "caller" and v.sf_order == "column":
        return False  # documented: a given sf can't be column-major
    if v.x == "bf16":
        return True
    if v.sf_order == "column" or v.out == "caller":
        return False
    return v.x == "fp32" or (v.num_per_channels in ("32", "128") and v.scale != "pow2")


def block(v: Variant) -> tuple[int, int] | None:
    """Rows and columns of x that share one of its own scales."""
    return None if v.x in PLAIN else tuple(int(n) for n in v.x_block_size.split("x"))


def factors_shape(p: Problem) -> tuple[int, int]:
    height, width = block(p.variant)
    columns = -(-p.h // width)
    return -(-p.t // height), -(-columns // PACK) * PACK if p.variant.x_sf.startswith("packed") else columns


def factors(d: Draw) -> np.ndarray:
    """Scales of a quantised x: positive, 2**-6 to 2**7; slots behind the last block hold NaN."""
    exponents = d.integers(-6, 6)
    if d.format != "e8m0x4":
        return encode((1 + d.uniform(salt=1)) * np.ldexp(1.0, exponents), d.format)
    codes = (exponents + EXPONENT_BIAS).astype(np.uint8)
    codes[:, -(-d.sizes["h"] // block(d.problem.variant)[1]) :] = EXPONENT_NAN
    return codes


def groups(p: Problem) -> tuple[int, int]:
    """One scale a row and group; unused slots of a packed word are unspecified and left out."""
    return p.t, -(-p.h // int(p.variant.num_per_channels))


def item_bytes(v: Variant) -> float:
    return {"bf16": 2, "fp32": 4, "e4m3": 1, "e2m1": 0.5}[v.x] + (1 if v.fmt == "e4m3" else 0.5)


def codes_format(v: Variant) -> str:
    return CODES[v.fmt]


def scale_format(v: Variant) -> str:
    return SCALES[v.scale]


CALLER = When(out="caller")
QUANTISED = When(x=tuple(CODES))

PER_TOKEN_CAST = Op(
    "tilekernels.quant.per_token_cast",
    doc="FP8 or FP4 codes of each row, one scale for num_per_channels columns",
    variants=dict(x=("bf16", "fp32", "e4m3", "e2m1"),
                  x_sf=("none", "fp32", "fp32_column", "packed", "packed_column", "e4m3"),
                  x_block_size=("none", "1x16", "1x32", "1x128", "32x32", "128x128"), fmt=("e4m3", "e2m1"),
                  scale=("fp32", "pow2", "packed", "e4m3"), num_per_channels=("128", "64", "32", "16"),
                  sf_order=("row", "column"), out=("callee", "caller")),
    where=legal,
    sizes=dict(t=edges(1, 32, 64, 128, 4096, hi=4097, zero=True), h=edges(64, 128, 2048, 7168, step=64, hi=7232)),
    fits=lambda p: p.t * p.h <= 2**16 or (p.h == 64 and p.t <= 4097),
    args=(In("x", From("x"), "t h", when=When(x=PLAIN), forms=("padded", "offset")),
          Tup("x", (In("x", lambda v: CODES[v.x], "t h", when=QUANTISED),
                    In("x_scale", lambda v: SCALES[v.x_sf.partition("_")[0]], factors_shape, when=QUANTISED,
                       major=lambda v: 0 if v.x_sf.endswith("column") else 1,
                       row_align=lambda v: Requirement("sf_column_bytes") if v.x_sf.endswith("column") else None,
                       data=factors)), when=QUANTISED),
          Value("x_block_size", block, when=QUANTISED),
          Value("fmt", From("fmt")),
          Value("num_per_channels", lambda v: int(v.num_per_channels)),
          Value("use_tma_aligned_col_major_sf", lambda v: v.sf_order == "column"),
          Value("round_sf", lambda v: v.scale in ("pow2", "packed")),
          Value("use_packed_ue8m0", lambda v: v.scale == "packed"),
          Value("use_e4m3_sf", lambda v: v.scale == "e4m3"),
          Tup("out", (Out("data_out", codes_format, "t h", when=CALLER, forms=("offset",)),
                      Out("sf_out", scale_format, groups, when=CALLER, forms=("padded", "offset"))), when=CALLER)),
    returns=(Returned("data", codes_format, "t h", row_align=1, same_as="data_out"),
             Returned("sf", scale_format, groups, same_as="sf_out",
                      row_align=lambda v: Requirement("sf_column_bytes") if v.sf_order == "column" else 1,
                      major=lambda v: 0 if v.sf_order == "column" else 1)),
    families=CAST_FAMILIES,
    oracle=cast.per_token_cast,
    cost=lambda p: Cost(flops=2 * p.t * p.h, bytes=p.t * p.h * item_bytes(p.variant) + 4 * groups(p)[0] * groups(p)[1]),
    sample=dict(t=5, h=192),
    rejects=(
        misuse("fmt of e5m6", fmt="e5m6", raises=REFUSED),
        misuse("num_per_channels of 48", num_per_channels=48, raises=REFUSED),
        misuse("num_per_channels of 256", num_per_channels=256, raises=REFUSED),
        misuse("96 columns", x={"shape": "t 96"}, raises=REFUSED),
        misuse("x in FP16", x={"dtype": "fp16"}, raises=REFUSED),
        misuse("x of one axis", x={"shape": "h"}),
        misuse("packed scales that are not rounded", variant={"scale": "packed"}, round_sf=False, raises=REFUSED),
        misuse("rounded scales in E4M3", variant={"scale": "pow2"}, use_e4m3_sf=True, raises=REFUSED),
        misuse("x_block_size for an x without scales", x_block_size=(1, 32), raises=REFUSED),
        misuse("x with scales but no x_block_size", variant={"x": "e4m3"}, x_block_size=None, raises=REFUSED),
        misuse("scales of x in BF16", variant={"x_sf": "fp32"}, x_scale={"dtype": "bf16"}, raises=REFUSED),
        misuse("column-major scales into a given sf", variant={"out": "caller"}, use_tma_aligned_col_major_sf=True,
               raises=REFUSED),
        misuse("given sf one column short", variant={"out": "caller", "num_per_channels": "64"},
               sf_out={"shape": "t 2"}, raises=REFUSED),
    ),
)

OPS = (PER_TOKEN_CAST,)
