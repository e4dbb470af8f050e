"""The devices of a run as its controller sees them: which there are, who works where, what became of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from conformance import backends
from conformance.collect import UsageError
from conformance.engine.executor import THREAD_VARIABLES
from conformance.engine.leases import lease_folder
from conformance.options import backend_options, split
from conformance.results import Record

_FOUND = pytest.StashKey[backends.SetUp | Exception]()
SHOWN_ROWS = 8


def set_up(config: pytest.Config) -> backends.SetUp:
    """The backend's description and devices, asked once a run. Raises UnknownBackend, BackendUnusable, UsageError."""
    if _FOUND not in config.stash:
        try:
            options = backend_options(config.getoption("--backend-option"))
            config.stash[_FOUND] = backends.set_up(config.getoption("--backend"), options)
        except (UsageError, backends.UnknownBackend, backends.BackendUnusable) as e:
            config.stash[_FOUND] = e
    found = config.stash[_FOUND]
    if isinstance(found, Exception):
        raise found
    return found


def chosen_devices(config: pytest.Config, found: backends.SetUp) -> tuple[str, ...] | None:
    """The devices that `--devices` chooses; None on the host. Raises BackendUnusable, UsageError, LeaseError."""
    wanted, there = config.getoption("--devices"), found.devices()
    if there is None:
        if wanted != "auto":
            msg = (f"--devices={wanted}: backend {config.getoption('--backend')} runs on the host and has no devices "
                   "to choose from; leave it out")
            raise UsageError(msg)
        return None
    lease_folder()
    return chosen(wanted, there)


def chosen(wanted: str, there: Sequence[str]) -> tuple[str, ...]:
    """The devices that `--devices` names of those that are there. Raises UsageError."""
    if wanted == "auto":
        return tuple(there)
    listed = list(dict.fromkeys(split(wanted)))
    missing = [d for d in listed if d not in there]
    if missing or not listed:
        what = f"no device {', '.join(missing)}" if missing else "no device named"
        msg = f"--devices={wanted}: {what}; there are {', '.join(there)}"
        raise UsageError(msg)
    return tuple(listed)


def auto_workers(config: pytest.Config) -> int | None:
    """How many workers `-n auto` means: as many as may use the devices at a time. None: one a core, on the host."""
    try:
        found = set_up(config)
        devices = chosen_devices(config, found)
    except Exception:
        return 1  # it is told when the run is set up
    return None if devices is None else len(devices) * max(found.description.processes_per_device, 1)


def share_cores(config: pytest.Config) -> None:
    """Give the workers' oracles the cores between them. Executors have one thread each, whatever is set here."""
    workers = max(len(config.getoption("tx", None) or ()), 1)
    threads = max((os.cpu_count() or 1) // workers, 1) if workers > 1 else 1
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(threads)


class Slots:
    """The places of workers. Their ids keep rising as dead ones are replaced; the places stay."""

    def __init__(self) -> None:
        self.taken: dict[int, Any] = {}

    def take(self, node: Any) -> int:
        """The lowest free place is this node's now."""
        slot = next(i for i in range(len(self.taken) + 1) if i not in self.taken)
        self.taken[slot] = node
        return slot

    def free(self, node: Any) -> None:
        self.taken = {slot: n for slot, n in self.taken.items() if n is not node}


def devices_info(rows: Iterable[Mapping[str, Any]], before: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json says of devices that failed, in this run and in the one that it goes on with."""
    out: dict[str, list[Any]] = {"quarantined": list(before.get("quarantined", ())),
                                 "recovered": list(before.get("recovered", ()))}
    for row in rows:
        out[row["kind"]].append({k: v for k, v in row.items() if k != "kind"})
    return out


def device_lines(rows: Sequence[Mapping[str, Any]], devices: Sequence[str] | None, records: Iterable[Record],
                 seats: int, wall_s: float) -> list[str]:
    """The summary's lines on devices: how busy they were, which were brought back, which were given up."""
    spent = sum(r.duration_s.get("device", 0.0) for r in records)
    n = len(devices) if devices else seats
    what = f"{n} device{'s' if n > 1 else ''}" if devices else f"the host, {n} at a time"
    lines = [f"device busy {min(spent / (n * wall_s), 1.0):.0%} ({what})"] if wall_s > 0 else []
    for device, times in sorted(Counter(r["device"] for r in rows if r["kind"] == "recovered").items()):
        lines.append(f"device {device} did not answer and was recovered {times} time{'s' if times > 1 else ''}")
    gone = [r for r in rows if r["kind"] == "quarantined"]
    for r in gone[:SHOWN_ROWS]:
        after = f" after {r['case']}" if r.get("case") else ""
        lines.append(f"device {r['device']} QUARANTINED{after}: {r['why'].splitlines()[0]}")
    if devices and len({r["device"] for r in gone}) >= len(devices):
        lines.append("no device was left: see what is wrong with them, then go on with --resume")
    return lines
