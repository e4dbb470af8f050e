"""DeepGEMM (`deep_gemm`): its public calls. Also DeepGEMM-Ascend, which has the same names.

Keyword names are those of the compiled functions (`epilogue`, not the `epilogue_class` of the type stubs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adapters.upstream.base import UpstreamAdapter, given, kept
from adapters.upstream.scales import two_to_a_word

ASCEND_MARKS = ("set_npu_arch", "get_npu_arch", "get_deterministic_algorithms", "aclnn_bf16_gemm_nt")
"""functions of DeepGEMM-Ascend that the CUDA package does not have"""
REMOVED_IN_2_8 = ("fp8_gemm_nt_skip_head_mid", "fp8_mqa_logits", "fp8_paged_mqa_logits")
ASCEND_ALIGNMENT = 256
"""rows between the starts of groups there; 128 is the default on CUDA"""


class Adapter(UpstreamAdapter):
    """A method an op, named like the public function. All outputs are the caller's."""

    module, package = "deepgemm", "deep_gemm"

    # Dense products

    def bf16_gemm_nt(self, a: Any, b: Any, d: Any, c: Any = None, compiled_dims: str = "nk", alpha: float | None = None,
                     epilogue: Any = None) -> None:
        self.lib.bf16_gemm_nt(a=a, b=b, d=d,
                              **given(c=c, compiled_dims=compiled_dims, alpha=alpha, epilogue=epilogue))

    def fp8_gemm_nt(self, a: Any, b: Any, d: Any, c: Any = None, recipe: Any = None, recipe_a: Any = None,
                    recipe_b: Any = None, compiled_dims: str = "nk", disable_ue8m0_cast: bool = False,
                    alpha: float | None = None, epilogue: Any = None) -> None:
        self.lib.fp8_gemm_nt(
            a=self._operand(a), b=self._operand(b), d=d,
            **given(c=c, recipe=_tuple(recipe), recipe_a=_tuple(recipe_a), recipe_b=_tuple(recipe_b),
                    compiled_dims=compiled_dims, disable_ue8m0_cast=disable_ue8m0_cast, alpha=alpha,
                    epilogue=epilogue))

    # Grouped products

    def m_grouped_bf16_gemm_nt_contiguous(self, a: Any, b: Any, d: Any, grouped_layout: Any, compiled_dims: str = "nk",
                                          use_psum_layout: bool = False, ensure_zero_padding: bool = True,
                                          expected_m_for_psum_layout: int | None = None, epilogue: Any = None) -> None:
        self.lib.m_grouped_bf16_gemm_nt_contiguous(
            a=a, b=b, d=d, grouped_layout=grouped_layout,
            **given(compiled_dims=compiled_dims, use_psum_layout=use_psum_layout,
                    ensure_zero_padding=ensure_zero_padding, expected_m_for_psum_layout=expected_m_for_psum_layout,
                    epilogue=epilogue))

    # Casts

    def per_token_cast_to_fp8(self, x: Any, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False) -> Any:
        return self.lib.per_token_cast_to_fp8(x=x, use_ue8m0=use_ue8m0, gran_k=gran_k,
                                              use_packed_ue8m0=use_packed_ue8m0)

    # What it is

    def recognised(self) -> str:
        lib = self.lib
        if not hasattr(lib, "fp8_gemm_nt"):
            if hasattr(lib, "gemm_fp8_fp8_bf16_nt"):
                return "1"
            raise self.cannot_tell("it has neither fp8_gemm_nt nor the names of version 1")
        if any(hasattr(lib, name) for name in ASCEND_MARKS):
            return "ascend-0.1"
        new, old = hasattr(lib, "use_deterministic_algorithms"), [n for n in REMOVED_IN_2_8 if hasattr(lib, n)]
        if new and not old:
            masked = any(name.endswith("_masked") for name in dir(lib))
            aligned = getattr(lib, "get_mk_alignment_for_contiguous_layout", int)()
            return "2.8" if masked or aligned != ASCEND_ALIGNMENT else "ascend-0.1"
        if old and not new:
            return "2.6"
        marks = "both" if new else "neither"
        raise self.cannot_tell(f"it has {marks} of use_deterministic_algorithms, which came in 2.8, and "
                               f"{(old or REMOVED_IN_2_8)[0]}, which went then")

    def knobs(self) -> dict[str, tuple[Callable[[], Any], Callable[[Any], None] | None]]:
        lib = self.lib
        out: dict[str, tuple[Callable[[], Any], Callable[[Any], None] | None]] = {
            "mk_alignment_for_contiguous_layout": (
                lib.get_mk_alignment_for_contiguous_layout, lib.set_mk_alignment_for_contiguous_layout)}
        switch = getattr(lib, "use_deterministic_algorithms", None)
        if switch is None:
            # Before 2.8 all results were deterministic, and there was nothing to switch.
            out["deterministic_algorithms"] = kept(True, lambda value: None)
        elif hasattr(lib, "get_deterministic_algorithms"):
            out["deterministic_algorithms"] = (lib.get_deterministic_algorithms, switch)
        else:
            out["deterministic_algorithms"] = kept(False, switch)
        for name in ("num_sms", "tc_util", "pdl"):
            if hasattr(lib, f"get_{name}"):
                out[name] = (getattr(lib, f"get_{name}"), getattr(lib, f"set_{name}", None))
        return out

    def _operand(self, pair: Any) -> Any:
        """(data, scales), with packed scales as this package has them."""
        if self.release != "ascend-0.1" or not isinstance(pair, tuple) or len(pair) != 2:
            return pair
        return pair[0], two_to_a_word(pair[1], -(-pair[0].shape[-1] // 32))


def _tuple(value: Any) -> Any:
    """A recipe as the compiled functions take it."""
    return tuple(value) if isinstance(value, list) else value
