"""TileKernels' choice of experts."""

from __future__ import annotations

from collections.abc import Mapping

from cases.families import SELECT_FAMILIES
from conformance.declare import Cost, In, Op, Returned, Size, Value, edges, misuse
from references.tilekernels import moe

REFUSED = ("AssertionError",)
FINITE = tuple(f for f in SELECT_FAMILIES if f not in ("infinities", "nans", "all_bits"))
"""a score that is not finite is a misuse"""


def _beside(sizes: Mapping[str, int]) -> Mapping[str, int]:
    """As many choices as experts for even numbers, so that every expert is chosen; one choice of few experts."""
    if sizes.get("num_topk", 1) % 2 == 0:
        return {"experts": sizes["num_topk"]}
    return {"num_topk": 1} if sizes.get("experts", 9) < 6 else {}


TOPK_GATE = Op(
    "tilekernels.moe.topk_gate",
    doc="the num_topk best experts of each token by decreasing score; of equal scores the smaller index first",
    sizes=dict(t=edges(1, 32, 64, 128, hi=300, zero=True), experts=edges(1, 8, 32, 64, 72, 256, 384),
               num_topk=edges(1, 2, 6, 8, 9, 32)),
    fits=lambda p: p.num_topk <= p.experts and p.t * p.experts <= 2**17,
    args=(In("scores", "fp32", "t experts", forms=("offset",)), Value("num_topk", Size("num_topk"))),
    returns=(Returned("topk_idx", "int64", "t num_topk", row_align=1),),
    families=FINITE,
    oracle=moe.topk_gate,
    cost=lambda p: Cost(flops=0, bytes=4 * p.t * p.experts + 8 * p.t * p.num_topk),
    beside=_beside,
    sample=dict(t=5, experts=72, num_topk=6),
    rejects=(
        misuse("num_topk of 33", num_topk=33, raises=REFUSED),
        misuse("num_topk beyond the number of experts", num_topk=9, scores={"shape": "t 8"}, raises=REFUSED),
        misuse("scores in BF16", scores={"dtype": "bf16"}, raises=REFUSED),
        misuse("scores of one axis", scores={"shape": "experts"}, raises=REFUSED),
        misuse("scores with gaps between rows", scores={"row_bytes_extra": 16}, raises=REFUSED),
        misuse("a score is NaN", kind="trap", scores={"fill": "nans"}),
        misuse("a score is infinite", kind="trap", scores={"fill": "infinities"}),
    ),
)

OPS = (TOPK_GATE,)
