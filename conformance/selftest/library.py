"""The rows of the library: seeded faults and correct variants, one an op, and where each is written down.

Settings of the cpu kernels stand in `cases/<module>/faults.toml`; faults that any op can have in
`engine/inject.py`; those that were written apart from all of this in `adapters/cpu/apart/`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.catalogue.load import read_toml
from conformance.collect import ROOT
from conformance.engine.inject import FAULTS

INJECTED_ON = ("deepselect.topk", "deepgemm.bf16_gemm_nt", "flashmla.flash_mla_sparse_fwd")
"""ops on which the op-agnostic faults are planted: callee- and caller-allocated results"""
NO_ROOM = {(fault, "flashmla.flash_mla_sparse_fwd") for fault in ("write_before", "write_behind")}
"""results that fill their memory: no byte beside them can be reached through a backend"""
APART = "adapters.cpu.apart.backend:Backend"
ANY = ("*",)
"""reasons of a fault of which only the check is known that must see it"""


@dataclass(frozen=True)
class Row:
    """One fault or correct variant on one op."""

    module: str
    name: str
    op: str
    check: str
    reasons: tuple[str, ...]
    """what must catch it: reasons or statuses; empty for a correct variant"""
    options: tuple[tuple[str, str], ...] = ()
    """of the backend"""
    profile: tuple[tuple[str, Any], ...] = ()
    inject: str = ""
    backend: str = "cpu"
    doc: str = ""

    @property
    def fault(self) -> bool:
        return bool(self.reasons)

    @property
    def group(self) -> str:
        """What it is counted under: its module, and apart what was written apart."""
        return self.module if self.backend == "cpu" else f"{self.module}, written apart"


def tabled(modules: Sequence[str]) -> Iterator[Row]:
    """Every row of the tables. Raises ValueError for a malformed table."""
    for module in modules:
        path = ROOT / "cases" / module / "faults.toml"
        if not path.exists():
            continue
        table = read_toml(path)
        for kind in ("fault", "variant"):
            for raw in table.get(kind, ()):
                reason = raw.get("reason", ()) if kind == "fault" else ()
                reasons = (reason,) if isinstance(reason, str) else tuple(reason)
                if kind == "fault" and not reasons:
                    msg = f"{path}: {raw.get('name')}: a fault names the reason that must catch it"
                    raise ValueError(msg)
                for op in raw["ops"]:
                    yield Row(module, raw["name"], op, raw.get("check", "values"), reasons,
                              (("knobs", raw["knobs"]),) if raw["knobs"] else (), tuple(raw.get("profile", {}).items()),
                              doc=raw.get("doc", ""))


def injected(modules: Sequence[str]) -> Iterator[Row]:
    """The op-agnostic faults, on a few ops."""
    for op in INJECTED_ON:
        module = op.partition(".")[0]
        if module in modules:
            for fault in (f for f in FAULTS.values() if (f.name, op) not in NO_ROOM):
                yield Row(module, f"any:{fault.name}", op, fault.check, fault.expect, inject=fault.name, doc=fault.doc)


def apart(modules: Sequence[str]) -> Iterator[Row]:
    """What was written from the documents and the adapters' interface alone, and never changed after its first run.

    The rows are asked of a process of their own, for listing them takes the kernels' framework.
    """
    done = subprocess.run([sys.executable, "-m", "adapters.cpu.apart.rows"], cwd=ROOT, capture_output=True, text=True,
                          check=False)
    if done.returncode:
        msg = f"the rows written apart can't be listed: {done.stderr.strip().splitlines()[-1:]}"
        raise RuntimeError(msg)
    for raw in json.loads(done.stdout):
        module = raw["op"].partition(".")[0]
        if module in modules:
            yield Row(module, raw["name"], raw["op"], raw["check"], ANY if raw["kind"] == "fault" else (),
                      (("apart", raw["name"]),), backend=APART, doc=raw["doc"])


def library(modules: Sequence[str], *, only: str = "", parts: Sequence[str] = ("tabled", "injected", "apart")) -> list[
        Row]:
    """The rows of these modules whose names contain `only`, of the parts named."""
    of = {"tabled": tabled, "injected": injected, "apart": apart}
    return [r for part in parts for r in of[part](modules) if only in r.name]
