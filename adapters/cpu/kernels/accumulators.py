"""Bit-accurate models of how matrix units add: block by block, aligned, cut and cut again.

A unit takes `width` products at a time. It aligns them and the running sum to the largest of them, cuts each toward
zero, adds exactly and cuts the sum toward zero. Widths and bits as published by Fasi, Higham, Mikaitis and Pranesh
(Numerical behavior of NVIDIA tensor cores, 2021), Li et al. (FTTN, 2024) and Khattak and Mikaitis (Accurate models of
NVIDIA tensor cores, 2025). A product counts with the exponent of its value, not with the sum of its factors' exponents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_SMALLEST_EXPONENT = -149
"""of a bit of FP32"""
_OVERFLOW = 2.0**128


@dataclass(frozen=True)
class Unit:
    """One kind of matrix unit."""

    width: int
    """products added at a time"""
    fraction_bits: int
    """bits kept below the leading one of the largest addend"""
    significant_bits: int = 24
    """bits of the running sum"""
    promoted: bool = False
    """the unit starts from zero for every block of the kernel, whose sum is scaled and added in FP32"""

    def add(self, acc: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor,
            factor: torch.Tensor | None = None) -> torch.Tensor:
        """acc + factor * (left @ right) as the unit gets it: FP32 [m, n].

        acc: FP32 [m, n], None for zero. left: FP32 [m, k], right: FP32 [k, n], k the block's. factor: float64 [m, n].
        Unless promoted, the factor goes to each product on its way into the unit, as with scales inside of it.
        """
        rows, columns = left.double().numpy(), right.t().double().numpy()
        scale = np.ones((len(rows), len(columns))) if factor is None else factor.numpy()
        total = np.zeros_like(scale) if acc is None or self.promoted else acc.double().numpy()
        inside = np.ones_like(scale) if self.promoted else scale
        for k in range(0, rows.shape[1], self.width):
            part = slice(k, k + self.width)
            with np.errstate(invalid="ignore", over="ignore"):
                total = self._step(total, rows[:, None, part] * columns[None, :, part] * inside[..., None])
        if not self.promoted:
            return torch.from_numpy(total).float()
        chunk = torch.from_numpy(total * scale).float()
        return chunk if acc is None else acc + chunk

    def _step(self, total: np.ndarray, products: np.ndarray) -> np.ndarray:
        """One block of products [m, n, width] added to the running sum [m, n]; float64, exact up to the cuts."""
        largest = np.maximum(np.abs(total), np.abs(products).max(axis=-1))
        finite = np.isfinite(largest)
        if not finite.all():
            with np.errstate(invalid="ignore"):
                special = total + products.sum(axis=-1)  # infinities and NaN go through as IEEE has them
            known = self._step(np.where(finite, total, 0.0), np.where(finite[..., None], products, 0.0))
            return np.where(finite, known, special)
        shift = self.fraction_bits + 1 - np.frexp(largest)[1]  # what is left of the point then is kept
        whole = np.trunc(np.ldexp(total, shift)) + np.trunc(np.ldexp(products, shift[..., None])).sum(axis=-1)
        cut = np.maximum(np.frexp(whole)[1] - self.significant_bits, shift + _SMALLEST_EXPONENT)
        out = np.ldexp(np.trunc(np.ldexp(whole, -cut)), cut - shift)
        return np.where(np.abs(out) < _OVERFLOW, out, np.copysign(np.inf, out))


@dataclass(frozen=True)
class Chip:
    """The units of a chip: for operands of 16 bits, and for FP8."""

    wide: Unit
    fp8: Unit


_HOPPER = Unit(width=16, fraction_bits=25)
_V100, _A100 = Unit(width=4, fraction_bits=23), Unit(width=8, fraction_bits=24)
CHIPS: dict[str, Chip] = {
    "v100": Chip(_V100, _V100),
    "a100": Chip(_A100, _A100),
    "hopper": Chip(_HOPPER, Unit(width=32, fraction_bits=13, significant_bits=14, promoted=True)),
    "hopper_unpromoted": Chip(_HOPPER, Unit(width=32, fraction_bits=13, significant_bits=14)),
    "b200": Chip(_HOPPER, Unit(width=32, fraction_bits=25)),
}
"""`Knobs.accumulator` to what it stands for. V100 and A100 have no FP8: there the codes go through the 16-bit unit."""


def unit_of(name: str, *, fp8: bool) -> Unit | None:
    """The unit that a setting of `Knobs.accumulator` names, None for a plain format."""
    chip = CHIPS.get(name)
    if chip is None:
        return None
    return chip.fp8 if fp8 else chip.wide
