"""The `nvidia` backend: the real packages on a GPU of SM90 or SM100.

Options: `arch` (sm90, sm100; which description holds), a module's name (the release of its package, such as
`deepgemm=2.6`), `cache_dir` (where compiled programs are kept).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from adapters.accelerator import AcceleratorBackend

HERE = Path(__file__).parent
CAPABILITY = {"sm90": 9, "sm100": 10}
"""major compute capability by description"""


class NvidiaBackend(AcceleratorBackend):
    """torch.cuda; one process a GPU."""

    device_type = "cuda"
    mask_variable = "CUDA_VISIBLE_DEVICES"
    collective = "nccl"
    tilelang_target = "cuda"
    descriptions = {"sm90": HERE / "sm90.toml", "sm100": HERE / "sm100.toml"}
    default_arch = "sm100"
    out_of_memory = r"out of memory|cudaerrormemoryallocation|cublas_status_alloc_failed"
    device_lost = (
        r"cuda.*(?:illegal memory access|device-side assert|unspecified launch failure|illegal instruction"
        r"|misaligned address|launch timed out|uncorrectable ecc|hardware stack error|invalid program counter"
        r"|fallen off the bus|busy or unavailable|context is destroyed|illegal address|launch failure)"
        r"|unhandled cuda error"
    )

    def before_framework(self) -> None:
        # The number of a device must mean the same to the driver, to torch and to a report.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        super().before_framework()

    def missing_device(self) -> str:
        if self.torch.version.cuda is None:
            return (f"torch {self.torch.__version__} is a build without CUDA: install the one for your CUDA version "
                    "(https://pytorch.org/get-started)")
        if not self.accelerator.is_available():
            return (f"torch {self.torch.__version__} (CUDA {self.torch.version.cuda}) finds no GPU: check nvidia-smi, "
                    f"the driver's CUDA version and {self.mask_variable}={os.environ.get(self.mask_variable, '')!r}")
        major, minor = self.accelerator.get_device_capability(0)
        if major != CAPABILITY[self.arch]:
            known = [name for name, m in CAPABILITY.items() if m == major]
            other = (f"say --backend-option arch={known[0]}" if known
                     else f"there is a description of {' and '.join(CAPABILITY)} only")
            return f"device 0 is of compute capability {major}.{minor}, but arch={self.arch} is described: {other}"
        return ""

    def driver_versions(self) -> dict[str, str]:
        out: dict[str, Any] = {"cuda": self.torch.version.cuda}
        if self.device_type == "cuda":
            out["compute_capability"] = ".".join(map(str, self.accelerator.get_device_capability()))
        return {k: str(v) for k, v in out.items() if v}
