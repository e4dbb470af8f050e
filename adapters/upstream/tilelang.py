"""TileLang (`tilelang`): the suite's own programs, a method an op, compiled by the real TileLang for a target.

Sizes are dynamic; what a compiled program is special to (dtypes, tiles, flags) is named in
the arguments of each op. Option `cache_dir`: folder where compiled programs are kept.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from adapters.upstream.base import UpstreamAdapter
from adapters.upstream.release import Refused

_PROGRAMS = "adapters.upstream.tilelang_programs"
_ACCUMULATORS = {"int8": "int32", "uint8": "int32", "float64": "float64"}
"""dtype of a gemm's running sum by operand dtype; float32 for all others."""

_KERNELS: dict[Any, Any] = {}
"""Compiled programs of this process; a forked child inherits them."""


@functools.cache
def _own_cache_dir() -> str:
    """A folder of this process, which its forked children share and only it removes."""
    path, owner = tempfile.mkdtemp(prefix="tilelang-cache-"), os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(path, ignore_errors=True))
    return path


def preload(options: Mapping[str, str]) -> None:
    """Import TileLang and say where it keeps what it compiles; call it before forking. Compiles nothing.

    Raises ImportError where TileLang is missing.
    """
    # TileLang reads both whenever it needs them, so a later backend may name another folder.
    os.environ["TILELANG_CACHE_DIR"] = options.get("cache_dir") or _own_cache_dir()
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    for name in ("elementwise", "gemm", "movement", "reduce"):
        importlib.import_module(f"{_PROGRAMS}.{name}")


@contextlib.contextmanager
def _scratch() -> Iterator[None]:
    """Temporary files of a compile go to a folder that is removed, for TileLang leaves them behind.

    It stands in the cache, so that what a killed process can't remove does not pile up elsewhere.
    """
    cache = os.environ["TILELANG_CACHE_DIR"]
    os.makedirs(cache, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=cache) as folder:
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            yield
        finally:
            tempfile.tempdir = before


def _programs(name: str) -> ModuleType:
    return importlib.import_module(f"{_PROGRAMS}.{name}")


