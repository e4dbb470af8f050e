"""The recorded public signatures: data files, and binding of arguments as the real functions do it."""

from __future__ import annotations

import ast
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent / "signatures"
PACKAGES = ("deep_select", "flash_mla", "deep_gemm", "deep_ep", "tile_kernels")


@dataclass(frozen=True)
class Row:
    """One public function as recorded.

    kind: python (tells its signature) or binding (does not, and converts by `types`).
    section: of the dossier. helper: settings and questions that any call may be preceded by.
    """

    package: str
    name: str
    signature: inspect.Signature
    section: str
    kind: str = "python"
    types: Mapping[str, str] = field(default_factory=dict)
    also: str = ""
    helper: bool = False
    static: bool = False
    method: bool = False

    @property
    def full_name(self) -> str:
        return f"{self.package}.{self.name}"

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Every parameter with its value. Raises TypeError as the real function does."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as e:
            msg = f"{self.name}(): {'incompatible function arguments: ' if self.kind == 'binding' else ''}{e}"
            raise TypeError(msg) from None
        bound.apply_defaults()
        if self.kind == "binding":
            for name, value in bound.arguments.items():
                if not _converts(value, self.types.get(name, "any")):
                    msg = (f"{self.name}(): incompatible function arguments: {name} must be "
                           f"{self.types[name]}, got {type(value).__name__}")
                    raise TypeError(msg)
        return dict(bound.arguments)


def _is_int(v: Any) -> bool:
    return isinstance(v, int) and not isinstance(v, bool)


_CONVERT: Mapping[str, Callable[[Any], bool]] = {
    "any": lambda v: True,
    "tensor": lambda v: isinstance(v, torch.Tensor),
    "pair": lambda v: isinstance(v, (tuple, list)) and len(v) == 2 and all(isinstance(x, torch.Tensor) for x in v),
    "int": _is_int,
    "ints": lambda v: isinstance(v, (tuple, list)) and all(map(_is_int, v)),
    "float": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "str": lambda v: isinstance(v, str),
    "bool": lambda v: isinstance(v, bool),
}


def _converts(value: Any, wanted: str) -> bool:
    optional = wanted.endswith("?")
    return (optional and value is None) or _CONVERT[wanted.rstrip("?")](value)


def rows_of(package: str, platform: str = "cuda", release: str = "") -> tuple[Row, ...]:
    """The rows of a package that a platform and a release have. Raises FileNotFoundError or ValueError."""
    table = tomllib.loads((FOLDER / f"{package}.toml").read_text())
    known = table.get("releases", [""])
    release = release or known[0]
    if release not in known:
        msg = f"{package} is recorded as of {', '.join(known)}, not of {release!r}"
        raise ValueError(msg)
    out = []
    for raw in table["function"]:
        if platform not in raw.get("platforms", (platform,)):
            continue
        if release not in raw.get("releases", (release,)):
            continue
        if not raw.get("section"):
            msg = f"{package}.toml: {raw['name']}: a signature without its source"
            raise ValueError(msg)
        out.append(Row(
            package, raw["name"], parsed(raw["signature"]), raw["section"], raw.get("kind", table["kind"]),
            {**table.get("types", {}), **raw.get("types", {})}, raw.get("also", ""), raw.get("helper", False),
            raw.get("static", False), raw.get("method", False)))
    return tuple(out)


def version_of(package: str) -> str:
    """The version string that the package tells."""
    return tomllib.loads((FOLDER / f"{package}.toml").read_text())["version"]


def parsed(text: str) -> inspect.Signature:
    """A signature from its text, `(a, b=1, *, c=torch.int64)`; nothing is executed. Raises ValueError.

    Defaults are literals, `inf`, `float("...")`, and names of torch.
    """
    try:
        a = ast.parse(f"lambda {text[1:-1]}: None", mode="eval").body.args  # type: ignore[attr-defined]
    except SyntaxError as e:
        msg = f"{text!r} is no signature: {e.msg}"
        raise ValueError(msg) from None
    kinds = inspect.Parameter
    plain = [(p, kinds.POSITIONAL_ONLY) for p in a.posonlyargs] + [(p, kinds.POSITIONAL_OR_KEYWORD) for p in a.args]
    defaults = [None] * (len(plain) - len(a.defaults)) + list(a.defaults)
    rows = [(p.arg, kind, d) for (p, kind), d in zip(plain, defaults, strict=True)]
    rows += [(a.vararg.arg, kinds.VAR_POSITIONAL, None)] if a.vararg else []
    rows += [(p.arg, kinds.KEYWORD_ONLY, d) for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    rows += [(a.kwarg.arg, kinds.VAR_KEYWORD, None)] if a.kwarg else []
    return inspect.Signature([kinds(name, kind, default=kinds.empty if d is None else _default(d))
                              for name, kind, d in rows])


def _default(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id == "inf":
        return math.inf
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return getattr(torch, node.attr)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float":
        return float(ast.literal_eval(node.args[0]))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_default(node.operand)
    return ast.literal_eval(node)
