"""The `compiler` backend with the real TileLang: artefacts, a plug-in's own target, and programs that go wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import ROOT

from adapters.compiler import nvcc
from adapters.compiler.lower import LoweredToNothing, leaves_a_trace, used
from conformance import backends
from conformance.bench import bench_of
from conformance.collect import find_case
from conformance.engine.effort import EFFORTS, Config
from conformance.engine.run import run_case
from conformance.results import Record

CAST = "tilelang.cast/compile:out=int8,dtype=fp32"
CLAMP = "tilelang.clamp/compile:dtype=fp32"
COPY = "tilelang.copy/compile:dtype=fp32,fill=none"


@pytest.fixture(autouse=True)
def plug_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))


def compiled(tmp_path: Path, target: str, *cases: str) -> list[Record]:
    with bench_of("compiler", {"target": target}) as bench:
        config = Config(bench, EFFORTS["full"], 0, tmp_path, "compiler", {"target": target})
        return [run_case(find_case(c), config) for c in cases]


def artefact(record: Record) -> dict[str, Any]:
    assert record.status == "pass", record.message
    assert record.artefact is not None
    return record.artefact


def test_ascend_gives_a_text_each(tmp_path: Path) -> None:
    first, again, other, gone = compiled(
        tmp_path, "ascend", CLAMP, CLAMP, CAST, "tilelang.transpose/compile:dtype=fp32")
    assert artefact(first)["kind"] == "text"
    assert artefact(first)["uses"] == ["out", "x"]
    assert artefact(first)["sha256"] == artefact(again)["sha256"]
    assert artefact(first)["sha256"] != artefact(other)["sha256"]
    assert gone.status == "unsupported"
    assert "no T.transpose" in gone.message


@pytest.mark.skipif(nvcc.nvcc() is None, reason="no nvcc here")
def test_sm_90a_gives_a_cubin_each(tmp_path: Path) -> None:
    first, again = compiled(tmp_path, "sm_90a", CLAMP, CLAMP)
    assert artefact(first)["kind"] == "cubin"
    assert artefact(first)["nbytes"] > 1000
    assert artefact(first)["sha256"] == artefact(again)["sha256"]


@pytest.mark.skipif(nvcc.nvcc() is None, reason="no nvcc here")
def test_what_nvcc_says_stands_in_the_record(tmp_path: Path) -> None:
    (record,) = compiled(tmp_path, "planted_targets:REFUSED", CLAMP)
    assert (record.status, record.phase, record.reason) == ("fail", "compile", "compile")
    assert "planted here" in record.message


def test_a_plug_in_brings_a_target(tmp_path: Path) -> None:
    right, outside = compiled(tmp_path, "planted_targets:OWN", CLAMP, CLAMP.replace("fp32", "fp16"))
    assert artefact(right)["kind"] == "text"
    assert outside.status == "unsupported"
    assert "one of four" in outside.message


def test_a_program_lowered_to_nothing_is_caught(tmp_path: Path) -> None:
    unwritten, dropped = compiled(tmp_path, "planted_targets:PLANTED", COPY, CLAMP)
    for record, said in ((unwritten, "never touches out"), (dropped, "the same without the feature")):
        assert (record.status, record.reason) == ("fail", "compile"), record.message
        assert said in record.message


def test_a_compiler_that_dies_is_a_crash(tmp_path: Path) -> None:
    """See the finding about FP4 in docs/findings.md."""
    gather = "tilelang.gather/compile:dtype=fp32,index=int32"
    died, after = compiled(tmp_path, "planted_targets:PLANTED_ASCEND", CAST, gather)
    assert (died.status, died.phase, died.reason) == ("crash", "compile", "signal"), died.message
    assert "SIGFPE" in died.message
    assert after.status == "fail"
    assert "gather" in after.message


@pytest.mark.parametrize("options", [{}, {"target": "sm_80"}, {"target": "planted_targets:_broken"}])
def test_a_target_that_is_none_is_told(options: dict[str, str]) -> None:
    with pytest.raises(backends.BackendUnusable, match=r"target|Target"):
        backends.describe("compiler", options)


def test_other_modules_have_nothing_to_compile() -> None:
    description = backends.describe("compiler", {"target": "ascend"})
    assert description.platform == "compiler"
    assert description.versions["tilelang"]
    assert not description.ops["*"].supported
    assert description.ops["tilelang.copy"].supported


def test_a_name_counts_where_something_is_done_with_it() -> None:
    text = """
    extern "C" __global__ void k_kernel(float* out, float* x, float* y) {
      // out is spoken of
      float v = x[0]; tl::tma_store(y_desc, v);
    }
    __simt_vf__ void k_kernel_simt_vf_0(float* z) { }
    void k_outer(float* z) { asc_vf_call<k_kernel_simt_vf_0>(cce::dim3(128), z); }
    """
    assert used(text, ("out", "x", "y", "z")) == ("x", "y")


def test_the_same_text_without_the_feature_is_no_trace() -> None:
    assert leaves_a_trace("a + b", lambda: "a", "an op")
    with pytest.raises(LoweredToNothing, match="an op"):
        leaves_a_trace("a", lambda: "a", "an op")

    def refused() -> str:
        raise ValueError

    assert not leaves_a_trace("a", refused, "an op")


def test_functions_that_a_target_lacks_are_named_rightly() -> None:
    from adapters.upstream.tilelang_programs import elementwise
    from adapters.upstream.tilelang_programs.target import FUNCTION_NAMES, TARGETS

    assert tuple(elementwise.FUNCTIONS) == FUNCTION_NAMES
    for target in TARGETS.values():
        assert target.lacks("float32") | target.lacks("float16") | target.lacks("bfloat16") < set(FUNCTION_NAMES)
    assert TARGETS["sm_90a"].lacks("float16") == {"log1p"}
