"""What a case is, in words, with the first problems drawn for it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from conformance.catalogue.load import functions, required_checks
from conformance.collect import UsageError, all_cases, cases_at, find_case
from conformance.engine.checks import CHECKS
from conformance.engine.draw import digest, explicit, first_chunk
from conformance.engine.example import build
from conformance.engine.misuse import misuse_of, problem_of
from conformance.engine.relations import drawn_case, relation_of
from conformance.identity import unknown
from conformance.model import Case, Op, Problem, Size
from conformance.protocol import FORMATS, Arg, Description, DTypeArg, TensorArg, TupleArg, ValueArg

PACKED = {f.name for f in FORMATS.values() if f.per_item > 1}
"""formats that their storage dtype does not tell"""


def describe_case(case_id: str, seed: int, problems: int, level: str = "full",
                  description: Description | None = None) -> str:
    """A page about one case; of an op or a prefix, about the first case of it. Raises UsageError for an unknown one.

    Level bringup draws nothing: its problems stand at the tiles of `description`.
    """
    bringup = {c.id: c for c in cases_at(level, (), description)} if level == "bringup" else {}
    name = _first_of(case_id, tuple(bringup))
    if bringup and name not in bringup:
        raise UsageError(unknown("case of level bringup", case_id, bringup, limit=5))
    case = bringup.get(name) or find_case(name)
    op = case.op
    lines = [case.id, f"  {op.doc}", f"  check {case.check}: {CHECKS[case.check].doc}"]
    signature = next((f.signature for f in functions(op.module) if f.name == op.name), "")
    lines.append(f"  call: {signature}")
    lines += [f"  size {name}: {_size(size)}" for name, size in op.sizes.items()]
    lines.append(f"  data: {', '.join(op.families)}")
    others = [f"{c}: {why}" for c, why in required_checks(op.name).items() if why is not True]
    lines += [f"  does not apply: {text}" for text in others]
    if case.check == "rejects":
        m = misuse_of(op, case.variant["misuse"])
        lines += [f"  misuse ({m.kind}): {m.doc}; must raise one of {', '.join(m.raises)}" if m.raises else
                  f"  misuse ({m.kind}): {m.doc}", json.dumps(problem_of(case, seed).to_json())]
        return "\n".join(lines)
    relation = relation_of(case)
    if relation:
        lines.append(f"  relation: {relation.doc}")
    drawn, sha256 = _problems(case, seed, drawn=not bringup)
    lines.append(f"  draws_sha256 {sha256} (seed {seed})")
    lines += ["  the first problem, as it is called:", *_calls(op, drawn[0])]
    for p in drawn[:problems]:
        lines.append(json.dumps({k: v for k, v in p.to_json().items() if k not in ("op", "variant")}))
    return "\n".join(lines)


def _problems(case: Case, seed: int, *, drawn: bool) -> tuple[list[Problem], str]:
    if drawn:
        return first_chunk(drawn_case(case), seed)
    problems = explicit(drawn_case(case), seed)
    return problems, digest(problems)


def _first_of(query: str, ids: tuple[str, ...] = ()) -> str:
    start = query.rstrip("*").removesuffix("...")
    ids = ids or tuple(c.id for c in all_cases())
    if query in ids:
        return query
    usual = (i for begin in (f"{start}/values", start) for i in ids if start and i.startswith(begin))
    return next(usual, query)


def _calls(op: Op, problem: Problem) -> Iterator[str]:
    """Each call of the first rank: arguments with dtype, shape and strides in elements, and what comes back."""
    example = build(op, problem, {})
    for name in sorted({s.name for s in op.settings if s.when(problem.variant)}):
        yield f"    under the setting {name} = {problem.values.get(name, 'a constant of the case')}"
    for step in example.plans[0].steps:
        yield f"    {step.call.op}("
        for name, arg in step.call.args.items():
            yield f"      {name} = {_argument(arg)}{', written' if name in step.outs else ''}"
        results = [f"{e.leaf.name}: " + (f"{_dtype(FORMATS[e.format].storage, e.format)} {list(e.shape)}"
                                         if e.kind == "array" else e.kind) for e in step.expects]
        yield f"    ) -> {'; '.join(results) or 'None'}"


def _dtype(storage: str, fmt: str) -> str:
    return f"{storage} (holds {fmt})" if fmt in PACKED else storage


def _argument(arg: Arg) -> str:
    if isinstance(arg, TensorArg):
        s = arg.spec
        return f"{_dtype(s.dtype, s.format)} {list(s.shape)}, strides {list(s.strides)}"
    if isinstance(arg, TupleArg):
        return "(" + ", ".join(map(_argument, arg.items)) + ")"
    if isinstance(arg, ValueArg):
        return repr(arg.value)
    return f"dtype {arg.name}" if isinstance(arg, DTypeArg) else f"what an earlier call returned as {arg.name}"


def _size(size: Size) -> str:
    points = ", ".join(map(str, size.points))
    if size.step == 0:
        return f"one of {points}"
    text = f"{size.lo} to {size.hi}" + (f" in steps of {size.step}" if size.step > 1 else "")
    empty, ranks = ", or empty" if size.zero else "", ", each rank its own" if size.per_rank else ""
    return f"{text}, with {points}{empty}{ranks}"
