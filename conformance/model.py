"""Frozen data: what an op is, what a problem is. Builds and runs nothing.

`conformance.declare` is the vocabulary that declarations are written in; the engine
reads what stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

CHECKS = ("values", "repeat", "invariance", "memory", "layout", "degenerate", "rejects", "laws", "timing", "compile")
"""Every check kind, in the order a report shows them."""
COMPILER = "compiler"
"""the platform of backends that compile and run nothing: only the check `compile` is theirs, and no other backend's"""


class Variant:
    """The discrete configuration of a case: a mapping whose keys are read as attributes too.

    A key wins over a method of the same name (`values`), so use `dict(variant)` to walk it.
    """

    __slots__ = ("_hash", "_keys")

    def __init__(self, keys: Any) -> None:
        own = dict(object.__getattribute__(keys, "_keys") if isinstance(keys, Variant) else keys)
        object.__setattr__(self, "_keys", own)
        object.__setattr__(self, "_hash", hash(frozenset(own.items())))

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "_keys")
        if name in own:
            return own[name]
        try:
            return object.__getattribute__(self, name)
        except AttributeError:
            msg = f"no variant key {name!r}; there are {', '.join(own) or 'none'}"
            raise AttributeError(msg) from None

    def __setattr__(self, name: str, value: Any) -> None:
        msg = "a variant is frozen"
        raise AttributeError(msg)

    def __getitem__(self, key: str) -> str:
        return object.__getattribute__(self, "_keys")[key]

    def __contains__(self, key: object) -> bool:
        return key in object.__getattribute__(self, "_keys")

    def __iter__(self) -> Iterator[str]:
        return iter(object.__getattribute__(self, "_keys"))

    def __len__(self) -> int:
        return len(object.__getattribute__(self, "_keys"))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Variant):
            return NotImplemented
        return object.__getattribute__(self, "_keys") == object.__getattribute__(other, "_keys")

    def __hash__(self) -> int:
        return object.__getattribute__(self, "_hash")

    def __repr__(self) -> str:
        return f"Variant({dict(self)})"

    def keys(self) -> Iterator[str]:
        return iter(self)

    def get(self, key: str, default: Any = None) -> Any:
        return object.__getattribute__(self, "_keys").get(key, default)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Variant, (dict(self),))


@dataclass(frozen=True)
class Problem:
    """One concrete instance: small, JSON, enough to rebuild every input bit.

    sizes: each an int, or a list of ints where every rank has its own.
    values: what was drawn for `Drawn` arguments, by argument.
    layout: argument -> {"rows_before": n, "row_units": n}: extra rows in front of the
    tensor, the row stride in multiples of the least legal one, and "rows_between" of the slices of the first axis.
    misuse, relation: name of the deliberate mistake, or of the law tried.
    """

    op: str
    variant: Variant
    sizes: Mapping[str, Any]
    values: Mapping[str, Any]
    family: str
    seed: int
    layout: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    misuse: str = ""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            sizes = self.__dict__.get("sizes", {})
            if name in sizes:
                return sizes[name]
        msg = f"a problem of {self.__dict__.get('op')} has no size {name!r}"
        raise AttributeError(msg)

    def to_json(self) -> dict[str, Any]:
        raw: dict[str, Any] = {
            "op": self.op, "variant": dict(self.variant), "sizes": dict(self.sizes),
            "values": dict(self.values), "family": self.family, "seed": self.seed,
        }
        if self.layout:
            raw["layout"] = {k: dict(v) for k, v in self.layout.items()}
        if self.misuse:
            raw["misuse"] = self.misuse
        return raw

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Problem:
        return cls(raw["op"], Variant(raw["variant"]), dict(raw["sizes"]), dict(raw["values"]), raw["family"],
                   raw["seed"], raw.get("layout", {}), raw.get("misuse", ""))


VariantFn = Callable[[Variant], Any]
ProblemFn = Callable[[Problem], Any]


@dataclass(frozen=True)
class From:
    """The value of a variant key."""

    key: str

    def __call__(self, v: Variant) -> str:
        return v[self.key]


@dataclass(frozen=True)
class When:
    """Holds where every named variant key has (one of) the given value(s)."""

    keys: Mapping[str, tuple[str, ...]]

    def __call__(self, v: Variant) -> bool:
        return all(v[k] in allowed for k, allowed in self.keys.items())


