"""TileKernels: RMS norm and the steps of the Sinkhorn optimiser. Faults and correct variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adapters.cpu.apart.row import FAULT, VARIANT, Args, Call, Function, Row, copied, toward_zero

NORM = "tilekernels.quant.norm_forward"
MOMENTUM, STEP = "tilekernels.engram.engram_sinkhorn_momentum_update", "tilekernels.engram.engram_sinkhorn_step"


# ---- RMS norm -----------------------------------------------------------------------------------------------------


def _root(mean: torch.Tensor, eps: float) -> torch.Tensor:
    return 1 / (mean + eps).sqrt()


def _norm_anew(
    *, summed: Callable[[torch.Tensor, Any], torch.Tensor] = lambda r, args: r,
    mean: Callable[[torch.Tensor], torch.Tensor] = lambda r: r.square().mean(-1, keepdim=True),
    root: Callable[[torch.Tensor, float], torch.Tensor] = _root,
    weighted: Callable[[torch.Tensor, float], torch.Tensor] = lambda w, scale: w.double() * scale,
) -> Function:
    """out and rstd in float64 from norm_input, with some steps changed, rounded to fp32 and to x's dtype."""

    def function(call: Call, args: Args) -> Any:
        # x is kept: the sum may be written over it.
        kept = {**args, "x": args["x"].clone()}
        if args.get("residual") is not None:
            kept["residual"] = args["residual"].clone()
        out, rstd, norm_input = call(**args)
        if not out.numel():
            return out, rstd, norm_input
        # norm_input is x itself where there is no residual, and x may by now hold the result.
        r = summed((kept["x"] if kept.get("residual") is None else norm_input).double(), kept)
        inverse = root(mean(r), args["eps"])
        scale = args.get("out_scale", 1.0)
        weight = args.get("weight")
        factor = torch.tensor(scale, dtype=torch.float64) if weight is None else weighted(weight, scale)
        out.copy_((r * inverse * factor).float())
        if rstd is not None:
            rstd.copy_(inverse[..., 0].float().view(rstd.shape))
        return out, rstd, norm_input

    return function


def _unrounded_sum(r: torch.Tensor, args: Args) -> torch.Tensor:
    residual = args.get("residual")
    return r if residual is None else args["x"].double() + residual.double()


