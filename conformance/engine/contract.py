"""The contract of a backend tried on the backend alone, before any kernel is blamed. Runs in an executor.

Each test answers with a state and a sentence: `ok`, `failed`, or `absent` where the backend says that it has no such
thing. Which formats, methods and calls to try comes with the request; nothing here knows an op.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from conformance.engine import clock
from conformance.engine.serve import Server, _Run
from conformance.engine.wire import said
from conformance.protocol import (
    FORMATS,
    Backend,
    Format,
    OutOfDeviceMemory,
    TensorSpec,
    Unrepresentable,
)

ALIVE_S = 5.0
GUARD_BYTES = 512
ROW_BYTES = 512
"""row stride of layouts with room between rows: a multiple of what any backend asks for"""
ROWS, COLUMNS = 8, 40
BYTE_SIZES = (1, 100, 4109, 1 << 20)
FILLS = (0x7F, 0x7E)
"""bytes that memory is filled with: those that a run asks for"""
POOL_BYTES = 1 << 16
TIMED_ROUNDS = 3
ENOUGH_FILLED = 0.9
"""share of a fresh block that must hold the fill: an allocator may keep notes of its own in it"""
TELLING_ENDS = (b"\xff\xff", b"\x80\x7f", b"\xc0\x7f", b"\x00\x80", b"\x01\x7c")
"""last bytes of wide elements: NaNs, infinities and -0 of one type or another, which a conversion would change"""


class Failed(Exception):
    """The backend breaks its contract; the text says how and what to look at."""


class Absent(Exception):
    """The backend does not offer this; the text says what that means."""


@dataclass(frozen=True)
class Test:
    name: str
    doc: str
    run: Callable[[Backend, Mapping[str, Any]], str]
    """returns what there is to say beside `ok`"""


def answer(server: Server, request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request of this file: `{"cmd": "contract", "test": name, ...}` or `{"cmd": "probe", ...}`."""
    if request["cmd"] == "probe":
        return server.run(request, Probe)
    test = TESTS[request["test"]]
    try:
        state, text = "ok", test.run(server.backend, request)
    except Failed as e:
        state, text = "failed", str(e)
    except Absent as e:
        state, text = "absent", str(e)
    except BaseException as e:
        state, text = "failed", f"raised {said(e, 500)}"
    return {"run_s": 0.0, "state": state, "text": text}


def noise(n: int, salt: str) -> bytearray:
    """n bytes that look random and are the same everywhere."""
    out = bytearray()
    while len(out) < n:
        out += hashlib.sha256(f"{salt} {len(out)}".encode()).digest()
    return out[:n]


def read(backend: Backend, buf: Any, offset: int, nbytes: int) -> bytes:
    """Bytes of a buffer; what was there before the read must not look like them."""
    out = bytearray(b"\xc3" * nbytes)
    if nbytes:
        backend.read(buf, offset, memoryview(out))
    return bytes(out)


def first_difference(a: bytes, b: bytes) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), -1)


def same_bytes(got: bytes, wanted: bytes, what: str) -> None:
    at = first_difference(got, wanted)
    if at >= 0:
        wrong = sum(x != y for x, y in zip(got, wanted, strict=True))
        msg = f"{what}: byte {at} is 0x{got[at]:02x}, written was 0x{wanted[at]:02x}; {wrong} of {len(got)} differ"
        raise Failed(msg)


def alive(backend: Backend, request: Mapping[str, Any]) -> str:
    begun = clock.monotonic()
    yes = backend.alive()
    took = clock.monotonic() - begun
    if yes is not True:
        msg = f"alive() answered {yes!r}: the device does not answer, or the method does not say True where it does"
        raise Failed(msg)
    if took > ALIVE_S:
        msg = f"alive() took {took:.1f} s; after a failure a run waits for it, so it has {ALIVE_S:.0f} s"
        raise Failed(msg)
    return ""


def bytes_stay(backend: Backend, request: Mapping[str, Any]) -> str:
    """Whole buffers, parts of them, and two buffers side by side."""
    for n in BYTE_SIZES:
        image = noise(n, f"bytes {n}")
        a, b = backend.alloc(n, 512), backend.alloc(n, 512)
        backend.write(a, 0, memoryview(image))
        backend.write(b, 0, memoryview(noise(n, f"other {n}")))
        same_bytes(read(backend, a, 0, n), bytes(image), f"write and read of {n} bytes, another buffer written between")
        if n > 100:
            part = noise(41, "part")
            backend.write(a, 13, memoryview(part))
            image[13:54] = part
            same_bytes(read(backend, a, 0, n), bytes(image), f"41 bytes written at offset 13 of {n}")
            same_bytes(read(backend, a, 29, n - 31), bytes(image[29 : n - 2]), f"{n - 31} bytes read from offset 29")
        backend.synchronize()
        same_bytes(read(backend, a, 0, n), bytes(image), f"{n} bytes read again after synchronize()")
        backend.free(a)
        backend.free(b)
    return ""


