"""What the controller asks of a backend: its description and its doctor, in child processes.

Adapters are never imported here; only JSON comes back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from conformance.backend_class import known_backends
from conformance.catalogue.load import MODULES, functions
from conformance.engine.executor import end_group, ended
from conformance.engine.limits import check_limits
from conformance.identity import nearest, unknown
from conformance.model import Drawn, In, Op, Out, Value
from conformance.protocol import PLATFORMS, Description, Support, description_from_json, unsupported
from references.bounds.profile import mistakes as profile_mistakes

ROOT = Path(__file__).resolve().parents[1]
DESCRIBE_TIMEOUT_S = 120.0
MALFORMED = "its description is malformed: "


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
    return _described(name, _ask("describe", name, options))


@dataclass(frozen=True)
class SetUp:
    """What a run asks first: the description, and the devices of this machine."""

    description: Description
    found: tuple[str, ...] | None
    """None where calls run on the host"""
    why: str = ""
    """why no device can be had"""

    def devices(self) -> tuple[str, ...] | None:
        """At least one, or None on the host. Raises BackendUnusable."""
        if self.why:
            raise BackendUnusable(self.why)
        return self.found


def set_up(name: str, options: Mapping[str, str]) -> SetUp:
    """Both in one child process, as starting a framework takes seconds. Raises UnknownBackend or BackendUnusable."""
    check_name(name)
    answer = _ask("setup", name, options)
    description, found = _described(name, answer.get("description")), answer.get("devices")
    if description.host:
        return SetUp(description, None)
    if "why" in answer:
        why = f"backend {name} can't tell its devices: {answer['why']}"
    elif not found:
        why = f"backend {name} finds no device on this machine; `conformance doctor --backend {name}` says more"
    elif len(set(found)) != len(found):
        why = f"backend {name}: the names of its devices must differ, got {', '.join(found)}"
    else:
        return SetUp(description, tuple(found))
    return SetUp(description, (), why)


def _described(name: str, raw: Any) -> Description:
    try:
        description = description_from_json(raw)
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        msg = f"backend {name}: its description is malformed: {type(e).__name__}: {e}"
        raise BackendUnusable(msg) from e
    wrong = profile_mistakes(description.profile)
    if wrong:
        # What is right hangs on it: an oracle that read another profile than was meant would judge by a wrong rule.
        msg = f"backend {name}: {'; '.join(wrong[:3])}"
        raise BackendUnusable(msg)
    return without_malformed(description)


def without_malformed(description: Description) -> Description:
    """The description with every op whose limits make no sense told as unsupported; the rest goes on."""
    ops = dict(description.ops)
    for pattern, support in description.ops.items():
        wrong = check_limits(replace(description, ops={pattern: support})) or list(_mistyped(support))
        if wrong:
            ops[pattern] = unsupported(MALFORMED + "; ".join(w.removeprefix(f"{pattern}: ") for w in wrong[:3]))
    return replace(description, ops=ops)


def _mistyped(support: Support) -> Iterator[str]:
    for row in support.limits:
        when = row.get("when", {})
        if not (isinstance(when, Mapping) and all(isinstance(v, (list, tuple)) for v in when.values())):
            yield f"{row['field']}: `when` takes lists of values by field, got {when!r}"
        if not isinstance(row.get("given", True), bool):
            yield f"{row['field']}: `given` takes true or false, got {row['given']!r}"
        for test, value in row.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if test in ("in", "not_in") and not isinstance(value, (list, tuple)):
                yield f"{row['field']}: `{test}` takes a list, got {value!r}"
            if test in ("lt", "le", "ge", "multiple_of") and not (number and (test != "multiple_of" or value)):
                yield f"{row['field']}: `{test}` takes a number, got {value!r}"


def complaints(description: Description, declared: Iterable[Op]) -> list[str]:
    """What a description says that can't be meant: unknown ops, unknown fields, malformed limits. A sentence each."""
    ops = list(declared)
    known = {f.name for m in MODULES for f in functions(m)} | {op.name for op in ops}
    out = []
    if description.platform not in PLATFORMS:
        out.append(f"platform {description.platform!r}, which is none of {', '.join(PLATFORMS)}")
    for pattern, support in description.ops.items():
        if support.reason.startswith(MALFORMED):
            out.append(f"{pattern}: {support.reason}")
        elif not any(fnmatchcase(n, pattern) for n in known):
            close = nearest(pattern, known)
            out.append(f"{pattern}: no op of the catalogue{'; ' + close if close else ''}")
        mine = [op for op in ops if fnmatchcase(op.name, pattern)]
        fields = {f for op in mine for f in _fields(op)}
        out.extend(f"{pattern}: a limit on {field!r}, which is no variant key, size, drawn value or <arg>.row_bytes"
                   for row in support.limits if mine for field in (row["field"], *row.get("when", ()))
                   if field not in fields)
        sizes = {s for op in mine for s in op.sizes}
        out.extend(f"{pattern}: a tile of {name!r}, which is no size; sizes: {', '.join(sorted(sizes))}"
                   for name in support.tiles if mine and name not in sizes)
        out.extend(f"{pattern}: a compile key {name!r}, which is no variant key, size or value"
                   for name in support.compile_key if mine and name not in fields)
    return out


