"""What `get_stride_requirement` may return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from references.expected import Array, Expected, Inputs, Joint, Judgement, Problem


def get_stride_requirement(problem: Problem, inputs: Inputs, profile: Mapping[str, Any]) -> dict[Any, Expected]:
    """Two positive multiples of 16, the very numbers that the backend's description states.

    Reads profile["requirements"]: `input_row_bytes`, `output_row_bytes`.
    """
    declared = profile["requirements"]

    def check(got: Mapping[str, Array]) -> dict[str, Judgement]:
        out = {}
        for name in ("input_row_bytes", "output_row_bytes"):
            n, want = int(got[name]), declared.get(name)
            note = ""
            if n <= 0 or n % 16:
                note = f"{name} is {n}; it must be a positive multiple of 16"
            elif n != want:
                note = f"{name} is {n}; the backend's description says {want}"
            shown = None if want is None else np.array(want)
            out[name] = Judgement(np.array(bool(note)), shown, None, "contract", note)
        return out

    return {"strides": Joint({"input_row_bytes": (), "output_row_bytes": ()}, check)}
