"""The cpu backend's DeepSelect against a plain row-by-row check, with every seeded fault and variant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adapters.cpu.deepselect import NAN_SENTINEL, Adapter
from adapters.cpu.kernels.knobs import Knobs
from conformance.catalogue.load import read_toml
from conformance.results import REASONS

ROOT = Path(__file__).parents[1]
TABLE = read_toml(ROOT / "cases/deepselect/faults.toml")
CANARY = 0x55555555


def adapter(knobs: str = "") -> Adapter:
    return Adapter(SimpleNamespace(knobs=Knobs.parse(knobs)))


def scores(values, dtype=torch.float32, slack=float("nan")) -> torch.Tensor:
    """Rows in an allocation whose row stride is a multiple of 64 bytes; what lies behind them is hostile."""
    values = torch.as_tensor(np.asarray(values, np.float32)).to(dtype)
    rows, n = values.shape
    wide = torch.full((rows, -(-n // 32) * 32 + 32), slack, dtype=dtype)
    wide[:, :n] = values
    return wide[:, :n]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def own_buffer(rows: int, k: int, dtype=torch.int64) -> torch.Tensor:
    """A caller's output whose surroundings hold canaries."""
    unit = 32 // dtype.itemsize
    width = (k // unit + 2) * unit
    return torch.full((rows + 2, width), CANARY, dtype=dtype)[1:-1, :k]


def draw(rows: int, n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, n)).astype(np.float32)


# ---- plain check: what is wrong with a result -----------------------------------------------------------------------


def bits(t: torch.Tensor) -> np.ndarray:
    return t.contiguous().view(torch.int16 if t.dtype == torch.bfloat16 else torch.int32).numpy()


def wrong(call: dict, result) -> set[str]:
    """Reasons (of the closed list) why the result of `topk(**call)` is not one that the contract allows."""
    values, indices = result
    x, k = call["input"], call["topk"]
    rows, n = x.shape
    out = call.get("output_idx")
    reasons = _outside(out) if out is not None else set()
    if out is not None and indices is not out:
        return reasons | {"alias"}
    want_values = call.get("return_value", True)
    if (values is not None) != want_values or indices.dtype != call.get("indices_type", torch.int64):
        return reasons | {"numeric"}
    for t in (values, None if out is not None else indices):
        if t is not None and (t.stride(0) * t.element_size()) % 32:
            reasons.add("layout")
    fill = torch.tensor(call.get("value_oob_fill_value", float("-inf")), dtype=torch.float64).float().to(x.dtype)
    ends = [n] * rows if call.get("end") is None else call["end"].tolist()
    offsets = [0] * rows if call.get("output_idx_offset") is None else call["output_idx_offset"].tolist()
    for row in range(rows):
        got_values = None if values is None else bits(values[row])
        reasons |= _row(
            x[row, : ends[row]].float().numpy(), bits(x[row]), indices[row].tolist(), got_values,
            k=k, offset=offsets[row], fill=call.get("idx_oob_fill_value", 2147483647), value_fill=bits(fill[None])[0],
            wrap=indices.dtype == torch.int32, by_value=call.get("sorted", False),
            by_index=call.get("sorted_index", False),
        )
    return reasons


def _outside(out: torch.Tensor) -> set[str]:
    whole = torch.empty(0, dtype=out.dtype).set_(out.untyped_storage()).clone()
    inside = whole.as_strided(out.shape, out.stride(), out.storage_offset())
    reasons = {"unwritten"} if (inside == CANARY).any() else set()
    inside.fill_(CANARY)
    return reasons if (whole == CANARY).all() else reasons | {"oob_write"}


