"""The TileKernels oracles, and the FP8 cast of DeepGEMM, which shares their block cast."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conformance.model import Problem, Variant
from references.deepgemm.cast import per_token_cast_to_fp8
from references.expected import Inputs, Joint, Within
from references.formats import codec
from references.tilekernels.cast import per_token_cast
from references.tilekernels.moe import topk_gate
from references.tilekernels.norm import norm_forward
from references.tilekernels.rope import apply_rotary

STRICT: dict[str, Any] = {}
STORED = {"bf16": torch.bfloat16, "fp32": torch.float32}


def problem(variant: dict[str, str] | None = None, **values: Any) -> Problem:
    return Problem("tilekernels.op", Variant(variant or {}), {}, values, "", 0)


def codes_of(t: torch.Tensor) -> np.ndarray:
    """Codes by torch, not by the suite's codec."""
    unsigned = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}.get(t.dtype)
    return t.contiguous().view(unsigned).numpy() if unsigned else t.numpy()


def drawn(rng: np.random.Generator, fmt: str, *shape: int) -> torch.Tensor:
    return torch.tensor(rng.standard_normal(shape)).to(STORED[fmt])


def with_one_outside(want: Within, good: np.ndarray, i: tuple[int, ...], fmt: str) -> np.ndarray:
    """The codes with element i moved to the first number above the bound."""
    limit = want.value[i] + want.bound[i]
    near = int(codec.bits(codec.encode(np.array([limit]), fmt))[0])
    around = np.arange(near - 2, near + 3).astype(codec.bits(good).dtype).view(good.dtype)
    values = codec.decode(around, fmt)
    wrong = good.copy()
    wrong[i] = around[np.where(values > limit, values, np.inf).argmin()]
    return wrong


# --- casts ------------------------------------------------------------------------------------------------

MAX = {"e4m3": 448.0, "e2m1": 6.0}
E2M1_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
SMALLEST = {("e4m3", False): 1e-4, ("e2m1", False): 6 * 2.0**-126, ("e4m3", True): 0.875, ("e2m1", True): 6 * 2.0**-9}


def cast_input(seed: int, shape: tuple[int, int], fmt: str) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, (shape[0], 1))
    if shape[0] > 2:
        x[0] = 0
        x[1, ::3] = -0.0
        x[2] = 1e-6
    return torch.tensor(x).to(STORED[fmt])


def to_codes(y: torch.Tensor, data: str) -> torch.Tensor:
    """Nearest even, saturating; e2m1 by counting midpoints, of which every second one rounds up."""
    if data == "e4m3":
        return y.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    size = y.abs().double()
    code = sum(((size > p) if i % 2 == 0 else (size >= p)).to(torch.uint8) for i, p in enumerate(E2M1_MIDPOINTS))
    return code | (torch.signbit(y).to(torch.uint8) << 3)