def dtype_of(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def target_named(name: str) -> Any:
    """The row of `tilelang_programs.target` with this name. Raises Refused where there is none."""
    try:
        return _programs("target").target_of(name)
    except KeyError as e:
        raise Refused(f"the suite's TileLang programs are not written for this: {e.args[0]}") from e


class Programs:
    """A method an op. All tensors are contiguous; TileLang itself refuses what it does not take.

    builds: (program, seconds) of every program this adapter compiled or loaded, in order.
    """

    def start(self, options: Mapping[str, str], target: str) -> None:
        """Import TileLang and look the target up; compiles nothing. Raises ImportError or Refused."""
        preload(options)
        self.target = target_named(target)
        self.builds: list[tuple[str, float]] = []
        self._only_build = False

    def compile(self, method: str, kwargs: Mapping[str, Any]) -> None:
        """Compile or load what the call needs, and call nothing."""
        self._only_build = True
        try:
            getattr(self, method)(**kwargs)
        finally:
            self._only_build = False

    def copy(self, x: Any, out: Any, *, tile_m: int = 32, tile_n: int = 64, fill: float | None = None) -> None:
        """out[i,j] = x[i,j] where x has it, else fill (0 where None): T.copy and T.annotate_safe_value.

        x [m, n], out [mo, no] of one dtype, any sizes. Raises ValueError for other dtypes, ranks or strides.
        """
        params = {"dtype": dtype_of(x), "tile_m": tile_m, "tile_n": tile_n, "fill": fill}
        self._kernel("movement", "copy", params)(x, out)

    def transpose(self, x: Any, *, tile_m: int = 32, tile_n: int = 64) -> Any:
        """x.T as a new tensor, by T.transpose; x [m, n]. The result is allocated by TileLang (out_idx)."""
        return self._kernel(
            "movement", "transpose", {"dtype": dtype_of(x), "tile_m": tile_m, "tile_n": tile_n}, out_idx=-1
        )(x)

    def gather(self, x: Any, index: Any, out: Any, *, tile: int = 128) -> None:
        """out[i] = x[index[i]], 0 for an index outside x. x [n], index [k] int32 or int64, out [k]."""
        params = {"dtype": dtype_of(x), "index_dtype": dtype_of(index), "tile": tile}
        self._kernel("movement", "gather", params)(x, index, out)

    def atomic_add(self, x: Any, index: Any, out: Any, *, tile: int = 128) -> None:
        """out[index[i]] += x[i] by T.atomic_add; an index outside out is dropped. x [k], index [k], out [n]."""
        params = {"dtype": dtype_of(x), "index_dtype": dtype_of(index), "tile": tile}
        self._kernel("movement", "atomic_add", params)(x, index, out)

    def gemm(
        self,
        a: Any,
        b: Any,
        c: Any,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
        init: str = "clear",
        tile_m: int = 64,
        tile_n: int = 64,
        tile_k: int = 32,
    ) -> None:
        """c = op(a) @ op(b) by T.gemm; with init="c" that is added to c.

        a [m, k] ([k, m] if transpose_a), b [k, n] ([n, k] if transpose_b), c [m, n]; a and b of
        one dtype. The sum is float32 (int32 for int8, float64 for float64), rounded once to c's
        dtype. init: clear (T.clear), clear_accum (the flag of T.gemm), c.
        """
        if init not in ("clear", "clear_accum", "c"):
            msg = f"init must be clear, clear_accum or c, not {init!r}"
            raise ValueError(msg)
        dtype = dtype_of(a)
        params = {
            "dtype": dtype, "out_dtype": dtype_of(c), "acc_dtype": _ACCUMULATORS.get(dtype, "float32"),
            "transpose_a": transpose_a, "transpose_b": transpose_b, "init": init,
            "tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k,
        }  # fmt: skip
        self._kernel("gemm", "gemm", params)(a, b, c)

    def reduce(
        self,
        x: Any,
        out: Any,
        *,
        kind: str,
        dim: int = 1,
        clear: bool = True,
        tile_m: int = 32,
        tile_n: int = 64,
    ) -> None:
        """out = x reduced along dim by T.reduce_<kind>; clear=False combines with what stands in out.

        x [m, n], out [m] for dim 1, [n] for dim 0, one dtype. kind: sum, max, min, absmax; for
        integers bitand, bitor, bitxor too. An empty extent gives the identity.
        """
        known = _programs("reduce").REDUCERS
        if kind not in known or dim not in (0, 1):
            msg = f"kind must be one of {', '.join(known)} and dim 0 or 1, not {kind!r} and {dim!r}"
            raise ValueError(msg)
        params = {"dtype": dtype_of(x), "kind": kind, "dim": dim, "clear": clear, "tile_m": tile_m, "tile_n": tile_n}
        self._kernel("reduce", "reduce", params)(x, out)

    def elementwise(self, x: Any, out: Any, *, function: str, tile: int = 128) -> None:
        """out[i] = T.<function>(x[i]); x, out [n] of one floating dtype. A predicate gives 1 or 0.

        Raises ValueError for an unknown function, NotImplementedError for one the target lacks.
        """
        programs = _programs("elementwise")
        family = programs.family_of(function)
        if function in self.target.lacks(dtype_of(x)):
            msg = f"TileLang's target {self.target.name} has no {function}"
            raise NotImplementedError(msg)
        kernel = self._kernel("elementwise", "unary", {"dtype": dtype_of(x), "family": family, "tile": tile})
        kernel(x, out, list(programs.FAMILIES[family]).index(function))

    def arithmetic(self, a: Any, b: Any, out: Any, *, function: str, tile: int = 128) -> None:
        """out[i] = a[i] function b[i]; all [n] of one dtype.

        add, sub, mul, max, min; div for floats; for integers floordiv, floormod, truncdiv,
        truncmod, bitand, bitor, bitxor, shl, shr. Raises ValueError for any other.
        """
        known = list(_programs("elementwise").operators(dtype_of(a)))
        if function not in known:
            msg = f"unknown function {function!r} of {dtype_of(a)}; known: {', '.join(known)}"
            raise ValueError(msg)
        kernel = self._kernel("elementwise", "binary", {"dtype": dtype_of(a), "tile": tile})
        kernel(a, b, out, known.index(function))

    def clamp(self, x: Any, out: Any, *, low: float, high: float, tile: int = 128) -> None:
        """out[i] = T.clamp(x[i], low, high): NaN stays NaN, high where low > high.

        x, out [n], float32 or float16; the bounds are rounded to float32, then to x's dtype.
        """
        self._kernel("elementwise", "clamp", {"dtype": dtype_of(x), "tile": tile})(x, out, float(low), float(high))

    def cast(self, x: Any, out: Any, *, tile: int = 128) -> None:
        """out[i] = T.cast(x[i], dtype of out); x, out [n]."""
        self._kernel("elementwise", "cast", {"dtype": dtype_of(x), "out_dtype": dtype_of(out), "tile": tile})(x, out)

    def _kernel(
        self,
        module: str,
        program: str,
        params: Mapping[str, Any],
        *,
        out_idx: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Any:
        """The compiled program; compiled or loaded at its first use."""
        build, target = self.target.program(module, program), self.target
        params = {**params, **self.altered(program, params, build)}
        key = (target.name, program, *sorted(params.items()))
        if key not in _KERNELS:
            tilelang = importlib.import_module("tilelang")
            began = time.perf_counter()
            with _scratch():
                _KERNELS[key] = tilelang.compile(
                    build(target, **params),
                    out_idx=out_idx,
                    target=target.compile_target,
                    execution_backend=target.execution_backend,
                    pass_configs={**target.pass_configs, **(config or {})},
                )
            self.builds.append((program, time.perf_counter() - began))
        return (lambda *_: None) if self._only_build else _KERNELS[key]

    def altered(self, program: str, params: Mapping[str, Any], build: Any) -> dict[str, Any]:
        """Parameters that a program is built with instead of those that the call asks for."""
        return {}


class Adapter(Programs, UpstreamAdapter):
    """The programs on a chip's target, `backend.tilelang_target`."""

    module, package = "tilelang", "tilelang"

    def __init__(self, backend: Any) -> None:
        UpstreamAdapter.__init__(self, backend)
        self.start(backend.options, backend.tilelang_target)

    def recognised(self) -> str:
        """`0.1` is TileLang itself; its fork for older Ascend chips has the same import name and another language."""
        language = importlib.import_module("tilelang.language")
        if hasattr(language, "gemm_v0") or not hasattr(language, "annotate_safe_value"):
            return "tilelang-ascend"
        return "0.1"

    def found(self) -> dict[str, str]:
        return {**super().found(), "target": self.target.name}
