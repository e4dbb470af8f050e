"""How ranks of the `cpu` backend talk: one gloo group, agreement first, then rows in chunks.

Rows travel as bytes, since gloo has no FP8 and a byte copy keeps every bit
pattern. Every exchange starts with an agreement, in which a rank that has to
refuse the call says so: its peers then raise at once instead of waiting for
rows that never come.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from conformance.protocol import Group


class PeerRefused(RuntimeError):
    """Another rank refused this call, or called something else; every rank raises."""


class Wire:
    """The ranks of one group. A lone rank (group None, or of size 1) needs no transport."""

    def __init__(self, group: Group | None) -> None:
        self.rank, self.size = (group.rank, group.size) if group else (0, 1)
        if group and self.size > 1:
            _start_gloo(group)
        self.nodes: list[int] = self.gather([group.node if group else 0])[:, 0].tolist()

    def gather(self, row: Sequence[int]) -> torch.Tensor:
        """The integer rows of all ranks, int64 [size, len(row)]; all of one length."""
        mine = torch.tensor(list(row), dtype=torch.int64)
        if self.size == 1:
            return mine[None]
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine)
        return torch.stack(rows)

    def agree(
        self, facts: Mapping[str, int], send_counts: Sequence[int], refusal: Exception | None = None
    ) -> torch.Tensor:
        """Counts of rows from every rank to every rank, int64 [source, destination].

        facts: what must be the same on all ranks, by name.
        refusal: why this rank can't take part; it is raised here, after the peers know.
        Raises PeerRefused where a peer refused or a fact differs.
        """
        counts = list(send_counts) if refusal is None else [0] * self.size
        values = list(facts.values()) if refusal is None else [0] * len(facts)
        # The number of facts is fixed for all calls, so that calls which differ still meet in one gather.
        header = [int(refusal is None), *values, *([0] * (MAX_FACTS - len(values)))]
        table = self.gather([*header, *counts])
        if refusal is not None:
            raise refusal
        if not table[:, 0].all():
            msg = f"rank {int(table[:, 0].argmin())} refused this call"
            raise PeerRefused(msg)
        for i, name in enumerate(facts, 1):
            if (table[:, i] != table[0, i]).any():
                msg = f"{name} differs between ranks: {table[:, i].tolist()}"
                raise PeerRefused(msg)
        return table[:, 1 + MAX_FACTS:]

    def exchange(
        self, tables: Sequence[torch.Tensor], counts: torch.Tensor, into: torch.Tensor, chunk_rows: int
    ) -> None:
        """All-to-all of rows, `chunk_rows` a pair of ranks at a time.

        tables: for every destination uint8 [rows, width]. counts: of `agree`.
        into: uint8 [sum of counts[:, rank], width], filled source by source in sending order.
        """
        areas = into.split(counts[:, self.rank].tolist())
        for first in range(0, int(counts.max()), chunk_rows):
            send = [t[first:first + chunk_rows] for t in tables]
            take = [a[first:first + chunk_rows] for a in areas]
            sizes = [len(t) for t in take]
            got = torch.cat(send)
            if self.size > 1:
                got, ours = torch.empty((sum(sizes), into.shape[1]), dtype=torch.uint8), got
                dist.all_to_all_single(got, ours, sizes, [len(t) for t in send])
            for area, rows in zip(take, got.split(sizes), strict=True):
                area.copy_(rows)

    def barrier(self) -> None:
        self.gather([0])


MAX_FACTS = 12


@functools.cache
def join(group: Group | None) -> Wire:
    """The wire of this group; the same object for the same group. Collective on the first call."""
    return Wire(group)


def _start_gloo(group: Group) -> None:
    # A host name that resolves to no usable interface makes gloo fail or wait.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if dist.is_initialized():  # a later attempt in the same process
        dist.destroy_process_group()
    store = dist.PrefixStore(f"attempt{group.attempt}", dist.FileStore(group.rendezvous, group.size))
    dist.init_process_group(
        "gloo", store=store, rank=group.rank, world_size=group.size, timeout=timedelta(seconds=group.timeout_s)
    )


@dataclass(frozen=True)
class Record:
    """How one row lies on the wire: named fields of bytes, one behind the other."""

    widths_bytes: Mapping[str, int]

    @property
    def width_bytes(self) -> int:
        return align(sum(self.widths_bytes.values()), ROW_ALIGN_BYTES)

    def pack(self, fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """uint8 [rows, width_bytes] from tensors [rows, ...] of any dtype."""
        rows = len(next(iter(fields.values())))
        table = torch.zeros((rows, self.width_bytes), dtype=torch.uint8)
        at = 0
        for name, width in self.widths_bytes.items():
            table[:, at:at + width] = as_bytes(fields[name], width)
            at += width
        return table

    def unpack(self, table: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One field as `dtype` [rows, items]."""
        names = list(self.widths_bytes)
        at = sum(self.widths_bytes[n] for n in names[:names.index(name)])
        # A copy, also where the slice is contiguous: its bytes need not be aligned for `dtype`.
        field = table[:, at:at + self.widths_bytes[name]].clone(memory_format=torch.contiguous_format)
        return field.view(dtype)


ROW_ALIGN_BYTES = 32


def as_bytes(t: torch.Tensor, width_bytes: int) -> torch.Tensor:
    """The bytes of a tensor [rows, ...], uint8 [rows, width_bytes]."""
    if not t.numel():  # an empty tensor may have strides that no view accepts
        return torch.empty((len(t), width_bytes), dtype=torch.uint8)
    # A copy in any case: with a size of 1 a contiguous tensor may still have a last stride that no view accepts.
    return t.clone(memory_format=torch.contiguous_format).view(torch.uint8).reshape(len(t), width_bytes)


def align(n: int, to: int) -> int:
    """n rounded up to a multiple of `to`."""
    return -(-n // to) * to
