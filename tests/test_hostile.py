"""A hostile plug-in is told apart in every way it can be bad, and costs no case but its own."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runs import HOSTILE, MARK, ROOT, gone_within, run

from conformance.bench import bench_of
from conformance.collect import cases_at
from conformance.engine.attempt import Bench
from conformance.engine.effort import EFFORTS, Config
from conformance.engine.run import run_case
from conformance.model import Case
from conformance.results import Record

SEEDS = int(os.environ.get("HOSTILE_SEEDS", "1"))
"""how often each mode is tried, with other problems and striking elsewhere; 20 for a release"""
CALLEE = "deepselect.topk/values:dtype=fp32,index=int32,order=any,values=yes,end=no,offset=no,output_idx=callee"
CALLER = CALLEE.replace("callee", "caller")
MEMORY_CALLEE = "deepselect.topk/memory:dtype=bf16,index=int32,order=any,values=yes,end=no,offset=no,output_idx=callee"
MEMORY_CALLER = MEMORY_CALLEE.replace("int32", "int64").replace("any", "index").replace("values=yes", "values=no")
MEMORY_CALLER = MEMORY_CALLER.replace("end=no,offset=no", "end=yes,offset=yes").replace("callee", "caller")
INNOCENT = "deepselect.topk/values:dtype=bf16,index=int64,order=index,values=yes,end=yes,offset=yes,output_idx=caller"
WRONG = "numeric nonfinite order index_range token_duplicated"


@dataclass(frozen=True)
class Row:
    """What a mode must end in: status, and one of these reasons (blank for none)."""

    mode: str
    status: str
    reasons: str = ""
    cases: tuple[str, ...] = (CALLEE,)
    timeout_s: float = 20.0


BOTH, MEMORY, ALL = (CALLEE, CALLER), (MEMORY_CALLEE, MEMORY_CALLER), (CALLEE, CALLER, MEMORY_CALLEE, MEMORY_CALLER)
TABLE = (
    Row("segfault", "crash", "signal", ALL),
    Row("abort", "crash", "signal"),
    Row("fpe", "crash", "signal"),
    Row("exit_0", "crash", "exit"),
    Row("exit_7", "crash", "exit", BOTH),
    Row("kill_self", "crash", "signal"),
    Row("kill_parent", "crash", "signal"),
    Row("hang_in_c", "timeout", "", BOTH, 1.0),
    Row("hang_with_gil", "timeout", "", (CALLEE,), 1.0),
    Row("hang_deaf", "timeout", "", (CALLEE,), 1.0),
    Row("stop_self", "timeout", "", (CALLEE,), 1.0),
    Row("allocate", "oom"),
    Row("raises_runtime_error", "fail", "exception"),
    Row("raises_system_exit", "fail", "exception"),
    Row("raises_keyboard_interrupt", "fail", "exception"),
    Row("raises_base_exception", "fail", "exception"),
    Row("raises_stop_iteration", "fail", "exception"),
    Row("raises_mute", "fail", "exception"),
    Row("raises_unrepresentable", "fail", "exception"),
    Row("raises_device_lost", "crash", "signal"),
    Row("free_raises", "fail", "exception"),
    Row("write_before", "fail", "oob_write", (CALLER, *MEMORY)),
    Row("write_behind", "fail", "oob_write", (CALLER, *MEMORY)),
    Row("unwritten", "fail", "unwritten", ALL),
    Row("stale_buffer", "fail", WRONG),
    Row("recycled_buffer", "fail", "alias", (CALLEE, MEMORY_CALLEE)),
    Row("mutate_input", "fail", "input_mutated", ALL),
    Row("late", "fail", "late_write", ALL),
    Row("wrong_first", "fail", WRONG, BOTH),
    Row("wrong_once_in_a_while", "fail", WRONG),
    Row("returns_none", "fail", "contract"),
    Row("returns_text", "fail", "contract"),
    Row("returns_one", "fail", "contract"),
    Row("returns_three", "fail", "contract"),
    Row("returns_nested", "fail", "contract"),
    Row("returns_none_values", "fail", "contract"),
    Row("returns_numpy", "fail", "contract"),
    Row("returns_numpy_scalar", "fail", "contract"),
    Row("returns_int", "fail", "contract"),
    Row("returns_touchy", "fail", "contract"),
    Row("returns_faceless", "fail", "contract"),
    Row("returns_bad_tuple", "fail", "contract"),
    Row("returns_endless", "fail", "contract"),
    Row("returns_itself", "fail", "contract"),
    Row("returns_dict", "fail", "contract"),
    Row("returns_sparse", "fail", "contract"),
    Row("returns_meta", "fail", "contract"),
    Row("returns_int16", "fail", "dtype"),
    Row("returns_complex", "fail", "dtype"),
    Row("returns_short", "fail", "shape"),
    Row("returns_flat", "fail", "shape"),
    Row("returns_copy", "fail", "alias", (CALLER,)),
    Row("returns_input", "fail", "alias"),
    Row("close_all", "crash", "exit"),
    Row("garbage_in_sockets", "crash", "exit"),
    Row("print_and_die", "crash", "signal"),
    Row("fork_and_die", "crash", "signal"),
    Row("fork_and_exit", "crash", "exit"),
    # What is bad manners but gives right results is no finding; it must do no harm.
    Row("print_tons", "pass"),
    Row("fork_sleeper", "pass"),
    Row("fork_both_return", "pass", "", BOTH),
    Row("signal_handlers", "pass"),
    Row("threads_left", "pass"),
    Row("process_state", "pass"),
)

by_id = {c.id: c for c in cases_at("full", ("deepselect",))}


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests"))
        patch.setenv(MARK, f"hostile-{uuid.uuid4().hex}")
        with bench_of(HOSTILE, {}) as b:
            yield b
        assert gone_within(os.environ[MARK], 2.0), "a process of the run lives on"


def attempt(bench: Bench, case: Case, out: Path, seed: int = 0, *, examples: int = 6, shrink_s: float = 0.0,
            **options: str) -> Record:
    for launcher in (bench.launcher, bench.debug_launcher):
        launcher.options = {**options, "salt": str(seed)}
    effort = replace(EFFORTS["full"], examples=examples, shrink_s=shrink_s, max_work=2.0**15)
    return run_case(replace(case, explicit=()), Config(bench, effort, seed, out, HOSTILE, dict(options)))


@pytest.mark.parametrize("row", TABLE, ids=lambda r: r.mode)
def test_told_apart(bench: Bench, row: Row, tmp_path: Path) -> None:
    bench = replace(bench, case_timeout_s=row.timeout_s)
    seen = []
    for case in row.cases:
        for seed in range(SEEDS):
            r = attempt(bench, by_id[case], tmp_path, seed, mode=row.mode)
            if r.status != row.status or (r.reason or "") not in (row.reasons.split() or [""]):
                seen.append(f"seed {seed} of {case}: {r.status} {r.reason}: {r.message}")
    assert not seen
    zygotes = sum(launcher.zygote is not None for launcher in (bench.launcher, bench.debug_launcher))
    assert gone_within(os.environ[MARK], 2.0, but=zygotes), "a case left a process behind"
    innocent = attempt(bench, by_id[INNOCENT], tmp_path, examples=1)
    assert innocent.status == "pass", innocent.message


@pytest.mark.parametrize(("mode", "case"), [
    ("segfault", CALLEE), ("exit_7", CALLER), ("hang_in_c", CALLEE), ("raises_mute", CALLEE), ("write_behind", CALLER),
    ("unwritten", CALLEE), ("mutate_input", CALLEE), ("wrong_first", CALLEE), ("recycled_buffer", CALLEE),
    ("returns_short", CALLEE)])
def test_shrinks(bench: Bench, mode: str, case: str, tmp_path: Path) -> None:
    """A fault that needs three rows comes down to three rows of one element."""
    bench = replace(bench, case_timeout_s=2.0)
    r = attempt(bench, by_id[case], tmp_path, examples=40, shrink_s=20.0, mode=mode, rows="3")
    assert r.problem is not None, r.message
    assert r.problem["sizes"] == {"b": 3, "topk": 1, "vocab": 1}
    assert r.artifacts
    assert (tmp_path / r.artifacts / "reproduce.py").exists()


def test_deaths_are_cheap(bench: Bench, tmp_path: Path) -> None:
    """25 deaths in a row take a moment: the next process is a fork away."""
    r = attempt(bench, by_id[CALLEE], tmp_path, examples=40, shrink_s=60.0, mode="segfault", rows="3")
    assert r.status == "crash"
    assert r.duration_s["shrink"] < 15


def test_what_was_printed_is_told(bench: Bench, tmp_path: Path) -> None:
    r = attempt(bench, by_id[CALLEE], tmp_path, mode="print_and_die")
    assert "last words" in r.message


def test_sequence_is_told(bench: Bench, tmp_path: Path) -> None:
    r = attempt(bench, by_id[CALLEE], tmp_path, mode="wrong_once_in_a_while")
    assert "only after other calls" in r.message
    assert len(r.lineage) == 2


MIXED = {
    "fp32.int32.any.yes.no.no.callee": ("segfault", "crash", "signal"),
    "fp32.int32.any.yes.no.no.caller": ("write_behind", "fail", "oob_write"),
    "fp32.int32.any.yes.no.yes.callee": ("exit_0", "crash", "exit"),
    "fp32.int32.any.yes.no.yes.caller": ("mutate_input", "fail", "input_mutated"),
    "fp32.int32.any.yes.yes.no.callee": ("kill_parent", "crash", "signal"),
    "fp32.int32.any.yes.yes.no.caller": ("late", "fail", "late_write"),
    "fp32.int32.any.yes.yes.yes.callee": ("fork_and_die", "crash", "signal"),
    "fp32.int32.any.yes.yes.yes.caller": ("allocate", "oom", None),
    "fp32.int32.index.yes.no.no.callee": ("unwritten", "fail", "unwritten"),
    "fp32.int32.index.yes.no.no.caller": ("raises_keyboard_interrupt", "fail", "exception"),
    "fp32.int32.index.yes.no.yes.callee": ("close_all", "crash", "exit"),
    "fp32.int32.index.yes.no.yes.caller": ("hang_deaf", "timeout", None),
    "fp32.int32.index.yes.yes.no.callee": ("returns_touchy", "fail", "contract"),
}


def test_one_run_of_all_sorts(tmp_path: Path) -> None:
    """Two workers, thirteen kinds of harm in one run: each told in its own case, all others pass, nothing is left."""
    options = [f"--backend-option={key}={mode}" for key, (mode, _, _) in MIXED.items()]
    done = run(tmp_path / "run", "-n", "2", *options, "--examples=2", "--shrink-budget=0", "--case-timeout=3",
               "--case=deepselect.topk/values:dtype=fp32,index=int32,*", backend=HOSTILE)
    assert done.code == 1, done.text
    assert gone_within(done.mark, 2.0)
    wrong = []
    for r in done.run.records.values():
        key = ".".join(r.variant[k] for k in ("dtype", "index", "order", "values", "end", "offset", "output_idx"))
        want = MIXED.get(key, ("", "pass", None))[1:]
        if (r.status, r.reason) != want:
            wrong.append(f"{r.id}: {r.status} {r.reason}, not {want}: {r.message}")
    assert not wrong
    assert len(done.run.records) > len(MIXED)
