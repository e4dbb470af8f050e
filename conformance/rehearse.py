"""Rehearsal: the real adapters on host tensors, against stand-ins of the vendors' packages.

A few cases of each op run through the engine as in any run. Beside their verdicts, the log of
calls tells whether each op reached its own public function, once, with the arguments that it was
asked for.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from conformance.bench import bench_of
from conformance.catalogue.load import MODULES, functions, package_of, read_toml
from conformance.collect import ROOT, UsageError, cases_at, check_names, ops
from conformance.engine.attempt import Bench
from conformance.engine.effort import EFFORTS, Config, Effort
from conformance.engine.limits import support_of, variant_limit
from conformance.engine.run import run_case
from conformance.identity import unknown
from conformance.model import Case, Op
from conformance.options import backend_options, split
from conformance.results import EXIT_NONCONFORMING
from conformance.waivers import is_known

FOLDER = ROOT / "adapters" / "standins"
CHECKS = ("values", "layout")
ASKED = ": asked for "
MOST_FINDINGS = 8
"""told of one op"""


@dataclass
class Rehearsed:
    """What came of one op."""

    op: str
    function: str
    cases: int = 0
    problems: int = 0
    calls: int = 0
    findings: dict[str, str] = field(default_factory=dict)
    """sentence -> the first case that showed it"""

    @property
    def right(self) -> bool:
        return not self.findings

    def find(self, sentence: str, case: str) -> None:
        """Keep a sentence, once for whatever shapes it was seen with."""
        alike = sentence.partition(ASKED)[0]
        if not any(s.partition(ASKED)[0] == alike for s in self.findings):
            self.findings[sentence] = case


def class_of(backend: str, arch: str = "") -> str:
    """`package.module:Class` that rehearses a backend. Raises UsageError for one that nothing stands in for."""
    if ":" in backend:
        return backend
    table = {name: row for name, row in read_toml(FOLDER / "rehearsals.toml").items() if isinstance(row, dict)}
    if backend not in table:
        raise UsageError(unknown("rehearsal of backend", backend, table))
    row = table[backend]
    arch = arch or row["default"]
    known = [a for a in row if a != "default"]
    if arch not in known:
        raise UsageError(unknown("architecture", arch, known))
    return row[arch]


def public_name(op: str) -> str:
    """The function of the vendor's package that an op is about, or an empty string where it is no function."""
    module, _, name = op.partition(".")
    known = {f.name for f in functions(module)}
    return f"{package_of(module)}.{name}" if op in known else ""


def covering(cases: Sequence[Case], most: int) -> list[Case]:
    """A few cases that together have each value of each variant key; at most that many of each check."""
    out: list[Case] = []
    for check in dict.fromkeys(c.check for c in cases):
        left = [c for c in cases if c.check == check]
        seen: set[tuple[str, str]] = set()
        while left and len([c for c in out if c.check == check]) < most:
            best = max(left, key=lambda c: len(_pairs(c) - seen))
            if out and out[-1].check == check and not _pairs(best) - seen:
                break
            left.remove(best)
            seen |= _pairs(best)
            out.append(best)
    return out


def _pairs(case: Case) -> set[tuple[str, str]]:
    return set(dict(case.variant).items())


# --- the log of calls -----------------------------------------------------------------------------------------

