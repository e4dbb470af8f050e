"""What expert-parallel calls refuse, and the limits they name."""

from __future__ import annotations

from typing import Any

import torch

from adapters.cpu.kernels.ep_dispatch import Shape

ALLOCATION_ALIGN_BYTES, RDMA_ALIGN_BYTES, TMA_ALIGN_BYTES = 2**21, 64, 32
MAX_TOPK, MAX_EXPERTS, MAX_LOCAL_EXPERTS = 32, 2048, 512
COMBINE_HIDDEN_MULTIPLE = 256


def require(ok: bool, message: str) -> None:
    """RuntimeError with this message unless ok; the type that DeepEP's host checks surface as."""
    if not ok:
        raise RuntimeError(message)


def check_switches(
    previous_event: Any, allocate_on_comm_stream: bool, is_async: bool, deferred: bool, handle_copy: bool = False,
    padding_alone: bool = False,
) -> None:
    """AssertionError for switches that contradict each other."""
    assert previous_event is None or allocate_on_comm_stream, "previous_event needs allocate_on_comm_stream=True"
    assert not deferred or is_async, "defer_epilogue needs async_with_compute_stream=True"
    assert not handle_copy, "do_handle_copy must be False"
    assert not padding_alone, "do_zero_padding needs do_expand=True"


def shape_of(
    data: torch.Tensor, sf: torch.Tensor | None, topk_idx: torch.Tensor, weights: torch.Tensor | None, size: int,
    num_experts: int, do_expand: bool, max_tokens: int, alignment: int,
) -> Shape:
    """The shape of a dispatch; RuntimeError for a tensor or size that the contract excludes."""
    require(data.dim() == 2 and data.is_contiguous(), "x must be a contiguous matrix")
    num_tokens, row_bytes = len(data), data.shape[1] * data.itemsize
    require(row_bytes % TMA_ALIGN_BYTES == 0, f"rows of {row_bytes} bytes are no multiple of {TMA_ALIGN_BYTES}")
    require(topk_idx.dtype == torch.int64 and topk_idx.is_contiguous(), "topk_idx must be contiguous int64")
    require(topk_idx.dim() == 2 and len(topk_idx) == num_tokens, "topk_idx must have a row for each token")
    num_topk = topk_idx.shape[1]
    require(1 <= num_topk <= MAX_TOPK, f"top-k of {num_topk}")
    require(0 < num_experts <= MAX_EXPERTS and num_experts % size == 0, f"{num_experts} experts on {size} ranks")
    require(num_experts // size <= MAX_LOCAL_EXPERTS, f"{num_experts // size} experts a rank")
    require(num_tokens <= max_tokens, f"{num_tokens} tokens, at most {max_tokens} declared")
    require(alignment > 0, f"expert_alignment {alignment}")
    require(not (topk_idx >= num_experts).any(), "an expert id is out of range")
    ids = topk_idx.sort(1).values
    require(not ((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)).any(), "an expert id occurs twice in a row")
    if weights is not None:
        require(weights.dtype == torch.float32 and weights.is_contiguous() and weights.shape == topk_idx.shape,
                "topk_weights must be contiguous fp32 of the shape of topk_idx")
    if sf is not None:
        require(sf.itemsize == 4 and sf.dim() == 2 and len(sf) == num_tokens, "scales must be [T, P] of 4 bytes each")
    return Shape(num_experts, max_tokens, alignment, num_topk, row_bytes, 0 if sf is None else 4 * sf.shape[1],
                 weights is not None, do_expand)


def biases_of(bias: Any) -> list[torch.Tensor]:
    """Only a tensor or a tuple counts; anything else, a list too, is no bias."""
    if isinstance(bias, torch.Tensor):
        return [bias]
    return [b for b in bias if b is not None] if isinstance(bias, tuple) else []


def check_combine(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, biases: list[torch.Tensor],
    *, rows: int, expanded: bool, split: bool,
) -> None:
    """RuntimeError for arguments of a combine that the contract excludes."""
    require(x.dim() == 2 and x.dtype == torch.bfloat16 and x.is_contiguous(), "x must be a contiguous bf16 matrix")
    hidden = x.shape[1]
    require(hidden % COMBINE_HIDDEN_MULTIPLE == 0, f"hidden {hidden} is no multiple of {COMBINE_HIDDEN_MULTIPLE}")
    require(len(x) == rows or (expanded and len(x) > rows), f"{len(x)} rows, dispatch returned {rows}")
    require(len(biases) <= 2, "at most two biases")
    for b in biases:
        require(b.dtype == torch.bfloat16 and b.shape == (len(ids), hidden), "a bias must be bf16 [T, hidden]")
    if weights is not None:
        require(not split, "expanded weights need allow_multiple_reduction=True")
        wanted = (len(x),) if expanded else (len(x), ids.shape[1])
        require(weights.dtype == torch.float32 and weights.shape == wanted, f"topk_weights must be fp32 {wanted}")
