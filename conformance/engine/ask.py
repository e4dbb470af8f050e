"""Asks a backend class one static question in a process of its own; the answer is JSON on the last line.

`python -m conformance.engine.ask describe|setup|doctor NAME DEVICE OPTIONS PARENT`
"""

from __future__ import annotations

import json
import sys
from typing import Any

from conformance.backend_class import load_backend_class
from conformance.engine.wire import die_with_parent, said
from conformance.protocol import Backend, Description, Report, description_to_json


def main() -> None:
    what, name, device, options, parent = sys.argv[1:]
    die_with_parent(int(parent))
    answer: dict[str, Any]
    try:
        cls = load_backend_class(name)
        opts = json.loads(options)
        if what == "describe":
            answer = {"answer": description_to_json(cls.describe(opts))}
        elif what == "setup":
            description = cls.describe(opts)
            answer = {"answer": {"description": description_to_json(description), **_devices(cls, opts, description)}}
        else:
            r, constructed = _doctor(cls, device, opts)
            answer = {"answer": {"versions": dict(r.versions), "devices": list(r.devices), "modules": dict(r.modules),
                                 "constructed": constructed}}
        text = json.dumps(answer)
    except BaseException as e:
        text = json.dumps({"error": said(e)})
    sys.stdout.write("\n" + text + "\n")


def _devices(cls: type[Backend], options: dict[str, str], description: Description) -> dict[str, Any]:
    """`devices`, or `why` they can't be told: that is no reason to keep the description back."""
    if description.host:
        return {"devices": None}
    try:
        return {"devices": [str(d) for d in cls.devices(options)]}
    except BaseException as e:
        return {"devices": [], "why": said(e)}


def _doctor(cls: type[Backend], device: str, options: dict[str, str]) -> tuple[Report, bool]:
    """The report, and whether there was a backend to make it."""
    try:
        backend = cls(device=device, options=options, group=None)
    except Exception as e:
        return cls.why_not(options, e), False
    return backend.doctor(), True


if __name__ == "__main__":
    main()
