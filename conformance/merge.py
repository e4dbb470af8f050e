"""One run out of several shards of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from conformance.collect import UsageError
from conformance.journal import Journal, RunDirError, differing, lost_evidence
from conformance.progress import bad_line
from conformance.results import EXIT_INTERNAL, BadLine, Record, Run, exit_code, read_lines, read_run


def merge_runs(shards: list[Path], out: Path) -> tuple[str, int]:
    """Write the union of the shards to `out`; returns a summary and the exit code.

    Raises UsageError where they are not shards of one run, or a case stands in two with
    different verdicts.
    """
    runs = [read_run(p) for p in shards]
    bad: list[BadLine] = [b for r in runs for b in r.bad]
    first = runs[0].info
    for run in runs[1:]:
        field = differing(first, run.info)
        if field:
            msg = f"{run.path} is no shard of the run in {runs[0].path}: they differ in {field}"
            raise UsageError(msg)
    records: dict[str, Record] = {}
    for run in runs:
        for case_id, record in run.records.items():
            other = records.get(case_id)
            if other is not None and other.verdict != record.verdict:
                msg = f"{case_id} is {other.verdict} in one shard, {record.verdict} in {run.path}; run it again alone"
                raise UsageError(msg)
            records[case_id] = record
    if (out / "run.json").exists():
        msg = f"{out} holds a run already; name another --out"
        raise UsageError(msg)
    try:
        _write(runs, records, bad, out)
    except (RunDirError, OSError) as e:
        return f"not merged: {e}", EXIT_INTERNAL
    bad.extend(lost_evidence(out, records.values()))
    lines = [bad_line(b) for b in bad[:5]]
    lines.append(f"{len(records)} cases of {len(runs)} shards in {out}")
    return "\n".join(lines), exit_code(records.values())


def _write(runs: list[Run], records: dict[str, Record], bad: list[BadLine], out: Path) -> None:
    first = runs[0].info
    journal = Journal(out, resume=False)
    info: dict[str, Any] = {**first, "command": ["conformance", "merge", *(str(r.path) for r in runs)],
                            "planned": sorted({i for r in runs for i in r.info.get("planned", ())}),
                            "started": min(r.info.get("started", 0) for r in runs)}
    journal.write_info(info)
    for run in runs:
        for file in sorted(run.path.glob("problems*.jsonl")):
            for row in read_lines(file, bad):
                journal.append_problem(row)
        if (run.path / "artifacts").is_dir():
            shutil.copytree(run.path / "artifacts", out / "artifacts", dirs_exist_ok=True)
    journal.close(records.values(), info)
