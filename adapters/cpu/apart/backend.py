"""The `cpu` backend with one method changed.

As `--backend=adapters.cpu.apart.backend:Backend --backend-option apart=NAME`.

The faults and correct variants of this package were written from the modules' documentation and the adapters'
signatures alone, and were fixed before any case ran on them: they say what the suite finds that nobody tuned it for.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from adapters.cpu.apart.row import Row
from adapters.cpu.backend import CpuBackend
from conformance.protocol import Description, Group

MODULES = ("deepselect", "deepgemm", "tilekernels", "flashmla", "deepep", "tilelang")


@functools.cache
def rows() -> dict[str, Row]:
    """Every row by name. Raises ValueError if two share a name."""
    found: dict[str, Row] = {}
    for module in MODULES:
        for row in importlib.import_module(f"adapters.cpu.apart.{module}").ROWS:
            if row.name in found:
                msg = f"two rows are named {row.name}"
                raise ValueError(msg)
            found[row.name] = row
    return found


def named(options: Mapping[str, str]) -> Row | None:
    """The row that the options ask for, None where they ask for none. Raises ValueError for an unknown name."""
    name = options.get("apart", "")
    if name and name not in rows():
        msg = f"no fault or variant is named {name!r}; there are {', '.join(rows())}"
        raise ValueError(msg)
    return rows()[name] if name else None


class Changed:
    """An adapter that forwards everything but the method of one row, which keeps its signature."""

    def __init__(self, true: Any, row: Row) -> None:
        self._true = true
        method = getattr(true, row.method)

        @functools.wraps(method)
        def changed(**args: Any) -> Any:
            try:
                return row.function(method, args)
            except Exception:
                # Arguments that the op refuses may trip the row first: the op's own exception is the one to raise.
                method(**args)
                raise

        setattr(self, row.method, changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._true, name)


class Backend(CpuBackend):
    """Option `apart`: the name of a row; without it this is the cpu backend."""

    @classmethod
    def describe(cls, options: Mapping[str, str]) -> Description:
        named(options)
        return super().describe(options)

    def __init__(self, *, device: str, options: Mapping[str, str], group: Group | None) -> None:
        super().__init__(device=device, options=options, group=group)
        self._row = named(options)
        self._changed: Changed | None = None

    def adapter(self, module: str) -> Any:
        true = super().adapter(module)
        if self._row is None or self._row.module != module:
            return true
        if self._changed is None:
            self._changed = Changed(true, self._row)
        return self._changed
