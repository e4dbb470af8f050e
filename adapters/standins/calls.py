"""Every call of a stand-in, a JSON line each: function, arguments by name, what they were."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

VARIABLE = "CONFORMANCE_STANDIN_CALLS"
"""environment variable that names the file"""


def described(value: Any) -> Any:
    """A value for the log: dtype, shape, stride and address of a tensor; a type's name for what JSON can't say."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape),
                "stride": list(value.stride()), "at": value.data_ptr()}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, torch.dtype):
        return {"torch.dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (tuple, list)):
        return [described(v) for v in value]
    return {"object": type(value).__name__}


class Calls:
    """Appends to a file, or remembers only. Lines of several processes don't mix: each is written at once."""

    def __init__(self, path: str = "", rank: int = 0) -> None:
        self.path, self.rank = path or os.environ.get(VARIABLE, ""), rank
        self.kept: list[dict[str, Any]] = []

    def add(self, kind: str, name: str, args: Mapping[str, Any] | None = None, **more: Any) -> None:
        """kind: asked | compile | settings | call | raised | wait. args: by name, as given. more: JSON."""
        line = {"kind": kind, "name": name, "rank": self.rank, "pid": os.getpid(),
                "args": {k: described(v) for k, v in (args or {}).items()}, **more}
        if not self.path:
            self.kept.append(line)
            return
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, (json.dumps(line) + "\n").encode())
        finally:
            os.close(fd)
