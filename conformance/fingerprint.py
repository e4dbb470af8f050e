"""`conformance fingerprint`: how a backend keeps its sums, read from results, and whether its profile says so.

Probes (`references.probes`) go through the executor as explicit problems with given operands: the product, its last
rows backwards, the product again, and one row alone. What the profile declares stronger than what was measured fails;
what it declares weaker is told. The oracle's verdict on these problems is left to the checks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from conformance import backends
from conformance.bench import bench_of
from conformance.collect import ops
from conformance.engine.arrays import encode
from conformance.engine.attempt import Attempt, Attempts, Bench, Clock
from conformance.engine.devices import DeviceGone, TooFewDevices
from conformance.engine.draw import values_of
from conformance.engine.example import Example
from conformance.engine.executor import BackendBroken
from conformance.engine.layout import row_bytes_of
from conformance.engine.leases import LeaseError
from conformance.engine.limits import problem_limit, support_of, variant_limit
from conformance.engine.variants import all_variants
from conformance.model import Op, Problem, Variant
from conformance.options import backend_options
from conformance.results import EXIT_CONFORMING, EXIT_INCONCLUSIVE, EXIT_NONCONFORMING, Record
from references.bounds.profile import PROFILE, resolve
from references.formats import codec
from references.probes import Card, K, M, N, Probes, probes, read

OPS = {"deepgemm.bf16_gemm_nt": "bf16", "deepgemm.fp8_gemm_nt": "e4m3"}
"""op to the format of its operands"""
CALL_S = 300.0
"""what a call may take: simulators are slow"""
BACKWARDS, ALONE = range(M - 1, M - 41, -1), range(M - 1, M)
"""rows of the other batches: those whose sums are all rounding error, with some others, and one of these"""
NUMERIC = ("numeric", "nonfinite")
"""findings that are the profile's affair here"""

STRENGTH = {"fp8_tc14_promoted": 1, "fp32": 2, "tc_rz_fp32": 2, "ieee_rn_fp32": 3, "fp64": 4, "int32": 5}
"""of accumulators: each does what those before it do"""
FP32_BITS, FP64_BITS = 23, 29
"""least numbers of bits (`Card.mid`) of these accumulators; a unit may keep a few more than FP32's"""
SIGNIFICANT_BITS = {"fp32": 24, "fp16": 11, "bf16": 8}
LOSES = {"keep": frozenset(), "flush_in": frozenset({"in"}), "flush_out": frozenset({"out"}),
         "flush": frozenset({"in", "out"})}
"""profile value of `subnormals` to what may count as zero"""

SAME, WEAKER, STRONGER, DIFFERS, UNTOLD = "as declared", "declared weaker", "DECLARED STRONGER", "DIFFERS", "not told"
FAILS = (STRONGER, DIFFERS)


@dataclass
class Measured:
    """What the probes gave of one op; without a card `why` says why not."""

    op: str
    card: Card | None = None
    deterministic: bool = True
    rows_alone: bool | None = None
    """whether a row has the same bits in another place and batch; None where no other batch is legal"""
    promised: tuple[bool, bool] = (True, True)
    """whether the op promises these two"""
    supported: bool = True
    form: str = ""
    """of the product: variant and recipe"""
    why: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One key of the profile, or one promise of an op: what is said and what was seen."""

    key: str
    declared: str
    measured: str
    verdict: str


def measure(bench: Bench, op: Op) -> Measured:
    """Run the probes of an op's format on a backend. Raises nothing that the backend is to blame for."""
    out = Measured(op.name)
    support = support_of(bench.description, op.name)
    if not support.supported:
        out.supported, out.why = False, support.reason or "the backend does not have it"
        return out
    problem, limit = _problem(bench, op)
    if problem is None:
        out.supported, out.why = False, f"no form of the probes is within the backend's limits: {limit}"
        return out
    form = {**dict(problem.variant), "recipe": problem.values.get("recipe")}
    out.form = ",".join(f"{k}={v}" for k, v in form.items())
    attempts = Attempts(bench, op, Clock())
    try:
        try:
            attempts.lease_devices(Record(op.name, op.module, op.name, {}, "fingerprint", "", "error"))
            p = probes(OPS[op.name])
            _read_runs(out, bench, op, p, attempts.run(problem, plan=lambda a, q: _examples(a, q, p)))
        finally:
            attempts.close()
    except (BackendBroken, DeviceGone, TooFewDevices, LeaseError) as e:
        out.card, out.why = None, str(e).strip().partition("\n")[0]
    return out


