"""A plug-in that does to its caller what a bad kernel, or a bad port, may do: `hostile_backend:Hostile`.

Options: `mode` names what it does on every call of deepselect.topk; a call written as
`dtype.index.order.values.end.offset.output_idx` (its variant) names what it does on that one;
`rows` is the least number of rows from which it does so; `salt` varies where it strikes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from adapters.cpu.backend import CpuBackend
from conformance.protocol import Description, DeviceLost, Group, Report, Support, Unrepresentable

if os.environ.get("HOSTILE_IMPORT") == "raise":
    msg = "planted: this plug-in can't be imported"
    raise ImportError(msg)
if os.environ.get("HOSTILE_IMPORT") == "exit":
    sys.stderr.write("planted: the vendor library ends the process\n")
    os._exit(3)

LIBC = ctypes.CDLL(None)
LIBC_WITH_GIL = ctypes.PyDLL(None)
PRINTED_MIB = 48
Call = Callable[[], Any]


class Mute(Exception):
    """Can't say what it is."""

    def __str__(self) -> str:
        msg = "planted: no text either"
        raise RuntimeError(msg)


class Rogue(BaseException):
    """Not caught by `except Exception`."""


class Touchy(int):
    """An int whose methods raise."""

    def _refuse(self, *_: Any) -> Any:
        msg = "planted: don't look at me"
        raise RuntimeError(msg)

    __repr__ = __str__ = __format__ = __eq__ = __lt__ = __le__ = __bool__ = __index__ = __int__ = _refuse
    __hash__ = bit_length = _refuse


class Faceless:
    """Raises when asked what it is."""

    @property
    def __class__(self) -> Any:
        msg = "planted: no class"
        raise RuntimeError(msg)


class BadTuple(tuple):
    """A tuple that can't be walked."""

    def __iter__(self) -> Any:
        msg = "planted: no items"
        raise RuntimeError(msg)


class Endless(list):
    """A list without an end."""

    def __iter__(self) -> Any:
        while True:
            yield 0


class Hostile(CpuBackend):
    """The cpu backend with one thing wrong."""

    @classmethod
    def describe(cls, options: Mapping[str, str]) -> Description:
        mode = options.get("mode", "")
        d = super().describe({})
        if mode == "describe_raises":
            raise Mute
        if mode == "describe_prints":
            print("x" * 100_000)
            import atexit

            atexit.register(lambda: print('{"answer": "not this"} and more'))
        if mode == "describe_exits":
            os._exit(0)
        if mode == "describe_leaves_a_child" and not os.fork():
            time.sleep(600)
        if mode in ("unknown_profile_key", "unknown_profile_value"):
            return replace(d, profile={"nan_sentinal": "row"} if mode.endswith("key") else {"nan_sentinel": "all"})
        ops = dict(d.ops)
        if mode == "unknown_op":
            ops["deepselect.topkk"] = Support(True)
        if mode == "only_unknown_ops":
            ops = {"deepselect.topkk": Support(True), "deepselekt.*": Support(True)}
        if mode == "malformed_limit":
            ops["deepselect.topk"] = Support(True, limits=({"field": "b", "at_most": 7},))
        if mode == "mistyped_limit":
            ops["deepselect.topk"] = Support(True, limits=({"field": "b", "le": "seven"},))
        if mode == "unknown_field":
            ops["deepselect.topk"] = Support(True, limits=({"field": "batch", "le": 7},))
        if "at_most_rows" in options:
            ops["deepselect.topk"] = Support(True, limits=({"field": "b", "le": int(options["at_most_rows"])},))
        return Description(**{**{f: getattr(d, f) for f in d.__dataclass_fields__}, "name": "hostile", "ops": ops})

    def __init__(self, *, device: str, options: Mapping[str, str], group: Group | None) -> None:
        super().__init__(device=device, options={"memory_mib": "1200"}, group=group)
        self.given = options
        mode = options.get("mode", "")
        if mode == "constructor_raises":
            raise Mute
        if mode == "constructor_hangs":
            LIBC.pause()
        if mode == "constructor_exits":
            os._exit(9)
        self.calls = 0
        self.kept: list[Any] = []
        self.random = random.Random(options.get("salt", "0"))

    def run(self, op: str, kwargs: dict[str, Any]) -> Any:
        self.calls += 1
        right = lambda: super(Hostile, self).run(op, kwargs)  # noqa: E731
        mode = self.given.get(spelled(kwargs), self.given.get("mode", "")) if op == "deepselect.topk" else ""
        if mode not in MODES or kwargs["input"].shape[0] < int(self.given.get("rows", 0)):
            return right()
        return MODES[mode](self, kwargs, right)

    def free(self, buf: Any) -> None:
        if self.given.get("mode") == "free_raises":
            raise Mute
        super().free(buf)

    def doctor(self) -> Report:
        return Report({}, ("one",), {"deepselect": ""})