def _row(row, row_bits, got, got_values, *, k, offset, fill, value_fill, wrap, by_value, by_index) -> set[str]:
    n = min(k, len(row))
    if len(row) > k and np.isnan(row).any():
        return set() if got[0] == NAN_SENTINEL else {"nonfinite"}
    chosen = [i - offset for i in got[:n]]
    if wrap:
        chosen = [(c + 2**31) % 2**32 - 2**31 for c in chosen]
    if any(not 0 <= c < len(row) for c in chosen):
        return {"index_range"}
    if len(set(chosen)) != n:
        return {"token_duplicated"}
    if got[n:] != [fill] * (k - n):
        return {"numeric"}
    if got_values is not None and not (
        (got_values[:n] == row_bits[chosen]).all() and (_same_number(got_values[n:], value_fill)).all()
    ):
        return {"numeric"}
    rest = np.delete(row, chosen)
    if n and rest.size and row[chosen].min() < rest.max():
        return {"numeric"}
    taken = row[chosen]
    if by_value and (np.diff(taken) > 0).any():
        return {"order"}
    if (by_index or (len(row) <= k and not by_value)) and chosen != sorted(chosen):
        return {"order"}
    return set()


def _same_number(codes: np.ndarray, want) -> np.ndarray:
    inf = 0x7F80 if codes.dtype == np.int16 else 0x7F800000
    sign = 0x8000 if codes.dtype == np.int16 else 0x80000000
    nan = (codes.astype(np.int64) & (sign - 1)) > inf
    return (codes == want) | (nan & ((int(want) & (sign - 1)) > inf))


# ---- probes: calls in which faults show -----------------------------------------------------------------------------


def ascending(rows=2, n=5000, k=40, **kw):
    return {"input": scores(np.arange(rows * n).reshape(rows, n)), "topk": k, **kw}


def descending():
    return {"input": scores(-np.arange(10000.0).reshape(2, 5000)), "topk": 40}


def mixed_ends(**kw):
    """Rows of every class beside each other; what lies behind the end is NaN or +inf."""
    x = draw(6, 300)
    ends = [0, 1, 7, 8, 9, 300]
    for row, e in enumerate(ends):
        x[row, e:] = (np.nan, np.inf)[row % 2]
    return {"input": scores(x), "topk": 8, "end": ints(*ends), **kw}


def zeros_and_subnormals():
    row = np.zeros(64, np.float32)
    row[10:20] = np.arange(10) * np.float32(1e-45)
    row[30:40] = -row[10:20]
    return {"input": scores([row, row[::-1]]), "topk": 5}


def minus_zero():
    row = np.full(64, -1, np.float32)
    row[[3, 60]] = -0.0
    row[5:9] = -np.inf
    return {"input": scores([row]), "topk": 3}


def with_nan(sign: float):
    x = draw(3, 100)
    x[1, 70] = np.copysign(np.nan, sign)
    return {"input": scores(x), "topk": 8}


def nan_behind_end():
    x = draw(2, 100)
    x[:, 60:] = np.nan
    return {"input": scores(x), "topk": 8, "end": ints(60, 59)}


PROBES = {
    "ascending": ascending,
    "descending": descending,
    "random": lambda: {"input": scores(draw(3, 6000)), "topk": 512},
    "bf16_ties": lambda: {"input": scores(draw(4, 700), torch.bfloat16), "topk": 100, "return_value": False},
    "constant": lambda: {"input": scores(np.ones((2, 300))), "topk": 9},
    "mixed_ends": mixed_ends,
    "mixed_ends_sorted": lambda: mixed_ends(sorted=True, value_oob_fill_value=float("nan"), idx_oob_fill_value=-1),
    "mixed_ends_offset": lambda: mixed_ends(output_idx_offset=ints(5, -7, 2**30, -(2**30), 0, 1)),
    "offset_wide": lambda: ascending(2, 100, 8, output_idx_offset=ints(2**31 - 1, -(2**31))),
    "offset_wraps": lambda: ascending(2, 100, 8, output_idx_offset=ints(2**31 - 1, -(2**31)), indices_type=torch.int32),
    "value_fill": lambda: {"input": scores(draw(1, 3), torch.bfloat16), "topk": 20, "value_oob_fill_value": 0.1},
    "huge_fill": lambda: {"input": scores(draw(1, 3), torch.bfloat16), "topk": 20, "value_oob_fill_value": 1e39},
    "subnormals": zeros_and_subnormals,
    "minus_zero": minus_zero,
    "negative": lambda: {"input": scores(-np.abs(draw(2, 90))), "topk": 7},
    "positive_nan": lambda: with_nan(1.0),
    "negative_nan": lambda: with_nan(-1.0),
    "nan_behind_end": nan_behind_end,
    "sorted": lambda: {"input": scores(draw(2, 3000)), "topk": 65, "sorted": True},
    "sorted_index": lambda: {"input": scores(draw(2, 3000)), "topk": 65, "sorted_index": True},
    "own_output": lambda: mixed_ends(output_idx=own_buffer(6, 8)),
    "own_padded": lambda: {"input": scores(draw(3, 40)), "topk": 5, "output_idx": own_buffer(3, 5)},
    "longer_than_row": lambda: {"input": scores(draw(2, 3)), "topk": 4096},
}

