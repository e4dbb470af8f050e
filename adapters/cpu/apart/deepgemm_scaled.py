"""DeepGEMM with scales: the FP8 product and the cast. Faults and correct variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adapters.cpu.apart.quantise import exponent_up, quantised, words
from adapters.cpu.apart.row import FAULT, VARIANT, Args, Call, Function, Row, bytes_of, copied, once_accepted

FP8, CAST = "deepgemm.fp8_gemm_nt", "deepgemm.per_token_cast_to_fp8"
FLOOR = 1e-4
PACKED = 4


def _granularity(args: Args, side: str) -> tuple[int, int]:
    """(rows, columns) that share a scale of operand a or b."""
    own, both = args.get(f"recipe_{side}"), args.get("recipe")
    if own is not None:
        return own
    by_word = args["b"][1].dtype == torch.int32
    m, n, k = both if both is not None else ((1, 1, 128) if by_word else (1, 128, 128))
    return (m if side == "a" else n), k


def _groups(sf: torch.Tensor) -> torch.Tensor:
    """The scales as columns that may be moved: fp32 as they are, packed ones a byte each, int64."""
    if sf.dtype != torch.int32:
        return sf.clone()
    return torch.stack([(sf.long() >> 8 * i) & 255 for i in range(PACKED)], -1).flatten(1)


def _put_back(sf: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The inverse of `_groups`, with the strides of sf."""
    out = copied(sf)
    return out.copy_(groups if sf.dtype != torch.int32 else words(groups, 0))


def _moved(side: str, move: Callable[[Args, torch.Tensor, torch.Tensor], None]) -> Function:
    """The call with the scales of one operand changed in place by move(args, values, scale columns)."""

    def function(call: Call, args: Args) -> Any:
        data, sf = args[side]
        groups = _groups(sf)
        move(args, data, groups)
        return call(**{**args, side: (data, _put_back(sf, groups))})

    return function


def _columns(args: Args, data: torch.Tensor) -> int:
    """Elements along K; a packed FP4 operand stores two a byte."""
    return data.shape[1] * (2 if data.dtype == torch.int8 and data.stride(1) == 1 else 1)


def _last_row(args: Args, data: torch.Tensor, groups: torch.Tensor) -> None:
    if len(groups) == len(data) > 1 and len(data) % 2:
        groups[-1] = groups[-2]


