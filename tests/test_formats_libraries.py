"""Decoding and encoding against ml_dtypes and torch: equal by the rule that each library has. Where no rule of ours is
theirs, a table holds the differences, which is asserted too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_formats import SIGNED, SMALL, all_codes, ties

from references.formats import codec
from references.formats.spec import CODE_DTYPES

ml_dtypes = pytest.importorskip("ml_dtypes")

Array = np.ndarray

ML = {"fp16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e2m1": "float4_e2m1fn",
      "e8m0": "float8_e8m0fnu"}
TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
         "e8m0": torch.float8_e8m0fnu}
OVERFLOW = {("ml_dtypes", "e4m3"): "nan", ("torch", "e4m3"): "saturate"}
"""what a library does past the largest finite number where it is not the codec's default"""
PAIRS = [("ml_dtypes", f) for f in SMALL if f in ML] + [("torch", f) for f in SMALL if f in TORCH]


def ml_dtype(fmt: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, ML[fmt], ML[fmt]))


def unsigned(codes: torch.Tensor) -> Array:
    return codes.view(torch.uint8 if codes.itemsize == 1 else torch.uint16).numpy()


def theirs(library: str, x: Array, fmt: str) -> Array:
    """Codes, unsigned, of an array by the library's own cast from its dtype."""
    if library == "torch":
        return unsigned(torch.from_numpy(x).to(TORCH[fmt]))
    with np.errstate(over="ignore", invalid="ignore"):
        return codec.bits(x.astype(ml_dtype(fmt)))


@pytest.mark.parametrize("fmt", [f for f in SMALL if f in ML])
def test_every_code_decodes_as_ml_dtypes_and_torch_have_it(fmt):
    codes = all_codes(fmt)
    got = codec.decode(codes, fmt)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        np.testing.assert_array_equal(got, codec.bits(codes).view(ml_dtype(fmt)).astype(np.float64))
    np.testing.assert_array_equal(codec.is_nan(codes, fmt), np.isnan(got))
    if fmt in TORCH:
        values = torch.from_numpy(codec.bits(codes).copy()).view(TORCH[fmt]).to(torch.float64).numpy()
        np.testing.assert_array_equal(got, values)
        number = ~np.isnan(got)
        np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(values)[number])


@pytest.mark.parametrize(("library", "fmt"), [(lib, f) for lib, f in PAIRS if f in SIGNED])
def test_encoding_is_that_of_the_library_with_the_library_s_overflow(library, fmt):
    """From float32, which holds every tie: all of them, one float32 to each side, and all that lies beyond."""
    with np.errstate(over="ignore"):
        x, _, place = ties(fmt)
        x = x[(place == 0) | (place == 2)].astype(np.float32)
        x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))])
        x = np.concatenate([x, np.float32(codec.max_finite(fmt)) * np.float32([1, 1.01, 1.1, 2, 1e6]), [np.inf]])
    x = np.concatenate([x, -x]).astype(np.float32)
    ours = codec.encode(x, fmt, overflow=OVERFLOW.get((library, fmt)))
    np.testing.assert_array_equal(codec.bits(ours), theirs(library, x, fmt))


@pytest.mark.parametrize("library", ["ml_dtypes", "torch"])
def test_e8m0_is_that_of_the_libraries_for_positive_numbers_but_the_smallest(library):
    x = np.ldexp(np.array([1.0, 1.25, 1.5, 1.75]), np.arange(-127, 128)[:, None]).astype(np.float32).ravel()
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf)), [np.inf, np.nan]])
    differs = (x > 2.0**-127) & (x < 1.5 * 2.0**-127)  # nearer to 2**-127; the libraries give 2**-126
    ours, its = codec.encode(x, "e8m0"), theirs(library, x.astype(np.float32), "e8m0")
    np.testing.assert_array_equal(ours[~differs], its[~differs])
    assert np.all(ours[differs] == 0)
    up = codec.decode(codec.encode(x, "e8m0", rounding="up"), "e8m0")
    number = np.isfinite(up)
    assert np.all((up >= x)[number] & (up < 2 * x.astype(np.float64))[number])


# --- where they differ ------------------------------------------------------------------------------------

