"""Where every array of a call stands: buffers, guard bands, strides, and the call itself.

The engine owns every input, every caller-allocated output and its guard bands. A plan is
made from the problem and the backend's requirements alone, so an executor needs no thought.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.model import (
    Drawn,
    DType,
    From,
    In,
    Op,
    Out,
    Problem,
    Requirement,
    Returned,
    SizeOf,
    Step,
    Token,
    Tup,
    Value,
)
from conformance.protocol import (
    FORMATS,
    Arg,
    CallSpec,
    DTypeArg,
    TensorArg,
    TensorSpec,
    TokenArg,
    TupleArg,
    ValueArg,
)

GUARD_BYTES = 512
ALIGN_BYTES = 512


@dataclass
class ArrayPlan:
    """One array of one rank: what it holds and where it lies."""

    key: str
    """`step/name@rank`, the parts that apply"""
    arg: In | Out
    format: str
    shape: tuple[int, ...]
    """in codes"""
    spec: TensorSpec
    buffer: int
    offset_bytes: int
    row_bytes: int

    @property
    def reads(self) -> bool:
        """Whether the callee may read what stands in it before the call."""
        return isinstance(self.arg, In)

    @property
    def written(self) -> bool:
        """Whether what stands in it after the call is a result."""
        return isinstance(self.arg, Out) or self.arg.written


@dataclass
class BufferPlan:
    nbytes: int
    role: str
    """in | out | inout | accumulate | scratch | undefined_after"""


@dataclass
class Expectation:
    """One declared leaf of a result, resolved for the problem."""

    key: str
    leaf: Returned
    kind: str
    """array | none | int | float | bool | str | token | argument"""
    format: str = ""
    shape: tuple[int, ...] = ()
    align_bytes: int = 0
    """bytes that the row stride is a multiple of; 0 where strides are free"""
    major: int = -1
    same_as: str = ""


@dataclass
class StepPlan:
    name: str
    call: CallSpec
    outs: tuple[str, ...]
    expects: tuple[Expectation, ...]
    structure: Any
    refused: bool = False
    """whether a misuse is planted in this step alone; the steps behind it must then still be right"""


@dataclass
class RankPlan:
    buffers: list[BufferPlan] = field(default_factory=list)
    arrays: dict[str, ArrayPlan] = field(default_factory=dict)
    steps: list[StepPlan] = field(default_factory=list)


def resolve(value: Any, problem: Problem) -> Any:
    """A format, flag or value that may depend on the variant."""
    return value(problem.variant) if callable(value) else value


def rank_sizes(problem: Problem, rank: int, derived: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Every size as this rank sees it."""
    merged = {**problem.sizes, **(derived or {})}
    return {k: v[rank] if isinstance(v, (list, tuple)) else v for k, v in merged.items()}


