"""The cpu backend with declared tiles of 96 x 160 x 48, and slow by a fake clock: `tiled_backend:Tiled`.

Options: `knobs` (a planted fault), `slow_s` (simulated seconds a call takes).
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from typing import Any

from adapters.cpu.backend import CpuBackend
from conformance.protocol import Description, Group, supported

TILES = "tile_m=96,tile_n=160,tile_k=48"
VOCAB_TILE = 160 * 32
"""a scan of deepselect goes by 32 elements a unit of tile_n"""


class Tiled(CpuBackend):
    @classmethod
    def describe(cls, options: Mapping[str, str]) -> Description:
        ops = {"deepgemm.bf16_gemm_nt": supported(tiles={"m": 96, "n": 160, "k": 48}),
               "deepselect.topk": supported(tiles={"vocab": VOCAB_TILE})}
        return Description("tiled", ops, requirements={"input_row_bytes": 64, "output_row_bytes": 32},
                           platform="simulator", fork_after_import=True)

    def __init__(self, *, device: str, options: Mapping[str, str], group: Group | None) -> None:
        knobs = ",".join(filter(None, (TILES, options.get("knobs"))))
        super().__init__(device=device, options={"knobs": knobs}, group=group)
        self.slow_s = float(options.get("slow_s", 0))

    def run(self, op: str, kwargs: dict[str, Any]) -> Any:
        if self.slow_s:
            with open(os.environ["CONFORMANCE_FAKE_CLOCK"], "r+b") as f, mmap.mmap(f.fileno(), 8) as m:
                struct.pack_into("=d", m, 0, struct.unpack_from("=d", m)[0] + self.slow_s)
        return super().run(op, kwargs)