def _problem(bench: Bench, op: Op) -> tuple[Problem | None, str]:
    """The probes' problem in the first form that the backend takes, BF16 results before FP32; or why there is none."""
    said: dict[str, None] = {}
    plain = [v for v in all_variants(op) if v.c == "none"]
    for variant in sorted(plain, key=lambda v: v.out != "bf16"):
        choices = dict(values_of(op, variant))
        usual = {name: c[0] for name, c in choices.items()}
        for recipe in choices.get("recipe", (None,)):
            values = usual | ({"recipe": recipe} if "recipe" in choices else {})
            problem = Problem(op.name, variant, {"m": M, "n": N, "k": K}, values, op.families[0], 0)
            limit = _limit(bench, op, problem)
            if not limit:
                return problem, ""
            said[limit] = None
    return None, "; ".join(said)


def _limit(bench: Bench, op: Op, problem: Problem) -> str:
    support = support_of(bench.description, op.name)
    return variant_limit(support, problem.variant) or problem_limit(
        support, problem, row_bytes_of(op, problem, bench.description.requirements))


def _examples(attempts: Attempts, problem: Problem, p: Probes) -> list[Example]:
    """The product, other batches of its rows, and between these, where they are legal, the product again."""

    def example(rows: Sequence[int], judged: bool) -> Example:
        mine = replace(problem, sizes={**problem.sizes, "m": len(rows)})
        own = attempts.example(mine, judged=judged)
        chosen = list(rows)
        values = {"a": p.a[chosen], "b": p.b, "a_scale": p.scale[chosen, None], "b_scale": np.ones((1, 1))}
        codes = {name: encode(np.broadcast_to(values[name], drawn.shape), own.formats[name])
                 for name, drawn in own.codes.items()}
        return attempts.example(mine, judged=judged, codes=codes)

    def legal(rows: Sequence[int]) -> bool:
        return not _limit(attempts.bench, attempts.op, replace(problem, sizes={**problem.sizes, "m": len(rows)}))

    calls = [(range(M), False), (BACKWARDS, True), (range(M), True), (ALONE, True)]
    return [example(rows, judged) for rows, judged in calls if legal(rows)]


def _read_runs(out: Measured, bench: Bench, op: Op, p: Probes, attempt: Attempt) -> None:
    """Card, repeats and other batches from what came back."""
    out.notes = list(dict.fromkeys(
        f.message.partition("\n")[0] for f in attempt.findings if not (f.status == "fail" and f.reason in NUMERIC)))
    if len(attempt.seen) < len(attempt.examples) or not all("d" in s.outputs for s in attempt.seen):
        worst = attempt.worst
        out.why = worst.message.partition("\n")[0] if worst else "the calls gave no result"
        return
    bits = [codec.bits(s.outputs["d"]) for s in attempt.seen]
    with np.errstate(invalid="ignore"):
        out.card = read(p, codec.decode(attempt.seen[0].outputs["d"], attempt.seen[0].formats["d"]))
    first, second = (b for b in bits if len(b) == M)
    out.deterministic = bool(np.array_equal(first, second))
    others = [np.array_equal(b, second[list(rows)]) for b in bits for rows in (BACKWARDS, ALONE) if len(b) == len(rows)]
    out.rows_alone = all(others) if others else None
    repeatable = op.repeatable
    variant: Variant = attempt.problem.variant
    out.promised = (repeatable(variant) if callable(repeatable) else repeatable,
                    any(r.name == "batch_invariant_m" and r.when(variant) for r in op.promises))


