"""The faults and variants written apart: each runs, each fault changes something, each variant keeps the answer.

Nothing here says whether the suite catches them: they are fixed before it is tried on them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from apart_calls import BF16, CALLS, FP32, adapter, noise

from adapters.cpu.apart.backend import Backend, Changed, named, rows
from adapters.cpu.apart.row import FAULT, VARIANT, Row
from adapters.cpu.kernels.ep_objects import EPHandle

torch.set_num_threads(1)
ROWS = rows()
FAULTS, VARIANTS = ([name for name, row in ROWS.items() if row.kind == kind] for kind in (FAULT, VARIANT))


@pytest.fixture(autouse=True)
def known_memory() -> Iterator[None]:
    """What a kernel allocates holds the same poison in every run."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, (tuple, list)):
        for item in x:
            yield from leaves(item)
    elif isinstance(x, EPHandle):
        yield from leaves((x.num_recv_tokens_per_expert_list, x.psum_num_recv_tokens_per_expert))
    elif isinstance(x, torch.Tensor) or x is None or isinstance(x, int):
        yield x


def raw(x: Any) -> Any:
    """The bytes of a tensor, anything else as it is."""
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if isinstance(x, torch.Tensor) else x


def storage(x: torch.Tensor) -> bytes:
    whole = torch.empty(0, dtype=torch.uint8)
    return whole.set_(x.untyped_storage()).numpy().tobytes()


def waited(result: Any) -> Any:
    return result if isinstance(result, tuple) or not hasattr(result, "wait") else result.wait()


Made = list[tuple[dict[str, Any], Any]]
"""(arguments, result) of each call"""


def made(row: Row) -> Made:
    a = adapter(row)
    return [(args, waited(getattr(Changed(a, row), row.method)(**args))) for args in CALLS[row.op](a)]


@functools.cache
def truly_made(op: str) -> Made:
    row = next(row for row in ROWS.values() if row.op == op)
    a = adapter(row)
    return [(args, waited(getattr(a, row.method)(**args))) for args in CALLS[op](a)]


def everything(row: Row, results: Made) -> list[Any]:
    """Bytes of all results, and of the whole storage of all arguments, gaps between rows included."""
    out: list[Any] = []
    for args, result in results:
        out += [raw(x) for x in leaves(result)]
        out += [storage(x) for name, x in args.items() for x in leaves(x) if isinstance(x, torch.Tensor)]
    if row.op == "flashmla.get_mla_metadata":
        out.append(len({id(result[0]) for _, result in results}))
    return out


@pytest.mark.parametrize("op", CALLS)
def test_the_true_method_gives_the_same_again(op: str) -> None:
    """Else a difference would mean nothing."""
    row = next(row for row in ROWS.values() if row.op == op)
    same = replace(row, function=lambda call, args: call(**args))
    repeats = everything(row, made(same)) == everything(row, truly_made(op))
    assert repeats


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_something(name: str) -> None:
    row = ROWS[name]
    changed = everything(row, made(row)) != everything(row, truly_made(row.op))
    assert changed


def told(op: str, args: dict[str, Any], result: Any) -> list[Any]:
    """The results without what the op leaves free."""
    if op == "deepselect.topk":
        values, indices = result
        out: list[Any] = []
        for i, end in enumerate(args["end"].tolist() if "end" in args else [args["input"].shape[1]] * len(indices)):
            if bool(args["input"][i, :end].isnan().any()):
                out.append(indices[i, 0])
                continue
            real = min(end, args["topk"])
            offset = int(args["output_idx_offset"][i]) if "output_idx_offset" in args else 0
            position = indices[i, :real].long() - offset
            assert len(set(position.tolist())) == real
            picked = args["input"][i].index_select(0, position)
            if values is not None:
                assert raw(picked) == raw(values[i, :real])
                out.append(values[i, real:])
            ordered = args.get("sorted") or args.get("sorted_index") or end <= args["topk"]
            out += [(picked if ordered else picked.sort().values) + 0.0, indices[i, real:]]
        return out
    if op == "tilekernels.engram.engram_sinkhorn_step":
        return [result[0], result[1].sum(0), args["row_scale"]]
    if op == "deepep.EPBuffer.dispatch":
        x, idx, weights, handle = result[:4]
        count, ends = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]), handle.psum_num_recv_tokens_per_expert
        keep = torch.arange(count) if idx is not None or args.get("do_zero_padding") else torch.cat(
            [torch.arange(int(e) - int(n), int(e))
             for e, n in zip(ends, handle.num_unaligned_recv_tokens_per_expert, strict=True)])
        return [t.contiguous().view(torch.uint8)[keep] for t in leaves((x, idx, weights)) if t is not None]
    return [*leaves(result), *(x for value in args.values() for x in leaves(value))]


