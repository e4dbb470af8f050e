"""A bench outside a run: what replay and selftest try problems on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from conformance import backends
from conformance.engine.attempt import Bench
from conformance.engine.executor import ArenaPool, Launcher

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""set to 1 before workers start: with a BLAS pool in each process a run takes six times as long"""


@contextmanager
def bench_of(backend: str, options: dict[str, str], inject: str = "") -> Iterator[Bench]:
    """A bench outside a run. Raises BackendUnusable or UnknownBackend."""
    for variable in THREAD_VARIABLES:
        os.environ[variable] = "1"
    description = backends.describe(backend, options)
    launchers = [Launcher(backend, device="0", options=options, fork=description.fork_after_import,
                          debug_malloc=debug, inject=inject) for debug in (False, True)]
    profile = {**description.profile, "requirements": dict(description.requirements)}
    try:
        yield Bench(description, launchers[0], launchers[1], ArenaPool(), profile)
    finally:
        for launcher in launchers:
            launcher.close()
