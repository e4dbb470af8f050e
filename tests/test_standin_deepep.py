"""The stand-in of deep_ep against its contract, on a group of one rank; sections of the dossier on DeepEP in each row.

What several ranks do together is tried by the rehearsals.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist

from tests.standin_tools import BF16, FP8, FP16, I32, I64, accepted, refused, standing_in

NAME = "deep_ep"


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def buffer(p, **more):
    return p.EPBuffer(dist.group.WORLD, **{"num_max_tokens_per_rank": 4, "hidden": 256, "num_topk": 2, **more})


IDS = [[0, 1], [3, -1]]


def dispatch(p, *, b=None, x=None, ids=None, expand=True, **more):
    b = buffer(p) if b is None else b
    x = torch.arange(1.0, 3)[:, None].expand(2, 256).to(BF16).contiguous() if x is None else x
    ids = torch.tensor(IDS) if ids is None else ids
    given = {"num_experts": 4, "do_expand": expand, **more}
    return b, b.dispatch(x, ids, **given)


def combine(p, *, x=None, dispatched=None, **more):
    b, (recv, _, _, handle, _) = dispatched or dispatch(p)
    return b.combine(recv if x is None else x, handle, **more)


def cached(p, **more):
    b, (_, _, _, handle, _) = dispatch(p)
    return b.dispatch(torch.ones(2, 256, dtype=BF16), handle=handle, do_expand=True, **more)


REFUSED = [
    # section, architecture, call, exception
    ("2.4", "sm100", lambda p: p.EPBuffer(), TypeError),
    ("2.4", "sm100", lambda p: p.EPBuffer(None, num_bytes=2**21), AttributeError),
    ("2.4", "sm100", lambda p: buffer(p, num_bytes=2**20), AssertionError),
    ("1", "sm100", lambda p: buffer(p, num_cpu_bytes=0), TypeError),  # gone since 2.1
    ("1", "sm100", lambda p: dispatch(p, previous_event_before_epilogue=None), TypeError),  # gone since 2.1
    ("1", "sm100", lambda p: dispatch(p, do_handle_copy=True), AssertionError),
    ("1", "sm100", lambda p: p.Buffer, AttributeError),  # V1
    ("2.4", "sm100", lambda p: dispatch(p, ids=torch.tensor(IDS, dtype=I32)), RuntimeError),
    ("2.4", "sm100", lambda p: dispatch(p, ids=torch.tensor(IDS).t().contiguous().t()), RuntimeError),
    ("2.4", "sm100", lambda p: dispatch(p, x=torch.ones(2, 8, dtype=BF16)), RuntimeError),  # rows of 16 bytes
    ("2.4", "sm100", lambda p: dispatch(p, x=torch.ones(2, 512, dtype=BF16)[:, ::2]), RuntimeError),
    ("2.4", "sm100", lambda p: dispatch(p, x=torch.ones(5, 256, dtype=BF16), ids=torch.zeros(5, 1, dtype=I64)),
     RuntimeError),  # more tokens than declared
    ("2.4", "sm100", lambda p: dispatch(p, ids=torch.tensor([[0, 0], [1, 2]])), RuntimeError),
    ("2.4", "sm100", lambda p: dispatch(p, topk_weights=torch.ones(2, 2, dtype=BF16)), RuntimeError),
    ("2.4", "sm100", lambda p: dispatch(p, expand=False, do_zero_padding=True), AssertionError),
    ("2.4", "sm100", lambda p: dispatch(p, defer_epilogue=True), AssertionError),
    ("2.4", "sm100", lambda p: dispatch(p, previous_event=object()), AssertionError),
    ("2.4", "sm100", lambda p: dispatch(p, x=(torch.ones(2, 256).to(FP8), torch.ones(2, 2, dtype=BF16))), RuntimeError),
    ("2.4", "sm100", lambda p: cached(p, topk_idx=torch.tensor(IDS)), AssertionError),
    ("2.4", "sm100", lambda p: cached(p, num_experts=8), AssertionError),
    ("2.4", "sm100", lambda p: cached(p, do_cpu_sync=True), AssertionError),
    ("2.4", "sm100", lambda p: combine(p, x=torch.ones(3, 256)), RuntimeError),
    ("2.4", "sm100", lambda p: combine(p, x=torch.ones(3, 256, dtype=FP16)), RuntimeError),
    ("2.4", "sm100", lambda p: combine(p, x=torch.ones(3, 128, dtype=BF16)), RuntimeError),  # H % 256
    ("2.4", "sm100", lambda p: combine(p, bias=torch.ones(2, 256)), RuntimeError),
    ("2.4", "sm100", lambda p: combine(p, bias=(torch.ones(2, 256, dtype=BF16),) * 3), RuntimeError),
    ("2.3", "sm100", lambda p: dispatch(p)[1][-1].wait(), AssertionError),  # nothing to wait for
    ("2.2", "sm100", lambda p: buffer(p).destroy(), AssertionError),
    ("1", "ascend950", lambda p: dispatch(p, expand=False), RuntimeError),
    ("1", "ascend950", lambda p: buffer(p, allow_multiple_reduction=False), RuntimeError),
    ("1", "ascend950", lambda p: buffer(p, sl_idx=3), RuntimeError),
    ("1", "ascend950", lambda p: dispatch(p, num_qps=8), RuntimeError),
    ("2.6", "sm100", lambda p: p.PPBuffer(dist.group.WORLD, 64, 0), RuntimeError),
    ("2.6", "sm100", lambda p: p.PPBuffer(dist.group.WORLD, 64, 1).send(torch.ones(6), 0), RuntimeError),
    ("2.6", "sm100", lambda p: p.PPBuffer(dist.group.WORLD, 64, 1).recv(torch.ones(32), 0), RuntimeError),
    ("2.6", "sm100", lambda p: p.PPBuffer(dist.group.WORLD, 64, 1).barrier(), AttributeError),
]


@pytest.mark.parametrize(("section", "arch", "call", "error"), REFUSED)
def test_refused(section, arch, call, error):
    refused(arch, NAME, call, error)


def test_alignments_and_index_type():  # 2.1
    for arch in ("sm100", "ascend950"):
        got = accepted(arch, NAME, lambda p: (
            p.get_num_allocation_alignment(), p.get_num_rdma_alignment(), p.get_num_tma_alignment(), p.topk_idx_t))
        assert got == (2097152, 64, 32, I64)


def test_expanded_rows_by_expert():  # 2.4
    _, (x, ids, weights, handle, _) = accepted("ascend950", NAME, lambda p: dispatch(
        p, expert_alignment=2, topk_weights=torch.tensor([[0.25, 0.5], [0.75, 9.0]])))
    assert ids is None
    assert x[:, 0].tolist()[0::2][:2] == [1, 1]
    assert handle.num_recv_tokens_per_expert_list == [2, 2, 0, 2]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == [1, 3, 4, 5]
    assert weights[[0, 2, 4]].tolist() == [0.25, 0.5, 0.75]


def test_combine_sums_without_weights():  # 2.4
    out, weights, _ = accepted("sm100", NAME, combine)
    assert out[:, 0].tolist() == [2, 2]  # two experts of the first token, one of the second
    assert weights is None


def test_a_list_of_biases_is_ignored():  # 2.4
    one = torch.ones(2, 256, dtype=BF16)
    assert accepted("sm100", NAME, lambda p: combine(p, bias=one))[0][0, 0] == 3
    assert accepted("sm100", NAME, lambda p: combine(p, bias=[one]))[0][0, 0] == 2


def test_an_asynchronous_result_is_not_there_before_the_wait():  # 2.3
    with standing_in("sm100", NAME) as (p, rig), rig.running():
        _, (x, _, _, _, event) = dispatch(p, async_with_compute_stream=True)
        assert not (x[:2, 0] == 1).any()
        event.wait()
        assert (x[:2, 0] == 1).all()


def test_a_synchronous_result_is_there_in_stream_order():
    with standing_in("sm100", NAME) as (p, rig), rig.running():
        _, (x, *_) = dispatch(p)
        assert (x[:2, 0] == 1).all()


def test_a_deferred_call_gives_its_results_once():  # 2.3, 2.4
    with standing_in("sm100", NAME) as (p, rig):
        _, event = dispatch(p, async_with_compute_stream=True, defer_epilogue=True)
        x, _, _, handle = event.wait()
        rig.device.synchronize()
        assert (x[:2, 0] == 1).all()
        assert handle.num_experts == 4
        assert event.wait() is None


def test_ids_changed_in_place_make_the_handle_stale():  # 2.3
    with standing_in("sm100", NAME) as (p, _):
        ids = torch.tensor(IDS)
        b, (x, _, _, handle, _) = dispatch(p, ids=ids)
        ids.fill_(0)
        with pytest.raises(AssertionError, match="modified"):
            b.combine(x, handle)


def test_a_handle_belongs_to_its_buffer():
    with standing_in("sm100", NAME) as (p, _):
        _, (x, _, _, handle, _) = dispatch(p)
        with pytest.raises(AssertionError, match="another buffer"):
            buffer(p).combine(x, handle)


def test_statistics_are_added_to():  # 2.4
    stats = torch.tensor([10, 0, 0, 5], dtype=I32)
    accepted("sm100", NAME, lambda p: dispatch(p, cumulative_local_expert_recv_stats=stats))
    assert stats.tolist() == [11, 1, 0, 6]


def test_a_cached_dispatch_returns_the_same_handle():  # 2.4
    with standing_in("sm100", NAME) as (p, _):
        b, (_, _, _, handle, _) = dispatch(p)
        again = b.dispatch(torch.ones(2, 256, dtype=BF16), handle=handle, do_expand=True)
        assert again[3] is handle


def test_the_known_defect_of_cached_calls_can_be_had():  # 6.19
    refused("sm100", NAME, cached, TypeError, defects=frozenset({"cached_needs_num_sms"}))
    accepted("sm100", NAME, lambda p: cached(p, num_sms=24), defects=frozenset({"cached_needs_num_sms"}))
    accepted("ascend950", NAME, cached, defects=frozenset({"cached_needs_num_sms"}))


def test_methods_tell_their_signature():
    with standing_in("sm100", NAME) as (p, _):
        names = list(inspect.signature(p.EPBuffer.dispatch).parameters)
        assert names[:4] == ["self", "x", "topk_idx", "topk_weights"]
        assert "defer_epilogue" in names


def test_a_destroyed_buffer_is_of_no_use():  # 2.2
    with standing_in("sm100", NAME) as (p, _):
        b = buffer(p, explicitly_destroy=True)
        b.destroy()
        assert b.main_context is None
        with pytest.raises(AssertionError, match="destroyed"):
            dispatch(p, b=b)