def shape_of(shape: Any, problem: Problem, rank: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape, in codes. A name is a size; a number is itself; a function is asked for numbers or for names."""
    if callable(shape):
        try:
            shape = shape(problem)
        except TypeError:
            shape = shape(problem, rank)
        if not isinstance(shape, str):
            return tuple(int(n) for n in shape)
    return tuple(int(t) if t.lstrip("-").isdigit() else int(sizes[t]) for t in (shape or "").split())


def key_of(step: Step, name: str, rank: int, ranks: int) -> str:
    return (f"{step.name}/" if step.name else "") + name + (f"@{rank}" if ranks > 1 else "")


def axis_names(shape: Any) -> list[str]:
    return shape.split() if isinstance(shape, str) else []


class Planner:
    """Makes the plan of one rank."""

    def __init__(self, op: Op, problem: Problem, requirements: Mapping[str, int], rank: int,
                 derived: Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> None:
        self.op, self.problem, self.requirements, self.rank = op, problem, requirements, rank
        self.sizes = rank_sizes(problem, rank, derived)
        self.given = overrides
        self.overrides: Mapping[str, Any] = {}
        self.plan = RankPlan()

    def make(self) -> RankPlan:
        active = [s for s in self.op.steps if s.when(self.problem.variant)]
        for step in active:
            self.step(step, last=step is active[-1])
        return self.plan

    def step(self, step: Step, *, last: bool) -> None:
        args: dict[str, Arg] = {}
        outs = []
        own = {n.rpartition("/")[2]: v for n, v in self.given.items() if n.rpartition("/")[0] == step.name}
        self.overrides = {n: v for n, v in self.given.items() if "/" not in n} | own
        refused = any(n.startswith(f"{step.name}/") for n in self.given)
        active = {a.name for a in step.args if a.when(self.problem.variant)}
        for a in step.args:
            meant = a.name not in active or a.when(self.problem.variant)
            if a.name in self.overrides and meant and not self.parts_overridden(a):
                args[a.name] = self.override(step, a)
            elif a.when(self.problem.variant):
                args[a.name] = self.argument(step, a)
                if isinstance(a, Out) or (isinstance(a, In) and a.written):
                    outs.append(a.name)
        declared = {x.name for a in step.args for x in (a, *getattr(a, "parts", ()))}
        for name, value in self.overrides.items():
            if name not in declared and (refused or last):
                args[name] = self.extra(step, name, value)
        expects = tuple(self.expect(step, r) for r in step.returns)
        call = CallSpec(step.call, args, tuple(r.name for r in step.returns),
                        tuple(r.name for r in step.returns if r.kind == "token"))
        structure = structure_of(step.returns, expects)
        self.plan.steps.append(StepPlan(step.name, call, tuple(outs), expects, structure, refused))

    def argument(self, step: Step, a: Any) -> Arg:
        if isinstance(a, (In, Out)):
            return self.array(step, a)
        if isinstance(a, Tup):
            return TupleArg(tuple(self.override(step, part) if part.name in self.overrides else self.array(step, part)
                                  for part in a.parts))
        if isinstance(a, Token):
            return TokenArg(a.of)
        if isinstance(a.value, DType):
            fmt = resolve(a.value.format, self.problem) if not isinstance(a.value.format, str) else (
                self.problem.variant.get(a.value.format, a.value.format))
            return DTypeArg(FORMATS[fmt].storage)
        value = self.plain(step, a)
        return TupleArg(tuple(map(ValueArg, value))) if isinstance(value, tuple) else ValueArg(value)

    def plain(self, step: Step, a: Value) -> Any:
        v = a.value
        if isinstance(v, Drawn):
            own = f"{step.name}/{a.name}"
            return self.problem.values[own if own in self.problem.values else a.name]
        if isinstance(v, SizeOf):
            return self.sizes[v.name]
        if isinstance(v, From):
            return v(self.problem.variant)
        return v(self.problem.variant) if callable(v) else v

    def array(self, step: Step, a: In | Out, fmt: str = "", shape: tuple[int, ...] | None = None,
              row_bytes_extra: int = 0) -> TensorArg:
        p = self.problem
        fmt = fmt or resolve(a.format, p)
        shape = shape_of(a.shape, p, self.rank, self.sizes) if shape is None else shape
        key = key_of(step, a.name, self.rank, self.op.ranks)
        form = p.layout.get(a.name, {})
        align = self.align_bytes(a.row_align)
        spec, row_bytes = strided(fmt, shape, resolve(a.major, p), axis_names(a.shape), align,
                                  form.get("row_units", 1), row_bytes_extra, form.get("rows_between", 0))
        offset = GUARD_BYTES + form.get("rows_before", 0) * row_bytes
        alias = getattr(a, "alias", None)
        if alias and a.alias_when(p.variant):
            suffix = f"@{self.rank}" if self.op.ranks > 1 else ""
            other = self.plan.arrays[alias + suffix if "/" in alias else key_of(step, alias, self.rank, self.op.ranks)]
            buffer, offset = other.buffer, other.offset_bytes
            if (fmt, shape) == (other.format, other.shape):
                spec, row_bytes = other.spec, other.row_bytes
        else:
            buffer = len(self.plan.buffers)
            role = a.role if isinstance(a, In) else "out"
            if isinstance(a, Out) and a.accumulates is not None and a.accumulates(p.variant):
                role = "accumulate"
            self.plan.buffers.append(BufferPlan(offset + spec.span_bytes() + GUARD_BYTES, role))
        self.plan.arrays[key] = ArrayPlan(key, a, fmt, shape, spec, buffer, offset, row_bytes)
        return TensorArg(buffer, offset, spec)

    def align_bytes(self, align: Any) -> int:
        """A row alignment: a number, what the backend requires, or a function of the variant."""
        align = resolve(align, self.problem)
        return (self.requirements.get(align.key, align.default) if isinstance(align, Requirement) else align) or 0

    def parts_overridden(self, a: Any) -> bool:
        """Whether an override of this name is about one part of a tuple, not about the tuple."""
        return isinstance(a, Tup) and isinstance(self.overrides[a.name], Mapping)

    def override(self, step: Step, a: Any) -> Arg:
        value = self.overrides[a.name]
        if callable(value):
            value = value(self.problem, self.rank)
        if not isinstance(value, Mapping):
            return ValueArg(value)
        if "dtype" in value and not isinstance(a, (In, Out)):
            return DTypeArg(FORMATS[value["dtype"]].storage)
        fmt = value.get("dtype") or (resolve(a.format, self.problem) if isinstance(a, (In, Out)) else "int32")
        shape = self.override_shape(value.get("shape", getattr(a, "shape", "")))
        base = a if isinstance(a, (In, Out)) else In(a.name, fmt, "")
        return self.array(step, base, fmt, shape, value.get("row_bytes_extra", 0))

    def override_shape(self, shape: Any) -> tuple[int, ...]:
        """As a declared shape, where a token may also be `size+n` or `size-n`."""
        if callable(shape):
            return shape_of(shape, self.problem, self.rank, self.sizes)
        out = []
        for token in shape.split():
            name, sign, delta = token.partition("+") if "+" in token else token.partition("-")
            base = int(name) if name.isdigit() else self.sizes[name]
            out.append(base + (int(delta) if sign == "+" else -int(delta) if sign else 0))
        return tuple(out)

    def extra(self, step: Step, name: str, value: Any) -> Arg:
        if callable(value):
            value = value(self.problem, self.rank)
        if not isinstance(value, Mapping):
            return ValueArg(value)
        return self.array(step, In(name, value["dtype"], ""), value["dtype"], self.override_shape(value["shape"]))

    def expect(self, step: Step, r: Returned) -> Expectation:
        key = key_of(step, r.name, self.rank, self.op.ranks)
        if not r.when(self.problem.variant):
            return Expectation(key, r, "none")
        if r.kind != "array":
            return Expectation(key, r, r.kind, r.format or "")
        fmt = resolve(r.format, self.problem)
        shape = shape_of(r.shape, self.problem, self.rank, self.sizes)
        name = resolve(r.same_as, self.problem)
        same = key_of(step, name, self.rank, self.op.ranks) if name else ""
        if same and same in self.plan.arrays:
            return Expectation(key, r, "argument", fmt, shape, same_as=same)
        major = resolve(r.major, self.problem)
        return Expectation(key, r, "array", fmt, shape, self.align_bytes(r.row_align), -1 if major is None else major)


def row_bytes_of(op: Op, problem: Problem, requirements: Mapping[str, int]) -> dict[str, int]:
    """The bytes of a row of every array argument by name, the first rank's: what limits on `<arg>.row_bytes` read."""
    planner = Planner(op, problem, requirements, 0, None, {})
    for step in op.steps:
        for a in step.args if step.when(problem.variant) else ():
            if isinstance(a, (In, Out, Tup)) and a.when(problem.variant):
                planner.argument(step, a)
    return {p.arg.name: p.row_bytes for p in planner.plan.arrays.values()}


def structure_of(returns: tuple[Returned, ...], expects: tuple[Expectation, ...]) -> Any:
    """The nesting of a result: a list for a tuple, a kind for a leaf."""
    if not returns:
        return "none"
    out: list[Any] = []
    last = None
    for r, e in zip(returns, expects, strict=True):
        if r.inside is None or r.inside != last:
            out.append([e.kind] if r.inside else e.kind)
        else:
            out[-1].append(e.kind)
        last = r.inside
    return out[0] if len(out) == 1 and len(returns) == 1 and not returns[0].inside else out


def strided(fmt: str, shape: tuple[int, ...], major: str | int | None, axes: list[str], align: int, units: int,
            extra_bytes: int, rows_between: int = 0) -> tuple[TensorSpec, int]:
    """The storage view of an array of codes, and the bytes of its row stride.

    The major axis lies side by side; the row stride is rounded up to `align` bytes, times `units`.
    Between two slices of the slowest axis there are `rows_between` rows that belong to none.
    """
    f = FORMATS[fmt]
    item = f.itemsize_bytes
    stored = list(shape)
    if stored and f.per_item > 1:
        stored[-1] = -(-stored[-1] // f.per_item)
    order = list(range(len(stored)))
    if isinstance(major, int) or (major in axes and len(axes) == len(stored)):
        fast = major if isinstance(major, int) else axes.index(major)
        order = [i for i in order if i != fast] + [fast]
    strides = [0] * len(stored)
    step, row_bytes = 1, 0
    for depth, axis in enumerate(reversed(order)):
        strides[axis] = step
        step *= max(stored[axis], 1)
        if depth == 0:
            unit = max(align, item)
            least = -(-step * item // unit) * unit if align else step * item
            row_bytes = least * units + (unit * (units - 1) if not align and units > 1 else 0) + extra_bytes
            row_bytes -= row_bytes % item
            step = row_bytes // item
    if len(order) > 2:
        strides[order[0]] += rows_between * (row_bytes // item)
    return TensorSpec(tuple(stored), tuple(strides), f.storage, fmt), row_bytes


def np_view(image: np.ndarray, plan: ArrayPlan) -> np.ndarray:
    """The array's storage elements inside a buffer image, no copy."""
    dtype = np.dtype(_NP_STORAGE.get(plan.spec.dtype, plan.spec.dtype))
    n = plan.spec.span_bytes()
    flat = image[plan.offset_bytes : plan.offset_bytes + n].view(dtype)
    strides = tuple(s * dtype.itemsize for s in plan.spec.strides)
    return np.lib.stride_tricks.as_strided(flat, plan.spec.shape, strides)


_NP_STORAGE = {
    "bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "float8_e8m0fnu": "uint8",
}
