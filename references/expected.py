"""What an oracle answers: for every output element, which values are allowed.

An oracle is `oracle(problem, inputs, profile) -> {output: Expected}`. It sees the
problem, the inputs as the codes the kernel received *before* the call, and the
numerics profile of the backend; never the kernel. An output is named as declared
(`d`); in a sequence `step/d`; in a group `d@rank`.
A key may also be a tuple of outputs that constrain each other, with a `Joint`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from references.formats import codec
from references.typical import Typical

Array = np.ndarray


class Problem(Protocol):
    """What an oracle may ask of a problem: `variant.<key>`, a size by name, `values[<arg>]`."""

    variant: Any
    sizes: Mapping[str, Any]
    values: Mapping[str, Any]

    def __getattr__(self, size: str) -> Any: ...


class Inputs:
    """The input arrays by name (`a`; `step/a` in a sequence; `a@rank` in a group), decoded on demand."""

    def __init__(self, codes: Mapping[str, Array], formats: Mapping[str, str]) -> None:
        self._codes, self._formats, self._real = codes, formats, {}

    def __contains__(self, name: str) -> bool:
        return name in self._codes

    def codes(self, name: str) -> Array:
        """The codes, as `protocol.FORMATS` stores them; packed formats one code an element."""
        return self._codes[name]

    def format(self, name: str) -> str:
        return self._formats[name]

    def real(self, name: str) -> Array:
        """float64 values (integers stay integers)."""
        if name not in self._real:
            self._real[name] = codec.decode(self._codes[name], self._formats[name])
        return self._real[name]


@dataclass(frozen=True)
class Judgement:
    """The verdict on every element of one output.

    bad: bool, the output's shape. ratio: error over bound where that makes sense,
    else None. expected: float64 or codes to show beside what was observed.
    reason: of the closed list in `conformance.results`.
    note: a sentence for what elements alone can't say. by_chance: the note is about statistics, which reject a correct
    kernel once in a million tensors: it counts when other data show it again. figures: statistics by name.
    """

    bad: Array
    expected: Array | None = None
    ratio: Array | None = None
    reason: str = "numeric"
    note: str = ""
    by_chance: bool = False
    figures: Mapping[str, float] | None = None

    @property
    def ok(self) -> bool:
        return not self.bad.any() and not self.note


class Expected:
    """Base of all kinds; `judge` takes codes in `fmt` of the expected shape.

    A wrong dtype or shape, of the codes or of what the oracle gave, raises TypeError or ValueError: the engine
    has checked the observed ones before, so it is the oracle that is at fault.
    """

    shape: tuple[int, ...]

    def judge(self, codes: Array, fmt: str) -> Judgement:
        raise NotImplementedError

    def saturating(self) -> Expected:
        """The same of a backend in saturation mode, where infinities become the largest number and NaN becomes 0.

        Source: Ascend's overflow modes. Where NaN was right, anything is: what became 0 on the way leaves no trace.
        Outputs that constrain each other, and bits that are moved, stay as they are.
        """
        return self


def _checked(codes: Array, fmt: str, shape: tuple[int, ...]) -> Array:
    codes = np.asarray(codes)
    if codes.dtype != codec.storage(fmt):
        msg = f"codes of {fmt} are {codec.storage(fmt)}, got {codes.dtype}"
        raise TypeError(msg)
    if codes.shape != shape:
        msg = f"expected shape {shape}, got {codes.shape}"
        raise ValueError(msg)
    return codes


def _mask(unspecified: Array | bool | None, shape: tuple[int, ...]) -> Array | None:
    return None if unspecified is None else np.broadcast_to(np.asarray(unspecified, bool), shape)


def _reason(bad: Array, odd: Array) -> str:
    """`nonfinite` where most bad elements are or should be NaN or infinite."""
    return "nonfinite" if 2 * np.count_nonzero(bad & odd) > np.count_nonzero(bad) else "numeric"


@dataclass(frozen=True)
class Within(Expected):
    """Finite: |observed - value| <= bound. Non-finite value: NaN for NaN, infinity by sign.

    value, bound: float64 of the output's shape; the bound includes the rounding to
    the output format and is never negative or NaN; where value is not finite it does
    not count and reads NaN. Zeros of either sign are equal.
    An infinite observation is allowed where value, or an unrounded result that the
    bound admits, rounds to infinity. Where an output saturates by contract, or its format
    has no infinity, the oracle clips value itself.
    unspecified: True where the contract says nothing.
    saturates: the largest number counts as infinite and anything as NaN, see `saturating`.
    typical: how the errors of random data scatter; looked at where every element is within its bound.
    Integers beyond 2**53 are not told apart here; by `Exact` they are.
    """

    value: Array
    bound: Array
    unspecified: Array | None = None
    typical: Typical | None = None
    saturates: bool = False

    def __post_init__(self) -> None:
        value = np.asarray(self.value, np.float64)
        bound = np.broadcast_to(np.asarray(self.bound, np.float64), value.shape)
        unspecified = _mask(self.unspecified, value.shape)
        usable = (bound >= 0) & (bound < np.inf) | ~np.isfinite(value)
        if unspecified is not None:
            usable = usable | unspecified
        if not np.all(usable):
            msg = "a bound must be finite and not negative wherever the expected value is finite"
            raise ValueError(msg)
        if not (finite := np.isfinite(value)).all():
            bound = np.where(finite, bound, np.nan)  # compares as false with everything
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "bound", bound)
        object.__setattr__(self, "unspecified", unspecified)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.value.shape

    def judge(self, codes: Array, fmt: str) -> Judgement:
        got = np.asarray(codec.decode(_checked(codes, fmt, self.shape), fmt), np.float64)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            error = np.asarray(np.abs(got - self.value))
            good = np.asarray(error <= self.bound)
            if good.all() and self.unspecified is None:
                fine = Judgement(np.zeros(self.shape, bool), self.value, self._ratio(error, error > 0))
                return self._together(fine, got)
            if self.saturates and codec.has_infinity(fmt):
                got = np.where(np.abs(got) == codec.max_finite(fmt), np.copysign(np.inf, got), got)
            excused = self._same_nonfinite(got) | self._may_overflow(got, fmt)
            if self.saturates:
                excused |= np.isnan(self.value)
            if self.unspecified is not None:
                excused |= self.unspecified
            bad = np.asarray(~(good | excused))
            ratio = self._ratio(np.nan_to_num(error, nan=np.inf), ~excused & (error != 0))
        judged = Judgement(bad, self.value, ratio, _reason(bad, ~(np.isfinite(got) & np.isfinite(self.value))))
        return judged if bad.any() else self._together(judged, got)

    def _together(self, judged: Judgement, got: Array) -> Judgement:
        """What the errors of all elements say together, where each of them is within its bound."""
        if self.typical is None or not got.size:
            return judged
        with np.errstate(invalid="ignore"):
            error = got - self.value
        mask = np.isfinite(error)
        if self.unspecified is not None:
            mask &= ~self.unspecified
        error = np.where(mask, error, 0.0)
        note, figures = self.typical.judged(error, self.value, mask)
        return replace(judged, note=note, by_chance=bool(note), figures=figures)

    def saturating(self) -> Within:
        return replace(self, saturates=True)

    def _ratio(self, error: Array, where: Array) -> Array:
        """error / bound, infinite for an error that the bound can't measure; 0 elsewhere."""
        ratio = np.divide(error, self.bound, out=np.zeros(error.shape), where=where)
        return np.nan_to_num(ratio, copy=False, nan=np.inf, posinf=np.inf) if where.any() else ratio

    def _same_nonfinite(self, got: Array) -> Array:
        return (np.isnan(self.value) & np.isnan(got)) | (np.isinf(self.value) & (self.value == got))

    def _may_overflow(self, got: Array, fmt: str) -> Array:
        """Infinities where the unrounded result may lie at or past the overflow threshold.

        The bound holds at least the half ulp of the rounding, which past the largest finite number is that of
        its binade; so value + bound then reaches threshold + half ulp, the power of two above all finite numbers.
        """
        threshold = codec.overflow_threshold(fmt)
        outward = np.where(got > 0, self.value, -self.value)
        past = outward + self.bound >= threshold + float(codec.half_ulp(codec.max_finite(fmt), fmt))
        return np.isinf(got) & np.isfinite(self.value) & (past | (outward >= threshold))


