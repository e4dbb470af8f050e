"""The contract of a backend: what an adapter implements and what crosses to an executor.

This module imports nothing of the project, so that an adapter can be written
against it without seeing an oracle, a declaration or the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

PROTOCOL_VERSION = 1
PLATFORMS = ("compiler", "simulator", "fpga", "silicon")
"""What results were had on: a column of the matrix each, never merged."""


@dataclass(frozen=True)
class Format:
    """One number format: how it is stored, and how NumPy holds its codes."""

    name: str
    storage: str
    """dtype of the public signature, by torch's name (`bfloat16`, `int8`, ...)."""
    itemsize_bytes: int
    """bytes of one *storage* element"""
    codes: str
    """NumPy dtype of the codes; formats NumPy has are themselves, all others unsigned."""
    per_item: int = 1
    """codes packed in one storage element"""


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp64", "float64", 8, "float64"),
        Format("fp32", "float32", 4, "float32"),
        Format("fp16", "float16", 2, "float16"),
        Format("bf16", "bfloat16", 2, "uint16"),
        Format("e4m3", "float8_e4m3fn", 1, "uint8"),
        Format("e5m2", "float8_e5m2", 1, "uint8"),
        Format("e8m0", "float8_e8m0fnu", 1, "uint8"),
        Format("e8m0_byte", "uint8", 1, "uint8"),
        Format("e8m0x4", "int32", 4, "uint8", per_item=4),
        Format("e2m1x2_lo", "int8", 1, "uint8", per_item=2),
        Format("bool", "bool", 1, "bool"),
        Format("int8", "int8", 1, "int8"),
        Format("uint8", "uint8", 1, "uint8"),
        Format("int16", "int16", 2, "int16"),
        Format("int32", "int32", 4, "int32"),
        Format("uint32", "uint32", 4, "uint32"),
        Format("int64", "int64", 8, "int64"),
    )
}
"""Every format by name. `e2m1x2_lo` packs two codes a byte, low nibble first;
`e8m0x4` four exponent bytes in an int32, lowest byte first."""


STORAGE_BYTES: dict[str, int] = {f.storage: f.itemsize_bytes for f in FORMATS.values()}
"""bytes of one element by storage dtype"""


class Unrepresentable(Exception):
    """A runtime can't express this tensor (a stride, a dtype); the engine reports `unsupported`."""


class OutOfDeviceMemory(Exception):
    """An allocation failed for want of memory; the engine reports `oom`."""


class MemoryDamaged(Exception):
    """An allocator that watches its blocks found one written outside; the engine reports `oob_write`."""


class DeviceLost(Exception):
    """The device or its context is gone; the engine reports `crash` and calls `recover`."""


class ModuleUnusable(Exception):
    """A module's package is missing, or is of a release that the adapter does not know; the engine reports `error`."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and strides in elements of the storage `dtype`; `format` says what the bits mean."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    format: str

    @property
    def itemsize_bytes(self) -> int:
        return STORAGE_BYTES[self.dtype]

    def span_bytes(self) -> int:
        """Bytes from the first to behind the last element; 0 where there is none."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.itemsize_bytes


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class TensorArg:
    """A tensor on one of the call's buffers."""

    buffer: int
    offset_bytes: int
    spec: TensorSpec
    kind: ClassVar[str] = "tensor"


@dataclass(frozen=True)
class ValueArg:
    """A plain value: None, bool, int, float or str, or a list of them."""

    value: Any
    kind: ClassVar[str] = "value"


@dataclass(frozen=True)
class DTypeArg:
    """A dtype by its storage name; becomes the framework's own object in the executor."""

    name: str
    kind: ClassVar[str] = "dtype"


@dataclass(frozen=True)
class TokenArg:
    """An object that an earlier step returned and that never leaves the executor."""

    name: str
    kind: ClassVar[str] = "token"


@dataclass(frozen=True)
class TupleArg:
    """Several arguments handed over as one tuple, such as (data, scales)."""

    items: tuple[Any, ...]
    kind: ClassVar[str] = "tuple"


Arg = TensorArg | ValueArg | DTypeArg | TokenArg | TupleArg