def accumulator_of(card: Card) -> tuple[int, str]:
    """(strength, name) of the accumulator that a card shows; strength 0 for one that no profile names."""
    if not min(card.mid, card.far):
        return 0, "wrong sums"
    if card.mid >= card.limit:
        return STRENGTH["int32"], f"no loss up to {card.limit} bits"
    if card.mid >= FP64_BITS:
        return STRENGTH["fp64"], "fp64"
    if card.mid >= FP32_BITS:
        name = "ieee_rn_fp32" if card.rounding == "nearest" else "tc_rz_fp32"
        return STRENGTH[name], name
    narrow = f"{card.mid + 1} significant bits"
    if card.far >= FP32_BITS:
        enough = card.format == "e4m3" and card.mid >= 13
        return (STRENGTH["fp8_tc14_promoted"], "fp8_tc14_promoted") if enough else (0, f"{narrow}, promoted")
    return 0, narrow


def profile_rows(profile: Mapping[str, Any], cards: Sequence[Card]) -> list[Row]:
    """Each key that the probes can tell, the weakest of all cards against what is declared."""
    declared = resolve(profile)
    strength, name = min((accumulator_of(c) for c in cards), key=lambda s: s[0])
    said = declared["accumulator"]
    verdict = _compared(STRENGTH[said], strength)
    if said == "fp8_tc14_promoted" and verdict == WEAKER and all(c.format != "e4m3" for c in cards):
        verdict = UNTOLD  # it is about FP8 alone
    rows = [Row("accumulator", said, name, verdict)]

    said = declared["partial"]
    wide = [c for c in cards if c.mid >= FP32_BITS]
    kept = min((min(c.far, c.near) + 1 for c in wide), default=0)
    name = next((n for n, bits in SIGNIFICANT_BITS.items() if kept == bits), f"{kept} significant bits")
    rows.append(Row("partial", said, "fp32" if kept >= SIGNIFICANT_BITS["fp32"] else name, _compared(
        SIGNIFICANT_BITS[said], min(kept, SIGNIFICANT_BITS["fp32"]))) if wide else Row("partial", said, "", UNTOLD))

    said = declared["subnormals"]
    lost = frozenset().union(*(c.lost for c in cards))
    name = next(n for n, what in LOSES.items() if what == lost)
    rows.append(Row("subnormals", said, name, SAME if lost == LOSES[said] else WEAKER if lost < LOSES[said]
                    else STRONGER))
    said = declared["overflow"]
    rules = {c.overflow for c in cards}
    name = rules.pop() if len(rules) == 1 else "mixed"
    rows.append(Row("overflow", said, name, SAME if name == said else DIFFERS))
    return rows


def _compared(declared: int, measured: int) -> str:
    return SAME if declared == measured else WEAKER if declared < measured else STRONGER


def promise_rows(m: Measured) -> list[Row]:
    """What an op promises of its results whatever the profile, as the probes saw it."""
    assert m.card is not None
    short = m.op.partition(".")[2]
    told = [("the same call, the same bits", m.promised[0], m.deterministic),
            ("a row's bits in any batch", m.promised[1], m.rows_alone)]
    if m.card.format != "bf16":
        told.append(("subnormal operands count", True, m.card.operands_kept))
    rows = [Row(f"{short}: {what}", "promised" if promised else "free", "" if seen is None else "yes" if seen else "no",
                UNTOLD if seen is None else SAME if seen == promised else STRONGER if promised else WEAKER)
            for what, promised, seen in told]
    return rows + [Row(f"{short}: {odd.partition(':')[0]}", "by a rule", odd.partition(":")[2].strip(), DIFFERS)
                   for odd in m.card.odd]


def _cells(m: Measured) -> list[str]:
    """A column of the card."""
    c = m.card
    if c is None:
        return ["-"] * len(CARD_ROWS)
    bits = [f"{n} (none lost)" if n >= c.limit else str(n) for n in (c.mid, c.far, c.near)]
    width = "not visible" if c.width is None or (c.width == 1 and c.rounding != "nearest") else str(c.width)
    if c.far > c.mid:
        width += ", then promoted"
    lost = [w for w, name in (("in", "operands"), ("out", "products and results")) if w in c.lost]
    kept = f"flushed: {' and '.join(lost)}" if lost else "kept"
    if not c.operands_kept:
        kept += ", FP8 operands lost"
    return [*bits, c.rounding.replace("_", " "), "not visible" if c.extra_bits is None else str(c.extra_bits), width,
            kept, c.overflow, "yes" if m.deterministic else "no",
            "not tried" if m.rows_alone is None else "yes" if m.rows_alone else "no"]


