"""Which release of a package is installed, by what its functions take: version strings do not tell them apart."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from types import ModuleType
from typing import Any

from conformance.protocol import ModuleUnusable


class Refused(ModuleUnusable):
    """A package that is missing, can't be imported, or is of a release that can't be told or is not described."""


def imported(package: str, install: str = "") -> ModuleType:
    """The package. Raises Refused with a sentence to act on, whatever its import raises."""
    try:
        if importlib.util.find_spec(package) is None:
            raise Refused(not_installed(package, install))
    except ValueError:
        pass  # a module put in place by hand has no spec
    try:
        return importlib.import_module(package)
    except Exception as e:
        msg = f"{package} {distribution(package)} is installed, but its import fails: {said(e)}"
        raise Refused(msg) from e


def not_installed(package: str, install: str = "") -> str:
    return f"{package} is not installed" + (f": {install}" if install else "")


def is_there(package: str) -> bool:
    """Whether the package can be found; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:
        return True


def said(e: BaseException, *, name: bool = True) -> str:
    """First line of an exception, behind the name of its type."""
    line = str(e).strip().partition("\n")[0][:400]
    if not line:
        return type(e).__name__
    return f"{type(e).__name__}: {line}" if name else line


def distribution(package: str) -> str:
    """`name version` of what installed the package, or an empty string."""
    for name in packages_distributions().get(package, ()):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return ""


def stated_version(lib: Any) -> str:
    """What the package says of itself, and what installed it."""
    own = str(getattr(lib, "__version__", "")) or "no version of its own"
    other = distribution(getattr(lib, "__name__", ""))
    return f"{own} ({other})" if other else own


def parameters(function: Any) -> tuple[str, ...] | None:
    """Names of a function's parameters, in order; of a compiled one from the signature in its docstring.

    None where neither is to be had, or where a catch-all may take any name.
    """
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return _documented(function)
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in found):
        return _documented(function)
    return tuple(p.name for p in found)


def _documented(function: Any) -> tuple[str, ...] | None:
    doc = getattr(function, "__doc__", None) or ""
    first = re.match(rf"\s*(?:\w+\.)*{re.escape(getattr(function, '__name__', ''))}\((.*)\)\s*(?:->.*)?$", doc, re.M)
    if not first:
        return None
    # Commas inside brackets belong to a type or a default.
    text, depth, names = first[1], 0, [""]
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            names.append("")
        else:
            names[-1] += c
    cut = [re.split(r"[:=]", n)[0].strip() for n in names]
    named = [n for n in cut if n not in ("", "self", "*", "/")]
    return None if any(n.startswith("*") for n in named) else tuple(named)
