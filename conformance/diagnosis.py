"""Diagnoses for a run: the bench they need is started at the first failure, and kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from conformance.bench import bench_of
from conformance.engine.attempt import Bench
from conformance.engine.diagnose import LIMIT_S, Further, diagnose
from conformance.engine.evidence import Evidence
from conformance.engine.rig import SETTABLE
from conformance.engine.told import Diagnosis
from conformance.model import Op

MOST = 24
"""failures that are diagnosed; a backend that gets everything wrong is not held up. A replay diagnoses again"""


class Diagnoser:
    """Call it with an op and what was seen of it. Where the cpu kernels can't be had it says nothing, and asks once."""

    def __init__(self, limit_s: float = LIMIT_S, most: int = MOST) -> None:
        self.limit_s, self.left = limit_s, most
        self._stack = contextlib.ExitStack()
        self._bench: Bench | None = None
        self._asked = False

    def __call__(self, op: Op, evidence: Sequence[Evidence], further: Further | None = None,
                 tiles: Iterable[int] = ()) -> Diagnosis | None:
        """See `engine.diagnose.diagnose`. Raises nothing."""
        self.left -= 1
        if self.left < 0:
            return None
        return diagnose(op, evidence, self._started, further=further, tiles=tiles, limit_s=self.limit_s)

    def _started(self) -> Bench:
        if not self._asked:
            self._asked = True
            self._bench = self._stack.enter_context(bench_of(SETTABLE, {}))
        if self._bench is None:
            msg = "the cpu kernels can't be had here"
            raise RuntimeError(msg)
        return self._bench

    def close(self) -> None:
        """End its processes."""
        self._stack.close()