def _tail_group(args: Args, data: torch.Tensor, groups: torch.Tensor) -> None:
    k, gran = _columns(args, data), _granularity(args, "a")[1]
    last = -(-k // gran) - 1
    if k % gran and last > 0:
        groups[:, last] = groups[:, last - 1]


def _fourth_group(args: Args, data: torch.Tensor, groups: torch.Tensor) -> None:
    if groups.shape[1] > PACKED - 1:
        groups[:, 3::4] = groups[:, 2::4][:, : groups[:, 3::4].shape[1]]


def _second_block(args: Args, data: torch.Tensor, groups: torch.Tensor) -> None:
    if 1 < len(groups) < len(data):
        groups[1] = groups[0]


def _signed_byte(args: Args, data: torch.Tensor, groups: torch.Tensor) -> None:
    if groups.dtype == torch.int64:
        groups[groups >= 128] = 0


def _through_bf16(args: Args, data: torch.Tensor, groups: torch.Tensor) -> None:
    if groups.dtype != torch.int64:
        groups.copy_(groups.bfloat16())


def _recoded(side: str, recode: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> Function:
    """The call with the codes of one operand changed, if they are of this dtype."""

    def function(call: Call, args: Args) -> Any:
        data, sf = args[side]
        if data.dtype != dtype:
            return call(**args)
        codes = recode(bytes_of(data.contiguous()))
        new = copied(data).copy_(codes.view(dtype))
        return call(**{**args, side: (new, sf)})

    return function


def _no_subnormals(codes: torch.Tensor) -> torch.Tensor:
    return torch.where((codes & 0x78) == 0, codes & 0x80, codes)


def _no_largest(codes: torch.Tensor) -> torch.Tensor:
    return torch.where((codes & 0x7F) == 0x7E, codes - 1, codes)


def _odd_sign_lost(codes: torch.Tensor) -> torch.Tensor:
    return codes & 0x7F


def _alpha_after_c(call: Call, args: Args) -> Any:
    c, d, alpha = args.get("c"), args["d"], args.get("alpha")
    if alpha is not None and c is not None and c.data_ptr() == d.data_ptr():
        d.mul_(alpha)
    return call(**args)


def _last_tile_from_the_end(call: Call, args: Args) -> Any:
    call(**args)
    d, tile = args["d"], 64
    m = len(d)
    tail = m % tile
    if m > tile and tail:
        d[m - tail :] = d[m - tile : m - tile + tail].clone()


def _rows_in_halves(call: Call, args: Args) -> Any:
    (a, sf), d, c = args["a"], args["d"], args.get("c")
    half = len(a) // 32 * 16
    if not half or len(sf) != len(a) or (c is not None and c.shape != d.shape):
        return call(**args)
    for part in (slice(0, half), slice(half, len(a))):
        call(**{**args, "a": (a[part], sf[part]), "d": d[part], "c": None if c is None else c[part]})


def _spread(args: Args, side: str) -> torch.Tensor:
    """float64 [rows, k]: operand times its scales. FP8 operands only."""
    data, sf = args[side]
    rows, cols = _granularity(args, side)
    scale = sf.double()
    if sf.dtype == torch.int32:
        byte = _groups(sf)
        scale = torch.exp2(byte.double() - 127).masked_fill(byte == 255, float("nan"))
    scale = scale.repeat_interleave(rows, 0)[: len(data)].repeat_interleave(cols, 1)[:, : data.shape[1]]
    return data.float().double() * scale


def _dequantised_first(call: Call, args: Args) -> Any:
    old = None if args.get("c") is None else args["c"].double().clone()
    call(**args)
    d = args["d"]
    if d.numel() and args["a"][0].shape[1] and all(args[s][0].dtype == torch.float8_e4m3fn for s in "ab"):
        total = (1.0 if args.get("alpha") is None else args["alpha"]) * (_spread(args, "a") @ _spread(args, "b").T)
        d.copy_((total if old is None else total + old).float())


def _b_in_a_row_major_copy(call: Call, args: Args) -> Any:
    data, sf = args["b"]
    if data.dtype != torch.float8_e4m3fn:
        return call(**args)
    return call(**{**args, "b": (bytes_of(data).contiguous().clone().view(data.dtype), copied(sf))})


# ---- the cast -----------------------------------------------------------------------------------------------------


def _cast_anew(*, floor: float = FLOOR, prepare: Callable[..., torch.Tensor] | None = None, **steps: Any) -> Function:
    """The cast by the documented rule with some steps changed; results stand where the true call put them."""

    def function(call: Call, args: Args) -> Any:
        data, sf = call(**args)
        x, width = args["x"], args.get("gran_k", 128)
        if not x.numel() or not bool(x.isfinite().all()):
            return data, sf
        mode = "round" if args["use_ue8m0"] else "plain"
        own = dict(steps)
        if prepare is not None:
            own["amax"] = prepare(x, width)
        codes, scale, exponents = quantised(x, "e4m3", width, mode, floor, reciprocal=True, **own)
        bytes_of(data).copy_(codes)
        sf.copy_(words(exponents, 127) if sf.dtype == torch.int32 else scale)
        return data, sf

    return function


def _amax_with_the_columns_before(x: torch.Tensor, width: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The partial group's vector load starts early enough to be full."""

    def amax(parts: torch.Tensor) -> torch.Tensor:
        out = parts.abs().amax(-1)
        if x.shape[1] % width and x.shape[1] > width:
            out[:, -1] = x[:, -width:].float().abs().amax(-1)
        return out

    return amax


def _exponent_nearest(a: torch.Tensor) -> torch.Tensor:
    return ((a.view(torch.int32).long() + 0x400000) >> 23).clamp(1, 254)


def _exponent_over(a: torch.Tensor) -> torch.Tensor:
    return ((a.view(torch.int32).long() >> 23) + 1).clamp(1, 254)


def _cast_rows_in_halves(call: Call, args: Args) -> Any:
    result = call(**args)
    half = len(args["x"]) // 2
    if half:
        for part in (slice(0, half), slice(half, None)):
            data, sf = call(**{**args, "x": args["x"][part]})
            bytes_of(result[0])[part] = bytes_of(data)
            result[1][part] = sf
    return result


ROWS = (
    Row("fp8_last_row_by_its_neighbours_scale", FP8, FAULT,
        "The last of an odd number of rows of A is scaled as the row before. Shows for odd m > 1 and scales by row.",
        "section 6 F14: mn % 4 != 0", _moved("a", _last_row)),
    Row("fp8_tail_group_clamped", FP8, FAULT,
        "The partial K group of A takes the scale of the group before. Shows where k is no multiple of the granularity "
        "and larger.",
        "section 6 F15: odd number of K scales", _moved("a", _tail_group)),
    Row("fp8_fourth_group_by_the_third", FP8, FAULT,
        "Every fourth K group of B takes the scale of the third. Shows for four K groups.",
        "section 2.1: four consecutive K groups a word", _moved("b", _fourth_group)),
    Row("fp8_second_block_of_b", FP8, FAULT,
        "Rows 128 to 255 of B take the scale of the first 128. Shows for block scales and n > 128.",
        "section 6 F30: operand mix-up of block scales", _moved("b", _second_block)),
    Row("fp8_scale_through_a_signed_byte", FP8, FAULT,
        "An exponent byte of 128 or more is read as negative, so the scale vanishes. Shows for packed scales of A that "
        "are 2 or more.",
        "FlashMLA section 6 report 24, same class: sign extension", _moved("a", _signed_byte)),
    Row("fp8_scales_in_bf16", FP8, FAULT,
        "FP32 scales of B are rounded to bf16. Shows for scales of more than 8 bits.",
        "section 3: promoted by the FP32 scale product", _moved("b", _through_bf16)),
    Row("fp8_subnormals_flushed", FP8, FAULT,
        "Subnormal e4m3 codes of A count as zero. Shows with such codes.",
        "section 7: subnormal E4M3 codes", _recoded("a", _no_subnormals, torch.float8_e4m3fn)),
    Row("fp8_largest_code_lowered", FP8, FAULT,
        "+-448 in B counts as +-416. Shows with these codes.",
        "section 7: +-448", _recoded("b", _no_largest, torch.float8_e4m3fn)),
    Row("fp4_odd_sign_lost", FP8, FAULT,
        "The sign of odd elements of an FP4 B is lost. Shows for an FP4 B with negative odd elements.",
        "section 7: all 16 FP4 codes in both nibbles", _recoded("b", _odd_sign_lost, torch.int8)),
    Row("fp8_alpha_after_c", FP8, FAULT,
        "alpha is applied behind the accumulation. Shows where C is D and alpha is not 1.",
        "section 2.1: alpha scales only the product", _alpha_after_c),
    Row("fp8_last_tile_from_the_end", FP8, FAULT,
        "The partial row tile is computed from row m - 64 on but stored at its own place. Shows for m over 64 and no "
        "multiple.",
        "section 6 F5: store bounds", _last_tile_from_the_end),
    Row("fp8_rows_in_halves", FP8, VARIANT,
        "Two calls, each half of the rows.",
        "section 2.1", once_accepted(_rows_in_halves, "d")),
    Row("fp8_dequantised_first", FP8, VARIANT,
        "Operands times scales in float64, one product, rounded to fp32 and to D.",
        "section 3: from the dequantised operands", _dequantised_first),
    Row("fp8_b_copied", FP8, VARIANT,
        "B in a contiguous copy.",
        "section 2.1: both major-nesses", once_accepted(_b_in_a_row_major_copy, "d")),
    Row("cast_amax_without_sign", CAST, FAULT,
        "The block maximum is taken of x, not of |x|. Shows where the largest magnitude of a block is negative.",
        "section 3: amax", _cast_anew(amax=lambda b: b.amax(-1))),
    Row("cast_floor_too_low", CAST, FAULT,
        "The floor of 1e-4 under amax is 1e-8. Shows for blocks of zeros or under 1e-4.",
        "section 3: clamped below at 1e-4", _cast_anew(floor=1e-8)),
    Row("cast_tail_reads_back", CAST, FAULT,
        "The maximum of the partial group covers columns of the group before. Shows where n is no multiple of gran_k "
        "and larger.",
        "TileKernels section 7 report 2: tail masking", _cast_anew(prepare=_amax_with_the_columns_before)),
    Row("cast_exponent_nearest", CAST, FAULT,
        "UE8M0 exponents are rounded to nearest, so values saturate. Shows with use_ue8m0 and a mantissa under 1.5.",
        "section 3: rounded up", _cast_anew(byte=_exponent_nearest)),
    Row("cast_exact_power_bumped", CAST, FAULT,
        "A scale that is a power of two gets the next one. Shows with use_ue8m0 where amax/448 is exact.",
        "section 3: up if any mantissa bit is set", _cast_anew(byte=_exponent_over)),
    Row("cast_ties_away", CAST, FAULT,
        "Values halfway between two codes go away from zero. Shows with such values.",
        "section 3: cast to nearest even", _cast_anew(away=lambda v: True)),
    Row("cast_negative_ties_away", CAST, FAULT,
        "As above, for negative values only. Shows with negative ties.",
        "section 3: cast to nearest even", _cast_anew(away=lambda v: v < 0)),
    Row("cast_written_anew", CAST, VARIANT,
        "The documented rule, code by code.",
        "section 3", _cast_anew(byte=exponent_up)),
    Row("cast_rows_in_halves", CAST, VARIANT,
        "Two calls, each half of the rows.",
        "section 3", _cast_rows_in_halves),
)
