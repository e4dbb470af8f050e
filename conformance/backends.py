"""What the controller asks of a backend: its description and its doctor, in child processes.

Adapters are never imported here; only JSON comes back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.backend_class import known_backends
from conformance.engine.limits import check_limits
from conformance.identity import unknown
from conformance.protocol import Description, description_from_json

ROOT = Path(__file__).resolve().parents[1]
DESCRIBE_TIMEOUT_S = 120.0


class UnknownBackend(Exception):
    """A backend's name that does not exist."""


class BackendUnusable(Exception):
    """A backend that can't be imported, described or constructed; the message says why."""


def check_name(name: str) -> None:
    """Raises UnknownBackend with the known ones, for a name that is neither known nor `package.module:Class`."""
    if ":" not in name and name not in known_backends():
        raise UnknownBackend(unknown("backend", name, known_backends()) + ", or package.module:Class")


def describe(name: str, options: Mapping[str, str]) -> Description:
    """The backend's static description. Raises UnknownBackend or BackendUnusable."""
    check_name(name)
    try:
        description = description_from_json(_ask("describe", name, options))
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        msg = f"backend {name}: its description is malformed: {type(e).__name__}: {e}"
        raise BackendUnusable(msg) from e
    wrong = check_limits(description)
    if wrong:
        msg = f"backend {name}: its description is malformed: {'; '.join(wrong[:5])}"
        raise BackendUnusable(msg)
    return description


def doctor(name: str, options: Mapping[str, str], device: str = "0") -> dict[str, Any]:
    """{versions, devices, modules: name -> reason why not, empty if usable}. Raises as `describe`."""
    check_name(name)
    return _ask("doctor", name, {**options}, device)


def _ask(what: str, name: str, options: Mapping[str, str], device: str = "0") -> dict[str, Any]:
    argv = [sys.executable, "-m", "conformance.engine.ask", what, name, device, json.dumps(dict(options))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DESCRIBE_TIMEOUT_S,
                              stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired as e:
        msg = f"backend {name}: {what} gave no answer within {DESCRIBE_TIMEOUT_S:.0f} s"
        raise BackendUnusable(msg) from e
    last = done.stdout.strip().splitlines()[-1:] or [""]
    try:
        answer = json.loads(last[0])
    except ValueError:
        answer = {"error": f"the process ended with code {done.returncode}\n{done.stderr.strip()[-1500:]}"}
    if "error" in answer:
        msg = f"backend {name} can't be used: {answer['error']}"
        raise BackendUnusable(msg)
    return answer["answer"]