def near(got: Any, want: Any) -> bool:
    """Equal bits, or floats within two units in the last place of the largest of the same row.

    FP32 may differ by 2^-17 of it: a sum of some hundred terms in another order differs by more than two of its units.
    """
    if not isinstance(want, torch.Tensor) or raw(got) == raw(want):
        return raw(got) == raw(want)
    if want.dtype not in (BF16, FP32):
        return False
    g, w = got.double(), want.double()
    special = ~w.isfinite()
    if not torch.equal(special, ~g.isfinite()) or raw(g[special].nan_to_num(7)) != raw(w[special].nan_to_num(7)):
        return False
    g, w = g.masked_fill(special, 0), w.masked_fill(special, 0)
    largest = w.abs().amax(-1, keepdim=True) if w.dim() else w.abs()
    return bool(((g - w).abs() <= 2.0 ** (-6 if want.dtype == BF16 else -17) * largest).all())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_keeps_the_answer(name: str) -> None:
    row = ROWS[name]
    for (args, want), (own, got) in zip(truly_made(row.op), made(row), strict=True):
        for g, w in zip(told(row.op, own, got), told(row.op, args, want), strict=True):
            assert near(g, w)


def test_every_row_says_what_it_is() -> None:
    for row in ROWS.values():
        assert row.kind in (FAULT, VARIANT)
        assert row.doc
        assert row.source
        assert row.kind == VARIANT or "Shows" in row.doc
    assert len(FAULTS) >= 60
    assert len(VARIANTS) >= 25


def test_the_backend_changes_one_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.cpu.backend._limit_memory", lambda mib: None)
    options = {"apart": "gate_last_odd_token"}
    assert Backend.describe(options).ops
    backend = Backend(device="0", options=options, group=None)
    scores = {"scores": noise(3, 8, dtype=FP32), "num_topk": 2}
    assert torch.equal(*backend.run("tilekernels.moe.topk_gate", dict(scores))[1:])
    assert backend.get_settings("tilekernels")
    assert not isinstance(backend.adapter("deepgemm"), Changed)
    with pytest.raises(ValueError, match="no fault or variant"):
        Backend.describe({"apart": "unheard_of"})
    assert named({}) is None


def test_what_the_op_refuses_the_row_refuses() -> None:
    for name in ("rotary_in_float64", "gemm_k_reversed", "quant_written_anew", "select_from_a_cleared_copy"):
        row = ROWS[name]
        true = adapter(row)
        args = {"rotary_in_float64": {"query": noise(3, 2, 48), "cos_sin_cache": torch.zeros(9, 48)},
                "gemm_k_reversed": {"a": noise(8, 16, dtype=torch.float16), "b": noise(8, 16), "d": noise(8, 8)},
                "quant_written_anew": {"x": noise(3, 65), "fmt": "e4m3", "num_per_channels": 32},
                "select_from_a_cleared_copy": {"input": noise(4, 512)[:, ::2], "topk": 2}}[name]
        with pytest.raises(Exception) as own:
            getattr(true, row.method)(**args)
        with pytest.raises(own.type):
            getattr(Changed(true, row), row.method)(**args)