def spelled(kw: Mapping[str, Any]) -> str:
    """The variant of a call of topk."""
    if "indices_type" not in kw:
        return ""
    order = "value" if kw.get("sorted") else "index" if kw.get("sorted_index") else "any"
    words = ("bf16" if kw["input"].dtype == torch.bfloat16 else "fp32", str(kw["indices_type"]).removeprefix("torch."),
             order, "yes" if kw.get("return_value") else "no", "yes" if kw.get("end") is not None else "no",
             "yes" if kw.get("output_idx_offset") is not None else "no",
             "caller" if kw.get("output_idx") is not None else "callee")
    return ".".join(words)


MODES: dict[str, Callable[[Hostile, dict[str, Any], Call], Any]] = {}


def mode(f: Callable[[Hostile, dict[str, Any], Call], Any]) -> Callable[[Hostile, dict[str, Any], Call], Any]:
    MODES[f.__name__] = f
    return f


def then_right(name: str) -> Callable[[Callable[[Hostile], None]], Callable[[Hostile], None]]:
    """Register something that is done before a right answer is given."""

    def register(f: Callable[[Hostile], None]) -> Callable[[Hostile], None]:
        def run(self: Hostile, kw: dict[str, Any], right: Call) -> Any:
            f(self)
            return right()

        MODES[name] = run
        return f

    return register


def raises(name: str, make: Callable[[], BaseException]) -> None:
    def run(self: Hostile, kw: dict[str, Any], right: Call) -> Any:
        raise make()

    MODES[name] = run


raises("raises_runtime_error", lambda: RuntimeError("planted"))
raises("raises_system_exit", lambda: SystemExit(0))
raises("raises_keyboard_interrupt", KeyboardInterrupt)
raises("raises_base_exception", lambda: Rogue("planted"))
raises("raises_mute", Mute)
raises("raises_unrepresentable", lambda: Unrepresentable("planted: call me unsupported"))
raises("raises_stop_iteration", StopIteration)
raises("raises_device_lost", lambda: DeviceLost("planted"))


@then_right("segfault")
def _segfault(self: Hostile) -> None:
    ctypes.string_at(self.random.randrange(4096))


@then_right("abort")
def _abort(self: Hostile) -> None:
    LIBC.abort()


@then_right("fpe")
def _fpe(self: Hostile) -> None:
    signal.raise_signal(signal.SIGFPE)


@then_right("hang_in_c")
def _hang(self: Hostile) -> None:
    LIBC.pause()


@then_right("hang_with_gil")
def _hang_gil(self: Hostile) -> None:
    LIBC_WITH_GIL.pause()


@then_right("hang_deaf")
def _deaf(self: Hostile) -> None:
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(s, signal.SIG_IGN)
    while True:
        time.sleep(600)


@then_right("stop_self")
def _stop(self: Hostile) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@then_right("exit_0")
def _exit0(self: Hostile) -> None:
    os._exit(0)


@then_right("exit_7")
def _exit7(self: Hostile) -> None:
    os._exit(7)


@then_right("allocate")
def _allocate(self: Hostile) -> None:
    while True:
        self.kept.append(bytearray(self.random.choice((1 << 20, 64 << 20, 200 << 20))))


@then_right("kill_parent")
def _kill_parent(self: Hostile) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


@then_right("kill_worker")
def _kill_worker(self: Hostile) -> None:
    with open(f"/proc/{os.getppid()}/stat") as f:
        worker = int(f.read().rpartition(")")[2].split()[1])
    os.kill(worker, signal.SIGKILL)
    time.sleep(600)


