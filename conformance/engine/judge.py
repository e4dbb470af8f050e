"""From what was seen to findings: every element against what the oracle expects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.engine.example import POOL_POISON, Example, pattern
from conformance.engine.executor import DEBUG_FILL
from conformance.model import Out
from conformance.results import LARGEST_RATIO
from references.expected import Expected, Joint, Judgement
from references.formats import codec

MEMORY_REASONS = frozenset({"unwritten", "oob_write", "input_mutated", "late_write", "alias"})
STRUCTURE_REASONS = frozenset({"contract", "dtype", "shape", "layout"})


@dataclass
class Finding:
    """One thing that is wrong."""

    status: str
    phase: str
    reason: str | None
    message: str
    output: str = ""
    judgement: Judgement | None = None
    observed: np.ndarray | None = None
    format: str = ""
    outside: bool = False
    """a death that the process may have had no part in"""
    by_chance: bool = False
    """a statistic, which rejects a correct kernel once in a while: it counts when other data show it again"""
    example: int = -1
    """which of the attempt's examples it is about, where it is about one"""

    @property
    def bug(self) -> tuple[str, str | None]:
        """What a shrink must keep."""
        return self.status, self.reason


@dataclass
class Seen:
    """What was observed of one run, and what is wrong with it."""

    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    numerics: dict[str, dict[str, Any]] = field(default_factory=dict)
    elements: int = 0
    pool_watched: bool = True
    callee_allocates: bool = False
    late: bool = False

    def fail(self, reason: str, message: str, phase: str = "compare", **kw: Any) -> None:
        self.findings.append(Finding("fail", phase, reason, message, **kw))


def compare(example: Example, seen: Seen, expected: Mapping[Any, Expected], profile: Mapping[str, Any]) -> None:
    """Judge every element of every output; adds findings and figures to what was seen.

    Raises ValueError where the oracle is silent about an output: nothing passes unjudged.
    """
    spoken = {n for key, want in expected.items() for n in (want.outputs if isinstance(want, Joint) else (key,))}
    same = {e.same_as: e.key for plan in example.plans for s in plan.steps for e in s.expects if e.same_as}
    silent = [n for n in seen.outputs if n not in spoken and same.get(n) not in spoken]
    if silent:
        msg = f"the oracle says nothing about {', '.join(silent)}"
        raise ValueError(msg)
    for key, want in expected.items():
        names = want.outputs if isinstance(want, Joint) else (key,)
        missing = [n for n in names if n not in seen.outputs]
        if missing:
            if not seen.findings:
                seen.fail("missing_output", f"{', '.join(missing)} did not come back")
            continue
        if isinstance(want, Joint):
            judged = want.judge_all({n: seen.outputs[n] for n in names})
        else:
            judged = {key: _judge_one(want, seen.outputs[key], seen.formats[key])}
        for name, j in judged.items():
            _note(example, seen, name, j, getattr(want, "unspecified", None))


def rejected_share(expected: Mapping[Any, Expected], other: Seen) -> float:
    """The share of elements of another run's results that these expectations would reject.

    0 means that the other results, of other data, would have passed too: nothing was tested.
    """
    bad = total = 0
    for key, want in expected.items():
        names = want.outputs if isinstance(want, Joint) else (key,)
        if any(n not in other.outputs for n in names):
            return 1.0
        try:
            judged = want.judge_all({n: other.outputs[n] for n in names}) if isinstance(want, Joint) else {
                key: _judge_one(want, other.outputs[key], other.formats[key])}
        except (TypeError, ValueError):
            return 1.0  # of another shape or dtype: it would have failed
        bad += sum(int(np.sum(j.bad)) + bool(j.note) for j in judged.values())
        total += sum(int(j.bad.size) for j in judged.values())
    return min(1.0, bad / total) if total else 0.0


def _judge_one(want: Expected, codes: np.ndarray, fmt: str) -> Judgement:
    if codes.shape != tuple(want.shape):
        msg = f"the oracle expects shape {tuple(want.shape)}, the declaration {codes.shape}"
        raise ValueError(msg)
    return want.judge(codes, fmt)


