"""From a time to fractions of peaks and to a verdict against what is published about that chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.catalogue.peaks import Claim, chip_named, chips, claims
from conformance.engine.attempt import Bench
from conformance.engine.executor import Executor
from conformance.engine.leases import Lease
from conformance.engine.timing_stats import Interval
from conformance.model import Cost
from conformance.speed import TimedCase

CLAIM_SLACK = 0.02
"""points that the lower end of a fraction may be below a published one"""
MEASURED_SLACK = 4.0
"""how far above a rate that was measured in the same run a figure must be to be impossible: other processes may have
slowed the measurement"""
RATES_TIMEOUT_S = 300.0
NOTHING = "nothing is published about this work"


@dataclass
class Rates:
    """What times are compared with: published peaks of the chip, and what simple work reached on this device."""

    chip: str = ""
    source: str = ""
    nominal: dict[str, float] = field(default_factory=dict)
    """operations a second by unit (`bf16`, `vector_fp32`), and `bytes`; empty where nothing is published"""
    attained: dict[str, float] = field(default_factory=dict)
    cache_bytes: float = 0.0

    def peak(self, unit: str | None) -> tuple[float | None, bool]:
        """(rate, whether it is a published one). A measured one stands in where none is published."""
        if unit is None:
            return None, bool(self.nominal)
        if self.nominal:
            return self.nominal.get(unit), True
        return self.measured(unit), False

    def measured(self, unit: str) -> float | None:
        """The rate that simple work reached. Formats that torch has no product of on a host run as FP32 there."""
        if unit in self.attained:
            return self.attained[unit]
        return None if self.nominal else self.attained.get("fp32")


def rates_of(bench: Bench, lease: Lease) -> Rates:
    """Measured once a bench, published ones looked up: by the description, else by the name that the driver gives."""
    if bench.rates is None:
        executor = Executor(bench.launcher, bench.pool, 1, bench.case_timeout_s, "", lease.devices[:1], lease.fds[:1])
        try:
            executor.send([{"cmd": "rates"}])
            answer = executor.collect(RATES_TIMEOUT_S).answers[0] or {}
        finally:
            executor.kill()
        bench.rates = published(bench.description.peaks, answer.get("name", ""))
        bench.rates.attained = {k: v for k, v in answer.get("rates", {}).items() if v > 0}
    return bench.rates


def published(peaks: Mapping[str, Any], device_name: str) -> Rates:
    """The published peaks that a description names, or brings along, or that the device's name leads to.

    Raises ValueError for a chip that peaks.toml does not have.
    """
    if "tflops" in peaks or "tb_s" in peaks:
        nominal = {k: float(v) * 1e12 for k, v in peaks.get("tflops", {}).items()}
        if "tb_s" in peaks:
            nominal["bytes"] = float(peaks["tb_s"]) * 1e12
        return Rates(str(peaks.get("chip", "")), str(peaks.get("source", "the backend's description")), nominal)
    if "chip" in peaks and peaks["chip"] not in chips():
        msg = f"the description names chip {peaks['chip']!r}; peaks.toml has {', '.join(chips())}"
        raise ValueError(msg)
    chip = chips().get(str(peaks.get("chip", ""))) or (chip_named(device_name) if device_name else None)
    if chip is None:
        return Rates(source=str(peaks.get("source", "measured in the run")))
    units = [*chip.tflops, *(f"vector_{k}" for k in chip.vector_tflops)]
    nominal = {u: rate for u in units if (rate := chip.flops(u)) is not None}
    return Rates(chip.id, chip.source, {**nominal, "bytes": chip.memory_tb_s * 1e12}, cache_bytes=chip.cache_mb * 2**20)


def grade(found: Interval, cost: Cost, own: Cost | None, case: TimedCase, rates: Rates) -> dict[str, Any]:
    """Rates, fractions and verdict of one time. A fraction of something unknown is None."""
    assert case.speed is not None
    assert case.of is not None
    unit = case.speed.engine(case.of) if cost.flops else None
    peak, is_published = rates.peak(unit)
    bandwidth = rates.nominal.get("bytes") or (None if rates.nominal else rates.attained.get("bytes"))
    least = [t for t in (cost.flops / peak if peak else None, cost.bytes / bandwidth if bandwidth else None) if t]
    longer = peak and bandwidth and cost.bytes / bandwidth > cost.flops / peak
    bound = "bytes" if longer or not cost.flops else "flops"
    measured = rates.measured(unit) if unit else None
    slow = rates.attained.get("bytes")
    attainable = (cost.bytes / slow if slow else None) if bound == "bytes" else (
        cost.flops / measured if measured else None)
    top = (cost.bytes / bandwidth if bandwidth else None) if bound == "bytes" else (cost.flops / peak if peak else None)
    out: dict[str, Any] = {
        "flops": cost.flops, "bytes": cost.bytes, "bound": bound, "unit": unit,
        "tflops": cost.flops / found.time_s / 1e12, "gb_s": cost.bytes / found.time_s / 1e9,
        "own": None if own is None else {
            "rule": case.speed.own_rule, "flops": own.flops, "bytes": own.bytes,
            "tflops": own.flops / found.time_s / 1e12, "gb_s": own.bytes / found.time_s / 1e9},
        "peak": {"chip": rates.chip, "source": rates.source, "published": bool(rates.nominal), "flops_s": peak,
                 "bytes_s": bandwidth},
        "attained": {"flops_s": measured, "bytes_s": slow},
        "fraction_nominal": top / found.time_s if top and rates.nominal else None,
        "fraction_attainable": attainable / found.time_s if attainable else None,
        "fraction_roofline": max(least) / found.time_s if least else None,
        "fraction_low": max(least) / found.high_s if least else None,
        "fraction_high": max(least) / found.low_s if least else None,
    }
    verdict, why = impossible(found, cost, peak, bandwidth, rates, is_published)
    compared = [_against(claim, found, cost, own, rates) for claim in claims() if not claim.why
                and claim.op == case.op.name and case.workload is not None and claim.workload == case.workload.name]
    out["claims"] = compared
    if not verdict:
        graded = [c for c in compared if c["verdict"] != "not comparable"]
        verdict = graded[0]["verdict"] if graded else "not comparable"
        why = graded[0]["why"] if graded else (compared[0]["why"] if compared else NOTHING)
    return {**out, "verdict": verdict, "why": why}


def impossible(found: Interval, cost: Cost, peak: float | None, bandwidth: float | None, rates: Rates,
               is_published: bool) -> tuple[str, str]:
    """`too fast` where even the slow end of the interval needs more than the peak; counting or clock is wrong then."""
    slack = 1.0 if rates.nominal else MEASURED_SLACK
    what = "published" if rates.nominal else f"{MEASURED_SLACK:g} times the measured"
    if peak and cost.flops / found.high_s > slack * peak:
        return "too fast", (f"{cost.flops / found.high_s / 1e12:.4g} TFLOPS at the least, above the {what} peak of "
                            f"{peak / 1e12:.4g}: the operations are not all done, or not all timed")
    # What fits a cache need not come from memory, and what is written need not have got there.
    large = not rates.nominal or (rates.cache_bytes and cost.bytes > 4 * rates.cache_bytes)
    if bandwidth and large and cost.bytes / found.high_s > slack * bandwidth:
        return "too fast", (f"{cost.bytes / found.high_s / 1e9:.4g} GB/s at the least, above the {what} "
                            f"{bandwidth / 1e9:.4g} of memory: the bytes are not all moved, or not all timed")
    return "", ""


def _against(claim: Claim, found: Interval, cost: Cost, own: Cost | None, rates: Rates) -> dict[str, Any]:
    """One published claim beside what was measured: the slow end of the interval against the claimed share of peak."""
    row: dict[str, Any] = {"what": claim.what, "chips": list(claim.chips), "figure": claim.figure, "unit": claim.unit,
                           "source": claim.source, "claimed": None, "low": None}
    if rates.chip not in claim.chips:
        here = f"this is {rates.chip}" if rates.chip else "no published peak is known of this device"
        return {**row, "verdict": "not comparable", "why": f"published of {' and '.join(claim.chips)}; {here}"}
    chip = chips()[rates.chip]
    claimed = claim.of_peak(chip)
    whole = chip.flops(claim.peak)
    work = own or cost
    if claimed is None or whole is None:
        why = f"no peak of {claim.peak} is published without contradiction"
        return {**row, "verdict": "not comparable", "why": why}
    low = work.flops / found.high_s / whole
    row |= {"claimed": claimed, "low": low}
    if found.unstable:
        return {**row, "verdict": "not comparable", "why": f"the time is unstable: half-width {found.half_width:.0%}"}
    word = "meets" if low >= claimed - CLAIM_SLACK else "below"
    return {**row, "verdict": word, "why": f"{low:.1%} of peak at the least, {claimed:.1%} are claimed"}
