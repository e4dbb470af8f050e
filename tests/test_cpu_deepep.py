"""The cpu backend's DeepEP between real processes, against a plain NumPy account of who gets what.

The ranks are forked from a process of this file's own, which has one thread and
has imported torch: it reads a job a line and answers when all ranks have ended.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from adapters.cpu import deepep  # noqa: E402
from adapters.cpu.deepep import Adapter  # noqa: E402
from adapters.cpu.kernels import ep_combine, ep_dispatch  # noqa: E402
from adapters.cpu.kernels.knobs import Knobs  # noqa: E402
from conformance.catalogue.load import read_toml  # noqa: E402
from conformance.protocol import Group  # noqa: E402

TABLE = read_toml(ROOT / "cases/deepep/faults.toml")
COUNTS = ["psum_num_recv_tokens_per_scaleup_rank", "psum_num_recv_tokens_per_expert",
          "num_unaligned_recv_tokens_per_expert", "num_recv_tokens_per_expert_list"]
U = 2.0**-8
STATS_BEFORE = 7


# ---- the problem and what the contract says of it (NumPy only) -----------------------------------------------------


def round_bf16(x: np.ndarray) -> np.ndarray:
    """Codes of finite fp32 values, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def real(codes: np.ndarray) -> np.ndarray:
    return (codes.astype(np.uint32) << 16).view(np.float32)


