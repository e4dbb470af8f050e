"""The top-k oracle against plain Python loops: every legal answer passes, each kind of wrong one fails by name."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from conformance.model import Problem, Variant
from references.deepselect import select
from references.expected import Inputs
from references.formats import codec

VARIANT = {"dtype": "fp32", "index": "int32", "order": "any", "values": "yes", "end": "no", "offset": "no",
           "output_idx": "callee"}  # fmt: skip
VALUES = {"idx_oob_fill_value": -7, "value_oob_fill_value": 0.1, "abort_when_nan_found": False}
NAN, INF = math.nan, math.inf


def codes_of(rows: list[list[float]], dtype: str) -> np.ndarray:
    return codec.encode(np.array(rows, np.float64), dtype)


def expected(x, k, *, end=None, offset=None, values=None, profile=None, codes=None, **variant: str):
    """(Joint, dtype of the index, input codes)"""
    full = VARIANT | variant | {"end": "no" if end is None else "yes", "offset": "no" if offset is None else "yes"}
    codes = codes_of(x, full["dtype"]) if codes is None else codes
    arrays, formats = {"input": codes}, {"input": full["dtype"]}
    for name, array in (("end", end), ("output_idx_offset", offset)):
        if array is not None:
            arrays[name], formats[name] = np.array(array, np.int32), "int32"
    sizes = {"b": codes.shape[0], "topk": k, "vocab": codes.shape[1]}
    problem = Problem("deepselect.topk", Variant(full), sizes, VALUES | (values or {}), "normal", 0)
    [(key, joint)] = select.topk(problem, Inputs(arrays, formats), profile or {}).items()
    assert key == (("values", "indices") if full["values"] == "yes" else ("indices",))
    assert all(shape == (codes.shape[0], k) for shape in joint.shapes.values())
    return joint, np.dtype(full["index"]), codes


def answer(codes, dtype, index_dtype, positions, k, *, offset=0, fill=-7, value_fill=0.1):
    """Both outputs for chosen positions, one list a row, filled up to k."""
    index = np.full((len(positions), k), fill, np.int64)
    values = np.full((len(positions), k), codec.encode(np.array([value_fill]), dtype)[0])
    for r, chosen in enumerate(positions):
        for j, p in enumerate(chosen):
            index[r, j] = p + (offset[r] if isinstance(offset, list) else offset)
            values[r, j] = codes[r, p]
    return {"indices": index.astype(index_dtype), "values": values}


def verdict(joint, got) -> tuple[bool, str]:
    judged = joint.check({name: got[name] for name in joint.shapes})
    for name, j in judged.items():
        assert j.bad.shape == joint.shapes[name]
    bad = [j.reason for j in judged.values() if not j.ok]
    return not bad, bad[0] if bad and judged["indices"].ok else judged["indices"].reason if bad else ""


def plain_topk(row: list[float], e: int, k: int, order: str, rng: random.Random) -> list[int]:
    """A legal answer by sorting in Python, ties at random."""
    n = min(k, e)
    positions = list(range(e))
    if e > k or order == "value":
        rng.shuffle(positions)
        positions.sort(key=lambda p: row[p], reverse=True)
    positions = positions[:n]
    if e > k:
        if order == "any":
            rng.shuffle(positions)
        elif order == "index":
            positions.sort()
    return positions


DATA = {
    "normal": lambda rng, n: [rng.gauss(0, 1) for _ in range(n)],
    "ties": lambda rng, n: [float(rng.randrange(3)) for _ in range(n)],
    "constant": lambda rng, n: [1.5] * n,
    "zeros": lambda rng, n: [rng.choice([0.0, -0.0]) for _ in range(n)],
    "special": lambda rng, n: [rng.choice([INF, -INF, 0.0, -0.0, 1e-40, -1e-40, 2e-40, 3.3e38, 1.0]) for _ in range(n)],
}


@pytest.mark.parametrize("order", ["any", "index", "value"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("family", DATA)
def test_every_legal_answer_passes_and_a_swapped_in_smaller_value_fails(family, dtype, order):
    rng = random.Random(f"{family}{dtype}{order}")
    for _ in range(40):
        b, vocab, k = rng.randint(1, 3), rng.randint(1, 12), rng.randint(1, 14)
        codes = codes_of([DATA[family](rng, vocab) for _ in range(b)], dtype)
        rows = codec.decode(codes, dtype).tolist()
        end = [rng.randint(0, vocab) for _ in range(b)]
        offset = [rng.choice([0, 5, -(2**30), 2**31 - 1]) for _ in range(b)]
        index = rng.choice(["int32", "int64"])
        joint, index_dtype, _ = expected(
            None, k, codes=codes, end=end, offset=offset, dtype=dtype, order=order, index=index
        )
        for _ in range(4):
            chosen = [plain_topk(row, e, k, order, rng) for row, e in zip(rows, end, strict=True)]
            assert verdict(joint, answer(codes, dtype, index_dtype, chosen, k, offset=offset)) == (True, "")
        for r, e in enumerate(end):
            left = [p for p in range(e) if p not in chosen[r]]
            smaller = [(j, p) for j, q in enumerate(chosen[r]) for p in left if rows[r][p] < rows[r][q]]
            for j, p in smaller[:3]:
                wrong = [list(c) for c in chosen]
                wrong[r][j] = p
                if order == "index":
                    wrong[r].sort()
                ok, reason = verdict(joint, answer(codes, dtype, index_dtype, wrong, k, offset=offset))
                assert (ok, reason) == (False, "numeric")


def test_all_tie_choices_of_a_small_row_pass_and_nothing_else():
    """Brute force over all ordered picks of 2 of 4."""
    row = [2.0, 3.0, 2.0, 1.0]
    joint, index, codes = expected([row], 2, values=None)
    for a in range(4):
        for c in range(4):
            legal = a != c and sorted((row[a], row[c])) == [2.0, 3.0]
            assert verdict(joint, answer(codes, "fp32", index, [[a, c]], 2))[0] is legal, (a, c)


ROW = [5.0, 1.0, 4.0, 4.0, -INF, 3.0, 0.0, -0.0]


def change(**edits: Any):
    """edits: indices=(column, value) and so on, of row 0."""

    def apply(got):
        for name, (column, value) in edits.items():
            got[name][0, column] = value

    return apply


WRONG = {
    # name: (order, k, end, chosen, change, reason)
    "index below the row": ("any", 3, None, [0, 2, 3], change(indices=(1, -1)), "index_range"),
    "index behind the row": ("any", 3, None, [0, 2, 3], change(indices=(1, 8)), "index_range"),
    "index behind end": ("any", 2, [3], [0, 2], change(indices=(1, 3)), "index_range"),
    "fill inside the real part": ("any", 3, None, [0, 2, 3], change(indices=(2, -7)), "index_range"),
    "an index twice": ("any", 3, None, [0, 2, 2], None, "token_duplicated"),
    "an index twice in a short row": ("any", 8, None, [0, 1, 2, 2, 4, 5, 6, 7], None, "token_duplicated"),
    "a smaller value": ("any", 3, None, [0, 2, 5], None, "numeric"),
    "too many ties": ("any", 1, None, [2], None, "numeric"),
    "value of another row": ("any", 3, None, [0, 2, 3], change(values=(1, 5.0)), "numeric"),
    "sign of a zero": ("any", 7, None, [0, 1, 2, 3, 5, 6, 7], change(values=(6, 0.0)), "numeric"),
    "value one ulp off": ("any", 3, None, [0, 2, 3], change(values=(0, np.nextafter(np.float32(5), 0))), "numeric"),
    "value NaN": ("any", 3, None, [0, 2, 3], change(values=(0, NAN)), "numeric"),
    "index fill": ("any", 10, None, list(range(8)), change(indices=(9, 2**31 - 1)), "numeric"),
    "value fill": ("any", 10, None, list(range(8)), change(values=(9, -INF)), "numeric"),
    "short row out of index order": ("any", 8, None, [1, 0, 2, 3, 4, 5, 6, 7], None, "order"),
    "indices not ascending": ("index", 3, None, [0, 3, 2], None, "order"),
    "values not descending": ("value", 3, None, [2, 0, 3], None, "order"),
    "short row not by value": ("value", 4, [3], [0, 1, 2], None, "order"),
    "empty row not filled": ("any", 2, [0], [0], None, "numeric"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_kind_is_named(name):
    order, k, end, chosen, edit, reason = WRONG[name]
    joint, index, codes = expected([ROW, ROW], k, end=None if end is None else [*end, 8], order=order)
    rng = random.Random(0)
    second = plain_topk(ROW, 8, k, order, rng)
    first = plain_topk(ROW, 8 if end is None else end[0], k, order, rng)
    assert verdict(joint, answer(codes, "fp32", index, [first, second], k))[0]
    got = answer(codes, "fp32", index, [chosen, second], k)
    if edit:
        edit(got)
    judged = joint.check(got)
    assert verdict(joint, got) == (False, reason)
    assert not judged["indices"].bad[1].any(), "the other row is not to blame"
    assert not judged["values"].bad[1].any()


def test_minus_zero_equals_plus_zero_and_subnormals_do_not():
    joint, index, codes = expected([[0.0, -0.0, -1e-45]], 1)
    for position, legal in ((0, True), (1, True), (2, False)):
        assert verdict(joint, answer(codes, "fp32", index, [[position]], 1))[0] is legal
    joint, index, codes = expected([[1e-45, 2.8e-45, 0.0]], 1)
    assert [verdict(joint, answer(codes, "fp32", index, [[p]], 1))[0] for p in range(3)] == [False, True, False]


@pytest.mark.parametrize(
    ("fill", "dtype", "legal", "wrong"),
    [
        (1e39, "bf16", INF, 3.3895e38),
        (1e39, "fp32", INF, 3.4e38),
        (NAN, "bf16", NAN, INF),
        (-INF, "fp32", -INF, -3.4e38),
        (0.1, "bf16", 0.10009765625, 0.099609375),
        (-0.0, "bf16", -0.0, 0.0),
    ],
)
def test_value_fill_is_rounded_once(fill, dtype, legal, wrong):
    joint, index, codes = expected([[1.0]], 2, values={"value_oob_fill_value": fill}, dtype=dtype)
    good = answer(codes, dtype, index, [[0]], 2, value_fill=legal)
    assert verdict(joint, good)[0]
    good["values"][0, 1] = codec.encode(np.array([wrong]), dtype)[0]
    assert verdict(joint, good) == (False, "numeric")


def test_fill_that_rounds_differently_through_float32_may_do_both():
    midpoint_up = 1.0 + 2.0**-8 + 2.0**-30  # float32 makes it the tie 1 + 2**-8, which goes to 1
    joint, index, codes = expected([[1.0]], 2, values={"value_oob_fill_value": midpoint_up}, dtype="bf16")
    fills = (1.0, 1.0078125, 1.015625)
    seen = {v: verdict(joint, answer(codes, "bf16", index, [[0]], 2, value_fill=v))[0] for v in fills}
    assert seen == {1.0: True, 1.0078125: True, 1.015625: False}


def test_offsets_wrap_in_int32_are_exact_in_int64_and_spare_the_fill():
    big = 2**31 - 2
    for dtype, at_3 in (("int32", 3 + big - 2**32), ("int64", 3 + big)):
        joint, index, codes = expected([[0.0, 1.0, 2.0, 3.0]], 6, offset=[big], index=dtype)
        got = answer(codes, "fp32", index, [[0, 1, 2, 3]], 6, offset=[big])
        assert got["indices"][0, 3] == at_3
        assert verdict(joint, got)[0]
        got["indices"][0, 5] = -7 + big
        assert verdict(joint, got) == (False, "numeric")
        assert verdict(joint, answer(codes, "fp32", index, [[0, 1, 2, 3]], 6)) == (False, "index_range")


NAN_CASES = [
    # profile, row, end, indices of the row, legal
    ({}, [NAN, 1.0, 2.0, 3.0], None, [select.NAN_SENTINEL, 77], True),
    ({}, [NAN, 1.0, 2.0, 3.0], None, [3, select.NAN_SENTINEL], False),
    ({}, [-NAN, 1.0, 2.0, 3.0], None, [3, 2], False),
    ({"nan_sentinel": "row"}, [NAN, 1.0, 2.0, 3.0], None, [select.NAN_SENTINEL] * 2, True),
    ({"nan_sentinel": "row"}, [NAN, 1.0, 2.0, 3.0], None, [select.NAN_SENTINEL, 77], False),
    ({}, [1.0, 2.0, 3.0, NAN], [3], [2, 1], True),
    ({}, [1.0, 2.0, 3.0, NAN], [3], [select.NAN_SENTINEL, 1], False),
    ({}, [NAN, 1.0, NAN, NAN], [2], [0, 1], True),
    ({}, [NAN, 1.0, NAN, NAN], [2], [select.NAN_SENTINEL, 1], False),
    ({"nan_short_row": "checked", "nan_sentinel": "row"}, [NAN, 1.0, 0.0, 0.0], [2], [select.NAN_SENTINEL] * 2, True),
    ({"nan_short_row": "checked", "nan_sentinel": "row"}, [NAN, 1.0, 0.0, 0.0], [2], [0, 1], False),
    ({"nan_short_row": "checked"}, [1.0, 0.0, NAN, 0.0], [2], [0, 1], True),
]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("case", NAN_CASES)
def test_nan_rows(case, dtype):
    profile, row, end, index, legal = case
    clean = [4.0, 3.0, 2.0, 1.0]
    ends = None if end is None else [*end, 4]
    joint, index_dtype, codes = expected([row, clean], 2, end=ends, profile=profile, dtype=dtype)
    got = answer(codes, dtype, index_dtype, [[], [0, 1]], 2)
    got["indices"][0] = index
    for j, p in enumerate(index):
        got["values"][0, j] = codes[0, p] if p < 4 else 0x7F if dtype == "bf16" else 123.0
    ok, reason = verdict(joint, got)
    assert ok is legal
    assert legal or reason in ("nonfinite", "index_range")
    got["indices"][1, 0] = 2
    assert verdict(joint, got)[0] is False, "clean rows stay judged"


def test_signalling_nan_patterns_of_both_signs_count_and_bits_are_gathered():
    codes = np.array([[0x7F81, 0x3F80], [0xFFC0, 0x3F80]], np.uint16)
    joint, index, _ = expected(None, 1, codes=codes, dtype="bf16")
    got = {"indices": np.full((2, 1), select.NAN_SENTINEL, index), "values": np.zeros((2, 1), np.uint16)}
    assert verdict(joint, got)[0]
    joint, index, _ = expected(None, 2, codes=codes, dtype="bf16")
    good = answer(codes, "bf16", index, [[0, 1], [0, 1]], 2)
    assert verdict(joint, good)[0]
    good["values"][0, 0] = 0x7FC1
    assert verdict(joint, good) == (False, "numeric"), "a short row keeps the payload"


def test_a_returned_result_fails_where_a_nan_had_to_abort():
    joint, index, codes = expected([[NAN, 1.0], [2.0, 1.0]], 1, values={"abort_when_nan_found": True})
    got = answer(codes, "fp32", index, [[1], [0]], 1)
    got["indices"][0, 0] = select.NAN_SENTINEL
    assert verdict(joint, got) == (False, "no_exception")
    joint, index, codes = expected([[NAN, 1.0], [2.0, 1.0]], 2, values={"abort_when_nan_found": True})
    assert verdict(joint, answer(codes, "fp32", index, [[0, 1], [0, 1]], 2))[0], "short rows are not checked"


@pytest.mark.parametrize(("b", "vocab", "k"), [(0, 5, 2), (2, 0, 3), (1, 1, 1), (3, 1, 4096)])
def test_degenerate_sizes(b, vocab, k):
    codes = np.zeros((b, vocab), np.uint16)
    joint, index, _ = expected(None, k, codes=codes, dtype="bf16")
    good = answer(codes, "bf16", index, [list(range(min(k, vocab)))] * b, k)
    assert verdict(joint, good)[0]
    if b and k > vocab:
        good["indices"][-1, -1] = 0
        assert verdict(joint, good) == (False, "numeric")


def test_rows_with_an_end_out_of_contract_are_free_and_their_neighbours_not():
    joint, index, codes = expected([[1.0, 2.0]] * 3, 1, end=[-1, 3, 2])
    assert verdict(joint, answer(codes, "fp32", index, [[0], [0], [1]], 1))[0]
    assert verdict(joint, answer(codes, "fp32", index, [[0], [0], [0]], 1)) == (False, "numeric")


def test_indices_alone_where_values_are_not_returned():
    codes = codes_of([ROW], "fp32")
    sizes = {"b": 1, "topk": 2, "vocab": 8}
    problem = Problem("deepselect.topk", Variant(VARIANT | {"values": "no"}), sizes, VALUES, "normal", 0)
    [(key, joint)] = select.topk(problem, Inputs({"input": codes}, {"input": "fp32"}), {}).items()
    assert key == ("indices",)
    assert joint.check({"indices": np.array([[0, 3]], np.int32)})["indices"].ok
    assert not joint.check({"indices": np.array([[0, 1]], np.int32)})["indices"].ok
