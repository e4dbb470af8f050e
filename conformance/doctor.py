"""`conformance doctor`: what is usable and why not, and whether the adapter keeps its own contract.

Everything that touches a backend runs in child processes. What dies there is a row of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tabulate import tabulate

from conformance import backends
from conformance.bench import bench_of
from conformance.catalogue.load import MODULES
from conformance.collect import check_names, ops
from conformance.engine import draw
from conformance.engine.attempt import Bench
from conformance.engine.contract import TIMED_ROUNDS
from conformance.engine.example import build, place, start_cursors
from conformance.engine.executor import BackendBroken, Executor
from conformance.engine.layout import row_bytes_of
from conformance.engine.leases import Lease
from conformance.engine.limits import problem_limit, support_of, variant_limit
from conformance.engine.variants import cases_of
from conformance.model import Op, Problem
from conformance.protocol import FORMATS, Description
from conformance.results import EXIT_CONFORMING, EXIT_INCONCLUSIVE

TEST_TIMEOUT_S = 60.0
WORK_BYTES = (2**10, 2**14, 2**18, 2**21, 2**23)
"""work of the calls that are timed, smallest first"""
LONG_ENOUGH_S = 0.02
"""of a call: then larger ones need not be tried"""
REPEATS = 3
LEFT_S, LEFT_SHARE = 2e-3, 0.2
"""what may be left to wait for after synchronize(): seconds, and share of the call"""
GROWS = 1.5
"""least ratio of two calls by the backend's timer where the host's clock says at least 4"""
SLACK_S = 1e-3


@dataclass
class Row:
    """One test of the contract."""

    test: str
    about: str
    state: str
    """ok, failed, absent (the backend does not offer it), unknown (it could not be tried)"""
    text: str


@dataclass
class Examination:
    """What the doctor found."""

    modules: dict[str, str]
    """name to the reason why it is not usable, empty where it is"""
    devices: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    platform: str = ""

    @property
    def usable(self) -> list[str]:
        return [m for m, why in self.modules.items() if not why]

    @property
    def failed(self) -> list[Row]:
        return [r for r in self.rows if r.state == "failed"]


def examine(backend: str, options: dict[str, str], device: str = "0") -> Examination:
    """Ask the backend, then test its contract. Raises UnknownBackend, or BackendUnusable without a description."""
    description = backends.describe(backend, options)
    try:
        found = backends.doctor(backend, options, device)
    except backends.BackendUnusable as e:
        return Examination(dict.fromkeys(MODULES, _first_line(str(e))), rows=list(description_rows(description)),
                           platform=description.platform)
    modules = {m: found["modules"].get(m, "this backend does not offer it") for m in MODULES}
    out = Examination(modules, tuple(found["devices"]), found["versions"], platform=description.platform)
    out.rows.extend(description_rows(description))
    if not found.get("constructed", True):
        return out  # there is no backend whose contract could be tested; the modules say why
    with bench_of(backend, options) as bench:
        patient = Patient(bench)
        try:
            patient.ready()
        except BackendBroken as e:
            # Without a device that is no fault of the adapter's.
            out.rows.append(Row("constructor", "", "failed" if out.usable else "unknown", _why_broken(str(e))))
            return out
        try:
            out.rows.extend(contract_rows(patient, out.usable))
            if out.rows[-1].test != "alive":
                out.rows.extend(call_rows(patient, out.usable))
        finally:
            patient.close()
    return out


def description_rows(description: Description) -> Iterator[Row]:
    """Whether the description names what exists."""
    wrong = backends.complaints(description, ops())
    named = f"{len(description.ops)} patterns of ops, platform {description.platform}"
    yield Row("description", "", "failed" if wrong else "ok", "; ".join(wrong[:3]) if wrong else named)


class Patient:
    """An executor that is replaced when a test ends it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.executor: Executor | None = None
        self.lease = bench.devices.take(1) if bench.devices is not None else Lease()

    def ready(self) -> Executor:
        if self.executor is None or not self.executor.alive:
            self.executor = Executor(self.bench.launcher, self.bench.pool, 1, TEST_TIMEOUT_S, "",
                                     self.lease.devices, self.lease.fds)
        return self.executor

    def ask(self, request: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
        """The answer, or None and a sentence about how the process ended."""
        try:
            executor = self.ready()
        except BackendBroken as e:
            return None, _first_line(str(e))
        executor.send([request])
        outcome = executor.collect(TEST_TIMEOUT_S, self.bench.compile_timeout_s)
        if outcome.timed_out:
            return None, outcome.timed_out
        if outcome.death is not None:
            told = outcome.death.stderr.strip().splitlines()
            return None, outcome.death.sentence() + (f": {told[-1]}" if told else "")
        return outcome.answers[0], ""

    def close(self) -> None:
        if self.executor is not None:
            self.executor.kill()
        self.lease.close()


def contract_rows(patient: Patient, usable: list[str]) -> Iterator[Row]:
    """The tests that need no op; of a device that does not answer the first alone: the adapter is not to blame."""

    def row(test: str, about: str = "", **request: Any) -> Row:
        got, ended = patient.ask({"cmd": "contract", "test": test, **request})
        return Row(test, about, got["state"], got["text"]) if got else Row(test, about, "failed", ended)

    first = row("alive")
    if first.state == "failed":
        first.text += ". Nothing else can be tried on it: reset the device and ask again"
    yield first
    if first.state == "failed":
        return
    for test in ("bytes", "poison", "pool", "beyond"):
        yield row(test)
    for name in FORMATS:
        yield row("format", name, format=name)
    calls = calls_of(patient.bench.description, usable)
    for module in usable:
        mine = {call: names for call, names in calls.items() if call.partition(".")[0] == module}
        if mine:
            yield row("methods", module, calls=mine)
        yield row("settings", module, module=module, needed=settings_of(patient.bench.description, module))


def calls_of(description: Description, modules: list[str]) -> dict[str, list[str]]:
    """Every call that the description's ops make, with the names of its arguments."""
    out: dict[str, list[str]] = {}
    for op in ops():
        if op.module in modules and support_of(description, op.name).supported:
            for step in op.steps:
                names = out.setdefault(step.call, [])
                names += [a.name for a in step.args if a.name not in names]
    return out


def settings_of(description: Description, module: str) -> dict[str, str]:
    """Every process-wide setting that a supported op of the module is called under, and the first op that is."""
    out: dict[str, str] = {}
    for op in ops((module,)):
        if support_of(description, op.name).supported:
            for s in op.settings:
                out.setdefault(s.name, op.name)
    return out


def call_rows(patient: Patient, usable: list[str]) -> Iterator[Row]:
    """What a real call shows of synchronize(), a module each."""
    for module in usable:
        op, ladder = work_ladder(patient.bench.description, module)
        if op is None:
            yield Row("synchronise", module, "unknown", "no op of one rank that this backend declares has a problem")
            continue
        seen: list[dict[str, Any]] = []
        yield synchronise_row(patient, op, ladder, seen)
        yield timer_row(op, seen)


def work_ladder(description: Description, module: str) -> tuple[Op | None, list[Problem]]:
    """The op of a module with which work can be made, and problems of it, smallest first."""
    best: tuple[Op | None, list[Problem]] = None, []
    for op in ops((module,)):
        support = support_of(description, op.name)
        if op.ranks > 1 or not support.supported:
            continue
        for case in cases_of(op, ["values"]):
            if variant_limit(support, case.variant):
                continue
            drawn = draw.first_chunk(case, 0)[0] + draw.chunk(case, 0, 1)
            legal = [p for p in drawn if not problem_limit(support, p, row_bytes_of(op, p, description.requirements))]
            legal.sort(key=lambda p: draw.work(op, p))
            ladder = [p for top in WORK_BYTES if (p := _largest(op, legal, top))]
            ladder = list({id(p): p for p in ladder}.values())
            if ladder and (best[0] is None or draw.work(op, ladder[-1]) > draw.work(best[0], best[1][-1])):
                best = op, ladder
            if legal:
                break  # one variant an op
    return best


def _largest(op: Op, problems: list[Problem], most_bytes: float) -> Problem | None:
    return max((p for p in problems if draw.work(op, p) <= most_bytes), key=lambda p: draw.work(op, p), default=None)


def probe(patient: Patient, op: Op, problem: Problem) -> tuple[dict[str, Any] | None, str]:
    """Make a call and time its parts; a sentence where it can't be had."""
    try:
        executor = patient.ready()
    except BackendBroken as e:
        return None, _first_line(str(e))
    example = build(op, problem, patient.bench.description.requirements)
    cursors = start_cursors(1)
    request = place(example, executor.arenas, cursors)[0]
    got, ended = patient.ask({**request, "cmd": "probe", "results_at": cursors[0], "settle_s": 0.1,
                              "arena_bytes": executor.arenas[0].nbytes})
    if got is None:
        return None, ended
    if "times" not in got:
        what = got.get("exception") or {}
        told = what.get("message") or next((got[k] for k in ("oom", "lost", "unrepresentable") if k in got), "")
        return None, f"the call did not succeed: {what.get('type', '')} {_first_line(str(told))}".strip()
    return got, ""


def timer_row(op: Op, seen: list[dict[str, Any]]) -> Row:
    """Whether the backend's timer takes every call, in seconds, and longer for what takes longer.

    seen: the timed calls, smallest work first. The host's clock is the witness: what it can't tell is not judged.
    """

    def row(state: str, text: str) -> Row:
        return Row("timer", op.module, state, f"{op.name}: {text}")

    timed = [t for t in seen if t.get("timer_s") is not None]
    if not timed:
        return row("unknown", "no call of one step could be timed")
    for t in timed:
        took, host = t["timer_s"], t["host_s"]
        if len(took) != TIMED_ROUNDS or not all(0 < s < float("inf") for s in took):
            return row("failed", f"time() gave {took} for {TIMED_ROUNDS} rounds; a number of seconds a round is due")
        if min(took) > 3 * max(host) + SLACK_S:
            return row("failed", f"time() says {min(took):.3g} s of a call that the host saw end in {max(host):.3g} s: "
                                 "samples are in seconds")
    # One process's noise apart: medians of the least and the most work.
    (small_t, small_h), (large_t, large_h) = (
        (min(t["timer_s"]), min(t["real_s"])) for t in (timed[0], timed[-1]))
    if large_h < LONG_ENOUGH_S / 4 or large_h < 4 * small_h:
        return row("unknown", f"calls took {small_h * 1e3:.3g}, {large_h * 1e3:.3g} ms: too short or too alike to tell")
    if large_t < GROWS * small_t:
        return row("failed", f"a call took {large_h / small_h:.3g} times as long as another by the host's clock, but "
                             f"{large_t / small_t:.3g} times by time(), which must measure the work and not the launch")
    return row("ok", f"by {timed[0]['clock']}, {small_t * 1e3:.3g} to {large_t * 1e3:.3g} ms")


def synchronise_row(patient: Patient, op: Op, ladder: list[Problem], seen: list[dict[str, Any]]) -> Row:
    """Whether anything is left to wait for when synchronize() has returned; `seen` gets what each size took."""
    whole = 0.0
    for problem in ladder:
        left = []
        for _ in range(REPEATS):
            got, ended = probe(patient, op, problem)
            if got is None:
                return Row("synchronise", op.module, "unknown", f"{op.name}: {ended}; a run tells more")
            if got.get("late"):
                return Row("synchronise", op.module, "failed",
                           f"{op.name}: results still changed after synchronize() had returned; "
                           "it must wait for every stream and queue that a call used")
            if got.get("untouched"):
                return Row("synchronise", op.module, "failed",
                           f"{op.name}: when synchronize() had returned every result still held what stood there "
                           "before the call; it must wait for what was launched (or the call launched nothing)")
            times = got["times"]
            if not left:
                seen.append(times[-1])
            whole = sum(t["call_s"] + t["wait_s"] for t in times)
            left.append(max(t["reads_s"][0] - min(t["reads_s"][1:]) for t in times))
        if min(left) > max(LEFT_S, LEFT_SHARE * (whole + min(left))):
            return Row("synchronise", op.module, "failed",
                       f"{op.name}: the first read after synchronize() took {min(left) * 1e3:.3g} ms longer than the "
                       "next ones, so synchronize() came back before the work was done; times would be too short")
        if whole > LONG_ENOUGH_S:
            break
    return Row("synchronise", op.module, "ok", f"{op.name}, {whole * 1e3:.3g} ms of work: nothing left afterwards")


def folded(rows: list[Row]) -> Iterator[Row]:
    """The rows with all formats in one of which the same is to be said."""
    alike: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        if r.test == "format":
            alike.setdefault((r.state, r.text), []).append(r.about)
    for r in rows:
        if r.test != "format":
            yield r
        elif about := alike.pop((r.state, r.text), []):
            many = f"{', '.join(about)}{': ' if r.text else ''}{r.text}"
            yield r if len(about) == 1 else Row("formats", "", r.state, many)


def page(name: str, found: Examination, required: list[str]) -> tuple[str, int]:
    """The doctor's page and exit code."""
    check_names("module", required, MODULES)
    parts = [tabulate([(m, "no" if why else "yes", why) for m, why in found.modules.items()],
                      ("module", "usable", "reason"), tablefmt="simple", maxcolwidths=[None, None, 90])]
    parts.append(f"platform: {found.platform}")
    parts.append("devices: " + ("; ".join(found.devices) or "none found"))
    parts.append("versions: " + (", ".join(f"{k} {v}" for k, v in found.versions.items()) or "unknown"))
    if found.rows:
        rows = [(" ".join(filter(None, (r.test, r.about))), "FAILED" if r.state == "failed" else r.state, r.text)
                for r in folded(found.rows)]
        parts.append(tabulate(rows, ("contract of the adapter", "state", "what to know"), tablefmt="simple",
                              maxcolwidths=[None, None, 90]))
    missing = [m for m in required if m not in found.usable]
    verdict = []
    if not found.usable:
        verdict.append(f"backend {name}: no module is usable here")
    if missing:
        verdict.append(f"required, but not usable: {', '.join(missing)}")
    if found.failed:
        verdict.append(f"the adapter breaks its contract in {len(found.failed)} of {len(found.rows)} tests: mend that "
                       "first, what kernels are blamed for till then may be the adapter's")
    if not verdict:
        verdict.append(f"usable: {', '.join(found.usable)}")
    return "\n\n".join([*parts, "\n".join(verdict)]), (
        EXIT_INCONCLUSIVE if missing or found.failed or not found.usable else EXIT_CONFORMING)


def _why_broken(text: str) -> str:
    """What a failed start says: its first line and the exception, without what stands between."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ": ".join(dict.fromkeys(line.rstrip(".") for line in (lines[0], lines[-1]))) + (
        ". The contract could not be tested.")


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


