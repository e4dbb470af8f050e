"""The console script: each command answers, and says what is wrong with what it was given."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.backends import describe
from conformance.cli import COMMANDS, main
from conformance.collect import cases_at
from conformance.options import OPTIONS

ROOT = Path(__file__).resolve().parents[1]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_without_a_command_it_is_usage() -> None:
    assert main([]) == 4


@pytest.mark.parametrize(("argv", "word"), [
    (["rnu"], "did you mean run"),
    (["list", "deepselect.tokp*"], "unknown case"),
    (["describe", "deepselect.topk/valeus"], "did you mean"),
    (["matrix", "no-such-folder"], "no-such-folder"),
    (["diff", "no-such-folder", "neither"], "no-such-folder"),
    (["waivers", "no-such-file"], "no-such-file"),
    (["doctor", "--backend", "cppu"], "did you mean cpu"),
    (["selftest", "--module", "deepgem"], "did you mean deepgemm"),
    (["replay", "deepselect.topk/nothing"], "unknown case"),
    (["replay", "absent/problem.json"], "problem.json"),
])
def test_bad_input_is_usage_with_a_hint(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 4
    seen = capsys.readouterr()
    assert word in seen.err + seen.out


def test_list_and_describe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "deepselect.get*"]) == 0
    ids = capsys.readouterr().out.split()
    assert "deepselect.get_stride_requirement/values" in ids
    case = "deepselect.topk/rejects:misuse=topk_of_0"
    assert main(["describe", case]) == 0
    assert "topk of 0" in capsys.readouterr().out
    first = main(["list", "deepselect.topk/values*"])
    assert first == 0
    some = capsys.readouterr().out.split()[0]
    assert main(["describe", some, "--problems", "2"]) == 0
    out = capsys.readouterr().out
    assert "draws_sha256" in out
    assert out.count('"seed"') == 2


@pytest.mark.parametrize(("query", "said"), [
    ("deepgemm.bf16_gemm_nt", ["deepgemm.bf16_gemm_nt/values", "under the setting deterministic_algorithms =",
                               "a = bfloat16 [", "d = bfloat16 [", ", written", ") -> None"]),
    ("deepgemm.fp8_gemm_nt/values:...", ["a = (float8_e4m3fn [", "float32 ["]),
    ("deepselect.topk/rejects", ["misuse (universal)", "must raise one of RuntimeError"]),
    ("deepep.EPBuffer.combine", ["buffer = what an earlier call returned as buffer", "combined_x: bfloat16 ["]),
    ("tilekernels.quant.per_token_cast*", [": float8_e4m3fn ["]),
])
def test_describe_shows_the_call_of_an_op_or_prefix(query: str, said: list[str],
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", query]) == 0
    out = capsys.readouterr().out
    assert [s for s in said if s not in out] == [], out


def test_an_option_that_lists_may_occur_twice() -> None:
    parser = argparse.ArgumentParser()
    for name, kw in OPTIONS:
        parser.add_argument(name, **kw)
    args = parser.parse_args(["--module=deepselect", "--module=deepgemm,deepep", "--check", "values"])
    assert (args.module, args.check) == ("deepselect,deepgemm,deepep", "values")
    assert parser.parse_args([]).module == ""


def test_doctor_finds_the_cpu_modules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backend", "cpu", "--require", "deepselect,deepgemm"]) == 0
    out = capsys.readouterr().out
    assert "deepselect" in out
    assert "usable" in out


def test_importing_the_face_is_light() -> None:
    code = "import sys, conformance.cli; print(sorted({'torch', 'numpy', 'hypothesis'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_layers_hold() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([str(lint)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "0 broken" in done.stdout, done.stdout + done.stderr


def test_level_bringup_is_listed_and_described_at_the_tiles_of_a_backend(capsys: pytest.CaptureFixture[str]) -> None:
    case = "deepgemm.bf16_gemm_nt/values:out=bf16,c=none,a_major=k,b_major=k"
    assert main(["list", "--level", "bringup", "deepgemm.bf16*"]) == 0
    assert case in capsys.readouterr().out.splitlines()
    wanted = list(next(c for c in cases_at("bringup", (), describe("cpu", {})) if c.id == case).explicit)
    assert main(["describe", case, "--level", "bringup", "--problems", "999"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"sizes"')]
    assert [r["sizes"] for r in rows] == [{**r["sizes"], **sizes} for r, sizes in zip(rows, wanted, strict=True)]
    assert rows
    assert main(["describe", case.replace("out=bf16", "out=bf61"), "--level", "bringup"]) == 4
    assert "unknown case of level bringup" in capsys.readouterr().err