SHOWS = {  # fault -> the probe in which it shows
    "last_block_dropped": "ascending", "tail_dropped": "ascending", "block_doubled": "descending",
    "stale_block": "random", "subnormals_flushed": "subnormals", "raw_key_order": "negative",
    "minus_zero_lowest": "minus_zero", "negative_nan_missed": "negative_nan", "nan_swallowed": "positive_nan",
    "nan_beyond_end": "nan_behind_end", "nan_spreads": "positive_nan", "end_one_too_far": "mixed_ends",
    "end_one_short": "ascending", "threshold_off_by_one": "random", "ties_lost": "bf16_ties",
    "shared_scratch": "random", "order_ignored": "sorted_index", "sorted_ascending": "sorted",
    "offset_on_fill": "mixed_ends_offset", "int64_result_wraps": "offset_wide", "value_fill_truncated": "value_fill",
    "stale_values": "sorted_index", "empty_row_unwritten": "own_output", "slack_written": "own_padded",
    "rows_without_gaps": "own_padded", "output_idx_ignored": "own_padded", "result_rows_unpadded": "sorted_index",
    "strides_in_elements": "requirement",
}


def outcome(probe: str, knobs: str = "") -> set[str]:
    if probe == "requirement":
        return set() if adapter(knobs).get_stride_requirement() == (64, 32) else {"contract"}
    call = {"abort_when_nan_found": False, **PROBES[probe]()}
    return wrong(call, adapter(knobs).topk(**call))


@pytest.mark.parametrize("probe", PROBES)
def test_correct_backend(probe):
    assert outcome(probe) == set()


@pytest.mark.parametrize("row", TABLE["variant"], ids=lambda r: r["name"])
def test_variant_is_right(row):
    assert {p: bad for p in PROBES if (bad := outcome(p, row["knobs"]))} == {}


@pytest.mark.parametrize("row", TABLE["fault"], ids=lambda r: r["name"])
def test_fault_shows(row):
    reasons = {row["reason"]} if isinstance(row["reason"], str) else set(row["reason"])
    assert reasons <= set(REASONS)
    assert reasons & set(outcome(SHOWS[row["name"]], row["knobs"]))


