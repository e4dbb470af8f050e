"""What other people's criteria say about an output: told beside the verdict, never a verdict.

Each criterion compares what was observed with the oracle's float64 value and answers a value, its limit and whether
it holds. They are kept to what their authors wrote, blind spots included (docs/criteria.md tells both), so that a
figure here can be held against a figure elsewhere. A correct kernel may fail some of them and a broken one may pass
all of them: nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import isfinite
from typing import Any

import numpy as np

from references.criteria_data import (
    DOUBLE_THOUSANDTH,
    DUAL_LIMITS,
    FA_STEP,
    MERE,
    MIXED,
    MIXED_SHARE,
    PERCENTILES,
    TORCH_CLOSE,
    Own,
    level_of,
    own_of,
)
from references.criteria_pair import Pair, calc_diff, calc_diff_product, cosine_distance, same
from references.formats import codec
from references.formats.spec import FLOATS

__all__ = ["CRITERIA", "Criterion", "Pair", "calc_diff", "calc_diff_product", "cosine_distance", "criteria"]

Array = np.ndarray
Entry = dict[str, Any]


def _entry(value: float | None, limit: float | None = None, holds: bool | None = None, **more: Any) -> Entry:
    return {"value": value, "limit": limit, "holds": None if holds is None else bool(holds), **more}


# --- distances of whole vectors ---------------------------------------------------------------------------

def _calc_diff(p: Pair) -> Entry:
    value = p.calc_diff
    return _entry(value, 1e-3, value < 1e-3)


def _calc_diff_product(p: Pair) -> Entry:
    value = calc_diff_product(p.observed, p.golden)
    return _entry(value, 1e-3, value < 1e-3)


def _cosine(p: Pair) -> Entry:
    value = cosine_distance(p.observed, p.golden)
    return _entry(value, 1e-2, value <= 1e-2)


# --- element by element -----------------------------------------------------------------------------------

def _outside(p: Pair, rtol: float, atol: float, *, equal_nan: bool) -> float:
    """Share of elements with |observed - golden| > atol + rtol |golden|; equal infinities are inside."""
    inside = p.error <= atol + rtol * p.magnitude
    if p.finite is not None:
        inside &= p.finite  # an infinite golden value has an infinite tolerance
        inside |= same(p.observed, p.golden) if equal_nan else p.observed == p.golden
    return _wrong(inside)


def _wrong(inside: Array) -> float:
    """Share of elements that are not inside; counted, since 1 minus the other share misses a limit by a rounding."""
    return (inside.size - int(np.count_nonzero(inside))) / inside.size


def _allclose(p: Pair) -> Entry:
    value = _outside(p, 1e-2, 1e-2, equal_nan=True)
    return _entry(value, 0.0, value == 0.0)


def _torch_close(p: Pair) -> Entry:
    value = _outside(p, *TORCH_CLOSE[p.fmt], equal_nan=False)
    return _entry(value, 0.0, value == 0.0)


def _double_thousandth(p: Pair) -> Entry:
    """It fails only where both shares are too large. NaN, and infinity minus infinity, count as wrong in both."""
    loss = DOUBLE_THOUSANDTH[p.fmt]
    error = np.abs(p.observed - p.rounded)
    largest = np.maximum(np.abs(p.observed), np.abs(p.rounded))
    absolute = _wrong(error <= loss)
    relative = _wrong(error / (largest + 1e-9) <= loss)
    return _entry(min(absolute, relative), loss, min(absolute, relative) <= loss, absolute=absolute, relative=relative)


def _mere(p: Pair) -> Entry:
    n = p.relative.size
    return _relative_entry(p, MERE[p.fmt], float(p.relative.sum()) / n if n else None)


def _mare(p: Pair) -> Entry:
    return _relative_entry(p, 10 * MERE[p.fmt], float(p.relative.max()) if p.relative.size else None)


def _relative_entry(p: Pair, limit: float, value: float | None) -> Entry:
    """Finite points count; where one side is NaN or infinite and the other differs, the rule has failed."""
    return _entry(value, limit, not p.differing and (value is None or value < limit), differing=p.differing)


def _mixed(p: Pair) -> Entry:
    """Infinities are compared with the golden value as the output's format holds it; a differing one fails."""
    rtol, atol, fixed = MIXED[p.fmt]
    error, golden = p.at_finite(p.error), p.at_finite(p.golden)
    inside = int(np.count_nonzero(error <= atol + rtol * p.at_finite(p.magnitude)))
    differing = 0
    if p.finite is not None:
        odd = ~p.finite
        alike = int(np.count_nonzero(same(p.observed[odd], p.rounded[odd])))
        differing = int(np.count_nonzero(odd)) - alike
        inside += alike
    largest, cap = 0.0, fixed
    if error.size:
        at = int(np.argmax(error))
        largest = float(error[at])
        cap = max(fixed, 32 * float(codec.ulp(codec.round_to(golden[at : at + 1], p.fmt), p.fmt)[0]))
    share = inside / p.count
    return _entry(share, MIXED_SHARE, share >= MIXED_SHARE and largest <= cap and not differing,
                  max_absolute=largest, max_absolute_limit=cap, differing=differing)