class World:
    """All ranks' inputs. Rank 0 has no tokens, rank 1 as many as declared."""

    def __init__(self, seed: int = 1, tokens: tuple[int, ...] = (0, 8, 7, 3), experts: int = 16, topk: int = 3,
                 hidden: int = 256, max_tokens: int = 8, align: int = 4) -> None:
        rng = np.random.default_rng(seed)
        self.tokens, self.experts, self.topk, self.hidden = tokens, experts, topk, hidden
        self.max_tokens, self.align, self.size = max_tokens, align, len(tokens)
        self.local = experts // self.size
        self.ids = [np.array([rng.permutation(experts)[:topk] for _ in range(t)], np.int64).reshape(t, topk)
                    for t in tokens]
        for ids in self.ids:
            ids[rng.random(ids.shape) < 0.25] = -1
        self.weights = [rng.random((t, topk), np.float32) for t in tokens]
        self.x = [round_bf16(rng.standard_normal((t, hidden))) for t in tokens]
        self.x2 = [round_bf16(rng.standard_normal((t, hidden))) for t in tokens]
        for s, x in enumerate(self.x2):  # bit patterns that only a byte copy keeps
            x[:, 3:9] = [0x7FC1, 0xFF81, 0x8000, 0x0001, 0x807F, 0x7F80]
            x[:, 0] = s * max_tokens + np.arange(len(x))
        self.f8 = [rng.integers(0, 256, (t, hidden), np.uint8) for t in tokens]
        self.sf = [rng.integers(1, 2**30, (t, 3), np.int32) for t in tokens]
        self.bias = [np.stack([-x, round_bf16(real(x) * 0.011)]) if len(x) else np.zeros((2, 0, hidden), np.uint16)
                     for x in map(self._cancel, range(self.size))]

    def _cancel(self, s: int) -> np.ndarray:
        """What nearly equals the normal sum: a bias of the opposite sign shows every rounding before it."""
        return round_bf16(self.terms(s, expanded=False)[0].sum(1)) if self.tokens[s] else self.x[s]

    def scale(self, rank: int, expert: int | None) -> float:
        """What a rank (normal) or an expert (expanded) multiplies a row by."""
        return 1 + rank / 8 if expert is None else 1 + expert / 16

    def terms(self, s: int, *, expanded: bool) -> tuple[np.ndarray, np.ndarray]:
        """float64 [T, K, H] of what is summed for each lane, and the owner rank of each lane (-1 where masked)."""
        ids = self.ids[s]
        owner = np.where(ids < 0, -1, ids // self.local)
        out = np.zeros((*ids.shape, self.hidden))
        for t, k in np.argwhere(ids >= 0):
            if expanded or not (owner[t, k + 1:] == owner[t, k]).any():
                c = np.float32(self.scale(owner[t, k], ids[t, k] if expanded else None))
                out[t, k] = real(round_bf16(real(self.x[s][t]) * c))
        return out, owner

    def sent_to(self, r: int) -> list[tuple[int, int]]:
        return [(s, t) for s in range(self.size) for t in range(self.tokens[s])
                if any(i >= 0 and i // self.local == r for i in self.ids[s][t])]

    def local_ids(self, r: int, s: int, t: int) -> list[int]:
        return [int(i) - r * self.local if i >= 0 and i // self.local == r else -1 for i in self.ids[s][t]]

    def slots(self, r: int) -> list[list[tuple[int, int, int]]]:
        """For every local expert the (source, token, lane) that want it."""
        rows: list[list[tuple[int, int, int]]] = [[] for _ in range(self.local)]
        for s, t in self.sent_to(r):
            for k, e in enumerate(self.local_ids(r, s, t)):
                if e >= 0:
                    rows[e].append((s, t, k))
        return rows

    def starts(self, r: int) -> np.ndarray:
        n = np.array([len(v) for v in self.slots(r)])
        return np.concatenate([[0], np.cumsum(-(-n // self.align) * self.align)])


def account(got: dict, w: World, r: int) -> set[str]:
    """Reasons (of the closed list) why what rank r returned is not what the contract allows."""
    bad: set[str] = set()
    slots, starts = w.slots(r), w.starts(r)
    n = np.array([len(v) for v in slots])
    source_psum = np.cumsum([sum(s == q for s, _ in w.sent_to(r)) for q in range(w.size)])
    psum = {"normal": starts[1:], "expanded": starts[:-1] + n}
    for name, g in got.items():
        if name.startswith("combine"):
            bad |= wrong_sums(g, w, r, expanded="expanded" in name, by_owner=name == "combine_expanded")
            continue
        expanded = g["expanded"]
        listed = [] if name == "nosync" else np.diff(starts).tolist()
        for have, want in zip(g["counts"], (source_psum, psum["expanded" if expanded else "normal"], n, listed),
                              strict=True):
            if not np.array_equal(have, want):
                bad.add("contract" if name == "after_replay" else "numeric")
        if "stats" in g and not np.array_equal(g["stats"], n + STATS_BEFORE):
            bad.add("numeric")
        if "x" in g:
            bad |= wrong_rows(g, w, r, slots, starts)
    gaps = set(range(int(starts[-1]))) - {int(starts[e]) + i for e, v in enumerate(slots) for i in range(len(v))}
    for first, again, skip in (("normal", "cached", set()), ("expanded", "cached_expanded", gaps)):
        old, new = ([t for i, t in enumerate(decoded(got[k], w)) if i not in skip] for k in (first, again))
        if old != new:
            bad.add("order")
    return bad


def decoded(g: dict, w: World) -> list[tuple[int, int] | None]:
    """The token whose bytes each row has, or None."""
    payload = {"x": w.x, "x2": w.x2, "f8": w.f8}[g["data"]]
    where = {p[t].tobytes(): (s, t) for s, p in enumerate(payload) for t in range(len(p))}
    return [where.get(row.tobytes()) for row in g["x"]]


def wrong_rows(g: dict, w: World, r: int, slots: list, starts: np.ndarray) -> set[str]:
    bad, tokens = set(), decoded(g, w)
    if g["expanded"]:
        used = [int(starts[e]) + i for e, v in enumerate(slots) for i in range(len(v))]
        if len(tokens) != starts[-1]:
            bad.add("shape")
        have = [tokens[i] if i < len(tokens) else None for i in used]
        want = [(s, t) for v in slots for s, t, _ in v]
        parts = np.split(np.arange(len(used)), np.cumsum([len(v) for v in slots])[:-1])
        in_order = all([have[i] for i in p] == sorted(want[i] for i in p) for p in parts)
        grouped = all(Counter(have[i] for i in p) == Counter(want[i] for i in p) for p in parts)
        present = Counter(t for t in tokens if t) if not grouped else Counter(have)
    else:
        num_rows = int(g["counts"][0][-1])
        used, want = list(range(num_rows)), w.sent_to(r)
        have = tokens[:num_rows]
        grouped, present, in_order = True, Counter(have), have == sorted(want)
        sources = [t[0] for t in have if t]
        if sources != sorted(sources):
            bad.add("order")
        if len(g["x"]) != (w.size * w.max_tokens if g["capacity"] else num_rows):
            bad.add("shape")
    lost, extra = Counter(want) - present, present - Counter(want)
    if lost:
        bad.add("token_lost")
    if any(extra) and not g["expanded"]:
        bad.add("token_duplicated")
    if None in extra:
        bad.add("numeric")
    if not lost and (not grouped or (g["deterministic"] and not extra and not in_order)):
        bad.add("order")
    if bad & {"token_lost", "token_duplicated", "order", "numeric", "shape"}:
        return bad
    return bad | wrong_company(g, w, r, slots, used, have, starts)


def wrong_company(g: dict, w: World, r: int, slots: list, used: list, have: list, starts: np.ndarray) -> set[str]:
    """Reasons why what travels with right rows is wrong: scales, ids, weights, padding."""
    bad: set[str] = set()
    expert = [e for e, v in enumerate(slots) for _ in v]
    for i, (row, (s, t)) in enumerate(zip(used, have, strict=True)):
        mine = w.local_ids(r, s, t)
        if "sf" in g and not np.array_equal(g["sf"][row], w.sf[s][t]):
            bad.add("numeric")
        if g["expanded"]:
            if "weights" in g and g["weights"][row] != w.weights[s][t][mine.index(expert[i])]:
                bad.add("numeric")
            continue
        if not np.array_equal(g["idx"][row], mine):
            outside = (g["idx"][row] < -1) | (g["idx"][row] >= w.local)
            bad.add("index_range" if outside.any() else "numeric")
        if "weights" in g and not np.array_equal(g["weights"][row], w.weights[s][t]):
            bad.add("numeric")
    if "sf" in g and g["sf_strides"] != ([1, -(-len(g["x"]) // 4) * 4] if g["col_major"] else [3, 1]):
        bad.add("layout")
    if g["padded"]:
        gaps = sorted(set(range(int(starts[-1]))) - set(used))
        if any(g[key][gaps].any() for key in ("x", "sf", "weights")):
            bad.add("numeric")
    return bad


def wrong_sums(g: dict, w: World, s: int, *, expanded: bool, by_owner: bool) -> set[str]:
    terms, owner = w.terms(s, expanded=expanded)
    biases = real(w.bias[s]).astype(np.float64) if g["biased"] else np.zeros((2, *terms.shape[::2]))
    exact = terms.sum(1) + biases.sum(0)
    groups = np.zeros_like(exact)
    for q in range(w.size if by_owner else 0):
        lanes = owner == q
        groups += np.where(lanes.sum(1)[:, None] > 1, np.abs(np.where(lanes[:, :, None], terms, 0).sum(1)), 0)
    size = np.abs(terms).sum(1) + np.abs(biases).sum(0)
    bound = (U * np.abs(exact) + U * groups + (w.topk + 4) * 2.0**-24 * size) * (1 + 2.0**-7) + 2.0**-133
    wrong_x = g["x"].shape != exact.shape or not (np.abs(real(g["x"]) - exact) <= bound).all()
    home = np.where(w.ids[s] < 0, np.float32(0), w.weights[s])
    wrong_w = g["weights"] is not None and not np.array_equal(g["weights"], home)
    return {"numeric"} if wrong_x or wrong_w else set()


# ---- what one rank does --------------------------------------------------------------------------------------------


def bf16(codes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(codes.view(np.int16).copy()).view(torch.bfloat16)


def raw(t: torch.Tensor) -> np.ndarray:
    kind = {torch.bfloat16: (torch.int16, np.uint16), torch.float8_e4m3fn: (torch.uint8, np.uint8)}
    view, code = kind.get(t.dtype, (t.dtype, None))
    a = t.view(view).contiguous().numpy().copy()
    return a if code is None else a.view(code)


def seen(a: Adapter, got: tuple, data: str, *, expanded=False, padded=False, capacity=False, deterministic=False,
         col_major=False) -> dict:
    x, idx, weights, handle, _ = got
    out = {"data": data, "expanded": expanded, "padded": padded, "capacity": capacity, "deterministic": deterministic,
           "counts": [raw(t) for t in a.EPHandle__read(handle, COUNTS)]}
    if isinstance(x, tuple):
        x, sf = x
        out["sf"] = raw(sf.view(torch.int32))
        out.update(sf_strides=list(sf.stride()), col_major=col_major)
    out["x"] = raw(x)
    assert (idx is None) == expanded
    out.update({k: raw(v) for k, v in (("idx", idx), ("weights", weights)) if v is not None})
    return out


def battery(a: Adapter, w: World, r: int) -> dict:
    """Every mode of dispatch and combine once; what rank r got back."""
    ids, weights = torch.from_numpy(w.ids[r]), torch.from_numpy(w.weights[r])
    bias = tuple(map(bf16, w.bias[r]))
    x, x2 = bf16(w.x[r]), bf16(w.x2[r])
    sf = torch.from_numpy(np.asfortranarray(w.sf[r])).view(torch.float32)  # scales may have any strides
    f8 = torch.from_numpy(w.f8[r]).view(torch.float8_e4m3fn), sf
    routed = {"topk_idx": ids, "topk_weights": weights, "num_experts": w.experts, "expert_alignment": w.align}
    size = {"num_max_tokens_per_rank": w.max_tokens, "hidden": w.hidden, "num_topk": w.topk}
    buf, sorts = a.EPBuffer(**size), a.EPBuffer(**size, deterministic=True)
    lanes = a.EPBuffer(**size, allow_multiple_reduction=False)
    out: dict = {}

    stats = torch.full((w.local,), STATS_BEFORE, dtype=torch.int32)
    got = a.EPBuffer__dispatch(buf, x, cumulative_local_expert_recv_stats=stats, **routed)
    out["normal"] = {**seen(a, got, "x"), "stats": raw(stats)}
    y = (got[0].float() * w.scale(r, None)).bfloat16()
    home = a.EPBuffer__combine(buf, y, got[3], topk_weights=got[2], bias=bias)
    out["combine"] = {"x": raw(home[0]), "weights": raw(home[1]), "biased": True}
    again = a.EPBuffer__dispatch(buf, x2, handle=got[3])
    assert again[3] is got[3]
    out["cached"] = seen(a, again, "x2")
    out["after_replay"] = {"expanded": False, "counts": [raw(t) for t in a.EPHandle__read(got[3], COUNTS)]}

    got = a.EPBuffer__dispatch(buf, x, do_cpu_sync=False, **routed)
    out["nosync"] = seen(a, got, "x", capacity=True)
    y = torch.full(got[0].shape, float("nan"), dtype=torch.bfloat16)  # rows behind the last must not leak
    n = int(got[3].psum_num_recv_tokens_per_scaleup_rank[-1])
    y[:n] = (got[0][:n].float() * w.scale(r, None)).bfloat16()
    home = a.EPBuffer__combine(buf, y, got[3], topk_weights=got[2])
    out["combine_nosync"] = {"x": raw(home[0]), "weights": raw(home[1]), "biased": False}

    got = a.EPBuffer__dispatch(buf, x, do_expand=True, **routed)
    out["expanded"] = seen(a, got, "x", expanded=True)
    y = torch.full(got[0].shape, float("nan"), dtype=torch.bfloat16)  # gap rows neither
    starts = w.starts(r)
    for e, rows in enumerate(w.slots(r)):
        at = slice(int(starts[e]), int(starts[e]) + len(rows))
        y[at] = (got[0][at].float() * w.scale(r, r * w.local + e)).bfloat16()
    home = a.EPBuffer__combine(buf, y, got[3], topk_weights=got[2])
    out["combine_expanded"] = {"x": raw(home[0]), "weights": raw(home[1]), "biased": False}

    again = a.EPBuffer__dispatch(buf, x2, handle=got[3], topk_weights=weights)
    out["cached_expanded"] = seen(a, again, "x2", expanded=True)
    home = a.EPBuffer__combine(lanes, y, got[3])  # every lane's row goes home by itself
    assert home[1] is None
    out["combine_expanded_lanes"] = {"x": raw(home[0]), "weights": None, "biased": False}

    got = a.EPBuffer__dispatch(buf, f8, do_expand=True, do_zero_padding=True, **routed)
    out["fp8_expanded"] = seen(a, got, "f8", expanded=True, padded=True)
    got = a.EPBuffer__dispatch(buf, f8, use_tma_aligned_col_major_sf=True, **routed)
    out["fp8"] = seen(a, got, "f8", col_major=True)
    for name, expand in (("sorted", False), ("sorted_expanded", True)):
        got = a.EPBuffer__dispatch(sorts, x, do_expand=expand, **routed)
        out[name] = seen(a, got, "x", expanded=expand, deterministic=True)
    return out


def adapter(group: Group | None, knobs: str = "") -> Adapter:
    return Adapter(SimpleNamespace(group=group, knobs=Knobs.parse(knobs)))


def do_batteries(group: Group, knobs: list[str]) -> dict:
    return {k: battery(adapter(group, k), World(), group.rank) for k in knobs}


def do_micro(group: Group) -> dict:
    """The smallest routing with every feature: two experts on one rank, one masked id, unequal token counts."""
    a, r = adapter(group), group.rank
    ids = torch.tensor([[[0, 3], [2, -1]], [[1, 0]]][r])
    x = torch.full((len(ids), 256), 1.0).bfloat16() * (r + 1)
    buf = a.EPBuffer(num_bytes=2**21, num_max_tokens_per_rank=3, explicitly_destroy=True)
    out = {}
    for expand in (False, True):
        got = a.EPBuffer__dispatch(buf, x, topk_idx=ids, num_experts=4, expert_alignment=4, do_expand=expand)
        wide = a.EPBuffer__dispatch(buf, x, topk_idx=ids, num_experts=4, expert_alignment=4, do_expand=expand,
                                    do_cpu_sync=False)
        home = a.EPBuffer__combine(buf, torch.where(got[0].isfinite(), got[0], 0), got[3])
        assert got[2] is None
        assert home[1] is None
        out[expand] = {"counts": [raw(t).tolist() for t in a.EPHandle__read(got[3], COUNTS)],
                       "idx": None if expand else raw(got[1]).tolist(), "rows": (len(got[0]), len(wide[0])),
                       "sum": home[0][:, 0].float().tolist(), "meta": raw(got[3].recv_src_metadata).tolist()}
    a.EPBuffer__destroy(buf)
    return out


def do_hybrid(group: Group, knobs: str) -> dict:
    """Two nodes of two ranks: rows are grouped by the rank inside the node, sums are rounded a node."""
    a, w, r = adapter(group, knobs), World(seed=5, tokens=(3, 8, 7, 6), topk=6), group.rank
    buf = a.EPBuffer(num_max_tokens_per_rank=8, hidden=w.hidden, num_topk=w.topk)
    got = a.EPBuffer__dispatch(buf, bf16(w.x[r]), topk_idx=torch.from_numpy(w.ids[r]), num_experts=w.experts)
    y = (got[0].float() * w.scale(r, None)).bfloat16()
    source = raw(got[3].recv_src_metadata)[:, 0] // 8
    return {"domains": (buf.physical_domain, a.EPBuffer__get_logical_domain_size(buf, False)), "source": source,
            "psum": raw(got[3].psum_num_recv_tokens_per_scaleup_rank),
            "x": raw(a.EPBuffer__combine(buf, y, got[3])[0])}


def do_deferred(group: Group) -> dict:
    a, w, r = adapter(group), World(), group.rank
    buf = a.EPBuffer(num_max_tokens_per_rank=8, hidden=w.hidden, num_topk=w.topk)
    late = {"async_with_compute_stream": True, "defer_epilogue": True}
    kw = {"topk_idx": torch.from_numpy(w.ids[r]), "num_experts": w.experts}
    event = a.EPBuffer__dispatch(buf, bf16(w.x[r]), **kw, **late)
    x, idx, weights, handle = a.EventOverlap__wait(event)
    at_once = a.EPBuffer__dispatch(buf, bf16(w.x[r]), **kw)
    home = a.EPBuffer__combine(buf, x, handle, **late)
    combined, _ = a.EventOverlap__wait(home)
    return {"second": a.EventOverlap__wait(event), "same": torch.equal(x, at_once[0]) and torch.equal(idx, at_once[1]),
            "weights": weights, "combined": tuple(combined.shape), "sync": raises(AssertionError, at_once[4].wait)}


def raises(kind: type[Exception], call, *args, **kw) -> bool:
    try:
        call(*args, **kw)
    except kind:
        return True
    return False


def do_refusals(group: Group) -> dict:
    """Misuse by one rank or by all: every rank raises at once, and the group still works afterwards."""
    a, r = adapter(group), group.rank
    buf = a.EPBuffer(num_max_tokens_per_rank=4, hidden=256, num_topk=2)

    def dispatch(rows=2, ids=((0, 1), (2, 3)), hidden=256, max_tokens=None, experts=8, **kw):
        x = torch.zeros(rows, hidden).bfloat16()
        return a.EPBuffer__dispatch(buf, x, topk_idx=torch.tensor(ids)[:rows], num_experts=experts,
                                    num_max_tokens_per_rank=max_tokens, **kw)

    lone = r == 1
    misuse = {
        "too many tokens": {"rows": 5, "ids": [[0, 1]] * 5} if lone else {},
        "different maximum": {"max_tokens": 3 if lone else 4},
        "repeated id": {"ids": ((1, 1), (2, 3))} if lone else {},
        "id out of range": {"ids": ((0, 8), (2, 3))} if lone else {},
        "different layout": {"do_expand": lone},
        "padding without expansion": {"do_zero_padding": True},
        "row of 24 bytes": {"hidden": 12},
        "buffer too small": {"hidden": 2**18},
        "handle copy": {"do_handle_copy": True},
        "9 experts": {"experts": 9},
    }
    out = {name: raises((RuntimeError, AssertionError), dispatch, **kw) for name, kw in misuse.items()}
    ids = torch.tensor([[0, 1], [2, 3]])
    got = a.EPBuffer__dispatch(buf, torch.zeros(2, 256).bfloat16(), topk_idx=ids, num_experts=8)
    lanes = a.EPBuffer(num_max_tokens_per_rank=4, hidden=256, num_topk=2, allow_multiple_reduction=False)
    wide = a.EPBuffer__dispatch(lanes, torch.zeros(2, 256).bfloat16(), topk_idx=ids, num_experts=8, do_expand=True)
    out["weights of single lanes"] = raises(RuntimeError, a.EPBuffer__combine, lanes, *wide[::3],
                                            topk_weights=torch.ones(len(wide[0])))
    out["destroy"] = raises(AssertionError, a.EPBuffer__destroy, lanes)
    for name, x in (("combine of fp32", got[0].float()), ("rows missing", got[0][1:] if lone else got[0]),
                    ("hidden 128", got[0][:, :128].contiguous())):
        out[name] = raises(RuntimeError, a.EPBuffer__combine, buf, x, got[3])
    ids[0, 0] = 7
    out["ids edited"] = raises(AssertionError, a.EPBuffer__combine, buf, got[0], got[3])
    out["still works"] = len(dispatch()[0]) == (4 if r < 2 else 0)
    return out


# ---- the zygote ----------------------------------------------------------------------------------------------------


def be_rank(job: dict, rank: int) -> None:
    torch.set_num_threads(1)
    nodes = job.get("nodes") or [0] * job["size"]
    group = Group(rank, job["size"], rank, nodes[rank], job["folder"] + "/meet", 0, job["timeout_s"])
    started = time.monotonic()
    try:
        result = globals()["do_" + job["do"]](group, **job["kw"])
    except Exception as e:
        result = e
    done = (result, time.monotonic() - started)
    Path(job["folder"], f"rank{rank}").write_bytes(pickle.dumps(done))
    os._exit(isinstance(result, Exception))


def zygote() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        waiting = {}
        for rank in range(job["size"]):
            pid = os.fork()
            if not pid:
                be_rank(job, rank)
            waiting[pid] = rank
        deadline = time.monotonic() + 20
        while waiting:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                del waiting[pid]
                if status:  # the others get a moment to notice by themselves
                    deadline = min(deadline, time.monotonic() + job["grace_s"])
            elif time.monotonic() > deadline:
                for pid in waiting:
                    os.kill(pid, signal.SIGKILL)
                deadline = float("inf")
            else:
                time.sleep(0.002)
        print("done", flush=True)


class Ranks:
    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None

    def __call__(self, tmp_path: Path, do: str, *, size=4, nodes=None, timeout_s=10.0, grace_s=1.0, **kw) -> list:
        """(result or exception, seconds) of each rank; None for one that was killed."""
        if self.process is None:
            self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            text=True, cwd=ROOT)
        folder = tmp_path / f"group{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        job = {"do": do, "size": size, "nodes": nodes, "timeout_s": timeout_s, "grace_s": grace_s, "kw": kw,
               "folder": str(folder)}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"
        files = [folder / f"rank{r}" for r in range(size)]
        return [pickle.loads(f.read_bytes()) if f.exists() else None for f in files]


ranks = Ranks()


def results(answers: list) -> list:
    for answer in answers:
        assert answer is not None, "a rank was killed"
        if isinstance(answer[0], Exception):
            raise answer[0]
    return [a[0] for a in answers]


# ---- tests ---------------------------------------------------------------------------------------------------------


RAISING = [f for f in TABLE["fault"] if f["reason"] == "exception"]
SHOWING = [f for f in TABLE["fault"] if f["reason"] != "exception"]


def test_default_variants_and_faults(tmp_path):
    rows = [{"name": "default", "knobs": "", "reason": None}, *TABLE["variant"], *SHOWING]
    got = results(ranks(tmp_path, "batteries", knobs=[row["knobs"] for row in rows]))
    w = World()
    order = {k: decoded(v["normal"], w) for k, v in got[1].items()}
    assert order[""] == sorted(order[""]) != order["row_order=reverse"] != order["row_order=value"] != order[""]
    missed = {}
    for row in rows:
        found = set().union(*(account(got[r][row["knobs"]], w, r) for r in range(w.size)))
        want = row.get("reason") or ()
        wanted = {want} if isinstance(want, str) else set(want)
        if not wanted & found if wanted else found:
            missed[row["name"]] = found
    assert not missed


def test_raising_faults_reach_every_rank_at_once(tmp_path):
    for fault in RAISING:
        absent = fault["name"] == "empty_rank_absent"
        answers = ranks(tmp_path, "batteries", knobs=[fault["knobs"]], timeout_s=1.0, grace_s=3.0)
        for answer in answers:
            assert answer is not None, fault
            assert isinstance(answer[0], Exception), fault
            assert answer[1] < (3.0 if absent else 0.9), fault


def test_micro_example(tmp_path):
    zero, one = results(ranks(tmp_path, "micro", size=2))
    assert zero[False]["idx"] == [[0, -1], [1, 0]]
    assert sorted(one[False]["idx"]) == [[-1, 1], [0, -1]]
    assert zero[False]["counts"] == [[1, 2], [4, 8], [2, 1], [4, 4]]
    assert one[False]["counts"] == [[2, 2], [4, 8], [1, 1], [4, 4]]
    assert zero[True]["counts"][1] == [2, 5]
    assert one[True]["counts"][1] == [1, 5]
    assert zero[False]["rows"] == (2, 6)
    assert zero[True]["rows"] == one[True]["rows"] == (8, 20)
    assert (zero[False]["sum"], one[False]["sum"]) == ([2.0, 1.0], [2.0])
    assert (zero[True]["sum"], one[True]["sum"]) == ([2.0, 1.0], [4.0])
    assert [m[0] for m in zero[True]["meta"]] == [0, 3]
    assert sorted(slot for m in zero[True]["meta"] for slot in m[2:]) == [-1, 0, 1, 4]


def staged(w: World, s: int, *group_of, expanded: bool) -> np.ndarray:
    """Codes of the published recipe: FP32 sums in lane order, BF16 after each stage (one `group_of`) and at the end.

    group_of: owner rank to the group whose rows are summed; the sum takes the place of the group's last row.
    """
    terms, owner = w.terms(s, expanded=expanded)
    out = np.zeros((len(terms), w.hidden), np.float32)
    for t in range(len(terms)):
        items = [(int(o), terms[t, k].astype(np.float32)) for k, o in enumerate(owner[t])
                 if o >= 0 and (expanded or not (owner[t, k + 1:] == o).any())]
        for group in group_of:
            last = {group(o): i for i, (o, _) in enumerate(items)}
            items = [(items[i][0], real(round_bf16(sum(y for o, y in items if group(o) == g))))
                     for g, i in sorted(last.items(), key=lambda pair: pair[1])]
        for _, y in items:
            out[t] += y
    return round_bf16(out)


def test_owner_sums_in_bf16_are_the_published_recipe_bit_for_bit(tmp_path):
    got = results(ranks(tmp_path, "batteries", knobs=["partial=bf16"]))
    w = World()
    for r in range(w.size):
        assert np.array_equal(got[r]["partial=bf16"]["combine_expanded"]["x"], staged(w, r, lambda o: o, expanded=True))


def test_hybrid_groups_by_rank_in_node_and_sums_by_node(tmp_path):
    w = World(seed=5, tokens=(3, 8, 7, 6), topk=6)
    for r, got in enumerate(results(ranks(tmp_path, "hybrid", nodes=[0, 0, 1, 1], knobs="partial=bf16"))):
        assert got["domains"] == ((2, 2), (1, 4))
        in_node = got["source"] % 2
        assert (np.diff(in_node) >= 0).all()
        assert np.array_equal(got["psum"], np.cumsum([np.sum(in_node == q) for q in range(2)]))
        assert Counter(got["source"].tolist()) == Counter(s for s, _ in w.sent_to(r))
        assert np.array_equal(got["x"], staged(w, r, lambda o: o // 2, expanded=False))


def test_deferred_epilogue_runs_at_the_first_wait(tmp_path):
    for r, got in enumerate(results(ranks(tmp_path, "deferred"))):
        assert got == {"second": None, "same": True, "weights": None, "sync": True,
                       "combined": (World().tokens[r], 256)}


def test_refusals_reach_all_ranks_and_leave_the_group_usable(tmp_path):
    answers = ranks(tmp_path, "refusals")
    for got in results(answers):
        assert all(got.values()), got
    assert max(a[1] for a in answers) < 5.0


def test_a_lone_rank_needs_no_group():
    w = World(tokens=(5,))
    assert account(battery(adapter(None), w, 0), w, 0) == set()


def test_size_hint_covers_the_need_and_grows():
    a = adapter(None)
    small, large, lanes, full = (
        a.EPBuffer__get_buffer_size_hint(None, m, 7168, k, allow_multiple_reduction=merged)
        for m, k, merged in ((1, 8, True), (4096, 8, True), (4096, 8, False), (4096, 0, False)))
    assert small == 2**21 < large < lanes < full  # no top-k given: room for 32
    assert large % 2**21 == 0


def test_table_names_known_faults_and_checks():
    known = {**deepep.FAULTS, **ep_dispatch.FAULTS, **ep_combine.FAULTS}
    assert {Knobs.parse(f["knobs"]).fault for f in TABLE["fault"]} - {""} == set(known)
    names = [row["name"] for row in TABLE["fault"] + TABLE["variant"]]
    assert len(set(names)) == len(names)


if __name__ == "__main__":
    zygote()


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_weight_goes_home_bit_for_bit_even_a_lone_signalling_nan(lanes):
    ids = torch.zeros(1, lanes, dtype=torch.int64)
    place = ep_dispatch.Placement([], [], ids, source=torch.zeros(1, dtype=torch.int64), local_ids=ids,
                                  slots=torch.arange(lanes)[None])
    bits = torch.full((lanes,), 0x7F800001, dtype=torch.int32)
    x = torch.zeros(lanes, 256, dtype=torch.bfloat16)
    items = ep_combine.items_to_send(place, x, bits.view(torch.float32), 1, 1, expanded=True, multiple_reduction=True,
                                     knobs=Knobs())
    assert items.weights.view(torch.int32).tolist() == [[0x7F800001] * lanes]
