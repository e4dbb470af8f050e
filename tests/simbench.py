"""What tests of the simulated accelerator share: a bench on it, and cases tried with a planted defect."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from conformance.bench import bench_of
from conformance.collect import cases_at
from conformance.engine.attempt import Bench
from conformance.engine.effort import EFFORTS, Config
from conformance.engine.run import run_case
from conformance.model import Case
from conformance.results import Record

TESTS = Path(__file__).parent
SIMDEV = "simdev.backend:SimDev"
GEMM = "deepgemm.bf16_gemm_nt/values:out=bf16,c=none,a_major=k,b_major=k"
CAST = "deepgemm.per_token_cast_to_fp8/values:x=bf16,scale=fp32"
TOPK = "deepselect.topk/values:dtype=fp32,index=int32,order=any,values=yes,end=no,offset=no,output_idx=callee"
TOPK_CALLER = TOPK.replace("callee", "caller")


def without_torch(folder: Path) -> str:
    """A PYTHONPATH on which simdev is found, and importing torch or tilelang raises ImportError and leaves a file."""
    folder.mkdir(exist_ok=True)
    for name in ("torch", "tilelang"):
        (folder / f"{name}.py").write_text(
            f"import os, traceback\nwith open({str(folder / 'tried')!r}, 'a') as f:\n"
            f"    traceback.print_stack(file=f)\nraise ImportError('{name} is not installed')\n")
    return os.pathsep.join((str(TESTS), str(folder)))


def fake_clock(path: Path) -> Path:
    path.write_bytes(struct.pack("=d", 0.0))
    return path


def seconds(clock: Path) -> float:
    """What a fake clock says."""
    return struct.unpack("=d", clock.read_bytes())[0]


@contextmanager
def sim_bench(folder: Path) -> Iterator[Bench]:
    """A bench on a device of its own, torch not importable, on a fake clock in `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", without_torch(folder / "none"))
        patch.setenv("SIMDEV_STATE", str(folder / "devices"))
        patch.setenv("CONFORMANCE_FAKE_CLOCK", str(fake_clock(folder / "clock")))
        with bench_of(SIMDEV, {}) as bench:
            yield bench


def cases() -> dict[str, Case]:
    return {c.id: c for c in cases_at("full", ("deepgemm", "deepselect"))}


def attempt(bench: Bench, case: Case, out: Path, *, seed: int = 0, examples: int = 8, shrink_s: float = 0.0,
            level: str = "core", **options: str) -> Record:
    """Try one case on the device with these options of the plug-in."""
    for launcher in (bench.launcher, bench.debug_launcher):
        launcher.options = dict(options)
    effort = replace(EFFORTS[level], examples=examples, beside=0, shrink_s=shrink_s)
    return run_case(case, Config(bench, effort, seed, out, SIMDEV, dict(options)))


def reset_device(index: int = 0) -> None:
    """What an operator does with a lost device."""
    from simdev.runtime import Device

    device = Device(os.environ["SIMDEV_STATE"], index)
    device.call("reset")
    device.call("close")


@dataclass(frozen=True)
class Chip:
    """What a device's file says of its life."""

    lost: int
    deaths: int
    resets: int
    opens: int
    launches: int
    fired: int


def chip(path: Path) -> Chip:
    return Chip(*struct.unpack("=6Q", path.read_bytes()))
