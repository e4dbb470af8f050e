"""Contract of `deep_gemm` 2.8.2 and of its Ascend port. Sections are those of dossiers/deepgemm.md."""

from __future__ import annotations

from typing import Any

import torch

from adapters.cpu import deepgemm
from adapters.standins import scale_factors as sf
from adapters.standins.checks import host, is_tensor
from adapters.standins.device import pending, shadow

TMA_BYTES = 16
DEFAULT_ALIGNMENT = {"cuda": 128, "ascend": 256}
OUTPUTS = (torch.bfloat16, torch.float32)


class Package:
    """A method a public function; process-global settings as attributes."""

    def __init__(self, rig: Any) -> None:
        self.rig, self.arch = rig, rig.arch
        self.kernel = deepgemm.Adapter(rig.host)
        self.alignment = DEFAULT_ALIGNMENT[self.arch.platform]
        self.deterministic = False
        self.num_sms, self.tc_util, self.pdl, self.npu_arch = self.arch.cores, 100, False, "dav-3510"

    def state(self) -> dict[str, Any]:
        """Settings as a call finds them."""
        return {"mk_alignment_for_contiguous_layout": self.alignment, "deterministic_algorithms": self.deterministic}

    # 2.2

    def bf16_gemm_nt(
        self, a: Any, b: Any, d: Any, c: Any, compiled_dims: str, alpha: Any, epilogue: Any, name: str = "nt"
    ) -> None:
        self._dims(compiled_dims)
        for which, t in (("a", a), ("b", b)):
            is_tensor(which, t, torch.bfloat16, (None, None))
            _major(which, t)
        (m, k), (n, k_b) = a.shape, b.shape
        host(k == k_b, f"k of a is {k}, of b {k_b}")
        host(alpha is None or epilogue is None, "alpha excludes epilogue")
        if not self._prepared(m, n, k, d, c):
            return
        library = not self.arch.is_ascend and not self.deterministic and self.num_sms == self.arch.cores
        if not library:
            host(self.num_sms % 2 == 0 or self.arch.is_ascend, "num_sms must be even")
            host(self.arch.capability != 9 or (alpha is None and epilogue is None),
                 "SM90 kernels take neither alpha nor epilogue")
        host(epilogue is None, "Unsupported epilogue")
        if k:
            self._tma(a=a, b=b)
        self._tma(d=d)
        self._into(d, c, lambda out, add: self.kernel.bf16_gemm_nt(a, b, out, add, alpha=alpha))

    def bf16_gemm_nn(self, a: Any, b: Any, d: Any, c: Any, compiled_dims: str, alpha: Any, epilogue: Any) -> None:
        self.bf16_gemm_nt(a, b.transpose(-1, -2), d, c, compiled_dims, alpha, epilogue)

    def bf16_gemm_tn(self, a: Any, b: Any, d: Any, c: Any, compiled_dims: str, alpha: Any, epilogue: Any) -> None:
        self.bf16_gemm_nt(a.transpose(-1, -2), b.transpose(-1, -2), d, c, compiled_dims, alpha, epilogue)

    def bf16_gemm_tt(self, a: Any, b: Any, d: Any, c: Any, compiled_dims: str, alpha: Any, epilogue: Any) -> None:
        self.bf16_gemm_nt(a.transpose(-1, -2), b, d, c, compiled_dims, alpha, epilogue)

    def fp8_gemm_nt(
        self, a: Any, b: Any, d: Any, c: Any, recipe: Any, recipe_a: Any, recipe_b: Any, compiled_dims: str,
        disable_ue8m0_cast: bool, alpha: Any, epilogue: Any,
    ) -> None:
        self._dims(compiled_dims)
        (a, sfa), (b, sfb) = a, b
        for which, t in (("a", a), ("b", b)):
            is_tensor(which, t, (torch.float8_e4m3fn, torch.int8), (None, None))
            host(t.dtype != torch.int8 or self.arch.name != "sm90", "Unsupported architecture: FP4 on SM90")
            _major(which, t)
            k_major = t.stride(1) == 1
            host(k_major or self.arch.name != "sm90", f"{which} must be K-major on SM90")
        m, k = a.shape[0], a.shape[1] * (2 if a.dtype == torch.int8 else 1)
        n, k_b = b.shape[0], b.shape[1] * (2 if b.dtype == torch.int8 else 1)
        host(k == k_b, f"k of a is {k}, of b {k_b}")
        host(alpha is None or epilogue is None, "alpha excludes epilogue")
        host(d.dim() == 2 and tuple(d.shape) == (m, n), "d must be [m, n]")
        host(m == 0 or n == 0 or d.dtype in OUTPUTS, "d must be bf16 or fp32")
        copied = self._prepared(m, n, k, d, c)
        if not copied:
            return
        # 2.1: d has been overwritten with c before the scales are looked at; a refusal below leaves it so.
        host(epilogue is None, "Unsupported epilogue")
        if k == 0:
            self._into(d, c, lambda out, add: out.copy_(add) if add is not None else out.zero_())
            return
        gran_m, gran_n, gran_k = sf.recipe_of(self.arch, sfb, recipe, recipe_a, recipe_b)
        if self.arch.name == "sm90":
            host(alpha is None, "SM90 FP8 takes neither alpha nor epilogue")
            host(gran_k == 128 and gran_m == 1 and gran_n in (1, 128), "Unknown SF transformation")
            if gran_n == 128:
                host(d.dtype == torch.bfloat16 and c is None, "SM90 1d2d: d in bf16, no c")
                host(n % 8 == 0, "SM90 1d2d: n % 8")
            else:
                host(d.dtype == torch.float32 and c is not None, "SM90 1d1d: d in fp32, with c")
        elif not self.arch.is_ascend:
            host(gran_k in (32, 128), f"Unknown SF transformation: gran_k {gran_k}")
        else:
            host(gran_k == 32, f"gran_k must be 32, got {gran_k}")
            host(not (a.dtype == torch.int8 and b.dtype != torch.int8), "FP4 x FP8 is not supported")
        fp32_a = sf.as_fp32(self.rig, "a", sfa, m, k, gran_m, gran_k, disable_ue8m0_cast)
        fp32_b = sf.as_fp32(self.rig, "b", sfb, n, k, gran_n, gran_k, disable_ue8m0_cast)
        self._tma(a=a, b=b, d=d)
        self._into(d, c, lambda out, add: self.kernel.fp8_gemm_nt(
            (a, fp32_a), (b, fp32_b), out, add, recipe_a=(gran_m, gran_k), recipe_b=(gran_n, gran_k), alpha=alpha))

    fp8_fp4_gemm_nt = fp4_gemm_nt = fp8_gemm_nt

    # 2.3

    def m_grouped_bf16_gemm_nt_contiguous(
        self, a: Any, b: Any, d: Any, grouped_layout: Any, compiled_dims: str, use_psum_layout: bool,
        ensure_zero_padding: bool, expected_m_for_psum_layout: Any, epilogue: Any,
    ) -> None:
        self._dims(compiled_dims)
        is_tensor("a", a, torch.bfloat16, (None, None))
        is_tensor("b", b, torch.bfloat16, (None, None, None))
        (m, k), (groups, n, _) = a.shape, b.shape
        host(a.stride(1) == 1, "a must be K-major")
        _major("b", b)
        host(b.shape[2] == k, f"k of a is {k}, of b {b.shape[2]}")
        outputs = OUTPUTS if self.arch.is_ascend else torch.bfloat16
        is_tensor("d", d, outputs, (m, n))
        host(d.stride(1) == 1, "d must be row-major")
        host(n > 0 and k > 0 and groups > 0, "n, k and groups must be positive")
        host(self.arch.name != "sm90" or k % 64 == 0, f"SM90 BF16: k % 64, got {k}")
        host(use_psum_layout or not self.arch.is_ascend, "use_psum_layout must be True on Ascend")
        host(use_psum_layout or expected_m_for_psum_layout is None, "expected_m_for_psum_layout without psum layout")
        is_tensor("grouped_layout", grouped_layout, torch.int32, (groups if use_psum_layout else m,))
        host(grouped_layout.is_contiguous(), "grouped_layout must be contiguous")
        host(epilogue is None, "Unsupported epilogue")
        if m == 0:
            return
        self._tma(a=a, b=b[0], d=d)
        layout = self._layout(grouped_layout, m, groups, use_psum_layout)
        self.kernel.settings["mk_alignment_for_contiguous_layout"] = self.alignment
        target = d if d.dtype == torch.bfloat16 else None
        out = shadow(d) if target is not None else torch.zeros(m, n, dtype=torch.bfloat16)
        self.kernel.m_grouped_bf16_gemm_nt_contiguous(
            a, b, out, layout, use_psum_layout=use_psum_layout, ensure_zero_padding=ensure_zero_padding)
        self.rig.device.launch([(d, out.to(d.dtype) if target is None else out)])

    def _layout(self, given: torch.Tensor, m: int, groups: int, psum: bool) -> torch.Tensor:
        """What the kernel makes of it: the label of a tile's first row counts for all rows of the tile."""
        low, high = (0, m) if psum else (-1, groups - 1)
        if ((given < low) | (given > high)).any():
            self.rig.device.trap("illegal memory access: grouped_layout out of range")
            given = given.clamp(low, high)
        if psum:
            return given
        first = given[torch.arange(m) // self.alignment * self.alignment]
        return torch.where(first < 0, -1, first)

    # 2.8

    def per_token_cast_to_fp8(self, x: Any, use_ue8m0: bool, gran_k: int, use_packed_ue8m0: bool) -> Any:
        data, scales = self.kernel.per_token_cast_to_fp8(x, use_ue8m0, gran_k, use_packed_ue8m0)
        pairs = [pending(data), pending(scales)]
        self.rig.device.launch(pairs)
        return pairs[0][0], pairs[1][0]

    def set_mk_alignment_for_contiguous_layout(self, n: int) -> None:
        if not self.arch.is_ascend:
            self.alignment = n

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return self.alignment

    get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout

    def get_theoretical_mk_alignment_for_contiguous_layout(self, expected_m: Any = None) -> int:
        return 128 if self.arch.name == "sm90" else 256

    def use_deterministic_algorithms(self, b: bool) -> None:
        self.deterministic = b

    def get_deterministic_algorithms(self) -> bool:
        return self.deterministic

    def set_num_sms(self, n: int) -> None:
        host(0 < n <= self.arch.cores, f"num_sms {n}, the device has {self.arch.cores}")
        self.num_sms = n

    def get_num_sms(self) -> int:
        return self.num_sms

    def set_tc_util(self, n: int) -> None:
        host(0 <= n <= 100, f"tc_util {n}")
        self.tc_util = n

    def get_tc_util(self) -> int:
        return self.tc_util or 100

    def set_pdl(self, b: bool) -> None:
        self.pdl = b

    def get_pdl(self) -> bool:
        return self.pdl

    def get_npu_arch(self) -> str:
        return self.npu_arch

    def set_npu_arch(self, arch: str) -> None:
        self.npu_arch = arch

    def get_tma_aligned_size(self, x: int, element_size: int) -> int:
        unit = TMA_BYTES // element_size
        return -(-x // unit) * unit

    # Rules common to all: 2.1

    def _dims(self, compiled_dims: str) -> None:
        host(set(compiled_dims) <= set("mnk"), f"compiled_dims {compiled_dims!r}")

    def _prepared(self, m: int, n: int, k: int, d: Any, c: Any) -> bool:
        """Checks of d and c in the documented order; False where there is nothing to do."""
        host(d.dim() == 2 and tuple(d.shape) == (m, n), f"d has shape {tuple(d.shape)}, expected {(m, n)}")
        host(d.stride(1) == 1 or n <= 1, "d must be row-major")
        if m == 0 or n == 0:
            return False
        host(d.dtype in OUTPUTS, f"d in {d.dtype}")
        if c is None:
            return True
        host(c.dtype == d.dtype, f"c in {c.dtype}, d in {d.dtype}")
        if c.data_ptr() == d.data_ptr():
            host(c.shape == d.shape and c.stride() == d.stride(), "c on d's memory must have its sizes and strides")
        else:
            host(not self.arch.is_ascend, "c must be d on Ascend")
            c.expand(m, n)  # torch's own RuntimeError
        return True

    def _tma(self, **operands: torch.Tensor) -> None:
        """Tensor descriptors: aligned base and pitch."""
        if self.arch.is_ascend:
            return
        for name, t in operands.items():
            if t.numel() == 0:
                continue
            outer = t.stride(0) if t.stride(1) == 1 else t.stride(1)
            rows = t.shape[0] if t.stride(1) == 1 else t.shape[1]
            host(t.data_ptr() % TMA_BYTES == 0, f"base of {name} must be aligned to {TMA_BYTES} bytes")
            host(rows <= 1 or outer * t.element_size() % TMA_BYTES == 0,
                 f"rows of {name} must be multiples of {TMA_BYTES} bytes")

    def _into(self, d: torch.Tensor, c: Any, compute: Any) -> None:
        """Compute into a copy of d, which d becomes when the device gets there."""
        out = shadow(d)
        same = c is not None and c.data_ptr() == d.data_ptr()
        compute(out, out if same else c)
        self.rig.device.launch([(d, out)])


def _major(name: str, t: torch.Tensor) -> None:
    """K-major or MN-major; groups follow each other. An axis of one element counts as contiguous."""
    ok = t.stride(-1) == 1 or t.stride(-2) == 1 or t.shape[-1] <= 1 or t.shape[-2] <= 1
    host(ok, f"{name} must be contiguous along k or mn")
    if t.dim() == 3 and t.shape[0] > 1:
        host(t.stride(0) == t.shape[1] * t.shape[2], f"groups of {name} must follow each other")
