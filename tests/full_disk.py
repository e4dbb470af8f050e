"""A pytest plug-in: the disk of the run takes FULL_DISK_BYTES a file and then no more, by the kernel's own limit."""

import os
import resource

from conformance import journal

_append = journal.WorkerLog._append


def _limited(self, fd, rows):  # type: ignore[no-untyped-def]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["FULL_DISK_BYTES"]), hard))
    try:
        _append(self, fd, rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


journal.WorkerLog._append = _limited
