"""The executor's side: calls the backend and moves bytes. Knows no oracle, case or judge.

A request is one run: buffers to fill, and steps to call on them. The answer says
where in the arena the bytes stand that came back. A phase byte in the arena's header
tells the worker how far a process got that died.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

from conformance.engine.clock import monotonic
from conformance.engine.inject import Injected
from conformance.engine.static_build import build
from conformance.engine.wire import HEADER_BYTES, Arena, Closed, recv, said, send
from conformance.protocol import (
    Arg,
    Backend,
    DeviceLost,
    DTypeArg,
    Group,
    MemoryDamaged,
    ModuleUnusable,
    OutOfDeviceMemory,
    TensorArg,
    TokenArg,
    TupleArg,
    Unrepresentable,
    ValueArg,
    arg_from_json,
)

PHASES = ("idle", "prepare", "compile", "enqueue", "execute", "compare", "teardown")
MOST_LEAVES = 1000
"""results of one call; a callee may return an endless one"""
LONGEST_TEXT = 10_000


NO_REFUSAL = (OutOfDeviceMemory, MemoryError, DeviceLost, MemoryDamaged, ModuleUnusable)
"""what a call raises that is no answer to a misuse"""


class Unreadable(Exception):
    """What a call returned raises when it is looked at."""


def serve(sock: socket.socket, arena: Arena, backend_class: type[Backend], spec: Mapping[str, Any]) -> None:
    """Answer requests until the worker hangs up."""
    group = Group(**spec["group"]) if spec.get("group") else None
    try:
        backend = backend_class(device=spec["device"], options=spec["options"], group=group)
    except DeviceLost as e:
        send(sock, {"lost": said(e)})
        return
    server = Server(arena, backend, spec)
    send(sock, {"ready": True, "memory": server.memory()})
    while True:
        try:
            request, _ = recv(sock)
        except Closed:
            return
        send(sock, server.answer(request))


class Server:
    """Holds the backend and what outlives a run: tokens, and the results of the run before."""

    def __init__(self, arena: Arena, backend: Backend, spec: Mapping[str, Any]) -> None:
        self.arena, self.backend = arena, backend
        self.injected = Injected(backend, spec["inject"]) if spec.get("inject") else None
        self.held: list[tuple[Any, int, int, bytes]] = []
        self.cursor = HEADER_BYTES
        self.pid = os.getpid()

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        command = request["cmd"]
        if command == "run":
            return self.run(request)
        if command == "time":
            from conformance.engine.timed import Timing

            return self.run(request, Timing)
        if command == "rates":
            return {"rates": self.backend.attainable(), "name": self.backend.device_name(), "run_s": 0.0, "steps": [1]}
        if command == "compile":
            return self.compile(request)
        if command in ("alive", "recover"):
            try:
                done = self.backend.alive() if command == "alive" else self.backend.recover(request["level"])
            except Exception as e:
                return {command: False, "why": said(e)}
            return {command: bool(done)}
        if command == "doctor":
            r = self.backend.doctor()
            return {"versions": dict(r.versions), "devices": list(r.devices), "modules": dict(r.modules)}
        if command in ("contract", "probe"):
            from conformance.engine import contract

            return contract.answer(self, request)
        msg = f"unknown command {command!r}"
        raise ValueError(msg)

    def memory(self) -> list[int] | None:
        """[free, total] bytes of the device, or None where that can't be had."""
        try:
            found = self.backend.memory()
            return None if found is None else [int(n) for n in found]
        except Exception:
            return None

    def call(self, op: str, kwargs: dict[str, Any], outs: list[str]) -> Any:
        try:
            if self.injected:
                return self.injected.run(op, kwargs, outs)
            return self.backend.run(op, kwargs)
        finally:
            if os.getpid() != self.pid:
                # The callee forked and both sides came back: only one may answer.
                os._exit(0)

    def phase(self, name: str, step: int = 0) -> None:
        self.arena.view[0] = PHASES.index(name)
        self.arena.view[1] = min(step, 255)
        self._phase = name

    def compile(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One static compile; its own phase, so that its own time limit holds."""
        started = monotonic()
        self.phase("compile")
        try:
            out: dict[str, Any] = {"artefact": build(self.backend, request)}
        except MemoryError as e:
            out = {"oom": f"the compiler ran out of host memory: {said(e)}"}
        except BaseException as e:
            out = {"exception": _described(e)}
        out |= {"phase": "compile", "run_s": monotonic() - started}
        self.phase("idle")
        return out

    def run(self, request: Mapping[str, Any], kind: type[_Run] | None = None) -> dict[str, Any]:
        self.arena.reserve(request["arena_bytes"])
        if request.get("results_at") is not None:
            self.cursor = request["results_at"]
        buffers: list[Any] = []
        run = (kind or _Run)(self, request, buffers)
        started = monotonic()
        try:
            out = run.go()
        except OutOfDeviceMemory as e:
            out = {"oom": said(e)}
        except MemoryError as e:
            out = {"oom": f"the call ran out of host memory: {said(e)}"}
        except DeviceLost as e:
            out = {"lost": said(e)}
        except ModuleUnusable as e:
            out = {"unusable": str(e)}
        except MemoryDamaged as e:
            out = {"damaged": said(e)}
        except Unreadable as e:
            out = {"unreadable": str(e)}
        except BaseException as e:
            # `unsupported` is for tensors that the runtime can't express; a call can't declare itself so.
            before = isinstance(e, Unrepresentable) and self._phase == "prepare"
            out = {"unrepresentable": said(e)} if before else {"exception": _described(e)}
        out["phase"], out["step"], out["compile_s"] = self._phase, run.step, run.compile_s
        out["run_s"] = monotonic() - started - run.compile_s
        self.phase("teardown")
        try:
            run.restore_settings()
            # Here results are freed: a debugging allocator then tells what was written around them.
            self.held = run.held if request.get("hold") else []
            run.forget()
            for b in buffers:
                self.backend.free(b)
        except BaseException as e:
            if "steps" in out:
                out.pop("steps")
                told = {"damaged": said(e)} if isinstance(e, MemoryDamaged) else {"exception": _described(e)}
                out |= told | {"phase": "teardown"}
        self.phase("idle")
        return out


class _Run:
    def __init__(self, server: Server, request: Mapping[str, Any], buffers: list[Any]) -> None:
        self.server, self.request, self.buffers = server, request, buffers
        self.backend, self.arena = server.backend, server.arena
        self.tensors: dict[tuple[int, int, str], Any] = {}
        self.tokens: dict[str, Any] = {}
        self.settings_before: dict[str, dict[str, Any]] = {}
        self.held: list[Any] = []
        self.step = 0
        self.compile_s = 0.0

    def go(self) -> dict[str, Any]:
        request, server = self.request, self.server
        server.phase("prepare")
        for b in request["buffers"]:
            buf = self.backend.alloc(b["nbytes"], b["align"])
            self.buffers.append(buf)
            self.backend.write(buf, 0, self.arena.view[b["at"] : b["at"] + b["nbytes"]])
        for module, settings in request.get("settings", {}).items():
            self.settings_before[module] = self.backend.get_settings(module)
            self.backend.set_settings(module, settings)
        watched = self.backend.poison_pool(request["poison"])
        if server.injected:
            server.injected.fill = request["poison"]
        modules = {raw["op"].partition(".")[0] for raw in request["steps"]}
        settings = {m: self.backend.get_settings(m) for m in modules}
        # The results of this run stay referenced until the next run is over: a callee
        # that hands out the same memory twice then overwrites what its caller still holds.
        held, steps = self.held, []
        for self.step, raw in enumerate(request["steps"]):
            server.phase("prepare", self.step)
            args = {n: arg_from_json(a) for n, a in raw["args"].items()}
            if any("refused" in s for s in steps) and not self.can_make(args):
                steps.append({"skipped": True})
                continue
            kwargs = {n: self.materialise(a) for n, a in args.items()}
            try:
                result = self.called(raw, kwargs)
            except Exception as e:
                if not raw.get("refused") or isinstance(e, NO_REFUSAL):
                    raise
                steps.append({"refused": _described(e)})
                continue
            leaves: list[dict[str, Any]] = []
            structure = self.read_result(result, raw.get("returns", []), leaves)
            del result
            steps.append({"structure": structure, "leaves": leaves})
        self.backend.poison_pool(0)
        server.phase("compare")
        for b, buf in zip(request["buffers"], self.buffers, strict=True):
            self.backend.read(buf, 0, self.arena.view[b["back"] : b["back"] + b["nbytes"]])
        out: dict[str, Any] = {"steps": steps, "pool_watched": watched, "held_changed": self.held_changed()}
        if request.get("settle_s"):
            out["late"] = self.late(held, request["settle_s"])
        after = {m: self.backend.get_settings(m) for m in modules}
        out["settings_leak"] = sorted(f"{m}.{k}" for m in modules for k in {*settings[m], *after[m]}
                                      if settings[m].get(k) != after[m].get(k))
        out["arena_bytes"] = self.arena.nbytes
        return out

    def called(self, raw: Mapping[str, Any], kwargs: dict[str, Any]) -> Any:
        """Compile and make one call, and wait for it."""
        server = self.server
        server.phase("compile", self.step)
        started = monotonic()
        self.backend.compile(raw["op"], kwargs)
        self.compile_s += monotonic() - started
        server.phase("enqueue", self.step)
        result = server.call(raw["op"], kwargs, raw.get("outs", []))
        server.phase("execute", self.step)
        self.backend.synchronize()
        return result

    def forget(self) -> None:
        """Drop every reference to this run's tensors."""
        self.tokens.clear()
        self.tensors.clear()
        self.held = []

    def restore_settings(self) -> None:
        for module, before in self.settings_before.items():
            named = self.request["settings"][module]
            self.backend.set_settings(module, {k: v for k, v in before.items() if k in named})

    def can_make(self, args: Mapping[str, Arg]) -> bool:
        """Whether every object that these arguments name was returned before."""
        return all(a.name in self.tokens for a in args.values() if isinstance(a, TokenArg))

    def materialise(self, arg: Arg) -> Any:
        if isinstance(arg, TensorArg):
            key = (arg.buffer, arg.offset_bytes, repr(arg.spec))
            if key not in self.tensors:
                self.tensors[key] = self.backend.view(self.buffers[arg.buffer], arg.offset_bytes, arg.spec)
            return self.tensors[key]
        if isinstance(arg, ValueArg):
            return arg.value
        if isinstance(arg, DTypeArg):
            return self.backend.dtype(arg.name)
        if isinstance(arg, TupleArg):
            return tuple(self.materialise(a) for a in arg.items)
        if isinstance(arg, TokenArg):
            return self.tokens[arg.name]
        raise TypeError(arg)

    def read_result(self, value: Any, names: list[str], leaves: list[dict[str, Any]]) -> Any:
        """Structure and leaves of what a call returned. Raises Unreadable for what can't be looked at."""
        try:
            return self.flatten(value, names, leaves, self.held)
        except (MemoryError, OutOfDeviceMemory, DeviceLost, MemoryDamaged):
            raise
        except BaseException as e:
            msg = f"what was returned can't be read: {said(e)}"
            raise Unreadable(msg) from e

    def flatten(self, value: Any, names: list[str], leaves: list[dict[str, Any]], held: list[Any]) -> Any:
        """Append the leaves of a result depth first; returns its structure with a letter a leaf."""
        if isinstance(value, (tuple, list)):
            return [self.flatten(v, names, leaves, held) for v in value]
        if len(leaves) >= MOST_LEAVES:
            msg = f"more than {MOST_LEAVES} results"
            raise ValueError(msg)
        name = names[len(leaves)] if len(leaves) < len(names) else ""
        # A later step may take any of these, tensors too, as the very object that came back.
        self.tokens[name] = value
        leaf = self.leaf(value, held)
        leaves.append(leaf)
        return leaf["kind"]

    def leaf(self, value: Any, held: list[Any]) -> dict[str, Any]:
        if value is None:
            return {"kind": "none"}
        if isinstance(value, (bool, int, float, str)):
            long = (isinstance(value, str) and len(value) > LONGEST_TEXT) or (
                isinstance(value, int) and value.bit_length() > 64)
            return {"kind": type(value).__name__, "value": None if long else value}
        for (buffer, offset, _), tensor in self.tensors.items():
            if tensor is value:
                return {"kind": "argument", "buffer": buffer, "offset_bytes": offset}
        try:
            spec, buf, offset, nbytes = self.backend.inspect(value)
        except TypeError:
            return {"kind": "token", "type": type(value).__name__}
        for (buffer, at, _), tensor in self.tensors.items():
            if 0 not in spec.shape and self.backend.same_memory(tensor, value):
                return {"kind": "argument", "buffer": buffer, "offset_bytes": at}
        at = self.place(nbytes)
        self.backend.read(buf, 0, self.arena.view[at : at + nbytes])
        held.append((buf, at, nbytes, _digest(self.arena.view[at : at + nbytes])))
        return {
            "kind": "tensor", "at": at, "nbytes": nbytes, "offset_bytes": offset, "shape": list(spec.shape),
            "strides": list(spec.strides), "dtype": spec.dtype,
        }

    def place(self, nbytes: int) -> int:
        at = self.server.cursor
        self.server.cursor = at + (nbytes + 63) // 64 * 64
        self.arena.reserve(self.server.cursor)
        return at

    def held_changed(self) -> bool:
        """Whether this run altered a result that the caller still holds from the run before."""
        scratch = self.server.cursor
        for buf, _, nbytes, digest in self.server.held:
            self.arena.reserve(scratch + nbytes)
            area = self.arena.view[scratch : scratch + nbytes]
            self.backend.read(buf, 0, area)
            if _digest(area) != digest:
                return True
        return False

    def late(self, held: list[Any], settle_s: float) -> bool:
        """Whether any byte changes after the call said it was done."""
        time.sleep(settle_s)
        scratch = self.server.cursor
        areas = [(buf, b["back"], b["nbytes"]) for b, buf in zip(self.request["buffers"], self.buffers, strict=True)]
        for buf, at, nbytes in areas + [h[:3] for h in held]:
            self.arena.reserve(scratch + nbytes)
            area = self.arena.view[scratch : scratch + nbytes]
            self.backend.read(buf, 0, area)
            if _digest(area) != _digest(self.arena.view[at : at + nbytes]):
                return True
        return False


def _digest(area: memoryview) -> bytes:
    return hashlib.blake2b(area, digest_size=16).digest()


def _described(e: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb(e.__traceback__)[-4:]
    where = [f"{os.path.basename(f.filename)}:{f.lineno} in {f.name}" for f in frames]
    mro = [c.__name__ for c in type(e).__mro__ if c is not object]
    name = type(e).__name__
    return {"type": name, "mro": mro, "message": said(e).removeprefix(f"{name}: "), "where": where}


def start(sock_fd: int, arena_fd: int, backend_class: type[Backend], spec: Mapping[str, Any]) -> None:
    """Run the executor in this process and leave it; an exception of ours goes to stderr."""
    code = 0
    try:
        serve(socket.socket(fileno=sock_fd), Arena(arena_fd), backend_class, spec)
    except Closed:
        pass
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stderr.flush()
    # Not sys.exit: a forked child must not run its parent's exit handlers.
    os._exit(code)
