"""The `ascend` backend: the real packages on an Ascend 950.

Options: `arch` (ascend950), `cache_dir` (where compiled programs are kept).
"""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path
from typing import Any

from adapters.accelerator import AcceleratorBackend

HERE = Path(__file__).parent


class AscendBackend(AcceleratorBackend):
    """torch.npu, which torch_npu adds; one process a device."""

    device_type = "npu"
    plugin = "torch_npu"
    mask_variable = "ASCEND_RT_VISIBLE_DEVICES"
    collective = "hccl"
    tilelang_target = "ascend"
    descriptions = {"ascend950": HERE / "ascend950.toml"}
    default_arch = "ascend950"
    out_of_memory = r"out of memory|\bel0004\b|failed to allocate memory|error code:? (?:is )?207001"
    device_lost = (
        r"ai ?core (?:exception|error|timeout|trap)|ai ?cpu exception|vector core exception|device task abort"
        r"|force stop|suspect remote error|uce error|hbm multi bit ecc|error code:? (?:is )?(?:107002|5070\d\d|507899)"
    )

    def before_framework(self) -> None:
        # The order of launches must be that of calls, and an error must be raised by the call that made it.
        os.environ.setdefault("TASK_QUEUE_ENABLE", "0")
        # A plug-in that torch loads by itself would start before the mask stands.
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        super().before_framework()

    def own_device(self) -> Any:
        place = super().own_device()
        with contextlib.suppress(AttributeError):
            # Results in a private layout could not be read byte by byte.
            self.accelerator.config.allow_internal_format = False
        return place

    def missing_device(self) -> str:
        missing = super().missing_device()
        if not missing:
            return ""
        home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
        where = f"CANN of {home}" if home else "no ASCEND_HOME_PATH: source CANN's set_env.sh first"
        return f"{missing}: check npu-smi info and the driver ({where})"

    def driver_versions(self) -> dict[str, str]:
        out: dict[str, str] = {}
        with contextlib.suppress(Exception):
            out["torch_npu"] = importlib.import_module("torch_npu").__version__
        home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
        if home:
            out["cann"] = Path(home).resolve().name
        return out
