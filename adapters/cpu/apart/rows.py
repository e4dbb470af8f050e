"""Every row of the package as JSON, for a process that does not import the kernels' framework."""

from __future__ import annotations

import json

from adapters.cpu.apart.backend import rows

FIELDS = ("name", "op", "kind", "check", "doc", "source")

if __name__ == "__main__":
    print(json.dumps([{f: getattr(row, f) for f in FIELDS} for row in rows().values()]))
