"""The cpu adapter of DeepGEMM against float64, its correct variants, and its seeded faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adapters.cpu import deepgemm
from adapters.cpu.kernels import gemm, quant, tile_io
from adapters.cpu.kernels.knobs import Knobs
from conformance.catalogue.load import read_toml
from conformance.results import REASONS

torch.set_num_threads(1)
BF16, FP32 = torch.bfloat16, torch.float32
POISON = 768.0
TABLE = read_toml(Path(__file__).parents[1] / "cases" / "deepgemm" / "faults.toml")
KNOWN_FAULTS = {**deepgemm.FAULTS, **gemm.FAULTS, **quant.FAULTS, **tile_io.FAULTS}

Violations = set[str]
"""Checks that failed."""


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What a kernel allocates holds NaN, never the right answer of an earlier test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def adapter(knobs: Knobs) -> deepgemm.Adapter:
    return deepgemm.Adapter(SimpleNamespace(knobs=knobs))


def f64(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def half_ulp(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    _, exponent = np.frexp(np.abs(x))
    return np.ldexp(1.0, np.maximum(exponent - 1, -126) - (8 if dtype == BF16 else 24))


def normal(rng: np.random.Generator, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape, np.float32)).to(dtype)


def mn_major(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


def pitched(x: torch.Tensor, gap: int) -> torch.Tensor:
    wide = torch.full((x.shape[0], x.shape[1] + gap), POISON).to(x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def gap_changed(d: torch.Tensor, n: int) -> bool:
    """Whether a row wrote behind its n columns; d is a view of rows of pitch d.stride(0)."""
    wide = d.as_strided((d.shape[0], d.stride(0)), (d.stride(0), 1))
    return bool((wide[:, n:] != POISON).any())


def far_off(got: torch.Tensor, want: np.ndarray, magnitude: np.ndarray, k: int, c: np.ndarray | float = 0.0) -> bool:
    """Whether got leaves the bound of any FP32 accumulation, scaling and one (with C: two) roundings."""
    acc = (k + 2 * k / 32 + 4) * 2.0**-24 * magnitude + k * 2.0**-149
    bound = half_ulp(np.abs(want) + acc, got.dtype) + acc
    if not np.isscalar(c):
        bound = bound + half_ulp(np.abs(want - c) + acc, got.dtype) + 2.0**-24 * np.abs(c)
    value = f64(got)
    same = np.isnan(want) == np.isnan(value)
    with np.errstate(invalid="ignore"):
        near = np.where(np.isinf(want), value == want, np.abs(value - want) <= bound)
    return not bool(np.all(same & (near | np.isnan(want))))


def dense(
    out: torch.dtype = BF16, c: str = "none", a_form: Callable = lambda x: x, b_form: Callable = lambda x: x,
    check: str = "values", size: tuple[int, int, int] = (70, 33, 328), special: float = 1.0, alpha: float | None = None,
) -> Callable[[Knobs], Violations]:
    """bf16_gemm_nt; `special` replaces one element of A, or scales all of it if it is tiny."""

    def run(knobs: Knobs) -> Violations:
        m, n, k = size
        rng = np.random.default_rng(7)
        a, b = normal(rng, m, k), normal(rng, n, k)
        if abs(special) < 1.0:
            a = a * special
        elif special != 1.0:
            a[m // 2, k // 3] = special
        wide = torch.full((m, n + 8), POISON).to(out)
        d = wide[:, :n]
        base = normal(rng, m, n, dtype=out) * 8
        given = {"none": None, "apart": base, "aliased": d, "row": base[:1]}[c]
        if c == "aliased":
            d.copy_(base)
        added = {"none": 0.0, "row": f64(base[:1])}.get(c, f64(base))
        with np.errstate(invalid="ignore"):
            product = f64(a) @ f64(b).T
            want = (1.0 if alpha is None else alpha) * product + added
            magnitude = np.abs(f64(a)) @ np.abs(f64(b)).T * max(1.0, abs(alpha or 1.0)) + np.abs(added)
        assert adapter(knobs).bf16_gemm_nt(a_form(a), b_form(b), d, given, alpha=alpha) is None
        bad: Violations = set()
        if far_off(d, want, np.where(np.isnan(magnitude), 0.0, magnitude), k, added):
            bad.add(check)
        if gap_changed(d, n):
            bad.add("memory")
        return bad

    return run


def decoded_scales(exponents: np.ndarray) -> np.ndarray:
    return np.ldexp(1.0, exponents.astype(np.int32) - 127)


def packed(exponents: np.ndarray, pitch_rows: int) -> torch.Tensor:
    """int32 [mn, words] with stride (1, pitch_rows), four exponent bytes a word, lowest first."""
    mn, groups = exponents.shape
    words = -(-groups // 4)
    full = np.zeros((mn, words * 4), np.uint32)
    full[:, :groups] = exponents
    word = (full.reshape(mn, words, 4) << np.array([0, 8, 16, 24], np.uint32)).sum(2, dtype=np.uint32).view(np.int32)
    store = torch.zeros(words * pitch_rows, dtype=torch.int32)
    view = store.as_strided((mn, words), (1, pitch_rows))
    view.copy_(torch.from_numpy(word))
    return view


def scaled(
    form: str, out: torch.dtype = FP32, c: str = "none", a_form: Callable = lambda x: x, check: str = "values",
    size: tuple[int, int, int] = (70, 136, 400), nan: bool = False, fp4: bool = False,
    exponents_from: tuple[int, int] = (121, 121),
) -> Callable[[Knobs], Violations]:
    """fp8_gemm_nt. form: block (1x128, 128x128) | line (1x128 both) | packed32 | packed128 | mixed."""

    def run(knobs: Knobs) -> Violations:
        m, n, k = size
        rng = np.random.default_rng(11)
        a, b = (normal(rng, r, k, dtype=FP32).mul(40).to(torch.float8_e4m3fn) for r in (m, n))
        values = [f64(a), f64(b)]
        if fp4:
            codes = rng.integers(0, 256, (m, k // 2), np.uint8)
            a = torch.from_numpy(codes.view(np.int8))
            grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
            values[0] = np.stack((grid[codes & 15], grid[codes >> 4]), 2).reshape(m, k)
        if nan:
            a.view(torch.uint8)[3, 5] = 0x7F
            values[0] = f64(a)
        recipes = {
            "block": {}, "line": {"recipe": (1, 1, 128)}, "packed32": {"recipe": (1, 1, 32)}, "packed128": {},
            "mixed": {"recipe_a": (1, 32), "recipe_b": (1, 128)},
        }
        grans = [(1, 128), (128, 128)] if form == "block" else [(1, 128), (1, 128)]
        if form in ("packed32", "mixed"):
            grans[0] = (1, 32)
        if form == "packed32":
            grans[1] = (1, 32)
        scales, expanded = [], []
        for rows, (gran_mn, gran_k), lowest in zip((m, n), grans, exponents_from, strict=True):
            shape = (-(-rows // gran_mn), -(-k // gran_k))
            if form in ("block", "line"):
                sf = rng.uniform(0.25, 4.0, shape).astype(np.float32)
                scales.append(torch.from_numpy(sf))
            else:
                exponents = rng.integers(lowest, lowest + 13, shape)
                sf = decoded_scales(exponents)
                scales.append(packed(exponents, -(-rows // 4) * 4 + 8))
            expanded.append(sf.astype(np.float64)[np.arange(rows) // gran_mn][:, np.arange(k) // gran_k])
        left, right = (v * s for v, s in zip(values, expanded, strict=True))
        d = torch.full((m, n + 8), POISON).to(out)[:, :n]
        base = normal(rng, m, n, dtype=out) * 2048
        if c == "aliased":
            d.copy_(base)
        given = {"none": None, "apart": base, "aliased": d}[c]
        added = 0.0 if c == "none" else f64(base)
        want, magnitude = left @ right.T + added, np.abs(left) @ np.abs(right).T + np.abs(added)
        call = adapter(knobs).fp8_gemm_nt
        assert call((a_form(a), scales[0]), (b, scales[1]), d, given, **recipes[form]) is None
        bad: Violations = set()
        if far_off(d, want, np.nan_to_num(magnitude), k, added):
            bad.add(check)
        if gap_changed(d, n):
            bad.add("memory")
        return bad

    return run


def grouped(layout: str, m: int, sizes: tuple[int, ...], zero_padding: bool = True,
            factor: float = 1.0) -> Callable[[Knobs], Violations]:
    """m_grouped_bf16_gemm_nt_contiguous; groups start on multiples of 128. layout: labels | ends.

    factor: size of A; infinity stands in one of its elements only.
    """

    def run(knobs: Knobs) -> Violations:
        n, k = 40, 200
        rng = np.random.default_rng(13)
        size = 1.0 if math.isinf(factor) else factor
        a, b = normal(rng, m, k) * size, normal(rng, len(sizes), n, k) / size
        if math.isinf(factor):
            a[1, 3] = factor
        labels, ends, start = np.full(m, -1), [], 0
        for group, count in enumerate(sizes):
            labels[start : start + count] = group
            ends.append(start + count)
            start += -(-count // 128) * 128
        free = np.zeros(m, bool)  # padding inside a tile of 128: the contract says nothing
        for end in ends:
            free[end : -(-end // 128) * 128] = True
        d = torch.full((m, n + 8), POISON).to(BF16)[:, :n]
        args = torch.tensor(ends if layout == "ends" else labels, dtype=torch.int32)
        more = {"use_psum_layout": True, "ensure_zero_padding": zero_padding} if layout == "ends" else {}
        assert adapter(knobs).m_grouped_bf16_gemm_nt_contiguous(a, b, d, args, **more) is None
        bad: Violations = set()
        for group in range(len(sizes)):
            rows = labels == group
            left, right = f64(a[rows]), f64(b[group])
            if far_off(d[rows], left @ right.T, np.abs(left) @ np.abs(right).T, k):
                bad.add("values")
        untouched = (labels < 0) & ~free
        if (d[untouched] != POISON).any() or gap_changed(d, n):
            bad.add("memory")
        return bad

    return run


def nearest_even(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Index of the nearest number of an increasing grid, ties to the even index, saturating."""
    magnitude = np.minimum(np.abs(x), grid[-1])
    upper = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
    below, above = magnitude - grid[upper - 1], grid[upper] - magnitude
    return np.where((below < above) | ((below == above) & (upper % 2 == 1)), upper - 1, upper)


