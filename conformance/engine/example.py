"""One problem made concrete: arrays, buffer images in the arena, the request, and what came back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conformance.engine.arrays import Draw, array_seed
from conformance.engine.families import make
from conformance.engine.layout import ArrayPlan, Planner, RankPlan, key_of, np_view, rank_sizes, resolve, shape_of
from conformance.engine.wire import HEADER_BYTES, Arena
from conformance.identity import seed_of
from conformance.model import In, Op, Out, Problem, Step, Tup
from conformance.protocol import FORMATS, arg_to_json
from references.expected import Inputs
from references.formats import codec

POOL_POISON = (0x7F, 0x7E)
"""bytes that callee-allocated memory is filled with: decoy run, judged run. glibc can't fill with 0xFF."""

_IN_SLACK = {"fp64": (0x7FF0000000000000, 0x7FF8A5A5A5A5A5A5), "fp32": (0x7F800000, 0x7FC0A5A5),
             "fp16": (0x7C00, 0x7EA5), "bf16": (0x7F80, 0x7FA5), "e4m3": (0x7E, 0x7F), "e5m2": (0x7C, 0x7F)}
_OUT_POISON = {"fp64": (0x7FF8A5A5A5A5A5A5, 0x7E5A5A5A5A5A5A5A), "fp32": (0x7FC0A5A5, 0x7E5A5A5A),
               "fp16": (0x7EA5, 0x7A5A), "bf16": (0x7FA5, 0x7E5A), "e4m3": (0x7F, 0x5A), "e5m2": (0x7F, 0x5A)}
_OTHER = (0xA5A5A5A5A5A5A5A5, 0x5A5A5A5A5A5A5A5A)


def pattern(fmt: str, *, out: bool, judged: bool) -> int:
    """The code that fills what nobody wrote: hostile to read for inputs, illegal as a result for outputs.

    A decoy and a judged run differ, so a code that is allowed in one by chance is not in both.
    """
    table = _OUT_POISON if out else _IN_SLACK
    width = FORMATS[fmt].itemsize_bytes * 8
    return table.get(fmt, _OTHER)[judged] & ((1 << width) - 1)


@dataclass
class Example:
    """A problem with its arrays and plans; `codes` are what the callee receives."""

    op: Op
    problem: Problem
    codes: dict[str, np.ndarray]
    formats: dict[str, str]
    plans: list[RankPlan]
    judged: bool
    before: list[list[np.ndarray]] = field(default_factory=list)
    after: list[list[np.ndarray]] = field(default_factory=list)
    arenas: list[Arena] = field(default_factory=list)

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.codes, self.formats)


def build(op: Op, problem: Problem, requirements: Mapping[str, int], *, judged: bool = True,
          overrides: Mapping[str, Any] | None = None, codes: Mapping[str, np.ndarray] | None = None) -> Example:
    """Make every array of the problem; `codes` replaces the drawn ones by name."""
    made: dict[str, np.ndarray] = {}
    formats: dict[str, str] = {}
    for rank in range(op.ranks):
        for step in op.steps:
            if step.when(problem.variant):
                _make_arrays(op, problem, step, rank, judged, made, formats)
    if op.arrange:
        op.arrange(problem, made)
    if codes:
        made.update(codes)
    for name, value in (overrides or {}).items():
        if isinstance(value, Mapping) and "fill" in value:
            for key in [k for k in made if name in (k.partition("@")[0], k.partition("@")[0].rpartition("/")[2])]:
                d = Draw(name, 0, made[key].shape, formats[key], problem, array_seed(problem, key))
                made[key] = value["fill"](d) if callable(value["fill"]) else make(d, value["fill"])
    derived = op.derived(problem, Inputs(made, formats)) if op.derived else None
    plans = [Planner(op, problem, requirements, r, derived, overrides or {}).make() for r in range(op.ranks)]
    return Example(op, problem, made, formats, plans, judged)


def _parts(step: Step, problem: Problem) -> Iterator[In | Out]:
    for a in step.args:
        if not a.when(problem.variant):
            continue
        if isinstance(a, Tup):
            yield from a.parts
        elif isinstance(a, (In, Out)):
            yield a


def _make_arrays(op: Op, problem: Problem, step: Step, rank: int, judged: bool, made: dict[str, np.ndarray],
                 formats: dict[str, str]) -> None:
    sizes = rank_sizes(problem, rank)
    seen: dict[str, np.ndarray] = {}
    position = 0
    for a in _parts(step, problem):
        if isinstance(a, Out) and not (a.accumulates and a.accumulates(problem.variant)):
            continue
        key = key_of(step, a.name, rank, op.ranks)
        fmt = resolve(a.format, problem)
        formats[key] = fmt
        alias = _alias_key(op, a, problem, step, rank)
        if alias in made:
            made[key] = made[alias]
            continue
        own = problem if judged or (isinstance(a, In) and a.shapes) else replace(
            problem, seed=seed_of(problem.seed, "decoy"), family=op.families[0])
        draw = Draw(a.name, position, shape_of(a.shape, problem, rank, sizes), fmt, own, array_seed(own, key), rank,
                    sizes, seen, -1 if getattr(a, "along", None) is None else a.along(problem.variant))
        if a.data is not None:
            made[key] = np.ascontiguousarray(a.data(draw))
        else:
            made[key] = make(draw, own.family)
            position += 1
        seen[a.name] = made[key]