def _fields(op: Op) -> Iterator[str]:
    """What a limit can look up: an argument that is never drawn has no value that a limit could keep out."""
    yield from op.variants
    yield from op.sizes
    yield from (s.name for s in op.settings)
    yield from ("misuse",) if op.rejects else ()
    for step in op.steps:
        for a in step.args:
            if isinstance(a, Value) and isinstance(a.value, Drawn):
                yield from (a.name, f"{step.name}/{a.name}")
            for part in (a, *getattr(a, "parts", ())):
                if isinstance(part, (In, Out)):
                    yield f"{part.name}.row_bytes"


def doctor(name: str, options: Mapping[str, str], device: str = "0") -> dict[str, Any]:
    """{versions, devices, modules: name -> reason why not, empty if usable; constructed: whether there was a backend
    to ask}. Raises as `describe`.
    """
    check_name(name)
    return _ask("doctor", name, {**options}, device)


def asked_first(name: str, options: Mapping[str, str], description: Description, device: str) -> dict[str, Any] | None:
    """Doctor's report where the description wants it before a run, else None.

    Raises BackendUnusable, in two lines, where no module is usable.
    """
    if not description.ask_doctor:
        return None
    found = doctor(name, options, device)
    if all(found["modules"].values()):
        missing = [m for m, why in found["modules"].items() if "not installed" in why]
        told = f"packages of {', '.join(missing)} are not installed" if missing else "no package can be used"
        msg = (f"backend {name}: no module is usable here; devices: {'; '.join(found['devices']) or 'none'}\n"
               f"{told}; `conformance doctor --backend {name}` says what each needs")
        raise BackendUnusable(msg)
    return found


def _ask(what: str, name: str, options: Mapping[str, str], device: str = "0") -> dict[str, Any]:
    argv = [sys.executable, "-m", "conformance.engine.ask", what, name, device, json.dumps(dict(options)),
            str(os.getpid())]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    # Files, not pipes: a process that the backend leaves behind may hold a pipe open for ever.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        proc = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=out, stderr=err, stdin=subprocess.DEVNULL,
                                start_new_session=True)
        try:
            in_time = ended(proc.pid, DESCRIBE_TIMEOUT_S)
        finally:
            end_group(proc)
        if not in_time:
            msg = f"backend {name}: {what} gave no answer within {DESCRIBE_TIMEOUT_S:.0f} s"
            raise BackendUnusable(msg)
        printed, told = _text(out), _text(err)
    answer = next(filter(None, map(_answer, reversed(printed.splitlines()))), None)
    if answer is None:
        answer = {"error": f"the process ended with code {proc.returncode}\n{told.strip()[-1500:]}"}
    if "error" in answer:
        msg = f"backend {name} can't be used: {answer['error']}"
        raise BackendUnusable(msg)
    return answer["answer"]


def _text(file: Any) -> str:
    file.seek(0, os.SEEK_END)
    file.seek(max(file.tell() - (4 << 20), 0))
    return file.read().decode(errors="replace")


def _answer(line: str) -> dict[str, Any] | None:
    """The answer on a line; a backend may print others before it, and after."""
    try:
        raw = json.loads(line)
    except ValueError:
        return None
    good = isinstance(raw, dict) and (isinstance(raw.get("answer"), dict) or isinstance(raw.get("error"), str))
    return raw if good else None
