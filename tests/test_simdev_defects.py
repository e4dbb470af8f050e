"""Each defect of the simulated accelerator ends in its own status and reason; what is no defect passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import simbench
from simbench import CAST, GEMM, TOPK, TOPK_CALLER, attempt, sim_bench

from conformance.engine.attempt import Bench


@dataclass(frozen=True)
class Row:
    """What a defect must end in: status, and one of these reasons (blank for none)."""

    defect: str
    status: str
    reasons: str = ""
    cases: tuple[str, ...] = (GEMM,)


LAYOUT = GEMM.replace("/values", "/layout")
ADDED = GEMM.replace("out=bf16,c=none", "out=fp32,c=apart")
ALL = (GEMM, TOPK, TOPK_CALLER, CAST)
VALUE = "numeric nonfinite"
TILES = ("drop_k_tail", "second_k_twice", "dirty_k_tail", "swap_columns", "stale_a", "stale_b", "keep_sums")
TABLE = (
    Row("", "pass", "", ALL),
    Row("reverse_k", "pass", "", (GEMM, ADDED)),
    Row("eager", "pass", "", ALL),
    *(Row(tile, "fail", VALUE, (GEMM, ADDED)) for tile in TILES),
    *(Row(tile, "fail", "unwritten", (GEMM, ADDED)) for tile in ("drop_m_tail", "drop_n_tail", "short_m_tail")),
    Row("truncate", "fail", VALUE),
    Row("topk_drop_tail", "fail", "numeric", (TOPK, TOPK_CALLER)),
    Row("topk_border_twice", "fail", "token_duplicated", (TOPK, TOPK_CALLER)),
    Row("topk_fill", "fail", "numeric", (TOPK.replace("end=no", "end=yes"),)),
    Row("cast_stale_scale", "fail", VALUE, (CAST,)),
    Row("cast_truncate", "fail", VALUE, (CAST,)),
    Row("ignore_stride", "fail", "numeric nonfinite token_duplicated index_range", (LAYOUT, TOPK)),
    Row("packed_output", "fail", "oob_write unwritten numeric", (LAYOUT, TOPK, TOPK_CALLER)),
    Row("behind", "fail", "oob_write", (GEMM, TOPK_CALLER, CAST)),
    Row("before", "fail", "oob_write", ALL),
    Row("far_behind", "fail", "oob_write", ALL),
    Row("unwritten", "fail", "unwritten", ALL),
    Row("late_write", "fail", "late_write", ALL),
    Row("not_waiting", "fail", "late_write", ALL),
    Row("mutate_input", "fail", "input_mutated", ALL),
    Row("first_call", "fail", "numeric nonfinite index_range", ALL),
    Row("once", "flaky", "numeric nonfinite index_range"),
    Row("refuse", "fail", "exception", ALL),
    Row("fault", "crash", "signal", ALL),
    Row("segfault", "crash", "signal", ALL),
    Row("dies", "crash", "signal", ALL),
    Row("hang", "timeout", "", ALL),
    Row("leak", "oom", "", ALL),
    Row("shared_block", "fail", "alias", (TOPK, CAST)),
)
by_id = simbench.cases()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with sim_bench(tmp_path_factory.mktemp("simdev")) as b:
        yield b


@pytest.mark.parametrize("row", TABLE, ids=lambda r: r.defect or "none")
def test_told_apart(bench: Bench, row: Row, tmp_path: Path) -> None:
    seen = []
    for case in row.cases:
        r = attempt(replace(bench, case_timeout_s=5.0), by_id[case], tmp_path, defect=row.defect)
        if r.status != row.status or (r.reason or "") not in (row.reasons.split() or [""]):
            seen.append(f"{case}: {r.status} {r.reason}: {r.message}")
        simbench.reset_device()
    assert not seen, "\n".join(seen)


def test_table_is_whole() -> None:
    from simdev.runtime import defects

    untold = {name for name, _ in defects()} - {row.defect for row in TABLE}
    assert untold == {"stays_lost"}, "a defect has no row; stays_lost is told in test_simdev_many.py"