# --- figures without a limit ------------------------------------------------------------------------------

def _max_absolute(p: Pair) -> Entry:
    return _entry(float(p.at_finite(p.error).max(initial=0.0)), differing=p.differing)


def _max_relative(p: Pair) -> Entry:
    """0 / 0 is 0; an error where the golden value is 0 is infinite."""
    error = p.at_finite(p.error)
    ratio = np.divide(error, p.at_finite(p.magnitude), out=np.zeros(error.shape), where=error > 0)
    return _entry(float(ratio.max(initial=0.0)))


def _ulp(p: Pair) -> Entry:
    """Nearest-rank percentiles of |observed - golden| in units of the output's last place; value is the largest."""
    units = p.at_finite(p.error) / p.ulp
    n = units.size
    if not n:
        return _entry(None)
    ranks = {name: max(0, int(np.ceil(q * n)) - 1) for name, q in PERCENTILES.items()}
    ordered = np.partition(units, sorted({*ranks.values(), n - 1}))
    return _entry(float(ordered[-1]), **{name: float(ordered[r]) for name, r in ranks.items()})


def _bias(p: Pair) -> Entry:
    """Mean of (observed - golden) in units of the output's last place; `outward` is that of the magnitudes.

    Both are near 0 without a bias. A truncating cast of data of both signs shows in `outward` only.
    """
    units = p.at_finite(p.signed) / p.ulp
    if not units.size:
        return _entry(None)
    return _entry(float(units.mean()), outward=float(np.sign(p.at_finite(p.golden)) @ units) / units.size)


def _sign_balance(p: Pair) -> Entry:
    """P(observed < golden) + P(equal) / 2 - 1/2: a fair rounding is as often above as below."""
    less, equal = np.count_nonzero(p.observed < p.golden), np.count_nonzero(p.observed == p.golden)
    value, limit = (less + equal / 2) / p.count - 0.5, 10 / p.count**0.5
    return _entry(value, limit, abs(value) < limit)


def _correctly_rounded(p: Pair) -> Entry:
    """Share of elements that are the golden value rounded once; any NaN for NaN, zeros of either sign."""
    return _entry(np.count_nonzero(same(p.observed, p.rounded)) / p.count)


# --- with another result ----------------------------------------------------------------------------------

def _flash_attention(p: Pair) -> Entry:
    """All in the output's format, as there: the golden value is rounded, and so is every step of ref + 0.3 - 0.3."""
    assert p.low_precision is not None
    noise = codec.round_to(codec.round_to(p.rounded + FA_STEP, p.fmt) - FA_STEP, p.fmt) - p.rounded
    value = float(np.max(np.abs(p.observed - p.rounded)))
    limit = 2 * float(np.max(np.abs(p.low_precision - p.rounded))) + 2 * float(np.max(np.abs(noise)))
    return _entry(value, limit, value <= limit)


