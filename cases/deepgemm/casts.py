"""DeepGEMM's quantisers."""

from __future__ import annotations

from cases.deepgemm.scales import PACKED
from cases.families import CAST_FAMILIES
from conformance.declare import Cost, Drawn, From, In, Op, Returned, Value, edges, misuse
from conformance.model import Problem
from references.deepgemm import cast


def _scale_shape(p: Problem) -> tuple[int, int]:
    """In codes: the bytes of whole words where they are packed."""
    blocks = -(-p.n // p.values["gran_k"])
    return p.m, -(-blocks // PACKED) * PACKED if p.variant.scale == "packed" else blocks


PER_TOKEN_CAST_TO_FP8 = Op(
    "deepgemm.per_token_cast_to_fp8",
    doc="E4M3 codes of x[m,n] and a scale for each gran_k columns of a row",
    variants=dict(x=("bf16", "fp32"), scale=("fp32", "pow2", "packed")),
    sizes=dict(m=edges(1, 64, 128, 256), n=edges(1, 32, 128, 512, 1152, 7168)),
    fits=lambda p: p.m * p.n <= 2**18,
    args=(In("x", From("x"), "m n", forms=("padded", "offset")),
          Value("use_ue8m0", lambda v: v.scale != "fp32"),
          Value("gran_k", Drawn((128, 32))),
          Value("use_packed_ue8m0", lambda v: v.scale == "packed")),
    returns=(Returned("data", "e4m3", "m n"),
             Returned("sf", lambda v: "e8m0x4" if v.scale == "packed" else "fp32", _scale_shape)),
    families=CAST_FAMILIES,
    oracle=cast.per_token_cast_to_fp8,
    cost=lambda p: Cost(flops=4 * p.m * p.n, bytes=5 * p.m * p.n),
    sample=dict(m=24, n=200),
    rejects=(
        misuse("x of one axis", x={"shape": "n"}, raises=("AssertionError",)),
        misuse("x of three axes", x={"shape": "1 m n"}, raises=("AssertionError",)),
        misuse("packed scales that are no powers of two", variant={"scale": "packed"}, use_ue8m0=False,
               raises=("AssertionError",)),
        misuse("gran_k of 0", gran_k=0),
    ),
)

OPS = (PER_TOKEN_CAST_TO_FP8,)