NAN, MINUS_NAN = np.float32(np.nan), np.copysign(np.float32(np.nan), np.float32(-1))
DIFFERENCES = [
    # library, format, value, its code, ours by default
    ("ml_dtypes", "e4m3", np.float32(465), 0x7F, 0x7E),
    ("ml_dtypes", "e4m3", np.float32(-465), 0xFF, 0xFE),
    ("ml_dtypes", "e4m3", np.float32(np.inf), 0x7F, 0x7E),
    ("ml_dtypes", "e2m1", NAN, 0x8, 0x7),
    ("ml_dtypes", "e2m1", MINUS_NAN, 0x0, 0x7),
    ("ml_dtypes", "e8m0", np.float32(0), 0xFF, 0x00),
    ("ml_dtypes", "e8m0", np.float32(-0.0), 0xFF, 0x00),
    ("ml_dtypes", "e8m0", np.float32(1.25 * 2.0**-127), 0x01, 0x00),
    ("torch", "e8m0", np.float32(1.25 * 2.0**-127), 0x01, 0x00),
    ("torch", "e8m0", np.float32(-1), 0x7F, 0xFF),
    ("torch", "e8m0", np.float32(-100), 0x86, 0xFF),
    ("torch", "e5m2", NAN, 0x7F, 0x7E),
    ("torch", "e5m2", MINUS_NAN, 0xFF, 0xFE),
    ("torch", "bf16", NAN, 0xFFFF, 0x7FC0),
    ("torch", "bf16", MINUS_NAN, 0xFFFF, 0xFFC0),
    # from float64 they go through float32, which makes a tie of what lies just above one
    ("ml_dtypes", "bf16", 1 + 2.0**-8 + 2.0**-40, 0x3F80, 0x3F81),
    ("ml_dtypes", "e4m3", 1 + 2.0**-4 + 2.0**-40, 0x38, 0x39),
    ("ml_dtypes", "e5m2", 1 + 2.0**-3 + 2.0**-40, 0x3C, 0x3D),
    ("ml_dtypes", "e2m1", 1 + 2.0**-2 + 2.0**-40, 0x2, 0x3),
    ("ml_dtypes", "e8m0", 1.5 - 2.0**-40, 0x80, 0x7F),
    ("torch", "fp16", 1 + 2.0**-11 + 2.0**-40, 0x3C00, 0x3C01),
    ("torch", "bf16", 1 + 2.0**-8 + 2.0**-40, 0x3F80, 0x3F81),
    ("torch", "e4m3", 1 + 2.0**-4 + 2.0**-40, 0x38, 0x39),
    ("torch", "e5m2", 1 + 2.0**-3 + 2.0**-40, 0x3C, 0x3D),
    ("torch", "e8m0", 1.5 - 2.0**-40, 0x80, 0x7F),
]
AGREED = [
    # value, format, the code of both libraries and ours: next to the differences
    (np.float32(464), "e4m3", 0x7E), (NAN, "e4m3", 0x7F), (np.float32(61440), "e5m2", 0x7C),
    (np.nextafter(np.float32(61440), np.float32(0)), "e5m2", 0x7B), (np.float32(-np.inf), "e5m2", 0xFC),
    (np.float32(2.0**-149), "e8m0", 0x00), (np.float32(2.0**-127), "e8m0", 0x00),
    (np.float32(1.5 * 2.0**127), "e8m0", 0xFF), (NAN, "e8m0", 0xFF),
]


def _tested(library: str) -> bool:
    """Whether the installed version is the one of the tested set; what another one does is not for us to fail on."""
    lines = (Path(__file__).parent.parent / "constraints.txt").read_text(encoding="utf-8").split()
    version = {"torch": torch, "ml_dtypes": ml_dtypes}[library].__version__.partition("+")[0]
    return f"{library}=={version}" in lines


@pytest.mark.parametrize(("library", "fmt", "value", "its", "ours"), DIFFERENCES)
def test_the_known_differences_are_still_there(library, fmt, value, its, ours):
    x = np.full(20, value)  # more than one vector register: no separate path for the last few
    assert np.all(codec.bits(codec.encode(x, fmt)) == ours)
    assert its != ours
    if not _tested(library):
        pytest.skip(f"the table was made for the {library} of constraints.txt")
    assert np.all(theirs(library, x, fmt) == its)


@pytest.mark.parametrize(("value", "fmt", "code"), AGREED)
def test_next_to_the_differences_all_three_agree(value, fmt, code):
    x = np.full(20, value)
    assert np.all(codec.bits(codec.encode(x, fmt)) == code)
    for library in ("ml_dtypes", "torch"):
        assert np.all(theirs(library, x, fmt) == code), library


def test_torch_s_two_e2m1_a_byte_is_the_low_first_form():
    """torch has the type, but no cast to it: only the width of its storage can be compared."""
    two = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert two.itemsize == codec.pack(np.zeros(2, CODE_DTYPES["e2m1"]), "e2m1x2_lo").itemsize
