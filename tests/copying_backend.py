"""The cpu backend with the work taken out: it copies right answers that a first pass had recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from adapters.cpu.backend import CpuBackend
from conformance.protocol import Group


def _bytes(t: torch.Tensor) -> bytes:
    return t.contiguous().view(torch.uint8).numpy().tobytes()


class Copying(CpuBackend):
    """Option `answers`: the folder of answers; with `record=yes` the real kernel runs and its answers are kept."""

    def __init__(self, *, device: str, options: Mapping[str, str], group: Group | None) -> None:
        super().__init__(device=device, options={}, group=group)
        self.folder, self.record = Path(options["answers"]), options.get("record") == "yes"
        self.answers = {} if self.record else {f.name: f.read_bytes() for f in self.folder.iterdir()}

    def run(self, op: str, kwargs: dict[str, Any]) -> None:
        out = kwargs["d"]
        key = hashlib.blake2b(_bytes(kwargs["a"]) + _bytes(kwargs["b"]), digest_size=16).hexdigest()
        if self.record:
            super().run(op, kwargs)
            (self.folder / key).write_bytes(_bytes(out))
            return
        answer = torch.frombuffer(bytearray(self.answers[key]), dtype=out.dtype)
        out.copy_(answer.view(out.shape))
