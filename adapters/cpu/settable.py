"""The `cpu` backend with its knobs as one more setting: one process tries many of them, a few milliseconds each.

What asks for this is the diagnosis of a failure. The `cpu` backend proper takes its knobs when it is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters.cpu.backend import CpuBackend
from adapters.cpu.kernels.knobs import Knobs

SETTING = "knobs"


class SettableBackend(CpuBackend):
    """`set_settings(module, {"knobs": "drop_tail=yes"})` counts until other knobs are set; it is not reported back.

    So nothing resets it after a call, and what a fault keeps from one call to the next lives on.
    """

    _text: str | None = None

    def set_settings(self, module: str, settings: Mapping[str, Any]) -> None:
        """Raises ValueError for an unknown knob or setting."""
        own = dict(settings)
        text = own.pop(SETTING, None)
        if text is not None and text != self._text:
            self.knobs, self._text = Knobs.parse(text), text
            # An adapter takes the knobs when it is made, and holds what calls leave behind.
            self._loaded.clear()
        super().set_settings(module, own)
