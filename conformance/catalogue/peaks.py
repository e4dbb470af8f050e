"""Published peaks and speeds as data: `peaks.toml` and `claims.toml`, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from conformance.catalogue.load import HERE, MODULES, read_toml

UNITS = ("TFLOPS", "GB/s", "us")
MEMORY = "hbm"
"""the `peak` of a claim about memory"""


@dataclass(frozen=True)
class Chip:
    """Published rates of one chip: 10^12 operations a second of the matrix unit alone, dense, at the rated clock.

    device_names: what a driver calls it, word for word. ungraded: formats about which public sources contradict
    each other. not_a_peak: figures in tables that no product can reach.
    """

    id: str
    vendor: str
    source: str
    memory_tb_s: float
    tflops: Mapping[str, float]
    device_names: tuple[str, ...] = ()
    vector_tflops: Mapping[str, float] = field(default_factory=dict)
    not_a_peak: Mapping[str, float] = field(default_factory=dict)
    ungraded: tuple[str, ...] = ()
    cache_mb: float = 0.0
    link_gb_s: float = 0.0
    engine: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    def flops(self, unit: str) -> float | None:
        """Operations a second of `bf16` (matrix) or `vector_fp32`; None where none is published, or two that differ."""
        name = unit.removeprefix("vector_")
        table = self.vector_tflops if name != unit else self.tflops
        return None if name in self.ungraded or name not in table else table[name] * 1e12


@dataclass(frozen=True)
class Claim:
    """A published speed. `why` says why nothing is compared with it; without one, op and workload say what is."""

    module: str
    what: str
    source: str
    chips: tuple[str, ...] = ()
    figure: float = 0.0
    unit: str = ""
    text: str = ""
    peak: str = ""
    fraction: float = 0.0
    op: str = ""
    workload: str = ""
    why: str = ""

    def of_peak(self, chip: Chip) -> float | None:
        """The share of the published peak: as stated, else the figure over the peak; None where neither is known."""
        if self.fraction:
            return self.fraction
        if self.peak == MEMORY:
            return self.figure / (chip.memory_tb_s * 1000)
        whole = chip.flops(self.peak) if self.peak else None
        return self.figure * 1e12 / whole if whole and self.unit == "TFLOPS" else None


@dataclass(frozen=True)
class Attained:
    """The largest product rate that somebody measured on a chip, in 10^12 operations a second."""

    chip: str
    format: str
    tflops: float
    source: str


def _rows(file: str, key: str, kind: Any) -> tuple[Any, ...]:
    out = []
    for i, raw in enumerate(read_toml(HERE / file).get(key, ())):
        name = raw.get("id") or raw.get("what") or f"row {i + 1}"
        known = {f.name: f for f in fields(kind)}
        unknown = sorted(set(raw) - set(known))
        missing = [n for n in ("source",) if not raw.get(n)]
        if unknown or missing:
            msg = f"{file}: {name}: " + (f"unknown field {unknown[0]!r}" if unknown else f"no {missing[0]}")
            raise ValueError(msg)
        try:
            out.append(kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}))
        except TypeError as e:
            msg = f"{file}: {name}: {e}"
            raise ValueError(msg) from e
    return tuple(out)


@cache
def chips() -> Mapping[str, Chip]:
    """Every chip by its id. Raises ValueError for a malformed table."""
    found = {c.id: c for c in _rows("peaks.toml", "chip", Chip)}
    for c in found.values():
        for name, rate in {**c.tflops, **c.vector_tflops}.items():
            if not 0 < rate < 1e6:
                msg = f"peaks.toml: {c.id}: {name} is {rate}; a rate is given in 10^12 operations a second"
                raise ValueError(msg)
    return found


@cache
def attained() -> tuple[Attained, ...]:
    """What large products were measured to reach."""
    return _rows("peaks.toml", "attained", Attained)


@cache
def claims() -> tuple[Claim, ...]:
    """Every published speed. Raises ValueError for a malformed table."""
    found = _rows("claims.toml", "claim", Claim)
    for c in found:
        wrong = ""
        if c.module not in MODULES:
            wrong = f"unknown module {c.module!r}"
        elif unknown := [x for x in c.chips if x not in chips()]:
            wrong = f"unknown chip {unknown[0]!r}"
        elif c.figure and c.unit not in UNITS:
            wrong = f"a figure in {c.unit!r}; known units: {', '.join(UNITS)}"
        elif bool(c.why) == bool(c.op and c.workload and c.figure and c.peak):
            wrong = "it says either why nothing is compared with it, or op, workload, figure and peak"
        if wrong:
            msg = f"claims.toml: {c.what}: {wrong}"
            raise ValueError(msg)
    return found


def chip_named(device_name: str) -> Chip | None:
    """The chip whose driver name this is, word for word: parts with nearly the same name have other clocks."""
    return next((c for c in chips().values() if device_name.lower() in map(str.lower, c.device_names)), None)
