"""Which blocks of an axis a blocked kernel visits, in which order, and in which split."""

from __future__ import annotations

from typing import NamedTuple

from adapters.cpu.kernels.knobs import Knobs


class Block(NamedTuple):
    """`width` elements that count as positions `start..`, read from `source..`."""

    start: int
    source: int
    width: int


def walk(length: int, tile: int, knobs: Knobs) -> list[list[Block]]:
    """Blocks of `tile` elements over `length`, one list a split, in visiting order.

    Correct settings cut the axis into blocks that are each visited once and read at
    their own place. `drop_tile`, `double_tile`, `stale_tile` and `drop_tail` break
    exactly that. Empty splits are left out, so an axis of length 0 gives no list.
    """
    count = -(-length // tile)
    order = list(range(count))
    if knobs.drop_tail and length % tile:
        order.pop()
    order = [t for t in order for _ in range(_visits(t, count, knobs))]
    per_split = -(-len(order) // max(knobs.split_k, 1)) or 1
    splits = [order[i : i + per_split] for i in range(0, len(order), per_split)]
    return [[_block(t, length, tile, count, knobs) for t in _ordered(split, knobs.k_order)] for split in splits]


def _visits(tile: int, count: int, knobs: Knobs) -> int:
    """How often a tile is visited; negative numbers in a knob count from the end."""
    if knobs.drop_tile is not None and tile in (knobs.drop_tile, count + knobs.drop_tile):
        return 0
    if knobs.double_tile is not None and tile in (knobs.double_tile, count + knobs.double_tile):
        return 2
    return 1


def _ordered(tiles: list[int], k_order: str) -> list[int]:
    if k_order == "reverse":
        return tiles[::-1]
    if k_order == "pairwise":
        return tiles[::2] + tiles[1::2]
    return tiles


def _block(tile: int, length: int, size: int, count: int, knobs: Knobs) -> Block:
    start = tile * size
    source = start
    if knobs.stale_tile is not None and tile in (knobs.stale_tile, count + knobs.stale_tile) and tile > 0:
        source = start - size
    return Block(start, source, min(size, length - start))
