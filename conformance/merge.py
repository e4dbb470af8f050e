"""One run out of several shards of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from conformance.collect import UsageError
from conformance.journal import Journal, differing, lost_evidence
from conformance.progress import bad_line
from conformance.results import BadLine, Record, exit_code, read_lines, read_run


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
    journal = Journal(out, resume=False)
    info: dict[str, Any] = {**first, "command": ["conformance", "merge", *map(str, shards)],
                            "planned": sorted({i for r in runs for i in r.info.get("planned", ())}),
                            "started": min(r.info.get("started", 0) for r in runs)}
    journal.write_info(info)
    for run in runs:
        for row in read_lines(run.path / "problems.jsonl", bad) if (run.path / "problems.jsonl").exists() else ():
            journal.append_problem(row)
        if (run.path / "artifacts").is_dir():
            shutil.copytree(run.path / "artifacts", out / "artifacts", dirs_exist_ok=True)
    journal.close(records.values(), info)
    bad.extend(lost_evidence(out, records.values()))
    lines = [bad_line(b) for b in bad[:5]]
    lines.append(f"{len(records)} cases of {len(runs)} shards in {out}")
    return "\n".join(lines), exit_code(records.values())
