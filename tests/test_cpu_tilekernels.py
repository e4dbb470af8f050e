"""The cpu adapter of TileKernels against NumPy, its correct variants, and its seeded faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adapters.cpu import tilekernels
from adapters.cpu.kernels import quant, rows, tile_io
from adapters.cpu.kernels.knobs import Knobs
from conformance.catalogue.load import read_toml
from conformance.results import REASONS

torch.set_num_threads(1)
BF16, FP32 = torch.bfloat16, torch.float32
POISON = 768.0
TABLE = read_toml(Path(__file__).parents[1] / "cases" / "tilekernels" / "faults.toml")
KNOWN_FAULTS = {**tilekernels.FAULTS, **rows.FAULTS, **quant.FAULTS, **tile_io.FAULTS}
E4M3_GRID = np.array([(m + 8 * (e > 0)) * 2.0 ** (max(e, 1) - 10) for e in range(16) for m in range(8)][:127])
E2M1_GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GRID = {"e4m3": E4M3_GRID, "e2m1": E2M1_GRID}

Violations = set[str]
"""Checks that failed."""


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What a kernel allocates holds NaN, never the right answer of an earlier test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def adapter(knobs: Knobs) -> tilekernels.Adapter:
    return tilekernels.Adapter(SimpleNamespace(knobs=knobs))


def f64(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def half_ulp(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    _, exponent = np.frexp(np.abs(x))
    return np.ldexp(1.0, np.maximum(exponent - 1, -126) - (8 if dtype == BF16 else 24))


def normal(rng: np.random.Generator, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape, np.float32)).to(dtype)


def inside(*shape: int, gap: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(poisoned buffer, view of all but the last `gap` columns)."""
    wide = torch.full((*shape[:-1], shape[-1] + gap), POISON).to(dtype)
    return wide, wide[..., : shape[-1]]


