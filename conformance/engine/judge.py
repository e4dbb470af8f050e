"""From what came back to findings: structure, memory, then every element."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.engine.example import POOL_POISON, Example, fetched, out_codes, pattern
from conformance.engine.executor import DEBUG_FILL, Outcome
from conformance.engine.layout import ArrayPlan, Expectation, np_view
from conformance.model import Out
from conformance.protocol import FORMATS, contiguous_strides
from conformance.results import LARGEST_RATIO
from references.expected import Expected, Joint, Judgement
from references.formats import codec

_SCALARS: dict[str, Any] = {"int": (np.int64, "int64"), "bool": (np.bool_, "bool"), "float": (np.float64, "fp64")}
MEMORY_REASONS = frozenset({"unwritten", "oob_write", "input_mutated", "late_write", "alias"})
HEAP_DAMAGE = re.compile(
    r"(free|realloc|malloc|calloc|munmap_chunk|mremap_chunk|malloc_consolidate|unlink_chunk)\(\): (?!double free)[^\n]*"
    r"|corrupted (size vs\. prev_size|double-linked list)[^\n]*|double free or corruption \((!prev|out|top)\)"
    r"|malloc_check_get_size: memory corruption|malloc: top chunk is corrupt|invalid fastbin entry \(free\)"
    r"|break adjusted to free malloc space")
"""What glibc prints before it aborts over a damaged heap; a block that is freed twice is told apart from that."""
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


def ended_badly(outcome: Outcome) -> Finding | None:
    """The finding of a run that gave no full answer."""
    if outcome.timed_out:
        return Finding("timeout", _phase_in(outcome.timed_out), None, outcome.timed_out)
    if outcome.death:
        d = outcome.death
        reason = "exit" if d.cut or not (d.signal or d.status is None) else "signal"
        tail = f"\n{d.stderr[-1500:]}" if d.stderr else ""
        who = f"rank {d.rank}: " if len(outcome.answers) > 1 else ""
        phase = d.phase if d.phase != "idle" else "teardown"
        if d.oom_killed:
            return Finding("oom", phase, None, f"{who}the kernel's out-of-memory killer ended the process in phase "
                           f"{phase}: the host's memory, or that of this control group, is too small")
        heap = HEAP_DAMAGE.search(d.stderr) if d.signal == signal.SIGABRT else None
        if heap:
            return Finding("fail", phase, "oob_write", f"{who}the call wrote outside a block of memory: the allocator "
                           f"ended the process with {heap[0]!r} in phase {phase}")
        return Finding("crash", phase, reason, who + d.sentence() + tail, outside=d.from_outside)
    for rank, a in sorted(enumerate(outcome.answers), key=lambda r: r[0] != outcome.first):
        if a is None or "steps" in a:
            continue
        who = f"rank {rank}: " if len(outcome.answers) > 1 else ""
        phase = a["phase"]
        if "oom" in a:
            return Finding("oom", phase, None, who + a["oom"])
        if "lost" in a:
            return Finding("crash", phase, "signal", who + f"the device is lost: {a['lost']}")
        if "unusable" in a:
            return Finding("error", phase, None, who + a["unusable"])
        if "damaged" in a:
            return Finding("fail", phase, "oob_write", f"{who}the call wrote outside a block of memory: {a['damaged']}")
        if "unreadable" in a:
            return Finding("fail", phase, "contract", who + a["unreadable"])
        if "unrepresentable" in a:
            return Finding("unsupported", phase, None, who + a["unrepresentable"])
        e = a["exception"]
        where = f" at {e['where'][-1]}" if e["where"] else ""
        return Finding("fail", phase, "exception", f"{who}a legal call raised {e['type']}: {e['message']}{where}")
    return None


def _phase_in(text: str) -> str:
    found = [p for p in ("prepare", "compile", "enqueue", "execute", "compare", "teardown") if f"phase {p}" in text]
    return found[0] if found else "execute"


def observe(example: Example, outcome: Outcome) -> Seen:
    """Read a full answer: results by name, and everything that is wrong with form and memory."""
    seen = Seen()
    for rank, answer in enumerate(outcome.answers):
        assert answer is not None
        example.arenas[rank].reserve(answer["arena_bytes"])
        plan = example.plans[rank]
        for step_plan, step in zip(plan.steps, answer["steps"], strict=True):
            if "refused" in step or "skipped" in step:
                continue
            if step["structure"] != step_plan.structure and not _same_structure(step["structure"], step_plan.structure):
                seen.fail("contract", f"{step_plan.call.op} returned {_words(step['structure'])}; its contract says "
                          f"{_words(step_plan.structure)}")
                continue
            for expect, leaf in zip(step_plan.expects, step["leaves"], strict=False):
                try:
                    _read_leaf(example, rank, expect, leaf, seen)
                except Exception as e:
                    seen.fail("contract", f"{expect.key}: what was returned can't be read: {type(e).__name__}: {e}")
        for a in plan.arrays.values():
            if a.written:
                seen.outputs[a.key], seen.formats[a.key] = out_codes(example, rank, a), a.format
        _check_buffers(example, rank, seen)
        seen.pool_watched &= answer["pool_watched"]
        seen.late |= bool(answer.get("late"))
        if answer.get("settings_leak"):
            seen.fail("settings_leak", f"the call left other settings behind: {', '.join(answer['settings_leak'])}")
        if answer["held_changed"]:
            seen.fail("alias", "this call altered the result of the call before, which its caller still holds")
    return seen


def _same_structure(got: Any, declared: Any) -> bool:
    """Kinds are compared leaf by leaf later on; here the nesting counts, and None where None is due."""
    if isinstance(got, list) != isinstance(declared, list):
        return False
    if isinstance(got, list):
        return len(got) == len(declared) and all(_same_structure(g, d) for g, d in zip(got, declared, strict=True))
    return (got == "none") == (declared == "none")


def _words(structure: Any) -> str:
    names = {"none": "None", "argument": "tensor", "array": "tensor", "token": "object"}
    if isinstance(structure, list):
        return "(" + ", ".join(map(_words, structure)) + ")"
    return names.get(structure, structure)


def _read_leaf(example: Example, rank: int, expect: Expectation, leaf: Mapping[str, Any], seen: Seen) -> None:
    kind = leaf["kind"]
    if expect.kind == "none":
        return
    if expect.kind == "token":
        _read_token(expect, leaf, seen)
        return
    if expect.kind in ("int", "float", "bool", "str"):
        if kind != expect.kind:
            seen.fail("contract", f"{expect.key} is a {kind}; its contract says a Python {expect.kind}")
            return
        seen.scalars[expect.key] = leaf["value"]
        if expect.kind != "str":
            dtype, fmt = _SCALARS[expect.kind]
            seen.outputs[expect.key], seen.formats[expect.key] = np.array(leaf["value"], dtype), fmt
        return
    if expect.kind == "argument":
        _read_argument(example, rank, expect, leaf, seen)
        return
    if kind == "argument":
        seen.fail("alias", f"{expect.key} is the memory of an argument; its contract says a tensor of its own")
        return
    if kind != "tensor":
        seen.fail("contract", f"{expect.key} is a {kind}; its contract says a tensor")
        return
    seen.callee_allocates = True
    codes = _read_tensor(example, rank, expect, leaf, seen)
    if codes is not None:
        seen.outputs[expect.key], seen.formats[expect.key] = codes, expect.format


def _read_token(expect: Expectation, leaf: Mapping[str, Any], seen: Seen) -> None:
    """An object, or with a format a tensor of that dtype whose shape and contents are the callee's own affair."""
    due = "tensor" if expect.format else "token"
    if leaf["kind"] != due:
        seen.fail("contract", f"{expect.key} is a {leaf['kind']}; its contract says {_words(due)}")
    elif expect.format and leaf["dtype"] != (storage := FORMATS[expect.format].storage):
        seen.fail("dtype", f"{expect.key} has dtype {leaf['dtype']}; its contract says {storage}")


