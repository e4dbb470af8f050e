"""simdev's C interface in ctypes: its structures, its calls, and the library, built on first use."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FLAGS = ("-std=gnu11", "-O2", "-ftree-vectorize", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fPIC",
         "-shared", "-pthread")
ALIGN_BYTES, DEVICES = 512, 8
MEMORY, BUSY, DAMAGE, FAULT, TRAP, LOST = 3, 4, 7, 100, 101, 200
BYTE, BF16, F32, I32 = range(4)


class Matrix(ctypes.Structure):
    _fields_ = [("mem", c_uint64), ("offset", c_uint64), ("row_stride", c_int64), ("column_stride", c_int64),
                ("type", c_int32), ("reserved", c_int32)]


class GemmArgs(ctypes.Structure):
    _fields_ = [*((name, Matrix) for name in "abcd"), *((name, c_int32) for name in "mnk"), ("alpha", c_float)]


class TopkArgs(ctypes.Structure):
    _fields_ = [*((name, Matrix) for name in ("x", "values", "indices", "end", "offsets")),
                *((name, c_int32) for name in ("rows", "columns", "k", "order", "index_fill", "trap_nan")),
                ("value_fill", c_float)]


class CastArgs(ctypes.Structure):
    _fields_ = [*((name, Matrix) for name in ("x", "codes", "scales")),
                *((name, c_int32) for name in ("m", "n", "group", "scale"))]


_DEVICE = c_void_p
_CALLS: dict[str, tuple[Any, ...]] = {
    "sim_open": (c_char_p, c_int, POINTER(_DEVICE)), "sim_close": (_DEVICE,), "sim_status": (_DEVICE,),
    "sim_reset": (_DEVICE,), "sim_alloc": (_DEVICE, c_uint64, POINTER(c_uint64)), "sim_free": (_DEVICE, c_uint64),
    "sim_memory": (_DEVICE, POINTER(c_uint64), POINTER(c_uint64)), "sim_fill": (_DEVICE, c_int),
    "sim_write": (_DEVICE, c_uint64, c_uint64, c_void_p, c_uint64),
    "sim_read": (_DEVICE, c_uint64, c_uint64, c_void_p, c_uint64),
    "sim_gemm": (_DEVICE, POINTER(GemmArgs)), "sim_topk": (_DEVICE, POINTER(TopkArgs)),
    "sim_cast": (_DEVICE, POINTER(CastArgs)), "sim_synchronize": (_DEVICE,),
    "sim_seconds": (_DEVICE, POINTER(c_double)), "sim_slow": (_DEVICE, c_double),
    "sim_plant": (_DEVICE, c_char_p, c_int),
}


class SimError(RuntimeError):
    """A call gave an error code: `code`."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} gave error {code}; simdev.h says what it means")
        self.code = code


def build() -> Path:
    """The shared library, made by `cc` unless these very sources were built before. Raises RuntimeError."""
    sources = [HERE / name for name in ("simdev.h", "kernels.h", "simdev.c")]
    digest = hashlib.sha256(b"".join(s.read_bytes() for s in sources) + " ".join(FLAGS).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("SIMDEV_BUILD") or Path(tempfile.gettempdir()) / f"simdev-build-{os.getuid()}")
    library = folder / f"libsimdev-{digest}.so"
    if not library.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Several processes may get here at once: each builds a file of its own, the last one stays.
        mine = folder / f".{os.getpid()}.so"
        argv = [os.environ.get("CC", "cc"), *FLAGS, "-o", str(mine), str(HERE / "simdev.c"), "-lm"]
        try:
            done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=120)
        except OSError as e:
            msg = f"simdev needs a C compiler: {argv[0]} can't be started ({e.strerror}); install one or set CC"
            raise RuntimeError(msg) from e
        if done.returncode:
            msg = f"simdev does not compile: {done.stderr.strip()[-1000:]}"
            raise RuntimeError(msg)
        mine.replace(library)
    return library


@cache
def load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build()))
    for name, types in _CALLS.items():
        getattr(library, name).argtypes = types
    library.sim_defect.argtypes, library.sim_defect.restype = (c_int, POINTER(c_char_p)), c_char_p
    return library


def defects() -> Iterator[tuple[str, str]]:
    """Name and meaning of everything that can be planted; the first, without a name, is none."""
    text, i = c_char_p(), 0
    while (name := load().sim_defect(i, byref(text))) is not None:
        yield name.decode(), (text.value or b"").decode()
        i += 1


class Device:
    """One device, opened. Calls by name without `sim_`; raises SimError for every code but 0."""

    def __init__(self, state_dir: str, index: int) -> None:
        self.library, self.handle = load(), _DEVICE()
        self.check("sim_open", self.library.sim_open(state_dir.encode(), index, byref(self.handle)))

    @staticmethod
    def check(call: str, code: int) -> None:
        if code:
            raise SimError(call, code)

    def call(self, name: str, *args: Any) -> None:
        self.check(f"sim_{name}", getattr(self.library, f"sim_{name}")(self.handle, *args))

    def alloc(self, nbytes: int) -> int:
        out = c_uint64()
        self.call("alloc", nbytes, byref(out))
        return out.value

    def free(self, mem: int) -> int:
        """The code: who lets go of memory has nobody to raise to."""
        return self.library.sim_free(self.handle, mem)

    def memory(self) -> tuple[int, int]:
        free, total = c_uint64(), c_uint64()
        self.call("memory", byref(free), byref(total))
        return free.value, total.value

    def seconds(self) -> float:
        """Simulated seconds that launches have taken since the device was opened."""
        out = c_double()
        self.call("seconds", byref(out))
        return out.value
