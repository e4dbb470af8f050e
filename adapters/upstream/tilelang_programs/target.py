"""Which memory scopes, loops, texts and switches a TileLang target needs: the only place that knows.

A program is written once against `Target`; what differs between targets is this table. A target whose language lacks
the launch or the scopes of the common text names a package of its own with the same programs (`text`).
A plug-in makes a `Target` for its chip and is named by `package.module:NAME`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import tilelang.ascend.language as A
import tilelang.language as T

COMMON = "adapters.upstream.tilelang_programs"
FUNCTION_NAMES = (
    "exp", "exp2", "exp10", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sigmoid", "sin", "cos", "tan", "atan",
    "sinh", "cosh", "tanh", "erf", "floor", "ceil", "trunc", "round", "nearbyint", "abs", "isnan", "isinf", "isfinite",
)  # fmt: skip
"""the functions of one value, in the order of `elementwise.FUNCTIONS`"""


@dataclass(frozen=True)
class Target:
    """One TileLang target.

    compile_target, execution_backend, pass_configs: go to `tilelang.compile`.
    operand: allocates a tile that copies fill and gemm reads.
    accumulator: allocates a tile that gemm or reduce writes.
    loop: the parallel loop over the elements of a tile.
    vector: allocates a tile that a loop or a reduction works on.
    threads: threads a block, where the target has them.
    missing: functions of `elementwise.FUNCTIONS` that this target's code generator lacks, and missing_in: those that it
    lacks in one dtype only; a family of functions is compiled without them.
    text: package with the programs, modules `movement`, `elementwise`, `reduce` and `gemm`.
    finish: kernel text -> (kind, bytes, log) of the vendor's compiler; None where the text is the artefact.
    limits: for a target without a file of its own, op -> limit rows as in `protocol.Support`.
    """

    name: str
    compile_target: str | Mapping[str, Any]
    execution_backend: str
    operand: Callable[..., Any]
    accumulator: Callable[..., Any]
    loop: Callable[..., Any]
    vector: Callable[..., Any] = T.alloc_shared
    threads: int = 128
    pass_configs: Mapping[str, Any] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    missing_in: Mapping[str, frozenset[str]] = field(default_factory=dict)
    text: str = COMMON
    finish: Callable[[str], tuple[str, bytes, str]] | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)

    def lacks(self, dtype: str) -> frozenset[str]:
        """The functions of one value that this target does not have in this dtype."""
        return self.missing | self.missing_in.get(dtype, frozenset())

    def program(self, module: str, name: str) -> Callable[..., Any]:
        """The builder of a program in this target's text."""
        return getattr(importlib.import_module(f"{self.text}.{module}"), name)


CPU = Target(
    "c",
    "c",
    "cython",
    # gemm, reduce, fill and transpose accept `local` only; at most one shared tile a kernel.
    T.alloc_local,
    T.alloc_local,
    # A `local` tile may not be indexed by a T.Parallel variable.
    T.grid,
    vector=T.alloc_local,
    # Vector forms of most casts, operators and functions have no C text.
    pass_configs={"tirx.disable_vectorize": True},
    missing=frozenset({"abs", "exp10", "isfinite", "isinf"}),
)

_PREDICATES = frozenset({"isnan", "isinf", "isfinite"})
CUDA = Target(
    "cuda",
    "cuda",
    "auto",
    T.alloc_shared,
    T.alloc_fragment,
    T.Parallel,
    missing_in={"float16": frozenset({"log1p"}), "bfloat16": frozenset({"log1p"}) | _PREDICATES},
)

# Without the letter behind it an arch lowers, but nvcc refuses the text of warp-specialised kernels.
SM90A = replace(CUDA, name="sm_90a", compile_target={"kind": "cuda", "arch": "sm_90a"})
SM100A = replace(CUDA, name="sm_100a", compile_target={"kind": "cuda", "arch": "sm_100a"})

ASCEND = Target(
    "ascend",
    "ascend",
    "auto",
    # The cube reads L1 and writes L0C; loops and reductions run in T.SimtVF on the unified buffer.
    A.alloc_l1,
    A.alloc_l0c,
    A.Parallel,
    vector=A.alloc_shared,
    # Vectorised loops over 8 and 16 bits have no type in the text of a T.SimtVF.
    pass_configs={"tirx.disable_vectorize": True},
    missing_in={"float16": frozenset({"sinh", "cosh", "nearbyint"}),
                "bfloat16": frozenset(FUNCTION_NAMES) - {"rsqrt", "sigmoid"}},
    text=f"{COMMON}.ascend",
)

TARGETS: Mapping[str, Target] = {t.name: t for t in (CPU, CUDA, SM90A, SM100A, ASCEND)}


def target_of(name: str) -> Target:
    """A target by its name, or by `package.module:NAME`. Raises KeyError naming the known ones, or TypeError."""
    module, sep, attribute = name.partition(":")
    if not sep:
        if name not in TARGETS:
            msg = f"unknown target {name!r}; known: {', '.join(TARGETS)}, or package.module:NAME"
            raise KeyError(msg)
        return TARGETS[name]
    found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, Target):
        msg = f"{name} is a {type(found).__name__}, not a Target"
        raise TypeError(msg)
    return found