def _read_argument(example: Example, rank: int, expect: Expectation, leaf: Mapping[str, Any], seen: Seen) -> None:
    a = example.plans[rank].arrays[expect.same_as]
    if leaf["kind"] != "argument" or (leaf["buffer"], leaf["offset_bytes"]) != (a.buffer, a.offset_bytes):
        seen.fail("alias", f"{expect.key} is not the tensor that was passed as {a.arg.name}")
        return
    seen.outputs[expect.key], seen.formats[expect.key] = out_codes(example, rank, a), expect.format


def _read_tensor(example: Example, rank: int, expect: Expectation, leaf: Mapping[str, Any], seen: Seen) -> Any:
    f = FORMATS[expect.format]
    shape = expect.shape
    if f.per_item > 1 and shape:
        shape = (*shape[:-1], -(-shape[-1] // f.per_item))
    if leaf["dtype"] != f.storage:
        seen.fail("dtype", f"{expect.key} has dtype {leaf['dtype']}; its contract says {f.storage}")
        return None
    if tuple(leaf["shape"]) != shape:
        seen.fail("shape", f"{expect.key} has shape {tuple(leaf['shape'])}; its contract says {shape}")
        return None
    strides, item = leaf["strides"], f.itemsize_bytes
    if expect.align_bytes and len(shape) > 1 and 0 not in shape:
        fast = expect.major % len(shape)
        slow = 2 * len(shape) - 3 - fast
        apart = strides[fast] != 1 and shape[fast] > 1
        if shape[slow] > 1 and (apart or strides[slow] * item % expect.align_bytes):
            seen.fail("layout", f"{expect.key} has strides {strides}; its contract says elements along axis {fast} "
                      f"side by side, in lines that start at multiples of {expect.align_bytes} bytes")
            return None
    arena = example.arenas[rank]
    if 0 in shape:
        return np.zeros(expect.shape, f.codes)
    dtype = np.dtype(np.uint16 if f.storage == "bfloat16" else np.uint8 if "float8" in f.storage else f.storage)
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if min(strides, default=0) < 0 or leaf["offset_bytes"] + (reach + 1) * item > leaf["nbytes"]:
        seen.fail("contract", f"{expect.key} reaches outside its own storage")
        return None
    flat = np.frombuffer(arena.view, dtype, reach + 1, leaf["at"] + leaf["offset_bytes"])
    view = np.lib.stride_tricks.as_strided(flat, shape, tuple(s * item for s in strides))
    return fetched(view.copy(), expect.format, expect.shape)


def _check_buffers(example: Example, rank: int, seen: Seen) -> None:
    plan = example.plans[rank]
    for index, b in enumerate(plan.buffers):
        before, after = example.before[rank][index], example.after[rank][index]
        arrays = [a for a in plan.arrays.values() if a.buffer == index]
        if b.role == "in":
            if not np.array_equal(before, after):
                _report_change(before, after, arrays, seen, inside="input_mutated")
            continue
        changed = _outside(before, after, arrays)
        if changed is not None:
            _report_change(before, after, arrays, seen, inside="", first=changed)
        for a in arrays:
            _check_kept(example, rank, a, seen)


def _check_kept(example: Example, rank: int, a: ArrayPlan, seen: Seen) -> None:
    """Elements inside an output that its contract leaves as they were."""
    if not isinstance(a.arg, Out) or a.arg.kept is None or FORMATS[a.format].per_item > 1:
        return
    before, after = (codec.bits(np.ascontiguousarray(np_view(images[rank][a.buffer], a)))
                     for images in (example.before, example.after))
    hit = np.argwhere(a.arg.kept(example.problem, example.inputs) & (before != after))
    if len(hit):
        seen.fail("oob_write", f"the call wrote {a.key}{hit[0].tolist()}, which its contract leaves as it was; "
                  f"{len(hit)} such elements in all", phase="execute", output=a.key)


def _outside(before: np.ndarray, after: np.ndarray, arrays: list[ArrayPlan]) -> int | None:
    """The first byte that changed and belongs to no element, or None."""
    contiguous = len(arrays) and all(a.spec.strides == contiguous_strides(a.spec.shape) for a in arrays)
    if contiguous:
        lo = min(a.offset_bytes for a in arrays)
        hi = max(a.offset_bytes + a.spec.span_bytes() for a in arrays)
        if np.array_equal(before[:lo], after[:lo]) and np.array_equal(before[hi:], after[hi:]):
            return None
    differs = before != after
    for a in arrays:
        marks = np_view_bytes(differs, a)
        marks[...] = False
    hit = np.flatnonzero(differs)
    return int(hit[0]) if len(hit) else None


def np_view_bytes(image: np.ndarray, a: ArrayPlan) -> np.ndarray:
    """The bytes of an array's elements, one axis more."""
    item = a.spec.itemsize_bytes
    flat = image.view(np.uint8)[a.offset_bytes : a.offset_bytes + a.spec.span_bytes()]
    shape = (*a.spec.shape, item)
    strides = (*(s * item for s in a.spec.strides), 1)
    return np.lib.stride_tricks.as_strided(flat.view(image.dtype), shape, strides)


def _report_change(before: np.ndarray, after: np.ndarray, arrays: list[ArrayPlan], seen: Seen, *, inside: str,
                   first: int | None = None) -> None:
    name = arrays[0].key if arrays else "a buffer"
    if first is None:
        first = _outside(before, after, arrays)
    if first is None:
        a = arrays[0]
        where = np.argwhere(codec.bits(np_view(before, a)) != codec.bits(np_view(after, a)))
        at = f" {a.key}{where[0].tolist()}" if len(where) else ""
        seen.fail(inside, f"the call changed its input{at}, {len(where)} elements in all", phase="execute", output=name)
        return
    lo = min((a.offset_bytes for a in arrays), default=0)
    hi = max((a.offset_bytes + a.spec.span_bytes() for a in arrays), default=0)
    if first < lo:
        where = f"{lo - first} bytes in front of {name}"
    elif first >= hi:
        where = f"{first - hi + 1} bytes behind {name}"
    else:
        row = max(arrays[0].row_bytes, 1)
        where = f"between the rows of {name}, behind row {(first - lo) // row}"
    seen.fail("oob_write", f"the call wrote {where}", phase="execute", output=name)


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
        ratio = figures.get("worst_ratio")
        if ratio and j.ratio is not None:
            text += " (no error is allowed here)" if ratio >= LARGEST_RATIO else f" (error {ratio:.3g} times its bound)"
        parts.append(text)
        parts.append(f"{figures['wrong']} of {figures['elements']} elements are wrong")
    return "; ".join(parts) or f"{name} is wrong"
