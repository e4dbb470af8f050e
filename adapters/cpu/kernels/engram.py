"""The optimiser of the n-gram memory, in blocks: momentum, and one step of row and column scaling."""

from __future__ import annotations

import torch

from adapters.cpu.kernels import tile_io
from adapters.cpu.kernels.knobs import Knobs

FAULTS = {
    "rounded_momentum": "the update is made from the momentum as it was stored, not as it was computed",
    "momentum_not_stored": "the update is right and the buffer stays as it was",
    "old_row_scale": "columns are summed with the row scale as it was before the step",
    "reduce_adds": "sums of columns are added to what stood in their place",
}
KNOBS = ("tile_m", "k_order", *tile_io.KNOBS)


def momentum_update(
    grad: torch.Tensor, buffer: torch.Tensor, beta: float, nesterov: bool, knobs: Knobs
) -> torch.Tensor:
    """Writes the new momentum into buffer [n] and returns the update, fp32 [n]."""
    update = torch.empty(len(grad))
    for part in tile_io.row_tiles(len(grad), knobs):
        g = tile_io.load(grad[part], knobs)
        m = beta * tile_io.load(buffer[part], knobs) + (1 - beta) * g
        if knobs.fault != "momentum_not_stored":
            tile_io.store(buffer[part], m, knobs)
        if knobs.fault == "rounded_momentum":
            m = tile_io.load(buffer[part], knobs)
        tile_io.store(update[part], beta * m + (1 - beta) * g if nesterov else m, knobs)
    return update


def sinkhorn_step(
    matrix: torch.Tensor, row_scale: torch.Tensor, col_scale: torch.Tensor, eps: float, knobs: Knobs
) -> tuple[torch.Tensor, torch.Tensor]:
    """(row_norm [r], sums of squares down the columns [blocks, d]); divides row_scale [r] by row_norm + eps.

    A block of `tile_m` rows has a row of sums of its own.
    """
    r, d = matrix.shape
    row_norm, sums = torch.empty(r), []
    for part in tile_io.row_tiles(r, knobs):
        before = row_scale[part].clone()
        x = tile_io.load(matrix[part], knobs)
        norm = (before[:, None] * x * col_scale).square().sum(1).sqrt()
        tile_io.store(row_norm[part], norm, knobs)
        tile_io.store(row_scale[part], before / (norm + eps), knobs)
        used = before if knobs.fault == "old_row_scale" else row_scale[part]
        sums.append((used[:, None] * x * col_scale).square().sum(0))
    return row_norm, torch.stack(sums) if sums else torch.zeros((0, d))


def sinkhorn_step_reduce(partial: torch.Tensor, out: torch.Tensor, knobs: Knobs) -> None:
    """Adds up sums of columns [blocks, d] into out [d], which is overwritten."""
    rows = partial.flip(0) if knobs.k_order == "reverse" else partial
    total = out.clone() if knobs.fault == "reduce_adds" else torch.zeros_like(out)
    for row in rows:
        total = total + row
    tile_io.store(out, total, knobs)
