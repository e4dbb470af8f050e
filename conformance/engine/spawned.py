"""An executor started anew, for backends that may not be forked.

`python -m conformance.engine.spawned SOCKET_FD ARENA_FD BACKEND PARENT`, its spec on stdin.
"""

from __future__ import annotations

import json
import sys

from conformance.backend_class import load_backend_class
from conformance.engine.serve import start
from conformance.engine.wire import die_with_parent, keep_to_oneself
from conformance.engine.zygote import reset_signals

if __name__ == "__main__":
    sock_fd, arena_fd, name, parent = sys.argv[1:]
    die_with_parent(int(parent))
    spec = json.load(sys.stdin)
    keep_to_oneself(spec.get("lease_fds", ()))
    backend_class = load_backend_class(name)
    reset_signals()
    start(int(sock_fd), int(arena_fd), backend_class, spec)