def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines that whole processes wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def asked_and_called(lines: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Any, list[Any], dict[str, Any]]]:
    """(what the engine asked for, the calls that this led to, settings then asked for), process by process."""
    by_process: dict[int, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_process.setdefault(line["pid"], []).append(line)
    for of_one in by_process.values():
        asked, calls = None, []
        settings: dict[str, Any] = {}
        for line in of_one:
            if line["kind"] == "settings":
                settings = {**settings, **{f"{line['name']}.{k}": v for k, v in line["args"].items()}}
            elif line["kind"] in ("asked", "compile"):
                if asked is not None:
                    yield asked, calls, dict(settings)
                asked, calls = (line if line["kind"] == "asked" else None), []
            elif line["kind"] == "call" and asked is not None:
                calls.append(line)
            elif line["kind"] == "wait" and asked is not None:
                yield asked, calls, dict(settings)
                asked, calls = None, []
        if asked is not None:
            yield asked, calls, dict(settings)


def wrong_calls(asked: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], settings: Mapping[str, Any],
                allowed: Mapping[tuple[str, str, str], str]) -> Iterator[str]:
    """What is wrong with the calls that one request led to, a sentence each."""
    op, wanted = asked["name"], public_name(asked["name"])
    mine = [c for c in calls if c["name"] == wanted]
    for other in calls:
        if other["name"] != wanted and not other["helper"]:
            yield f"{op} also reached {other['name']}"
    if not wanted:
        return
    if len(mine) != 1:
        yield f"{op} reached {wanted} {len(mine)} times, not once"
        return
    call = mine[0]
    if call.get("unbound"):
        return
    for name, value in asked["args"].items():
        if isinstance(value, dict) and "object" in value and name not in call["args"]:
            continue  # the object whose method this is
        if value is None and name not in call["args"]:
            continue
        got = call["args"].get(name)
        how = "dropped" if name not in call["args"] else difference(value, got)
        if how and (op, name, how) not in allowed:
            told = "" if how == "dropped" else f"{ASKED}{_short(value)}, it got {_short(got)}"
            yield f"{op}: argument {name} was {how}{told}"
    for name in call["other"]:
        if asked["args"].get(name) is None and (op, name, "added") not in allowed:
            yield f"{op}: argument {name}={_short(call['args'][name])} was added"
    module = op.partition(".")[0]
    for name, value in call["state"].items():
        want = settings.get(f"{module}.{name}")
        if want is not None and want != value and not (isinstance(want, dict) and want.get("float") == repr(value)):
            yield f"{op}: setting {name} is {value}, not {want}, when {wanted} is called"


def difference(asked: Any, got: Any) -> str:
    """How an argument differs from what was asked for, or an empty string."""
    if isinstance(asked, dict) and "shape" in asked:
        if not (isinstance(got, dict) and "shape" in got):
            return "replaced"
        for key in ("dtype", "shape", "stride"):
            if asked[key] != got[key]:
                return f"given another {key}"
        return "" if asked["at"] == got["at"] or 0 in asked["shape"] else "copied"
    if isinstance(asked, list):
        if not isinstance(got, list) or len(asked) != len(got):
            return "replaced"
        return next(filter(None, (difference(a, g) for a, g in zip(asked, got, strict=True))), "")
    return "" if asked == got else "changed"


def _short(value: Any) -> str:
    if isinstance(value, dict) and "shape" in value:
        return f"{value['dtype']}{value['shape']} stride {value['stride']}"
    if isinstance(value, list):
        return "(" + ", ".join(map(_short, value)) + ")"
    return str(next(iter(value.values()))) if isinstance(value, dict) else str(value)


# --- running it -----------------------------------------------------------------------------------------------

def allowed_of(description: str) -> dict[tuple[str, str, str], str]:
    """(op, argument, how) -> why it is handed over otherwise, by the name of a description."""
    rows = read_toml(FOLDER / "rehearsals.toml").get("handed_otherwise", ())
    return {(op, argument, r["how"]): r["reason"] for r in rows for a in r["arch"] if description.endswith(a)
            for op in r["ops"] for argument in r["arguments"]}


class Rehearsal:
    """A backend that is rehearsed, and the log of its calls. `open_rehearsal` makes one."""

    def __init__(self, path: str, bench: Bench, log: Path, effort: Effort, seed: int) -> None:
        self.bench, self.log = bench, log
        self.config = Config(bench, effort, seed, Path("/dev/null"), path, confirm=False)
        self.allowed = allowed_of(bench.description.name)

    def with_options(self, options: Mapping[str, str]) -> None:
        """Options of the backend for the cases to come."""
        for launcher in (self.bench.launcher, self.bench.debug_launcher):
            launcher.options = {**options, "calls": str(self.log)}

    def cases_of(self, op: Op, checks: Sequence[str]) -> list[Case]:
        """The cases of an op that the chip can have; empty for an op that it does not have.

        Known findings of a module say nothing of its adapter and are left out.
        """
        support = support_of(self.bench.description, op.name)
        return [c for c in cases_at("core", (op.module,)) if c.op.name == op.name and c.check in checks
                and support.supported and not variant_limit(support, c.variant) and not is_known(c.id)]

    def of(self, op: Op, cases: Sequence[Case]) -> Rehearsed:
        """Run these cases and compare what was asked for with what was called."""
        out = Rehearsed(op.name, public_name(op.name))
        for case in cases:
            self.log.unlink(missing_ok=True)
            record = run_case(case, self.config)
            if record.status == "unsupported":
                continue
            out.cases += 1
            out.problems += record.examples.get("executed", 0)
            if record.status != "pass":
                out.find(f"{record.status} ({record.reason or record.phase}): {record.message.strip()[:400]}", case.id)
            for asked, calls, settings in asked_and_called(read_log(self.log)):
                out.calls += any(c["name"] == out.function for c in calls)
                # What failed may have called less; the real tilelang is not stood in for.
                if record.status == "pass" and not asked["name"].startswith("tilelang."):
                    for sentence in wrong_calls(asked, calls, settings, self.allowed):
                        out.find(sentence, case.id)
        if not out.problems:
            out.find("no problem of it could be tried", cases[0].id if cases else op.name)
        elif out.right and not out.calls and op.module != "tilelang":
            out.find(f"{out.function} was never reached", cases[0].id)
        return out


