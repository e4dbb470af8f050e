"""Dense and M-grouped GEMMs of DeepGEMM: D = A B^T (+ C), accumulated in fp32, rounded to D once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from references.bounds.basic import dot, rounding
from references.bounds.constants import RANDOM_FAMILIES
from references.bounds.gemm import TC14_UNIT, chunk_magnitude, tensor_core_14_bit
from references.bounds.profile import resolve
from references.deepgemm.accumulate import Sums, either, lowest_bit, may_overflow, products, within
from references.expected import Array, Expected, Inputs, Problem, Within
from references.formats import codec
from references.large.product import LARGE, LargeProduct
from references.tilekernels.arguments import argument
from references.typical import Typical

CHUNK = 128
"""columns of K between promotions of an FP8 partial sum"""
_BF16_SPECIAL = np.uint16(0x7F80)
"""the exponent of NaN and infinities"""
_SMALL = 2.0**-100
"""scales below this, or products of two, may bring what they scale below fp32's range"""
_TOO_SMALL = 2.0**-131
"""the same of powers of two: a product of two e4m3 numbers is a multiple of 2**-18, and fp32 ends at 2**-149"""

Profile = Mapping[str, Any]


def bf16_gemm_nt(problem: Problem, inputs: Inputs, profile: Profile) -> dict[Any, Expected]:
    """`deepgemm.bf16_gemm_nt`: d[m,n] = alpha sum_k a[m,k] b[n,k] (+ c[m,n]).

    c enters before the one rounding; in place (aliased) c holds d's codes before the call. k = 0 gives c, or zeros.

    Variant: out (bf16, fp32); c (none, apart, aliased). Argument (default): alpha (1.0).
    Inputs: a (m, k), b (n, k) bf16; c (m, n), or a shape that broadcasts to it, in the format of out, or d where c is
    aliased and no input is named c. Output: d.
    Family: of a random one, partial sums are bounded by chance (2 exp(-18) an element).
    Profile: subnormals, partial; c_added "before_rounding" (default), or "after_rounding" where the product is rounded
    to d's format and then c added, with a second rounding.
    Products of 2**36 terms and more are projected or sampled (`large.product`) where nothing is added to them.
    """
    if _large(problem, inputs, profile):
        family = _family(problem)
        return {"d": LargeProduct(inputs.codes("a"), inputs.codes("b"), "bf16", family == "exact", problem.seed,
                                  family in RANDOM_FAMILIES)}
    sums = products(inputs.real("a"), inputs.real("b"), profile, _family(problem))
    return {"d": _finish(problem, inputs, profile, sums)}


def fp8_gemm_nt(problem: Problem, inputs: Inputs, profile: Profile) -> dict[Any, Expected]:
    """`deepgemm.fp8_gemm_nt`: d[m,n] = alpha sum_k a[m,k] sa[m,k/ga] b[n,k] sb[n/gn,k/gb] (+ c[m,n]).

    Scales may be applied to elements, to products or to the partial sum of a block of K, one by one or multiplied
    first, where that does not overflow by itself. A scale of 0 gives 0, NaN poisons what it scales. Where the product
    of the two scales overflows fp32, nothing is promised.

    Variant: out (bf16, fp32); c (none, apart, aliased); scales (fp32, pow2: fp32 too, ue8m0).
    Arguments (default): recipe (gran_m, gran_n, gran_k), or recipe_a and recipe_b (gran_mn, gran_k); without them
    (1, 128, 128) for fp32 scales and (1, 1, 128) for ue8m0; alpha (1.0).
    Inputs: a (m, k), b (n, k) e4m3; a_scale (ceil(m / gran), ceil(k / gran_k)), b_scale alike: fp32, or e8m0x4 codes,
    whose columns behind the last block of K are ignored; c (or d) as in bf16_gemm_nt. Output: d.
    Family and profile: as bf16_gemm_nt; accumulator fp8_tc14_promoted keeps 14 bits inside each 128 of K.
    """
    gran_a, gran_b = _granularity(problem)
    step = min(gran_a[1], gran_b[1])
    a, b = inputs.real("a"), inputs.real("b")
    sa = _expand(inputs.real("a_scale"), gran_a, a.shape)
    sb = _expand(inputs.real("b_scale"), gran_b, b.shape)
    blocks_a, blocks_b = sa[:, ::step], sb[:, ::step]
    with np.errstate(invalid="ignore"):
        scaled_a, scaled_b = a * sa, b * sb
    exactly = np.logical_and.outer(_powers_of_two(blocks_a), _powers_of_two(blocks_b))
    sums = products(scaled_a, scaled_b, profile, _family(problem)).scaled(exactly, 2 * blocks_a.shape[1] + 4)
    sums = sums.erring(_underflow((a, scaled_a, blocks_a), (b, scaled_b, blocks_b), exactly))
    if resolve(profile)["accumulator"] == "fp8_tc14_promoted":
        sums = sums.erring(_narrow_chunks(scaled_a, scaled_b, sums.unit))
    return {"d": _finish(problem, inputs, profile, sums, _scales_overflow(blocks_a, blocks_b))}