@dataclass(frozen=True)
class CallSpec:
    """One call: the op, its keyword arguments, and the names of what it returns.

    A returned name in `tokens` is kept in the executor under that name.
    """

    op: str
    args: Mapping[str, Arg]
    returns: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()


def arg_to_json(arg: Arg) -> dict[str, Any]:
    if isinstance(arg, TupleArg):
        return {"kind": "tuple", "items": [arg_to_json(a) for a in arg.items]}
    return {"kind": arg.kind, **asdict(arg)}


def arg_from_json(raw: Mapping[str, Any]) -> Arg:
    kind = raw["kind"]
    if kind == "tensor":
        s = raw["spec"]
        spec = TensorSpec(tuple(s["shape"]), tuple(s["strides"]), s["dtype"], s["format"])
        return TensorArg(raw["buffer"], raw["offset_bytes"], spec)
    if kind == "tuple":
        return TupleArg(tuple(arg_from_json(a) for a in raw["items"]))
    cls: Any = {"value": ValueArg, "dtype": DTypeArg, "token": TokenArg}[kind]
    return cls(*(v for k, v in raw.items() if k != "kind"))


@dataclass(frozen=True)
class Group:
    """The ranks of a collective, one process a rank."""

    rank: int
    size: int
    local_rank: int
    node: int
    rendezvous: str
    """path of a file on which the ranks meet"""
    attempt: int
    timeout_s: float


@dataclass(frozen=True)
class Support:
    """What a backend says of one op.

    `limits` are rows `{"field": ..., "in"|"not_in"|"lt"|"le"|"ge"|"multiple_of": value}` that
    must all hold; `field` names a variant key, a size, a value, `<arg>.row_bytes`, or `misuse`. A row
    may say its `reason`, and `when` it holds: `{other field: [values]}`. `given: true|false` says
    that a drawn value must not be None, or must be.
    """

    supported: bool
    limits: tuple[Mapping[str, Any], ...] = ()
    tiles: Mapping[str, int] = field(default_factory=dict)
    compile_key: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    path: str = "native"
    kind: str = "not_yet"
    reason: str = ""


def supported(**kw: Any) -> Support:
    """An op that runs: `limits`, `tiles`, `compile_key`, `settings`, `path` (native, emulated, composite)."""
    return Support(True, **kw)


def unsupported(reason: str, kind: str = "not_yet") -> Support:
    """An op that does not run: `kind` is not_yet, hardware or by_design."""
    return Support(False, kind=kind, reason=reason)


@dataclass(frozen=True)
class Description:
    """A backend's static, pure data. Made without a device; travels as JSON.

    ops: pattern (`deepselect.topk`, `deepgemm.*`) to Support; an op that no pattern
    names is not supported yet. The longest matching pattern counts.
    requirements: numbers that feed the strides, such as `input_row_bytes`.
    profile: the numerics keys that differ from the strict default.
    """

    name: str
    ops: Mapping[str, Support]
    requirements: Mapping[str, int] = field(default_factory=dict)
    profile: Mapping[str, Any] = field(default_factory=dict)
    formats: Mapping[str, Any] = field(default_factory=dict)
    peaks: Mapping[str, Any] = field(default_factory=dict)
    """what times are compared with: `chip`, an id of catalogue/peaks.toml; or a table of one's own, `tflops` by format,
    `tb_s` and `source`; `sizes`: `small` for what is no silicon. Without any, the device's name is looked up, else the
    rates measured in the run stand in for peaks."""
    processes_per_device: int = 1
    """how many executors may share a device at a time; not used on the host"""
    ranks: tuple[int, ...] = (1,)
    platform: str = "silicon"
    fork_after_import: bool = False
    ask_doctor: bool = False
    """whether a run asks `doctor` first: the backend stands on packages that a machine may lack"""
    host: bool = False
    """whether calls run on the host itself: then there is no device to lease, and any number of processes may run"""
    versions: Mapping[str, str] = field(default_factory=dict)


def description_to_json(d: Description) -> dict[str, Any]:
    return asdict(d)


def description_from_json(raw: Mapping[str, Any]) -> Description:
    ops = {
        name: Support(**{**row, "limits": tuple(row["limits"]), "compile_key": tuple(row["compile_key"]),
                         "settings": tuple(row["settings"])})
        for name, row in raw["ops"].items()
    }
    return Description(**{**raw, "ops": ops, "ranks": tuple(raw["ranks"])})


