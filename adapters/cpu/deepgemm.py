"""DeepGEMM on the CPU: the public functions over the blocked kernels of `kernels.gemm` and `kernels.quant`."""

from __future__ import annotations

from typing import Any

import torch

from adapters.cpu.kernels import gemm, quant
from adapters.cpu.kernels.knobs import Knobs

FAULTS = {
    "unchecked_k": "A and B may differ in k; the longer one is cut",
}
"""Faults of the layer that checks arguments (`Knobs.fault`)."""

DEFAULT_SETTINGS = {"mk_alignment_for_contiguous_layout": 128, "deterministic_algorithms": False}
"""Process-global settings of the module: rows between the starts of groups in the prefix-sum layout; whether results
may depend on nothing but a row's own operands, as they always do here."""

_PACKED_GROUPS = 4
_GRAN_K = (32, 128)


class Adapter:
    """A method an op; keyword arguments as in the public signatures.

    Operands of the GEMMs may be K-major or MN-major, with any row pitch. Wrong arguments
    raise RuntimeError (TypeError for what is no tensor or pair) before anything is written.
    """

    def __init__(self, backend: Any) -> None:
        self._knobs: Knobs = backend.knobs
        self.settings: dict[str, Any] = dict(DEFAULT_SETTINGS)

    def bf16_gemm_nt(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        d: torch.Tensor,
        c: torch.Tensor | None = None,
        compiled_dims: str = "nk",
        alpha: float | None = None,
        epilogue: None = None,
    ) -> None:
        """d = alpha * a b^T + c. a: bf16 [m, k], b: bf16 [n, k], d: bf16 or fp32 [m, n], last stride 1.

        c: of d's dtype, expandable to d's shape; may be d itself, then with its sizes and
        strides. m or n of 0: nothing happens; k of 0: d = c, or zeros.
        """
        for operand in (a, b):
            _check_operand(operand, 2, torch.bfloat16)
        a, b = self._same_k(a, b)
        if self._prepared(a.shape[0], b.shape[0], d, c, alpha, epilogue):
            gemm.gemm_nt(a, b, d, self._knobs, c, 1.0 if alpha is None else float(alpha))

    def fp8_gemm_nt(
        self,
        a: tuple[torch.Tensor, torch.Tensor],
        b: tuple[torch.Tensor, torch.Tensor],
        d: torch.Tensor,
        c: torch.Tensor | None = None,
        recipe: tuple[int, int, int] | None = None,
        recipe_a: tuple[int, int] | None = None,
        recipe_b: tuple[int, int] | None = None,
        compiled_dims: str = "nk",
        disable_ue8m0_cast: bool = False,
        alpha: float | None = None,
        epilogue: None = None,
    ) -> None:
        """d = alpha * sum over k blocks of sa * sb * (a b^T) + c.

        a: (e4m3 [m, k] or int8 e2m1 pairs, scales), b likewise with n. Scales: fp32
        [ceil(mn / gran_mn), ceil(k / gran_k)], or with gran_mn 1 packed int32
        [mn, ceil(k / (4 gran_k))] with stride (1, >= align(mn, 4), a multiple of 4).
        gran_k is 32 or 128. Without a recipe: (1, 128, 128), or (1, 1, 128) if b's scales
        are packed. d, c, alpha as in `bf16_gemm_nt`. disable_ue8m0_cast changes nothing
        here: FP32 scales are always used as they are.
        """
        (a, sfa), (b, sfb) = _pair("a", a), _pair("b", b)
        for operand in (a, b):
            _check_operand(operand, 2, torch.float8_e4m3fn, torch.int8)
        a, b = self._same_k(_unpacked(a), _unpacked(b))
        (m, k), n = a.shape, b.shape[0]
        if not self._prepared(m, n, d, c, alpha, epilogue, scaled=True):
            return
        scales = None
        if k:
            (gran_m, gran_a), (gran_n, gran_b) = _granularity(sfb, recipe, recipe_a, recipe_b)
            _check_scales(sfa, m, k, gran_m, gran_a)
            _check_scales(sfb, n, k, gran_n, gran_b)
            scales = gemm.Scales(
                self._row_scales(sfa, m, k, gran_m, gran_a), self._row_scales(sfb, n, k, gran_n, gran_b), gran_a, gran_b
            )
        gemm.gemm_nt(a, b, d, self._knobs, c, 1.0 if alpha is None else float(alpha), scales)

    fp8_fp4_gemm_nt = fp4_gemm_nt = fp8_gemm_nt

    def m_grouped_bf16_gemm_nt_contiguous(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        d: torch.Tensor,
        grouped_layout: torch.Tensor,
        compiled_dims: str = "nk",
        use_psum_layout: bool = False,
        ensure_zero_padding: bool = True,
        expected_m_for_psum_layout: int | None = None,
        epilogue: None = None,
    ) -> None:
        """d[row] = a[row] b[group of row]^T. a: bf16 [m, k] K-major, b: bf16 [g, n, k], d: bf16 [m, n].

        grouped_layout: int32 [m], the group of each row, -1 = padding; or, with
        use_psum_layout, int32 [g], the end row of each group, where groups start on
        multiples of the alignment (a setting). Padding rows are not written, except that
        ensure_zero_padding in the prefix-sum layout computes the rows up to the next start.
        Labels outside -1..g-1 and ends outside 0..m raise RuntimeError.
        """
        _check_operand(a, 2, torch.bfloat16)
        _check_operand(b, 3, torch.bfloat16)
        _require(a.stride(-1) == 1 or a.shape[-1] <= 1, "a must be K-major")
        _require(grouped_layout.is_contiguous(), "grouped_layout must be contiguous")
        _require(d.dim() == 2, "d must have 2 dimensions")
        (m, k), (groups, n) = a.shape, b.shape[:2]
        _require(k == b.shape[2] and tuple(d.shape) == (m, n), "a, b and d must agree in m, n and k")
        _require(n > 0 and k > 0 and groups > 0, "n, k and the number of groups must be positive")
        _require(d.dtype == torch.bfloat16, "d must be bf16")
        _require(grouped_layout.dtype == torch.int32, "grouped_layout must be int32")
        _require(tuple(grouped_layout.shape) == (groups if use_psum_layout else m,), "grouped_layout has a wrong size")
        _require(use_psum_layout or expected_m_for_psum_layout is None, "expected_m belongs to use_psum_layout")
        _check_row_major(d)
        _require(epilogue is None, "Unsupported epilogue")
        if m == 0:
            return
        low, high = (x.item() for x in torch.aminmax(grouped_layout))
        if use_psum_layout:
            _require(low >= 0 and high <= m, "an end lies outside 0..m")
            alignment = self.settings["mk_alignment_for_contiguous_layout"]
            runs = gemm.runs_of_ends(grouped_layout, m, alignment, ensure_zero_padding, self._knobs)
        else:
            _require(low >= -1 and high < groups, "a label lies outside -1..g-1")
            runs = gemm.runs_of_labels(grouped_layout, self._knobs)
        gemm.gemm_groups(a, b, d, runs, self._knobs)

    def per_token_cast_to_fp8(
        self, x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(e4m3 [m, n], scales) of x [m, n], one scale a row and gran_k columns.

        Scales: fp32 [m, ceil(n / gran_k)] = max(amax, 1e-4) / 448, rounded up to a power
        of two with use_ue8m0; with use_packed_ue8m0 int32 [m, ceil(groups / 4)], missing
        bytes 127 (1.0). Raises AssertionError unless x has 2 dimensions, and for packed
        scales that are not rounded.
        """
        if x.dim() != 2 or (use_packed_ue8m0 and not use_ue8m0):
            msg = "x must have 2 dimensions, and packed scales must be powers of two"
            raise AssertionError(msg)
        m, n = x.shape
        recipe = quant.Recipe(
            "e4m3", gran_k, "power_of_two" if use_ue8m0 else "fp32", clamp=1e-4, multiplier="reciprocal"
        )
        codes = torch.empty((m, n), dtype=torch.float8_e4m3fn)
        scales = torch.empty((m, -(-n // gran_k)), dtype=torch.float32)
        quant.cast_rows(x, recipe, codes, scales, self._knobs)
        return codes, quant.pack_exponents(scales, 1.0, self._knobs) if use_packed_ue8m0 else scales

    def _same_k(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if a.shape[1] != b.shape[1] and self._knobs.fault == "unchecked_k":
            k = min(a.shape[1], b.shape[1])
            a, b = a[:, :k], b[:, :k]
        _require(a.shape[1] == b.shape[1], "a and b must have the same k")
        return a, b

    def _prepared(
        self, m: int, n: int, d: torch.Tensor, c: torch.Tensor | None, alpha: float | None, epilogue: Any,
        *, scaled: bool = False,
    ) -> bool:
        """Checks d, c and the epilogue; False where there is nothing to do. `scaled`: d's dtype counts if empty too."""
        _check_row_major(d)
        _require(tuple(d.shape) == (m, n), "d must be [m, n]")
        known = d.dtype in (torch.bfloat16, torch.float32)
        _require(known or not scaled, "d must be bf16 or fp32")
        if m == 0 or n == 0:
            return False
        _require(known, "d must be bf16 or fp32")
        _require(alpha is None or epilogue is None, "alpha and epilogue exclude each other")
        _require(epilogue is None, "Unsupported epilogue")
        if c is not None:
            _require(c.dtype == d.dtype, "c must have the dtype of d")
            if c.data_ptr() == d.data_ptr():
                _require(c.shape == d.shape and c.stride() == d.stride(), "a c on d's memory must have its layout")
            c.expand(m, n)  # a shape that does not broadcast raises RuntimeError here, before anything is written
        return True

    def _row_scales(self, sf: torch.Tensor, mn: int, k: int, gran_mn: int, gran_k: int) -> torch.Tensor:
        """fp32 [mn, ceil(k / gran_k)] of scales in any accepted form."""
        if sf.dtype == torch.int32:
            return quant.unpack_exponents(sf, -(-k // gran_k), self._knobs)
        return sf if gran_mn == 1 else sf[torch.arange(mn) // gran_mn]


def _require(holds: bool, condition: str) -> None:
    """Raises what a failed host check of the real module looks like."""
    if not holds:
        msg = f"Assertion error: {condition}"
        raise RuntimeError(msg)


def _pair(name: str, pair: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        msg = f"{name} must be a pair (data, scales)"
        raise TypeError(msg)
    return pair[0], pair[1]


def _check_operand(t: torch.Tensor, dims: int, *dtypes: torch.dtype) -> None:
    """K-major or MN-major; a stride along an axis of one element does not count."""
    if not isinstance(t, torch.Tensor):
        msg = f"an operand must be a tensor, got {type(t).__name__}"
        raise TypeError(msg)
    _require(t.dim() == dims, "an operand has a wrong number of dimensions")
    _require(t.dtype in dtypes, "an operand has a wrong dtype")
    rows, columns = t.shape[-2:]
    one_major = 1 in (t.stride(-1), t.stride(-2)) or rows <= 1 or columns <= 1
    _require(one_major, "an operand must be contiguous along k or mn")
    if dims > 2:
        _require(t.stride(0) == rows * columns or t.shape[0] <= 1, "groups of an operand must follow each other")


def _check_row_major(d: torch.Tensor) -> None:
    _require(d.dim() == 2, "d must have 2 dimensions")
    _require(d.stride(1) == 1 or d.shape[1] <= 1, "d must be contiguous along n")


def _unpacked(t: torch.Tensor) -> torch.Tensor:
    """An FP4 operand as FP32; it is packed along whichever axis is contiguous."""
    if t.dtype != torch.int8:
        return t
    return quant.unpack_codes(t) if t.stride(1) == 1 else quant.unpack_codes(t.t()).t()


def _granularity(
    sfb: torch.Tensor,
    recipe: tuple[int, int, int] | None,
    recipe_a: tuple[int, int] | None,
    recipe_b: tuple[int, int] | None,
) -> tuple[tuple[int, int], tuple[int, int]]:
    """((gran_m, gran_k of a), (gran_n, gran_k of b))."""
    if recipe is None and recipe_a is None and recipe_b is None:
        recipe = (1, 1, 128) if sfb.dtype == torch.int32 else (1, 128, 128)
    _require((recipe_a is None) == (recipe_b is None), "recipe_a and recipe_b go together")
    _require((recipe is None) != (recipe_a is None), "give recipe, or recipe_a and recipe_b")
    if recipe is not None:
        gran_m, gran_n, gran_k = recipe
        return (gran_m, gran_k), (gran_n, gran_k)
    return tuple(recipe_a), tuple(recipe_b)  # type: ignore[return-value, arg-type]


def _check_scales(sf: torch.Tensor, mn: int, k: int, gran_mn: int, gran_k: int) -> None:
    packed = sf.dtype == torch.int32
    _require(packed or sf.dtype == torch.float32, "scales must be fp32 or packed int32")
    _require(gran_k in _GRAN_K and gran_mn > 0, "Unknown SF transformation: gran_k must be 32 or 128")
    _require(not packed or gran_mn == 1, "Unknown SF transformation: packed scales belong to one row each")
    expected = (-(-mn // gran_mn), -(-k // (gran_k * (_PACKED_GROUPS if packed else 1))))
    _require(tuple(sf.shape) == expected, "scales have a wrong shape")
    if packed:
        aligned = -(-mn // _PACKED_GROUPS) * _PACKED_GROUPS
        _require(sf.stride(0) == 1 or mn == 1, "packed scales must be contiguous along mn")
        _require(sf.stride(1) >= aligned and sf.stride(1) % _PACKED_GROUPS == 0, "packed scales have a wrong stride")