@dataclass(frozen=True)
class Exact(Expected):
    """Bit for bit these codes; where `any_nan` is True every NaN pattern is the same."""

    codes: Array
    unspecified: Array | None = None
    any_nan: bool = True
    reason: str = "numeric"

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return np.shape(self.codes)

    def judge(self, codes: Array, fmt: str) -> Judgement:
        return self._as_choice().judge(codes, fmt)

    def saturating(self) -> Expected:
        return self._as_choice().saturating()

    def _as_choice(self) -> OneOf:
        return OneOf((self.codes,), self.unspecified, self.any_nan, self.reason)


@dataclass(frozen=True)
class OneOf(Expected):
    """Bit for bit one of several codes, element by element; candidates all have one shape.

    saturates: the largest number counts as infinite and anything as NaN, see `saturating`.
    """

    candidates: tuple[Array, ...]
    unspecified: Array | None = None
    any_nan: bool = True
    reason: str = "numeric"
    saturates: bool = False

    def __post_init__(self) -> None:
        if not self.candidates:
            msg = "at least one candidate is needed"
            raise ValueError(msg)
        object.__setattr__(self, "unspecified", _mask(self.unspecified, self.shape))

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return np.shape(self.candidates[0])

    def judge(self, codes: Array, fmt: str) -> Judgement:
        codes = _checked(codes, fmt, self.shape)
        candidates = [_checked(c, fmt, self.shape) for c in self.candidates]
        got = codec.bits(codes)
        good = np.asarray(got == codec.bits(candidates[0]))
        for c in candidates[1:]:
            good |= got == codec.bits(c)
        if self.unspecified is not None:
            good |= self.unspecified
        if self.any_nan and not good.all():
            nan = codec.is_nan(codes, fmt)
            for c in candidates:
                good |= nan & codec.is_nan(c, fmt)
        if self.saturates and not good.all():
            good |= self._saturated(codes, candidates, fmt)
        bad, shown = np.asarray(~good), codec.decode(candidates[0], fmt)
        reason = self.reason
        if reason == "numeric" and bad.any():
            reason = _reason(bad, ~(np.isfinite(shown) & np.isfinite(codec.decode(codes, fmt))))
        return Judgement(bad, shown, None, reason)

    def saturating(self) -> OneOf:
        return replace(self, saturates=self.any_nan)

    def _saturated(self, codes: Array, candidates: list[Array], fmt: str) -> Array:
        """Where NaN was right, and the largest number where the infinity of its sign was."""
        got, ok = codec.decode(codes, fmt), np.zeros(self.shape, bool)
        for real in (codec.decode(c, fmt) for c in candidates):
            at_end = np.isinf(real)
            if at_end.any():
                ok |= at_end & (got == np.copysign(codec.max_finite(fmt), real))
            ok |= np.isnan(real)
        return ok


@dataclass(frozen=True)
class Joint(Expected):
    """Outputs that constrain each other (top-k, codes with scales, permutations).

    check({output: codes}) -> {output: Judgement}. `shapes` names each output's shape.
    """

    shapes: Mapping[str, tuple[int, ...]]
    check: Callable[[Mapping[str, Array]], Mapping[str, Judgement]]

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def judge_all(self, codes: Mapping[str, Array]) -> dict[str, Judgement]:
        """`check`, and that it spoke of every output in its shape; raises ValueError where it did not."""
        got = {name: np.asarray(codes[name]) for name in self.shapes}
        for name, shape in self.shapes.items():
            if got[name].shape != tuple(shape):
                msg = f"{name}: expected shape {tuple(shape)}, got {got[name].shape}"
                raise ValueError(msg)
        verdicts = dict(self.check(got))
        judged = {name: np.shape(v.bad) for name, v in verdicts.items()}
        if judged != {name: tuple(shape) for name, shape in self.shapes.items()}:
            msg = f"the check judged {judged}, not {dict(self.shapes)}"
            raise ValueError(msg)
        return verdicts


Oracle = Callable[[Problem, Inputs, Mapping[str, Any]], Mapping[Any, Expected]]
