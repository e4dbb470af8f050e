"""Kernel text to a cubin, by the nvcc that is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from adapters.compiler.lower import scratch

_NUMBER_OF_THE_RUN = re.compile(rb"(_INTERNAL_|_GLOBAL__N__)[0-9a-f]{8}_")


class NvccFailed(Exception):
    """nvcc refused a text; carries what it said."""


def nvcc() -> str | None:
    """The nvcc of CUDA_HOME, else of PATH; None where there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


def version() -> str:
    """`13.0.88` of the nvcc that is used, `none` where there is none."""
    found = nvcc()
    if found is None:
        return "none"
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    number = re.search(r"\bV([\d.]+)", said)
    return number[1] if number else "unknown"


def cubin(text: str, arch: str) -> tuple[str, bytes, str]:
    """(kind, bytes, log) of a kernel text for an arch such as `sm_90a`, with the flags that TileLang uses.

    Raises NvccFailed. The bytes follow from the text: there are no line numbers, which name the folder, and the number
    that nvcc makes up for each of its runs is blanked.
    """
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    compiler = nvcc()
    assert compiler is not None
    with scratch() as folder:
        Path(folder, "kernel.cu").write_text(text)
        argv = [compiler, "--cubin", "-O3", f"-arch={arch}", "-std=c++20", f"-I{TILELANG_TEMPLATE_PATH}",
                f"-I{CUTLASS_INCLUDE_DIR}", "-o", "kernel.cubin", "kernel.cu"]
        done = subprocess.run(argv, cwd=folder, env={**os.environ, "TMPDIR": folder}, capture_output=True, text=True,
                              errors="replace", check=False)
        log = (done.stdout + done.stderr).strip()
        made = Path(folder, "kernel.cubin")
        if done.returncode < 0:
            msg = f"nvcc was killed by signal {-done.returncode}\n{log}"
            raise NvccFailed(msg)
        if done.returncode or not made.exists():
            msg = f"nvcc {version()} -arch={arch} ended with {done.returncode}\n{log}"
            raise NvccFailed(msg)
        return "cubin", _NUMBER_OF_THE_RUN.sub(rb"\g<1>00000000_", made.read_bytes()), log