CARD_ROWS = ("bits kept, mid", "bits kept, far", "bits kept, near", "rounding", "extra alignment bits", "block width",
             "subnormals", "overflow", "same bits twice", "same bits in another batch")


def page(name: str, found: Sequence[Measured], rows: Sequence[Row]) -> str:
    """The card, the profile beside it, and one sentence."""
    cells = list(zip(CARD_ROWS, *(_cells(m) for m in found), strict=True))
    parts = [tabulate(cells, ("", *(m.op for m in found)), tablefmt="simple", disable_numparse=True)]
    if rows:
        parts.append(tabulate([(r.key, r.declared, r.measured, r.verdict) for r in rows],
                              ("profile", "declared", "measured", "verdict"), tablefmt="simple"))
        untold = [k for k in PROFILE if k not in {r.key for r in rows}]
        parts.append(f"not told by these ops: {', '.join(untold)}")
    for m in found:
        said = [m.why] if m.card is None else m.notes
        parts.extend(f"{m.op}: {text}" for text in said)
    bad = [r.key for r in rows if r.verdict in FAILS]
    if bad:
        parts.append(f"backend {name} does not do what it declares: {', '.join(bad)}")
    elif not rows:
        parts.append(f"backend {name}: no op gave a result that could be read")
    else:
        weak = [r.key for r in rows if r.verdict == WEAKER]
        parts.append(f"backend {name} does what it declares" + (f", and more: {', '.join(weak)}" if weak else ""))
    return "\n\n".join(parts)


def code_of(found: Sequence[Measured], rows: Sequence[Row]) -> int:
    """1 where something is declared that does not hold; 6 where no op is supported, or one that is gave no result, or
    its calls did something else that is wrong (a card of such calls proves little)."""
    if any(r.verdict in FAILS for r in rows):
        return EXIT_NONCONFORMING
    doubtful = any(m.supported and (m.card is None or m.notes) for m in found)
    return EXIT_INCONCLUSIVE if doubtful or not rows else EXIT_CONFORMING


def to_json(name: str, found: Sequence[Measured], rows: Sequence[Row]) -> dict[str, Any]:
    """Plain data of the card: `backend`, `ops` by name, `rows`."""
    made = {}
    for m in found:
        made[m.op] = {k: v for k, v in asdict(m).items() if k != "op"}
        if m.card is not None:
            made[m.op]["card"]["lost"] = sorted(m.card.lost)
    return {"backend": name, "ops": made, "rows": [asdict(r) for r in rows]}


def fingerprint(backend: str, options: dict[str, str]) -> tuple[list[Measured], list[Row]]:
    """Measure a backend. Raises BackendUnusable, UnknownBackend or LeaseError."""
    with bench_of(backend, options) as bench:
        bench.case_timeout_s = CALL_S
        found = [measure(bench, op) for op in ops(("deepgemm",)) if op.name in OPS]
        profile = bench.description.profile
    seen = [m for m in found if m.card is not None]
    rows = profile_rows(profile, [m.card for m in seen if m.card is not None]) if seen else []
    return found, rows + [r for m in seen for r in promise_rows(m)]


def main(argv: list[str]) -> int:
    """The command; returns its exit code."""
    p = argparse.ArgumentParser("conformance fingerprint")
    p.add_argument("--backend", required=True)
    p.add_argument("--backend-option", action="append", default=[])
    p.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the card there too")
    args = p.parse_args(argv)
    try:
        found, rows = fingerprint(args.backend, backend_options(args.backend_option))
    except (backends.BackendUnusable, LeaseError) as e:
        print(e)
        return EXIT_INCONCLUSIVE
    if args.json:
        args.json.write_text(json.dumps(to_json(args.backend, found, rows), indent=1) + "\n")
    print(page(args.backend, found, rows))
    return code_of(found, rows)