def poison(backend: Backend, request: Mapping[str, Any]) -> str:
    """What the engine fills outputs with must stand there until a call overwrites it."""
    for byte in (0xA5, 0x5A):
        buf = backend.alloc(POOL_BYTES, 512)
        fill = bytes([byte]) * POOL_BYTES
        backend.write(buf, 0, memoryview(bytearray(fill)))
        backend.view(buf, 0, TensorSpec((POOL_BYTES,), (1,), "uint8", "uint8"))
        backend.synchronize()
        same_bytes(read(backend, buf, 0, POOL_BYTES), fill, f"memory filled with 0x{byte:02x} and left alone")
        backend.free(buf)
    return ""


def pool(backend: Backend, request: Mapping[str, Any]) -> str:
    """poison_pool that says True must reach fresh memory: old contents would pass for written results."""
    for byte in FILLS:
        old = backend.alloc(POOL_BYTES, 512)
        backend.write(old, 0, memoryview(bytearray(b"\x3c" * POOL_BYTES)))
        backend.free(old)
        del old
        if not backend.poison_pool(byte):
            backend.poison_pool(0)
            msg = ("poison_pool() answers False: where a callee allocates its results, an element left unwritten "
                   "would not show, so the check `memory` of such ops is mistrusted")
            raise Absent(msg)
        fresh = backend.alloc(POOL_BYTES, 512)
        got = read(backend, fresh, 0, POOL_BYTES)
        backend.free(fresh)
        backend.poison_pool(0)
        share = got.count(byte) / len(got)
        if share < ENOUGH_FILLED:
            other = next(b for b in got if b != byte)
            msg = (f"poison_pool(0x{byte:02x}) answered True, but memory allocated after it holds 0x{other:02x} and "
                   f"only {share:.0%} of the fill; let it fill what is allocated from then on, or answer False")
            raise Failed(msg)
    return ""


def beyond(backend: Backend, request: Mapping[str, Any]) -> str:
    """More memory than there is must be told as OutOfDeviceMemory, else it would be booked as the kernel's fault."""
    known = backend.memory()
    if known is None:
        msg = "memory() answers None: a case is not kept from the device for want of memory"
        raise Absent(msg)
    free, total = known
    if not (0 <= free <= total and total > 0):
        msg = f"memory() answered free {free}, total {total} bytes; free must lie between 0 and total"
        raise Failed(msg)
    try:
        backend.alloc(2 * total, 512)
    except OutOfDeviceMemory:
        return f"{free >> 20} of {total >> 20} MiB free"
    except Exception as e:
        msg = f"alloc of twice the device's memory raised {said(e, 200)}; raise protocol.OutOfDeviceMemory"
        raise Failed(msg) from e
    msg = f"alloc of {2 * total} bytes, twice the device's memory, did not raise OutOfDeviceMemory"
    raise Failed(msg)


Layout = tuple[str, tuple[int, ...], tuple[int, ...], int]


