"""A compiler backend without a compiler: a text of what it is asked for, or what option `mode` makes go wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.protocol import Artefact, Backend, Description, supported


class Compiler(Backend):
    """Option `mode`: see `compile_static`; option `folder`: where it keeps its cache."""

    @classmethod
    def describe(cls, options: Mapping[str, str]) -> Description:
        return Description("faulty", {"tilelang.*": supported()}, platform="compiler", fork_after_import=True,
                           host=True)

    def compile_static(self, op: str, args: Mapping[str, Any], entry: str) -> Artefact:
        mode, folder = self.options.get("mode", "good"), Path(self.options.get("folder", "."))
        text = f"void {entry}_kernel() {{ {op} {sorted(args.items())} }}".encode()
        if mode == "empty":
            return Artefact("text", b"", "0 errors", tuple(args))
        if mode == "stale":
            # A cache that forgets what the program was: keyed by the op alone.
            kept = folder / op
            if not kept.exists():
                kept.write_bytes(text)
            return Artefact("text", kept.read_bytes(), "", tuple(args))
        if mode == "gutted":
            return Artefact("text", text, "", tuple(n for n in args if n != "out"))
        if mode == "deaf":
            return Artefact("text", text)
        if mode == "hang":
            time.sleep(3600)
        if mode == "signal":
            os.kill(os.getpid(), signal.SIGFPE)
        if mode == "exit":
            os._exit(3)
        if mode == "raise":
            msg = "line 7: no such instruction"
            raise SyntaxError(msg)
        if mode == "nothing":
            return None  # type: ignore[return-value]
        if mode == "once":
            first = folder / "tried"
            if not first.exists():
                first.touch()
                msg = "out of luck"
                raise RuntimeError(msg)
        return Artefact("text", text, "1 warning", tuple(args))

    def alive(self) -> bool:
        return True


class Silent(Compiler):
    """Of platform compiler, with no compile_static of its own."""

    compile_static = Backend.compile_static
