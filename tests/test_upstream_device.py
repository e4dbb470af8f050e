"""Device handling of the chips' backends: masks, memory, errors, transfer; what they say where there is no device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adapters import torch_backend
from adapters.accelerator import index_of, listed_in, named_in
from adapters.ascend.backend import AscendBackend
from adapters.nvidia.backend import NvidiaBackend
from conformance.protocol import FORMATS, DeviceLost, Group, ModuleUnusable, OutOfDeviceMemory, TensorSpec
from tests import chip_fakes as fake
from tests.missing_backend import WHY

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("outer", "device", "mask"), [
    (None, "3", "3"), ("4,5", "5", "5"), ("4, 5", "1", "5"), ("1,0", "0", "0"), ("GPU-aa,GPU-bb", "1", "GPU-bb"),
    ("GPU-aa,GPU-bb", "GPU-aa", "GPU-aa"),
])
def test_a_process_sees_its_own_device_only(outer: str | None, device: str, mask: str) -> None:
    assert named_in(listed_in(outer), device) == mask


def test_a_device_that_the_environment_hides_is_refused() -> None:
    with pytest.raises(ValueError, match="device 2 is asked for, but the environment leaves 4, 5 only"):
        named_in(["4", "5"], "2")


def test_ranks_find_their_device_among_the_visible_ones() -> None:
    ranks = [Group(r, 4, r, 0, "", 0, 1.0) for r in range(4)]
    assert [index_of([], "0", g) for g in ranks] == [0, 1, 2, 3]
    assert [index_of([], str(4 + g.rank), g) for g in ranks] == [4, 5, 6, 7]
    assert [index_of(["4", "5", "6", "7"], str(4 + g.rank), g) for g in ranks] == [0, 1, 2, 3]


@pytest.mark.parametrize(("name", "variable"), [
    ("nvidia", "CUDA_VISIBLE_DEVICES"), ("ascend", "ASCEND_RT_VISIBLE_DEVICES")])
def test_the_mask_stands_before_the_framework_is_imported(name: str, variable: str) -> None:
    code = f"""
import builtins, os, sys
from conformance.backend_class import load_backend_class
cls = load_backend_class({name!r})
assert "torch" not in sys.modules
plain = builtins.__import__
def watched(module, *a, **k):
    if module == "torch" and "seen" not in os.environ:
        os.environ["seen"] = os.environ.get({variable!r}, "unset")
    return plain(module, *a, **k)
import importlib
importlib.import_module = (lambda real: lambda m, *a: (watched(m), real(m, *a))[1])(importlib.import_module)
try:
    cls(device="1", options={{}}, group=None)
except Exception as e:
    print(os.environ["seen"], "|", e)