E4M3_GRID = np.array([(m + 8 * (e > 0)) * 2.0 ** (max(e, 1) - 10) for e in range(16) for m in range(8)][:127])


def cast(gran: int, ue8m0: bool, use_packed: bool, h: int, dtype: torch.dtype = BF16) -> Callable[[Knobs], Violations]:
    """per_token_cast_to_fp8, codes and scales bit for bit."""

    def run(knobs: Knobs) -> Violations:
        rng = np.random.default_rng(17)
        x = torch.ldexp(normal(rng, 70, h, dtype=FP32), torch.from_numpy(rng.integers(-12, 12, (70, h))))
        x[3] = 0.0
        x[4, 0] = -(2.0**20)
        x[5] = torch.arange(h) * 0.5  # many ties
        x[5, 1] = 448.0
        x[6] = 448.0 * 2.0**7 * (1 + 2.0**-23)  # a hair more than a power of two
        x = x.to(dtype)
        codes, scales = adapter(knobs).per_token_cast_to_fp8(x, ue8m0, gran, use_packed)
        groups = -(-h // gran)
        wide = np.zeros((70, groups * gran), np.float32)
        wide[:, :h] = x.float().numpy()
        sf = np.maximum(np.abs(wide.reshape(70, groups, gran)).max(2), np.float32(1e-4)) / np.float32(448)
        if ue8m0:
            fraction, exponent = np.frexp(sf)
            sf = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
        scaled_x = wide * np.repeat(np.float32(1) / sf, gran, 1)
        index = nearest_even(scaled_x.astype(np.float64), E4M3_GRID)
        want = (index | np.where(np.signbit(scaled_x), 0x80, 0)).astype(np.uint8)[:, :h]
        bad: Violations = set()
        if use_packed:
            full = np.ones((70, -(-groups // 4) * 4), np.float32)
            full[:, :groups] = sf
            want_sf = (np.log2(full).astype(np.int32) + 127).astype(np.uint8).view(np.int32)
            assert scales.dtype == torch.int32
        else:
            want_sf = sf
        if not np.array_equal(codes.view(torch.uint8).numpy(), want) or not np.array_equal(scales.numpy(), want_sf):
            bad.add("values")
        return bad

    return run


def rejected(calls: Callable[[deepgemm.Adapter], list], error: type) -> Callable[[Knobs], Violations]:
    def run(knobs: Knobs) -> Violations:
        for call in calls(adapter(knobs)):
            try:
                call()
            except error:
                continue
            return {"rejects"}
        return set()

    return run


def _bf16(m: int = 8, n: int = 8, k: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(m, k, dtype=BF16), torch.ones(n, k, dtype=BF16), torch.full((m, n), POISON, dtype=BF16)


def _fp8(m: int = 8, n: int = 8, k: int = 256) -> tuple:
    def data(rows: int) -> torch.Tensor:
        return torch.ones(rows, k).to(torch.float8_e4m3fn)

    return (data(m), torch.ones(m, 2)), (data(n), torch.ones(1, 2)), torch.full((m, n), POISON, dtype=BF16)


def wrong_dense(g: deepgemm.Adapter) -> list[Callable[[], object]]:
    a, b, d = _bf16()
    return [
        lambda: g.bf16_gemm_nt(a, _bf16(k=24)[1], d),
        lambda: g.bf16_gemm_nt(a.half(), b, d),
        lambda: g.bf16_gemm_nt(a, b, d.half()),
        lambda: g.bf16_gemm_nt(a, b, d[:4]),
        lambda: g.bf16_gemm_nt(a, b, d.t()[:, :].contiguous().t()),
        lambda: g.bf16_gemm_nt(a, b, d, d.float()),
        lambda: g.bf16_gemm_nt(a, b, d, d[:3].clone()),
        lambda: g.bf16_gemm_nt(a, b, d, d[:1]),
        lambda: g.bf16_gemm_nt(a[None], b, d),
        lambda: g.bf16_gemm_nt(torch.ones(16, 32, dtype=BF16)[::2, ::2], b, d),
        lambda: g.bf16_gemm_nt(a, b, d, epilogue=object()),
    ]


def wrong_scaled(g: deepgemm.Adapter) -> list[Callable[[], object]]:
    a, b, d = _fp8()
    words = torch.full((8,), 0x7F7F7F7F, dtype=torch.int32).as_strided((8, 1), (1, 8))
    return [
        lambda: g.fp8_gemm_nt(a, (b[0][:, :128], b[1]), d),
        lambda: g.fp8_gemm_nt((a[0].float(), a[1]), b, d),
        lambda: g.fp8_gemm_nt((a[0], a[1][:, :1]), b, d),
        lambda: g.fp8_gemm_nt((a[0], a[1].double()), b, d),
        lambda: g.fp8_gemm_nt(a, b, d, recipe=(1, 128, 64)),
        lambda: g.fp8_gemm_nt(a, b, d, recipe=(1, 128, 128), recipe_a=(1, 128), recipe_b=(128, 128)),
        lambda: g.fp8_gemm_nt(a, b, d, recipe_a=(1, 128)),
        lambda: g.fp8_gemm_nt((a[0], words), (b[0], words), d, recipe=(1, 128, 128)),
        lambda: g.fp8_gemm_nt((a[0], torch.zeros(8, 2, dtype=torch.int32)[:, :1]), (b[0], words), d),
    ]


def wrong_grouped(g: deepgemm.Adapter) -> list[Callable[[], object]]:
    a, _, d = _bf16()
    b = torch.ones(2, 8, 16, dtype=BF16)
    labels = torch.zeros(8, dtype=torch.int32)
    call = g.m_grouped_bf16_gemm_nt_contiguous
    return [
        lambda: call(a, b, d, labels.long()),
        lambda: call(a, b, d, labels[:4]),
        lambda: call(a, b, d, labels + 2),
        lambda: call(a, b, d, labels, use_psum_layout=True),
        lambda: call(a, b, d, labels, expected_m_for_psum_layout=4),
        lambda: call(a, b, d.float(), labels),
        lambda: call(a, b[:, :, :8], d, labels),
        lambda: call(mn_major(a), b, d, labels),
        lambda: call(a, b, d, torch.tensor([4, 9], dtype=torch.int32), use_psum_layout=True),
    ]


SCENARIOS: dict[str, list[Callable[[Knobs], Violations]]] = {
    "bf16_gemm_nt": [
        dense(), dense(FP32), dense(c="apart"), dense(c="aliased"), dense(FP32, c="aliased"), dense(FP32, c="row"),
        dense(FP32, a_form=mn_major, check="layout"), dense(b_form=mn_major), dense(size=(1, 1, 8)),
        dense(a_form=lambda x: pitched(x, 8), check="layout"), dense(special=float("nan")), dense(special=float("inf")),
        dense(FP32, special=2.0**-128), dense(FP32, alpha=-2.5), dense(c="apart", alpha=0.5),
        dense(FP32, c="apart", size=(5, 6, 0)), dense(size=(5, 6, 0)), dense(FP32, size=(9, 17, 2048)),
        rejected(wrong_dense, RuntimeError),
    ],
    "fp8_gemm_nt": [
        scaled("block"), scaled("block", BF16), scaled("line", size=(136, 70, 400)), scaled("packed32"),
        scaled("packed32", exponents_from=(0, 236)),
        scaled("packed128"), scaled("mixed"), scaled("block", c="apart"), scaled("packed32", BF16, c="aliased"),
        scaled("block", a_form=mn_major, check="layout"), scaled("block", nan=True), scaled("line", size=(1, 1, 16)),
        scaled("packed32", fp4=True), scaled("block", size=(3, 4, 0)), rejected(wrong_scaled, RuntimeError),
    ],
    "m_grouped_bf16_gemm_nt_contiguous": [
        grouped("labels", 512, (128, 256, 128)), grouped("labels", 640, (100, 128, 1)),
        grouped("labels", 512, (0, 200, 0)), grouped("labels", 128, (0, 0)),
        grouped("ends", 512, (128, 256, 128)), grouped("ends", 640, (100, 128, 1)),
        grouped("ends", 640, (100, 0, 70), zero_padding=False),
        grouped("labels", 512, (128, 256, 128), factor=2.0**20),
        grouped("labels", 512, (128, 256, 128), factor=math.inf), rejected(wrong_grouped, RuntimeError),
    ],
    "per_token_cast_to_fp8": [
        cast(128, False, False, 384), cast(128, True, False, 320), cast(32, True, True, 160),
        cast(128, True, True, 640, FP32), cast(128, False, False, 64, FP32),
        rejected(lambda g: [lambda: g.per_token_cast_to_fp8(torch.ones(4), False)], AssertionError),
        rejected(lambda g: [lambda: g.per_token_cast_to_fp8(torch.ones(4, 128), False, 128, True)], AssertionError),
    ],
}


def pairs(kind: str) -> list:
    """(row, op) of every fault or variant."""
    return [
        pytest.param(row, op.removeprefix("deepgemm."), id=f"{row['name']}-{op}")
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
    if {"accumulator", "overflow"} & row.get("profile", {}).keys():
        # Right by rules of its own (tests/test_oracle_units.py, tests/test_saturation.py), and not what FP32 gives.
        assert "values" in set().union(*(run(knobs) for run in SCENARIOS[op]))
        return
    assert [run(knobs) for run in SCENARIOS[op]] == [set()] * len(SCENARIOS[op])


@pytest.mark.parametrize(("row", "op"), pairs("fault"))
def test_fault_is_visible(row: dict, op: str) -> None:
    knobs = Knobs.parse(row["knobs"])
    seen = set().union(*(run(knobs) for run in SCENARIOS[op]))
    assert row["check"] in seen


def test_tables_are_consistent() -> None:
    names = [row["name"] for kind in ("fault", "variant") for row in TABLE[kind]]
    assert len(names) == len(set(names))
    used = {Knobs.parse(row["knobs"]).fault for row in TABLE["fault"]} - {""}
    assert used <= set(KNOWN_FAULTS)
    for row in TABLE["fault"]:
        assert set(row) == {"name", "ops", "knobs", "check", "reason", "source", "doc"}
        assert set(row["reason"] if isinstance(row["reason"], list) else [row["reason"]]) <= set(REASONS)
    assert {op.removeprefix("deepgemm.") for row in TABLE["fault"] for op in row["ops"]} == set(SCENARIOS)


@pytest.mark.parametrize("wrong", [wrong_dense, wrong_scaled, wrong_grouped])
def test_nothing_is_written_before_an_error(wrong: Callable) -> None:
    for call in wrong(adapter(Knobs())):
        cells = [c.cell_contents for c in call.__closure__ if isinstance(c.cell_contents, torch.Tensor)]
        before = [t.clone() for t in cells]
        with pytest.raises(RuntimeError):
            call()
        assert all(torch.equal(x, y) for x, y in zip(cells, before, strict=True))


def test_data_without_scales_is_a_type_error() -> None:
    a, b, d = _fp8()
    with pytest.raises(TypeError):
        adapter(Knobs()).fp8_gemm_nt(a[0], b, d)


def test_empty_sizes_do_nothing() -> None:
    g = adapter(Knobs())
    a, b, _ = _bf16()
    g.bf16_gemm_nt(a[:0], b, torch.empty(0, 8, dtype=torch.float16))
    g.bf16_gemm_nt(a, b[:0], torch.empty(8, 0, dtype=BF16))
    g.m_grouped_bf16_gemm_nt_contiguous(
        a[:0], b[None], torch.empty(0, 8, dtype=BF16), torch.empty(0, dtype=torch.int32)
    )
    codes, scales = g.per_token_cast_to_fp8(torch.empty(0, 128), True, 32, True)
    assert (codes.shape, scales.shape) == ((0, 128), (0, 1))
    assert g.per_token_cast_to_fp8(torch.empty(3, 0), False)[1].shape == (3, 0)


def test_scales_at_both_ends_do_not_overflow_on_the_way() -> None:
    one = torch.ones(4, 128).to(torch.float8_e4m3fn)
    d = torch.empty(4, 4)
    tiny, huge = torch.full((4, 1), 2.0**-100), torch.full((4, 1), 2.0**120)
    adapter(Knobs()).fp8_gemm_nt((one, tiny), (one, huge), d, recipe=(1, 1, 128))
    assert (d == 2.0**27).all()
    small = torch.full((4, 1), 2.0**-70)
    adapter(Knobs()).fp8_gemm_nt((one, small), (one, small), d, recipe=(1, 1, 128))
    assert (d == 2.0**-133).all()


def test_exponent_bytes_at_both_ends() -> None:
    words = torch.tensor([[0x00FE00FF], [0]], dtype=torch.int32)
    scales = quant.unpack_exponents(words, 4, Knobs())
    assert scales[0, 0].isnan()
    assert scales[0, 1:].tolist() == [2.0**-127, 2.0**127, 2.0**-127]


def test_group_alignment_is_a_setting() -> None:
    g = adapter(Knobs())
    g.settings["mk_alignment_for_contiguous_layout"] = 4
    a = torch.ones(8, 16, dtype=BF16)
    b = torch.stack((torch.ones(4, 16), torch.full((4, 16), 2.0))).to(BF16)
    d = torch.full((8, 4), POISON, dtype=BF16)
    g.m_grouped_bf16_gemm_nt_contiguous(
        a, b, d, torch.tensor([3, 6], dtype=torch.int32), use_psum_layout=True, ensure_zero_padding=False
    )
    assert d[:, 0].tolist() == [16.0, 16.0, 16.0, POISON, 32.0, 32.0, POISON, POISON]