@contextmanager
def open_rehearsal(path: str, *, examples: int = 4, seed: int = 0, options: Mapping[str, str] | None = None,
                   ) -> Iterator[Rehearsal]:
    """Raises UnknownBackend or BackendUnusable."""
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        log = Path(folder) / "calls.jsonl"
        with bench_of(path, {**(options or {}), "calls": str(log)}) as bench:
            yield Rehearsal(path, bench, log, EFFORTS["core"].with_examples(examples), seed)


def rehearse(backend: str, arch: str = "", *, modules: Sequence[str] = (), names: Sequence[str] = (), most: int = 6,
             examples: int = 4, checks: Sequence[str] = CHECKS, seed: int = 0, options: Mapping[str, str] | None = None,
             told: Callable[[Rehearsed], None] = lambda r: None) -> list[Rehearsed]:
    """Rehearse the ops that a chip has. Raises UsageError, UnknownBackend or BackendUnusable."""
    out = []
    with open_rehearsal(class_of(backend, arch), examples=examples, seed=seed, options=options) as rehearsal:
        for op in ops(modules):
            if names and op.name not in names:
                continue
            has_any = any(c.op.name == op.name and c.check in checks for c in cases_at("core", (op.module,)))
            if has_any and support_of(rehearsal.bench.description, op.name).supported:
                out.append(rehearsal.of(op, covering(rehearsal.cases_of(op, checks), most)))
                told(out[-1])
    return out


def report(results: Sequence[Rehearsed]) -> str:
    """A row an op, then what is wrong."""
    rows = [(r.op, r.function or "-", r.cases, r.problems, r.calls, "right" if r.right else "WRONG") for r in results]
    text = [tabulate(rows, ("op", "public function", "cases", "problems", "calls", "")), ""]
    for r in results:
        text += [f"{sentence}\n    in {case}" for sentence, case in list(r.findings.items())[:MOST_FINDINGS]]
    wrong = sum(not r.right for r in results)
    text.append(f"{len(results)} ops, {wrong} wrong")
    return "\n".join(text)


def main(argv: list[str]) -> int:
    """`conformance rehearse`; returns the exit code."""
    p = argparse.ArgumentParser("conformance rehearse")
    p.add_argument("--backend", required=True, help="the backend whose adapters are tried, or package.module:Class")
    p.add_argument("--arch", default="", help="the architecture that is stood in for")
    p.add_argument("--module", default="", help="only these modules: a,b")
    p.add_argument("--op", action="append", default=[], help="only this op")
    p.add_argument("--check", default=",".join(CHECKS), help="checks whose cases are tried")
    p.add_argument("--cases", type=int, default=6, help="most cases of an op and check")
    p.add_argument("--examples", type=int, default=4, help="problems a case")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--backend-option", action="append", default=[])
    args = p.parse_args(argv)
    check_names("module", split(args.module), MODULES)
    check_names("op", args.op, [op.name for op in ops()])
    results = rehearse(args.backend, args.arch, modules=split(args.module), names=args.op, most=args.cases,
                       examples=args.examples, checks=split(args.check), seed=args.seed,
                       options=backend_options(args.backend_option),
                       told=lambda r: print(f"{'right' if r.right else 'WRONG'}  {r.op}", flush=True))
    if not results:
        raise UsageError("no op of this selection has a case of these checks on this chip")
    print(report(results))
    return EXIT_NONCONFORMING if any(not r.right for r in results) else 0