"""
    env = {**os.environ, variable: "6,7"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("7 | "), done.stdout + done.stderr


@pytest.mark.parametrize(("cls", "text", "meaning"), [
    (NvidiaBackend, "CUDA out of memory. Tried to allocate 2.00 GiB", OutOfDeviceMemory),
    (NvidiaBackend, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", OutOfDeviceMemory),
    (NvidiaBackend, "CUDA error: an illegal memory access was encountered", DeviceLost),
    (NvidiaBackend, "CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA", DeviceLost),
    (NvidiaBackend, "CUDA runtime error (x:3): 719 (cudaErrorLaunchFailure, unspecified launch failure)", DeviceLost),
    (NvidiaBackend, "Assertion error (csrc/apis/gemm.hpp:61): m == m_ and k == k_", None),
    (NvidiaBackend, "q must have a base address that is not a misaligned address", None),
    (AscendBackend, "NPU out of memory. Tried to allocate 2.00 GiB", OutOfDeviceMemory),
    (AscendBackend, "ACL stream synchronize failed, error code:507015\n[ERROR] aicore exception", DeviceLost),
    (AscendBackend, "The Inner error is reported as above, error code is 107002", DeviceLost),
    (AscendBackend, "expected 507015 rows, got 3", None),
])
def test_what_an_error_means(cls: Any, text: str, meaning: Any) -> None:
    arch = "ascend950" if cls is AscendBackend else "sm100"
    backend = fake.backend(arch)
    expected = meaning or RuntimeError
    with pytest.raises(expected, match=text[:12]), backend.translated():
        raise RuntimeError(text)


def test_errors_of_a_call_keep_their_type_and_a_missing_package_is_no_fault_of_the_chip() -> None:
    backend = fake.backend("sm90")
    with pytest.raises(ModuleUnusable, match="deep_gemm is not installed"):
        backend.run("deepgemm.bf16_gemm_nt", {})
    with pytest.raises(KeyError), backend.translated():
        raise KeyError("a")


def test_a_device_that_hangs_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = fake.backend("sm90")
    assert backend.alive()
    monkeypatch.setattr("adapters.accelerator.ALIVE_LIMIT_S", 0.05)
    monkeypatch.setattr(backend, "torch", SimpleNamespace(ones=lambda *a, **k: time.sleep(1)))
    began = time.monotonic()
    assert not backend.alive()
    assert time.monotonic() - began < 0.9


class Device:
    """What `torch.cuda` and `torch.npu` have in common, as far as it is used."""

    def __init__(self, blocks: list[dict[str, Any]]) -> None:
        self.blocks = blocks

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return [{"blocks": self.blocks}]

    def mem_get_info(self) -> tuple[int, int]:
        return 100, 1000

    def memory_reserved(self) -> int:
        return 300

    def memory_allocated(self) -> int:
        return 50


class OnDevice(fake.NvidiaOnHost):
    """The parts that need a device, on a pretended one; tensors stay on the host."""

    pretended = Device([{"size": 4096, "state": "inactive"}, {"size": 512, "state": "active_allocated"},
                        {"size": 1 << 21, "state": "inactive"}])

    @property
    def accelerator(self) -> Any:
        return self.pretended


def test_idle_blocks_of_the_pool_are_poisoned_and_idle_memory_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = OnDevice(device="0", options={"arch": "sm90"}, group=None)
    backend.device_type = "cuda"
    asked: list[tuple[int, int]] = []
    plain = torch.full

    def full(size: tuple[int, ...], byte: int, **kwargs: Any) -> torch.Tensor:
        asked.append((size[0], byte))
        return plain(size, byte, dtype=torch.uint8)

    monkeypatch.setattr(backend.torch, "full", full)
    assert backend.poison_pool(0)
    assert not asked
    assert backend.poison_pool(0xA5)
    assert asked[:2] == [(1 << 21, 0xA5), (4096, 0xA5)]
    assert (512, 0xA5) not in asked
    assert backend.memory() == (350, 1000)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("lacking", [False, True])
@pytest.mark.parametrize("arch", ["sm90", "ascend950"])
def test_every_format_crosses_bit_for_bit(arch: str, name: str, lacking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, f = fake.backend(arch), FORMATS[name]
    if lacking:
        carrier = getattr(torch, torch_backend.CARRIERS[f.itemsize_bytes])
        monkeypatch.setattr(torch_backend, "dtypes", lambda: {f.storage: carrier})
    # Of a bool only two patterns are values.
    data = np.random.default_rng(7).integers(0, 2 if name == "bool" else 256, 4096, dtype=np.uint8)
    buf = backend.alloc(4096, 512)
    assert buf.data_ptr() % 512 == 0
    backend.write(buf, 0, memoryview(bytearray(data.tobytes())))
    rows, columns, pitch = 5, 7, 16
    spec = TensorSpec((rows, columns), (pitch, 1), f.storage, name)
    view = backend.view(buf, 64, spec)
    told, whole, offset, nbytes = backend.inspect(view)
    assert (told.shape, told.strides, offset - 64) == (spec.shape, spec.strides, buf.storage_offset())
    back = bytearray(nbytes)
    backend.read(whole, 0, memoryview(back))
    assert bytes(back[offset - 64 :][:4096]) == data.tobytes()
    copy = view.clone(memory_format=torch.contiguous_format)
    got = copy.view(torch.uint8)
    want = data[64:].reshape(-1)
    expected = np.stack([want[r * pitch * f.itemsize_bytes :][: columns * f.itemsize_bytes] for r in range(rows)])
    assert got.numpy().tobytes() == expected.tobytes()


def conformance(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *argv], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(("name", "device"), [
    ("nvidia", "is a build without CUDA: install the one" if torch.version.cuda is None else "finds no GPU: check"),
    ("ascend", "torch_npu is not installed: pip install torch_npu"),
])
def test_without_a_device_doctor_names_each_module_and_a_run_says_so_in_two_lines(
        name: str, device: str, tmp_path: Path) -> None:
    told = conformance("conformance.cli", "doctor", "--backend", name)
    assert told.returncode == 6
    assert "Traceback" not in told.stdout + told.stderr
    for package in ("deep_gemm", "deep_ep", "tile_kernels", "flash_mla", "deep_select"):
        assert f"{package} is not installed: " in told.stdout, told.stdout
    assert device in told.stdout, told.stdout + told.stderr
    assert "constructor ended" not in told.stdout
    run = conformance("pytest", f"--backend={name}", f"--run-dir={tmp_path / 'run'}")
    assert run.returncode == 6
    assert not (tmp_path / "run").exists()
    lines = (run.stdout + run.stderr).strip().splitlines()
    assert len(lines) == 2
    assert device in lines[0]
    assert "doctor" in lines[1]


def test_what_doctor_found_stands_in_the_report_of_the_backend() -> None:
    r = fake.Recorder()
    with fake.installed(fake.deep_gemm(r), fake.deep_select(r, (32, 32)), *fake.tile_kernels(r)):
        report = fake.backend("sm100").doctor()
    assert report.versions["deepgemm.release"] == "2.8"
    assert report.versions["tilekernels.release"] == "2.1"
    assert report.modules["deepgemm"] == report.modules["tilekernels"] == ""
    assert "another platform" in report.modules["deepselect"]
    assert report.modules["flashmla"].startswith("flash_mla is not installed")


def test_what_doctor_found_stands_in_run_json_and_cases_of_a_missing_package_are_not_run(tmp_path: Path) -> None:
    ids = ["deepgemm.per_token_cast_to_fp8/values:x=fp32,scale=fp32", "deepselect.get_stride_requirement/values"]
    run = conformance("pytest", "-q", "--backend=tests.missing_backend:MissingBackend", f"--run-dir={tmp_path / 'run'}",
                      "--examples=1", "--module=deepgemm,deepselect", *(f"--case={i}*" for i in ids))
    assert run.returncode == 0, run.stdout + run.stderr
    said = json.loads((tmp_path / "run" / "run.json").read_text())
    assert said["doctor"]["modules"] == {"deepgemm": WHY, "deepselect": ""}
    assert said["versions"]["deepselect.release"] == "1.0"
    rows = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    told = {(r["module"], r["status"], r["message"]) for r in rows}
    assert told == {("deepgemm", "not_run", WHY), ("deepselect", "pass", "")}