@then_right("kill_self")
def _kill_self(self: Hostile) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@then_right("close_all")
def _close_all(self: Hostile) -> None:
    os.closerange(0, 4096)


@then_right("garbage_in_sockets")
def _garbage(self: Hostile) -> None:
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, self.random.choice((b"\x04\x00\x00\x00junk", b"\xff" * 64, b"\x02\x00\x00\x00{}")))


@then_right("print_tons")
def _print_tons(self: Hostile) -> None:
    line = b"planted: chatter\n" * 4096
    for i in range(PRINTED_MIB << 20):
        if i * len(line) > PRINTED_MIB << 20:
            return
        os.write(1 + i % 2, line)


@then_right("print_and_die")
def _print_and_die(self: Hostile) -> None:
    _print_tons(self)
    os.write(2, b"planted: last words\n")
    LIBC.abort()


@then_right("fork_sleeper")
def _fork_sleeper(self: Hostile) -> None:
    if not os.fork():
        time.sleep(600)
        os._exit(0)


@then_right("fork_and_die")
def _fork_and_die(self: Hostile) -> None:
    for apart in (False, True):
        if not os.fork():
            if apart:
                os.setsid()
            time.sleep(600)
            os._exit(0)
    ctypes.string_at(0)


@then_right("fork_and_exit")
def _fork_and_exit(self: Hostile) -> None:
    _fork_sleeper(self)
    os._exit(0)


@mode
def fork_both_return(self: Hostile, kw: dict[str, Any], right: Call) -> Any:
    child = not os.fork()
    result = right()
    if child and result[1] is not None:
        result[1].fill_(-7)
    return result


@then_right("signal_handlers")
def _handlers(self: Hostile) -> None:
    for s in range(1, 32):
        if s not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(s, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)


@then_right("threads_left")
def _threads(self: Hostile) -> None:
    for daemon in (True, False, False) if self.calls == 1 else ():
        threading.Thread(target=time.sleep, args=(600,), daemon=daemon).start()


@then_right("process_state")
def _state(self: Hostile) -> None:
    os.chdir("/")
    os.umask(0)
    os.environ.clear()
    sys.path.clear()
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
    socket.setdefaulttimeout(1e-3)
    sys.setrecursionlimit(150)
    torch.set_default_dtype(torch.float64)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def _like(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)


def _outputs(result: Any) -> list[torch.Tensor]:
    return [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, torch.Tensor)]


@mode
def write_before(self: Hostile, kw: dict[str, Any], right: Call) -> Any:
    result = right()
    t = _outputs(result)[-1]
    ctypes.memset(t.data_ptr() - self.random.choice((1, 4, 8)), 0x33, 1)
    return result


@mode
def write_behind(self: Hostile, kw: dict[str, Any], right: Call) -> Any:
    result = right()
    t = _outputs(result)[-1]
    if kw.get("output_idx") is None:
        end = t.untyped_storage().data_ptr() + t.untyped_storage().nbytes()
    else:
        end = t.data_ptr() + ((t.shape[0] - 1) * t.stride(0) + t.shape[1]) * t.element_size()
    ctypes.memset(end + self.random.choice((0, 3)), 0x33, 1)
    return result


@mode
def unwritten(self: Hostile, kw: dict[str, Any], right: Call) -> Any:
    """The last elements are left as they were allocated."""
    given = kw.get("output_idx")
    before = None if given is None else given.clone()
    result = right()
    n = self.random.randrange(1, result[1].shape[1] + 1)
    if given is not None:
        given[-1, -n:] = before[-1, -n:]
        return result
    fresh = torch.empty(result[1].shape[0], result[1].stride(0), dtype=result[1].dtype)[:, : result[1].shape[1]]
    fresh[:-1] = result[1][:-1]
    fresh[-1, :-n] = result[1][-1, :-n]
    return result[0], fresh


@mode
def stale_buffer(self: Hostile, kw: dict[str, Any], right: Call) -> Any:
    """What the call before returned, as it was."""
    result = right()
    same = [r for r in self.kept if r[1].shape == result[1].shape and r[1].dtype == result[1].dtype]
    self.kept.append(tuple(None if t is None else _like(t).copy_(t) for t in result))
    return (result[0] if result[0] is None else same[-1][0], same[-1][1]) if same else result


