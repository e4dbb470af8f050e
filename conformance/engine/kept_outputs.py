"""Outputs of one run for another to compare with: `--keep-outputs` writes them, `--reference-run` reads them.

A file a problem, `outputs/<case>/<key>.npz`, with the codes of every output. The key is a digest of the problem and of
the inputs' bits: only results of exactly the same call are ever set beside each other.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import numpy as np

from conformance.engine.attempt import Attempt
from conformance.identity import slug

FOLDER = "outputs"
MOST_BYTES = 64 << 20
"""of one problem's outputs; larger ones are not kept, and not read"""


def file_of(run_dir: Path, case_id: str, attempt: Attempt) -> Path:
    """Where the outputs of an attempt stand, or would stand."""
    what = json.dumps([attempt.problem.to_json(), attempt.digests.get("inputs", "")], sort_keys=True)
    return run_dir / FOLDER / slug(case_id) / f"{hashlib.sha256(what.encode()).hexdigest()[:24]}.npz"


def store(run_dir: Path, case_id: str, attempt: Attempt) -> None:
    """Keep the outputs of the judged run. Raises OSError."""
    if not attempt.seen or not attempt.digests:
        return
    outputs = attempt.seen[-1].outputs
    if sum(a.nbytes for a in outputs.values()) > MOST_BYTES:
        return
    path = file_of(run_dir, case_id, attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as f:
        np.savez_compressed(f, **{f"out:{name}": a for name, a in outputs.items()})


def load(run_dir: Path, case_id: str, attempt: Attempt) -> dict[str, np.ndarray]:
    """The outputs of the same call in another run, by name, of the same shape and dtype; empty where there are none.

    The file is a stranger's: nothing in it is executed, and nothing larger than `MOST_BYTES` is read.
    """
    if not attempt.seen or not attempt.digests:
        return {}
    try:
        path = file_of(run_dir, case_id, attempt)
        if not path.is_file():
            return {}
        with zipfile.ZipFile(path) as z:
            if sum(i.file_size for i in z.infolist()) > MOST_BYTES + (1 << 16):
                return {}
        with np.load(path, allow_pickle=False) as kept:
            mine = attempt.seen[-1].outputs
            found = {name: kept[f"out:{name}"] for name in mine if f"out:{name}" in kept.files}
    except Exception:  # a stranger's file, of which a broken one is none
        return {}
    # What is no array comes as raw bytes.
    return {name: a for name, a in found.items() if isinstance(a, np.ndarray)
            and (a.shape, a.dtype) == (mine[name].shape, mine[name].dtype)}
