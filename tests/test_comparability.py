"""Other people's criteria stand beside the verdict, and outputs of one run are set beside another's."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.engine import comparability, kept_outputs
from conformance.engine.attempt import Attempt
from conformance.engine.judge import Seen
from conformance.model import Problem, Variant
from conformance.results import Record
from references.expected import Exact, Within
from references.formats import codec

OP, CASE = "deepgemm.bf16_gemm_nt", "deepgemm.bf16_gemm_nt/values:out=fp32"


def attempt(values: list[float], golden: list[float], inputs: str = "i1", seed: int = 0) -> Attempt:
    problem = Problem(OP, Variant({"out": "fp32"}), {"m": 1}, {}, "normal", seed)
    seen = Seen(outputs={"d": codec.encode(np.array(values), "fp32"), "n": np.arange(2, dtype=np.int32)},
                formats={"d": "fp32", "n": "int32"})
    expected = {"d": Within(np.array(golden), np.ones(len(golden))), "n": Exact(np.arange(2, dtype=np.int32))}
    return Attempt(problem, seen=[seen], examples=[object()], expected=[expected], digests={"inputs": inputs})


def record() -> Record:
    return Record(CASE, "deepgemm", OP, {}, "values", "core", "pass")


def told(r: Record) -> dict[str, Any]:
    return r.numerics["d"]["criteria"]


def test_problems_are_counted() -> None:
    r = record()
    comparability.note(r, attempt([1.0, 2.0], [1.0, 2.0]))
    comparability.note(r, attempt([1.0, 2.5], [1.0, 2.0]))
    assert told(r)["allclose"] == {"problems": 2, "rejected": 1, "worst": 0.5, "limit": 0.0}
    assert told(r)["calc_diff"]["rejected"] == 1
    assert "n" not in r.numerics
    json.dumps(r.numerics, allow_nan=False)


def test_special_values_stay_json() -> None:
    r = record()
    comparability.note(r, attempt([np.nan, np.inf], [np.nan, 1.0]))
    json.dumps(r.numerics, allow_nan=False)
    assert told(r)["allclose"]["rejected"] == 1


def test_a_criterion_that_fails_is_told_and_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        msg = "no"
        raise ValueError(msg)

    monkeypatch.setattr(comparability, "criteria", broken)
    r = record()
    comparability.note(r, attempt([1.0], [1.0]))
    assert list(told(r)) == ["none: ValueError"]


def test_a_reference_run_gives_ratios(tmp_path: Path) -> None:
    kept_outputs.store(tmp_path, CASE, attempt([1.0, 2.125], [1.0, 2.0]))
    r = record()
    comparability.note(r, attempt([1.0, 2.5], [1.0, 2.0]), tmp_path)
    row = told(r)["dual_benchmark"]
    assert (row["problems"], row["rejected"], row["level"]) == (1, 1, "L2")
    assert row["worst"] == pytest.approx(4.0 / 1.2)
    assert told(r)["dual_benchmark"]["limit"] == 1.0


@pytest.mark.parametrize("other", [{"inputs": "i2"}, {"seed": 1}])
def test_only_the_same_call_is_compared(tmp_path: Path, other: dict[str, Any]) -> None:
    kept_outputs.store(tmp_path, CASE, attempt([1.0, 2.0], [1.0, 2.0]))
    assert kept_outputs.load(tmp_path, CASE, attempt([1.0, 2.0], [1.0, 2.0]))
    assert not kept_outputs.load(tmp_path, CASE, attempt([1.0, 2.0], [1.0, 2.0], **other))
    assert not kept_outputs.load(tmp_path, CASE + "x", attempt([1.0, 2.0], [1.0, 2.0]))


class Bomb:
    def __reduce__(self) -> Any:
        return (Path("/nowhere/planted").touch, ())


@pytest.mark.parametrize("kind", ["garbage", "pickle", "other shape", "huge", "folder", "truncated", "flipped"])
def test_a_hostile_file_is_passed_over(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a = attempt([1.0, 2.0], [1.0, 2.0])
    kept_outputs.store(tmp_path, CASE, a)
    path = kept_outputs.file_of(tmp_path, CASE, a)
    if kind == "garbage":
        path.write_bytes(b"\x00" * 100)
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:-30])
    elif kind == "flipped":
        data = bytearray(path.read_bytes())
        data[45:90] = bytes(b ^ 0xFF for b in data[45:90])
        path.write_bytes(data)
    elif kind == "pickle":
        with zipfile.ZipFile(path, "w") as z:
            z.writestr("out:d.npy", pickle.dumps(Bomb()))
    elif kind == "other shape":
        np.savez(path, **{"out:d": np.zeros(3, np.float32)})
    elif kind == "huge":
        monkeypatch.setattr(kept_outputs, "MOST_BYTES", -(1 << 16))
    else:
        path.unlink()
        path.mkdir()
    r = record()
    comparability.note(r, a, tmp_path)
    assert "dual_benchmark" not in told(r)