@mode
def recycled_buffer(self: Hostile, kw: dict[str, Any], right: Call) -> Any:
    """The buffer that the call before returned, with the new content."""
    result = right()
    for old in self.kept:
        if old[1].shape == result[1].shape and old[1].dtype == result[1].dtype:
            for there, new in zip(old, result, strict=True):
                if there is not None:
                    there.copy_(new)
            return old
    self.kept.append(result)
    return result


@mode
def mutate_input(self: Hostile, kw: dict[str, Any], right: Call) -> Any:
    result = right()
    x = kw["input"]
    row, column = self.random.randrange(x.shape[0]), self.random.randrange(x.shape[1])
    at = x.data_ptr() + (row * x.stride(0) + column) * x.element_size()
    ctypes.memset(at, ctypes.string_at(at, 1)[0] ^ 1, 1)
    return result


@mode
def late(self: Hostile, kw: dict[str, Any], right: Call) -> Any:
    """Returns 50 ms before its work is done."""
    given = kw.get("output_idx")
    before = None if given is None else given.clone()
    result = right()
    right_indices = result[1].clone()
    if given is None:
        result = result[0], _like(result[1])
    else:
        given.copy_(before)
    threading.Timer(0.05, lambda: result[1].copy_(right_indices)).start()
    return result


@mode
def wrong_first(self: Hostile, kw: dict[str, Any], right: Call) -> Any:
    result = right()
    if self.calls == 1:
        row = self.random.randrange(result[1].shape[0])
        result[1][row, self.random.randrange(result[1].shape[1])] += kw["input"].shape[1] + 1
    return result


@mode
def wrong_once_in_a_while(self: Hostile, kw: dict[str, Any], right: Call) -> Any:
    """Wrong on its fifth call: shows in sequence only."""
    result = right()
    if self.calls == 5:
        result[1][0, 0] += kw["input"].shape[1] + 1
    return result


def returning(name: str, make: Callable[[Hostile, dict[str, Any], tuple[Any, Any]], Any]) -> None:
    MODES[name] = lambda self, kw, right: make(self, kw, right())


def _self_containing() -> list[Any]:
    out: list[Any] = []
    out.append(out)
    return out


returning("returns_none", lambda s, kw, r: None)
returning("returns_text", lambda s, kw, r: "x" * 5_000_000)
returning("returns_one", lambda s, kw, r: r[1])
returning("returns_three", lambda s, kw, r: (*r, r[1]))
returning("returns_nested", lambda s, kw, r: ((r[0],), r[1]))
returning("returns_none_values", lambda s, kw, r: (None, r[1]))
returning("returns_numpy", lambda s, kw, r: (r[0], r[1].numpy()))
returning("returns_int", lambda s, kw, r: (r[0], 10**6000))
returning("returns_touchy", lambda s, kw, r: (r[0], Touchy(3)))
returning("returns_faceless", lambda s, kw, r: (r[0], Faceless()))
returning("returns_bad_tuple", lambda s, kw, r: BadTuple(r))
returning("returns_endless", lambda s, kw, r: Endless())
returning("returns_itself", lambda s, kw, r: _self_containing())
returning("returns_dict", lambda s, kw, r: {"values": r[0], "indices": r[1]})
returning("returns_sparse", lambda s, kw, r: (r[0], r[1].to_sparse()))
returning("returns_meta", lambda s, kw, r: (r[0], r[1].to("meta")))
returning("returns_int16", lambda s, kw, r: (r[0], r[1].to(torch.int16)))
returning("returns_complex", lambda s, kw, r: (r[0], r[1].to(torch.complex64)))
returning("returns_short", lambda s, kw, r: (r[0], r[1][:, : r[1].shape[1] - 1]))
returning("returns_flat", lambda s, kw, r: (r[0], r[1].reshape(-1)))
returning("returns_copy", lambda s, kw, r: (r[0], _like(r[1]).copy_(r[1])))
returning("returns_input", lambda s, kw, r: (kw["input"][:, : r[1].shape[1]], r[1]))
returning("returns_numpy_scalar", lambda s, kw, r: (r[0], np.int64(1)))
