"""The oracles of TileLang's features against plain loops and torch; legal orders pass, wrong results fail."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from conformance.model import Problem, Variant
from conformance.protocol import FORMATS
from references.expected import Expected, Inputs
from references.formats import codec
from references.tilelang import arithmetic, elementwise, gemm, movement, reduce

torch = pytest.importorskip("torch")

NAN, INF = math.nan, math.inf
FLOATS = ("fp16", "bf16", "fp32", "fp64")
INTS = ("int8", "uint8", "int16", "int32", "int64")


def problem(sizes=None, values=None, family="other", **variant: Any) -> Problem:
    return Problem("tilelang.x", Variant(variant), sizes or {}, values or {}, family, 0)


def run(oracle, arrays: dict[str, tuple[np.ndarray, str]], profile=None, **kw: Any) -> Expected:
    inputs = Inputs({n: a for n, (a, _) in arrays.items()}, {n: f for n, (_, f) in arrays.items()})
    [(_, e)] = oracle(problem(**kw), inputs, profile or {}).items()
    return e


def codes(values: Any, fmt: str) -> np.ndarray:
    if fmt in FLOATS:
        return codec.encode(np.asarray(values, np.float64), fmt)
    return np.asarray(values, FORMATS[fmt].codes)


def ok(e: Expected, got: np.ndarray, fmt: str) -> bool:
    assert got.dtype == np.dtype(FORMATS[fmt].codes)
    assert got.shape == e.shape
    j = e.judge(got, fmt)
    assert j.bad.shape == got.shape
    return j.ok


def bad(e: Expected, got: np.ndarray, fmt: str) -> list[Any]:
    return np.argwhere(e.judge(got, fmt).bad).tolist()


def data(rng: np.random.Generator, shape: Any, fmt: str) -> np.ndarray:
    if fmt in FLOATS:
        return codes(rng.standard_normal(shape), fmt)
    info = np.iinfo(FORMATS[fmt].codes)
    return rng.integers(info.min, info.max, shape, dtype=info.dtype, endpoint=True)


# --- movement -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "int8", "fp64"])
def test_copy_with_tails_and_fill(fmt):
    rng = np.random.default_rng(0)
    x = data(rng, (5, 7), fmt)
    for (mo, no), fill in itertools.product([(5, 7), (3, 9), (8, 2), (0, 4), (6, 8)], [None, 3.0]):
        e = run(movement.copy, {"x": (x, fmt)}, sizes={"mo": mo, "no": no}, values={"fill": fill})
        want = np.array([[x[i, j] if i < 5 and j < 7 else codes(fill or 0.0, fmt)[()] for j in range(no)]
                         for i in range(mo)], x.dtype).reshape(mo, no)  # fmt: skip
        assert ok(e, want, fmt)
        if want.size:
            wrong = want.copy()
            codec.bits(wrong)[-1, -1] ^= 1
            assert bad(e, wrong, fmt) == [[mo - 1, no - 1]]
    same = run(movement.copy, {"x": (x, fmt)}, fill="none")
    assert ok(same, x, fmt)
    assert not ok(same, np.roll(x, 1, axis=1), fmt)


def test_moved_bits_include_nan_payloads_and_signed_zeros():
    x = np.array([[0x7FC1, 0x8000], [0xFF81, 0x0001]], np.uint16)
    for e, want in (
        (run(movement.copy, {"x": (x, "bf16")}), x),
        (run(movement.transpose, {"x": (x, "bf16")}), x.T.copy()),
        (run(movement.gather, {"x": (x[0], "bf16"), "index": (np.array([1, 0]), "int64")}), x[0, ::-1].copy()),
    ):
        assert ok(e, want, "bf16")
        for element in np.ndindex(want.shape):
            wrong = want.copy()
            wrong[element] = {0x7FC1: 0x7FC0, 0x8000: 0, 0xFF81: 0xFFC1, 1: 0}[int(want[element])]
            assert bad(e, wrong, "bf16") == [list(element)]


def test_transpose_and_gather():
    rng = np.random.default_rng(1)
    x = data(rng, (6, 4), "int32")
    e = run(movement.transpose, {"x": (x, "int32")})
    assert ok(e, np.array([[x[i, j] for i in range(6)] for j in range(4)], np.int32), "int32")
    assert e.shape == (4, 6)
    index = np.array([0, 9, -1, 10, 2**31 - 1, -(2**31), 3], np.int32)
    v = data(rng, 10, "fp32")
    e = run(movement.gather, {"x": (v, "fp32"), "index": (index, "int32")})
    want = np.array([v[i] if 0 <= i < 10 else 0 for i in index], np.float32)
    assert ok(e, want, "fp32")
    clamped = v[np.clip(index, 0, 9)]
    assert bad(e, clamped, "fp32") == [[2], [3], [4], [5]]
    assert run(movement.gather, {"x": (v[:0], "fp32"), "index": (index, "int32")}).codes.tolist() == [0] * 7


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "int32", "bf16"])
def test_atomic_add_in_any_order(fmt):
    rng = np.random.default_rng(2)
    x, start = data(rng, 300, fmt), data(rng, 5, fmt)
    index = rng.integers(-1, 7, 300).astype(np.int32)
    e = run(movement.atomic_add, {"x": (x, fmt), "index": (index, "int32"), "out": (start, fmt)})

    def loop(order, drop=None, once=False):
        kind = torch.bfloat16 if fmt == "bf16" else torch.from_numpy(start).dtype
        out, values = (torch.from_numpy(a.copy()).view(kind) for a in (start, x))
        for i in order:
            if 0 <= index[i] < 5 and i != drop:
                cell = int(index[i])
                out[cell] = values[i] if once else out[cell] + values[i]
        return out.view(torch.uint16).numpy() if fmt == "bf16" else out.numpy()

    orders = [range(300), range(299, -1, -1), np.argsort(rng.random(300)).tolist()]
    for order in orders:
        assert ok(e, loop(order), fmt)
    assert not ok(e, loop(orders[0], once=True), fmt), "the last writer wins"
    if fmt in ("fp32", "int32"):
        assert not ok(e, loop(orders[0], drop=int(np.argmax((index >= 0) & (index < 5)))), fmt)
    whole = codes(rng.integers(-3, 4, 300), fmt)
    e = run(movement.atomic_add, {"x": (whole, fmt), "index": (index, "int32"), "out": (codes([0] * 5, fmt), fmt)})
    want = [sum(int(codec.decode(whole, fmt)[i]) for i in range(300) if index[i] == c) for c in range(5)]
    assert ok(e, codes(want, fmt), fmt)
    if fmt in ("fp32", "int32"):
        assert bad(e, codes([*want[:4], want[4] + 1], fmt), fmt) == [[4]], "sums of small integers are exact"


# --- gemm -----------------------------------------------------------------------------------------------------


def gemm_case(a, b, fmt, out, *, c=None, ta=False, tb=False, family="other", profile=None):
    """Expected for logical a [m, k], b [k, n]."""
    a, b = a.T.copy() if ta else a, b.T.copy() if tb else b
    arrays = {"a": (a, fmt), "b": (b, fmt)} | ({"c": (c, out)} if c is not None else {})
    return run(gemm.gemm, arrays, profile, family=family, out=out, transpose_a="yes" if ta else "no",
               transpose_b="yes" if tb else "no", init="clear" if c is None else "c")  # fmt: skip


def single(a, b, fmt, *, order="forward", tile=32, c=None, accumulator=np.float32):
    """The product in single precision, tile after tile."""
    wide = np.float64 if fmt == "fp64" else np.float32
    a, b = codec.decode(a, fmt).astype(wide), codec.decode(b, fmt).astype(wide)
    tiles = [slice(i, i + tile) for i in range(0, a.shape[1], tile)]
    tiles = tiles[::-1] if order == "reverse" else tiles
    accumulator = wide if fmt == "fp64" else accumulator
    parts = [(a[:, t] @ b[t]).astype(accumulator) for t in tiles]
    start = np.zeros((a.shape[0], b.shape[1]), wide) if c is None else c.astype(wide)
    if order == "split":
        return sum(parts[1::2], np.zeros_like(start)) + sum(parts[::2], start)
    total = start.astype(accumulator)
    for p in parts:
        total = (total + p).astype(total.dtype)
    return total


@pytest.mark.parametrize("out", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("fmt", ["fp16", "bf16", "fp32", "fp64"])
def test_gemm_passes_every_order_and_transposition(fmt, out):
    out = "fp64" if fmt == "fp64" else out
    rng = np.random.default_rng(3)
    for m, n, k in ((1, 1, 1), (5, 7, 65), (3, 4, 500)):
        a, b, c = data(rng, (m, k), fmt), data(rng, (k, n), fmt), data(rng, (m, n), out)
        for ta, tb, seed in itertools.product((False, True), repeat=3):
            start = codec.decode(c, out) if seed else None
            e = gemm_case(a, b, fmt, out, c=c if seed else None, ta=ta, tb=tb, family="normal" if ta else "other")
            for order in ("forward", "reverse", "split"):
                got = single(a, b, fmt, order=order, c=start).astype(np.float64)
                assert ok(e, codes(got, out), out), (m, n, k, ta, tb, seed, order)
        exact = [[math.fsum(x * y for x, y in zip(r, col, strict=True)) for col in codec.decode(b, fmt).T.tolist()]
                 for r in codec.decode(a, fmt).tolist()]  # fmt: skip
        value = gemm_case(a, b, fmt, out).value
    settled = value == codec.round_to(exact, out)  # where no order rounds a sum, it is the one rounding of the result
    np.testing.assert_allclose(np.where(settled, exact, value), exact, rtol=1e-9, atol=1e-12)


def test_gemm_faults():
    rng = np.random.default_rng(4)
    a, b, c = data(rng, (16, 300), "fp16"), data(rng, (300, 16), "fp16"), data(rng, (16, 16), "fp32")
    e = gemm_case(a, b, "fp16", "fp32", family="normal")
    right = single(a, b, "fp16")
    assert ok(e, right, "fp32")
    wrong = {
        "last tile": single(a[:, :288], b[:288], "fp16"),
        "one k": single(a[:, 1:], b[1:], "fp16"),
        "not cleared": right + c,
        "fp16 sum": single(a, b, "fp16", accumulator=np.float16).astype(np.float32),
        "neighbour row": np.roll(right, 1, axis=0),
        "sign": -right,
    }
    for name, got in wrong.items():
        assert not ok(e, got, "fp32"), name
    for value in (NAN, INF, -INF, 0.0):
        one = right.copy()
        one[3, 4] = value
        assert bad(e, one, "fp32") == [[3, 4]]
    ulp = np.spacing(right[0, 0])
    assert ok(e, right + ulp * (np.arange(256).reshape(16, 16) == 0), "fp32")
    half = codes(right, "fp16")
    e16 = gemm_case(a, b, "fp16", "fp16", family="normal")
    assert ok(e16, half, "fp16")
    cut = codec.encode(right.astype(np.float64), "fp16", rounding="toward_zero")
    assert not ok(e16, cut, "fp16")


def test_gemm_of_integers_in_floats_is_exact():
    rng = np.random.default_rng(5)
    a, b = codes(rng.integers(-4, 5, (8, 200)), "fp16"), codes(rng.integers(-4, 5, (200, 8)), "fp16")
    e = gemm_case(a, b, "fp16", "fp32")
    right = single(a, b, "fp16")
    assert (e.bound == 0).all()
    assert ok(e, right, "fp32")
    assert not ok(e, np.nextafter(right, np.float32(INF)), "fp32")
    seeded = gemm_case(a, b, "fp16", "fp32", c=codes(np.full((8, 8), 0.5), "fp32"))
    assert (seeded.value == right + 0.5).all()
    assert (seeded.bound == 0).all()


def test_gemm_of_int8_wraps_in_int32():
    rng = np.random.default_rng(6)
    a, b = data(rng, (3, 40), "int8"), data(rng, (40, 5), "int8")
    want = np.array([[sum(int(x) * int(y) for x, y in zip(r, c, strict=True)) for c in b.T] for r in a], np.int32)
    e = gemm_case(a, b, "int8", "int32")
    assert ok(e, want, "int32")
    assert not ok(e, want.astype(np.int16).astype(np.int32), "int32") or (want == want.astype(np.int16)).all()
    c = np.full((3, 5), 2**31 - 1, np.int32)
    e = gemm_case(a, b, "int8", "int32", c=c)
    assert ok(e, want + c, "int32")
    assert bad(e, (want + c) ^ (np.arange(15).reshape(3, 5) == 7), "int32") == [[1, 2]]


def test_gemm_specials_overflow_and_empty():
    a, b = np.ones((3, 4)), np.ones((4, 2))
    a[0, 1], a[1, 2], b[3, 1] = NAN, INF, 0
    e = gemm_case(codes(a, "fp32"), codes(b, "fp32"), "fp32", "fp32")
    assert np.isnan(e.value[0]).all()
    assert (e.value[1] == INF).all()
    assert not ok(e, np.nan_to_num(e.value, nan=3.0, posinf=INF).astype(np.float32), "fp32")
    assert ok(e, e.value.astype(np.float32), "fp32")
    both = gemm_case(codes([[3e38, -3e38, 3e38, -3e38]], "fp32"), codes([[1.0]] * 4, "fp32"), "fp32", "fp32")
    assert both.unspecified.all(), "one order may overflow"
    empty = gemm_case(codes(np.zeros((2, 0)), "fp32"), codes(np.zeros((0, 3)), "fp32"), "fp32", "fp32")
    assert ok(empty, np.zeros((2, 3), np.float32), "fp32")
    assert not ok(empty, np.full((2, 3), 1e-45, np.float32), "fp32")


def test_gemm_tf32_only_where_declared():
    rng = np.random.default_rng(7)
    a, b = data(rng, (8, 64), "fp32"), data(rng, (64, 8), "fp32")
    cut = [((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32) for x in (a, b)]
    got = single(*cut, "fp32")
    assert not ok(gemm_case(a, b, "fp32", "fp32", family="normal"), got, "fp32")
    assert ok(gemm_case(a, b, "fp32", "fp32", family="normal", profile={"input_conversion": "tf32"}), got, "fp32")


# --- reduce ---------------------------------------------------------------------------------------------------


def reduced(x, fmt, kind, dim=1, seed=None, profile=None):
    arrays = {"x": (x, fmt)} | ({"out": (seed, fmt)} if seed is not None else {})
    return run(reduce.reduce, arrays, profile, kind=kind, dim=str(dim), clear="yes" if seed is None else "no")


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("fmt", ["fp16", "fp32", "fp64", "bf16"])
def test_sums_in_any_order(fmt, dim):
    rng = np.random.default_rng(8)
    for m, n in ((1, 1), (33, 65), (4, 300), (0, 3), (3, 0)):
        x = data(rng, (m, n), fmt)
        seed = data(rng, n if dim == 0 else m, fmt)
        kind = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[fmt]
        values = torch.from_numpy(codec.decode(x, fmt)).to(kind)
        rows = values.T if dim == 0 else values
        for start in (None, seed):
            e = reduced(x, fmt, "sum", dim, start)
            begin = torch.zeros(len(rows), dtype=kind)
            if start is not None:
                begin = torch.from_numpy(codec.decode(start, fmt)).to(kind)
            for order in (range(rows.shape[1]), range(rows.shape[1] - 1, -1, -1)):
                total = begin.clone()
                for k in order:
                    total = total + rows[:, k]
                assert ok(e, codes(total.double().numpy(), fmt), fmt)
            wide = rows.double().sum(1) + begin.double()
            assert ok(e, codes(wide.numpy(), fmt), fmt)
            if rows.numel() and rows.shape[1] > 1 and fmt in ("fp32", "fp64"):
                short = codes((wide - rows[:, -1].double()).numpy(), fmt)
                assert not ok(e, short, fmt), "an element is missing"
                assert start is None or not ok(e, codes(rows.double().sum(1).numpy(), fmt), fmt), "seed ignored"


@pytest.mark.parametrize("fmt", ["fp16", "fp32", "int8", "int32", "uint8"])
@pytest.mark.parametrize("kind", ["max", "min", "absmax"])
def test_extremes_are_exact(fmt, kind):
    rng = np.random.default_rng(9)
    x = data(rng, (6, 50), fmt)
    if fmt == "int8":
        x[x == -128] = 5
    if fmt == "int32":
        x >>= 1
    real = codec.decode(x, fmt).astype(np.float64)
    pick = {"max": max, "min": min, "absmax": lambda r: max(abs(v) for v in r)}[kind]
    for dim in (0, 1):
        rows = real.T if dim == 0 else real
        e = reduced(x, fmt, kind, dim)
        want = codes([pick(r) for r in rows.tolist()], fmt)
        assert ok(e, want, fmt)
        second = codes([pick([v for v in r if abs(v) != abs(pick(r))]) for r in rows.tolist()], fmt)
        assert len(bad(e, second, fmt)) == len(rows)
        high = codes(np.full(len(rows), 120), fmt)
        seeded = reduced(x, fmt, kind, dim, high)
        assert ok(seeded, codes([pick([*r, 120]) for r in rows.tolist()], fmt), fmt)
    zero = codes(0.0, fmt)[()]
    low, top = (-INF, INF) if fmt in FLOATS else (np.iinfo(x.dtype).min, np.iinfo(x.dtype).max)
    identity = {"max": low, "min": top, "absmax": zero}[kind]
    assert ok(reduced(x[:, :0], fmt, kind), codes([identity] * 6, fmt), fmt)


def test_extremes_with_nan_zeros_and_the_lowest_integer():
    rows = codes([[1, NAN, 3], [NAN, NAN, NAN], [-0.0, 0.0, -0.0], [-INF, -INF, -INF]], "fp32")
    values = {"free": [9, 9, 0, -INF], "drop": [3, NAN, -0.0, -INF], "propagate": [NAN, NAN, 0.0, -INF]}
    for rule, got in values.items():
        assert ok(reduced(rows, "fp32", "max", profile={"reduce_nan": rule}), codes(got, "fp32"), "fp32"), rule
        assert ok(reduced(rows, "fp32", "max"), codes(got, "fp32"), "fp32") is (rule != "free"), rule
    free = reduced(rows, "fp32", "max", profile={"reduce_nan": "free"})
    assert bad(free, codes([0, 0, 1, 0], "fp32"), "fp32") == [[2], [3]]
    with pytest.raises(ValueError, match="reduce_nan"):
        reduced(rows, "fp32", "max", profile={"reduce_nan": "drops"})
    drop = reduced(rows, "fp32", "max", profile={"reduce_nan": "drop"})
    assert bad(drop, codes([NAN, 1, 0, -INF], "fp32"), "fp32") == [[0]]
    keep = reduced(rows, "fp32", "max", profile={"reduce_nan": "propagate"})
    assert bad(keep, codes([3, NAN, 0, -INF], "fp32"), "fp32") == [[0]]
    assert reduced(codes([[-128, 5]], "int8"), "int8", "absmax").unspecified.all()
    seeded = reduced(codes([[1.0]], "fp32"), "fp32", "absmax", seed=codes([-2.0], "fp32"))
    assert all(ok(seeded, codes([v], "fp32"), "fp32") for v in (1, 2, -2)), "whether the seed counts by size is free"


@pytest.mark.parametrize("kind", ["bitand", "bitor", "bitxor", "sum"])
@pytest.mark.parametrize("fmt", INTS)
def test_integer_reductions_wrap_and_combine_bits(kind, fmt):
    rng = np.random.default_rng(10)
    x, seed = data(rng, (4, 9), fmt), data(rng, 4, fmt)
    step = {"bitand": lambda a, b: a & b, "bitor": lambda a, b: a | b, "bitxor": lambda a, b: a ^ b,
            "sum": lambda a, b: a + b}[kind]  # fmt: skip
    for start in (None, seed):
        want = []
        for r, row in enumerate(x.tolist()):
            value = (-1 if kind == "bitand" else 0) if start is None else int(seed[r])
            for v in row:
                value = step(value, v)
            want.append(value & (2 ** (8 * x.itemsize) - 1))
        got = np.array(want, np.uint64).astype(codec.bits(x).dtype).view(x.dtype)
        e = reduced(x, fmt, kind, seed=start)
        assert ok(e, got, fmt)
        assert bad(e, got ^ x.dtype.type(1), fmt) == [[0], [1], [2], [3]]


# --- element-wise ---------------------------------------------------------------------------------------------

TORCH = {
    "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log2": torch.log2, "log10": torch.log10,
    "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "sin": torch.sin, "cos": torch.cos,
    "tan": torch.tan, "atan": torch.atan, "sinh": torch.sinh, "cosh": torch.cosh, "tanh": torch.tanh,
    "erf": torch.erf, "sigmoid": torch.sigmoid, "exp10": lambda x: torch.pow(torch.tensor(10.0, dtype=x.dtype), x),
}  # fmt: skip


def unary(x, fmt, function, profile=None):
    return run(elementwise.elementwise, {"x": (x, fmt)}, profile, function=function)


def sample(rng: np.random.Generator) -> np.ndarray:
    plain = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-40, -1e-40, 1e-45, 88.7, -88.7, -87.5, 100.0, -120.0, 0.9999999,
             1.0000001, 3.0e38, 0.5, -0.5, 2.5, -2.5, 1.5]  # fmt: skip
    return np.concatenate([plain, rng.standard_normal(400), rng.standard_normal(200) * 30,
                           np.ldexp(1.0 + rng.random(200), rng.integers(-120, 120, 200))])  # fmt: skip


def test_every_function_has_a_counterpart():
    assert set(TORCH) == set(elementwise.FUNCTIONS)


@pytest.mark.parametrize("function", TORCH)
@pytest.mark.parametrize("fmt", ["fp32", "fp64", "bf16", "fp16"])
def test_functions_of_libm_pass_and_four_bits_less_fail(function, fmt):
    rng = np.random.default_rng(11)
    values = sample(rng)
    if function in ("sin", "cos", "tan"):
        values = values[~(np.abs(values) > 1e4)]
    if fmt == "fp64" and function == "exp10":
        values = values[np.abs(values) < 30]
    x = codes(values, fmt)
    e = unary(x, fmt, function)
    kind = torch.float64 if fmt == "fp64" else torch.float32
    got = TORCH[function](torch.from_numpy(codec.decode(x, fmt)).to(kind)).double().numpy()
    finite = np.isfinite(got)
    assert bad(e, codes(got, fmt), fmt) == [], codec.decode(x, fmt)[e.judge(codes(got, fmt), fmt).bad]
    worse = codes(np.where(finite, got * (1 + 2.0**-18), got), fmt)
    if fmt in ("fp32", "fp64"):
        big = finite & (np.abs(got) > 1e-30) & (np.abs(got) < 1e30)
        judged = e.judge(worse, fmt).bad
        assert (judged | ~big | np.signbit(x) * (x == 0)).all()
    for value in (NAN, INF, -INF):
        one = codes(got, fmt)
        place = int(np.argmax(finite & (np.abs(got) > 1e-3) & (np.abs(got) < 1e3)))
        one[place] = codes(value, fmt)
        assert bad(e, one, fmt) == [[place]]


def test_functions_against_python_math():
    x = np.array([0.1, 0.7, 1.3], np.float32)
    plain = {"exp": math.exp, "log1p": math.log1p, "erf": math.erf, "tanh": math.tanh, "atan": math.atan}
    for name, f in plain.items():
        assert unary(x, "fp32", name).value.tolist() == pytest.approx([f(float(v)) for v in x], rel=1e-15)


def test_exp_as_exp2_and_arguments_through_fp16_fail():
    x = codes(np.random.default_rng(12).standard_normal(50), "fp32")
    assert len(bad(unary(x, "fp32", "exp"), np.exp2(x), "fp32")) == 50
    for name in ("exp", "sin", "log1p", "tanh"):
        argument = np.abs(x).astype(np.float16).astype(np.float32)
        got = TORCH[name](torch.from_numpy(argument)).numpy()
        assert len(bad(unary(np.abs(x), "fp32", name), got, "fp32")) > 40


@pytest.mark.parametrize("fmt", FLOATS)
def test_rounding_functions(fmt):
    values = [0.5, 1.5, 2.5, -0.5, -1.5, 0.25, -0.25, 3.0, -3.75, INF, -INF, NAN, 0.0, -0.0, 100.5]
    x = codes(values, fmt)
    real = codec.decode(x, fmt)
    even = np.array([v if not math.isfinite(v) else float(round(v)) for v in real])
    away = np.array([v if not math.isfinite(v) else math.copysign(math.floor(abs(v) + 0.5), v) for v in real])
    assert ok(unary(x, fmt, "round"), codes(even, fmt), fmt)
    assert ok(unary(x, fmt, "round"), codes(away, fmt), fmt)
    between = np.where(even != away, real, even)
    assert not ok(unary(x, fmt, "round"), codes(between, fmt), fmt)
    assert ok(unary(x, fmt, "nearbyint"), codes(even, fmt), fmt)
    ties = [[i] for i, (a, b) in enumerate(zip(even.tolist(), away.tolist(), strict=True)) if a != b and a == a]
    assert bad(unary(x, fmt, "nearbyint"), codes(away, fmt), fmt) == ties
    for name, f in {"floor": math.floor, "ceil": math.ceil, "trunc": math.trunc, "abs": abs}.items():
        want = codes([float(f(v)) if math.isfinite(v) else (abs(v) if name == "abs" else v) for v in real], fmt)
        assert ok(unary(x, fmt, name), want, fmt), name
        assert not ok(unary(x, fmt, name), codes(codec.decode(want, fmt) + 1, fmt), fmt)
    for name, f in {"isnan": math.isnan, "isinf": math.isinf, "isfinite": math.isfinite}.items():
        assert ok(unary(x, fmt, name), codes([float(f(v)) for v in real], fmt), fmt)
        assert len(bad(unary(x, fmt, name), codes([1.0 - f(v) for v in real], fmt), fmt)) == len(x)


def test_flushed_subnormals_only_where_declared():
    x = np.array([1e-40, -3e-39], np.float32)
    for name, flushed in (("sin", 0.0), ("exp", 1.0), ("sqrt", 0.0)):
        got = np.full(2, flushed, np.float32)
        strict, loose = unary(np.abs(x), "fp32", name), unary(np.abs(x), "fp32", name, {"subnormals": "flush"})
        assert ok(loose, got, "fp32")
        assert ok(strict, got, "fp32") is (name == "exp")


# --- operators ------------------------------------------------------------------------------------------------


def binary(a, b, fmt, function, profile=None):
    return run(arithmetic.arithmetic, {"a": (a, fmt), "b": (b, fmt)}, profile, function=function)


@pytest.mark.parametrize("function", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("fmt", FLOATS)
def test_float_operators_round_once(fmt, function):
    rng = np.random.default_rng(13)
    values = sample(rng)
    a, b = codes(values, fmt), codes(rng.permutation(values), fmt)
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[fmt]
    ta, tb = (torch.from_numpy(codec.decode(v, fmt)).to(kind) for v in (a, b))
    step = {"add": ta + tb, "sub": ta - tb, "mul": ta * tb, "div": ta / tb}[function]
    got = codes(step.double().numpy(), fmt)
    e = binary(a, b, fmt, function)
    assert bad(e, got, fmt) == []
    finite = np.isfinite(codec.decode(got, fmt)) & (np.abs(codec.decode(got, fmt)) > 1e-4)
    raw = codec.bits(got)
    off = (raw + np.where(finite, 1 if function != "div" else 5, 0).astype(raw.dtype)).view(got.dtype)
    assert set(map(tuple, bad(e, off, fmt))) == set(map(tuple, np.argwhere(finite)))


def test_float_max_and_min_have_one_rule_for_nan_and_leave_zero_signs_open():
    a, b = codes([1, NAN, 2, NAN, 0.0, INF], "fp32"), codes([2, 1, NAN, NAN, -0.0, -INF], "fp32")
    rules = {"drop": [2, 1, 2, NAN, 0.0, INF], "propagate": [2, NAN, NAN, NAN, -0.0, INF],
             "by order": [2, 1, NAN, NAN, 0.0, INF]}  # fmt: skip
    right = {"consistent": {"drop", "propagate"}, "drop": {"drop"}, "propagate": {"propagate"}, "free": set(rules)}
    for rule, good in right.items():
        e = binary(a, b, "fp32", "max", {"max_nan": rule})
        assert {name for name, got in rules.items() if ok(e, codes(got, "fp32"), "fp32")} == good, rule
        assert len(bad(e, codes([1, 2, 1, 0, 1, -INF], "fp32"), "fp32")) == 6
    e = binary(a, b, "fp32", "max")
    assert bad(e, codes(rules["by order"], "fp32"), "fp32") in ([[1]], [[2]])
    low = binary(a, b, "fp32", "min")
    assert ok(low, codes([1, 1, 2, NAN, 0.0, -INF], "fp32"), "fp32")


def c_quotient(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


INTEGER = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "max": max, "min": min,
    "floordiv": lambda x, y: math.floor(x / y) if abs(x) < 2**50 else x // y, "floormod": lambda x, y: x - y * (x // y),
    "truncdiv": c_quotient, "truncmod": lambda x, y: x - y * c_quotient(x, y), "bitand": lambda x, y: x & y,
    "bitor": lambda x, y: x | y, "bitxor": lambda x, y: x ^ y, "shl": lambda x, y: x * 2**y,
    "shr": lambda x, y: math.floor(x / 2**y) if abs(x) < 2**50 else x >> y,
}  # fmt: skip


@pytest.mark.parametrize("function", INTEGER)
@pytest.mark.parametrize("fmt", INTS)
def test_integer_operators(fmt, function):
    rng = random.Random(f"{fmt}{function}")
    info = np.iinfo(FORMATS[fmt].codes)
    edge = [info.min, info.min + 1, -1, 0, 1, 2, 7, info.max - 1, info.max]
    pool = [v for v in edge if v >= info.min] + [rng.randint(info.min, info.max) for _ in range(6)]
    pairs = list(itertools.product(pool, pool)) + [(rng.choice(pool), rng.randrange(info.bits)) for _ in range(30)]
    a, b = (np.array(v, info.dtype) for v in zip(*pairs, strict=True))
    e = binary(a, b, fmt, function)
    got, undefined = [], []
    for x, y in pairs:
        is_shift, divides = function in ("shl", "shr"), function.endswith(("div", "mod"))
        void = (is_shift and not 0 <= y < info.bits) or (divides and (y == 0 or (y == -1 and x == info.min)))
        value = 0 if void else INTEGER[function](x, y)
        undefined.append(void or (info.min < 0 and not info.min <= value <= info.max))
        got.append(value & (2**info.bits - 1))
    codes_got = np.array(got, np.uint64).astype(codec.bits(a).dtype).view(a.dtype)
    assert ok(e, codes_got, fmt)
    assert e.judge(codes_got ^ a.dtype.type(1), fmt).bad.tolist() == [not u for u in undefined]


def test_clamp():
    x = codes([-5, -1, 0, 3, NAN, INF, -INF], "fp32")
    e = run(elementwise.clamp, {"x": (x, "fp32")}, values={"low": -1.0, "high": 2.0})
    assert ok(e, codes([-1, -1, -0.0, 2, NAN, 2, -1], "fp32"), "fp32")
    assert bad(e, codes([-1, -1, 0, 3, -1, 2, -1], "fp32"), "fp32") == [[3], [4]]
    crossed = run(elementwise.clamp, {"x": (x, "fp32")}, values={"low": 2.0, "high": -1.0})
    assert ok(crossed, codes([-1, -1, -1, -1, NAN, -1, -1], "fp32"), "fp32")
    tenth = run(elementwise.clamp, {"x": (codes([9.0], "fp64"), "fp64")}, values={"low": 0.0, "high": 0.1})
    assert ok(tenth, np.array([float(np.float32(0.1))]), "fp64")


# --- casts ----------------------------------------------------------------------------------------------------


def casted(x, fmt, out, profile=None):
    return run(elementwise.cast, {"x": (x, fmt)}, profile, out=out)


def test_float_casts_agree_with_torch_and_round_once():
    rng = np.random.default_rng(14)
    ties = [65504, 65519.9, 65520, 2049, 2051, 1 + 2.0**-11, 1 + 3 * 2.0**-11]
    x = codes(np.concatenate([sample(rng), ties]), "fp32")
    t = torch.from_numpy(x)
    for out, kind in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        got = t.to(kind).view(torch.int16).numpy().view(np.uint16)
        got = got.view(np.float16) if out == "fp16" else got
        e = casted(x, "fp32", out)
        assert ok(e, got, out)
        cut = codec.encode(x.astype(np.float64), out, rounding="toward_zero")
        assert not ok(e, cut, out)
    assert ok(casted(x, "fp32", "fp64"), x.astype(np.float64), "fp64")
    wide = np.array([1 + 2.0**-24 + 2.0**-50, 1e39, -1e-46])
    assert ok(casted(wide, "fp64", "fp32"), codes(wide, "fp32"), "fp32")
    assert not ok(casted(wide, "fp64", "fp32"), np.array([1, INF, -0.0], np.float32), "fp32"), "through too few bits"


def test_casts_round_once_unless_declared():
    """Just above the half-way point of 1 and its neighbour, which single precision takes for a tie."""
    for out, p in (("fp16", 11), ("bf16", 8)):
        x = np.array([1 + 2.0**-p + 2.0**-40, -(1 + 2.0**-p + 2.0**-40)])
        once, twice = codes([1 + 2.0 ** (1 - p), -(1 + 2.0 ** (1 - p))], out), codes([1, -1], out)
        assert ok(casted(x, "fp64", out), once, out)
        assert bad(casted(x, "fp64", out), twice, out) == [[0], [1]]
        loose = casted(x, "fp64", out, {"cast_steps": "through_fp32"})
        assert ok(loose, once, out)
        assert ok(loose, twice, out)


def test_casts_to_bool():
    x = codes([0.0, -0.0, 1, -0.25, NAN, INF, 1e-45], "fp32")
    e = casted(x, "fp32", "bool")
    assert ok(e, np.array([False, False, *[True] * 5]), "bool")
    assert bad(e, np.array([False, False, True, False, *[True] * 3]), "bool") == [[3]], "through an integer"
    assert ok(casted(np.array([0, 256], np.int32), "int32", "bool"), np.array([False, True]), "bool")


def test_fp8_casts_saturate():
    values = [448, 464, 465, 1e4, INF, -INF, NAN, 57344, 61440, 1e9, 17, 19, 2.0**-10, 1.0625]
    x = codes(values, "fp32")
    e4m3 = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert ok(casted(x, "fp32", "e4m3"), e4m3, "e4m3")
    assert bad(casted(x, "fp32", "e4m3"), np.where(np.abs(x) > 448, 0x7F, e4m3).astype(np.uint8), "e4m3")
    clipped = torch.from_numpy(np.clip(x, -57344, 57344)).to(torch.float8_e5m2).view(torch.uint8).numpy()
    assert ok(casted(x, "fp32", "e5m2"), clipped, "e5m2")
    unclipped = torch.from_numpy(x).to(torch.float8_e5m2).view(torch.uint8).numpy()
    assert bad(casted(x, "fp32", "e5m2"), unclipped, "e5m2") == [[4], [5], [8], [9]]
    over = casted(x, "fp32", "e4m3", {"e4m3_overflow": "nan"})
    assert ok(over, codec.encode(x.astype(np.float64), "e4m3", overflow="nan"), "e4m3")


def test_casts_to_and_from_integers():
    x = codes([1.9, -1.9, 2.5, 3.5, 127.9, -128.9, 128, -129, NAN, INF, 0.0], "fp32")
    e = casted(x, "fp32", "int8")
    assert e.unspecified.tolist() == [False] * 6 + [True] * 4 + [False]
    good = np.array([1, -1, 2, 3, 127, -128, 0, 0, 0, 0, 0], np.int8)
    assert ok(e, good, "int8")
    nearest = np.array([2, -2, 2, 4, 127, -128, 0, 0, 0, 0, 0], np.int8)
    assert bad(e, nearest, "int8") == [[0], [1], [3]]
    big = np.array([2.0**63, 2.0**63 - 1024, -(2.0**63)])
    assert casted(big, "fp64", "int64").unspecified.tolist() == [True, False, False]
    assert ok(casted(big, "fp64", "int64"), np.array([0, 2**63 - 1024, -(2**63)]), "int64")
    wide = np.array([2**31 + 5, -1, 2**53 + 1, 259, 16777217], np.int64)
    assert ok(casted(wide, "int64", "int32"), wide.astype(np.int32), "int32")
    assert ok(casted(wide, "int64", "uint8"), (wide & 255).astype(np.uint8), "uint8")
    assert ok(casted(wide, "int64", "fp32"), wide.astype(np.float32), "fp32")
    for out, value in (("bf16", 260.0), ("fp16", 259.0)):
        e = casted(wide[3:4], "int64", out)
        assert ok(e, codes([value], out), out)
        assert not ok(e, codes([258.0], out), out)
    with np.errstate(over="ignore"):
        through_half = wide.astype(np.float16).astype(np.float32)
    assert not ok(casted(wide, "int64", "fp32"), through_half, "fp32")
