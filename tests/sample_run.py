"""Builds run directories as a real run leaves them: every status, several backends, some 60 ops.

The names are public ones; the results are drawn from a fixed seed and mean nothing.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from conformance.identity import slug
from conformance.protocol import Description, description_to_json, supported, unsupported
from conformance.results import SCHEMA_VERSION, Record, verdict_of

_OPS = {
    "deepgemm": """
    bf16_gemm_nt bf16_gemm_nn bf16_gemm_tn bf16_gemm_tt fp8_gemm_nt fp8_gemm_nn fp8_fp4_gemm_nt
    m_grouped_bf16_gemm_nt_contiguous m_grouped_bf16_gemm_nt_masked m_grouped_fp8_gemm_nt_contiguous
    k_grouped_bf16_gemm_tn_contiguous fp8_einsum fp8_fp4_mqa_logits fp8_fp4_paged_mqa_logits
    tf32_hc_prenorm_gemm per_token_cast_to_fp8 per_block_cast_to_fp8 transform_sf_into_required_layout""",
    "tilekernels": """
    moe.topk_gate moe.normalize_weight moe.moe_topk_gate_forward quant.per_token_cast quant.per_block_cast
    quant.per_channel_cast quant.cast_back quant.swiglu_forward quant.swiglu_backward quant.norm_forward
    quant.norm_backward quant.unpack_from_e2m1fn_x2 engram.fused_weight engram.engram_gate_fwd engram.engram_hash
    mhc.expand_to_mhc_fwd mhc.mhc_post_fwd mhc.mhc_sinkhorn_fwd transform.apply_rotary rand.uniform""",
    "flashmla": "get_mla_metadata flash_mla_with_kvcache flash_mla_sparse_fwd flash_attn_varlen_func permute_q_b_proj",
    "deepep": "EPBuffer.dispatch EPBuffer.combine EPBuffer.lb_prefetch_weights EPBuffer.lb_reduce_grads comm.barrier",
    "deepselect": "topk get_stride_requirement",
    "tilelang": """
    copy gemm reduce_sum reduce_max reduce_absmax math.exp math.round cast.f32_f16 atomic_add dynamic_shapes cumsum""",
}

SURFACE = [f"{module}.{name}" for module, names in _OPS.items() for name in names.split()]
CHECKS = ("values", "repeat", "memory", "layout", "degenerate", "rejects")
START = 1_790_000_000.0


def variants(op: str) -> list[dict[str, str]]:
    if "gemm" in op:
        return [dict(zip(("out", "c"), v, strict=True)) for v in product(("bf16", "fp32"), ("none", "aliased"))]
    if op == "deepselect.topk":
        return [dict(zip(("dtype", "order"), v, strict=True)) for v in product(("bf16", "fp32"), ("any", "index"))]
    if "quant." in op or "cast" in op:
        return [{"fmt": f, "scale": s} for f in ("e4m3", "e2m1x2_lo") for s in ("fp32", "packed")]
    if op.startswith("deepep."):
        return [{"dtype": "bf16", "ranks": "4"}, {"dtype": "e4m3", "ranks": "4"}]
    return [{"dtype": "bf16"}]


def case_id(op: str, check: str, variant: Mapping[str, str]) -> str:
    keys = ",".join(f"{k}={v}" for k, v in variant.items())
    return f"{op}/{check}" + (f":{keys}" if keys else "")


def all_cases() -> list[tuple[str, str, dict[str, str]]]:
    return [(op, check, v) for op in SURFACE for check in CHECKS for v in variants(op)]


def passing(op: str, check: str, variant: Mapping[str, str], **changes: Any) -> Record:
    """A conforming record of a case."""
    case = case_id(op, check, variant)
    rng = random.Random(case)
    record = Record(
        case,
        op.partition(".")[0],
        op,
        dict(variant),
        check,
        "full",
        "pass",
        verdict="conforming",
        seed=1,
        draws_sha256=hashlib.sha256(case.encode()).hexdigest(),
        examples={"executed": 24, "unsupported": 0, "drawn": 64},
        replay=["conformance", "replay", case, "--seed=1"],
        backend="cpu",
        device="cpu:0",
        worker="gw0",
        duration_s={"draw": 0.01, "oracle": 0.02, "compile": 0.0, "run": 0.03, "compare": 0.01},
        numerics={
            "d": {
                "elements": 49152,
                "worst_ratio": round(rng.uniform(0.05, 0.7), 3),
                "max_ulp": rng.choice((0, 1, 1, 2)),
            }
        },
        vacuity=0.99,
        domain={"sizes": {"m": [1, 4097], "n": [8, 7168], "k": [8, 7168]}, "families": ["normal", "position", "ties"]},
        started=START,
        finished=START + 1,
    )
    return with_changes(record, **changes)


def with_changes(record: Record, **changes: Any) -> Record:
    """The record with these fields, and the verdict that follows."""
    changed = replace(record, **changes)
    return (
        changed
        if "verdict" in changes
        else replace(changed, verdict=verdict_of(changed.status, changed.expectation).value)
    )


_TAIL = """values: 1152 of 49152 elements of d are outside their bound
  worst   d[127, 96] observed 3.5, expected -0.8125, error over bound 4.1e+03
  pattern the whole last tile of n (columns 96..127), every row"""

FAILURES: dict[str, dict[str, Any]] = {
    "tail": dict(
        status="fail",
        phase="compare",
        reason="numeric",
        message=_TAIL,
        numerics={
            "d": {
                "elements": 49152,
                "worst_ratio": 4100.0,
                "max_ulp": 2113,
                "index": [127, 96],
                "expected": -0.8125,
                "observed": 3.5,
            }
        },
    ),
    "nan": dict(
        status="fail",
        phase="compare",
        reason="nonfinite",
        message="values: NaN where 1.0 is due; max keeps its second operand",
        numerics={
            "b": {
                "elements": 64,
                "worst_ratio": "Infinity",
                "index": [3],
                "expected": 1.0,
                "observed": "NaN",
            }
        },
    ),
    "oob": dict(
        status="fail",
        phase="teardown",
        reason="oob_write",
        message="memory: 32 bytes behind the end of indices were written",
        numerics={},
    ),
    "crash": dict(
        status="crash",
        phase="execute",
        reason="signal",
        message="the executor died by SIGSEGV in topk; 1 of 1 repeats alone",
        numerics={},
    ),
    "timeout": dict(status="timeout", phase="compile", message="compile took more than 300 s", numerics={}),
    "flaky": dict(
        status="flaky",
        phase="compare",
        reason="nondeterministic",
        message="3 of 20 repeats differ, only after deepgemm.bf16_gemm_nt",
    ),
    "error": dict(status="error", phase="compare", message="the oracle raised MemoryError", numerics={}),
    "oom": dict(
        status="oom", phase="prepare", message="the device has 58 MiB free, the problem needs 64 MiB", numerics={}
    ),
    "mistrusted": dict(status="mistrusted", phase="compare", message="zeros would have passed as well", vacuity=0.0),
    "skipped": dict(status="skipped", message="needs 8 devices, there are 4", numerics={}),
    "not_run": dict(status="not_run", message="time budget spent", numerics={}, finished=0.0),
}

Rule = Callable[[str, str, Mapping[str, str]], Record | None]


def cpu(op: str, check: str, variant: Mapping[str, str]) -> Record | None:
    if op in (
        "deepgemm.fp8_fp4_gemm_nt",
        "flashmla.flash_attn_varlen_func",
        "deepep.EPBuffer.lb_reduce_grads",
        "rand.uniform",
    ):
        return passing(op, check, variant, status="unsupported", message="not written yet", numerics={})
    if op == "tilelang.reduce_max" and check == "values":
        return passing(op, check, variant, **FAILURES["nan"], expectation="waived")
    if op == "tilelang.math.round" and check == "values":
        return passing(op, check, variant, **FAILURES["nan"], expectation="waiver_expired")
    return passing(op, check, variant)


def ascend(op: str, check: str, variant: Mapping[str, str]) -> Record | None:
    planted = {
        ("deepgemm.bf16_gemm_nt", "values"): "tail",
        ("deepgemm.m_grouped_bf16_gemm_nt_masked", "memory"): "oob",
        ("deepselect.topk", "degenerate"): "crash",
        ("tilekernels.quant.swiglu_forward", "repeat"): "flaky",
        ("flashmla.flash_mla_with_kvcache", "layout"): "timeout",
        ("deepgemm.fp8_einsum", "values"): "oom",
        ("tilekernels.engram.engram_hash", "values"): "mistrusted",
        ("deepep.EPBuffer.combine", "values"): "skipped",
        ("tilekernels.mhc.mhc_post_fwd", "values"): "error",
        ("tilelang.cumsum", "values"): "not_run",
    }
    if "einsum" in op and check != "values":
        return None
    if op.startswith("tilekernels.mhc.mhc_sinkhorn") or "fp4" in op:
        return passing(op, check, variant, status="unsupported", message="no kernel yet", numerics={}, examples={})
    kind = planted.get((op, check))
    base = passing(op, check, variant, backend="ascend", device="npu:0")
    if "e2m1x2_lo" in variant.values():
        return with_changes(base, status="unsupported", message="no 4-bit formats", numerics={}, examples={})
    return with_changes(base, **FAILURES[kind]) if kind else base


def simulator(op: str, check: str, variant: Mapping[str, str]) -> Record | None:
    base = passing(op, check, variant, backend="mychip", device="sim")
    if op in ("deepgemm.bf16_gemm_nt", "deepgemm.bf16_gemm_nn", "deepselect.topk", "tilekernels.quant.per_token_cast"):
        limits = [{"field": "m", "multiple_of": 128}] if "gemm" in op else []
        return with_changes(
            base,
            examples={"executed": 9, "unsupported": 55 if limits else 0, "drawn": 64},
            domain={"sizes": {"m": [128, 512]}, "families": ["position"], "limits": limits},
        )
    return with_changes(base, status="unsupported", message="", numerics={}, examples={})


MYCHIP = Description(
    "mychip",
    {
        "deepgemm.bf16_*": supported(limits=({"field": "m", "multiple_of": 128},), tiles={"m": 128}),
        "deepselect.*": supported(),
        "tilekernels.quant.per_token_cast": supported(path="emulated"),
        "deepgemm.fp8*": unsupported("no 8-bit multiplier", "hardware"),
        "deepep.*": unsupported("one card only", "by_design"),
    },
    platform="simulator",
)
ASCEND = Description(
    "ascend",
    {
        "deepgemm.*": supported(),
        "tilekernels.*": supported(),
        "flashmla.*": supported(limits=({"field": "dtype", "in": ["bf16"]},)),
        "tilekernels.mhc.mhc_sinkhorn*": unsupported("waits for the next release"),
        "deepep.*": supported(),
        "deepselect.*": supported(),
        "tilelang.*": supported(),
    },
)


def picture() -> bytes:
    """A PNG of 128 x 128 elements whose last tile of columns is wrong."""
    right, wrong = bytes((226, 240, 230)), bytes((200, 40, 30))
    rows = b"".join(b"\0" + b"".join(wrong if x >= 96 and x * y % 5 else right for x in range(128)) for y in range(128))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 128, 128, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def with_evidence(folder: Path, record: Record) -> Record:
    """The record with a minimal problem, and a folder of evidence written for it."""
    sizes = {"m": 128, "n": 128, "k": 8}
    problem = {
        "op": record.op,
        "variant": record.variant,
        "sizes": sizes,
        "values": {},
        "family": "position",
        "seed": 7,
    }
    shown = replace(record, problem=problem, artifacts=f"artifacts/{slug(record.id)}")
    place = folder / f"artifacts/{slug(record.id)}"
    place.mkdir(parents=True)
    (place / "picture.png").write_bytes(picture())
    (place / "reproduce.py").write_text("import numpy as np\n")
    (place / "observed.npy").write_bytes(b"\x93NUMPY")
    (place / "problem.json").write_text(json.dumps(problem))
    return shown


def write_run(
    folder: Path,
    records: Iterable[Record],
    *,
    backend: str = "cpu",
    description: Description | None = None,
    planned: Iterable[str] | None = None,
    closed: bool = True,
    **info: Any,
) -> Path:
    """A run directory of these records; a failing one gets evidence and a minimal problem."""
    folder.mkdir(parents=True)
    records = list(records)
    with (folder / "results.jsonl").open("w") as results, (folder / "problems.jsonl").open("w") as problems:
        for record in records:
            shown = with_evidence(folder, record) if record.status in ("fail", "crash", "timeout", "flaky") else record
            results.write(json.dumps(shown.to_json()) + "\n")
            digest = hashlib.sha256(record.id.encode()).hexdigest()
            problems.write(
                json.dumps(
                    {
                        "id": record.id,
                        "problem": {"sizes": {"m": 3}, "seed": 7},
                        "inputs": digest,
                        "outputs": digest,
                    }
                )
                + "\n"
            )
    header = {
        "schema_version": SCHEMA_VERSION,
        "suite_version": "0.1.0",
        "commit": "4f2a91c0d7e85b36",
        "command": ["pytest", "-n", "auto", f"--backend={backend}"],
        "seed": 1,
        "level": "full",
        "claim": None,
        "host": {"os": "Linux", "python": "3.11"},
        "device": f"{backend}:0",
        "backend": backend,
        "description": description_to_json(description or Description(backend, {"*": supported()})),
        "versions": {"numpy": "2.3.0", "torch": "2.13.0"},
        "planned": [r.id for r in records] if planned is None else list(planned),
        "started": START,
        "finished": START + 812 if closed else None,
        "closed": closed,
        **info,
    }
    (folder / "run.json").write_text(json.dumps(header, indent=1))
    return folder


def records_of(rule: Rule) -> list[Record]:
    return [r for r in (rule(*case) for case in all_cases()) if r is not None]


def write_sample(root: Path) -> list[Path]:
    """Four runs: cpu, ascend, a simulator of a new chip, and an nvidia run that was cut off."""
    half = [
        replace(r, backend="nvidia", device="cuda:0") for r in records_of(cpu) if r.module in ("deepgemm", "deepselect")
    ]
    cut = write_run(
        root / "nvidia-20260921T101500Z",
        half[:60],
        backend="nvidia",
        planned=[r.id for r in half],
        closed=False,
        level="core",
    )
    with (cut / "results.jsonl").open("a") as f:
        f.write('{"id": "deepgemm.fp8_gemm_nt/val')
    return [
        write_run(root / "cpu-20260921T090000Z", records_of(cpu)),
        write_run(root / "ascend-20260921T093000Z", records_of(ascend), backend="ascend", description=ASCEND),
        cut,
        write_run(
            root / "mychip-20260921T110000Z",
            records_of(simulator),
            backend="mychip",
            description=MYCHIP,
            level="bringup",
        ),
    ]
