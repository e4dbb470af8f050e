"""The command-line options of a run, in one place for pytest and the console script."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from conformance.catalogue.load import MODULES
from conformance.collect import UsageError, all_cases, check_names, timing_cases
from conformance.engine import kept_outputs
from conformance.engine.effort import EFFORTS
from conformance.engine.inject import FAULTS
from conformance.identity import nearest, selects, unknown
from conformance.model import CHECKS


class Joined(argparse.Action):
    """Lists given by an option that occurs twice are one list; by default the last would silently count alone."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, ",".join(filter(None, (getattr(namespace, self.dest), values))))


OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--backend", {"metavar": "NAME", "help": "what runs the ops: cpu, nvidia, ascend, or package.module:Class"}),
    ("--backend-option", {"metavar": "K=V", "action": "append", "default": [], "help": "an option of the backend"}),
    ("--devices", {"default": "auto", "help": "auto, or device numbers: 0,1"}),
    ("--level", {"default": "full", "help": f"how much is tried: {', '.join(EFFORTS)} (default full)"}),
    ("--claim", {"default": None, "help": "the ops a verdict is relative to: `all`, or a file with an op a line"}),
    ("--module", {"action": Joined, "default": "", "metavar": "A,B", "help": "only these modules: a,b"}),
    ("--case", {"action": "append", "default": [], "metavar": "QUERY",
                "help": "an id, a module, an op, or any prefix with *"}),
    ("--check", {"action": Joined, "default": "", "metavar": "A,B", "help": "only these checks: a,b"}),
    ("--timing", {"action": "store_true", "help": "time calls instead: the check `timing`, one case at a time"}),
    ("--seed", {"type": int, "default": 0, "help": "seed of every draw (default 0)"}),
    ("--examples", {"type": int, "default": None, "help": "problems a case, instead of the level's number"}),
    ("--time-budget", {"default": None, "metavar": "MIN",
                       "help": "minutes that the run may take: the most telling cases, the rest is not_run"}),
    ("--case-timeout", {"type": float, "default": None, "metavar": "S",
                        "help": "seconds a call may take (default 20, at level bringup 300)"}),
    ("--compile-timeout", {"type": float, "default": 300.0, "metavar": "S", "help": "seconds a compile may take"}),
    ("--shrink-budget", {"type": float, "default": None, "metavar": "S", "help": "seconds for making a failure small"}),
    ("--isolation", {"default": "process", "choices": ("process", "inline"),
                     "help": "inline: run in the worker itself, for a debugger (default process)"}),
    ("--waivers", {"default": None, "metavar": "FILE", "help": "known findings; none is loaded by default"}),
    ("--run-dir", {"default": None, "metavar": "DIR", "help": "default: runs/<backend>-<utc time>"}),
    ("--resume", {"action": "store_true", "help": "go on with the run in --run-dir"}),
    ("--shard", {"default": None, "metavar": "K/N", "help": "only the K-th of N parts"}),
    ("--problems", {"default": None, "metavar": "RUN", "help": "exactly the problems that a former run executed"}),
    ("--keep-outputs", {"action": "store_true", "help": "keep the results of check values, for --reference-run"}),
    ("--reference-run", {"default": None, "metavar": "RUN",
                         "help": "a run with kept outputs: tell the ratios of errors to its own beside the verdict"}),
    ("--inject", {"default": None, "metavar": "FAULT", "help": f"plant a fault: {', '.join(FAULTS)}"}),
)


def backend_options(pairs: list[str]) -> dict[str, str]:
    """Raises UsageError for what is not K=V."""
    out = {}
    for pair in pairs:
        key, sep, value = pair.partition("=")
        if not sep or not key:
            msg = f"--backend-option takes K=V, got {pair!r}"
            raise UsageError(msg)
        out[key] = value
    return out


def reference_run(run: str | None) -> Path | None:
    """The run directory to compare with. Raises UsageError for one without kept outputs."""
    if not run:
        return None
    if not (Path(run) / kept_outputs.FOLDER).is_dir():
        msg = f"--reference-run={run}: no folder {kept_outputs.FOLDER} there; make that run with --keep-outputs"
        raise UsageError(msg)
    return Path(run).resolve()


def shard_of(text: str | None) -> tuple[int, int]:
    """(K, N), 1 <= K <= N. Raises UsageError."""
    if not text:
        return 1, 1
    k, sep, n = text.partition("/")
    if not sep or not k.isdigit() or not n.isdigit() or not 1 <= int(k) <= int(n):
        msg = f"--shard takes K/N with 1 <= K <= N, such as 2/3; got {text!r}"
        raise UsageError(msg)
    return int(k), int(n)


def split(text: str) -> list[str]:
    return [w for w in text.split(",") if w]


def check_usage(*, level: str, modules: list[str], checks: list[str], queries: list[str], inject: str | None,
                examples: int | None, resume: bool, run_dir: str | None, timing: bool = False,
                workers: int = 0) -> None:
    """Raises UsageError on the first name that does not exist, or option that makes no sense."""
    check_names("level", [level], EFFORTS)
    check_names("module", modules, MODULES)
    check_names("check", checks, CHECKS)
    if inject:
        check_names("fault", [inject], FAULTS)
    if timing and workers > 1:
        msg = f"--timing times one case at a time, with nothing else running; leave out -n {workers}"
        raise UsageError(msg)
    if not timing and "timing" in checks:
        msg = "the check timing is a pass of its own: --timing"
        raise UsageError(msg)
    if examples is not None and examples < 1:
        msg = f"--examples must be at least 1, got {examples}"
        raise UsageError(msg)
    if resume and not run_dir:
        msg = "--resume needs the --run-dir of the run to go on with"
        raise UsageError(msg)
    listed = timing_cases("", modules) if timing else all_cases(modules)
    ids = [c.id for c in listed] if queries else []
    for q in queries:
        if not any(selects(q, i) for i in ids):
            start = q.removesuffix("*")
            close = "" if start == q else nearest(start, {i[: len(start)] for i in ids})
            raise UsageError(unknown("case", q, ids, limit=5) + (f"; {close}" if close else ""))