def m_grouped_bf16_gemm_nt_contiguous(problem: Problem, inputs: Inputs, profile: Profile) -> dict[Any, Expected]:
    """`deepgemm.m_grouped_bf16_gemm_nt_contiguous`: each row of a times the b of the row's group.

    labels: grouped_layout[row] is the group; rows of a negative label are unspecified.
    psum: grouped_layout[g] is the end of group g's rows; it starts at the end before, rounded up to the alignment
    (the first at 0). Rows in no group are unspecified.

    Variant: layout (labels, psum); out, if present (bf16 by default). Argument (default): the process-wide setting
    mk_alignment_for_contiguous_layout (128). Family and profile: as bf16_gemm_nt, without c.
    Inputs: a (M, k), b (G, n, k) bf16; grouped_layout int32, (M,) or (G,). Output: d (M, n).
    """
    a, b = inputs.real("a"), inputs.real("b")
    layout = inputs.codes("grouped_layout").astype(np.int64)
    if problem.variant.layout == "psum":
        layout = _labels_of_ends(layout, len(a), argument(problem, "mk_alignment_for_contiguous_layout", 128))
    value, bound = np.zeros((len(a), b.shape[1])), np.zeros((len(a), b.shape[1]))
    free = np.ones((len(a), b.shape[1]), bool)
    deviation, drift = np.zeros(value.shape), np.zeros(value.shape)
    out = problem.variant.get("out", "bf16")
    for group in np.unique(layout[(layout >= 0) & (layout < len(b))]):
        rows = layout == group
        part = within(products(a[rows], b[group], profile, _family(problem)), out, profile)
        value[rows], bound[rows] = part.value, part.bound
        free[rows] = False if part.unspecified is None else part.unspecified
        if part.typical is not None:
            deviation[rows], drift[rows] = part.typical.deviation, part.typical.drift
    typical = Typical(deviation, drift) if deviation.any() else None
    return {"d": Within(value, bound, free if free.any() else None, typical)}


def _large(problem: Problem, inputs: Inputs, profile: Profile) -> bool:
    """Whether the product is too large for float64, and one that can be judged by samples."""
    a, b = inputs.codes("a"), inputs.codes("b")
    if a.shape[0] * b.shape[0] * a.shape[1] < LARGE or problem.variant.c != "none":
        return False
    declared, strict = resolve(profile), resolve({})
    plain = all(declared[key] == strict[key] for key in ("accumulator", "input_conversion", "partial", "subnormals"))
    finite = not any((codec.bits(x) & _BF16_SPECIAL == _BF16_SPECIAL).any() for x in (a, b))
    return plain and finite and argument(problem, "alpha", 1) == 1


def _family(problem: Problem) -> str:
    return getattr(problem, "family", "")


def _finish(
    problem: Problem, inputs: Inputs, profile: Profile, sums: Sums, unspecified: Array | None = None
) -> Within:
    out = problem.variant.out
    alpha = float(np.float32(argument(problem, "alpha", 1.0)))
    if alpha != 1:
        if abs(alpha) < 1:
            unspecified = either(unspecified, may_overflow(sums))
        sums = sums.times(alpha)
    if problem.variant.c != "none":
        if resolve(profile)["c_added"] == "after_rounding":
            sums = sums.rounded(rounding(sums.finite, out, dot(sums.partials, sums.terms) + sums.extra))
        sums = sums.plus(np.broadcast_to(inputs.real("c" if "c" in inputs else "d"), sums.value.shape))
    return within(sums, out, profile, unspecified)


