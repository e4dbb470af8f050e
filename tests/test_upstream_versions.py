"""Which release of a package is installed: told by signature or behaviour, never by its version."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from adapters.upstream.release import Refused, parameters
from tests import chip_fakes as fake


def adapter_of(arch: str, module: str, *modules: Any, **options: str) -> Any:
    with fake.installed(*modules):
        return fake.backend(arch, **options).adapter(module)


def refusal(arch: str, module: str, *modules: Any, **options: str) -> str:
    with pytest.raises(Refused) as caught:
        adapter_of(arch, module, *modules, **options)
    return str(caught.value)


@pytest.mark.parametrize(("arch", "release", "options"), [
    ("sm90", "2.8", {}), ("sm100", "2.6", {"deepgemm": "2.6"}), ("ascend950", "ascend-0.1", {}),
])
def test_deepgemm_is_told_by_what_it_has(arch: str, release: str, options: dict[str, str]) -> None:
    found = adapter_of(arch, "deepgemm", fake.deep_gemm(fake.Recorder(), release), **options)
    assert found.release == release
    assert found.found()["release"] == release


def test_another_release_of_deepgemm_is_refused_with_the_option_that_describes_it() -> None:
    assert "--backend-option deepgemm=2.6" in refusal("sm90", "deepgemm", fake.deep_gemm(fake.Recorder(), "2.6"))
    assert "no description of" in refusal("sm90", "deepgemm", fake.deep_gemm(fake.Recorder(), "ascend-0.1"))


def test_deepgemm_without_marks_on_ascend_is_told_by_its_alignment() -> None:
    lib = fake.deep_gemm(fake.Recorder(), "ascend-0.1")
    del lib.get_npu_arch
    assert adapter_of("ascend950", "deepgemm", lib).release == "ascend-0.1"


@pytest.mark.parametrize(("add", "drop", "said"), [
    ("fp8_mqa_logits", "", "both of use_deterministic_algorithms"),
    ("", "use_deterministic_algorithms", "neither of use_deterministic_algorithms"),
    ("", "fp8_gemm_nt", "neither fp8_gemm_nt nor the names of version 1"),
])
def test_a_deepgemm_that_is_of_no_known_release_is_refused(add: str, drop: str, said: str) -> None:
    lib = fake.deep_gemm(fake.Recorder())
    if add:
        setattr(lib, add, print)
    if drop:
        delattr(lib, drop)
    told = refusal("sm90", "deepgemm", lib)
    assert said in told
    assert "can't be judged" in told


def test_the_first_deepgemm_is_named_as_such() -> None:
    lib = fake.module("deep_gemm", gemm_fp8_fp8_bf16_nt=print)
    assert "interface of 1" in refusal("sm90", "deepgemm", lib)


@pytest.mark.parametrize(("generation", "said"), [("2", "interface of 2"), ("1", "interface of 1")])
def test_earlier_generations_of_deepep_are_refused(generation: str, said: str) -> None:
    told = refusal("sm90", "deepep", fake.deep_ep(fake.Recorder(), generation))
    assert said in told
    assert "install 2.5" in told


def test_a_deepep_of_another_dispatch_or_dtype_of_ids_is_refused() -> None:
    without = fake.DISPATCH.replace(", defer_epilogue=False", "")
    assert "defer_epilogue" in refusal("sm90", "deepep", fake.deep_ep(fake.Recorder(), dispatch=without))
    told = refusal("sm90", "deepep", fake.deep_ep(fake.Recorder(), ids=torch.int32))
    assert "EP_NUM_TOPK_IDX_BITS" in told
    assert "none of EPBuffer" in refusal("sm90", "deepep", fake.module("deep_ep"))


def test_tilekernels() -> None:
    assert adapter_of("sm90", "tilekernels", *fake.tile_kernels(fake.Recorder())).release == "2.1"
    old = fake.tile_kernels(fake.Recorder(), "1.0")
    assert adapter_of("sm90", "tilekernels", *old, tilekernels="1.0").release == "1.0"
    assert "--backend-option tilekernels=1.0" in refusal("sm90", "tilekernels", *old)
    assert "install 2.1" in refusal("ascend950", "tilekernels", *old)
    both = fake.tile_kernels(fake.Recorder())
    both[0].moe.top2_sum_gate = print
    assert "it has both of" in refusal("sm90", "tilekernels", *both)


def test_deepselect_that_lacks_an_argument_is_refused() -> None:
    lib = fake.deep_select(fake.Recorder(), parameters=fake.TOPK.replace("output_idx_offset=None, ", ""))
    assert "does not take output_idx_offset" in refusal("sm100", "deepselect", lib)


def test_deepselect_built_for_another_platform_is_told_by_its_strides() -> None:
    right = adapter_of("sm100", "deepselect", fake.deep_select(fake.Recorder()))
    assert right.trial() == ""
    assert right.found()["stride_requirement_bytes"] == "1024,32"
    assert "another platform" in adapter_of("sm100", "deepselect", fake.deep_select(fake.Recorder(), (32, 32))).trial()
    assert adapter_of("ascend950", "deepselect", fake.deep_select(fake.Recorder(), (32, 32))).trial() == ""


# FlashMLA: two layouts under one version number

NO_SIGNATURE = "*args, **kwargs"
FORMER = fake.DECODE.replace(", enable_batch_invariant=False", "").replace("kvcache=True", "kvcache=False")


def decoder(*reads: str) -> Any:
    """A decode of one listed token that reads a cache in these layouts."""
    def decode(q: Any, k_cache: Any, *args: Any, indices: Any, **kwargs: Any) -> Any:
        page = k_cache.view(torch.uint8)[0].flatten()
        token = int(indices.flatten()[0])
        start = {"inline528": token * 528, "planar528": token * 512}
        scales = {"inline528": token * 528 + 512, "planar528": 1024 + 16 * token}
        rows = []
        for layout in reads:
            data = page[start[layout] : start[layout] + 512].view(torch.float8_e4m3fn).float()
            scale = page[scales[layout] : scales[layout] + 16].float() - 127
            rows.append(data * torch.exp2(scale).repeat_interleave(32))
        right = next((row for row in rows if bool((row == 2).all())), rows[0])
        return right.bfloat16().expand(1, 1, 64, 512), torch.zeros(1, 64, 1)

    return decode


@pytest.mark.parametrize(("arch", "decode", "reads", "release"), [
    ("sm100", fake.DECODE, ["inline528"], "inline528"),
    ("ascend950", fake.DECODE, ["inline528"], "inline528"),
    ("sm100", NO_SIGNATURE, ["inline528"], "inline528"),
])
def test_flashmla_that_reads_scales_behind_each_token(arch: str, decode: str, reads: list[str], release: str) -> None:
    found = adapter_of(arch, "flashmla", fake.flash_mla(fake.Recorder(), decode, decoder(*reads)))
    assert found.release == release
    assert found.trial() == ""


def test_flashmla_that_reads_pages_of_data_and_scales_is_refused_by_signature_or_behaviour() -> None:
    for decode in (FORMER, NO_SIGNATURE):
        told = refusal("sm100", "flashmla", fake.flash_mla(fake.Recorder(), decode, decoder("planar528")))
        assert "interface of planar528" in told
        assert "install inline528" in told


def test_flashmla_whose_signature_and_behaviour_differ_is_not_usable() -> None:
    found = adapter_of("sm100", "flashmla", fake.flash_mla(fake.Recorder(), fake.DECODE, decoder("planar528")))
    assert "reads a cache as planar528" in found.trial()


def test_flashmla_that_can_not_be_told_apart_is_refused() -> None:
    def nothing(*args: Any, **kwargs: Any) -> Any:
        return torch.ones(1, 1, 64, 512), None

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("unknown byte size")

    for answer, said in ((decoder("inline528", "planar528"), "both layouts"), (nothing, "neither layout"),
                         (broken, "unknown byte size")):
        assert said in refusal("sm100", "flashmla", fake.flash_mla(fake.Recorder(), NO_SIGNATURE, answer))


def test_former_interfaces_of_flashmla_are_named() -> None:
    r = fake.Recorder()
    v32 = "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, indices=None"
    assert "interface of 656" in refusal("sm100", "flashmla", fake.flash_mla(r, v32))
    assert "interface of dense" in refusal("sm100", "flashmla", fake.flash_mla(r, v32.replace(", indices=None", "")))


def test_a_package_that_is_missing_or_breaks_on_import_is_refused_with_a_sentence(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    told = refusal("sm100", "deepgemm")
    assert told.startswith("deep_gemm is not installed: build it from github.com/deepseek-ai/DeepGEMM")
    (tmp_path / "deep_select.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    told = refusal("sm100", "deepselect")
    assert "its import fails: OSError: libcudart.so.13" in told


def test_parameters_of_a_compiled_function_come_from_its_docstring() -> None:
    compiled = types.SimpleNamespace(
        __name__="gemm", __doc__="gemm(a: tuple[int, int], b: object, alpha: float = max(1, 2), *, c=None) -> None\n\n")
    assert parameters(compiled) == ("a", "b", "alpha", "c")
    compiled.__doc__ = "gemm(a, *args) -> None"
    assert parameters(compiled) is None
    compiled.__doc__ = "m.gemm(self, a: tuple[int, int], b: object, alpha: float = max(1, 2)) -> None"
    assert parameters(compiled) == ("a", "b", "alpha")
    assert parameters(len) == ("obj",)
    assert parameters(lambda *a, **k: None) is None
