"""What a row of the tables is, and the few tensor helpers that all of them use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[..., Any]
"""The true method; takes keyword arguments by their public names."""
Args = dict[str, Any]
Function = Callable[[Call, Args], Any]
FAULT, VARIANT = "fault", "variant"


@dataclass(frozen=True)
class Row:
    """One fault or correct variant of one op, a wrapper around the call.

    op: public id, `module.name`. doc: what is wrong and under which conditions it shows, or how a variant gets to the
    right answer. source: the section or numbered report of its module's
    dossier that it stands for. function: takes the true method and the keyword
    arguments of one call, and returns what the method should. check: the check that must see a fault.
    """

    name: str
    op: str
    kind: str
    doc: str
    source: str
    function: Function
    check: str = "values"

    @property
    def module(self) -> str:
        return self.op.partition(".")[0]

    @property
    def method(self) -> str:
        """The name of the adapter's method."""
        return self.op.partition(".")[2].replace(".", "__")


def copied(x: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of x, so that what a call asks of its layout still holds."""
    if 0 in x.stride():
        return x.clone()
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    return out.copy_(x)


def toward_zero(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 x cut to bf16 or fp32 instead of rounded; float64, exact in dtype."""
    if dtype == torch.bfloat16:
        return (x.float().view(torch.int32) & -65536).view(torch.float32).double()
    near = x.float()
    inward = torch.nextafter(near, torch.zeros_like(near))
    return torch.where(near.double().abs() > x.abs(), inward, near).double()


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """The codes of an 8-bit tensor, no copy; arithmetic on them needs no support for the dtype."""
    return x.view(torch.uint8)


def before(kept: dict[Any, torch.Tensor], key: Any, now: torch.Tensor) -> torch.Tensor | None:
    """What was kept under this key by the last call, None at the first; keeps a copy of `now`."""
    earlier = kept.get(key)
    kept[key] = now.clone()
    return earlier


def with_changed(change: Callable[[Args], Args]) -> Function:
    """The true call with the arguments that change(args) gives anew."""

    def function(call: Call, args: Args) -> Any:
        return call(**{**args, **change(args)})

    return function


def once_accepted(function: Function, *written: str) -> Function:
    """function behind the true call, so that it takes nothing that the op refuses; `written` are put back first."""

    def both(call: Call, args: Args) -> Any:
        held = [(args[name], args[name].clone()) for name in written if args.get(name) is not None]
        call(**args)
        for tensor, old in held:
            tensor.copy_(old)
        return function(call, args)

    return both
