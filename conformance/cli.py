"""The console script: `conformance COMMAND`. Each command is a function of its own."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.results import EXIT_INCONCLUSIVE, EXIT_NONCONFORMING, EXIT_USAGE

if TYPE_CHECKING:
    from conformance.protocol import Description

COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {}


def command(doc: str) -> Callable[[Callable[[list[str]], int]], Callable[[list[str]], int]]:
    def register(f: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
        COMMANDS[f.__name__.strip("_").replace("_", "-")] = doc, f
        return f

    return register


def _pytest(argv: list[str]) -> int:
    import os

    import pytest

    from conformance.journal import RUNS_VARIABLE

    root = Path(__file__).resolve().parents[1]
    here = Path.cwd()
    argv = [_from_here(a, here) for a in argv]
    os.environ.setdefault(RUNS_VARIABLE, str(here / "runs"))
    os.chdir(root)
    return int(pytest.main(["--rootdir", str(root), *argv, *([] if any("::" in a for a in argv) else ["cases"])]))


PATHS = ("--run-dir", "--waivers", "--problems", "--reference-run")


def _from_here(arg: str, here: Path) -> str:
    """A path option as seen from where the user stands; pytest runs in the root of the checkout."""
    name, sep, value = arg.partition("=")
    if sep and (name in PATHS or (name == "--claim" and (here / value).is_file())):
        return f"{name}={(here / value).resolve()}"
    return arg


def _find_plug_ins_here(argv: list[str]) -> None:
    """A backend given as package.module:Class may lie where the user stands; only child processes import it."""
    import os

    named = [a.removeprefix("--backend=") for a in argv if a.startswith("--backend=")]
    named += [b for a, b in itertools.pairwise(argv) if a == "--backend"]
    before = os.environ.get("PYTHONPATH", "")
    if any(":" in v for v in named) and str(Path.cwd()) not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), before]))


@command("run the cases: every option of pytest and of a run")
def run(argv: list[str]) -> int:
    return _pytest(argv)


@command("what is usable on this machine, and why not")
def doctor(argv: list[str]) -> int:
    from conformance import backends
    from conformance.doctor import examine, page
    from conformance.options import backend_options, split

    p = argparse.ArgumentParser("conformance doctor")
    p.add_argument("--backend", required=True)
    p.add_argument("--backend-option", action="append", default=[])
    p.add_argument("--device", default="0")
    p.add_argument("--require", default="", help="modules that must be usable: a,b")
    args = p.parse_args(argv)
    try:
        found = examine(args.backend, backend_options(args.backend_option), args.device)
    except backends.BackendUnusable as e:
        print(e)
        return EXIT_INCONCLUSIVE
    text, code = page(args.backend, found, split(args.require))
    print(text)
    return code


@command("what a run would take: compile keys, minutes, memory, and what fits a budget")
def plan(argv: list[str]) -> int:
    from conformance import backends
    from conformance.catalogue.load import MODULES
    from conformance.collect import check_names
    from conformance.options import backend_options, split
    from conformance.plan import plan_page

    p = argparse.ArgumentParser("conformance plan")
    p.add_argument("--backend", required=True)
    p.add_argument("--backend-option", action="append", default=[])
    p.add_argument("--level", default="full")
    p.add_argument("--module", default="", help="only these modules: a,b")
    p.add_argument("-n", dest="workers", type=int, default=1, help="workers side by side (default 1)")
    p.add_argument("--budget", default="", metavar="TIME", help="tell what fits: 30min, 2h")
    p.add_argument("--from", dest="run", type=Path, default=None, metavar="RUN", help="a former run to go by")
    p.add_argument("--compile-seconds", type=float, default=None, metavar="S", help="what a compile key takes")
    args = p.parse_args(argv)
    modules = split(args.module)
    check_names("module", modules, MODULES)
    try:
        description = backends.describe(args.backend, backend_options(args.backend_option))
    except backends.BackendUnusable as e:
        print(e)
        return EXIT_INCONCLUSIVE
    print(plan_page(args.backend, description, args.level, modules, args.workers, args.budget, args.run,
                    args.compile_seconds))
    return 0


@command("the cases of a level, an id a line")
def list_(argv: list[str]) -> int:
    from conformance.collect import UsageError, cases_at
    from conformance.engine.effort import EFFORTS
    from conformance.identity import selects, unknown

    p = argparse.ArgumentParser("conformance list")
    p.add_argument("query", nargs="?", default="*", help="an id, a module, an op, or any prefix with *")
    p.add_argument("--level", default="full", choices=sorted(EFFORTS))
    _whose_tiles(p)
    args = p.parse_args(argv)
    ids = [c.id for c in cases_at(args.level, (), _tiles_of(args))]
    found = [i for i in ids if selects(args.query, i)]
    if not found:
        raise UsageError(unknown("case", args.query, ids, limit=5))
    print("\n".join(found))
    return 0


@command("what a case is, and the first problems that are drawn for it")
def describe(argv: list[str]) -> int:
    from conformance.describe import describe_case
    from conformance.engine.effort import EFFORTS

    p = argparse.ArgumentParser("conformance describe")
    p.add_argument("id")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--problems", type=int, default=3)
    p.add_argument("--level", default="full", choices=sorted(EFFORTS))
    _whose_tiles(p)
    args = p.parse_args(argv)
    print(describe_case(args.id, args.seed, args.problems, args.level, _tiles_of(args)))
    return 0


def _whose_tiles(p: argparse.ArgumentParser) -> None:
    p.add_argument("--backend", default="cpu", help="at whose tiles level bringup has its problems (default cpu)")
    p.add_argument("--backend-option", action="append", default=[])


def _tiles_of(args: argparse.Namespace) -> Description | None:
    """The description that level bringup depends on; no other level does."""
    from conformance import backends
    from conformance.options import backend_options

    return backends.describe(args.backend, backend_options(args.backend_option)) if args.level == "bringup" else None


@command("try one case, or one kept problem, again")
def replay(argv: list[str]) -> int:
    from conformance.replay import replay_file, replay_id

    p = argparse.ArgumentParser("conformance replay")
    p.add_argument("what", help="a case id, or a problem.json that a run kept")
    p.add_argument("--backend", default=None)
    p.add_argument("--backend-option", action="append", default=[])
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--level", default="full", help="the level whose problems of the case are tried (default full)")
    p.add_argument("--examples", type=int, default=None)
    p.add_argument("--repeat", type=int, default=1)
    p.add_argument("--dump", default=None, metavar="DIR")
    args = p.parse_args(argv)
    if Path(args.what).is_file() or args.what.endswith(".json"):
        return replay_file(Path(args.what), args.backend, args.backend_option, args.repeat, args.dump)
    return replay_id(args.what, args.backend or "cpu", args.backend_option, args.seed, args.repeat, args.dump,
                     args.level, args.examples)


@command("the compatibility matrix of one or more runs")
def matrix(argv: list[str]) -> int:
    from conformance.collect import ops
    from reports.matrix import write_all

    p = argparse.ArgumentParser("conformance matrix")
    p.add_argument("run", nargs="+", type=Path)
    p.add_argument("--out", type=Path, default=Path("matrix"))
    args = p.parse_args(argv)
    print(write_all(args.run, args.out, [op.name for op in ops()]))
    return 0


@command("what changed between two runs")
def diff(argv: list[str]) -> int:
    from reports.diff import compare

    p = argparse.ArgumentParser("conformance diff")
    p.add_argument("a", type=Path)
    p.add_argument("b", type=Path)
    p.add_argument("--markdown", action="store_true")
    args = p.parse_args(argv)
    text, code = compare(args.a, args.b, markdown=args.markdown)
    print(text)
    return code


@command("one run out of several shards")
def merge(argv: list[str]) -> int:
    from conformance.merge import merge_runs

    p = argparse.ArgumentParser("conformance merge")
    p.add_argument("run", nargs="+", type=Path)
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args(argv)
    text, code = merge_runs(args.run, args.out)
    print(text)
    return code


@command("check a waiver file, against a run where one is given")
def waivers(argv: list[str]) -> int:
    import datetime

    from conformance import waivers as waiver_file
    from conformance.results import read_run

    p = argparse.ArgumentParser("conformance waivers")
    p.add_argument("file", type=Path)
    p.add_argument("--run", type=Path, default=None)
    args = p.parse_args(argv)
    listed = waiver_file.load(args.file)
    today = datetime.date.today()
    used = waiver_file.usage(listed, read_run(args.run).records.values() if args.run else (), today)
    print("\n".join(map(str, used)) if args.run else "\n".join(f"{u.waiver.id}: {u.waiver.reason}" for u in used))
    print(f"{len(used)} waivers, {sum(u.expired for u in used)} expired" + (
        f", {sum(not u.matched for u in used)} that name no case of the run" if args.run else ""))
    return EXIT_NONCONFORMING if any(u.expired for u in used) else 0


@command("which public functions are covered, and which checks run on them")
def coverage(argv: list[str]) -> int:
    from conformance.coverage import coverage_text, write_docs

    p = argparse.ArgumentParser("conformance coverage")
    p.add_argument("--write-docs", type=Path, default=None, metavar="FILE")
    args = p.parse_args(argv)
    if args.write_docs:
        write_docs(args.write_docs)
    print(coverage_text())
    return 0


@command("write the package of a new backend, which runs at once")
def new_backend(argv: list[str]) -> int:
    from conformance.new_backend import write_backend

    p = argparse.ArgumentParser("conformance new-backend")
    p.add_argument("name", help="of the package: lower-case letters, digits and _")
    p.add_argument("--abi", default="torch", help="what the runtime offers: torch, or c (ctypes, no framework)")
    p.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where the package's folder is made")
    args = p.parse_args(argv)
    print(write_backend(args.name, args.abi, args.out))
    return 0


@command("plant every fault of the library and see that each is caught")
def selftest(argv: list[str]) -> int:
    from conformance.selftest.command import main as run_selftest

    return run_selftest(argv)


@command("try the adapters of a chip that is not here, against stand-ins of its packages")
def rehearse(argv: list[str]) -> int:
    from conformance.rehearse import main as run_rehearsal

    return run_rehearsal(argv)


@command("how a backend keeps its sums, measured, and whether its profile says so")
def fingerprint(argv: list[str]) -> int:
    from conformance.fingerprint import main as run_fingerprint

    return run_fingerprint(argv)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    from conformance.backends import UnknownBackend
    from conformance.collect import UsageError
    from conformance.identity import nearest
    from conformance.waivers import WaiverError

    args = list(sys.argv[1:] if argv is None else argv)
    names = "\n".join(f"  {n:10} {doc}" for n, (doc, _) in COMMANDS.items())
    if not args or args[0] in ("-h", "--help"):
        print(f"usage: conformance COMMAND ...\n\n{names}")
        return 0 if args else EXIT_USAGE
    if args[0] not in COMMANDS:
        print(f"unknown command {args[0]!r}; {nearest(args[0], COMMANDS)}\n{names}", file=sys.stderr)
        return EXIT_USAGE
    _find_plug_ins_here(args)
    try:
        return COMMANDS[args[0]][1](args[1:])
    except (UsageError, UnknownBackend, WaiverError, FileNotFoundError, FileExistsError) as e:
        print(f"conformance {args[0]}: {e}", file=sys.stderr)
        return EXIT_USAGE
    except SystemExit as e:
        return EXIT_USAGE if e.code == 2 else int(e.code or 0)
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
