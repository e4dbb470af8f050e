"""The number formats as data: significand, exponent range, special codes. One row a format.

Sources: IEEE 754-2019 (fp16, fp32, fp64), the bfloat16 definition of its hardware manuals, OCP 8-bit
Floating Point v1.0 (e4m3, e5m2), OCP Microscaling Formats v1.0 (e2m1, e8m0), the A100 white paper (tf32: the exponent
of fp32, the fraction of fp16, 19 bits), TileKernels 1.0 (e5m6: the upper 12 bits of fp16).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from conformance.protocol import FORMATS


@dataclass(frozen=True)
class FloatSpec:
    """A floating-point format: value = +-significand * 2**exponent, `p` significand bits.

    Codes are sign, exponent, fraction from the highest bit down. `max_code` is the largest finite
    positive code, `inf_code` None where there is no infinity, `nan_code` the quiet NaN that `encode`
    writes, None where there is no NaN.
    """

    name: str
    p: int
    emin: int
    """exponent of the smallest normal number"""
    emax: int
    """exponent of the largest finite number"""
    sign_bit: int
    max_code: int
    inf_code: int | None
    nan_code: int | None
    native: bool = False
    """NumPy has it: codes are values"""

    @property
    def u(self) -> float:
        """Unit roundoff of round to nearest, 2**-p."""
        return 2.0**-self.p

    @property
    def min_subnormal(self) -> float:
        """Smallest positive number; of e8m0, which has no subnormals, 2**emin."""
        return 2.0 ** (self.emin - self.p + 1)


#                 name    p   emin    emax  sign bit    largest finite      infinity            quiet NaN
_FLOATS = (
    FloatSpec("fp64", 53, -1022, 1023, 1 << 63, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF8000000000000, True),
    FloatSpec("fp32", 24, -126, 127, 1 << 31, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, True),
    FloatSpec("fp16", 11, -14, 15, 1 << 15, 0x7BFF, 0x7C00, 0x7E00, True),
    FloatSpec("tf32", 11, -126, 127, 1 << 18, 0x3FBFF, 0x3FC00, 0x3FE00),
    FloatSpec("bf16", 8, -126, 127, 1 << 15, 0x7F7F, 0x7F80, 0x7FC0),
    FloatSpec("e5m6", 7, -14, 15, 1 << 11, 0x7BF, 0x7C0, 0x7E0),
    FloatSpec("e5m2", 3, -14, 15, 1 << 7, 0x7B, 0x7C, 0x7E),
    FloatSpec("e4m3", 4, -6, 8, 1 << 7, 0x7E, None, 0x7F),
    FloatSpec("e2m1", 2, 0, 2, 1 << 3, 0x7, None, None),
    FloatSpec("e8m0", 1, -127, 127, 0, 0xFE, None, 0xFF),
)
_SAME_CODES = {"e2m1x2_lo": "e2m1", "e2m1x2_hi": "e2m1", "e5m6x8": "e5m6",
               "e8m0_byte": "e8m0", "e8m0x2": "e8m0", "e8m0x4": "e8m0"}
"""Storage forms: one code of theirs is a code of the format on the right."""

FLOATS: dict[str, FloatSpec] = {s.name: s for s in _FLOATS}
FLOATS |= {alias: FLOATS[name] for alias, name in _SAME_CODES.items()}
"""Every float format by name, the packed and byte forms included; `e2m1`, `e5m6` and `e8m0` name single codes."""

CODE_DTYPES: dict[str, np.dtype] = {name: np.dtype(f.codes) for name, f in FORMATS.items()}
CODE_DTYPES |= {"e2m1": np.dtype("uint8"), "e5m6": np.dtype("uint16"), "tf32": np.dtype("uint32")}
CODE_DTYPES |= {alias: CODE_DTYPES[name] for alias, name in _SAME_CODES.items()}
"""NumPy dtype of the codes of every format. A tf32 code shifted up by 13 is the fp32 pattern of the same number."""

INTEGERS = frozenset(name for name, dtype in CODE_DTYPES.items() if name not in FLOATS and dtype.kind in "iu")


def float_spec(fmt: str) -> FloatSpec | None:
    """The row of a float format; None for integers and bool.

    Raises KeyError for a name that no format has.
    """
    spec = FLOATS.get(fmt)
    if spec is None and fmt not in CODE_DTYPES:
        msg = f"unknown format {fmt!r}; known: {', '.join(sorted(CODE_DTYPES))}"
        raise KeyError(msg)
    return spec
