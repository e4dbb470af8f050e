"""Who owns the rows of a grouped product: labels, end rows, and what stays untouched."""

from __future__ import annotations

import numpy as np

from conformance.engine.arrays import Draw
from conformance.model import Problem
from references.expected import Inputs

ALIGNMENT = "mk_alignment_for_contiguous_layout"
"""setting of the module: every group starts on a multiple of it"""


def rows(p: Problem) -> int:
    """Rows of A and D: whole blocks of the alignment."""
    return p.blocks * p.values[ALIGNMENT]


def drawn_counts(d: Draw) -> tuple[np.ndarray, np.ndarray]:
    """(rows, blocks) of each group: none, one row, whole blocks, one less, anything; at times blocks are left over."""
    p = d.problem
    step, groups = p.values[ALIGNMENT], p.groups
    spare = (p.seed >> 8) % 3 % (p.blocks + 1)
    owner = (d.words(3, p.blocks - spare) % np.uint64(groups)).astype(np.int64)
    blocks = np.bincount(owner, minlength=groups)
    kind, free = d.words(5, groups) % np.uint64(5), (d.words(7, groups) % np.uint64(step)).astype(np.int64)
    lacking = np.select([kind == 0, kind == 1, kind == 2], [step - 1, 1, free], 0)
    return np.maximum(blocks * step - lacking, 0), blocks


def labels(d: Draw) -> np.ndarray:
    """int32 [m]: the group of each row, -1 for padding: in a group's last block, and whole blocks anywhere."""
    counts, blocks = drawn_counts(d)
    step = d.problem.values[ALIGNMENT]
    out, start = np.full(d.shape, -1, np.int32), 0
    for group, (count, own) in enumerate(zip(counts, blocks, strict=True)):
        padding_block = own > 1 and d.seed % 3 == 0
        out[start : start + (min(count, (own - 1) * step) if padding_block else count)] = group
        start += own * step
    return out


def ends(d: Draw) -> np.ndarray:
    """int32 [groups]: the row behind each group's last; an empty group ends where it starts."""
    counts, blocks = drawn_counts(d)
    starts = (np.cumsum(blocks) - blocks) * d.problem.values[ALIGNMENT]
    return (starts + counts).astype(np.int32)


def layout(d: Draw) -> np.ndarray:
    return ends(d) if d.problem.variant.layout == "psum" else labels(d)


def untouched(p: Problem, inputs: Inputs) -> np.ndarray:
    """bool [m, 1]: rows of blocks that hold padding only, or that lie behind the last group."""
    step, given = p.values[ALIGNMENT], inputs.codes("grouped_layout")
    if p.variant.layout == "psum":
        free = np.arange(rows(p)) >= -(-int(given.max()) // step) * step
    else:
        free = np.repeat((given.reshape(-1, step) < 0).all(axis=1), step)
    return free[:, None]