def test_variants_differ_from_the_default():
    """A variant that changes nothing proves nothing: the free choices really are made otherwise."""
    call = PROBES["constant"]()
    low, high = (adapter(k).topk(**call)[1] for k in ("", "tie_rule=high_index"))
    assert low[0].tolist() == list(range(9))
    assert high[0].tolist() == list(range(291, 300))
    call = PROBES["random"]()
    base, value, back = (adapter(f"row_order={o}").topk(**call)[1] for o in ("index", "value", "reverse"))
    assert not torch.equal(base, value)
    assert torch.equal(base, back.flip(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_numbers_in_one_row(dtype):
    """Every bf16 number but NaN, infinities included."""
    codes = np.arange(65536, dtype=np.uint32)
    row = (codes << 16).view(np.float32)
    row = row[~np.isnan(row)]
    call = {"input": scores([row[::-1]], dtype), "topk": 4096}
    assert row.size == 65282
    assert wrong(call, adapter().topk(**call)) == set()


def test_layout_and_same_object():
    a = adapter()
    assert a.get_stride_requirement() == (64, 32)
    values, indices = a.topk(scores(draw(3, 50), torch.bfloat16), 5)
    assert (values.stride(), indices.stride()) == ((16, 1), (8, 1))
    own = own_buffer(3, 5, torch.int32)
    none, same = a.topk(scores(draw(3, 50)), 5, indices_type=torch.int32, output_idx=own, return_value=False)
    assert none is None
    assert same is own


@pytest.mark.parametrize(("rows", "n"), [(0, 40), (2, 0)])
def test_empty_input(rows, n):
    x = torch.empty(rows, 64)[:, :n]
    values, indices = adapter().topk(x, 3)
    assert values.shape == indices.shape == (rows, 3)
    assert (indices == 2**31 - 1).all()
    assert (values == float("-inf")).all()


GOOD = {"input": scores(draw(2, 64)), "topk": 4}
MISUSE = {
    "begin": ({"begin": ints(0, 0)}, AssertionError),
    "hint": ({"hint": 1}, AssertionError),
    "output_dtype": ({"output_idx": own_buffer(2, 4, torch.int32)}, AssertionError),
    "topk_0": ({"topk": 0}, RuntimeError),
    "topk_4097": ({"topk": 4097}, RuntimeError),
    "topk_2^31": ({"topk": 2**31}, TypeError),
    "topk_float": ({"topk": 4.0}, TypeError),
    "fill_wide": ({"idx_oob_fill_value": 2**31}, TypeError),
    "sorted_no_values": ({"sorted": True, "return_value": False}, RuntimeError),
    "sorted_twice": ({"sorted": True, "sorted_index": True}, RuntimeError),
    "sorted_bf16": ({"sorted": True, "input": scores(draw(2, 64), torch.bfloat16)}, RuntimeError),
    "fp16": ({"input": scores(draw(2, 64), torch.float16)}, RuntimeError),
    "one_dim": ({"input": torch.zeros(64)}, RuntimeError),
    "stride": ({"input": torch.zeros(2, 65)[:, :64]}, RuntimeError),
    "last_stride": ({"input": torch.zeros(64, 64).t()}, RuntimeError),
    "vocab": ({"input": torch.empty(1, 1).expand(1, 2**23)}, RuntimeError),
    "indices_type": ({"indices_type": torch.int16, "output_idx": None}, RuntimeError),
    "end_dtype": ({"end": torch.zeros(2, dtype=torch.int64)}, RuntimeError),
    "end_shape": ({"end": ints(1)}, RuntimeError),
    "offset_strided": ({"output_idx_offset": ints(1, 2, 3, 4)[::2]}, RuntimeError),
    "output_shape": ({"output_idx": own_buffer(2, 5)}, RuntimeError),
    "output_stride": ({"output_idx": torch.zeros(2, 5, dtype=torch.int64)[:, :4]}, RuntimeError),
    "output_overlap": ({"output_idx": torch.zeros(1, 4, dtype=torch.int64).expand(2, 4)}, RuntimeError),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_raises_before_writing(name):
    change, error = MISUSE[name]
    own = own_buffer(2, 4)
    with pytest.raises(error):
        adapter().topk(**{**GOOD, "output_idx": own, **change})
    assert (own == CANARY).all()
    assert wrong(GOOD, adapter().topk(**GOOD)) == set()


def test_negative_end_is_empty():
    call = {**GOOD, "end": ints(-1, 2)}
    assert adapter().topk(**call)[1].tolist()[0] == [2**31 - 1] * 4


def test_nan_aborts_the_process():
    code = (
        "import torch; from types import SimpleNamespace as N\n"
        "from adapters.cpu.deepselect import Adapter; from adapters.cpu.kernels.knobs import Knobs\n"
        "x = torch.zeros(2, 64); x[1, 5] = float('nan')\n"
        "Adapter(N(knobs=Knobs())).topk(x, 4{})\n"
    )
    run = [subprocess.run([sys.executable, "-c", code.format(a)], cwd=ROOT, capture_output=True, text=True, check=False)
           for a in ("", ", end=torch.tensor([64, 4], dtype=torch.int32)")]
    assert run[0].returncode == -6
    assert "NaN in row 1" in run[0].stderr
    assert run[1].returncode == 0, "a row no longer than topk is not looked at"
