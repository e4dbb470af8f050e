"""What verifying costs, as a table in Markdown: `OPENBLAS_NUM_THREADS=1 python -m references.large [M,N,K ...]`.

Data are exact ones; time does not depend on values. Seconds are those of the clock, in brackets those of the process:
the difference is what the machine gave to others. `judge all` is what all elements would cost by the float64 oracle, in
seconds of the process, from a strip of rows. Sizes are best given rising: the peak is that of the run so far.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from references.large.exact import exact_operands, exact_product
from references.large.projection import project
from references.large.sampling import Plan, check_sampled, sample_plan

SIZES = ((512, 896, 2048), (1024, 1792, 4096), (2048, 3584, 8192), (4096, 7168, 16384))
OUT, SEED, TILE, RANDOM = "bf16", 1, (128, 128), 16
STRIP_ROWS = 256
"""rows judged whole, to tell what all of them would cost"""
HEAD = ("m, n, k", "A, B, C (MiB)", "make A and B", "project", "project, one tile wrong", "sample", "judged by it",
        "judge all", "peak (MiB)")


def timed(call: Callable[[], Any]) -> tuple[Any, str, float]:
    """The result; seconds of the clock (of the process) as text; those of the process."""
    clock, own = time.perf_counter(), time.process_time()
    result = call()
    clock, own = time.perf_counter() - clock, time.process_time() - own
    return result, f"{clock:.2f} s ({own:.2f})", own


def row(m: int, n: int, k: int) -> list[str]:
    """One size. Raises SystemExit where a right C fails, or a wrong one passes or is located elsewhere."""
    (a, b), making, _ = timed(lambda: exact_operands(m, n, k, OUT, SEED))
    c = exact_product(m, n, k, OUT, SEED)
    right, projecting, _ = timed(lambda: project(a, b, c, out=OUT, seed=SEED))
    plan = sample_plan(m, n, TILE, SEED, RANDOM)
    sampled, sampling, _ = timed(lambda: check_sampled(a, b, c, plan, out=OUT))
    none = np.zeros(0, np.int64)
    strip = Plan(m, n, TILE, np.arange(min(STRIP_ROWS, m)), none, np.zeros((0, 2), np.int64))
    _, _, seconds = timed(lambda: check_sampled(a, b, c, strip, out=OUT))
    tile = np.s_[m // 3 : m // 3 + 16, n // 3 : n // 3 + 16]
    before = c[tile].copy()
    c[tile] = np.roll(before, 1, axis=1)
    found, locating, _ = timed(lambda: project(a, b, c, out=OUT, seed=SEED))
    differ = c[tile] != before
    rows, columns = np.flatnonzero(differ.any(axis=1)) + m // 3, np.flatnonzero(differ.any(axis=0)) + n // 3
    if not (right.ok and sampled.ok and np.array_equal(found.rows, rows) and np.array_equal(found.columns, columns)):
        sys.exit(f"{(m, n, k)}: a wrong verdict")
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [f"{m}, {n}, {k}", f"{(a.nbytes + b.nbytes + c.nbytes) / 2**20:.0f}", making, projecting, locating, sampling,
            f"{100 * plan.judged / (m * n):.1f} %", f"{seconds * m / strip.rows.size:.1f} s", f"{peak_mib:.0f}"]


def main() -> None:
    sizes = [tuple(int(x) for x in text.split(",")) for text in sys.argv[1:]] or SIZES
    print(f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|")
    for size in sizes:
        print(f"| {' | '.join(row(*size))} |", flush=True)


if __name__ == "__main__":
    main()
