"""What contracts check with: each condition has the exception type of the layer that checks it."""

from __future__ import annotations

from typing import Any

import torch


def host(ok: bool, condition: str) -> None:
    """A check of a module's compiled part: RuntimeError."""
    if not ok:
        msg = f"Assertion error: {condition}"
        raise RuntimeError(msg)


def asserts(ok: bool, condition: str) -> None:
    """A check of a module's Python part: AssertionError."""
    if not ok:
        raise AssertionError(condition)


def is_tensor(name: str, t: Any, dtypes: torch.dtype | tuple[torch.dtype, ...], shape: tuple[int | None, ...]) -> None:
    """RuntimeError unless a tensor of one of these dtypes and of this shape (None: any size)."""
    if not isinstance(t, torch.Tensor):
        msg = f"{name} must be a tensor, got {type(t).__name__}"
        raise TypeError(msg)
    wanted = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    host(t.dtype in wanted, f"{name} has dtype {t.dtype}, expected {', '.join(map(str, wanted))}")
    fits = t.dim() == len(shape) and all(w in (None, g) for w, g in zip(shape, t.shape, strict=True))
    host(fits, f"{name} has shape {tuple(t.shape)}, expected {shape}")


def last_stride_one(name: str, t: torch.Tensor) -> None:
    host(t.stride(-1) == 1, f"the last stride of {name} must be 1, got {t.stride(-1)}")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def align(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def exponents(x: torch.Tensor) -> torch.Tensor:
    """bool: which elements are +0, +inf or a power of two, as scale factors of a block-scaled product must be."""
    bits = x.contiguous().view(torch.int32)
    return (bits >= 0) & ((bits & 0x7FFFFF) == 0)
