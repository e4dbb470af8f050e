"""Several codes in one storage element: every form there and back, the order of the codes, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.protocol import FORMATS
from references.formats.packing import PACKINGS, pack, unpack
from references.formats.spec import CODE_DTYPES, FLOATS

CODE_BITS = {"e2m1": 4, "e8m0": 8, "e5m6": 12}
PUBLISHED = {
    # form: codes, storage dtype, storage as unsigned numbers
    "e2m1x2_lo": ([0x1, 0xF], "int8", [0xF1]),
    "e2m1x2_hi": ([0x1, 0xF], "int8", [0x1F]),
    "e8m0x2": ([0x01, 0xFE], "int16", [0xFE01]),
    "e8m0x4": ([0x01, 0x02, 0x03, 0xFF], "int32", [0xFF030201]),
    "e5m6x8": ([0x123, 0x456, 0x789, 0xABC, 0xDEF, 0x012, 0x345, 0xFED], "uint32",
               [0x12345678, 0x9ABCDEF0, 0x12345FED]),
}


def random_codes(fmt: str, shape: tuple[int, ...]) -> np.ndarray:
    dtype = CODE_DTYPES[fmt]
    return np.random.default_rng(1).integers(0, 1 << CODE_BITS[FLOATS[fmt].name], shape, dtype=dtype)


@pytest.mark.parametrize("fmt", PACKINGS)
@pytest.mark.parametrize("shape", [(8,), (3, 16), (2, 0), (0, 8), (2, 3, 24)])
def test_packing_there_and_back(fmt, shape):
    codes, row = random_codes(fmt, shape), PACKINGS[fmt]
    for a in (codes, np.asfortranarray(codes), np.flip(np.flip(codes, -1).copy(), -1)):
        storage = pack(a, fmt)
        assert storage.dtype == row.storage
        assert storage.shape == (*shape[:-1], shape[-1] // row.codes * row.words)
        assert storage.nbytes * 8 == codes.size * CODE_BITS[FLOATS[fmt].name]
        again = unpack(storage, fmt)
        assert again.dtype == codes.dtype
        np.testing.assert_array_equal(again, codes)
    every_other_row = np.repeat(pack(codes, fmt)[None], 4, axis=0)[::2]
    np.testing.assert_array_equal(unpack(every_other_row, fmt), [codes, codes])


@pytest.mark.parametrize("fmt", PACKINGS)
def test_each_code_lies_where_its_form_says(fmt):
    codes, storage, words = PUBLISHED[fmt]
    unsigned = np.array(words, f"u{np.dtype(storage).itemsize}")
    got = pack(np.array(codes, CODE_DTYPES[fmt]), fmt)
    assert got.dtype == storage
    np.testing.assert_array_equal(got.view(unsigned.dtype), unsigned)
    np.testing.assert_array_equal(unpack(unsigned.view(storage), fmt), codes)


@pytest.mark.parametrize("fmt", PACKINGS)
def test_a_code_moves_only_its_own_bits(fmt):
    """Every code of the format, in every place, among zeros: no other code changes, no bit is shared."""
    row, bits = PACKINGS[fmt], CODE_BITS[FLOATS[fmt].name]
    raw = np.arange(1 << bits, dtype=CODE_DTYPES[fmt])
    seen = 0
    for place in range(row.codes):
        codes = np.zeros((len(raw), row.codes), raw.dtype)
        codes[:, place] = raw
        storage = pack(codes, fmt)
        np.testing.assert_array_equal(unpack(storage, fmt), codes)
        mask = int.from_bytes(storage[-1].tobytes(), "little")
        assert bin(mask).count("1") == bits
        assert not mask & seen
        seen |= mask
    assert seen == (1 << bits * row.codes) - 1


def test_the_nibble_orders_and_the_widths_of_words_are_told_apart():
    codes = random_codes("e2m1x2_lo", (4, 16))
    swapped = unpack(pack(codes, "e2m1x2_lo"), "e2m1x2_hi")
    assert not np.array_equal(swapped, codes)
    np.testing.assert_array_equal(swapped.reshape(4, 8, 2)[..., ::-1].reshape(4, 16), codes)
    scales = random_codes("e8m0x4", (3, 8))
    assert pack(scales, "e8m0x2").tobytes() == pack(scales, "e8m0x4").tobytes() == scales.tobytes()


def test_the_words_of_e5m6_hold_the_upper_bits_of_fp16():
    """As TileKernels reads them: twelve bits of the 96, from the top, with four zeros are an fp16."""
    codes = random_codes("e5m6", (5, 8))
    for row, words in zip(codes, pack(codes, "e5m6x8"), strict=True):
        whole = int(words[0]) << 64 | int(words[1]) << 32 | int(words[2])
        halves = np.array([(whole >> (84 - 12 * i) & 0xFFF) << 4 for i in range(8)], np.uint16)
        np.testing.assert_array_equal(halves, row << 4)


def test_the_table_says_what_the_protocol_says():
    for name, f in FORMATS.items():
        row = PACKINGS.get(name)
        assert (row.storage, row.codes, row.words) == (f.storage, f.per_item, 1) if row else f.per_item == 1


@pytest.mark.parametrize(("function", "argument", "fmt", "error", "said"), [
    (pack, np.zeros(3, np.uint8), "e2m1x2_lo", ValueError, "multiple of 2"),
    (pack, np.uint8(1), "e8m0x4", ValueError, "multiple of 4"),
    (pack, np.zeros(5, np.uint8), "e8m0x2", ValueError, "multiple of 2"),
    (pack, np.zeros(12, np.uint16), "e5m6x8", ValueError, "multiple of 8"),
    (pack, np.array([17, 0], np.uint8), "e2m1x2_lo", ValueError, "4 bits, got 17"),
    (pack, np.array([0, 16], np.uint8), "e2m1x2_hi", ValueError, "4 bits, got 16"),
    (pack, np.full(8, 4096, np.uint16), "e5m6x8", ValueError, "12 bits, got 4096"),
    (unpack, np.zeros(4, np.uint8), "e8m0x4", TypeError, "int32"),
    (unpack, np.zeros(4, np.int32), "e8m0x2", TypeError, "int16"),
    (unpack, np.zeros(4, np.uint32), "e5m6x8", ValueError, "multiple of 3"),
    (unpack, np.int8(1), "e2m1x2_hi", ValueError, "multiple of 1"),
    (pack, np.zeros(2), "e2m1x2", KeyError, "unknown format"),
    (unpack, np.zeros(2), "e2m1x2", KeyError, "unknown format"),
])
def test_what_can_not_be_packed_is_refused(function, argument, fmt, error, said):
    with pytest.raises(error, match=said):
        function(argument, fmt)


def test_one_code_an_element_passes_as_it_is():
    a = np.ones(3, np.float32)
    assert pack(a, "fp32") is a
    assert unpack(a, "fp32") is a