def layouts(itemsize: int) -> Iterator[Layout]:
    """(name, shape, strides in elements, offset in bytes) of tensors as a run makes them."""
    row = ROW_BYTES // itemsize
    shape = (ROWS, COLUMNS)
    yield "contiguous", shape, (COLUMNS, 1), GUARD_BYTES
    yield "long rows", shape, (row, 1), GUARD_BYTES
    yield "long rows with an offset", shape, (row, 1), GUARD_BYTES + 3 * ROW_BYTES
    yield "column-major", shape, (1, row // 4), GUARD_BYTES
    yield "three axes with gaps", (2, 4, COLUMNS), (6 * row, row, 1), GUARD_BYTES
    yield "one axis", (ROWS * COLUMNS,), (1,), GUARD_BYTES
    yield "one element", (1,), (1,), GUARD_BYTES
    yield "no element", (0, COLUMNS), (COLUMNS, 1), GUARD_BYTES


def elements(f: Format, n: int) -> bytearray:
    """n storage elements with every byte value in them, and NaNs with payloads among the wide ones."""
    if f.name == "bool":
        return bytearray(b & 1 for b in noise(n, "bool"))
    size = f.itemsize_bytes
    if size == 1:
        return bytearray((i * 167 + 13) % 256 for i in range(n))
    out = noise(n * size, f.name)
    for i in range(0, n, 5):
        out[(i + 1) * size - 2 : (i + 1) * size] = TELLING_ENDS[i // 5 % len(TELLING_ENDS)]
    return out


def positions(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Where each element stands, in elements from the first."""
    at = [0]
    for n, s in zip(shape, strides, strict=True):
        at = [a + i * s for a in at for i in range(n)]
    return at


def round_trip(backend: Backend, f: Format, layout: Layout) -> None:
    """One tensor through write, view, inspect and read. Raises Failed or Unrepresentable."""
    name, shape, strides, offset = layout
    size = f.itemsize_bytes
    spec = TensorSpec(shape, strides, f.storage, f.name)
    nbytes = offset + -(-spec.span_bytes() // 64) * 64 + GUARD_BYTES
    image = bytearray(b"\xa5" * nbytes)
    where = positions(shape, strides)
    data = elements(f, len(where))
    for i, at in enumerate(where):
        image[offset + at * size : offset + (at + 1) * size] = data[i * size : (i + 1) * size]
    buf = backend.alloc(nbytes, 512)
    backend.write(buf, 0, memoryview(image))
    tensor = backend.view(buf, offset, spec)
    got, whole, start, total = backend.inspect(tensor)
    for field, a, b in (("shape", tuple(got.shape), shape), ("dtype", got.dtype, f.storage)):
        if a != b:
            msg = f"{name}: inspect() tells {field} {a} of a view made with {b}"
            raise Failed(msg)
    if not where:
        backend.free(buf)
        return
    wide = [i for i, n in enumerate(shape) if n > 1]
    if [tuple(got.strides)[i] for i in wide] != [strides[i] for i in wide]:
        msg = f"{name}: inspect() tells strides {tuple(got.strides)} of a view made with {strides} (in elements)"
        raise Failed(msg)
    if start + spec.span_bytes() > total:
        msg = f"{name}: inspect() names a buffer of {total} bytes, too short for the tensor at byte {start}"
        raise Failed(msg)
    seen = read(backend, whole, 0, total)
    back = b"".join(seen[start + at * size : start + (at + 1) * size] for at in where)
    same_bytes(back, bytes(data), f"{name}: what inspect() names")
    same_bytes(read(backend, buf, 0, nbytes), bytes(image), f"{name}: the buffer after view()")
    # A view is no copy: what is written to the buffer later is seen through it.
    flipped = bytes(b ^ 1 for b in data[:size])
    backend.write(buf, offset, memoryview(bytearray(flipped)))
    _, whole, start, _ = backend.inspect(tensor)
    same_bytes(read(backend, whole, start, size), flipped, f"{name}: a view must be no copy of its buffer")
    if not backend.same_memory(tensor, tensor):
        msg = f"{name}: same_memory() denies that a tensor begins where it begins"
        raise Failed(msg)
    del tensor, whole
    backend.free(buf)


def format_stays(backend: Backend, request: Mapping[str, Any]) -> str:
    """A format in every layout. Absent where the plainest layout can't be expressed."""
    f = FORMATS[request["format"]]
    without = []
    for layout in layouts(f.itemsize_bytes):
        try:
            round_trip(backend, f, layout)
        except Unrepresentable as e:
            if layout[0] == "contiguous":
                raise Absent(str(e) or f"no {f.storage} in this runtime") from e
            without.append(layout[0])
    try:
        backend.dtype(f.storage)
    except Exception as e:
        msg = f"dtype({f.storage!r}) raised {said(e, 200)}; a call that takes a dtype would get none"
        raise Failed(msg) from e
    return f"not: {', '.join(without)}" if without else ""


def methods(backend: Backend, request: Mapping[str, Any]) -> str:
    """Every op that the description calls supported has a method that takes the arguments of the public function."""
    if type(backend).run is not Backend.run:
        msg = "this backend calls ops its own way (it has a run method), so its methods can't be looked at"
        raise Absent(msg)
    wrong = []
    for call, names in request["calls"].items():
        module, _, name = call.partition(".")
        method = getattr(backend.adapter(module), name.replace(".", "__"), None)
        if not callable(method):
            wrong.append(f"{call}: the adapter has no method {name.replace('.', '__')}")
            continue
        try:
            takes = inspect.signature(method).parameters
        except (TypeError, ValueError):
            continue
        anything = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        unknown = [n for n in names if (takes[n].kind is inspect.Parameter.POSITIONAL_ONLY if n in takes
                                        else not anything)]
        needed = [n for n, p in takes.items() if p.default is p.empty and p.kind in (
            p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.POSITIONAL_ONLY) and n not in names]
        if unknown or needed:
            wrong.append(f"{call}: " + ", and ".join(filter(None, (
                unknown and f"takes no {', '.join(unknown)}, which the public function does",
                needed and f"asks for {', '.join(needed)}, which the public function does not"))))
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise Failed("; ".join(wrong[:3]) + more)
    return f"{len(request['calls'])} calls"


def settings(backend: Backend, request: Mapping[str, Any]) -> str:
    """What declared ops set exists, what get_settings tells can be set to the same again, and others are refused.

    request["needed"]: setting -> the op that sets it.
    """
    module = request["module"]
    before = backend.get_settings(module)
    missing = [f"{op} sets {name}" for name, op in request["needed"].items() if name not in before]
    if missing:
        told = ", ".join(before) or "none"
        msg = f"{'; '.join(missing)}: get_settings({module!r}) tells {told}; add it there and to set_settings"
        raise Failed(msg)
    backend.set_settings(module, dict(before))
    if backend.get_settings(module) != before:
        msg = f"setting {module}'s settings to what they were changed them: {before}, {backend.get_settings(module)}"
        raise Failed(msg)
    unknown = "no_such_setting"
    try:
        backend.set_settings(module, {unknown: 1})
    except Exception:
        return ", ".join(before) or "none"
    msg = f"set_settings({module!r}) takes a setting that does not exist; raise ValueError, or slips go unseen"
    raise Failed(msg)


class Probe(_Run):
    """One problem, with the time of each part: what is left to wait for after synchronize() shows in the first read."""

    def called(self, raw: Mapping[str, Any], kwargs: dict[str, Any]) -> Any:
        self.backend.compile(raw["op"], kwargs)
        begun = clock.monotonic()
        result = self.server.call(raw["op"], kwargs, raw.get("outs", []))
        called = clock.monotonic()
        self.backend.synchronize()
        waited = clock.monotonic()
        took = []
        for _ in range(4):
            start = clock.monotonic()
            read(self.backend, self.buffers[-1], 0, 64)
            took.append(clock.monotonic() - start)
        self.times = getattr(self, "times", [])
        self.times.append({"call_s": called - begun, "wait_s": waited - called, "reads_s": took,
                           **self.timed(raw, kwargs)})
        return result

    def timed(self, raw: Mapping[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The same call by the backend's own timer, and what the host sees of it."""
        if len(self.request["steps"]) > 1:
            return {}

        def call() -> Any:
            begun, real = clock.monotonic(), time.perf_counter()
            out = self.server.call(raw["op"], kwargs, raw.get("outs", []))
            self.backend.synchronize()
            host.append(clock.monotonic() - begun)
            real_s.append(time.perf_counter() - real)
            return out

        host: list[float] = []
        real_s: list[float] = []  # a timer may know of simulated seconds, or not
        samples = self.backend.time([call], TIMED_ROUNDS, lambda: None)
        return {"timer_s": [float(s) for s in samples.seconds], "clock": str(samples.clock), "host_s": host,
                "real_s": real_s}

    def go(self) -> dict[str, Any]:
        out = super().go()
        return {**out, "times": self.times, "untouched": self.untouched(out)}

    def untouched(self, out: Mapping[str, Any]) -> bool:
        """Whether every result still holds what stood there before the call: nothing had been computed by then."""
        view, buffers = self.arena.view, self.request["buffers"]
        found = []
        for raw, step in zip(self.request["steps"], out["steps"], strict=True):
            written = {raw["args"][n]["buffer"] for n in raw.get("outs", []) if raw["args"][n]["kind"] == "tensor"}
            for b in (buffers[i] for i in written):
                before, after = view[b["at"] : b["at"] + b["nbytes"]], view[b["back"] : b["back"] + b["nbytes"]]
                found.append(before == after)
            for leaf in step.get("leaves", ()):
                if leaf["kind"] == "tensor" and leaf["nbytes"] and out["pool_watched"]:
                    image = bytes(view[leaf["at"] : leaf["at"] + leaf["nbytes"]])
                    found.append(image == bytes([self.request["poison"]]) * len(image))
        return bool(found) and all(found)


TESTS: dict[str, Test] = {
    t.name: t
    for t in (
        Test("alive", "the device answers when it is asked", alive),
        Test("bytes", "bytes written are the bytes read, at every offset", bytes_stay),
        Test("poison", "a fill stands until somebody overwrites it", poison),
        Test("pool", "the fill reaches what callees allocate", pool),
        Test("beyond", "too much memory is refused as OutOfDeviceMemory", beyond),
        Test("format", "every bit of a format survives write, view, inspect and read, in every layout", format_stays),
        Test("methods", "every supported op has a method with the public arguments", methods),
        Test("settings", "settings can be read and set", settings),
    )
}
