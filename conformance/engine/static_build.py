"""The executor's side of the check `compile`: one static compile, and what its artefact shows. Knows no case."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from conformance.engine.clock import monotonic
from conformance.protocol import Artefact, Backend, DTypeArg, TensorArg, TupleArg, arg_from_json

MOST_LOG_BYTES = 20_000


def build(backend: Backend, request: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of an artefact; its bytes stay here. Raises what the compiler raises, TypeError for no Artefact."""
    entry = request["entry"]
    args = {name: _plain(arg_from_json(raw)) for name, raw in request["args"].items()}
    began = monotonic()
    made = backend.compile_static(request["op"], args, entry)
    spent = monotonic() - began
    if not isinstance(made, Artefact) or not isinstance(made.content, (bytes, bytearray, memoryview)):
        msg = f"compile_static returned {type(made).__name__}, not an Artefact with bytes"
        raise TypeError(msg)
    content = bytes(made.content)
    return {
        "kind": str(made.kind), "nbytes": len(content), "sha256": digest(content, entry),
        "named": content.count(entry.encode()), "log": str(made.log)[-MOST_LOG_BYTES:],
        "uses": None if made.uses is None else sorted(map(str, made.uses)), "compile_s": spent,
    }


def digest(content: bytes, entry: str) -> str:
    """sha256 of an artefact; the entry's name, which differs in each call, counts as blanks."""
    return hashlib.sha256(content.replace(entry.encode(), b" " * len(entry))).hexdigest()


def _plain(arg: Any) -> Any:
    if isinstance(arg, TensorArg):
        return arg.spec
    if isinstance(arg, DTypeArg):
        return arg.name
    if isinstance(arg, TupleArg):
        return tuple(map(_plain, arg.items))
    return arg.value