def nearest_even(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Index of the nearest number of an increasing grid, ties to the even index, saturating."""
    magnitude = np.minimum(np.abs(x), grid[-1])
    upper = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
    below, above = magnitude - grid[upper - 1], grid[upper] - magnitude
    return np.where((below < above) | ((below == above) & (upper % 2 == 1)), upper - 1, upper)


def cast_data(h: int, t: int, huge: bool) -> torch.Tensor:
    rng = np.random.default_rng(5)
    x = torch.ldexp(normal(rng, t, h, dtype=FP32), torch.from_numpy(rng.integers(-12, 12, (t, h))))
    x[2] = 0.0
    x[3, h - 1] = -(2.0**18)
    x[4] = torch.arange(h) * 0.25
    x[4, ::16] = 448.0
    x[5] = torch.arange(h) % 13 * 0.25
    x[5, ::16] = 6.0
    x[7], x[8] = (largest * 2.0**7 * (1 + 2.0**-23) for largest in (448.0, 6.0))  # scales a hair above a power of two
    if huge:
        x[6] *= 2.0**20
    return x


def cast(
    fmt: str, gran: int, scale: str = "fp32", h: int = 384, dtype: torch.dtype = BF16, col_major: bool = False,
    given: bool = False, t: int = 70,
) -> Callable[[Knobs], Violations]:
    """per_token_cast, codes and scales bit for bit. scale: fp32 | round | packed | e4m3."""

    def run(knobs: Knobs) -> Violations:
        x = cast_data(h, t, huge=scale == "e4m3").to(dtype)
        groups, largest = -(-h // gran), np.float32(448 if fmt == "e4m3" else 6)
        clamp = {"e4m3": 1e-4, "e2m1": 6 * 2.0**-126}[fmt] if scale != "e4m3" else float(largest) * 2.0**-9
        wide = np.zeros((t, groups * gran), np.float32)
        wide[:, :h] = x.float().numpy()
        amax = np.maximum(np.abs(wide.reshape(t, groups, gran)).max(2), np.float32(clamp))
        sf = amax / largest
        multiplier = largest / amax
        if scale in ("round", "packed"):
            fraction, exponent = np.frexp(sf)
            sf = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
            multiplier = np.float32(1) / sf
        if scale == "e4m3":
            sf = E4M3_GRID[nearest_even(sf.astype(np.float64), E4M3_GRID)].astype(np.float32)
            multiplier = np.float32(1) / sf
        scaled = wide * np.repeat(multiplier, gran, 1)
        index = nearest_even(scaled.astype(np.float64), GRID[fmt])[:, :h]
        codes = (index | np.where(np.signbit(scaled[:, :h]), 0x80 if fmt == "e4m3" else 8, 0)).astype(np.uint8)
        if fmt == "e2m1":
            codes = codes[:, ::2] | codes[:, 1::2] << 4

        switches = {"round_sf": scale in ("round", "packed"), "use_packed_ue8m0": scale == "packed",
                    "use_e4m3_sf": scale == "e4m3", "use_tma_aligned_col_major_sf": col_major}
        out = None
        if given:
            data_dtype, width = (torch.float8_e4m3fn, h) if fmt == "e4m3" else (torch.int8, h // 2)
            words = {"packed": (torch.int32, -(-groups // 4)), "e4m3": (torch.float8_e4m3fn, groups)}
            sf_dtype, sf_width = words.get(scale, (FP32, groups))
            out = (torch.zeros(t, width + 16).to(data_dtype)[:, :width], torch.zeros(t, sf_width).to(sf_dtype))
        data, got_sf = adapter(knobs).quant__per_token_cast(x, fmt, gran, out=out, **switches)
        if given:
            data, got_sf = out
        if scale == "packed":
            flat = got_sf.reshape(-1).contiguous().view(torch.uint8).reshape(t, -1)[:, :groups]
            got = np.ldexp(1.0, flat.numpy().astype(np.int32) - 127)
        else:
            got = got_sf.float().numpy()
        ok = np.array_equal(data.view(torch.uint8).numpy(), codes) and np.array_equal(got, sf)
        if col_major:
            line = 16 if scale == "e4m3" else 4
            ok &= got_sf.stride() == (1, -(-t // line) * line)
        return set() if ok else {"values"}

    return run


def recast(packed_input: bool) -> Callable[[Knobs], Violations]:
    """per_token_cast of an E4M3 or E2M1 matrix with scales of its own blocks."""

    def run(knobs: Knobs) -> Violations:
        rng = np.random.default_rng(6)
        t, h, block = 70, 192, (32, 32)
        if packed_input:
            codes = rng.integers(0, 256, (t, h // 2), np.uint8)
            x = torch.from_numpy(codes.view(np.int8))
            grid = np.concatenate((E2M1_GRID, -E2M1_GRID)).astype(np.float32)
            values = np.stack((grid[codes & 15], grid[codes >> 4]), 2).reshape(t, h)
        else:
            x = normal(rng, t, h, dtype=FP32).mul(30).to(torch.float8_e4m3fn)
            values = x.float().numpy()
        sf_in = rng.uniform(0.5, 2, (3, 6)).astype(np.float32)
        factor = np.repeat(np.repeat(sf_in, 32, 0), 32, 1)[:t, :h]
        amax = np.abs(np.pad(values * factor, ((0, 0), (0, 64))).reshape(t, 2, 128)).max(2)
        sf, multiplier = amax / np.float32(448), np.float32(448) / amax
        scaled = values * factor * np.repeat(multiplier, 128, 1)[:, :h]
        want = nearest_even(scaled.astype(np.float64), E4M3_GRID) | np.where(np.signbit(scaled), 0x80, 0)
        call = adapter(knobs).quant__per_token_cast
        data, got = call((x, torch.from_numpy(sf_in)), "e4m3", 128, x_block_size=block)
        same = np.array_equal(data.view(torch.uint8).numpy(), want) and np.array_equal(got.numpy(), sf)
        return set() if same else {"values"}

    return run


def norm(
    dtype: torch.dtype = BF16, shape: tuple[int, ...] = (70, 200), eps: float = 1e-6, weight: bool = True,
    residual: bool = False, out_scale: float = 1.0, given: bool = False, size: float = 1.0,
) -> Callable[[Knobs], Violations]:
    """norm_forward; the oracle normalises the residual sum rounded to the input format."""

    def run(knobs: Knobs) -> Violations:
        rng = np.random.default_rng(8)
        h = shape[-1]
        x, res = normal(rng, *shape, dtype=dtype) * size, normal(rng, *shape, dtype=dtype) * size
        w = normal(rng, h, dtype=dtype) if weight else None
        r = (x.double() + res.double()).to(dtype) if residual else x
        square = (f64(r) ** 2).mean(-1, keepdims=True)
        rstd = 1 / np.sqrt(square + eps)
        want = f64(r) * rstd * ((f64(w) if weight else 1.0) * out_scale)
        wide, out = inside(*shape, gap=8, dtype=dtype)
        wide_res, residual_out = inside(*shape, gap=8, dtype=dtype)
        given_out = {"out": out, "residual_out": residual_out if residual else None} if given else {}
        got, got_rstd, norm_input = adapter(knobs).quant__norm_forward(
            x, w, eps, residual=res if residual else None, out_scale=out_scale, with_rstd=True, **given_out
        )
        bad: Violations = set()
        if given and (got is not out or (residual and norm_input is not residual_out)):
            bad.add("values")
        relative = (h / 2 + 10) * 2.0**-24
        bound = half_ulp(want, dtype) * (1 + 2.0**-8) + np.abs(want) * relative
        ok = np.all(np.abs(f64(got) - want) <= bound)
        ok &= np.all(np.abs(f64(got_rstd)[..., None] - rstd) <= rstd * relative)
        ok &= abs(np.mean(f64(got_rstd)[..., None] / rstd) - 1.0) <= 2.0**-16  # far inside that of long rows
        ok &= torch.equal(norm_input, r) and (residual or norm_input is x)
        if not ok:
            bad.add("values")
        if (wide[..., h:] != POISON).any() or (wide_res[..., h:] != POISON).any():
            bad.add("layout")
        return bad

    return run


def rope(
    dtype: torch.dtype = BF16, tokens: tuple[int, ...] = (70,), d: int = 64, positions: bool = False, offset: int = 0,
    key: bool = False, gap: int = 0, factor: float = 1.0, rows: int = 100,
    **switches: bool,
) -> Callable[[Knobs], Violations]:
    def run(knobs: Knobs) -> Violations:
        rng = np.random.default_rng(9)
        angle = rng.uniform(-3, 3, (400, d // 2))
        table = torch.from_numpy(np.concatenate((np.cos(angle), np.sin(angle)), 1).astype(np.float32))
        place = rng.integers(0, rows, tokens) if positions else np.broadcast_to(np.arange(tokens[-1]), tokens)
        cos, sin = (f64(part)[place + offset][..., None, :] for part in table.split(d // 2, 1))
        sin = -sin if switches.get("conjugate") else sin
        first, second = (np.s_[..., : d // 2], np.s_[..., d // 2 :])
        if switches.get("interleaved"):
            first, second = np.s_[..., ::2], np.s_[..., 1::2]
        tensors, wanted, bounds, wides = [], [], [], []
        for heads in (3, 2) if key else (3,):
            wide, x = inside(*tokens, heads, d, gap=gap, dtype=dtype)
            x.copy_(normal(rng, *tokens, heads, d, dtype=dtype) * factor)
            a, b = f64(x)[first], f64(x)[second]
            want, size = np.empty(x.shape), np.empty(x.shape)
            want[first], want[second] = a * cos - b * sin, a * sin + b * cos
            size[first] = size[second] = np.abs(a) + np.abs(b)
            tensors.append(x), wanted.append(want), wides.append(wide)
            bounds.append(half_ulp(np.abs(want) + 2.0**-22 * size, dtype) + 2.0**-22 * size)
        index = torch.from_numpy(np.array(place, np.int32)) if positions else None
        others = {"key": tensors[1]} if key else {}
        call = adapter(knobs).transform__apply_rotary
        assert call(tensors[0], table, positions=index, seqlen_offset=offset, **others, **switches) is None
        bad: Violations = set()
        for x, want, bound, wide in zip(tensors, wanted, bounds, wides, strict=True):
            if not np.all(np.abs(f64(x) - want) <= bound):
                bad.add("values")
            if (wide[..., d:] != POISON).any():
                bad.add("layout")
        return bad

    return run


def gate(t: int, experts: int, k: int, ties: bool = False) -> Callable[[Knobs], Violations]:
    def run(knobs: Knobs) -> Violations:
        rng = np.random.default_rng(10)
        scores = rng.standard_normal((t, experts), np.float32)
        scores = np.rint(scores) if ties else scores
        got = adapter(knobs).moe__topk_gate(torch.from_numpy(scores), k)
        want = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return set() if got.dtype == torch.int64 and np.array_equal(got.numpy(), want) else {"values"}

    return run


def rejected(wrong: Callable[[tilekernels.Adapter], list], error: type) -> Callable[[Knobs], Violations]:
    def run(knobs: Knobs) -> Violations:
        for call in wrong(adapter(knobs)):
            try:
                call()
            except error:
                continue
            return {"rejects"}
        return set()

    return run


def wrong_cast(a: tilekernels.Adapter) -> list:
    x, call = torch.ones(4, 128), a.quant__per_token_cast
    out = (torch.zeros(4, 128).to(torch.float8_e4m3fn), torch.full((4, 1), POISON))
    return [
        lambda: call(x, "e5m2", 128),
        lambda: call(x, "e4m3", 48),
        lambda: call(x[:, :96], "e4m3", 32),
        lambda: call(x.half(), "e4m3", 32),
        lambda: call(x[0], "e4m3", 32),
        lambda: call(x, "e4m3", 32, use_packed_ue8m0=True),
        lambda: call(x, "e4m3", 32, round_sf=True, use_e4m3_sf=True),
        lambda: call(x, "e4m3", 32, x_block_size=(1, 32)),
        lambda: call(x, "e4m3", 32, out=out),
        lambda: call(x, "e4m3", 128, use_tma_aligned_col_major_sf=True, out=out),
        lambda: call(x, "e2m1", 128, out=out),
        lambda: call((x.to(torch.float8_e4m3fn), torch.ones(4, 4)), "e4m3", 32),
    ]


def wrong_norm(a: tilekernels.Adapter) -> list:
    x, call = torch.ones(4, 32), a.quant__norm_forward
    out = torch.full((4, 32), POISON)
    return [
        lambda: call(x.half(), None, 1e-6, out=out),
        lambda: call(x, torch.ones(16), 1e-6, out=out),
        lambda: call(x, torch.ones(32, dtype=BF16), 1e-6, out=out),
        lambda: call(x, None, 1e-6, residual=x[:2], out=out),
        lambda: call(x, None, 1e-6, out=out[:, :16]),
        lambda: call(x, None, 1e-6, out=out.to(BF16)),
        lambda: call(x.t(), None, 1e-6, out=out),
    ]


def wrong_rope(a: tilekernels.Adapter) -> list:
    q, table, call = torch.full((5, 2, 64), POISON), torch.ones(8, 64), a.transform__apply_rotary
    return [
        lambda: call(q[..., :32], table[:, :32]),
        lambda: call(q, table[:, :32]),
        lambda: call(q.half(), table),
        lambda: call(q, table.to(BF16)),
        lambda: call(q, table, key=q.to(BF16)),
        lambda: call(q, table, key=q[None]),
        lambda: call(q, table, positions=torch.zeros(4, dtype=torch.int32)),
        lambda: call(q, table, positions=torch.zeros(5)),
    ]


def wrong_rope_rows(a: tilekernels.Adapter) -> list:
    q, table, call = torch.full((5, 2, 64), POISON), torch.ones(8, 64), a.transform__apply_rotary
    return [
        lambda: call(q, table, seqlen_offset=4),
        lambda: call(q, table, positions=torch.full((5,), -1)),
    ]


def wrong_gate(a: tilekernels.Adapter) -> list:
    s = torch.ones(4, 40)
    return [
        lambda: a.moe__topk_gate(s, 33),
        lambda: a.moe__topk_gate(s[:, :4].contiguous(), 5),
        lambda: a.moe__topk_gate(s.double(), 4),
        lambda: a.moe__topk_gate(s.t(), 4),
        lambda: a.moe__topk_gate(s[0], 4),
    ]


def nonfinite_gate(a: tilekernels.Adapter) -> list:
    return [lambda v=v: a.moe__topk_gate(torch.tensor([[1.0, v, 2.0]]), 2) for v in (float("nan"), float("inf"))]


SCENARIOS: dict[str, list[Callable[[Knobs], Violations]]] = {
    "quant.per_token_cast": [
        *(cast(f, gran, scale) for f in GRID for gran in (32, 128) for scale in ("fp32", "round", "packed", "e4m3")),
        cast("e4m3", 128, "round", dtype=FP32), cast("e4m3", 128, h=192),
        cast("e4m3", 128, h=64, dtype=FP32), cast("e2m1", 16, dtype=FP32, given=True),
        cast("e4m3", 64, "packed", h=320, col_major=True), cast("e4m3", 128, "e4m3", col_major=True),
        cast("e4m3", 128, given=True), cast("e4m3", 32, "packed", given=True),
        cast("e4m3", 32, "packed", h=64, col_major=True),

        recast(packed_input=False), recast(packed_input=True), rejected(wrong_cast, AssertionError),
    ],
    "quant.norm_forward": [
        norm(), norm(FP32), norm(weight=False), norm(residual=True), norm(FP32, residual=True), norm(out_scale=1.75),
        norm(FP32, eps=0.25), norm(size=2.0**-12, eps=1e-6), norm(given=True), norm(given=True, residual=True),
        norm(shape=(3, 5, 64), given=True, residual=True), norm(shape=(1, 1)), norm(FP32, shape=(2, 7168)),
        rejected(wrong_norm, AssertionError),
    ],
    "transform.apply_rotary": [
        rope(), rope(FP32), rope(interleaved=True), rope(conjugate=True),
        rope(FP32, d=128, interleaved=True, conjugate=True), rope(offset=7), rope(factor=2.0**20),
        rope(positions=True, rows=400),
        rope(positions=True, offset=3, key=True), rope(tokens=(2, 66), positions=True, key=True),
        rope(tokens=(2, 9), gap=64, key=True), rope(tokens=(2, 9), offset=5),
        rejected(wrong_rope, AssertionError), rejected(wrong_rope_rows, RuntimeError),
    ],
    "moe.topk_gate": [
        gate(70, 256, 8), gate(70, 72, 6, ties=True), gate(3, 32, 32, ties=True), gate(1, 1, 1),
        gate(5, 130, 9, ties=True),
        rejected(wrong_gate, AssertionError), rejected(nonfinite_gate, RuntimeError),
    ],
}


def pairs(kind: str) -> list:
    """(row, op) of every fault or variant."""
    return [
        pytest.param(row, op.removeprefix("tilekernels."), id=f"{row['name']}-{op}")
        for row in TABLE[kind]
        for op in row["ops"]
    ]


@pytest.mark.parametrize("op", SCENARIOS)
def test_default_is_right(op: str) -> None:
    assert [run(Knobs()) for run in SCENARIOS[op]] == [set()] * len(SCENARIOS[op])


@pytest.mark.parametrize(("row", "op"), pairs("variant"))
def test_variant_is_right(row: dict, op: str) -> None:
    knobs = Knobs.parse(row["knobs"])
    assert knobs != Knobs()
    assert [run(knobs) for run in SCENARIOS[op]] == [set()] * len(SCENARIOS[op])


DECLARED = {row["knobs"] for row in TABLE["variant"] if row.get("profile")}
"""right where a profile says so, wrong elsewhere: tests/test_saturation.py shows both"""


@pytest.mark.parametrize(("row", "op"), [p for p in pairs("fault") if p.values[0]["knobs"] not in DECLARED])
def test_fault_is_visible(row: dict, op: str) -> None:
    knobs = Knobs.parse(row["knobs"])
    assert row["check"] in set().union(*(run(knobs) for run in SCENARIOS[op]))


def test_tables_are_consistent() -> None:
    names = [row["name"] for kind in ("fault", "variant") for row in TABLE[kind]]
    assert len(names) == len(set(names))
    used = {Knobs.parse(row["knobs"]).fault for row in TABLE["fault"]} - {""}
    assert used <= set(KNOWN_FAULTS)
    for row in TABLE["fault"]:
        assert set(row) == {"name", "ops", "knobs", "check", "reason", "source", "doc"}
        reasons = [row["reason"]] if isinstance(row["reason"], str) else row["reason"]
        assert set(reasons) <= set(REASONS)
    assert {op.removeprefix("tilekernels.") for row in TABLE["fault"] for op in row["ops"]} == set(SCENARIOS)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (wrong_cast, AssertionError), (wrong_norm, AssertionError), (wrong_rope, AssertionError),
        (wrong_rope_rows, RuntimeError),
    ],
)
def test_nothing_is_written_before_an_error(wrong: Callable, error: type) -> None:
    for call in wrong(adapter(Knobs())):
        cells = [c.cell_contents for c in call.__closure__ if isinstance(c.cell_contents, torch.Tensor)]
        before = [t.clone() for t in cells]
        with pytest.raises(error):
            call()
        assert all(torch.equal(x.float(), y.float()) for x, y in zip(cells, before, strict=True))


def test_no_columns() -> None:
    a = adapter(Knobs())
    for fmt in GRID:
        data, sf = a.quant__per_token_cast(torch.empty(3, 0), fmt, 32)
        assert (data.shape, sf.shape) == ((3, 0), (3, 0))


def test_no_tokens() -> None:
    a = adapter(Knobs())
    data, sf = a.quant__per_token_cast(torch.empty(0, 128), "e2m1", 32, round_sf=True, use_packed_ue8m0=True)
    assert (data.shape, sf.shape) == ((0, 64), (0, 1))
    out, rstd, _ = a.quant__norm_forward(torch.empty(0, 32), None, 1e-6, with_rstd=True)
    assert (out.shape, rstd.shape) == ((0, 32), (0,))
    packed = torch.empty(0, 64, dtype=torch.int8)
    data, _ = a.quant__per_token_cast((packed, torch.empty(0, 4)), "e4m3", 32, x_block_size=(1, 32))
    assert data.shape == (0, 128)
    assert a.moe__topk_gate(torch.empty(0, 8), 3).shape == (0, 3)
    a.transform__apply_rotary(torch.empty(0, 2, 64), torch.empty(0, 64))


def test_stochastic_cast_is_not_there() -> None:
    with pytest.raises(NotImplementedError):
        adapter(Knobs()).quant__per_token_cast(torch.ones(1, 64), "e4m3", 32, stochastic_cast=True)


def test_amax_clamp_is_a_setting() -> None:
    a = adapter(Knobs())
    a.settings["amax_clamp_e4m3"] = 448.0
    _, sf = a.quant__per_token_cast(torch.ones(1, 64), "e4m3", 64)
    assert sf.item() == 1.0


def test_every_rounding_rule_matches_the_native_cast_where_they_agree() -> None:
    """The table behind the other rules holds the same numbers as torch's own E4M3 cast."""
    x = torch.cat((torch.from_numpy(E4M3_GRID).float(), torch.tensor([float("nan")])))
    native = quant._round(x, "e4m3", Knobs())
    assert torch.equal(native, quant._round(x, "e4m3", Knobs(output_rounding="toward_zero")))
    assert torch.equal(native, quant._round(x, "e4m3", Knobs(fault="ties_away")))
