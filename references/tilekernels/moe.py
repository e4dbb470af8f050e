"""Expert selection of TileKernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from references.expected import Array, Exact, Expected, Inputs, Judgement, Problem
from references.tilekernels.arguments import argument


def topk_gate(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[Any, Expected]:
    """`tilekernels.moe.topk_gate`: for each token the num_topk best experts, int64 (T, num_topk).

    Documented: by decreasing score, of equal scores (also -0 and 0) the smaller index first, so there is one
    right answer. A row with a score that is not finite breaks the contract and is not judged.

    Argument: num_topk. Inputs: scores (T, E) fp32. Output: topk_idx.
    """
    scores = inputs.real("scores")
    k = argument(problem, "num_topk", 0)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int64)
    broken = ~np.isfinite(scores).all(axis=1)
    return {"topk_idx": Ranking(scores, Exact(best, np.broadcast_to(broken[:, None], best.shape)))}


@dataclass(frozen=True)
class Ranking(Expected):
    """One right answer, and a word for what is wrong with another: see `_reason`."""

    scores: Array
    best: Exact

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.best.shape

    def judge(self, codes: Array, fmt: str) -> Judgement:
        verdict = self.best.judge(codes, fmt)
        return verdict if verdict.ok else replace(verdict, reason=self._reason(codes, verdict.bad.any(axis=1)))

    def _reason(self, codes: Array, rows: Array) -> str:
        """An index that is no expert, one chosen twice, others than the best, or just their order."""
        got, scores = codes[rows], self.scores[rows]
        if (got < 0).any() or (got >= scores.shape[1]).any():
            return "index_range"
        if (np.diff(np.sort(got, axis=1), axis=1) == 0).any():
            return "token_duplicated"
        chosen, best = (np.sort(np.take_along_axis(scores, i, axis=1)) for i in (got, self.best.codes[rows]))
        return "order" if np.array_equal(chosen, best) else "numeric"
