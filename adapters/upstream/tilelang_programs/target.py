"""Which memory scopes, loops and switches a TileLang target needs: the only place that knows.

A program is written once against `Target`; what differs between targets is this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tilelang.language as T


@dataclass(frozen=True)
class Target:
    """One TileLang target.

    compile_target, execution_backend, pass_configs: go to `tilelang.compile`.
    operand: allocates a tile that copies fill and gemm reads.
    accumulator: allocates a tile that gemm or reduce writes.
    loop: the parallel loop over the elements of a tile.
    threads: threads a block, where the target has them.
    missing: functions of `elementwise.FUNCTIONS` that this target's code generator lacks.
    """

    name: str
    compile_target: str | Mapping[str, Any]
    execution_backend: str
    operand: Callable[..., Any]
    accumulator: Callable[..., Any]
    loop: Callable[..., Any]
    threads: int = 128
    pass_configs: Mapping[str, Any] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()


CPU = Target(
    "c",
    "c",
    "cython",
    # gemm, reduce, fill and transpose accept `local` only; at most one shared tile a kernel.
    T.alloc_local,
    T.alloc_local,
    # A `local` tile may not be indexed by a T.Parallel variable.
    T.grid,
    # Vector forms of most casts, operators and functions have no C text.
    pass_configs={"tirx.disable_vectorize": True},
    missing=frozenset({"abs", "exp10", "isfinite", "isinf"}),
)

CUDA = Target("cuda", "cuda", "auto", T.alloc_shared, T.alloc_fragment, T.Parallel)
