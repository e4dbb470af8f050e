"""What stays of a failure: the problem, every array, a picture, a script that needs no engine."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from conformance.engine.attempt import Attempt
from conformance.engine.judge import Finding
from conformance.engine.picture import error_map, write_png
from conformance.identity import slug
from conformance.protocol import arg_to_json
from references.formats import codec

MAX_ARRAY_BYTES = 64 << 20


def keep(run_dir: Path, case_id: str, attempt: Attempt, worst: Finding, *, first: dict[str, Any], seed: int,
         backend: str, options: dict[str, str], message: str, requirements: dict[str, Any]) -> str:
    """Write the artifacts of the example that `worst` is about; returns their folder relative to the run directory."""
    folder = run_dir / "artifacts" / slug(case_id)
    folder.mkdir(parents=True, exist_ok=True)
    note = {"id": case_id, "seed": seed, "backend": backend, "options": options, "message": message,
            "problem": attempt.problem.to_json(), "first_problem": first}
    (folder / "problem.json").write_text(json.dumps(note, indent=1, sort_keys=True) + "\n")
    if attempt.examples:
        last = min(len(attempt.seen), len(attempt.examples)) - 1 if attempt.seen else 0
        example = attempt.examples[worst.example if worst.example >= 0 else last]
        for key, codes in example.codes.items():
            _save(folder, f"in.{key}", codes)
        _script(folder, example, backend, options, case_id, worst)
    if worst.observed is not None and worst.judgement is not None:
        _save(folder, f"observed.{worst.output}", worst.observed)
        j = worst.judgement
        for name, a in (("expected", j.expected), ("error_over_bound", j.ratio), ("wrong", j.bad)):
            if a is not None:
                _save(folder, f"{name}.{worst.output}", np.asarray(a))
        bad = np.asarray(j.bad)
        if bad.size and bad.ndim:
            write_png(folder / "error.png", error_map(bad, j.ratio))
    return str(folder.relative_to(run_dir))


def _save(folder: Path, name: str, a: np.ndarray) -> None:
    if a.nbytes <= MAX_ARRAY_BYTES:
        np.save(folder / (name.replace("/", ".") + ".npy"), a, allow_pickle=False)


SCRIPT = '''\
"""Makes the one call of {case_id} that went wrong. Needs NumPy and the backend's adapter only.

Run it from the root of the checkout: python {name}
"""

import json
import os
import pathlib
import sys

import numpy as np

sys.path.insert(0, os.getcwd())
from conformance.backend_class import load_backend_class
from conformance.protocol import DTypeArg, Group, TensorArg, TokenArg, TupleArg, arg_from_json

HERE = pathlib.Path(__file__).resolve().parent
PLAN = json.loads((HERE / "call.json").read_text())
MEET = HERE / f"meet.{{os.getpid()}}"


def leaves_of(result):
    nested = isinstance(result, (tuple, list))
    return [leaf for r in result for leaf in leaves_of(r)] if nested else [result]


def main(rank):
    ranks = len(PLAN["ranks"])
    group = Group(rank, ranks, rank, 0, str(MEET), 0, 20.0) if ranks > 1 else None
    backend = load_backend_class(PLAN["backend"])(device="0", options=PLAN["options"], group=group)
    if "torch" in sys.modules:
        sys.modules["torch"].set_printoptions(precision=9)
    plan = PLAN["ranks"][rank]
    buffers, tokens = [], {{}}
    for i, size in enumerate(plan["buffers"]):
        buf = backend.alloc(size, 512)
        backend.write(buf, 0, memoryview(np.load(HERE / f"buffer.{{rank}}.{{i}}.npy")))
        buffers.append(buf)

    def value(arg):
        if isinstance(arg, TensorArg):
            return backend.view(buffers[arg.buffer], arg.offset_bytes, arg.spec)
        if isinstance(arg, TupleArg):
            return tuple(map(value, arg.items))
        if isinstance(arg, TokenArg):
            return tokens[arg.name]
        return backend.dtype(arg.name) if isinstance(arg, DTypeArg) else arg.value

    for step in plan["steps"]:
        args = {{n: value(arg_from_json(a)) for n, a in step["args"].items()}}
        print(f"rank {{rank}}: {{step['op']}}({{', '.join(args)}})")
        result = backend.run(step["op"], args)
        backend.synchronize()
        leaves = leaves_of(result)
        tokens.update(zip(step["returns"], leaves))
        for name in step["outs"]:
            print(f"rank {{rank}}: {{name}} =", args[name])
        for name, leaf in zip(step["returns"], leaves):
            print(f"rank {{rank}}: {{name}} =", leaf)


if __name__ == "__main__":
    children = []
    for rank in range(1, len(PLAN["ranks"])):
        child = os.fork()
        if not child:
            main(rank)
            os._exit(0)
        children.append(child)
    main(0)
    for w in PLAN["wrong"]:
        print(f"was wrong: {{w['output']}} at {{w['at']}}: observed {{w['observed']}}, expected {{w['expected']}}")
    for child in children:
        os.waitpid(child, 0)
    MEET.unlink(missing_ok=True)
'''


MOST_WRONG = 8
"""wrong elements that the script names"""


def _wrong(worst: Finding) -> list[dict[str, Any]]:
    """The first wrong elements with all their digits: what the script's output is to be held against."""
    if worst.observed is None or worst.judgement is None:
        return []
    observed = codec.decode(worst.observed, worst.format)
    j = worst.judgement
    if np.shape(j.bad) != observed.shape:
        return []  # outputs judged together: the message names what of which is wrong
    at = [tuple(map(int, i)) for i in np.argwhere(j.bad)[:MOST_WRONG]]
    expected = None if np.shape(j.expected) != observed.shape else np.asarray(j.expected)
    return [{"output": worst.output, "at": list(i), "observed": repr(observed[i].item()),
             "expected": "see the message" if expected is None else repr(expected[i].item())} for i in at]


def _script(folder: Path, example: Any, backend: str, options: dict[str, str], case_id: str,
            worst: Finding) -> None:
    ranks = []
    for rank, plan in enumerate(example.plans):
        for i, b in enumerate(plan.buffers):
            image = example.before[rank][i] if rank < len(example.before) else np.zeros(b.nbytes, np.uint8)
            _save(folder, f"buffer.{rank}.{i}", np.array(image))
        steps = [{"op": s.call.op, "args": {n: arg_to_json(a) for n, a in s.call.args.items()},
                  "returns": list(s.call.returns), "outs": list(s.outs)} for s in plan.steps]
        ranks.append({"buffers": [b.nbytes for b in plan.buffers], "steps": steps})
    call = {"backend": backend, "options": options, "ranks": ranks, "wrong": _wrong(worst)}
    (folder / "call.json").write_text(json.dumps(call, indent=1) + "\n")
    (folder / "reproduce.py").write_text(textwrap.dedent(SCRIPT.format(case_id=case_id, name="reproduce.py")))


