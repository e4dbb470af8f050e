"""The expert-parallel oracles against a token-by-token simulation: every free order passes, each loss is named."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from conformance.model import Problem, Variant
from references.deepep import ep
from references.deepep.routing import Routing
from references.expected import Exact, Inputs, Joint
from references.formats import codec

NAN, INF = math.nan, math.inf
HIDDEN = 32
POISON = 0x7FA5


def problem(values: dict[str, Any], **variant: str) -> Problem:
    return Problem("deepep.x", Variant(variant), values, {}, "normal", 0)


def wrap(arrays: dict[str, np.ndarray]) -> Inputs:
    names = {"u2": "bf16", "u1": "e4m3", "i8": "int64", "i4": "int32", "f4": "fp32"}
    return Inputs(arrays, {n: names[a.dtype.str[1:]] for n, a in arrays.items()})


# --- a token-by-token simulation, written from the documented steps ---------------------------------------------


class World:
    """Inputs of all ranks, and what a correct dispatch returns in one of its legal orders."""

    def __init__(self, seed: int, *, tokens=(5, 0, 7, 3), experts=16, topk=3, alignment=4, fp8=False, weights=True,
                 ids=None, max_tokens=8, **variant: str) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.order = random.Random(seed)
        self.variant, self.experts, self.ranks, self.topk = variant, experts, len(tokens), topk
        self.local, self.a, self.max_tokens = experts // len(tokens), alignment, max_tokens
        self.ids = ids or [self._ids(rng, t) for t in tokens]
        code = "u1" if fp8 else "u2"
        self.x = [rng.integers(0, 256 if fp8 else 65536, (len(i), HIDDEN)).astype(code) for i in self.ids]
        self.w = [rng.standard_normal((len(i), topk)).astype(np.float32) for i in self.ids] if weights else None
        self.sf = [rng.integers(0, 2**31, (len(i), 3)).astype(np.int32) for i in self.ids] if fp8 else None
        self.expanded = variant.get("layout") == "expanded"

    def _ids(self, rng: np.random.Generator, tokens: int) -> np.ndarray:
        rows = [rng.permutation(self.experts)[: self.topk] for _ in range(tokens)]
        ids = np.array(rows, np.int64).reshape(tokens, self.topk)
        ids[rng.random(ids.shape) < 0.3] = -1
        return ids

    def arrays(self, prefix: str = "dispatch/") -> dict[str, np.ndarray]:
        out = {}
        for name, arrays in (("x", self.x), ("topk_idx", self.ids), ("topk_weights", self.w), ("sf", self.sf)):
            out |= {f"{prefix}{name}@{r}": a for r, a in enumerate(arrays or [])}
        return out

    def expected(self, extra=None, oracle=ep.dispatch, prefix="dispatch/", profile=None):
        sizes = {"num_experts": self.experts, "num_max_tokens_per_rank": self.max_tokens, "expert_alignment": self.a}
        return oracle(problem(sizes, **self.variant), wrap(self.arrays(prefix) | (extra or {})), profile or {})

    def routed(self, rank: int) -> list[tuple[int, int]]:
        """(source, token) of every row of a rank, ascending."""
        return [(s, t) for s, ids in enumerate(self.ids) for t, row in enumerate(ids.tolist())
                if any(e >= 0 and e // self.local == rank for e in row)]  # fmt: skip

    def placed(self, rank: int) -> list[tuple[int, int, int] | None]:
        """(source, token, lane) of every row of the result, None for a free one; lane -1 in the normal layout."""
        shuffle = (lambda rows: None) if self.variant.get("deterministic") == "yes" else self.order.shuffle
        rows: list[tuple[int, int, int] | None] = []
        if not self.expanded:
            for s in range(self.ranks):
                group = [(s, t, -1) for source, t in self.routed(rank) if source == s]
                shuffle(group)
                rows += group
            capacity = len(rows) if self.variant.get("sync", "yes") == "yes" else self.ranks * self.max_tokens
            return rows + [None] * (capacity - len(rows))
        for e in range(rank * self.local, (rank + 1) * self.local):
            group = [(s, t, k) for s, t in self.routed(rank) for k in range(self.topk) if self.ids[s][t, k] == e]
            shuffle(group)
            rows += group + [None] * (-len(group) % self.a)
        if self.variant.get("sync", "yes") == "no":
            lanes = min(self.topk, self.local)
            capacity = -(-(self.ranks * self.max_tokens * lanes + (self.a - 1) * self.local) // self.a) * self.a
            rows += [None] * (capacity - len(rows))
        return rows

    def result(self, rank: int, rows=None, prefix: str = "dispatch/", source: World | None = None, fill=POISON):
        """Outputs of a rank for given placed rows."""
        rows = self.placed(rank) if rows is None else rows
        world = source or self
        total = len(rows)
        out: dict[str, np.ndarray] = {"recv_x": np.full((total, HIDDEN), fill).astype(self.x[0].dtype)}
        if world.sf:
            out["recv_sf"] = np.full((total, 3), fill, np.int32)
        if not self.expanded:
            out["recv_topk_idx"] = np.full((total, self.topk), fill, np.int64)
        if world.w:
            out["recv_topk_weights"] = np.full(total if self.expanded else (total, self.topk), fill, np.float32)
        for i, row in enumerate(rows):
            if row is None:
                continue
            s, t, k = row
            out["recv_x"][i] = world.x[s][t]
            if world.sf:
                out["recv_sf"][i] = world.sf[s][t]
            if world.w:
                out["recv_topk_weights"][i] = world.w[s][t, k] if self.expanded else world.w[s][t]
            if not self.expanded:
                out["recv_topk_idx"][i] = [e - rank * self.local if e >= 0 and e // self.local == rank else -1
                                           for e in self.ids[s][t].tolist()]  # fmt: skip
        return {f"{prefix}{n}@{rank}": a for n, a in out.items()}


def joints(expected) -> list[Joint]:
    return [e for e in expected.values() if isinstance(e, Joint)]


def verdicts(expected, got: dict[str, np.ndarray]) -> dict[str, str]:
    """Reason of each output that fails."""
    failed = {}
    for key, e in expected.items():
        if isinstance(e, Joint):
            if not set(key) <= set(got):
                continue
            judged = e.check({n: got[n] for n in key})
            for n, j in judged.items():
                assert j.bad.shape == e.shapes[n] == got[n].shape, n
                if not j.ok:
                    failed[n] = j.reason
        elif key in got:
            fmt = {"u2": "bf16", "f4": "fp32", "i4": "int32", "i8": "int64"}[got[key].dtype.str[1:]]
            assert e.shape == got[key].shape, key
            j = e.judge(got[key], fmt)
            if not j.ok:
                failed[key] = j.reason
    return failed


LAYOUTS = [
    {},
    {"sync": "no"},
    {"deterministic": "yes"},
    {"layout": "expanded"},
    {"layout": "expanded", "sync": "no", "zero_padding": "yes"},
    {"layout": "expanded", "deterministic": "yes"},
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fp8", [False, True])
def test_every_legal_order_passes(layout, fp8):
    for seed in range(6):
        world = World(seed, fp8=fp8, weights=seed % 3 > 0, topk=1 + seed % 4, experts=8, **layout)
        e = world.expected()
        assert len(joints(e)) == 4
        for _ in range(3):
            for rank in range(4):
                got = world.result(rank, fill=0 if layout.get("zero_padding") else POISON)
                assert set(got) in [set(k) for k in e]
                assert verdicts(e, got) == {}


def test_all_orders_of_a_small_group_are_tried():
    world = World(0, tokens=(3, 2), experts=2, topk=1, ids=[np.zeros((3, 1), np.int64), np.zeros((2, 1), np.int64)])
    e = world.expected()
    legal = 0
    for rows in itertools.permutations([(0, 0, -1), (0, 1, -1), (0, 2, -1), (1, 0, -1), (1, 1, -1)]):
        ok = verdicts(e, world.result(0, list(rows))) == {}
        assert ok is all(row[0] == 0 for row in rows[:3])
        legal += ok
    assert legal == 12
    assert joints(e)[1].shapes["dispatch/recv_x@1"] == (0, HIDDEN)
    assert verdicts(e, world.result(1)) == {}


def test_the_documented_small_example():
    ids = [np.array([[0, 3], [2, -1]]), np.array([[1, 0]])]
    normal = World(1, tokens=(2, 1), experts=4, topk=2, max_tokens=3, ids=ids, handle="yes")
    e = normal.expected()
    routing = Routing((ids[0], ids[1]), 4)
    assert [list(zip(r.source, r.token, strict=True)) for r in routing.received] == [[(0, 0), (1, 0)], [(0, 0), (0, 1)]]
    assert [r.local.tolist() for r in routing.received] == [[[0, -1], [1, 0]], [[-1, 1], [0, -1]]]
    rows = {
        "psum_num_recv_tokens_per_scaleup_rank": ([1, 2], [2, 2]),
        "num_unaligned_recv_tokens_per_expert": ([2, 1], [1, 1]),
        "num_recv_tokens_per_expert_list": ([4, 4], [4, 4]),
        "psum_num_recv_tokens_per_expert": ([4, 8], [4, 8]),
    }
    for name, both in rows.items():
        assert tuple(e[f"handle/{name}@{r}"].codes.tolist() for r in (0, 1)) == both
    expanded = World(1, tokens=(2, 1), experts=4, topk=2, max_tokens=3, ids=ids, handle="yes", layout="expanded")
    e = expanded.expected()
    assert [e[f"handle/psum_num_recv_tokens_per_expert@{r}"].codes.tolist() for r in (0, 1)] == [[2, 5], [1, 5]]
    assert [j.shapes[f"dispatch/recv_x@{r}"][0] for r, j in enumerate(joints(e))] == [8, 8]
    assert [r.slots(4).tolist() for r in routing.received] == [[[0, -1], [4, 1]], [[-1, 4], [0, -1]]]
    unsynced = [World(1, tokens=(2, 1), experts=4, topk=2, max_tokens=3, ids=ids, sync="no", layout=x).expected()
                for x in ("normal", "expanded")]  # fmt: skip
    assert [joints(u)[0].shapes["dispatch/recv_x@0"][0] for u in unsynced] == [6, 20]
    assert normal.expected(oracle=lambda p, inputs, _: ep.result_rows(p, inputs)) == [2, 2]
    assert expanded.expected(oracle=lambda p, inputs, _: ep.result_rows(p, inputs)) == [8, 8]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_identities_of_any_routing(layout):
    for seed in range(5):
        world = World(seed, **layout)
        routing = Routing(tuple(world.ids), world.experts)
        owners = sum(len({e // world.local for e in row if e >= 0}) for ids in world.ids for row in ids.tolist())
        assert sum(len(r.source) for r in routing.received) == owners
        assert sum(r.per_expert.sum() for r in routing.received) == sum((i >= 0).sum() for i in world.ids)
        for rank, r in enumerate(routing.received):
            assert list(zip(r.source, r.token, strict=True)) == world.routed(rank)


# --- wrong dispatches -----------------------------------------------------------------------------------------


def of(got, name: str) -> np.ndarray:
    return next(a for n, a in got.items() if n.split("/")[-1].startswith(name + "@"))


def flip_bit(got):
    of(got, "recv_x")[1, 5] ^= 1


def nan_to_zero(got):
    of(got, "recv_x")[2, 3] = 0


def lose_one(got):
    for a in got.values():
        a.view(np.uint8).reshape(len(a), -1)[2] = 0xA5


def copy_over(got):
    for a in got.values():
        a[1] = a[0]


def stale_payload(got):
    of(got, "recv_x")[1] = of(got, "recv_x")[0]


def swap_sources(got):
    for a in got.values():
        a[[0, -1]] = a[[-1, 0]]


def swap_in_group(got):
    for a in got.values():
        a[[0, 1]] = a[[1, 0]]


def global_ids(got):
    ids = of(got, "recv_topk_idx")
    ids[ids >= 0] += 8


def id_of_other_expert(got):
    ids = of(got, "recv_topk_idx")
    ids[0] = np.where(ids[0] >= 0, (ids[0] + 1) % 4, -1)


def mask_an_id(got):
    of(got, "recv_topk_idx")[0] = -1


def reverse_weights(got):
    w = of(got, "recv_topk_weights")
    w[:] = w[:, ::-1].copy()


def neighbour_scales(got):
    sf = of(got, "recv_sf")
    sf[:] = np.roll(sf, 1, axis=0)


def weights_of_another_row(got):
    w = of(got, "recv_topk_weights")
    w[[0, 1]] = w[[1, 0]]


WRONG = [
    # change, layout, outputs that fail, reason
    (flip_bit, {}, {"recv_x"}, "numeric"),
    (nan_to_zero, {}, {"recv_x"}, "numeric"),
    (lose_one, {}, {"recv_x", "recv_topk_idx", "recv_topk_weights", "recv_sf"}, "token_lost"),
    (copy_over, {}, {"recv_x", "recv_topk_idx", "recv_topk_weights", "recv_sf"}, "token_duplicated"),
    (stale_payload, {}, {"recv_x"}, "token_lost"),
    (swap_sources, {}, {"recv_x", "recv_topk_idx", "recv_topk_weights", "recv_sf"}, "order"),
    (swap_in_group, {"deterministic": "yes"}, {"recv_x", "recv_topk_idx", "recv_topk_weights", "recv_sf"}, "order"),
    (global_ids, {}, {"recv_topk_idx"}, "index_range"),
    (id_of_other_expert, {}, {"recv_topk_idx"}, "numeric"),
    (mask_an_id, {}, {"recv_topk_idx"}, "numeric"),
    (reverse_weights, {}, {"recv_topk_weights"}, "numeric"),
    (weights_of_another_row, {}, {"recv_topk_weights"}, "numeric"),
    (neighbour_scales, {}, {"recv_sf"}, "numeric"),
    (flip_bit, {"layout": "expanded"}, {"recv_x"}, "numeric"),
    (swap_sources, {"layout": "expanded", "alignment": 1}, {"recv_x", "recv_topk_weights", "recv_sf"}, "order"),
    (weights_of_another_row, {"layout": "expanded"}, {"recv_topk_weights"}, "numeric"),
]


@pytest.mark.parametrize(("change", "layout", "shown", "reason"), WRONG)
def test_each_wrong_dispatch_is_named(change, layout, shown, reason):
    layout = dict(layout)
    alignment = layout.pop("alignment", 4)
    world = World(3, tokens=(8, 8, 8, 8), fp8=True, alignment=alignment, **layout)
    e = world.expected()
    got = world.result(2)
    assert verdicts(e, got) == {}
    change(got)
    failed = verdicts(e, got)
    assert "recv_x" not in shown or "dispatch/recv_x@2" in failed
    assert {n.split("/")[1].split("@")[0] for n in failed} <= shown
    assert set(failed.values()) == {reason}


def test_a_damaged_element_alone_is_bad():
    world = World(4, tokens=(6, 6, 6, 6))
    e, got = world.expected(), world.result(0)
    of(got, "recv_x")[3, 7] ^= 0x8000
    judged = joints(e)[0].check(got)["dispatch/recv_x@0"]
    assert np.argwhere(judged.bad).tolist() == [[3, 7]]
    assert judged.expected[3, 7] == of(got, "recv_x")[3, 7] ^ 0x8000


def test_losses_and_copies_behind_a_fixed_capacity():
    """sync=no: what follows a lost row moves up, what follows a copied row moves down."""
    world = World(5, tokens=(6, 6, 6, 6), sync="no")
    e = world.expected()
    rows = world.placed(1)
    n = len(world.routed(1))
    lost = [*rows[:2], *rows[3:n], None, *rows[n:]]
    twice = [*rows[:3], rows[2], *rows[3:-1]]
    assert set(verdicts(e, world.result(1, lost)).values()) == {"token_lost"}
    assert set(verdicts(e, world.result(1, twice)).values()) == {"token_duplicated"}
    strangers = [st for s in range(4) for st in ((s, t, -1) for t in range(6)) if st[:2] not in world.routed(1)]
    foreign = [strangers[0], *rows[1:]]
    assert verdicts(e, world.result(1, foreign))["dispatch/recv_x@1"] == "token_duplicated"
    behind = world.result(1)
    of(behind, "recv_x")[n:] = 0
    assert verdicts(e, behind) == {}, "rows behind the last are free"


def test_experts_packed_without_alignment_are_an_order_fault():
    world = World(6, tokens=(6, 6, 6, 6), layout="expanded")
    e = world.expected()
    rows = world.placed(1)
    packed = [r for r in rows if r is not None]
    packed += [None] * (len(rows) - len(packed))
    assert packed != rows
    assert verdicts(e, world.result(1, packed))["dispatch/recv_x@1"] == "order"


def test_padding():
    world = World(7, layout="expanded", zero_padding="yes")
    e = world.expected()
    got = world.result(3, fill=0)
    assert verdicts(e, got) == {}
    gap = world.result(3, rows := world.placed(3), fill=0)
    of(gap, "recv_x")[rows.index(None)] = of(gap, "recv_x")[0]
    assert verdicts(e, gap) == {"dispatch/recv_x@3": "numeric"}
    free = World(7, layout="expanded")
    assert verdicts(free.expected(), free.result(3, fill=POISON)) == {}


def test_payload_bits_survive():
    world = World(8, tokens=(4, 4, 4, 4))
    for x in world.x:
        x[:] = [0x7FC1, 0xFF81, 0x8000, 0x0001] * 8
    e, got = world.expected(), world.result(0)
    assert verdicts(e, got) == {}, "equal payloads are told apart by what travels with them"
    for quiet in (0x7FC0, 0xFFC1, 0x0000):
        bad = world.result(0)
        of(bad, "recv_x")[0, {0x7FC0: 0, 0xFFC1: 1, 0x0000: 2}[quiet]] = quiet
        assert verdicts(e, bad) == {"dispatch/recv_x@0": "numeric"}


def test_foreign_weights_by_profile():
    world = World(9, tokens=(6, 6, 6, 6))
    got = world.result(1)
    zeroed = {n: a.copy() for n, a in got.items()}
    w = of(zeroed, "recv_topk_weights")
    w[of(zeroed, "recv_topk_idx") < 0] = 0
    assert verdicts(world.expected(), zeroed) == {"dispatch/recv_topk_weights@1": "numeric"}
    assert verdicts(world.expected(profile={"foreign_weights": "zero"}), zeroed) == {}
    assert verdicts(world.expected(profile={"foreign_weights": "zero"}), got) != {}


def test_cached_call_repeats_the_placement():
    world = World(10, tokens=(6, 6, 6, 6), handle="yes")
    second = World(11, tokens=(6, 6, 6, 6), ids=world.ids)
    extra = {f"cached/x@{r}": x for r, x in enumerate(second.x)}
    extra |= {f"cached/topk_weights@{r}": x for r, x in enumerate(second.w)}
    e = world.expected(extra)
    rows = world.placed(0)
    first = world.result(0, rows)
    again = world.result(0, rows, "cached/", second)
    assert verdicts(e, first | again) == {}
    stale = again | {"cached/recv_x@0": first["dispatch/recv_x@0"]}
    assert verdicts(e, first | stale) == {"cached/recv_x@0": "token_lost"}
    moved = {n: a[::-1].copy() for n, a in again.items()}
    failed = verdicts(e, first | moved)
    assert failed["cached/recv_x@0"] == "order"
    assert "dispatch/recv_x@0" not in failed
    assert e["handle_again/psum_num_recv_tokens_per_expert@0"].reason == "contract"


def test_statistics_are_added_to():
    world = World(12)
    stats = {f"dispatch/cumulative_local_expert_recv_stats@{r}": np.arange(4, dtype=np.int32) for r in range(4)}
    e = world.expected(stats)
    for r in range(4):
        real = [sum(int((ids == r * 4 + x).sum()) for ids in world.ids) for x in range(4)]
        key = f"dispatch/cumulative_local_expert_recv_stats@{r}"
        assert isinstance(e[key], Exact)
        assert e[key].codes.tolist() == [x + n for x, n in enumerate(real)]


def test_a_call_outside_a_sequence_and_empty_worlds():
    world = World(13)
    e = world.expected(prefix="")
    assert verdicts(e, world.result(2, prefix="")) == {}
    nobody = World(14, tokens=(0, 0), experts=4)
    for layout in LAYOUTS:
        nobody.variant, nobody.expanded = layout, layout.get("layout") == "expanded"
        e = nobody.expected()
        assert verdicts(e, nobody.result(0, fill=0)) == {}


# --- combine --------------------------------------------------------------------------------------------------


def values(rng, shape, kind: str) -> np.ndarray:
    x = rng.standard_normal(shape)
    if kind == "integers":
        x = rng.integers(-4, 5, shape).astype(np.float64)
    elif kind == "cancel":
        x = x * np.where(rng.random(shape) < 0.5, -1, 1) * 100
    elif kind == "subnormal":
        x = x * 2.0**-130
    return codec.encode(x, "bf16")


def bf16(x: np.ndarray) -> np.ndarray:
    return codec.round_to(x.astype(np.float64), "bf16").astype(np.float32)


class Combine:
    """Combine of a deterministic dispatch, so that rows of any content may be handed in."""

    def __init__(self, seed: int, kind="normal", *, biases=0, identity=False, topk=4, **variant: str) -> None:
        rng = np.random.default_rng(seed)
        self.world = World(seed, topk=topk, deterministic="yes", **variant)
        w = self.world
        for r, x in enumerate(w.x):
            w.x[r] = values(rng, x.shape, kind)
        self.rows = [w.placed(r) for r in range(4)]
        self.y = [values(rng, (len(rows), HIDDEN), kind) for rows in self.rows]
        if identity:
            self.y = [of(w.result(r, rows), "recv_x") for r, rows in enumerate(self.rows)]
        self.bias = [[values(rng, (len(i), HIDDEN), kind) for i in w.ids] for _ in range(biases)]
        self.extra = {} if identity else {f"combine/x@{r}": y for r, y in enumerate(self.y)}
        for b, arrays in enumerate(self.bias):
            name = "bias" if biases == 1 else f"bias_{b}"
            self.extra |= {f"combine/{name}@{r}": a for r, a in enumerate(arrays)}

    def expected(self, profile=None):
        return self.world.expected(self.extra, oracle=ep.combine, profile=profile)

    def run(self, *, lanes="forward", staged=False, fault="", acc=None, biases=None):
        """Sum of every token by plain loops in single precision."""
        w = self.world
        keep = acc or (lambda v: v)
        got = {}
        for s, ids in enumerate(w.ids):
            out = np.zeros((len(ids), HIDDEN), np.float32)
            for t in range(len(ids)):
                groups = []
                for r in range(4):
                    mine = [i for i, row in enumerate(self.rows[r]) if row is not None and row[:2] == (s, t)]
                    if fault == "lose_last" and r == max(e // w.local for e in ids[t].tolist()):
                        mine = mine[:-1]
                    scale = w.w[s][t, 0] if fault == "weighted" else np.float32(1)
                    groups.append([codec.decode(self.y[r][i], "bf16").astype(np.float32) * scale for i in mine])
                if staged:
                    groups = [[bf16(sum(g[1:], g[0]))] if len(g) > 1 else g for g in groups]
                terms = [row for g in groups for row in g]
                terms = terms[::-1] if lanes == "reverse" else terms
                start = [codec.decode(b[s][t], "bf16").astype(np.float32) for b in self.bias[:biases]]
                total = np.zeros(HIDDEN, np.float32)
                with np.errstate(invalid="ignore", over="ignore"):
                    for row in start + terms:
                        total = keep(total + row)
                if fault == "double_rounding" and start:
                    total = bf16(sum(terms, np.zeros(HIDDEN, np.float32))) + start[0]
                out[t] = total
            if fault == "truncate":
                codes = (out.view(np.uint32) >> 16).astype(np.uint16)
            else:
                with np.errstate(over="ignore"):
                    codes = codec.encode(out.astype(np.float64), "bf16")
            got[f"combine/combined_x@{s}"] = codes
        return got


@pytest.mark.parametrize("kind", ["normal", "integers", "cancel", "subnormal"])
@pytest.mark.parametrize("layout", [{}, {"layout": "expanded"}, {"layout": "expanded", "reduction": "single"}])
def test_combine_passes_every_order_and_the_staged_recipe(kind, layout):
    for seed, biases in ((0, 0), (1, 1), (2, 2)):
        c = Combine(seed, kind, biases=biases, **layout)
        e = c.expected()
        for lanes in ("forward", "reverse"):
            assert verdicts(e, c.run(lanes=lanes)) == {}
        if layout.get("layout") and kind == "normal":
            failed = verdicts(e, c.run(staged=True))
            assert bool(failed) is (layout.get("reduction") == "single"), "the owner may round, unless it may not sum"


@pytest.mark.parametrize("layout", [{}, {"layout": "expanded"}])
def test_identity_experts_multiply_by_owners_or_by_lanes(layout):
    c = Combine(3, "integers", identity=True, **layout)
    e = c.expected()
    for s, ids in enumerate(c.world.ids):
        x = codec.decode(c.world.x[s], "bf16")
        for t, row in enumerate(ids.tolist()):
            owners = {v // c.world.local for v in row if v >= 0}
            times = sum(v >= 0 for v in row) if layout else len(owners)
            assert (e[f"combine/combined_x@{s}"].value[t] == times * x[t]).all()
            assert (e[f"combine/combined_x@{s}"].bound[t] == 0).all(), "small integers are exact"
    assert verdicts(e, c.run()) == {}


@pytest.mark.parametrize(
    ("fault", "kw"),
    [
        ("lose_last", {"fault": "lose_last"}),
        ("weighted", {"fault": "weighted"}),
        ("truncate", {"fault": "truncate"}),
        ("bf16 accumulator", {"acc": bf16}),
        ("no bias", {"biases": 0}),
        ("one of two biases", {"biases": 1}),
    ],
)
@pytest.mark.parametrize("layout", [{}, {"layout": "expanded", "reduction": "single"}])
def test_wrong_sums_fail(fault, kw, layout):
    c = Combine(4, "normal", biases=2, topk=6, **layout)
    e = c.expected()
    assert verdicts(e, c.run()) == {}
    failed = verdicts(e, c.run(**kw))
    assert failed, fault
    assert set(failed.values()) == {"numeric"}


def test_bias_added_after_rounding_fails():
    c = Combine(5, "cancel", biases=1, topk=6)
    assert verdicts(c.expected(), c.run(fault="double_rounding"))


def test_combine_specials_and_empty_tokens():
    c = Combine(6, "normal", identity=True)
    w = c.world
    w.ids[0][0] = -1
    w.x[0][1, :4] = [0x7F80, 0xFF80, 0x7FC0, 0x8000]
    c.rows = [w.placed(r) for r in range(4)]
    c.y = [of(w.result(r, rows), "recv_x") for r, rows in enumerate(c.rows)]
    e, got = c.expected(), c.run()
    assert verdicts(e, got) == {}
    key = "combine/combined_x@0"
    assert (got[key][0] == 0).all()
    for element, wrong in (((0, 5), 1), ((0, 5), 0x7FC0), ((1, 0), 0x7F7F), ((1, 0), 0xFF80), ((1, 2), 0x7F80)):
        bad = {key: got[key].copy()}
        bad[key][element] = wrong
        assert verdicts(e, bad) in ({key: "numeric"}, {key: "nonfinite"})
    zeros = {key: got[key].copy()}
    zeros[key][0] = 0x8000
    assert verdicts(e, zeros) == {}, "the sign of a zero is free"


def test_combined_weights_come_home_exactly():
    for layout in ({}, {"layout": "expanded"}):
        c = Combine(7, **layout)
        w = c.world
        want = {f"combine/combined_topk_weights@{s}": np.where(ids >= 0, w.w[s], np.float32(0))
                for s, ids in enumerate(w.ids)}  # fmt: skip
        assert verdicts(c.expected(), want) == {}
        for name in [n for n, a in want.items() if (a != 0).any()]:
            bad = want[name].copy()
            bad[tuple(np.argwhere(bad != 0)[0])] *= 1 + 2.0**-22
            assert verdicts(c.expected(), {name: bad}) == {name: "numeric"}
        given = {f"combine/topk_weights@{r}": np.arange(len(rows) * (1 if w.expanded else w.topk), dtype=np.float32)
                 .reshape((-1,) if w.expanded else (-1, w.topk)) for r, rows in enumerate(c.rows)}  # fmt: skip
        c.extra |= given
        home = {n: np.zeros_like(a) for n, a in want.items()}
        for r, rows in enumerate(c.rows):
            for i, row in enumerate(rows):
                for k in [] if row is None else range(w.topk):
                    s, t, lane = row
                    if w.ids[s][t, k] >= 0 and w.ids[s][t, k] // w.local == r and lane in (-1, k):
                        value = given[f"combine/topk_weights@{r}"][i]
                        home[f"combine/combined_topk_weights@{s}"][t, k] = value if w.expanded else value[k]
        assert verdicts(c.expected(), home) == {}
        assert verdicts(c.expected(), want) != {}


def test_declared_hops_and_overflow():
    c = Combine(8, "normal")
    plain, hop = (c.expected(p)["combine/combined_x@0"].bound for p in (None, {"hops": ("bf16",)}))
    assert (hop >= plain).all()
    assert (hop > plain).any()
    big = Combine(9, "normal", identity=True)
    for x in big.world.x:
        x[:, 0] = 0x7F7F
    assert big.expected()["combine/combined_x@2"].unspecified[:, 0].any()
    assert not big.expected()["combine/combined_x@2"].unspecified[:, 1:].any()
