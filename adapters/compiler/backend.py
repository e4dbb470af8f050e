"""The `compiler` backend: the suite's TileLang programs for a target that need not be here. It runs nothing.

Option `target`: sm_90a, sm_100a (a cubin where there is an nvcc, else the kernel text), ascend (the kernel text), or
`package.module:NAME`, a plug-in's own `tilelang_programs.target.Target`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from adapters.chip_data import load_file, support_of
from adapters.compiler import nvcc
from adapters.compiler.lower import UNINITIALISED, leaves_a_trace, lowered, names_of, used
from adapters.compiler.programs import BARE, PROGRAMS
from conformance.protocol import Artefact, Backend, Description, Group, Report, Support, supported, unsupported

HERE = Path(__file__).parent
TARGETS: Mapping[str, str] = {"sm_90a": "cubin", "sm_100a": "cubin", "ascend": "text"}
"""what is made for each target that has a file of limits here"""
NOTHING_ELSE = {
    "*": unsupported("there is no program of the suite's to compile: its module brings its own", "by_design"),
}


class CompilerBackend(Backend):
    """Every program of the suite, compiled for one target and never run."""

    @classmethod
    def describe(cls, options: Mapping[str, str]) -> Description:
        """Raises ValueError where the target is missing or unknown."""
        name = target_name(options)
        return Description(name=f"tilelang {name.rpartition(':')[2]}", ops=support(name), platform="compiler",
                           host=True, fork_after_import=True, versions=versions(name))

    @classmethod
    def preload(cls, module: str) -> None:
        # Every text, so that an executor imports nothing and a run compiles what stood here when it began.
        for name in TARGETS:
            for part in ("movement", "elementwise", "reduce", "gemm"):
                importlib.import_module(f"{target(name).text}.{part}")

    def __init__(self, *, device: str, options: Mapping[str, str], group: Group | None) -> None:
        super().__init__(device=device, options=options, group=group)
        self.target_name = target_name(options)

    def doctor(self) -> Report:
        try:
            target(self.target_name)
        except Exception as e:
            return Report(versions(self.target_name), (), {"tilelang": f"{type(e).__name__}: {e}"})
        return Report(versions(self.target_name), (f"no device; compiles for {self.target_name}",), {"tilelang": ""})

    def compile_static(self, op: str, args: Mapping[str, Any], entry: str) -> Artefact:
        """The cubin or kernel text of an op's program. Raises what TileLang or the vendor's compiler says."""
        wanted = target(self.target_name)
        module, name, params = PROGRAMS[op](**args)
        build = wanted.program(module, name)
        program = build(wanted, **params)
        text = lowered(program, wanted, entry)
        uses: tuple[str, ...] | None = used(text, names_of(program))
        if name in BARE and not leaves_a_trace(
                text, lambda: lowered(build(wanted, **{**params, **BARE[name]}), wanted, entry, UNINITIALISED), op):
            uses = None
        kind, content, log = wanted.finish(text) if wanted.finish else ("text", text.encode(), "")
        return Artefact(kind, content, log, uses)


def target_name(options: Mapping[str, str]) -> str:
    """The target that the options name. Raises ValueError."""
    name = options.get("target", "")
    if name not in TARGETS and ":" not in name:
        msg = (f"target {name!r}: " if name else "") + (
            f"say --backend-option target=NAME with {', '.join(TARGETS)} or package.module:NAME")
        raise ValueError(msg)
    return name


def target(name: str) -> Any:
    """The `Target` of a name, with the vendor's compiler where there is one. Imports TileLang."""
    from dataclasses import replace

    from adapters.upstream.tilelang_programs.target import target_of

    found = target_of(name)
    if TARGETS.get(name) == "cubin" and nvcc.nvcc():
        return replace(found, finish=partial(nvcc.cubin, arch=name))
    return found


def support(name: str) -> dict[str, Support]:
    """What of the ops the target can have: its file, or what a plug-in's target says of itself."""
    file = HERE / f"{name}.toml"
    if name in TARGETS:
        rows = load_file(file)["ops"]
        return NOTHING_ELSE | {op: support_of(op, rows[op]) if op in rows else supported() for op in PROGRAMS}
    limits = target(name).limits
    return NOTHING_ELSE | {op: supported(limits=tuple(limits.get(op, ()))) for op in PROGRAMS}


def versions(name: str) -> dict[str, str]:
    out = {"target": name}
    try:
        out["tilelang"] = version("tilelang")
    except PackageNotFoundError:
        out["tilelang"] = "none"
    if TARGETS.get(name) == "cubin":
        out["nvcc"] = nvcc.version()
    return out
