"""The architectures that can be stood in for, as far as the contracts ask about them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """platform: cuda | ascend. cores: SMs, or AI cores. vec_cores: what Ascend counts vector work in."""

    name: str
    platform: str
    device: str
    capability: int
    cores: int
    vec_cores: int = 0

    @property
    def is_ascend(self) -> bool:
        return self.platform == "ascend"

    @property
    def error(self) -> str:
        """What a message of a lost device starts with."""
        return "aicore exception" if self.is_ascend else "CUDA error"


ARCHES = {a.name: a for a in (
    Arch("sm90", "cuda", "cuda", 9, 132),
    Arch("sm100", "cuda", "cuda", 10, 148),
    # 32 AI cores: dossiers/flashmla.md 2.2; two vector cores each: dossiers/tilekernels.md 1.
    Arch("ascend950", "ascend", "npu", 0, 32, 64),
)}


def arch_of(name: str) -> Arch:
    """The architecture of this name. Raises ValueError with the known ones."""
    if name not in ARCHES:
        msg = f"unknown architecture {name!r}; known: {', '.join(ARCHES)}"
        raise ValueError(msg)
    return ARCHES[name]
