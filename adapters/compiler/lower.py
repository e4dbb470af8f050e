"""A program, lowered by TileLang to the kernel text of a target, and what stands in that text."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


UNINITIALISED = {"tl.disable_buffer_init_check": True}
"""lets a program pass that reads what nobody wrote"""


def lowered(program: Any, target: Any, entry: str, config: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The device text of a program for a `Target`, its function named `<entry>_kernel`. Raises what TileLang raises.

    config: pass settings beside the target's. Nothing is read from or written to TileLang's own caches.
    """
    import tilelang
    from tilelang.backend.target import determine_target
    from tvm.target import Target

    wanted = target.compile_target
    made = Target(wanted) if isinstance(wanted, dict) else determine_target(wanted, return_object=True)
    named = program.with_attr("global_symbol", entry)
    with tilelang.transform.PassContext(opt_level=3, config={**target.pass_configs, **config}), made:
        return str(tilelang.lower(named, target=made, enable_device_compile=False).kernel_source)


class LoweredToNothing(Exception):
    """A feature of the language that left no trace in the kernel text."""


def leaves_a_trace(text: str, without: Callable[[], str], op: str) -> bool:
    """Whether the text differs from that of the program without its feature; False where that can't be told.

    Raises LoweredToNothing where it does not differ.
    """
    try:
        bare = without()
    except Exception:
        return False
    if bare == text:
        msg = f"the text of {op} is the same without the feature that it is about: it was lowered to nothing"
        raise LoweredToNothing(msg)
    return True


def names_of(program: Any) -> list[str]:
    """The names of a program's tensors, in order."""
    return [program.buffer_map[p].name for p in program.params if p in program.buffer_map]


def used(text: str, names: Iterable[str]) -> tuple[str, ...]:
    """Which arguments the bodies of a C-like text mention: the argument itself, or a descriptor made of it.

    A name in the head of a function says nothing: it stands there whether it is used or not.
    """
    plain = _COMMENT.sub(" ", text)
    bodies = "\n".join(_bodies(plain))
    return tuple(n for n in names if re.search(rf"\b{re.escape(n)}(?:_desc(?:_\d+)?)?\b", bodies))


def _bodies(text: str) -> Iterable[str]:
    """What stands in the outermost braces, but for calls that only hand arguments on within the text."""
    depth, start = 0, 0
    for at, c in enumerate(text):
        if c == "{":
            depth += 1
            if depth == 1:
                start = at + 1
        elif c == "}" and depth:
            depth -= 1
            if depth == 0:
                yield _without_launches(text[start:at])


def _without_launches(body: str) -> str:
    # The outer function of a vector kernel names every argument as it hands them to the part that runs in threads.
    return re.sub(r"asc_vf_call<[^;]*;", " ", body)


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for one compile, removed with all that TileLang and the vendor's compiler leave in it."""
    return tempfile.TemporaryDirectory(prefix="compile-", dir=os.environ.get("TMPDIR"))
