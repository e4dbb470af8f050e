"""Puts the stand-ins into `sys.modules`, where an adapter's import finds them."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from adapters.cpu.kernels.knobs import Knobs
from adapters.standins.arch import Arch, arch_of
from adapters.standins.calls import Calls
from adapters.standins.device import Device, StreamOrder
from adapters.standins.signatures import PACKAGES, Row, rows_of, version_of


@dataclass
class Rig:
    """What the stand-ins of one process share.

    releases: of a package, where its public signatures have several (`flash_mla`: R26, W24).
    defects: known faults of the recorded releases that the stand-ins shall have too (`DEFECTS` of each file).
    """

    arch: Arch
    calls: Calls = field(default_factory=Calls)
    releases: Mapping[str, str] = field(default_factory=dict)
    defects: frozenset[str] = frozenset()
    device: Device = field(default_factory=Device)
    host: Any = field(default_factory=lambda: SimpleNamespace(knobs=Knobs(), group=None, options={}))
    """what the cpu adapters take for their backend"""
    stream: StreamOrder | None = None

    def __post_init__(self) -> None:
        self.device.says = self.arch.error
        self.stream = StreamOrder(self.device)

    def running(self) -> Any:
        """While this context is open, operations of the framework come in stream order."""
        assert self.stream is not None
        return self.stream

    @contextmanager
    def inside(self) -> Any:
        assert self.stream is not None
        with self.stream.quiet():
            self.device.in_order()
            yield

    def public(self, row: Row, package: Any) -> Callable[..., Any]:
        """The public function of a row: binds, records, checks and computes by its contract."""
        first = 1 if row.method else 0
        contract: Callable[..., Any] | None = getattr(package, row.name.replace(".", "__"), None)
        state = getattr(package, "state", dict)

        @functools.wraps(contract or _no_contract)
        def function(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = row.bind(args[first:], kwargs)
            except TypeError:
                # The package was called and refused: what it was given has no names to compare by.
                self.calls.add("call", row.full_name, kwargs, helper=row.helper, other=[], state=state(), unbound=True)
                raise
            self.calls.add("call", row.full_name, _flat(row, bound), helper=row.helper,
                           other=_not_default(row, bound), state=state())
            try:
                self.device.ready()
                if contract is None:
                    msg = f"the stand-in of {row.full_name} knows its signature only, it can't compute"
                    raise NotImplementedError(msg)
                with self.inside():
                    return contract(*args[:first], *_in_order(row, bound), **_by_name(row, bound))
            except BaseException as e:
                self.calls.add("raised", row.full_name, error=type(e).__name__, message=str(e)[:300])
                raise

        function.__name__ = function.__qualname__ = row.name.rpartition(".")[2]
        del function.__wrapped__
        if row.kind == "binding":
            return Binding(function)
        function.__signature__ = _with_self(row.signature) if row.method else row.signature  # type: ignore[attr-defined]
        return function


def _flat(row: Row, bound: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, those that have no parameter of their own too."""
    out: dict[str, Any] = {}
    for name, p in row.signature.parameters.items():
        out.update(bound[name] if p.kind == p.VAR_KEYWORD else {name: bound[name]})
    return out


def _not_default(row: Row, bound: Mapping[str, Any]) -> list[str]:
    """Parameters that have another value than the one they have by themselves."""
    out = []
    for name, p in row.signature.parameters.items():
        value = bound[name]
        plain = value is p.default or (
            type(value) is type(p.default) and isinstance(value, (bool, int, float, str)) and value == p.default)
        if p.default is not p.empty and not plain:
            out.append(name)
    return out


def _no_contract() -> None:
    """Known by its signature only."""


def _in_order(row: Row, bound: Mapping[str, Any]) -> list[Any]:
    """Values of parameters that have no name for the caller."""
    out: list[Any] = []
    for name, p in row.signature.parameters.items():
        if p.kind == p.VAR_POSITIONAL:
            out.extend(bound[name])
        elif p.kind == p.POSITIONAL_ONLY:
            out.append(bound[name])
    return out


def _by_name(row: Row, bound: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, p in row.signature.parameters.items():
        if p.kind == p.VAR_KEYWORD:
            out.update(bound[name])
        elif p.kind not in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY):
            out[name] = bound[name]
    return out


class Binding:
    """A function of a compiled module: callable, but `inspect.signature` finds nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.__name__ = function, function.__name__
        self.__doc__ = f"{self.__name__}(...)"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        msg = f"no signature found for builtin {self.__name__}"
        raise ValueError(msg)


_INSTALLED: dict[str, ModuleType | None] = {}
"""what stood in `sys.modules` before"""


def install(arch: str | Arch, packages: Iterable[str] = PACKAGES, **options: Any) -> Rig:
    """Stand in for the vendors' packages of an architecture, in this process, until `uninstall`.

    options: of `Rig`. Raises ValueError for an unknown architecture, release or package.
    """
    rig = Rig(arch_of(arch) if isinstance(arch, str) else arch, **options)
    uninstall()
    for package in packages:
        for name, module in _modules(package, rig).items():
            _INSTALLED[name] = sys.modules.get(name)
            sys.modules[name] = module
    return rig


def uninstall() -> None:
    """Put back what stood in `sys.modules` before."""
    while _INSTALLED:
        name, before = _INSTALLED.popitem()
        if before is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = before


def _modules(package: str, rig: Rig) -> dict[str, ModuleType]:
    """The package and its submodules by their full names."""
    contract = importlib.import_module(f"adapters.standins.{package}").Package(rig)
    root = ModuleType(package, f"Stand-in of {package} on {rig.arch.name}.")
    root.__path__ = []  # type: ignore[attr-defined]
    root.__version__ = version_of(package)  # type: ignore[attr-defined]
    modules = {package: root}
    classes: dict[str, type] = dict(getattr(contract, "classes", {}))
    for name, cls in classes.items():
        setattr(root, name, cls)
    for row in rows_of(package, rig.arch.platform, rig.releases.get(package, "")):
        function = rig.public(row, contract)
        owner, _, last = row.name.rpartition(".")
        if row.name in classes:
            classes[row.name].__init__ = _constructor(function, row)  # type: ignore[misc]
        elif owner in classes:
            setattr(classes[owner], last, staticmethod(function) if row.static else function)
        else:
            for place in filter(None, (row.name, row.also)):
                _put(modules, package, place, function)
    for place, value in getattr(contract, "values", {}).items():
        _put(modules, package, place, value)
    return modules


def _constructor(function: Callable[..., Any], row: Row) -> Callable[..., None]:
    """The contract of a constructor gives the attributes of the object."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        vars(self).update(function(*args, **kwargs))

    __init__.__signature__ = _with_self(row.signature)  # type: ignore[attr-defined]
    return __init__


def _with_self(signature: inspect.Signature) -> inspect.Signature:
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return signature.replace(parameters=[own, *signature.parameters.values()])


def _put(modules: dict[str, ModuleType], package: str, place: str, value: Any) -> None:
    """Set `a.b.name` below the package, with the modules on the way."""
    *folders, name = place.split(".")
    module, full = modules[package], package
    for folder in folders:
        full = f"{full}.{folder}"
        if full not in modules:
            modules[full] = ModuleType(full)
            modules[full].__path__ = []  # type: ignore[attr-defined]
            setattr(module, folder, modules[full])
        module = modules[full]
    setattr(module, name, value)


__all__ = ["Binding", "Rig", "install", "uninstall"]
