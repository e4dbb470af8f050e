"""Stochastic rounding with random bits that are given, so that the result is one definite code.

The bits of |x| below the last place of the format, as far as the random number reaches, are added to the random number;
the carry decides between the two neighbours. This is the rule of PTX's `cvt.rs` and, written as a comparison of the
dropped bits with the random ones, of Ascend's bf16 cast. How an op makes its random bits is the op's own matter.
"""

from __future__ import annotations

import numpy as np

from references.formats.codec import bits, decode, default_overflow, encode, ulp
from references.formats.spec import float_spec

Array = np.ndarray

MOST_BITS = 32


def encode_stochastic(values: Array, fmt: str, random_bits: Array, *, n_bits: int,
                      overflow: str | None = None) -> Array:
    """Codes of float64 values [...]; the dtype is the format's.

    random_bits: integers 0 to 2**n_bits - 1, of any shape that broadcasts to that of the values.
    n_bits: how many dropped bits take part, 1 to 32; lower ones are cut off first. With f the distance from the
        neighbour towards zero in units of the last place, |x| is rounded up when
        floor(f * 2**n_bits) + random_bits >= 2**n_bits, so with probability f if f has no more bits.
    overflow: as in `codec.encode`; the number that would follow the largest finite one is what overflows.

    Zeros, infinities, NaN and what the format holds exactly are encoded as `codec.encode` does.
    Raises ValueError for a format without a sign (e8m0, integers, bool), an overflow that the format does not have,
    and random bits out of range; KeyError for an unknown format.
    """
    spec = float_spec(fmt)
    if spec is None or not spec.sign_bit:
        msg = f"{fmt} can't be rounded stochastically"
        raise ValueError(msg)
    random_bits = np.asarray(random_bits)
    if not 1 <= n_bits <= MOST_BITS or random_bits.dtype.kind not in "iu":
        msg = f"random bits are integers of 1 to {MOST_BITS} bits, got {random_bits.dtype} with n_bits={n_bits}"
        raise ValueError(msg)
    if random_bits.size and (random_bits.min() < 0 or int(random_bits.max()) >> n_bits):
        msg = f"random bits must lie in 0 to 2**{n_bits} - 1"
        raise ValueError(msg)

    values = np.asarray(values, np.float64)
    down = encode(values, fmt, rounding="toward_zero", overflow=overflow)
    below = np.abs(decode(down, fmt))
    with np.errstate(invalid="ignore"):  # an infinity less itself and NaN: no comparison with them holds
        dropped = np.minimum((np.abs(values) - below) / ulp(below, fmt), 1.0)
        sums = np.floor(dropped * 2.0**n_bits) + random_bits  # exact: n_bits + 1 bits at most
        up = sums >= 2.0**n_bits

    raw = bits(down)
    unsigned = raw.dtype.type
    past = up & ((raw & unsigned(spec.sign_bit - 1)) == unsigned(spec.max_code))
    beyond = {"inf": spec.inf_code, "nan": spec.nan_code, "saturate": spec.max_code}[overflow or default_overflow(fmt)]
    codes = np.where(past, (raw & unsigned(spec.sign_bit)) | unsigned(beyond), raw + up.astype(raw.dtype))
    return np.asarray(codes.astype(raw.dtype)).view(down.dtype)