def _dual_benchmark(p: Pair) -> Entry:
    """Errors of ours over those of the reference run; value is the worst ratio over its limit at the op's level.

    Points where all three are finite count. 0 over 0 is 0: no error is never worse.
    """
    assert p.reference is not None
    usable = np.isfinite(p.reference) & (True if p.finite is None else p.finite)
    ours, golden = p.observed[usable], p.golden[usable]
    level = level_of(p.op)
    if not golden.size:
        return _entry(None, 1.0, False if p.differing else None, level=level, differing=p.differing)
    theirs = p.reference[usable]
    ratios = {name: _ratio(mine, other) for (name, mine), other in
              zip(_errors(ours, golden).items(), _errors(theirs, golden).values(), strict=True)}
    worst = {lvl: max(ratios[n] / limits[n] for n in limits) for lvl, limits in DUAL_LIMITS.items()}
    best = [lvl for lvl, w in worst.items() if w <= 1.0]
    return _entry(worst[level], 1.0, worst[level] <= 1.0 and not p.differing, level=level,
                  best_level=best[-1] if best else "none", differing=p.differing, **ratios)


def _errors(x: Array, golden: Array) -> dict[str, float]:
    error = np.abs(x - golden)
    relative = error / (np.abs(golden) + 1e-7)
    rmse = float(error @ error / x.size) ** 0.5
    return {"mare": float(relative.max()), "mere": float(relative.mean()), "rmse": rmse}


def _ratio(mine: float, other: float) -> float:
    return mine / other if other else (np.inf if mine else 0.0)


# --- the module's own -------------------------------------------------------------------------------------

def _own(p: Pair) -> Entry | None:
    row = own_of(p.op, p.output)
    if row is None:
        return None
    if row.rule == "torch_close" and p.fmt not in TORCH_CLOSE:
        return None
    return {"rule": row.rule, **RULES[row.rule](p, row)}


def _own_calc_diff(p: Pair, row: Own) -> Entry:
    value = calc_diff(p.observed + row.shift, p.golden + row.shift) if row.shift else p.calc_diff
    return _entry(value, row.limit, value < row.limit)


def _own_allclose(p: Pair, row: Own) -> Entry:
    value = _outside(p, row.rtol, row.atol, equal_nan=row.equal_nan)
    return _entry(value, row.limit, value <= row.limit)


def _own_equal(p: Pair, row: Own) -> Entry:
    value = _wrong(same(p.observed, p.rounded))
    return _entry(value, 0.0, value == 0.0)


def _own_flashmla(p: Pair, row: Own) -> Entry:
    """An element passes by its absolute or its relative error; the same NaN and infinities, which then count as 0."""
    observed, golden = p.observed, p.golden
    if p.finite is not None:
        observed = np.where(np.isfinite(observed), observed, 0.0)
        golden = np.where(np.isfinite(golden), golden, 0.0)
    error = np.abs(observed - golden)
    inside = (error < row.atol) | (error / (np.abs(golden) + 1e-6) < row.rtol)
    value = _wrong(inside)
    cosine = calc_diff(observed, golden) if float(golden @ golden) >= 1e-12 else 0.0
    return _entry(value, 0.0, value == 0.0 and cosine <= row.cosine and not p.differing,
                  cos_diff=cosine, cos_diff_limit=row.cosine, differing=p.differing)


RULES: dict[str, Callable[[Pair, Own], Entry]] = {
    "calc_diff": _own_calc_diff, "allclose": _own_allclose, "equal": _own_equal, "flashmla": _own_flashmla,
    "torch_close": lambda p, row: _torch_close(p),
}

# --- the tables -------------------------------------------------------------------------------------------

ANY_FLOAT, ANY = frozenset(FLOATS) - {"e8m0", "e8m0_byte", "e8m0x4"}, frozenset(codec.CODE_DTYPES)


@dataclass(frozen=True)
class Criterion:
    """One criterion: its name in results, where it comes from and what it applies to."""

    name: str
    function: Callable[[Pair], Entry | None]
    source: str
    formats: frozenset[str] = ANY_FLOAT
    brief: bool = False
    """cheap enough to be told of every output"""
    needs: str = ""
    """the further array without which it says nothing"""


