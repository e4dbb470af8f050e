"""The simulated accelerator keeps the rules of its header: it would be no test of a suite if it were kinder."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import simbench
from simdev import runtime
from simdev.backend import SimDev
from simdev.runtime import Device, SimError

from conformance.protocol import (
    DeviceLost,
    MemoryDamaged,
    OutOfDeviceMemory,
    TensorSpec,
    Unrepresentable,
    contiguous_strides,
)

HANDLE, RANGE = 2, 5
F32 = "float32"


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = simbench.fake_clock(tmp_path / "clock")
    monkeypatch.setenv("CONFORMANCE_FAKE_CLOCK", str(path))
    return path


def opened(folder: Path, device: int = 0, **options: str) -> SimDev:
    return SimDev(device=str(device), options={"state": str(folder / "devices"), **options}, group=None)


@pytest.fixture
def sim(tmp_path: Path, clock: Path) -> Iterator[SimDev]:
    sim = opened(tmp_path)
    yield sim
    sim.sim.call("close")


def filled(sim: SimDev, shape: tuple[int, ...], byte: int, dtype: str = F32) -> object:
    spec = TensorSpec(shape, contiguous_strides(shape), dtype, "fp32")
    buf = sim.alloc(spec.span_bytes(), 512)
    sim.write(buf, 0, memoryview(bytes([byte]) * spec.span_bytes()))
    return sim.view(buf, 0, spec)


def content(sim: SimDev, t: object) -> bytes:
    _, buf, _, nbytes = sim.inspect(t)
    out = bytearray(nbytes)
    sim.read(buf, 0, memoryview(out))
    return bytes(out)


def code_of(call: object, *args: object) -> int:
    with pytest.raises(SimError) as e:
        call(*args)  # type: ignore[operator]
    return e.value.code


def test_nothing_runs_before_synchronise(sim: SimDev) -> None:
    sim.poison_pool(0xA5)
    codes, scales = sim.adapter("deepgemm").per_token_cast_to_fp8(filled(sim, (4, 128), 0), True)
    assert content(sim, codes) == b"\xa5" * 512
    sim.synchronize()
    assert content(sim, codes) == bytes(512)
    assert content(sim, scales) != b"\xa5" * 16


def test_handles_are_no_addresses(sim: SimDev) -> None:
    device = sim.sim
    mem = device.alloc(1000)
    one = ctypes.c_char()
    assert code_of(device.call, "read", mem + 1, 0, ctypes.byref(one), 1) == HANDLE
    assert code_of(device.call, "read", mem, 100, ctypes.byref(one), 1) == RANGE
    assert code_of(device.call, "read", mem, 512, (ctypes.c_char * 600)(), 600) == RANGE
    assert device.free(mem) == 0
    assert device.free(mem) == HANDLE
    again = device.alloc(1000)
    assert again != mem, "an old handle must not name new memory"
    assert code_of(device.call, "read", mem, 0, ctypes.byref(one), 1) == HANDLE


def test_what_is_freed_too_early_is_told(sim: SimDev) -> None:
    x = filled(sim, (4, 128), 0)
    sim.adapter("deepgemm").per_token_cast_to_fp8(x, True)
    sim.sim.free(x.buf.mem)  # type: ignore[attr-defined]
    with pytest.raises(SimError, match="error 2"):
        sim.synchronize()
    assert sim.alive()


def test_memory_ends(sim: SimDev) -> None:
    free, total = sim.memory()
    assert (free, total) == (64 << 20, 64 << 20)
    held = [sim.alloc(15 << 20, 512) for _ in range(4)]
    with pytest.raises(OutOfDeviceMemory):
        sim.alloc(15 << 20, 512)
    sim.free(held.pop(1))
    held.append(sim.alloc(14 << 20, 512))
    assert sim.memory()[0] < 6 << 20
    held.clear()
    assert sim.memory() == (free, total), "blocks without a reference are freed"


def test_dma_that_starts_inside_a_line(sim: SimDev) -> None:
    t = filled(sim, (4, 128), 1)
    _, buf, _, _ = sim.inspect(t)
    sim.write(buf, 515, memoryview(b"\2\3"))
    assert content(sim, t) == b"\1" * 515 + b"\2\3" + b"\1" * (2048 - 517)
    out = bytearray(4)
    sim.read(buf, 514, memoryview(out))
    assert out == b"\1\2\3\1"


def test_types_it_does_not_have(sim: SimDev) -> None:
    buf = sim.alloc(64, 512)
    for dtype in ("int64", "float64", "float16", "int16"):
        with pytest.raises(Unrepresentable):
            sim.view(buf, 0, TensorSpec((2,), (1,), dtype, dtype))


def test_one_process_a_device(sim: SimDev, tmp_path: Path) -> None:
    """A second process is refused, also while the first one only looks on; another device is free."""
    program = ("import sys; from simdev.runtime import Device\n"
               "for i in (0, 1):\n"
               "    try: Device(sys.argv[1], i); print('open')\n"
               "    except RuntimeError as e: print(e.code)\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(simbench.TESTS), str(simbench.TESTS.parent)))}
    argv = [sys.executable, "-c", program, str(tmp_path / "devices")]
    assert subprocess.run(argv, env=env, check=True, capture_output=True, text=True).stdout.split() == [
        str(runtime.BUSY), "open"]
    sim.sim.call("close")
    assert subprocess.run(argv, env=env, check=True, capture_output=True, text=True).stdout.split() == ["open", "open"]
    sim.sim = Device(str(tmp_path / "devices"), 0)


def die(folder: Path) -> SimDev:
    sim = opened(folder, defect="stays_lost")
    sim.adapter("deepgemm").per_token_cast_to_fp8(filled(sim, (4, 128), 0), True)
    with pytest.raises(DeviceLost):
        sim.synchronize()
    return sim


def test_a_lost_device_stays_lost_until_reset(tmp_path: Path, clock: Path) -> None:
    sim = die(tmp_path)
    assert not sim.alive()
    assert not sim.recover(1), "this one can't be helped"
    sim.sim.call("close")
    later = opened(tmp_path)
    assert not later.alive(), "another process finds it as it was left"
    with pytest.raises(DeviceLost):
        later.alloc(64, 512)
    before = simbench.seconds(clock)
    assert later.recover(1)
    assert simbench.seconds(clock) - before >= 20.0
    assert later.alive()
    later.sim.call("close")


def test_a_trap_ends_with_the_process(tmp_path: Path, clock: Path) -> None:
    sim = opened(tmp_path)
    x = filled(sim, (1, 128), 0xFF)
    sim.adapter("deepselect").topk(x, 8, indices_type="int32", abort_when_nan_found=True)
    with pytest.raises(DeviceLost, match=str(runtime.TRAP)):
        sim.synchronize()
    assert not sim.alive()
    sim.sim.call("close")
    again = opened(tmp_path)
    assert again.alive()
    again.sim.call("close")


def test_a_hang_takes_simulated_time_and_the_device(tmp_path: Path, clock: Path) -> None:
    sim = opened(tmp_path, defect="hang")
    sim.adapter("deepgemm").per_token_cast_to_fp8(filled(sim, (4, 128), 0), True)
    threading.Thread(target=sim.sim.library.sim_synchronize, args=(sim.sim.handle,), daemon=True).start()
    while simbench.seconds(clock) < 5.0:
        pass
    assert sim.sim.library.sim_status(sim.sim.handle) == runtime.LOST


def test_writing_outside_a_block_is_told_once(tmp_path: Path, clock: Path) -> None:
    sim = opened(tmp_path, defect="behind")
    sim.adapter("deepgemm").per_token_cast_to_fp8(filled(sim, (4, 128), 0), True)
    with pytest.raises(MemoryDamaged):
        sim.synchronize()
    sim.synchronize()
    assert sim.alive()
    sim.sim.call("close")


def test_work_takes_time_and_more_of_it_when_slow(tmp_path: Path, clock: Path) -> None:
    def taken(rows: int, slow: str) -> float:
        sim = opened(tmp_path, slow=slow)
        x = filled(sim, (rows, 1024), 0)
        before = simbench.seconds(clock)
        sim.adapter("deepgemm").per_token_cast_to_fp8(x, True)
        sim.synchronize()
        busy, passed = sim.sim.seconds(), simbench.seconds(clock) - before
        assert busy == pytest.approx(passed, rel=1e-6)
        sim.sim.call("close")
        return busy

    small, large, slow = taken(8, "1"), taken(64, "1"), taken(8, "1e4")
    assert small < large < small * 8
    assert slow == pytest.approx(1e4 * small)


def test_clock_loses_nothing_between_processes(tmp_path: Path, clock: Path) -> None:
    """Eight processes on eight devices push the same clock on."""
    program = ("import sys; from simdev.runtime import Device\n"
               "d = Device(sys.argv[1], int(sys.argv[2]))\n"
               "for _ in range(2000): d.call('reset')\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(simbench.TESTS), str(simbench.TESTS.parent)))}
    running = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "devices"), str(i)], env=env)
               for i in range(8)]
    assert [p.wait(60) for p in running] == [0] * 8
    assert simbench.seconds(clock) == 8 * 2000 * 20.0


def test_structures_are_those_of_the_header(tmp_path: Path) -> None:
    """Sizes and last offsets as the compiler has them."""
    source = tmp_path / "sizes.c"
    source.write_text('#include <stddef.h>\n#include <stdio.h>\n#include "simdev.h"\nint main(void) {\n'
                      'printf("%zu %zu %zu %zu %zu %zu %zu", sizeof(sim_matrix), sizeof(sim_gemm_args), '
                      'offsetof(sim_gemm_args, alpha), sizeof(sim_topk_args), offsetof(sim_topk_args, value_fill), '
                      'sizeof(sim_cast_args), offsetof(sim_cast_args, scale)); }\n')
    program = tmp_path / "sizes"
    subprocess.run(["cc", "-Wall", "-Werror", f"-I{runtime.HERE}", "-o", program, source], check=True)
    told = [int(n) for n in subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()]
    gemm, topk, cast = runtime.GemmArgs, runtime.TopkArgs, runtime.CastArgs
    assert told == [ctypes.sizeof(runtime.Matrix), ctypes.sizeof(gemm), gemm.alpha.offset, ctypes.sizeof(topk),
                    topk.value_fill.offset, ctypes.sizeof(cast), cast.scale.offset]


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SIMDEV_BUILD", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="needs a C compiler"):
        runtime.build()


def test_caches_are_flushed_on_a_small_device(sim: SimDev) -> None:
    """A chip of which nothing is known has 512 MiB written between calls: here it is half of what is free."""
    sim.flush_caches(512 << 20)
    free, total = sim.memory()
    assert total // 2 - 2048 <= free <= total // 2 + 2048
    sim.flush_caches(512 << 20)
    assert sim.memory() == (free, total), "memory is taken once"