def _padded_mean(r: torch.Tensor) -> torch.Tensor:
    return r.square().sum(-1, keepdim=True) / (-(-r.shape[-1] // 128) * 128)


def _squares_in_bf16(r: torch.Tensor) -> torch.Tensor:
    return r.square().float().bfloat16().double().mean(-1, keepdim=True)


def _few_newton_steps(mean: torch.Tensor, eps: float) -> torch.Tensor:
    exact = _root(mean, eps)
    return torch.where(mean < 1e-4, exact * (1 - 2.0**-9), exact)


def _weight_index_clamped(call: Call, args: Args) -> Any:
    weight = args.get("weight")
    if weight is None or len(weight) < 2:
        return call(**args)
    weight = copied(weight)
    weight[-1] = weight[-2]
    return call(**{**args, "weight": weight})


def _rstd_of_the_first_sequence(call: Call, args: Args) -> Any:
    out, rstd, norm_input = call(**args)
    if out.dim() == 3 and len(out) > 1 and out.numel():
        r = norm_input.double()
        own, first = (_root(part.square().mean(-1, keepdim=True), args["eps"]) for part in (r[-1], r[0]))
        out[-1] = (out[-1].double() / own * first).float().to(out.dtype)
    return out, rstd, norm_input


def _last_sum_unwritten(call: Call, args: Args) -> Any:
    given = args.get("residual_out")
    if given is None or given.shape[-2] < 2 or given.dim() != 2:
        return call(**args)
    held = given[-1].clone()
    result = call(**args)
    given[-1] = held
    return result


def _scale_twice_without_weight(call: Call, args: Args) -> Any:
    scale = args.get("out_scale", 1.0)
    if args.get("weight") is None:
        args = {**args, "out_scale": scale * scale}
    return call(**args)


def _norm_columns_reversed(call: Call, args: Args) -> Any:
    kept = {n: None if args.get(n) is None else args[n].flip(-1) for n in ("x", "weight", "residual")}
    result = call(**args)
    other = call(**{**args, **kept, "out": None, "residual_out": None})
    result[0].copy_(other[0].flip(-1))
    if result[1] is not None:
        result[1].copy_(other[1])
    return result


# ---- Sinkhorn optimiser ----------------------------------------------------------------------------------------------


def _momentum(call: Call, args: Args, change: Callable[[torch.Tensor, torch.Tensor, float], Any]) -> Any:
    """change(gradient, old momentum, beta), all float64, gives (result, new momentum) to put in place."""
    grad, old = args["grad"].double().clone(), args["momentum_buffer"].double().clone()
    result = call(**args)
    value, momentum = change(grad, old, args["beta1"])
    result.copy_(value.float())
    args["momentum_buffer"].copy_(momentum.float())
    return result


def _update(fault: str) -> Function:
    def function(call: Call, args: Args) -> Any:
        def change(g: torch.Tensor, old: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
            rest = float(torch.tensor(1 - beta).bfloat16()) if fault == "rest_in_bf16" else 1 - beta
            m = beta * old + rest * g
            kept = m
            if fault == "truncated":
                kept = toward_zero(m, args["momentum_buffer"].dtype)
            if fault == "from_the_buffer":
                m = m.float().to(args["momentum_buffer"].dtype).double()
            return (beta * m + rest * g if args.get("nesterov", True) else m), kept

        return _momentum(call, args, change)

    return function


def _norm_floored(call: Call, args: Args) -> Any:
    old, scale = args["row_scale"].double().clone(), args["row_scale"]
    norm, partial = call(**args)
    scale.copy_((old / norm.double().clamp(min=args["eps"])).float())
    return norm, partial


def _columns(args: Args, scale: torch.Tensor) -> torch.Tensor:
    """float64 [d]: sums of squares over the rows of the scaled matrix."""
    z = scale.double()[:, None] * args["matrix"].double() * args["col_scale"].double()
    return z.square().sum(0)


def _sums_before_scaling(call: Call, args: Args) -> Any:
    old = args["row_scale"].clone()
    norm, partial = call(**args)
    partial.zero_()
    partial[0] = _columns(args, old).float()
    return norm, partial


def _last_row_not_summed(call: Call, args: Args) -> Any:
    norm, partial = call(**args)
    rows = len(args["matrix"])
    if rows % 2 and rows > 1:
        scale = args["row_scale"].clone()
        scale[-1] = 0
        partial.zero_()
        partial[0] = _columns(args, scale).float()
    return norm, partial


def _sums_in_one_partial(call: Call, args: Args) -> Any:
    norm, partial = call(**args)
    partial.zero_()
    partial[-1] = _columns(args, args["row_scale"]).float()
    return norm, partial


ROWS = (
    Row("norm_eps_outside_the_root", NORM, FAULT,
        "rstd = 1 / (sqrt(mean) + eps). Shows where eps counts beside the mean square.",
        "section 3.3; section 8: eps large", _norm_anew(root=lambda mean, eps: 1 / (mean.sqrt() + eps))),
    Row("norm_mean_over_padded_width", NORM, FAULT,
        "The sum of squares is divided by the width rounded up to 128. Shows where H is no multiple of 128.",
        "section 7 report 23: tail wrong", _norm_anew(mean=_padded_mean)),
    Row("norm_of_the_unrounded_sum", NORM, FAULT,
        "The norm is of x + residual before it is rounded. Shows for bf16 with a residual.",
        "section 3.3: that rounded value is norm_input", _norm_anew(summed=_unrounded_sum)),
    Row("norm_weight_times_scale_in_bf16", NORM, FAULT,
        "weight * out_scale is rounded to bf16. Shows with out_scale other than a power of two.",
        "section 3.3: one rounding",
        _norm_anew(weighted=lambda w, scale: (w.double() * scale).float().bfloat16().double())),
    Row("norm_squares_in_bf16", NORM, FAULT,
        "Squares are rounded to bf16 before they are added in FP32. Shows most for few columns and FP32 results.",
        "section 7 report 5: precision", _norm_anew(mean=_squares_in_bf16)),
    Row("norm_few_newton_steps", NORM, FAULT,
        "The reciprocal root is short of a Newton step where the mean square is under 1e-4. Shows for small values.",
        "section 7 report 31", _norm_anew(root=_few_newton_steps)),
    Row("norm_last_weight_clamped", NORM, FAULT,
        "The last column uses the weight of the column before. Shows where the two differ.",
        "section 7 report 23", _weight_index_clamped),
    Row("norm_rstd_of_the_first_sequence", NORM, FAULT,
        "The last sequence of a batch is scaled by the rstd of the first. Shows for 3-D input with B > 1.",
        "section 8: B > 1 with padding strides", _rstd_of_the_first_sequence),
    Row("norm_last_sum_unwritten", NORM, FAULT,
        "The last row of a preallocated residual_out is not written. Shows for 2-D input with residual_out and more "
        "than one row.",
        "section 7 report 29", _last_sum_unwritten),
    Row("norm_scale_twice_without_weight", NORM, FAULT,
        "Without a weight out_scale counts twice. Shows with weight None and out_scale other than 1.",
        "section 7 report 1: path divergence", _scale_twice_without_weight),
    Row("norm_in_float64", NORM, VARIANT,
        "In float64, rounded to fp32 and to x's dtype.",
        "section 3.3", _norm_anew()),
    Row("norm_columns_reversed", NORM, VARIANT,
        "Columns summed from the last to the first.",
        "section 3.3", _norm_columns_reversed),
    Row("momentum_nesterov_from_the_buffer", MOMENTUM, FAULT,
        "The Nesterov step uses the momentum after it was rounded to the buffer. Shows for a bf16 buffer with "
        "nesterov.",
        "section 3.5: from the unrounded m", _update("from_the_buffer")),
    Row("momentum_rest_in_bf16", MOMENTUM, FAULT,
        "1 - beta is rounded to bf16. Shows where it has more than 8 bits.",
        "section 3.5: in fp32", _update("rest_in_bf16")),
    Row("momentum_truncated", MOMENTUM, FAULT,
        "The momentum is cut to the buffer's dtype. Shows in the buffer, bf16 above all.",
        "section 3.5: stored in buffer dtype", _update("truncated")),
    Row("momentum_in_float64", MOMENTUM, VARIANT,
        "In float64, rounded to fp32 and to the buffer.",
        "section 3.5", _update("")),
    Row("sinkhorn_norm_floored", STEP, FAULT,
        "row_scale is divided by max(norm, eps). Shows where eps counts beside the norm.",
        "section 3.5: row_norm + eps", _norm_floored),
    Row("sinkhorn_sums_before_scaling", STEP, FAULT,
        "Column sums are of the matrix before its rows were rescaled. Shows unless all norms are 1.",
        "section 3.5: of the new Z", _sums_before_scaling),
    Row("sinkhorn_last_row_not_summed", STEP, FAULT,
        "The last of an odd number of rows is left out of the column sums. Shows for odd R > 1.",
        "section 7 report 13: tail masking", _last_row_not_summed),
    Row("sinkhorn_sums_in_one_partial", STEP, VARIANT,
        "All of the column sums in the last partial, zeros elsewhere.",
        "section 3.5: only their sum counts", _sums_in_one_partial),
)
