"""The stand-in of deep_select against its contract; sections of the dossier on DeepSelect in each row."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.standin_tools import BF16, FP16, FP32, I32, I64, accepted, aligned, refused, standing_in, traps

NAME = "deep_select"


def x(dtype=BF16, rows=2, vocab=512, pitch=None):
    t = aligned((rows, vocab), dtype, pitch=pitch or vocab)
    column = torch.arange(vocab)
    t.copy_(torch.where(column < 256, column, -1).expand(rows, vocab))
    return t


def test_strides_are_1024_and_32_bytes_on_cuda_and_32_on_ascend():  # 2.1
    for arch, wanted in (("sm100", (1024, 32)), ("ascend950", (32, 32))):
        assert accepted(arch, NAME, lambda p: p.get_stride_requirement()) == wanted


def test_the_second_positional_argument_is_topk_and_the_signature_can_be_read():  # 2.2
    with standing_in("sm100", NAME) as (p, _):
        names = list(inspect.signature(p.topk).parameters)
        assert names[:4] == ["input", "topk", "sorted", "begin"]
        assert inspect.signature(p.topk).parameters["indices_type"].default is I64


REFUSED = [
    # section, architecture, call, exception
    ("2.2", "sm100", lambda p: p.topk(x(), k=4), TypeError),
    ("2.5", "sm100", lambda p: p.topk(x(), 4, begin=torch.zeros(2, dtype=I32)), AssertionError),
    ("2.5", "sm100", lambda p: p.topk(x(), 4, hint=torch.zeros(2, dtype=I32)), AssertionError),
    ("2.5", "sm100", lambda p: p.topk(x(), 8, output_idx=aligned((2, 8), I32), indices_type=I64), AssertionError),
    ("2.5", "sm100", lambda p: p.topk(x(), 0), RuntimeError),
    ("2.5", "sm100", lambda p: p.topk(x(), 4097), RuntimeError),
    ("2.5", "sm100", lambda p: p.topk(x(), 2**31), TypeError),
    ("2.5", "sm100", lambda p: p.topk(x(FP32), 4, sorted=True, return_value=False), RuntimeError),
    ("2.5", "sm100", lambda p: p.topk(x(FP32), 4, sorted=True, sorted_index=True), RuntimeError),
    ("2.5", "sm100", lambda p: p.topk(x(BF16), 4, sorted=True), RuntimeError),
    ("2.5", "sm100", lambda p: p.topk(x(FP16), 4), RuntimeError),
    ("2.2", "sm100", lambda p: p.topk(x(BF16, 1, 256), 4), RuntimeError),  # 512 bytes, one row all the same
    ("2.2", "sm100", lambda p: p.topk(x().t(), 4), RuntimeError),
    ("2.5", "sm100", lambda p: p.topk(x(), 4, end=torch.zeros(2, dtype=I64)), RuntimeError),
    ("2.5", "sm100", lambda p: p.topk(x(), 4, end=torch.zeros(4, dtype=I32)[::2]), RuntimeError),
    ("2.5", "sm100", lambda p: p.topk(x(), 4, output_idx_offset=torch.zeros(1, dtype=I32)), RuntimeError),
    ("2.2", "sm100", lambda p: p.topk(x(), 4, idx_oob_fill_value=2**31), TypeError),
    ("2.5", "sm100", lambda p: p.topk(x(), 9, output_idx=aligned((2, 9), I64, pitch=9)), RuntimeError),
    ("2.5", "ascend950", lambda p: p.topk(x(FP32), 4, indices_type=I32), RuntimeError),
    ("2.2", "ascend950", lambda p: p.topk(x(), 4), RuntimeError),  # the default call: int64 indices
    ("2.5", "ascend950", lambda p: p.topk(x(), 4, indices_type=I32, sorted=True), RuntimeError),
    ("5", "sm90", lambda p: p.topk(x(), 4), RuntimeError),  # no kernel image
]


@pytest.mark.parametrize(("section", "arch", "call", "error"), REFUSED)
def test_refused(section, arch, call, error):
    refused(arch, NAME, call, error)


def test_rows_of_32_bytes_do_on_ascend_only():  # 2.1, 2.2
    call = lambda p: p.topk(x(BF16, 2, 16), 4, indices_type=I32)  # noqa: E731
    values, indices = accepted("ascend950", NAME, call)
    assert values.sort(1).values.tolist() == [[12, 13, 14, 15]] * 2
    assert indices.dtype == I32
    refused("sm100", NAME, call, RuntimeError)


def test_results_are_slices_of_rows_of_32_bytes():  # 2.3
    values, indices = accepted("sm100", NAME, lambda p: p.topk(x(), 5))
    assert values.stride() == (16, 1)
    assert indices.stride() == (8, 1)


def test_own_output_is_the_returned_object():  # 2.2
    own = aligned((2, 8), I32)
    _, indices = accepted("sm100", NAME, lambda p: p.topk(x(), 8, output_idx=own, indices_type=I32))
    assert indices is own
    assert indices[0].sort().values.tolist() == list(range(248, 256))


def nan_row(vocab):
    t = x(BF16, 2, 512)
    t[0, 3] = torch.nan
    return t[:, :vocab]


def test_nan_sentinel_first_on_cuda_whole_row_on_ascend():  # 2.4
    call = lambda p: p.topk(nan_row(512), 4, indices_type=I32, abort_when_nan_found=False)[1]  # noqa: E731
    cuda, ascend = accepted("sm100", NAME, call), accepted("ascend950", NAME, call)
    assert cuda[0, 0] == 0x3F3F3F3F
    assert (cuda[0, 1:] != 0x3F3F3F3F).all()
    assert (ascend[0] == 0x3F3F3F3F).all()
    assert cuda[1].sort().values.tolist() == ascend[1].sort().values.tolist()


def test_a_short_row_with_nan_is_checked_on_ascend_only():  # 2.4
    call = lambda p: p.topk(nan_row(8), 8, indices_type=I32, abort_when_nan_found=False)[1]  # noqa: E731
    assert accepted("sm100", NAME, call)[0].tolist() == list(range(8))
    assert (accepted("ascend950", NAME, call)[0] == 0x3F3F3F3F).all()


def test_nan_traps_by_default():  # 2.4
    traps("sm100", NAME, lambda p: p.topk(nan_row(512), 4), "NaN")


def test_lengths_are_not_validated_but_fault():  # 6.1
    traps("sm100", NAME, lambda p: p.topk(x(), 4, end=torch.tensor([-1, 4], dtype=I32)), "illegal memory access")


def test_a_misaligned_base_faults():  # 6.6
    shifted = aligned((2, 1024), BF16)[:, 1:513]
    traps("sm100", NAME, lambda p: p.topk(shifted, 4), "misaligned")


def test_fill_has_no_offset():  # 2.2, 2.3
    call = lambda p: p.topk(  # noqa: E731
        x(), 4, end=torch.tensor([2, 512], dtype=I32), output_idx_offset=torch.tensor([1000, 0], dtype=I32),
        idx_oob_fill_value=-7, sorted_index=True)
    values, indices = accepted("sm100", NAME, call)
    assert indices[0].tolist() == [1000, 1001, -7, -7]
    assert values[0].tolist() == [0, 1, float("-inf"), float("-inf")]


def test_results_are_not_there_before_a_wait():
    with standing_in("sm100", NAME) as (p, rig):
        _, indices = p.topk(x(), 4, sorted_index=True)
        assert (indices == 0x5B5B5B5B5B5B5B5B).all()
        rig.device.synchronize()
        assert indices[0].tolist() == [252, 253, 254, 255]


def test_an_operation_of_the_framework_comes_behind_the_call():
    with standing_in("sm100", NAME) as (p, rig), rig.running():
        _, indices = p.topk(x(), 4, sorted_index=True)
        assert (indices + 1)[0].tolist() == [253, 254, 255, 256]