ALWAYS = When(MappingProxyType({}))


@dataclass(frozen=True)
class Requirement:
    """A number of the backend's description, such as the row alignment in bytes."""

    key: str
    default: int = 16


@dataclass(frozen=True)
class Size:
    """What a size may be: `step` multiples in lo..hi, with the points that decide code paths.

    zero: 0 is legal too (tried by the check `degenerate`). per_rank: every rank has its own.
    """

    points: tuple[int, ...]
    lo: int
    hi: int
    step: int = 1
    zero: bool = False
    per_rank: bool = False


@dataclass(frozen=True)
class In:
    """An array argument the callee reads.

    format: of `protocol.FORMATS`, or a function of the variant. shape: size names and
    integers separated by blanks, or a function of the problem (of problem and rank in a
    group). major: name of the axis whose elements lie side by side, or its number (default the last).
    row_align: bytes that the row stride must be a multiple of (or a function of the variant). forms: of `padded`
    (longer row stride), `apart` (rows that belong to nobody between two slices of the first axis) and `offset`
    (first row not the buffer's first), what the contract allows. along: axis that the op sums over, where it is not the
    last: families that pair elements or single one out do it there. data: makes the codes, for control arrays; families
    make all others. shapes: its contents decide the shape of a result, so a decoy keeps them.
    role: in | inout | accumulate | scratch | undefined_after; what stands in an inout or
    accumulate array afterwards is a result. alias: argument whose storage it shares.
    part of a tuple argument: see Tup.
    """

    name: str
    format: Any
    shape: Any
    major: Any = None
    row_align: Any = None
    when: VariantFn = ALWAYS
    data: Callable[..., Any] | None = None
    shapes: bool = False
    role: str = "in"
    alias: str | None = None
    alias_when: VariantFn = ALWAYS
    forms: tuple[str, ...] = ()
    along: Callable[[Variant], int] | None = None

    @property
    def written(self) -> bool:
        return self.role in ("inout", "accumulate")


@dataclass(frozen=True)
class Out:
    """An array argument the caller allocates and the callee fills.

    accumulates: where true, what stands in it before is an input, named like it.
    kept: (problem, inputs) -> bool array of the output's shape, True for elements that the call must leave as
    they were although they lie inside the array.
    """

    name: str
    format: Any
    shape: Any
    major: Any = None
    row_align: Any = None
    when: VariantFn = ALWAYS
    accumulates: VariantFn | None = None
    data: Callable[..., Any] | None = None
    forms: tuple[str, ...] = ()
    kept: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Drawn:
    """A value drawn from these, the plainest first."""

    choices: tuple[Any, ...]


@dataclass(frozen=True)
class SizeOf:
    """The value of a size, handed over as an int."""

    name: str


@dataclass(frozen=True)
class DType:
    """The dtype of a format that a variant key names; `None` for no argument."""

    format: Any


@dataclass(frozen=True)
class Value:
    """A plain argument: a constant, Drawn, SizeOf, DType, From, or a function of the variant.

    What depends on the rank is a SizeOf a size that `derived` gives as a list, a number a rank.
    """

    name: str
    value: Any
    when: VariantFn = ALWAYS


@dataclass(frozen=True)
class Token:
    """An object that an earlier step returned under `of`."""

    name: str
    of: str
    when: VariantFn = ALWAYS


@dataclass(frozen=True)
class Tup:
    """One argument that is a tuple of array parts, each with a name of its own."""

    name: str
    parts: tuple[In | Out, ...]
    when: VariantFn = ALWAYS


@dataclass(frozen=True)
class Returned:
    """One leaf of what the public function returns; `None` is expected where `when` fails.

    same_as: the argument that must be this very object where it was given; may depend on the variant.
    kind: array | int | float | bool | token. A token is an object that a later step takes; with a format it is a tensor
    whose shape and contents are the callee's own affair. Two leaves with the same `inside` stand in one tuple.
    row_align: bytes that the row stride must be a multiple of; without it strides are free.
    major: number of the axis, of the last two, whose elements lie side by side (default the last).
    """

    name: str
    format: Any = None
    shape: Any = None
    row_align: Any = None
    when: VariantFn = ALWAYS
    same_as: Any = None
    kind: str = "array"
    inside: str | None = None
    major: Any = None