def _note(example: Example, seen: Seen, name: str, j: Judgement, unspecified: np.ndarray | None) -> None:
    codes, fmt = seen.outputs[name], seen.formats[name]
    free = 0 if unspecified is None else int(np.sum(unspecified))
    seen.elements += int(j.bad.size) - free
    figures: dict[str, Any] = {"elements": int(j.bad.size) - free}
    if j.ratio is not None and j.ratio.size:
        worst = float(np.max(np.nan_to_num(j.ratio, nan=np.inf)))
        figures["worst_ratio"] = min(worst, LARGEST_RATIO)
    figures |= j.figures or {}
    seen.numerics[name] = figures
    if j.ok:
        return
    reason = j.reason
    bad = np.asarray(j.bad)
    content = reason in ("numeric", "nonfinite", "index_range", "order", "token_duplicated", "token_lost")
    if content and bad.any() and bool(np.all(_is_poison(example, name, codes, fmt)[bad])):
        reason = "unwritten"
    index = worst_index(j)
    figures |= {"wrong": int(bad.sum()), "index": list(index)}
    if index or bad.shape == ():
        figures["observed"] = shown(codec.decode(codes, fmt)[index])
        if j.expected is not None and j.expected.shape == bad.shape:
            figures["expected"] = shown(j.expected[index])
    seen.fail(reason, sentence(name, j, codes, fmt, figures), output=name, judgement=j, observed=codes, format=fmt,
              by_chance=j.by_chance)


def _is_poison(example: Example, name: str, codes: np.ndarray, fmt: str) -> np.ndarray:
    got = codec.bits(codes)
    if any(name == a.key and a.reads and a.written for plan in example.plans for a in plan.arrays.values()):
        # In place: what nobody wrote is what stood there before.
        return got == codec.bits(example.codes[name])
    declared = any(name == a.key and isinstance(a.arg, Out) for plan in example.plans for a in plan.arrays.values())
    same = any(e.key == name and e.same_as for plan in example.plans for s in plan.steps for e in s.expects)
    if declared or same:
        poisons = [pattern(fmt, out=True, judged=example.judged) & ((1 << got.dtype.itemsize * 8) - 1)]
    else:
        poisons = [int.from_bytes(bytes([b]) * got.dtype.itemsize, "little")
                   for b in (POOL_POISON[example.judged], DEBUG_FILL)]
    return np.isin(got, np.array(poisons, got.dtype))


def worst_index(j: Judgement) -> tuple[int, ...]:
    """The element that is furthest off; the first wrong one where distance means nothing."""
    bad = np.asarray(j.bad)
    if not bad.any():
        return ()
    score = bad.astype(float)
    if j.ratio is not None:
        score = np.where(bad, np.nan_to_num(np.asarray(j.ratio, float), nan=np.inf, posinf=1e300) + 1.0, 0.0)
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(score)), bad.shape))


def shown(value: Any) -> Any:
    """A JSON number, with NaN and infinities as words."""
    v = value.item() if hasattr(value, "item") else value
    return str(v) if isinstance(v, float) and (v != v or v in (np.inf, -np.inf)) else v


def sentence(name: str, j: Judgement, codes: np.ndarray, fmt: str, figures: Mapping[str, Any]) -> str:
    parts = []
    if j.note:
        parts.append(j.note)
    if "observed" in figures:
        at = "[" + ", ".join(map(str, figures["index"])) + "]" if figures["index"] else ""
        text = f"{name}{at} is {figures['observed']}"
        if "expected" in figures:
            text += f", expected {figures['expected']}"
            if figures["observed"] == figures["expected"] == "nan":
                code = int(codec.bits(codes)[tuple(figures["index"])])
                text += f" of another bit pattern than {code:#x}"
        ratio = figures.get("worst_ratio")
        if ratio and j.ratio is not None:
            text += " (no error is allowed here)" if ratio >= LARGEST_RATIO else f" (error {ratio:.3g} times its bound)"
        parts.append(text)
        parts.append(f"{figures['wrong']} of {figures['elements']} elements are wrong")
    return "; ".join(parts) or f"{name} is wrong"
