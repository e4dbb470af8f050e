"""TileLang on the CPU: the suite's own programs, compiled by the real TileLang for target `c`, with knobs and faults.

Option `cache_dir`: folder where compiled programs are kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from adapters.cpu.kernels.knobs import Knobs
from adapters.upstream.tilelang import Programs, dtype_of, preload

__all__ = ["FAULTS", "Adapter", "preload"]

FAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "oob_fill_one": {"copy": {"fill": 1.0}},
    "tail_not_guarded": {"copy": {}},
    "blocks_not_swapped": {"transpose": {"swap_blocks": False}},
    "gather_clamped": {"gather": {"clamped": True}},
    "atomic_lost": {"atomic_add": {"atomic": False}},
    # The flag changes the shape that T.gemm expects of B's tile, so the tile must be square.
    "transpose_b_ignored": {"gemm": {"flag_b": False, "tile_n": 32, "tile_k": 32}},
    "gemm_not_cleared": {"gemm": {"init": "c"}},
    "reduce_no_init": {"reduce": {"init": False}},
    "reduce_seed_ignored": {"reduce": {"seed": False}},
    "reduce_pad_zero": {"reduce": {"pad_zero": True}},
    "reduce_drop_last": {"reduce": {"drop_last": True}},
    "exp_as_exp2": {"unary": {"replaced": (("exp", "exp2"),)}},
    "nearbyint_half_away": {"unary": {"replaced": (("nearbyint", "round"),)}},
    "unary_through_fp16": {"unary": {"through": "float16"}},
    "floor_as_trunc": {"binary": {"replaced": (("floordiv", "truncdiv"), ("floormod", "truncmod"))}},
    "clamp_swapped": {"clamp": {"swap": True}},
    "cast_toward_zero": {"cast": {"how": "toward_zero"}},
    "cast_rounded": {"cast": {"how": "rounded"}},
    "cast_through_fp16": {"cast": {"how": "through_fp16"}},
}
"""`Knobs.fault` -> program -> what it is built with instead; `cases/tilelang/faults.toml` describes each."""


class Adapter(Programs):
    """The programs on target `c`, built with what the knobs change."""

    def __init__(self, backend: Any) -> None:
        self._knobs: Knobs = backend.knobs
        self.start(backend.options, "c")

    def copy(self, x: Any, out: Any, *, tile_m: int = 32, tile_n: int = 64, fill: float | None = None) -> None:
        if self._knobs.fault != "tail_not_guarded":
            return super().copy(x, out, tile_m=tile_m, tile_n=tile_n, fill=fill)
        params = {"dtype": dtype_of(x), "tile_m": tile_m, "tile_n": tile_n}
        config = {"tl.disable_safe_memory_legalize": True}
        return self._kernel("movement", "copy_unguarded", params, config=config)(x, out)

    def altered(self, program: str, params: Mapping[str, Any], build: Any) -> dict[str, Any]:
        return _altered(self._knobs, program, params, inspect.signature(build).parameters)


def _altered(knobs: Knobs, program: str, params: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of this program that the knobs set: tiles and order of k, and faults.

    A tile of the knobs beats that of the call; `tile` of a one-dimensional program is tile_n.
    """
    plain = Knobs()
    asked = {n: getattr(knobs, n) for n in ("tile_m", "tile_n", "tile_k") if getattr(knobs, n) != getattr(plain, n)}
    if "tile_n" in asked:
        asked["tile"] = asked["tile_n"]
    if knobs.k_order == "reverse":
        asked["k_reverse"] = True
    if knobs.drop_tile == -1:
        asked["k_dropped"] = 1
    if knobs.drop_tail:
        asked["drop_tail"] = True
    if knobs.accumulator == "fp16" and params.get("acc_dtype") == "float32":
        asked["acc_dtype"] = "float16"
    asked |= FAULTS.get(knobs.fault, {}).get(program, {})
    return {name: value for name, value in asked.items() if name in known}
