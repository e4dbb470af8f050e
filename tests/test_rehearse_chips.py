"""The adapters of three chips, rehearsed: every op that a chip has reaches exactly its own public function."""

from __future__ import annotations

import pytest

from conformance.cli import main
from conformance.collect import ops
from conformance.engine.limits import support_of
from conformance.rehearse import class_of, open_rehearsal, public_name, rehearse

CHIPS = (("nvidia", "sm90", 13), ("nvidia", "sm100", 18), ("ascend", "ascend950", 18))
"""and how many ops of the five packages it has"""
PACKAGES = ("deepselect", "deepgemm", "deepep", "tilekernels", "flashmla")


@pytest.mark.parametrize(("backend", "arch", "number"), CHIPS)
def test_every_op_reaches_its_own_function(backend, arch, number):
    results = rehearse(backend, arch, modules=PACKAGES, most=2, examples=1, checks=("values",))
    assert not {r.op: r.findings for r in results if not r.right}
    assert len(results) == number
    assert all(r.calls and r.function == public_name(r.op) != "" for r in results)
    with open_rehearsal(class_of(backend, arch)) as r:
        there = {op.name for op in ops(PACKAGES) if support_of(r.bench.description, op.name).supported}
    assert {r.op for r in results} == there


def test_the_command_ends_with_0_and_1(capsys):
    gate = ["rehearse", "--op", "tilekernels.moe.topk_gate", "--cases", "1", "--examples", "1", "--check", "values"]
    assert main([*gate, "--backend", "ascend"]) == 0
    assert "tile_kernels.moe.topk_gate" in capsys.readouterr().out
    mistaken = [*gate, "--backend", "tests.mistaken_backend:MistakenSM100", "--backend-option", "mistake=gate_renamed"]
    assert main(mistaken) == 1
    assert "num_topk" in capsys.readouterr().out
    assert main(["rehearse", "--backend", "nvdia"]) == 4


def test_an_op_without_a_case_of_a_check_is_not_wrong():
    assert rehearse("ascend", "ascend950", names=["deepselect.get_stride_requirement"], checks=("rejects",)) == []


@pytest.mark.parametrize(("misuse", "op"), [("lists_of_64_with_64_heads", "flashmla.flash_mla_sparse_fwd"),
                                            ("extra_lists_of_100_with_64_heads", "flashmla.flash_mla_with_kvcache")])
def test_a_misuse_that_one_chip_takes_is_asked_of_the_other_alone(misuse, op):
    (declared,) = (o for o in ops(("flashmla",)) if o.name == op)
    asked = {}
    for backend, arch in (("nvidia", "sm100"), ("ascend", "ascend950")):
        with open_rehearsal(class_of(backend, arch)) as r:
            asked[arch] = {c.variant.misuse for c in r.cases_of(declared, ("rejects",))}
    assert misuse in asked["sm100"]
    assert asked["sm100"] - asked["ascend950"] >= {misuse}
    assert len(asked["ascend950"]) > 10


@pytest.mark.parametrize(("package", "release"), [("flash_mla", "W24")])
def test_a_release_that_is_not_described_is_told(package, release):
    """Planar caches under the same version number: the adapter must find out, and must not give wrong numbers."""
    results = rehearse("nvidia", "sm100", names=["flashmla.flash_mla_with_kvcache"], most=1, examples=1,
                       checks=("values",), options={f"release.{package}": release})
    (result,) = results
    assert not result.right
    assert not any("numeric" in sentence for sentence in result.findings), result.findings
