"""An executor in this very process, for debuggers: no protection against what a kernel does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conformance.backend_class import load_backend_class
from conformance.engine.executor import ArenaPool, BackendBroken, Launcher, Outcome
from conformance.engine.serve import Server
from conformance.engine.wire import Arena


class InlineExecutor:
    """Answers like an Executor of one rank; a crash of the backend is a crash of the run."""

    def __init__(self, launcher: Launcher, pool: ArenaPool, device: str = "") -> None:
        self.alive, self.runs = True, 0
        self.stuck: list[str] = []
        self.arenas: list[Arena] = pool.take(1)
        self._queue: list[Mapping[str, Any]] = []
        spec = {"inject": launcher.inject}
        try:
            cls = load_backend_class(launcher.backend)
            backend = cls(device=device or launcher.device, options=launcher.options, group=None)
        except Exception as e:
            msg = f"backend {launcher.backend}: {type(e).__name__}: {e}"
            raise BackendBroken(msg) from e
        self.server = Server(self.arenas[0], backend, spec)
        self.memory = [self.server.memory()]

    def send(self, requests: Sequence[Mapping[str, Any]]) -> None:
        self._queue.extend(requests)

    def collect(self, timeout_s: float, compile_timeout_s: float = 0.0) -> Outcome:
        """The answer of the next request; limits can't be held without a process of its own."""
        answer = self.server.answer(self._queue.pop(0))
        self.runs += 1
        return Outcome([answer], run_s=answer["run_s"])

    def kill(self) -> None:
        self.alive = False
        self._queue.clear()

    close = kill