CANN = "CANN opbase, operator precision standard"
CRITERIA: tuple[Criterion, ...] = (
    Criterion("own", _own, "the module's own tests, row by row in criteria_data.OWN", ANY, True),
    Criterion("calc_diff", _calc_diff, "DeepGEMM testing/numeric.py, sum of squares; 1e-3 is for FP8", brief=True),
    Criterion("calc_diff_product", _calc_diff_product, "DeepGEMM and TileKernels, testing/numeric.py, as written"),
    Criterion("allclose", _allclose, "TileLang, testing: rtol = atol = 1e-2, NaN equal", brief=True),
    Criterion("torch_close", _torch_close, "torch.testing.assert_close, defaults by dtype", frozenset(TORCH_CLOSE)),
    Criterion("double_thousandth", _double_thousandth, "Ascend C samples, verify_result.py; BF16 as msprobe",
              frozenset(DOUBLE_THOUSANDTH)),
    Criterion("mere", _mere, f"{CANN}, single benchmark", frozenset(MERE), True),
    Criterion("mare", _mare, f"{CANN}, single benchmark", frozenset(MERE), True),
    Criterion("mixed_tolerance", _mixed, f"{CANN}, mixed tolerance of 2026", frozenset(MIXED)),
    Criterion("cosine", _cosine, "CANN ops-test-kit, cosine: 1 - cos at most 1e-2"),
    Criterion("max_absolute", _max_absolute, "common practice", ANY, True),
    Criterion("max_relative", _max_relative, "common practice"),
    Criterion("ulp", _ulp, "IEEE 754 units in the last place, as msprobe and the OpenCL CTS count them"),
    Criterion("bias_ulp", _bias, "error balance of msprobe, here in units of the last place"),
    Criterion("sign_balance", _sign_balance, "TileKernels, testing/numeric.py check_bias"),
    Criterion("correctly_rounded", _correctly_rounded, "IEEE 754 rounding to nearest even", ANY),
    Criterion("flash_attention", _flash_attention, "FlashAttention tests: factor 2 and the noise of + 0.3 - 0.3",
              needs="low_precision"),
    Criterion("dual_benchmark", _dual_benchmark, f"{CANN}, commercial dual benchmark", needs="reference"),
)
"""Every criterion by the name that results have; one row each."""


@cache
def _applying(fmt: str, brief: bool, further: tuple[str, ...]) -> tuple[Criterion, ...]:
    return tuple(c for c in CRITERIA if fmt in c.formats and (c.brief or not brief)
                 and (not c.needs or c.needs in further))


def criteria(observed: Array, golden: Array, fmt: str, *, module: str | None = None, op: str | None = None,
             output: str | None = None, low_precision: Array | None = None, reference: Array | None = None,
             unspecified: Array | bool | None = None, brief: bool = False) -> dict[str, Entry]:
    """{criterion: {"value", "limit", "holds", ..}} of one output, ready for JSON.

    observed: what came back, decoded; golden: the oracle's value, not rounded; low_precision, reference: further
    results for the same problem, decoded. All of one shape; float64, or integers, which are compared as float64.
    fmt: the output's format. module, op (`module.name` or `name`) and output choose the module's own criterion.
    unspecified: True where the contract says nothing; such elements are left out. brief: the cheap ones only.
    holds is None where a criterion has no limit, or has seen no element; value is None there too. NaN and infinities
    are the words 'nan', 'inf' and '-inf'. Raises ValueError where shapes differ, KeyError for an unknown format.
    """
    codec.storage(fmt)
    given = {"observed": observed, "golden": golden, "low_precision": low_precision, "reference": reference}
    arrays = {name: np.asarray(a, np.float64) for name, a in given.items() if a is not None}
    shape = arrays["observed"].shape
    if any(a.shape != shape for a in arrays.values()):
        msg = f"shapes differ: {', '.join(f'{name} {a.shape}' for name, a in arrays.items())}"
        raise ValueError(msg)
    if unspecified is None:
        flat = {name: a.reshape(-1) for name, a in arrays.items()}
    else:
        keep = ~np.broadcast_to(np.asarray(unspecified, bool), shape)
        flat = {name: a[keep] for name, a in arrays.items()}
    full = op or ""
    if module and not full.startswith(f"{module}."):
        full = f"{module}.{full}"
    with np.errstate(all="ignore"):
        pair = Pair(**flat, fmt=fmt, op=full, output=(output or "").split("/")[-1].split("@")[0])
        out = {}
        for c in _applying(fmt, brief, tuple(flat)):
            entry = c.function(pair) if pair.count else _entry(None)
            if entry is not None:
                out[c.name] = {k: _shown(v) for k, v in entry.items()}
    return out


def _shown(value: Any) -> Any:
    """JSON numbers, with NaN and infinities as words."""
    if isinstance(value, float):
        return float(value) if isfinite(value) else str(float(value))
    return value
