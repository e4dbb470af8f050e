"""DeepGEMM: dense and grouped products. Faults and correct variants, from its documented semantics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adapters.cpu.apart import deepgemm_scaled
from adapters.cpu.apart.row import FAULT, VARIANT, Args, Call, Function, Row, before, copied, once_accepted, toward_zero

DENSE, GROUPED = "deepgemm.bf16_gemm_nt", "deepgemm.m_grouped_bf16_gemm_nt_contiguous"
TILE = 64
Edit = Callable[[Args, torch.Tensor, torch.Tensor, Any, torch.Tensor], torch.Tensor]
"""(arguments, a, b, c or None, exact result) to the wrong one; all float64, the last free to change in place"""
_TAILS: dict[Any, torch.Tensor] = {}


def _alpha(args: Args) -> float:
    return 1.0 if args.get("alpha") is None else args["alpha"]


def _edited(edit: Edit) -> Function:
    """d after the true call, with the elements anew that the edit makes another number."""

    def function(call: Call, args: Args) -> None:
        old = None if args.get("c") is None else args["c"].double().clone()
        call(**args)
        d, k = args["d"], args["a"].shape[1]
        if not d.numel() or not k:
            return
        a, b = args["a"].double(), args["b"].double()
        exact = _alpha(args) * (a @ b.T)
        if old is not None:
            old = old.expand_as(exact)
            exact = exact + old
        wrong = edit(args, a, b, old, exact.clone())
        d.copy_(torch.where(wrong == exact, d, wrong.float().to(d.dtype)))

    return function


def _block_twice(args: Args, a: torch.Tensor, b: torch.Tensor, old: Any, value: torch.Tensor) -> torch.Tensor:
    block = slice(TILE, 2 * TILE)
    value[block] += _alpha(args) * (a[block, block] @ b[:, block].T)
    return value


def _tails_meet(args: Args, a: torch.Tensor, b: torch.Tensor, old: Any, value: torch.Tensor) -> torch.Tensor:
    m, k = a.shape
    if k % TILE and k > TILE and m % TILE:
        rows, tail = slice(m // TILE * TILE, m), slice(k // TILE * TILE, k)
        value[rows] -= _alpha(args) * (a[rows, tail] @ b[:, tail].T)
    return value


def _alpha_on_c(args: Args, a: torch.Tensor, b: torch.Tensor, old: Any, value: torch.Tensor) -> torch.Tensor:
    return value if old is None else value + (_alpha(args) - 1) * old


def _halves_in_bf16(args: Args, a: torch.Tensor, b: torch.Tensor, old: Any, value: torch.Tensor) -> torch.Tensor:
    k = a.shape[1]
    if k < 512:
        return value
    halves = [_alpha(args) * (a[:, s] @ b[:, s].T) for s in (slice(0, k // 2), slice(k // 2, k))]
    total = halves[0].float().bfloat16().double() + halves[1].float().bfloat16().double()
    return total if old is None else total + old


def _c_short_of_rows(args: Args, a: torch.Tensor, b: torch.Tensor, old: Any, value: torch.Tensor) -> torch.Tensor:
    if old is not None and len(value) > TILE:
        rows = slice(len(value) // TILE * TILE, None)
        value[rows] -= old[rows]
    return value


def _runtime_k_floor(args: Args, a: torch.Tensor, b: torch.Tensor, old: Any, value: torch.Tensor) -> torch.Tensor:
    k = a.shape[1]
    if "k" not in args.get("compiled_dims", "nk") and k > TILE:
        tail = slice(k // TILE * TILE, k)
        value -= _alpha(args) * (a[:, tail] @ b[:, tail].T)
    return value


def _overflow_saturates(args: Args, a: torch.Tensor, b: torch.Tensor, old: Any, value: torch.Tensor) -> torch.Tensor:
    if args["d"].dtype != torch.bfloat16:
        return value
    top = torch.finfo(torch.bfloat16).max
    return torch.where(value.isfinite(), value.clamp(-top, top), value)


def _nan_to_zero(args: Args, a: torch.Tensor, b: torch.Tensor, old: Any, value: torch.Tensor) -> torch.Tensor:
    return torch.where(value.isnan(), torch.zeros_like(value), value)


def _negative_cut(args: Args, a: torch.Tensor, b: torch.Tensor, old: Any, value: torch.Tensor) -> torch.Tensor:
    if args["d"].dtype != torch.bfloat16:
        return value
    return torch.where(value < 0, toward_zero(value, torch.bfloat16), value)


def _strided_b_pair(args: Args, a: torch.Tensor, b: torch.Tensor, old: Any, value: torch.Tensor) -> torch.Tensor:
    raw = args["b"]
    if raw.stride(0) == 1 and raw.stride(1) != 1 and len(raw) > 1:
        value[:, -2:] = value[:, -2:].flip(1)
    return value


def _alpha_in_bf16(call: Call, args: Args) -> None:
    if args.get("alpha") is not None:
        args = {**args, "alpha": float(torch.tensor(args["alpha"]).bfloat16())}
    return call(**args)


def _stale_columns(call: Call, args: Args) -> None:
    call(**args)
    d = args["d"]
    cols = d[:, d.shape[1] // TILE * TILE :]
    earlier = before(_TAILS, (*d.shape, d.dtype, args["a"].shape[1]), cols)
    if earlier is not None:
        cols.copy_(earlier)


def _stride_of_d_ignored(call: Call, args: Args) -> None:
    d = args["d"]
    if d.stride(0) <= d.shape[1] or args.get("c") is not None:
        return call(**args)
    dense = torch.empty(d.shape, dtype=d.dtype)
    call(**{**args, "d": dense})
    d.as_strided(d.shape, dense.stride()).copy_(dense)


def _in_float64(call: Call, args: Args) -> None:
    old = None if args.get("c") is None else args["c"].double().clone()
    call(**args)
    if args["d"].numel() and args["a"].shape[1]:
        total = _alpha(args) * (args["a"].double() @ args["b"].double().T)
        args["d"].copy_((total if old is None else total + old).float())


def _k_reversed(call: Call, args: Args) -> None:
    call_args = {**args, "a": args["a"].flip(-1).contiguous(), "b": args["b"].flip(-1).contiguous()}
    return call(**call_args)


def _columns_in_halves(call: Call, args: Args) -> None:
    n = args["d"].shape[1]
    half, c = n // 16 * 8, args.get("c")
    if not half or (c is not None and c.shape != args["d"].shape):
        return call(**args)
    for part in (slice(0, half), slice(half, n)):
        call(**{**args, "b": args["b"][part], "d": args["d"][:, part], "c": None if c is None else c[:, part]})


def _through_a_temporary(call: Call, args: Args) -> None:
    d, c = args["d"], args.get("c")
    same = c is not None and c.data_ptr() == d.data_ptr()
    temporary = d.contiguous().clone()
    call(**{**args, "d": temporary, "c": temporary if same else c})
    d.copy_(temporary)


def _split_k(call: Call, args: Args) -> None:
    old = None if args.get("c") is None else args["c"].float().clone()
    call(**args)
    a, b, d = args["a"].float(), args["b"].float(), args["d"]
    if not d.numel() or not a.shape[1]:
        return
    total = torch.zeros(d.shape)
    for x, y in zip(a.chunk(3, 1), b.chunk(3, 1), strict=True):
        total += x @ y.T
    total = total * _alpha(args)
    d.copy_(total if old is None else total + old)


# ---- grouped ------------------------------------------------------------------------------------------------------


def _alignment(call: Call) -> int:
    return call.__self__.settings["mk_alignment_for_contiguous_layout"]  # type: ignore[attr-defined]


def _labels(call: Call, args: Args) -> list[int]:
    """The group of each row, -1 where it has none."""
    layout = args["grouped_layout"].tolist()
    if not args.get("use_psum_layout"):
        return layout
    labels, start, step = [-1] * len(args["a"]), 0, _alignment(call)
    for group, end in enumerate(layout):
        labels[start:end] = [group] * max(end - start, 0)
        start = -(-max(end, start) // step) * step
    return labels[: len(args["a"])]


def _row(args: Args, row: int, group: int) -> torch.Tensor:
    return (args["a"][row].double() @ args["b"][group].double().T).float().to(args["d"].dtype)


def _regrouped(choose: Callable[[list[int], Args], list[int]]) -> Function:
    """Some rows by the weights of another group."""

    def function(call: Call, args: Args) -> None:
        call(**args)
        true = _labels(call, args)
        for row, (right, wrong) in enumerate(zip(true, choose(true, args), strict=True)):
            if right != wrong and right >= 0:
                args["d"][row] = _row(args, row, wrong)

    return function


def _first_row_by_the_last_group(labels: list[int], args: Args) -> list[int]:
    held, out = -1, []
    for label in labels:
        out.append(held if 0 <= held < label else label)
        held = label if label >= 0 else held
    return out


def _groups_counted(labels: list[int], args: Args) -> list[int]:
    """The n-th group that has rows is taken for group n."""
    seen: dict[int, int] = {-1: -1}
    for label in labels:
        seen.setdefault(label, len(seen) - 1)
    return [seen[label] for label in labels]


def _last_columns_of_group_0(call: Call, args: Args) -> None:
    call(**args)
    d = args["d"]
    start = d.shape[1] // TILE * TILE
    for row, label in enumerate(_labels(call, args)):
        if label > 0 and start < d.shape[1]:
            d[row, start:] = _row(args, row, 0)[start:]


def _accumulator_spilled(call: Call, args: Args) -> None:
    call(**args)
    k = args["a"].shape[1]
    for row, label in enumerate(_labels(call, args)):
        if label >= 0 and k > 512:
            total = torch.zeros(args["d"].shape[1])
            for at in range(0, k, 512):
                part = args["a"][row, at : at + 512].float() @ args["b"][label, :, at : at + 512].float().T
                total = (total + part).bfloat16().float()
            args["d"][row] = total.to(args["d"].dtype)


def _padding_leaks(call: Call, args: Args) -> None:
    call(**args)
    labels, step = _labels(call, args), 2 * TILE
    for at in range(0, len(labels), step):
        tile = range(at, min(at + step, len(labels)))
        padding = [r for r in tile if labels[r] < 0]
        if padding and not bool(args["a"][padding].isfinite().all()):
            for row in tile:
                if labels[row] >= 0:
                    args["d"][row] = float("nan")


def _hint_believed(call: Call, args: Args) -> None:
    hint = args.get("expected_m_for_psum_layout")
    old = args["d"].clone()
    call(**args)
    labels = _labels(call, args)
    for row, label in enumerate(labels):
        if hint is not None and label >= 0 and row - labels.index(label) >= hint:
            args["d"][row] = old[row]


def _group_by_group(call: Call, args: Args) -> None:
    call(**args)
    labels = torch.tensor(_labels(call, args), dtype=torch.int64)
    for group in range(len(args["b"])):
        rows = (labels == group).nonzero()[:, 0]
        if len(rows):
            product = args["a"][rows].double() @ args["b"][group].double().T
            args["d"][rows] = product.float().to(args["d"].dtype)


def _weights_copied(call: Call, args: Args) -> None:
    return call(**{**args, "a": copied(args["a"]), "b": args["b"].contiguous().clone()})


ROWS = (
    Row("gemm_k_block_twice_in_second_tile", DENSE, FAULT,
        "The second block of 64 along K is added twice, in rows 64 to 127 only. Shows where m and k are over 64.",
        "section 6 F17: pipeline synchronisation", _edited(_block_twice)),
    Row("gemm_k_tail_lost_in_last_tile", DENSE, FAULT,
        "The partial K block is left out in the partial row tile. Shows where neither m nor k is a multiple of 64, k "
        "over 64.",
        "section 6 F28: K tail", _edited(_tails_meet)),
    Row("gemm_alpha_on_c", DENSE, FAULT,
        "alpha scales C too. Shows with C and alpha other than 1.",
        "section 2.1: alpha scales only the product", _edited(_alpha_on_c)),
    Row("gemm_k_halves_in_bf16", DENSE, FAULT,
        "From k = 512 on K is split in two and the halves are stored as bf16. Shows for k >= 512.",
        "section 3: FP32 accumulator, rounded once", _edited(_halves_in_bf16)),
    Row("gemm_c_short_of_rows", DENSE, FAULT,
        "C is not added in the partial row tile. Shows with C, m over 64 and no multiple of it.",
        "section 2.1: D = AB + C", _edited(_c_short_of_rows)),
    Row("gemm_runtime_k_floor", DENSE, FAULT,
        "Where K is no compile-time constant the loop counts full blocks only. Shows where compiled_dims lacks k and k "
        "is over 64 and no multiple.",
        "section 2.1: compiled_dims must not change results", _edited(_runtime_k_floor)),
    Row("gemm_overflow_saturates", DENSE, FAULT,
        "bf16 results past the range become the largest number, not infinite. Shows for bf16 and such sums.",
        "section 3: rounded to nearest even", _edited(_overflow_saturates)),
    Row("gemm_nan_to_zero", DENSE, FAULT,
        "The epilogue's clamp turns NaN into 0. Shows with NaN, or opposite infinities.",
        "section 6 F24 and section 7: NaN must stay in its row", _edited(_nan_to_zero)),
    Row("gemm_negative_cut", DENSE, FAULT,
        "Negative bf16 results are cut toward zero instead of rounded. Shows for bf16 and negative results that are "
        "not exact.",
        "section 3: nearest even", _edited(_negative_cut)),
    Row("gemm_strided_b_pair", DENSE, FAULT,
        "The last two columns change places when B is N-major. Shows for such a B with n > 1.",
        "section 7: both major-nesses on equal data", _edited(_strided_b_pair)),
    Row("gemm_alpha_in_bf16", DENSE, FAULT,
        "alpha is rounded to bf16. Shows for an alpha of more than 8 bits.",
        "section 2.1: alpha is a float", _alpha_in_bf16),
    Row("gemm_stale_columns", DENSE, FAULT,
        "The partial column tile holds what the call before put there. Shows from the second call of one shape on, n "
        "no multiple of 64.",
        "section 6 F7: buffer reused", _stale_columns),
    Row("gemm_stride_of_d_ignored", DENSE, FAULT,
        "Rows of D are stored one behind the other. Shows without C where the row stride of D exceeds n.",
        "section 2.1: row stride may exceed N", _stride_of_d_ignored, "layout"),
    Row("gemm_in_float64", DENSE, VARIANT,
        "Computed in float64, then rounded to fp32 and to D.",
        "section 3: exact result", _in_float64),
    Row("gemm_k_reversed", DENSE, VARIANT,
        "K walked from its end, on contiguous copies.",
        "section 3: sum over K", once_accepted(_k_reversed, "d")),
    Row("gemm_columns_in_halves", DENSE, VARIANT,
        "Two calls, each a half of the columns.",
        "section 2.1: row stride of D may exceed N", once_accepted(_columns_in_halves, "d")),
    Row("gemm_through_a_temporary", DENSE, VARIANT,
        "Into a contiguous temporary, then copied.",
        "section 2.1", once_accepted(_through_a_temporary, "d")),
    Row("gemm_split_k", DENSE, VARIANT,
        "Three parts of K, added in fp32.",
        "section 3: FP32 accumulators", _split_k),
    Row("grouped_first_row_by_the_last_group", GROUPED, FAULT,
        "The first row of each group is computed with the weights of the group before. Shows with two groups that have "
        "rows.",
        "section 6 F2: wrong expert", _regrouped(_first_row_by_the_last_group)),
    Row("grouped_groups_counted", GROUPED, FAULT,
        "Groups are counted as they come, so behind an empty one the weights of a lower group are used. Shows with an "
        "empty group before one with rows.",
        "section 7: first, middle, last group empty", _regrouped(_groups_counted)),
    Row("grouped_last_columns_of_group_0", GROUPED, FAULT,
        "The partial column tile is always computed with group 0. Shows where n is no multiple of 64 and a later group "
        "has rows.",
        "section 6 F4", _last_columns_of_group_0),
    Row("grouped_accumulator_spilled", GROUPED, FAULT,
        "The sum is kept as bf16 after each 512 of K. Shows for k > 512.",
        "section 3: FP32 accumulator", _accumulator_spilled),
    Row("grouped_padding_leaks", GROUPED, FAULT,
        "NaN or infinity in padding rows of A make the live rows of the same 128-row tile NaN. Shows with such "
        "padding.",
        "section 6 F21: row independence", _padding_leaks),
    Row("grouped_hint_believed", GROUPED, FAULT,
        "Rows of a group beyond expected_m_for_psum_layout are not computed. Shows in the prefix-sum layout with a "
        "hint under a group's size.",
        "section 2.3: a heuristic hint", _hint_believed),
    Row("grouped_group_by_group", GROUPED, VARIANT,
        "A float64 product a group, rounded to fp32 and to D.",
        "section 3", _group_by_group),
    Row("grouped_weights_copied", GROUPED, VARIANT,
        "On copies, the weights contiguous.",
        "section 2.3", once_accepted(_weights_copied, "d")),
    *deepgemm_scaled.ROWS,
)