@dataclass(frozen=True)
class Step:
    """One call of a sequence; array names are prefixed `name/` where the name is not empty."""

    name: str
    call: str
    args: tuple[Any, ...]
    returns: tuple[Returned, ...]
    when: VariantFn = ALWAYS


@dataclass(frozen=True)
class Misuse:
    """A call that must be refused. Overrides of arguments by name.

    An override is a plain value, or {"dtype": .., "shape": .., "row_bytes_extra": ..} for an array, or a function of
    problem and rank that gives either. {"fill": ..} keeps the form and names a family, or makes the codes of a draw.
    Named `step/argument` it is about that step alone: the call of that step must be refused, all others be right.
    kind: universal (must raise), limit (may return if right), trap (may raise or kill
    the process, a returned result fails). variant: the keys it needs.
    """

    name: str
    doc: str
    overrides: Mapping[str, Any]
    kind: str = "universal"
    variant: Mapping[str, str] = field(default_factory=dict)
    raises: tuple[str, ...] = ()


@dataclass(frozen=True)
class Relation:
    """Two runs that must agree: a promise (bit for bit) or a law.

    second(problem, arrays) -> (problem, arrays) makes the second run from the first;
    compare(problem, first outputs, second outputs) -> {output: bad elements or sentence}.
    """

    name: str
    doc: str
    second: Callable[..., Any]
    compare: Callable[..., Any]
    when: VariantFn = ALWAYS


@dataclass(frozen=True)
class Cost:
    """What one problem takes: floating-point operations, and bytes that must move."""

    flops: float
    bytes: float


@dataclass(frozen=True, eq=False)
class Op:
    """One public function with everything the engine needs to try it."""

    name: str
    doc: str
    variants: Mapping[str, tuple[str, ...]]
    where: Callable[[Variant], bool]
    sizes: Mapping[str, Size]
    fits: Callable[[Problem], bool]
    steps: tuple[Step, ...]
    families: tuple[str, ...]
    oracle: Callable[..., Any]
    ranks: int = 1
    arrange: Callable[..., None] | None = None
    """(problem, codes by key): the last word on arrays that depend on each other, changed in place"""
    derived: Callable[..., Mapping[str, Any]] | None = None
    """(problem, input arrays) -> sizes of results that depend on data"""
    promises: tuple[Relation, ...] = ()
    laws: tuple[Relation, ...] = ()
    rejects: tuple[Misuse, ...] = ()
    cost: Callable[[Problem], Cost] | None = None
    repeatable: bool | VariantFn = True
    """whether (or for which variants) the same call gives the same bits; where not, it gives another right answer"""
    beside: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda assigned: {}
    """sizes that go with an explicit assignment, where the sample's would hide what it is about"""
    everywhere: tuple[Mapping[str, Any], ...] = ()
    """assignments that every case shows, as the path that they decide on is another one with every variant"""
    idle: Callable[[Variant], tuple[str, ...]] = lambda variant: ()
    """sizes that a variant has no use for"""
    gives_way: Callable[[Problem], str] = lambda problem: ""
    """the size that a drawn problem larger than usual is to have halved; problems of explicit sizes stay as they are"""
    sample: Mapping[str, Any] = field(default_factory=dict)
    """sizes of a small ordinary problem, for misuse and examples"""
    core: VariantFn = ALWAYS
    """variants that the core level chooses from: few that show every triple of key values"""
    values_only: VariantFn = lambda v: False
    """variants that no check but `values` takes: what sets them apart (data, a function) can't matter to others"""
    compile_key: tuple[str, ...] = ()
    """variant keys that a compiled program is special to; each combination is a case of the check `compile`"""
    settings: tuple[Value, ...] = ()
    """process-wide settings of the module under which the call is made; a problem's `values` name them"""

    @property
    def module(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True, eq=False)
class Case:
    """Op, variant and check: one pytest item, one id."""

    op: Op
    variant: Variant
    check: str
    explicit: tuple[Mapping[str, Any], ...] = ()
    """size assignments that run first"""
    most: int = 0
    """problems that are tried; 0: as many as the level says"""
    least: int = 0
    """problems that are tried where the level says fewer"""
    families: tuple[str, ...] = ()
    """data families of the explicit problems, round and round; none: those of the op"""

    @cached_property
    def id(self) -> str:
        keys = ",".join(f"{k}={v}" for k, v in dict(self.variant).items())
        return f"{self.op.name}/{self.check}" + (f":{keys}" if keys else "")