def _alias_key(op: Op, a: In | Out, problem: Problem, step: Step, rank: int) -> str:
    alias = getattr(a, "alias", None)
    if not alias or not a.alias_when(problem.variant):
        return ""
    return alias_key(op, alias, step, rank)


def alias_key(op: Op, alias: str, step: Step, rank: int) -> str:
    """The key of an alias: an argument of the same step, or `step/name` of an earlier one."""
    if "/" in alias:
        return alias + (f"@{rank}" if op.ranks > 1 else "")
    return key_of(step, alias, rank, op.ranks)


def place(example: Example, arenas: list[Arena], cursors: list[int]) -> list[dict[str, Any]]:
    """Write the buffer images into the arenas from `cursors` on; returns a request a rank."""
    requests = []
    example.arenas = arenas
    for rank, (plan, arena) in enumerate(zip(example.plans, arenas, strict=True)):
        rows, at = [], cursors[rank]
        for b in plan.buffers:
            nbytes = -(-b.nbytes // 64) * 64
            rows.append({"nbytes": b.nbytes, "align": 512, "at": at, "back": at + nbytes})
            at += 2 * nbytes
        cursors[rank] = at
        arena.reserve(at)
        images = [np.frombuffer(arena.view, np.uint8, r["nbytes"], r["at"]) for r in rows]
        _fill(example, plan, images)
        example.before.append(images)
        example.after.append([np.frombuffer(arena.view, np.uint8, r["nbytes"], r["back"]) for r in rows])
        steps = [{"op": s.call.op, "args": {n: arg_to_json(a) for n, a in s.call.args.items()},
                  "returns": list(s.call.returns), "outs": list(s.outs), "refused": s.refused} for s in plan.steps]
        requests.append({"cmd": "run", "buffers": rows, "steps": steps, "poison": POOL_POISON[example.judged],
                         "arena_bytes": at, "settings": settings_of(example.op, example.problem)})
    return requests


def settings_of(op: Op, problem: Problem) -> dict[str, dict[str, Any]]:
    """The process-wide settings that the problem is about, by module."""
    named = {s.name: problem.values.get(s.name, s.value) for s in op.settings if s.when(problem.variant)}
    return {op.module: named} if named else {}


def _fill(example: Example, plan: RankPlan, images: list[np.ndarray]) -> None:
    filled = set()
    for a in plan.arrays.values():
        if a.buffer not in filled:
            filled.add(a.buffer)
            out = plan.buffers[a.buffer].role in ("out", "accumulate")
            code = pattern(a.format, out=out, judged=example.judged)
            width = FORMATS[a.format].itemsize_bytes
            image = images[a.buffer]
            n = len(image) // width * width
            image[:n].view(f"u{width}")[:] = code
            image[n:] = 0xA5
        codes = example.codes.get(a.key)
        if codes is not None and codes.shape == a.shape and example.formats[a.key] == a.format:
            np_view(images[a.buffer], a)[...] = stored(codes, a.format)
        elif isinstance(a.arg, In):
            # An argument of another shape or dtype than declared: its content does not matter.
            np_view(images[a.buffer], a)[...] = 0


def stored(codes: np.ndarray, fmt: str) -> np.ndarray:
    """Codes as they stand in memory."""
    return codec.pack(codes, fmt) if FORMATS[fmt].per_item > 1 else codes


def fetched(view: np.ndarray, fmt: str, shape: tuple[int, ...]) -> np.ndarray:
    """Contiguous codes of a stored array, cut to the shape in codes."""
    if FORMATS[fmt].per_item == 1:
        return np.ascontiguousarray(view).view(FORMATS[fmt].codes)
    codes = codec.unpack(np.ascontiguousarray(view), fmt)
    return codes[..., : shape[-1]] if shape else codes


def out_codes(example: Example, rank: int, a: ArrayPlan) -> np.ndarray:
    """What stands in a caller-allocated array after the run."""
    return fetched(np_view(example.after[rank][a.buffer], a), a.format, a.shape)


def digests(arrays: Mapping[str, np.ndarray]) -> str:
    """One sha256 over arrays by name."""
    h = hashlib.sha256()
    for key in sorted(arrays):
        a = np.ascontiguousarray(arrays[key])
        h.update(f"{key}:{a.dtype}:{a.shape};".encode())
        h.update(a.tobytes())
    return h.hexdigest()


def start_cursors(ranks: int) -> list[int]:
    return [HEADER_BYTES] * ranks
