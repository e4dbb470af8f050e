"""The cpu backend, as it would be on a machine that lacks the package of one module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from adapters.cpu.backend import CpuBackend
from conformance.protocol import Description, Report

WHY = "deep_gemm is not installed: build it"


class MissingBackend(CpuBackend):
    @classmethod
    def describe(cls, options: Mapping[str, str]) -> Description:
        return replace(super().describe(options), ask_doctor=True)

    def doctor(self) -> Report:
        return Report({"deepselect.release": "1.0"}, ("a device",), {"deepgemm": WHY, "deepselect": ""})
