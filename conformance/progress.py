"""Live progress: one line that is rewritten on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from conformance.engine import clock
from conformance.foreign import BadLine

LOG_EVERY_S = 10.0
REDRAW_EVERY_S = 0.2
LOOK_EVERY_S, WAIT_EVERY_S = 2.0, 30.0
WAITING = "waiting for "
"""how the text of a worker begins that has no device yet"""


class Progress:
    """Cases done, failed, time left, and what each worker is on."""

    def __init__(self, reporter: Any, run_dir: Path, total: int, live: bool) -> None:
        self.reporter, self.run_dir, self.total, self.live = reporter, run_dir, total, live
        self.started = clock.monotonic()
        self.shown = time.monotonic()
        self.verdicts: Counter[str] = Counter()
        self._over = threading.Event()
        reporter.flush()  # what a run is and where it writes, before the first case is done

    def watch(self) -> None:
        """Say from now on what workers wait for: while all of them do, nothing else would say anything."""
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        told = -WAIT_EVERY_S
        while not self._over.wait(LOOK_EVERY_S):
            waits = [text for text in self.now() if text.startswith(WAITING)]
            if waits and time.monotonic() - told >= WAIT_EVERY_S:
                told = time.monotonic()
                more = f" (and {len(waits) - 1} more like it)" if len(waits) > 1 else ""
                self.say(waits[0] + more)

    def say(self, text: str) -> None:
        """A line that is seen at once, also in a log."""
        self.reporter.write_line(text)
        self.reporter.flush()

    def now(self) -> list[str]:
        """What each worker is on."""
        out = []
        for file in sorted(self.run_dir.glob("now-*")):
            with contextlib.suppress(OSError):
                out.append(file.read_text())
        return out

    def done(self, verdict: str) -> None:
        self.verdicts[verdict] += 1
        every = REDRAW_EVERY_S if self.live else LOG_EVERY_S
        if time.monotonic() - self.shown >= every or sum(self.verdicts.values()) == self.total:
            self.show()

    def line(self) -> str:
        n = sum(self.verdicts.values())
        spent = clock.monotonic() - self.started
        left = spent / n * (self.total - n) if n else 0.0
        parts = [f"{n}/{self.total} cases", f"{self.verdicts['nonconforming']} nonconforming"]
        if self.verdicts["waived"]:
            parts.append(f"{self.verdicts['waived']} waived")
        if self.verdicts["inconclusive"]:
            parts.append(f"{self.verdicts['inconclusive']} inconclusive")
        parts.append(f"{duration(left)} left" if n < self.total else f"{duration(spent)} in all")
        return ", ".join(parts)

    def show(self) -> None:
        self.shown = time.monotonic()
        text = self.line()
        if not self.live:
            self.say(text)
            return
        width = self.reporter._tw.fullwidth - 1
        on = " | ".join(text[:60] for text in self.now())
        self.reporter.rewrite(f"{text}  {on}"[:width].ljust(width), erase=True)


def bad_line(b: BadLine) -> str:
    """A line about what can't be used."""
    return f"not usable: {b.file}{f' line {b.line}' if b.line else ''}: {b.why}"


def duration(s: float) -> str:
    """`7 s`, `3 min 20 s`, `1 h 5 min`."""
    if s < 60:
        return f"{s:.0f} s"
    m = int(s // 60)
    return f"{m} min {int(s % 60)} s" if m < 60 else f"{m // 60} h {m % 60} min"
