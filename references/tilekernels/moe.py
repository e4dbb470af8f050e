"""Expert selection of TileKernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from references.expected import Exact, Expected, Inputs, Problem
from references.tilekernels.arguments import argument


def topk_gate(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[Any, Expected]:
    """`tilekernels.moe.topk_gate`: for each token the num_topk best experts, int64 (T, num_topk).

    Documented: by decreasing score, of equal scores (also -0 and 0) the smaller index first, so there is one
    right answer. A row with a score that is not finite breaks the contract and is not judged.

    Argument: num_topk. Inputs: scores (T, E) fp32. Output: topk_idx.
    """
    scores = inputs.real("scores")
    k = argument(problem, "num_topk", 0)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int64)
    broken = ~np.isfinite(scores).all(axis=1)
    return {"topk_idx": Exact(order, np.broadcast_to(broken[:, None], order.shape), reason="order")}
