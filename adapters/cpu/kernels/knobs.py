"""What a blocked kernel may be told to do, right or wrong.

The defaults are the correct `cpu` backend. Correct variants (other tiles, splits,
orders, tie choices) and every seeded fault are other settings of the same frozen
record; nothing else may alter a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Knobs:
    """Fields a kernel has no use for are ignored by it; a table says which (`KERNELS` of each file)."""

    # How the work is cut and in which order it is added: every setting is correct.
    tile_m: int = 64
    tile_n: int = 64
    tile_k: int = 128
    split_k: int = 1
    k_order: str = "forward"
    """forward | reverse | pairwise"""
    tie_rule: str = "low_index"
    """which of equal values is chosen: low_index | high_index"""
    row_order: str = "index"
    """order of a result that is free: index | reverse | value"""
    softmax_weights: str = "fp32"
    """fp32 | bf16 | fp8: format of softmax weights in the product with V; fp8 is a fault"""
    rescale_lag: float = 0.0
    """the running maximum of a softmax stays as it is while it would grow by no more than this"""
    c_add: str = "once_rounded"
    """how a GEMM adds C: once_rounded | twice_rounded (the product is rounded to D's format first)"""
    label_lookup: str = "row"
    """where a grouped GEMM looks up its group: row | tile (the first row of each tile_m rows counts)"""

    # Faults. The default means: none.
    accumulator: str = "fp32"
    """fp32 | bf16 | fp16: format of the running sum. In GEMMs also the way a chip adds (`accumulators.CHIPS`):
    v100 | a100 | hopper | b200, right under that chip's profile, and hopper_unpromoted, a fault in FP8"""
    partial: str = "fp32"
    """format in which partial sums of a split are kept"""
    output_rounding: str = "nearest_even"
    """nearest_even | toward_zero"""
    overflow: str = "inf"
    """inf | saturate: the largest number instead of infinity, 0 instead of NaN; right under a profile that says so"""
    flush_subnormals: bool = False
    drop_tile: int | None = None
    """index of a tile along the reduced (or scanned) axis that is left out; -1 the last"""
    double_tile: int | None = None
    stale_tile: int | None = None
    """tile that reads its neighbour's operand"""
    drop_tail: bool = False
    """elements behind the last full tile are left out"""
    mask_shift: int = 0
    """added to every bound of a mask"""
    scale_shift: int = 0
    """scales are read this many blocks further on (wrapping)"""
    swap_scales: bool = False
    skip_scale: bool = False
    nan_to: float | None = None
    """NaN inputs are replaced by this value"""
    fault: str = ""
    """name of a fault that only one kernel knows, listed in that kernel's file"""

    @classmethod
    def parse(cls, text: str) -> Knobs:
        """`"tile_m=32,k_order=reverse"`. Raises ValueError naming the known fields."""
        known = {f.name: f for f in fields(cls)}
        kw: dict[str, Any] = {}
        for pair in filter(None, text.split(",")):
            key, _, raw = pair.partition("=")
            if key not in known:
                msg = f"unknown knob {key!r}; known: {', '.join(known)}"
                raise ValueError(msg)
            kw[key] = _value(raw, str(known[key].type))
        return cls(**kw)


def _value(raw: str, annotation: str) -> Any:
    if raw == "none":
        return None
    if annotation.startswith("bool"):
        return raw in ("yes", "true", "True", "1")
    if annotation.startswith("int"):
        return int(raw)
    if annotation.startswith("float"):
        return float(raw)
    return raw
