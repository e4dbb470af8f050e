"""One run out of several shards of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from conformance.collect import UsageError
from conformance.foreign import BadLine, changed_files, is_plain, plain_files, read_lines
from conformance.identity import parse_id
from conformance.journal import Journal, RunDirError, differing, lost_evidence
from conformance.progress import bad_line
from conformance.results import EXIT_INTERNAL, Record, Run, exit_code, newer_schema, read_run, verdict_of


def merge_runs(shards: list[Path], out: Path) -> tuple[str, int]:
    """Write the union of the shards to `out`; returns a summary and the exit code.

    A planned case that no shard has a result of gets the line `not_run`. Raises UsageError where they are not shards
    of one run, were edited, or a case stands in two with different verdicts.
    """
    runs = [read_run(p) for p in shards]
    bad: list[BadLine] = [b for r in runs for b in r.bad]
    first = runs[0].info
    for run in runs:
        if why := newer_schema(run.info):
            raise UsageError(f"{run.path}: {why}")
        if changed := changed_files(run.path):
            msg = f"{run.path}: {changed[0].file} was {changed[0].why}; merging would hide that, run the shard again"
            raise UsageError(msg)
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
    lost = _without_result(runs, records, bad)
    records |= lost
    if (out / "run.json").exists():
        msg = f"{out} holds a run already; name another --out"
        raise UsageError(msg)
    try:
        _write(runs, records, bad, out)
    except (RunDirError, OSError) as e:
        return f"not merged: {e}", EXIT_INTERNAL
    bad.extend(lost_evidence(out, records.values()))
    lines = [bad_line(b) for b in bad[:5]]
    lines.append(f"{len(records)} cases of {len(runs)} shards in {out}"
                 + (f", {len(lost)} of them planned and without a result" if lost else ""))
    return "\n".join(lines), exit_code(records.values())


def _without_result(runs: list[Run], records: dict[str, Record], bad: list[BadLine]) -> dict[str, Record]:
    """A line for every case that a shard planned and none ended."""
    info = runs[0].info
    claim = info.get("claim") if isinstance(info.get("claim"), dict) else {}
    out: dict[str, Record] = {}
    for case_id in dict.fromkeys(i for r in runs for i in r.info.get("planned", ()) if isinstance(i, str)):
        if case_id in records:
            continue
        try:
            op, check, keys = parse_id(case_id)
        except ValueError as e:
            bad.append(BadLine("run.json", 0, f"planned: {e}"))
            continue
        record = Record(case_id, op.partition(".")[0], op, keys, check, str(info.get("level", "")), "not_run",
                        message="planned, but no shard has its result", backend=str(info.get("backend", "")))
        record.verdict = verdict_of("not_run", "none", required=op in claim.get("ops", ())).value
        out[case_id] = record
    return out


def _no_evidence(folder: str, names: list[str]) -> list[str]:
    """What is not copied: links, which may lead anywhere, pipes and devices."""
    paths = [Path(folder) / n for n in names]
    return [p.name for p in paths if p.is_symlink() or not (p.is_dir() or is_plain(p))]


def _write(runs: list[Run], records: dict[str, Record], bad: list[BadLine], out: Path) -> None:
    first = runs[0].info
    journal = Journal(out, resume=False)
    info: dict[str, Any] = {**first, "command": ["conformance", "merge", *(str(r.path) for r in runs)],
                            "planned": sorted({i for r in runs for i in r.info.get("planned", ())}),
                            "started": min(r.info.get("started", 0) for r in runs)}
    journal.write_info(info)
    for run in runs:
        for file in plain_files(run.path, "problems*.jsonl", bad):
            for row in read_lines(file, bad):
                journal.append_problem(row)
        if (run.path / "artifacts").is_dir():
            shutil.copytree(run.path / "artifacts", out / "artifacts", dirs_exist_ok=True, ignore=_no_evidence)
    journal.close(records.values(), info)
