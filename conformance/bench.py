"""A bench outside a run: what replay and selftest try problems on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conformance import backends
from conformance.engine.attempt import Bench
from conformance.engine.devices import Board, DevicePool
from conformance.engine.executor import THREAD_VARIABLES, ArenaPool, Launcher
from conformance.engine.leases import Leases, lease_folder


def _say(sentence: str) -> None:
    if sentence:
        print(sentence, file=sys.stderr)


def _who() -> str:
    """Who holds a device, as whoever waits for it is told."""
    return " ".join(["conformance", *sys.argv[1:2]]) if Path(sys.argv[0]).stem in ("conformance", "cli") else "a bench"


@contextmanager
def bench_of(backend: str, options: dict[str, str], inject: str = "") -> Iterator[Bench]:
    """A bench outside a run. Raises BackendUnusable, UnknownBackend or LeaseError."""
    for variable in THREAD_VARIABLES:
        os.environ[variable] = "1"
    found = backends.set_up(backend, options)
    description, devices = found.description, found.devices()
    launchers = [Launcher(backend, device="0", options=options, fork=description.fork_after_import,
                          debug_malloc=debug, inject=inject) for debug in (False, True)]
    profile = {**description.profile, "requirements": dict(description.requirements)}
    pool = None
    if devices is not None:
        leases = Leases(lease_folder(), description.name, description.processes_per_device, _who())
        pool = DevicePool(devices, leases, Board(), waiting=_say)
    try:
        yield Bench(description, launchers[0], launchers[1], ArenaPool(), profile, devices=pool)
    finally:
        for launcher in launchers:
            launcher.close()
