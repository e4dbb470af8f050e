"""Packed exponents: four to an int32 as the public signatures on CUDA have them, two to an int16 as on Ascend.

Both are little endian, so a word of four is two words of two, one behind the other.
"""

from __future__ import annotations

from typing import Any

import torch


def two_to_a_word(scales: Any, groups: int) -> Any:
    """int16 [rows, ceil(groups / 2)] of int32 [rows, ceil(groups / 4)], whatever its strides; anything else as it is.

    Rows that are contiguous are not copied.
    """
    if getattr(scales, "dim", lambda: 0)() != 2 or str(scales.dtype) != "torch.int32":
        return scales
    rows = scales if scales.stride(1) == 1 or scales.shape[1] <= 1 else scales.contiguous()
    if rows.stride(1) != 1:
        rows = rows.as_strided(rows.shape, (rows.stride(0), 1))
    return rows.view(torch.int16)[:, : -(-groups // 2)]


def four_to_a_word(scales: Any, *, column_major: bool) -> Any:
    """int32 [rows, ceil(words / 2)] of int16 [rows, words]; the bytes of a missing word are 0.

    Row-major, or with stride (1, rows).
    """
    rows, words = scales.shape
    if words % 2 or scales.stride(1) != 1 or not scales.is_contiguous():
        even = torch.zeros((rows, -(-words // 2) * 2), dtype=torch.int16, device=scales.device)
        even[:, :words] = scales
        scales = even
    whole = scales.view(torch.int32)
    if not column_major:
        return whole
    return torch.empty_strided(whole.shape, (1, rows), dtype=torch.int32, device=whole.device).copy_(whole)

