"""What is kept of a failure is of one and the same call: its inputs, what was expected, what came, and the script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conformance.bench import bench_of
from conformance.collect import find_case
from conformance.engine.effort import EFFORTS, Config
from conformance.engine.run import run_case
from references.formats import codec

CASE = "deepgemm.bf16_gemm_nt/values:out=fp32,c=none,a_major=k,b_major=k"
ROOT = Path(__file__).resolve().parents[1]


def product_of(a: np.ndarray, b: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """a @ b.T of BF16 codes. `expected` must be that: two sums of exact products in double precision, each within k
    roundings of the sum of magnitudes."""
    x, y = codec.decode(a, "bf16"), codec.decode(b, "bf16")
    assert (np.abs(expected - x @ y.T) <= 2 * x.shape[1] * 2.0**-53 * (np.abs(x) @ np.abs(y).T)).all()
    return np.asarray(x @ y.T)


def test_inputs_expected_observed_and_script_belong_together(tmp_path: Path) -> None:
    options = {"knobs": "drop_tail=1"}
    with bench_of("cpu", options) as bench:
        record = run_case(find_case(CASE), Config(bench, EFFORTS["core"], 3, tmp_path, "cpu", options))
    assert (record.status, record.reason) == ("fail", "numeric"), record.message
    folder = tmp_path / record.artifacts
    a, b, expected, observed, wrong = (np.load(folder / f"{n}.npy") for n in (
        "in.a", "in.b", "expected.d", "observed.d", "wrong.d"))
    assert record.problem["values"].get("alpha") is None
    product = product_of(a, b, expected)
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    assert abs(observed[at] - product[at]) > 1e-3 * abs(product[at])
    done = subprocess.run([sys.executable, folder / "reproduce.py"], cwd=ROOT, check=True, stdout=subprocess.PIPE,
                          text=True)
    told = f"was wrong: d at {list(at)}: observed {float(observed[at])!r}, expected {float(expected[at])!r}"
    assert told in done.stdout, done.stdout
    assert f"{observed[at]:.4g}"[:4] in done.stdout.partition("was wrong")[0]


def test_a_wrong_call_after_a_refused_one_fails_and_its_own_evidence_is_kept(tmp_path: Path) -> None:
    options = {"knobs": "drop_tail=1"}
    case = find_case("deepgemm.bf16_gemm_nt/rejects:misuse=a_in_fp16")
    with bench_of("cpu", options) as bench:
        record = run_case(case, Config(bench, EFFORTS["core"], 3, tmp_path, "cpu", options))
    assert (record.status, record.reason) == ("fail", "numeric"), record.message
    assert record.message.startswith("after the refused call, a good one: ")
    folder = tmp_path / record.artifacts
    a, b, expected = (np.load(folder / f"{n}.npy") for n in ("in.a", "in.b", "expected.d"))
    product_of(a, b, expected)


@pytest.mark.parametrize("error", [IndexError("planted"), ValueError("planted"), OSError(28, "planted")])
def test_no_verdict_hangs_on_its_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken(*args: object, **more: object) -> str:
        raise error

    monkeypatch.setattr("conformance.engine.run.keep", broken)
    options = {"knobs": "drop_tail=1"}
    with bench_of("cpu", options) as bench:
        record = run_case(find_case(CASE), Config(bench, EFFORTS["core"], 3, tmp_path, "cpu", options))
    assert (record.status, record.reason) == ("fail", "numeric"), record.message
    assert "the evidence could not be kept: " in record.message
    assert "planted" in record.message
