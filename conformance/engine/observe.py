"""From what came back to what was seen: structure, memory, and the results by name."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.engine.example import Example, fetched, out_codes
from conformance.engine.executor import Outcome
from conformance.engine.judge import Finding, Seen
from conformance.engine.layout import ArrayPlan, Expectation, np_view
from conformance.model import Out
from conformance.protocol import FORMATS, contiguous_strides
from references.formats import codec

_SCALARS: dict[str, Any] = {"int": (np.int64, "int64"), "bool": (np.bool_, "bool"), "float": (np.float64, "fp64")}
HEAP_DAMAGE = re.compile(
    r"(free|realloc|malloc|calloc|munmap_chunk|mremap_chunk|malloc_consolidate|unlink_chunk)\(\): (?!double free)[^\n]*"
    r"|corrupted (size vs\. prev_size|double-linked list)[^\n]*|double free or corruption \((!prev|out|top)\)"
    r"|malloc_check_get_size: memory corruption|malloc: top chunk is corrupt|invalid fastbin entry \(free\)"
    r"|break adjusted to free malloc space")
"""What glibc prints before it aborts over a damaged heap; a block that is freed twice is told apart from that."""


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
