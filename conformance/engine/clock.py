"""The clock of every limit that a device's own time counts against.

Where the environment names a file in `CONFORMANCE_FAKE_CLOCK`, the float64 at its offset 0 is
added, in seconds: a simulated device puts there what its work would have taken, and hours of
resets pass in milliseconds. How long a process may take to start or to end stays real.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

VARIABLE = "CONFORMANCE_FAKE_CLOCK"
_SECONDS = struct.Struct("=d")
_mapped: tuple[str, mmap.mmap] | None = None


def monotonic() -> float:
    """Seconds that never go back, by `time.monotonic` and the simulated ones. Raises ValueError for a bad file."""
    path = os.environ.get(VARIABLE)
    return time.monotonic() + _simulated_s(path) if path else time.monotonic()


def _simulated_s(path: str) -> float:
    global _mapped
    if _mapped is None or _mapped[0] != path:
        try:
            with open(path, "rb") as f:
                _mapped = path, mmap.mmap(f.fileno(), _SECONDS.size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as e:
            msg = f"{VARIABLE}={path} must name a file of at least {_SECONDS.size} bytes, a float64 of seconds: {e}"
            raise ValueError(msg) from e
    return _SECONDS.unpack_from(_mapped[1])[0]
