"""What every adapter of a public package has: its import, its release, its process-wide settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from adapters.upstream.release import Refused, imported, stated_version


class UpstreamAdapter:
    """A method an op, named like the public function with `__` for a dot; keyword arguments by the public names.

    Raises Refused (a ModuleUnusable) where the package is missing, or is of another release than the backend
    describes. Nothing of the package is imported before that.
    """

    module = ""
    package = ""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.lib = imported(self.package, backend.install_hint(self.module))
        self.release = self.recognised()
        described = backend.releases[self.module]
        if self.release != described:
            raise Refused(self.of_another_release(described))
        self.settings: MutableMapping[str, Any] = Settings(self.knobs())

    def recognised(self) -> str:
        """The release, by what the package offers. Raises Refused where that is that of none."""
        raise NotImplementedError

    def of_another_release(self, described: str) -> str:
        known = self.backend.known_releases(self.module)
        what = f"{self.package} {stated_version(self.lib)} has the interface of {self.release}"
        if self.release in known:
            return (f"{what}, but {described} is described: install that, or say "
                    f"--backend-option {self.module}={self.release}")
        return f"{what}, which this backend has no description of: install {' or '.join(known)}"

    def cannot_tell(self, why: str) -> Refused:
        """The exception for a package whose release can't be told."""
        known = " or ".join(self.backend.known_releases(self.module))
        return Refused(f"{self.package} {stated_version(self.lib)} is of no known release: {why}. "
                       f"What it computes can't be judged; install {known}")

    def knobs(self) -> dict[str, tuple[Callable[[], Any], Callable[[Any], None] | None]]:
        """Process-wide settings by name: how to read one, and how to set it (None: it is watched only)."""
        return {}

    def found(self) -> dict[str, str]:
        """What doctor tells of the package: what it states, and which release it was taken for."""
        return {"": stated_version(self.lib), "release": self.release}

    def trial(self) -> str:
        """A small call of the package; why it can't be used, or an empty string."""
        return ""


class Settings(MutableMapping[str, Any]):
    """Settings that live in the package: reading asks it, writing tells it."""

    def __init__(self, knobs: dict[str, tuple[Callable[[], Any], Callable[[Any], None] | None]]) -> None:
        self._knobs = knobs

    def __getitem__(self, key: str) -> Any:
        return self._knobs[key][0]()

    def __setitem__(self, key: str, value: Any) -> None:
        setter = self._knobs[key][1]
        if setter is None:
            msg = f"{key} is watched, and can't be set"
            raise ValueError(msg)
        setter(value)

    def __delitem__(self, key: str) -> None:
        msg = f"{key} can't be taken away"
        raise TypeError(msg)

    def __iter__(self) -> Iterator[str]:
        return iter(self._knobs)

    def __len__(self) -> int:
        return len(self._knobs)


def kept(value: Any, setter: Callable[[Any], None]) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """A setting that the package can set and not tell; `value` is its documented default."""
    held = [value]

    def write(new: Any) -> None:
        setter(new)
        held[0] = new

    return lambda: held[0], write


def given(**arguments: Any) -> dict[str, Any]:
    """The arguments that are not None: None means that a call does not name them."""
    return {name: value for name, value in arguments.items() if value is not None}
