"""What a case is, in words, with the first problems drawn for it."""

from __future__ import annotations

import json

from conformance.catalogue.load import functions, required_checks
from conformance.collect import find_case
from conformance.engine.checks import CHECKS
from conformance.engine.draw import first_chunk
from conformance.engine.misuse import misuse_of, problem_of
from conformance.engine.relations import drawn_case, relation_of
from conformance.model import Size


def describe_case(case_id: str, seed: int, problems: int) -> str:
    """A page about one case. Raises UsageError for an unknown id."""
    case = find_case(case_id)
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
        lines += [f"  misuse ({m.kind}): {m.doc}", json.dumps(problem_of(case, seed).to_json())]
        return "\n".join(lines)
    relation = relation_of(case)
    if relation:
        lines.append(f"  relation: {relation.doc}")
    drawn, digest = first_chunk(drawn_case(case), seed)
    lines.append(f"  draws_sha256 {digest} (seed {seed})")
    for p in drawn[:problems]:
        lines.append(json.dumps({k: v for k, v in p.to_json().items() if k not in ("op", "variant")}))
    return "\n".join(lines)


def _size(size: Size) -> str:
    points = ", ".join(map(str, size.points))
    if size.step == 0:
        return f"one of {points}"
    text = f"{size.lo} to {size.hi}" + (f" in steps of {size.step}" if size.step > 1 else "")
    empty, ranks = ", or empty" if size.zero else "", ", each rank its own" if size.per_rank else ""
    return f"{text}, with {points}{empty}{ranks}"
