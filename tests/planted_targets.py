"""Targets of a plug-in: one that is right, and some that go wrong in TileLang or behind it."""

from __future__ import annotations

from dataclasses import replace

from adapters.compiler import nvcc
from adapters.upstream.tilelang_programs.target import ASCEND, CPU, SM90A

OWN = replace(CPU, name="own", limits={"tilelang.clamp": [{"field": "dtype", "in": ["fp32"], "reason": "one of four"}]})
PLANTED = replace(CPU, name="planted", text="planted_text")
PLANTED_ASCEND = replace(ASCEND, name="planted ascend", text="planted_text")


def _broken(text: str) -> tuple[str, bytes, str]:
    return nvcc.cubin(text + "\n#error planted here\n", "sm_90a")


REFUSED = replace(SM90A, name="refused", finish=_broken)