@dataclass(frozen=True)
class Report:
    """What `doctor` found: a sentence a module, empty where the module is usable."""

    versions: Mapping[str, str]
    devices: tuple[str, ...]
    modules: Mapping[str, str]


CLOCKS = ("device_event", "profiler", "host")
"""Who took a time: marks in the device's queue around the call, the kernels that a profiler saw, or the host around
the call and `synchronize`."""


@dataclass(frozen=True)
class Samples:
    """What `Backend.time` measured: seconds, one a round, and the clock that took them."""

    seconds: tuple[float, ...]
    clock: str = "host"


@dataclass(frozen=True)
class Artefact:
    """What a compiler made of one program, without a device.

    kind: `cubin`, `text`, or what else the target's last step makes. content: all of its bytes, not packed, in which
    the entry that was asked for stands by name. log: what the compiler said. uses: names of the tensor arguments
    that the code reads or writes; None where the backend can't tell, which leaves the case `mistrusted`.
    """

    kind: str
    content: bytes
    log: str = ""
    uses: tuple[str, ...] | None = None


class Backend:
    """Runs ops on one device. Lives in the executor only.

    Bytes are the only transport: the engine hands whole buffer images to `write`
    and takes them back by `read`. Mandatory: describe, alloc, free, write, read,
    view, inspect, adapter (or run), synchronize, alive.
    """

    @classmethod
    def describe(cls, options: Mapping[str, str]) -> Description:
        """Static data; needs no device, and no vendor library that needs one."""
        raise NotImplementedError

    @classmethod
    def devices(cls, options: Mapping[str, str]) -> tuple[str, ...]:
        """The names of this machine's devices, as the constructor takes them; none where none is found.

        Asked in a process of its own, and only where `Description.host` is false. A name must mean the same
        device in every process of the machine, whatever masks it runs under: leases go by it.
        """
        return ("0",)

    def __init__(self, *, device: str, options: Mapping[str, str], group: Group | None) -> None:
        """May raise DeviceLost: then the device is tried again after `recover`, or given up."""
        self.device, self.options, self.group = device, options, group

    def doctor(self) -> Report:
        return Report({}, (self.device,), {})

    @classmethod
    def why_not(cls, options: Mapping[str, str], error: Exception) -> Report:
        """What `doctor` reports where the constructor raised: a sentence a module. Touches no device."""
        raise error

    def alloc(self, nbytes: int, align: int) -> Any:
        """A device buffer of `nbytes`, its address a multiple of `align`. Raises OutOfDeviceMemory."""
        raise NotImplementedError

    def free(self, buf: Any) -> None:
        raise NotImplementedError

    def write(self, buf: Any, offset: int, data: memoryview) -> None:
        raise NotImplementedError

    def read(self, buf: Any, offset: int, out: memoryview) -> None:
        """Copies `len(out)` bytes from `offset` of the buffer into `out`."""
        raise NotImplementedError

    def memory(self) -> tuple[int, int] | None:
        """(free, total) bytes of the device, or None where unknown.

        Asked when a process starts. A problem whose buffers alone exceed the total is `unsupported`; one that
        exceeds what is free is tried all the same, and is `oom` if `alloc` raises OutOfDeviceMemory.
        """
        return None

    def view(self, buf: Any, offset: int, spec: TensorSpec) -> Any:
        """A tensor of the framework on the buffer, no copy. Raises Unrepresentable."""
        raise NotImplementedError

    def inspect(self, tensor: Any) -> tuple[TensorSpec, Any, int, int]:
        """(spec, buffer, offset_bytes, nbytes of the buffer) of a tensor a callee returned.

        The buffer spans the tensor's whole storage and is readable by `read`.
        Raises TypeError for what is no tensor of this backend.
        """
        raise NotImplementedError

    def same_memory(self, a: Any, b: Any) -> bool:
        """Whether two tensors of this backend start at the same address."""
        return a is b

    def poison_pool(self, byte: int) -> bool:
        """Fill what callees allocate from now on with this byte; False where that can't be had."""
        return False

    def dtype(self, name: str) -> Any:
        """The framework's object for a storage dtype name."""
        return name

    def adapter(self, module: str) -> Any:
        """The object with a method an op of this module. Raises KeyError for an unknown one."""
        raise NotImplementedError

    def run(self, op: str, kwargs: dict[str, Any]) -> Any:
        """Call one op by its public name; returns what the public function returns."""
        module, _, name = op.partition(".")
        return getattr(self.adapter(module), name.replace(".", "__"))(**kwargs)

    def compile(self, op: str, kwargs: dict[str, Any]) -> None:
        """Build what the call needs, so that `run` compiles nothing; has its own time limit and phase."""

    def compile_static(self, op: str, args: Mapping[str, Any], entry: str) -> Artefact:
        """Compile the program of one op for this backend's target; needs no device and runs nothing.

        args: the arguments by their public names, a TensorSpec for a tensor, a dtype by its storage name, any other
        value as it is. entry: name that the compiled function must have; it is new in each call, so that a
        stale artefact of a cache shows. Any exception is the compiler's refusal. Platform `compiler` only.
        """
        raise NotImplementedError

    @classmethod
    def preload(cls, module: str) -> None:
        """Import what ops of this module need, in the process that executors are forked from. Touches no device."""

    def synchronize(self) -> None:
        """Wait for every stream used; raise what is pending."""
        raise NotImplementedError

    def alive(self) -> bool:
        """Whether the device still answers; within 5 s, also after a failure.

        After every failure it is asked in a new process on the same device.
        """
        raise NotImplementedError

    def time(self, calls: Sequence[Callable[[], Any]], rounds: int, flush: Callable[[], None]) -> Samples:
        """Time `rounds` single calls: round i is `flush()`, untimed, then `calls[i % len(calls)]()`.

        Only the call and the work it started count, all of it, on whatever stream. What a backend has better than the
        host's clock it may use; what it returns is checked against the host's clock and against the results.
        """
        seconds = []
        for i in range(rounds):
            flush()
            self.synchronize()
            begun = time.perf_counter()
            result = calls[i % len(calls)]()
            self.synchronize()
            seconds.append(time.perf_counter() - begun)
            del result
        return Samples(tuple(seconds), "host")

    def flush_caches(self, nbytes: int) -> None:
        """Write so many bytes on the device that belong to nobody, so that caches hold nothing of a call before.

        On a small device it is half of what is free when it is first asked for: no cache is as large as the memory.
        """
        if getattr(self, "_flushed", (0, 0, None))[0] != nbytes:
            known = self.memory()
            room = nbytes if known is None else min(nbytes, known[0] // 2)
            self._flushed: tuple[int, int, Any] = nbytes, room, self.alloc(room, 512)
        _, room, buffer = self._flushed
        step = memoryview(bytearray(min(room, 1 << 22)))
        for at in range(0, room, max(len(step), 1)):
            self.write(buffer, at, step[: min(len(step), room - at)])

    def attainable(self) -> dict[str, float]:
        """Rates that simple work reaches on this very device now: `bytes` (per second, a large copy, reads and writes
        counted) and operations per second of a large matrix product by format (`bf16`, `fp8`, ...). Empty: unknown.
        """
        return {}

    def device_name(self) -> str:
        """What the driver calls the device, by which its published peaks are looked up; empty where nothing does."""
        return ""

    def recover(self, level: int) -> bool:
        """Bring the device back: level 0 its context, 1 the device, 2 the board. False where that can't be had.

        Called in a new process, one a level, when `alive` was false or gave no answer; `alive` is asked again
        in another one. A device that no level brings back is given no more cases.
        """
        return False

    def get_settings(self, module: str) -> dict[str, Any]:
        return {}

    def set_settings(self, module: str, settings: Mapping[str, Any]) -> None:
        if settings:
            msg = f"this backend has no settings for {module}, got {dict(settings)}"
            raise ValueError(msg)


def iter_tensor_args(args: Mapping[str, Arg]) -> Iterator[tuple[str, TensorArg]]:
    """Every tensor of a call; those inside a tuple are named `name.0`, `name.1`."""
    for name, arg in args.items():
        if isinstance(arg, TensorArg):
            yield name, arg
        elif isinstance(arg, TupleArg):
            yield from iter_tensor_args({f"{name}.{i}": a for i, a in enumerate(arg.items)})