def plain_cast(
    x: torch.Tensor, data: str, width: int, scale: str, way: int = 0, fill: int = 127
) -> tuple[np.ndarray, np.ndarray]:
    """torch, block by block; way picks one of the allowed roundings of fp32 scales."""
    t, most = x.float(), torch.tensor(MAX[data])
    rows, columns = t.shape
    q, sf = torch.zeros(rows, columns, dtype=torch.uint8), torch.zeros(rows, -(-columns // width))
    for i in range(rows):
        for g in range(sf.shape[1]):
            block = t[i, g * width : (g + 1) * width]
            a = block.abs().max().clamp(min=SMALLEST[data, scale == "e4m3"])
            s = a * (torch.tensor(1.0) / most) if way == 2 else a / most
            if scale in ("pow2", "packed"):
                mantissa, exponent = torch.frexp(s)
                s = torch.ldexp(torch.tensor(1.0), exponent - (mantissa == 0.5).int())
            elif scale == "e4m3":
                s = s.clamp(max=448).to(torch.float8_e4m3fn).float()
            scaled = (block * (1 / s), block / s, block * (most / a))[way if scale == "fp32" else 0]
            q[i, g * width : (g + 1) * width] = to_codes(scaled, data)
            sf[i, g] = s
    if scale == "packed":
        exponents = (torch.log2(sf) + 127).numpy().astype(np.uint8)
        return q.numpy(), np.pad(exponents, ((0, 0), (0, -sf.shape[1] % 4)), constant_values=fill)
    return q.numpy(), codes_of(sf.to(torch.float8_e4m3fn)) if scale == "e4m3" else sf.numpy()


def cast_oracle(x: torch.Tensor, data: str, width: int, scale: str, module: str = "tilekernels") -> Joint:
    inputs = Inputs({"x": codes_of(x)}, {"x": "fp32" if x.dtype == torch.float32 else "bf16"})
    if module == "deepgemm":
        expected = per_token_cast_to_fp8(problem({"scale": scale}, gran_k=width), inputs, STRICT)
    else:
        expected = per_token_cast(problem({"fmt": data, "scale": scale}, num_per_channels=width), inputs, STRICT)
    (names, joint), = expected.items()
    assert names == joint.outputs == ("data", "sf")
    return joint


def cast_bad(joint: Joint, data: np.ndarray, sf: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    sf = sf[:, : joint.shapes["sf"][1]]
    assert joint.shapes == {"data": data.shape, "sf": sf.shape}
    verdict = joint.check({"data": data, "sf": sf})
    return verdict["data"].bad, verdict["sf"].bad


def assert_cast(joint: Joint, data: np.ndarray, sf: np.ndarray) -> None:
    on_data, on_scale = cast_bad(joint, data, sf)
    assert not on_data.any()
    assert not on_scale.any()


CASTS = [("deepgemm", "e4m3", scale) for scale in ("fp32", "pow2", "packed")] + [
    ("tilekernels", data, scale) for data in MAX for scale in ("fp32", "pow2", "packed", "e4m3")
]


@pytest.mark.parametrize(("module", "data", "scale"), CASTS)
@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
def test_casts_are_accepted(module: str, data: str, scale: str, fmt: str) -> None:
    sizes = (((5, 192), 128), ((4, 96), 32), ((3, 64), 128), ((0, 64), 32), ((9, 64), 16))
    for seed, (shape, width) in enumerate(sizes):
        x = cast_input(seed, shape, fmt)
        for way in range(3):
            assert_cast(cast_oracle(x, data, width, scale, module), *plain_cast(x, data, width, scale, way))


@pytest.mark.parametrize(("module", "data", "scale"), CASTS)
def test_cast_faults_are_rejected(module: str, data: str, scale: str) -> None:
    x = cast_input(9, (6, 192), "bf16")
    joint = cast_oracle(x, data, 128, scale, module)
    codes, sf = plain_cast(x, data, 128, scale)
    for i in ((3, 0), (4, 191), (5, 130)):
        wrong = codes.copy()
        wrong[i] ^= 1
        on_data, on_scale = cast_bad(joint, wrong, sf)
        assert on_data[i]
        assert on_data.sum() == 1
        assert not on_scale.any()
    for i in ((3, 0), (5, 1)):
        wrong = sf.copy()
        wrong[i] = wrong[i] + 1 if scale in ("packed", "e4m3") else wrong[i] * np.float32(1 + 2.0**-20)
        assert cast_bad(joint, codes, wrong)[1].sum() == 1
    swapped = sf.copy()
    swapped[5, :2] = swapped[4, :2]
    assert cast_bad(joint, codes, swapped)[1][5, :2].any()
    dropped = codes.copy()
    dropped[3:, -8:] = 0
    assert cast_bad(joint, dropped, sf)[0][3:, -8:].any(axis=1).all()


@pytest.mark.parametrize("source", ["e4m3", "e2m1"])
@pytest.mark.parametrize("scale", ["fp32", "packed"])
def test_requantising_multiplies_in_either_order(source: str, scale: str) -> None:
    seen = 0
    for seed in range(6):
        codes, sf = plain_cast(cast_input(seed, (5, 192), "bf16"), source, 32, "fp32")
        fmt = "e2m1x2_lo" if source == "e2m1" else "e4m3"
        if source == "e4m3":  # 16 * 17/16 is a tie beside a largest magnitude of 448: the order decides
            codes[3:], codes[3:, 0] = 0x58, 0x7E
            sf[3:] = np.random.default_rng(seed).random((2, 1)) + 1
            sf[3:, 1:] *= np.float32(17 / 16)
        given = problem({"fmt": "e4m3", "scale": scale}, num_per_channels=192, x_block_size=(1, 32))
        inputs = Inputs({"x": codes, "x_scale": sf}, {"x": fmt, "x_scale": "fp32"})
        (joint,) = per_token_cast(given, inputs, STRICT).values()
        raw = torch.tensor(codec.decode(codes, fmt)).float()
        factor = torch.tensor(np.repeat(sf, 32, axis=1))
        out, out_scale = plain_cast(raw * factor, "e4m3", 192, scale)
        assert_cast(joint, out, out_scale)
        s = out_scale if scale == "fp32" else 2.0 ** (out_scale[:, :1].astype(np.float32) - 127)
        other = to_codes(raw * (factor * torch.tensor(1 / s)), "e4m3").numpy()
        assert_cast(joint, other, out_scale)
        seen += (other != out).sum()
        assert cast_bad(joint, to_codes(raw * torch.tensor(1 / s), "e4m3").numpy(), out_scale)[0].any()
    assert seen or (source, scale) != ("e4m3", "fp32")


def test_unused_packed_slots() -> None:
    x = cast_input(3, (4, 192), "bf16")
    codes, sf = plain_cast(x, "e4m3", 128, "packed", fill=9)
    assert cast_oracle(x, "e4m3", 128, "packed").shapes["sf"] == (4, 2)
    assert_cast(cast_oracle(x, "e4m3", 128, "packed"), codes, sf)
    assert (cast_bad(cast_oracle(x, "e4m3", 128, "packed", "deepgemm"), codes, sf)[1] == (sf == 9)).all()


def test_ties_go_to_even_and_away_is_rejected() -> None:
    for data, x, even, away in (
        ("e4m3", [448, 17, 19, 1.0625], [448, 16, 20, 1.0], [448, 18, 20, 1.125]),
        ("e2m1", [6, 0.25, 0.75, 1.25, 2.5, 5], [6, 0, 1, 1, 2, 4], [6, 0.5, 1, 1.5, 3, 6]),
    ):
        values = torch.zeros(3, 1, 32)
        for i, row in enumerate((x, even, away)):
            values[i, 0, : len(row)] = torch.tensor(row)
        joint, one = cast_oracle(values[0], data, 32, "pow2"), np.ones((1, 1), np.float32)
        assert_cast(joint, to_codes(values[1], data).numpy(), one)
        bad = cast_bad(joint, to_codes(values[2], data).numpy(), one)[0]
        assert (bad == (values[1] != values[2]).numpy()).all()


def test_zeros() -> None:
    """The smallest amax gives the scale of an empty block; only TileKernels documents the sign of zero."""
    x = torch.zeros(1, 32)
    codes, sf = plain_cast(x, "e4m3", 32, "fp32")
    negative = codes | 0x80
    assert_cast(cast_oracle(x, "e4m3", 32, "fp32", "deepgemm"), negative, sf)
    assert cast_bad(cast_oracle(x, "e4m3", 32, "fp32"), negative, sf)[0].all()
    assert_cast(cast_oracle(-x, "e4m3", 32, "fp32"), negative, sf)
    assert cast_bad(cast_oracle(x, "e4m3", 32, "fp32"), codes, sf * 0)[1].all()


@pytest.mark.parametrize(("value", "scale", "others"), [(np.nan, np.nan, 0x7F), (np.inf, np.inf, 0x00)])
def test_nonfinite_blocks(value: float, scale: float, others: int) -> None:
    """DeepGEMM's formula says what comes out; TileKernels promises nothing for the block, all for its neighbour."""
    x = torch.ones(1, 64)
    codes, sf = plain_cast(x, "e4m3", 32, "fp32")
    x[0, 3] = value
    joint = cast_oracle(x, "e4m3", 32, "fp32", "deepgemm")
    sf[0, 0] = scale
    codes[0, :32] = others
    for code in (0x7F, 0xFF):
        codes[0, 3] = code
        assert_cast(joint, codes, sf)
    codes[0, 3], sf[0, 1] = 0x38, 1
    on_data, on_scale = cast_bad(joint, codes, sf)
    assert on_data[0, 3]
    assert on_scale.tolist() == [[False, True]]
    free = cast_oracle(x, "e4m3", 32, "fp32")
    on_data, on_scale = cast_bad(free, np.zeros_like(codes), np.zeros_like(sf))
    assert on_data.tolist() == [[False] * 32 + [True] * 32]
    assert on_scale.tolist() == [[False, True]]


def test_infinity_with_rounded_scale() -> None:
    x = torch.ones(1, 32)
    x[0, 3] = np.inf
    joint = cast_oracle(x, "e4m3", 32, "packed", "deepgemm")
    sf, codes = np.array([[254, 127, 127, 127]], np.uint8), np.zeros((1, 32), np.uint8)
    for code, bad in ((0x7E, 0), (0x7F, 0), (0x00, 1), (0xFE, 1)):
        codes[0, 3] = code
        assert cast_bad(joint, codes, sf)[0].sum() == bad


def test_huge_amax_saturates_e4m3_scales() -> None:
    x = torch.full((1, 32), 3000.0)
    scale = np.array([[0x7E]], np.uint8)
    assert_cast(cast_oracle(x, "e2m1", 32, "e4m3"), np.full((1, 32), 7, np.uint8), scale)


def upstream_math() -> Any:
    """DeepGEMM's plain torch helpers, without importing its device code; None where it is not installed."""
    spec = importlib.util.find_spec("deep_gemm")
    path = Path(spec.origin).parent / "utils" / "math.py" if spec and spec.origin else None
    if path is None or not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("upstream_math", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(upstream_math() is None, reason="deep_gemm is not installed")
@pytest.mark.parametrize("scale", ["fp32", "pow2", "packed"])
def test_deepgemms_own_cast_is_accepted(scale: str) -> None:
    upstream = upstream_math()
    for seed, (shape, width) in enumerate((((5, 200), 128), ((9, 320), 32), ((3, 7), 128))):
        for fmt in ("bf16", "fp32"):
            x = cast_input(seed, shape, fmt)
            if seed == 1:
                x[3, 5], x[4, 40], x[5, 300] = np.inf, np.nan, -np.inf
            q, sf = upstream.per_token_cast_to_fp8(x, scale != "fp32", width, scale == "packed")
            sf = sf.numpy() if scale != "packed" else codec.unpack(sf.numpy(), "e8m0x4")
            assert_cast(cast_oracle(x, "e4m3", width, scale, "deepgemm"), codes_of(q), sf)


def tile_kernels_torch() -> Any:
    try:
        import tile_kernels.torch as reference
    except Exception:
        return None
    return reference


@pytest.mark.skipif(importlib.util.find_spec("tile_kernels") is None, reason="tile_kernels is not installed")
def test_tilekernels_own_references_are_accepted() -> None:
    upstream = tile_kernels_torch()
    if upstream is None:
        pytest.skip("tile_kernels can't be imported here")
    for data in MAX:
        for scale in ("fp32", "pow2", "packed", "e4m3"):
            for seed, (shape, width) in enumerate((((5, 192), 128), ((9, 320), 32), ((4, 64), 16))):
                for fmt in ("bf16", "fp32"):
                    x = cast_input(seed, shape, fmt)
                    q, sf = upstream.cast(
                        x, data, (1, width), round_sf=scale in ("pow2", "packed"), use_packed_ue8m0=scale == "packed",
                        use_e4m3_sf=scale == "e4m3",
                    )
                    codes = codec.unpack(q.numpy(), "e2m1x2_lo") if data == "e2m1" else codes_of(q)
                    sf = codec.unpack(sf.numpy(), "e8m0x4") if scale == "packed" else codes_of(sf)
                    assert_cast(cast_oracle(x, data, width, scale), codes, sf)
    for seed in range(4):
        run = Norm(seed, "bf16", (7, 64), residual=bool(seed % 2))
        out, rstd, r = upstream.norm_forward_ref(run.x, run.weight, run.eps, run.residual, run.out_scale)
        assert not run.bad(codes_of(out), codes_of(rstd), codes_of(r))
        for interleaved in (True, False):
            rope = Rope(seed, "bf16", interleaved=interleaved, conjugate=bool(seed % 2), positions=bool(seed // 2))
            table = rope.cache.chunk(2, dim=1)
            got = upstream.rope.rotary_embedding_ref(
                rope.q.float(), *table, rope.positions, 3, interleaved, bool(seed % 2)).to(torch.bfloat16)
            assert not rope.want["query"].judge(codes_of(got), "bf16").bad.any()
        scores = torch.randint(0, 5, (6, 17)).float()
        want = gate(scores, 4)
        assert want.judge(upstream.topk.stable_topk(scores, 4).numpy(), "int64").ok


# --- gate -------------------------------------------------------------------------------------------------

def gate(scores: torch.Tensor, k: int) -> Any:
    inputs = Inputs({"scores": scores.numpy()}, {"scores": "fp32"})
    return topk_gate(problem(num_topk=k), inputs, STRICT)["topk_idx"]


def test_topk_gate_against_a_plain_selection() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        scores = torch.randint(-2, 3, (6, 12)).float() * 0.5 if seed % 2 else torch.randn(6, 12)
        scores[0] = 0
        scores[0, ::2] = -0.0
        k = 1 + seed % 12
        plain = np.array([sorted(range(12), key=lambda e: (-row[e], e))[:k] for row in scores.tolist()])
        want = gate(scores, k)
        assert want.judge(plain, "int64").ok
        _, order = torch.sort(scores, dim=1, descending=True, stable=True)
        assert want.judge(order[:, :k].numpy(), "int64").ok
        if k > 1:
            swapped = plain.copy()
            swapped[2, [0, 1]] = swapped[2, [1, 0]]
            assert want.judge(swapped, "int64").bad.sum() == 2
            assert want.judge(swapped, "int64").reason == "order"
            later = np.array([sorted(range(12), key=lambda e: (-row[e], -e))[:k] for row in scores.tolist()])
            assert want.judge(later, "int64").bad[0].any()
    assert gate(torch.zeros(0, 8), 3).shape == (0, 3)


@pytest.mark.parametrize(("wrong", "reason"), [([3, 4], "index_range"), ([-1, 2], "index_range"),
                                               ([3, 3], "token_duplicated"), ([3, 1], "numeric"), ([2, 3], "order")])
def test_topk_gate_says_what_is_wrong(wrong: list[int], reason: str) -> None:
    verdict = gate(torch.arange(4.0)[None].repeat(2, 1), 2).judge(np.array([[3, 2], wrong]), "int64")
    assert not verdict.bad[0].any()
    assert verdict.bad[1].any()
    assert verdict.reason == reason


def test_topk_gate_leaves_rows_that_break_the_contract() -> None:
    scores = torch.tensor([[1.0, float("nan"), 2.0], [1.0, 0.0, 2.0]])
    bad = gate(scores, 2).judge(np.full((2, 2), -7), "int64").bad
    assert bad.tolist() == [[False] * 2, [True] * 2]


# --- norm -------------------------------------------------------------------------------------------------

SUMS = {
    "sequential": lambda sq: np.add.accumulate(sq, axis=-1, dtype=np.float32)[..., -1],
    "pairwise": lambda sq: sq.sum(axis=-1),
    "lanes": lambda sq: np.add.accumulate(sq.reshape(*sq.shape[:-1], 8, sq.shape[-1] // 8), axis=-1)[..., -1].sum(-1),
    "fp64": lambda sq: sq.astype(np.float64).sum(axis=-1).astype(np.float32),
}


class Norm:
    """One RMSNorm problem, its oracle and plain fp32 ways to compute it."""

    def __init__(self, seed: int, fmt: str, shape: tuple[int, ...], residual: bool = False, weight: bool = True,
                 size: float = 1.0, eps: float = 1e-6, out_scale: float = 0.7, family: str = "") -> None:
        rng = np.random.default_rng(seed)
        self.fmt, self.eps, self.out_scale = fmt, eps, out_scale
        self.x = (drawn(rng, "fp32", *shape) * size).to(STORED[fmt])
        self.residual = (drawn(rng, "fp32", *shape) * size).to(STORED[fmt]) if residual else None
        self.weight = drawn(rng, fmt, shape[-1]) if weight else None
        given = {"x": self.x, "residual": self.residual, "weight": self.weight}
        arrays = {name: codes_of(t) for name, t in given.items() if t is not None}
        values = {"eps": eps, "out_scale": out_scale, "with_rstd": True}
        asked = replace(problem(**values), family=family)
        self.want = norm_forward(asked, Inputs(arrays, dict.fromkeys(arrays, fmt)), STRICT)

    def run(self, add: Any, scale_first: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        r = self.x if self.residual is None else self.x + self.residual
        v = r.float().numpy()
        rstd = np.float32(1) / np.sqrt(add(v * v) / np.float32(v.shape[-1]) + np.float32(self.eps))
        w = np.float32(self.out_scale) * (1 if self.weight is None else self.weight.float().numpy())
        y = v * rstd[..., None] * w if scale_first else v * (rstd[..., None] * w)
        return codes_of(torch.tensor(y).to(STORED[self.fmt])), rstd, codes_of(r)

    def bad(self, out: np.ndarray, rstd: np.ndarray, r: np.ndarray) -> list[str]:
        got = {"out": (out, self.fmt), "rstd": (rstd, "fp32"), "norm_input": (r, self.fmt)}
        return [name for name, (codes, fmt) in got.items() if not self.want[name].judge(codes, fmt).ok]


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
def test_norm_accepts_every_order(fmt: str) -> None:
    for seed, shape in enumerate(((5, 16), (3, 4, 32), (2, 1024), (0, 16), (7, 520))):
        for size in (1.0, 1e-3, 1e-18, 1e12):
            for residual, weight in ((False, True), (True, False)):
                norm = Norm(seed, fmt, shape, residual, weight, size)
                for add in SUMS.values():
                    assert not norm.bad(*norm.run(add))
                    assert not norm.bad(*norm.run(add, scale_first=False))


def test_norm_values_against_torch_and_loops() -> None:
    norm = Norm(3, "fp32", (4, 48))
    plain = torch.nn.functional.rms_norm(norm.x.double(), (48,), norm.weight.double(), norm.eps) * norm.out_scale
    np.testing.assert_allclose(norm.want["out"].value, plain.numpy(), rtol=1e-13)
    for i in range(4):
        mean = sum(float(v) ** 2 for v in norm.x[i]) / 48
        assert abs(norm.want["rstd"].value[i] * (mean + norm.eps) ** 0.5 - 1) < 1e-14
    out = torch.nn.functional.rms_norm(norm.x, (48,), norm.weight, norm.eps) * norm.out_scale
    assert norm.want["out"].judge(out.numpy(), "fp32").ok


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
def test_norm_faults_are_rejected(fmt: str) -> None:
    for seed in range(5):
        norm = Norm(seed, fmt, (6, 256), residual=True, eps=1e-2)
        good = norm.run(SUMS["pairwise"])
        assert norm.bad(*norm.run(lambda sq: sq[..., :-8].sum(-1))) == ["out", "rstd"]
        assert "rstd" in norm.bad(*norm.run(lambda sq: sq.sum(-1) * np.float32(256 / 255)))
        assert norm.bad(np.roll(good[0], 1, axis=-1), *good[1:]) == ["out"]
        assert norm.bad(good[0], good[1], codes_of(norm.x)) == ["norm_input"]
        for i in ((0, 0), (5, 255), (2, 100)):
            bad = norm.want["out"].judge(with_one_outside(norm.want["out"], good[0], i, fmt), fmt).bad
            assert bad.sum() == bad[i] == 1


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
@pytest.mark.parametrize("add", SUMS)
def test_norm_of_random_rows_passes_together(fmt: str, add: str) -> None:
    for seed, (tokens, h) in enumerate(((1, 16), (130, 16), (40, 96), (1, 8192), (8, 4096), (32, 1024), (4, 8192))):
        for more in range(4):
            norm = Norm(10 * seed + more, fmt, (tokens, h), residual=bool(more % 2), family="normal")
            for first in (True, False):
                out = norm.run(SUMS[add], scale_first=first)[0]
                judged = norm.want["out"].judge(out, fmt)
                assert judged.ok, f"{tokens} x {h}, seed {more}: {judged.note}"
                assert "factor" in judged.figures


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
def test_norm_without_a_weight_may_round_alike_everywhere(fmt: str) -> None:
    for seed in range(300):
        norm = Norm(seed, fmt, (1, 208), weight=False, out_scale=1.0, family="normal")
        judged = norm.want["out"].judge(norm.run(SUMS["pairwise"])[0], fmt)
        assert judged.ok, f"seed {seed}: {judged.note}"


@pytest.mark.parametrize(("fmt", "h", "factor"), [
    ("bf16", 4096, 4096 / 4095), ("fp32", 4096, 4096 / 4095), ("fp32", 8192, 8192 / 8191), ("bf16", 8192, 1.0004),
    ("fp32", 1024, 1.00005)])
def test_norm_of_random_rows_shows_what_each_element_hides(fmt: str, h: int, factor: float) -> None:
    """Mean squares that are a little too large: inside the bound of every element."""
    for seed in range(5):
        norm = Norm(seed, fmt, (8, h), family="normal")
        out = norm.run(lambda sq: sq.sum(-1) * np.float32(factor))[0]
        judged = norm.want["out"].judge(out, fmt)
        assert replace(norm.want["out"], typical=None).judge(out, fmt).ok
        assert judged.by_chance
        assert judged.figures["factor"] > 1e-5


def test_norm_special_rows() -> None:
    x = torch.ones(5, 16)
    x[0, 3], x[1, 3], x[2], x[3] = np.nan, np.inf, 0, 1e30
    inputs = Inputs({"x": x.numpy()}, {"x": "fp32"})
    want = norm_forward(problem(eps=1e-6), inputs, STRICT)["out"]
    out = np.zeros((5, 16), np.float32)
    out[0], out[1, 3], out[3], out[4] = np.nan, np.nan, np.inf, 1 / np.sqrt(1 + 1e-6)
    assert want.judge(out, "fp32").ok
    bad = want.judge(np.full((5, 16), 7, np.float32), "fp32").bad
    assert bad.all(axis=1).tolist() == [True, True, True, False, True]


# --- rotary embedding -------------------------------------------------------------------------------------

class Rope:
    """One rotary problem of D = 64 and its oracle."""

    def __init__(self, seed: int, fmt: str, *, interleaved: bool, conjugate: bool, positions: bool,
                 batch: bool = False) -> None:
        rng = np.random.default_rng(seed)
        lead = (2, 5) if batch else (5,)
        self.fmt, self.interleaved, self.conjugate = fmt, interleaved, conjugate
        self.q, self.k = drawn(rng, fmt, *lead, 3, 64), drawn(rng, fmt, *lead, 1, 64)
        angle = rng.standard_normal((20, 32)) * 9
        self.cache = torch.tensor(np.concatenate([np.cos(angle), np.sin(angle)], 1)).float()
        self.positions = torch.tensor(rng.integers(0, 15, lead)) if positions else None
        arrays = {"query": codes_of(self.q), "key": codes_of(self.k), "cos_sin_cache": self.cache.numpy()}
        formats = {"query": fmt, "key": fmt, "cos_sin_cache": "fp32", "positions": "int64"}
        if positions:
            arrays["positions"] = self.positions.numpy()
        given = problem(interleaved=interleaved, conjugate=conjugate, seqlen_offset=3)
        self.want = apply_rotary(given, Inputs(arrays, formats), STRICT)

    def plain(self, x: torch.Tensor, fma: bool, offset: int = 3, sign: float = 1.0) -> np.ndarray:
        """Pair by pair, in fp32 without or with FMA."""
        out, v = np.zeros(x.shape), x.double().numpy()
        narrow = (lambda z: z) if fma else np.float32
        for at in np.ndindex(*x.shape[:-2]):
            row = offset + (at[-1] if self.positions is None else int(self.positions[at]))
            cos, sin = self.cache[row, :32].double().numpy(), self.cache[row, 32:].double().numpy() * sign
            sin = -sin if self.conjugate else sin
            for i in range(32):
                one, two = (2 * i, 2 * i + 1) if self.interleaved else (i, i + 32)
                a, b = v[at][:, one], v[at][:, two]
                out[at][:, one] = np.float32(a * cos[i] - narrow(b * sin[i]).astype(float))
                out[at][:, two] = np.float32(a * sin[i] + narrow(b * cos[i]).astype(float))
        return codes_of(torch.tensor(out).float().to(STORED[self.fmt]))


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("positions", [True, False])
def test_rope(fmt: str, interleaved: bool, positions: bool) -> None:
    for seed in range(4):
        rope = Rope(seed, fmt, interleaved=interleaved, conjugate=bool(seed % 2), positions=positions, batch=seed > 1)
        for name, x in (("query", rope.q), ("key", rope.k)):
            want = rope.want[name]
            for fma in (True, False):
                good = rope.plain(x, fma)
                assert want.judge(good, fmt).ok
            assert not want.judge(codes_of(x), fmt).ok
            assert not want.judge(rope.plain(x, True, offset=2), fmt).ok
            assert not want.judge(rope.plain(x, True, sign=-1.0), fmt).ok
            i = (*(0,) * (x.dim() - 1), 7)
            bad = want.judge(with_one_outside(want, good, i, fmt), fmt).bad
            assert bad.sum() == bad[i] == 1


def test_rope_without_key_and_with_special_values() -> None:
    q = torch.ones(2, 1, 64)
    q[0, 0, 0], q[1, 0, 1] = np.inf, np.nan
    table = torch.cat([torch.ones(2, 32), torch.zeros(2, 32)], 1)
    arrays = {"query": q.numpy(), "cos_sin_cache": table.numpy()}
    want = apply_rotary(problem(), Inputs(arrays, dict.fromkeys(arrays, "fp32")), STRICT)
    assert list(want) == ["query"]
    out = q.numpy().copy()
    out[0, 0, 32], out[1, 0, 33] = np.nan, np.nan
    assert want["query"].judge(out, "fp32").ok
    assert want["query"].judge(np.ones_like(out), "fp32").bad.sum() == 4