def _labels_of_ends(ends: Array, rows: int, alignment: int) -> Array:
    labels = np.full(rows, -1, np.int64)
    start = 0
    for group, end in enumerate(ends.tolist()):
        labels[start:end] = group
        start = -(-end // alignment) * alignment
    return labels


def _granularity(problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rows, columns) that share a scale, of a and of b."""
    values = problem.values
    if values.get("recipe_a") is not None:
        return tuple(values["recipe_a"]), tuple(values["recipe_b"])
    default = (1, 1, 128) if problem.variant.scales == "ue8m0" else (1, 128, 128)
    gran_m, gran_n, gran_k = values.get("recipe") or default
    return (gran_m, gran_k), (gran_n, gran_k)


def _expand(scale: Array, gran: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """A scale for each element."""
    rows, columns = shape
    full = scale if gran[0] == 1 else np.repeat(scale, gran[0], axis=0)
    return np.repeat(full[:rows], gran[1], axis=1)[:, :columns]


def _powers_of_two(scale: Array) -> Array:
    """True for rows in which no scale has a significand of its own, so that scaling rounds nothing."""
    known = np.abs(np.where(np.isfinite(scale), scale, 0))
    return ((known == 0) | (lowest_bit(known) == known)).all(axis=1)


def _underflow(a: tuple[Array, Array, Array], b: tuple[Array, Array, Array], exactly: Array) -> Array | float:
    """What is lost where a scale, alone or with the other one, brings a factor below fp32's range.

    a, b: elements (rows, k), the same scaled, and scales (rows, blocks); exactly: where these are powers of two.
    """
    low_a, low_b = (np.where(np.abs(x[2]) > 0, np.abs(x[2]), np.inf).min(axis=1, initial=np.inf) for x in (a, b))
    low = np.minimum(np.multiply.outer(low_a, low_b), np.minimum.outer(low_a, low_b))
    if not np.any(low < _SMALL):
        return 0.0
    size_a, size_b = ([np.nan_to_num(np.abs(part), posinf=0) for part in x[:2]] for x in (a, b))
    lost = np.add.outer(size_a[1].sum(axis=1), size_b[1].sum(axis=1)) + size_a[0] @ size_b[0].T
    return np.where(exactly & (low >= _TOO_SMALL), 0.0, codec.min_subnormal("fp32") * lost)


def _scales_overflow(sa: Array, sb: Array) -> Array | None:
    """Where a product of scales (rows, blocks of K) overflows fp32: infinity, or NaN for a sum of zero."""
    size_a, size_b = (np.nan_to_num(np.abs(s), posinf=0) for s in (sa, sb))
    limit = codec.overflow_threshold("fp32")
    if size_a.max(initial=0) * size_b.max(initial=0) < limit:
        return None
    over = [np.multiply.outer(x, y) >= limit for x, y in zip(size_a.T, size_b.T, strict=True)]
    return np.logical_or.reduce(over)


def _narrow_chunks(a: Array, b: Array, unit: Array) -> Array:
    """Error of 14 significand bits inside each chunk of K, for data in random order along K.

    A chunk whose magnitudes add up to less than 2**13 units is exact.
    """
    a, b = (np.where(np.isfinite(x), x, 0) for x in (a, b))
    squares, total, exact = np.zeros(unit.shape), np.zeros(unit.shape), np.ones(unit.shape, bool)
    for k in range(0, a.shape[1], CHUNK):
        part_a, part_b = a[:, k : k + CHUNK], b[:, k : k + CHUNK]
        c = part_a @ part_b.T
        squares += chunk_magnitude(c, (part_a**2) @ (part_b**2).T) ** 2
        total += c
        exact &= np.abs(part_a) @ np.abs(part_b).T < unit / TC14_UNIT
    return np.where(exact, 0.0, tensor_core_14_bit(total, np.sqrt(squares)))
