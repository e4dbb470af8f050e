"""Asks a backend class one static question in a process of its own; the answer is JSON on the last line.

`python -m conformance.engine.ask describe|doctor NAME DEVICE OPTIONS`
"""

from __future__ import annotations

import json
import sys
from typing import Any

from conformance.backend_class import load_backend_class
from conformance.protocol import description_to_json


def main() -> None:
    what, name, device, options = sys.argv[1:]
    answer: dict[str, Any]
    try:
        cls = load_backend_class(name)
        opts = json.loads(options)
        if what == "describe":
            answer = {"answer": description_to_json(cls.describe(opts))}
        else:
            r = cls(device=device, options=opts, group=None).doctor()
            answer = {"answer": {"versions": dict(r.versions), "devices": list(r.devices), "modules": dict(r.modules)}}
        text = json.dumps(answer)
    except BaseException as e:
        text = json.dumps({"error": f"{type(e).__name__}: {e}"})
    sys.stdout.write("\n" + text + "\n")


if __name__ == "__main__":
    main()
