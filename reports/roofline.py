"""A roofline as SVG without scripts: what each op reaches, under what its device can do. Colours are the page's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reports.markup import Html, tag
from reports.speed_data import Timed, share_text, time_text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 420, 76, 150, 16, 52
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def _rate_text(flops: float) -> str:
    scale, letter = next(((s, x) for s, x in _UNITS if flops >= s), (1.0, ""))
    return f"{flops / scale:.3g} {letter}FLOPS"


class _Axis:
    """Decades between two positions."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.low = math.floor(math.log10(min(values)) - 0.1)
        self.high = max(math.ceil(math.log10(max(values)) + 0.1), self.low + 1)
        self.start, self.end = start, end

    def at(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)

    @property
    def decades(self) -> list[int]:
        return list(range(self.low, self.high + 1))


def roofline(timed: Sequence[Timed]) -> Html | None:
    """Operations a second over operations a byte; None where no op both computes and moves.

    A dot is the time, its bar the 95 % interval. Slanted: bandwidth. Level: peaks of the units that the ops use.
    """
    dots = [t for t in timed if t.flops and t.bytes]
    if not dots:
        return None
    bandwidths = {b for t in dots if (b := t.peak("bytes_s"))}
    roofs = {t.unit: p for t in dots if (p := t.peak("flops_s"))}
    intensities = [t.flops / t.bytes for t in dots]
    rates = [t.flops / s for t in dots for s in (t.low_s, t.high_s)]
    ridge = [p / b for p in roofs.values() for b in bandwidths]
    x = _Axis([*intensities, *ridge], LEFT, WIDTH - RIGHT)
    y = _Axis([*rates, *roofs.values()], HEIGHT - BOTTOM, TOP)
    parts: list[Html] = []
    for d in x.decades:
        at = f"{x.at(10.0**d):.1f}"
        parts += [tag("line", x1=at, x2=at, y1=TOP, y2=HEIGHT - BOTTOM, class_="grid"),
                  tag("text", f"{10.0**d:g}", x=at, y=HEIGHT - BOTTOM + 18, text_anchor="middle")]
    for d in y.decades:
        at = f"{y.at(10.0**d):.1f}"
        parts += [tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"),
                  tag("text", _rate_text(10.0**d), x=LEFT - 6, y=at, dy=4, text_anchor="end")]
    parts.append(tag("text", "operations per byte", x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 12, text_anchor="middle",
                     class_="axis"))
    parts += _roofs(x, y, bandwidths, roofs)
    for n, t in enumerate(dots, 1):
        parts.append(_dot(n, t, x, y))
    words = "Roofline: " + "; ".join(f"{t.label} {_rate_text(t.flops / t.time_s)}" for t in dots)
    plot = tag("svg", tag("title", words), *parts, class_="roofline", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img")
    names = (tag("li", f"{t.label}: {_rate_text(t.flops / t.time_s)} at {t.flops / t.bytes:.3g} operations a byte")
             for t in dots)
    return tag("figure", plot, tag("figcaption", tag("ol", *names, class_="dots")))


def _roofs(x: _Axis, y: _Axis, bandwidths: set[float], roofs: dict[str, float]) -> list[Html]:
    parts = []
    low, high, top = 10.0**x.low, 10.0**x.high, max(roofs.values(), default=10.0**y.high)
    for b in sorted(bandwidths):
        # From the left or lower edge, whichever it meets, up to the highest roof.
        start, end = max(low, 10.0**y.low / b), min(high, top / b)
        if start < end:
            parts.append(tag("line", tag("title", f"{b / 1e9:.4g} GB/s"), x1=f"{x.at(start):.1f}",
                             y1=f"{y.at(start * b):.1f}", x2=f"{x.at(end):.1f}", y2=f"{y.at(end * b):.1f}",
                             class_="roof"))
    slowest = min(bandwidths, default=None)
    by_height: dict[float, list[str]] = {}
    for unit, peak in roofs.items():
        by_height.setdefault(peak, []).append(unit)
    for peak, units in by_height.items():
        start = max(low, peak / slowest) if slowest else low
        at = f"{y.at(peak):.1f}"
        parts += [tag("line", x1=f"{x.at(min(start, high)):.1f}", x2=WIDTH - RIGHT, y1=at, y2=at, class_="roof"),
                  tag("text", f"{', '.join(units)} {_rate_text(peak)}", x=WIDTH - RIGHT + 6, y=at, dy=4)]
    return parts


def _dot(number: int, t: Timed, x: _Axis, y: _Axis) -> Html:
    at, height = x.at(t.flops / t.bytes), y.at(t.flops / t.time_s)
    said = f"{t.label}: {time_text(t.time_s)}, {_rate_text(t.flops / t.time_s)}"
    return tag("g", tag("title", said),
               tag("line", x1=f"{at:.1f}", x2=f"{at:.1f}", y1=f"{y.at(t.flops / t.high_s):.1f}",
                   y2=f"{y.at(t.flops / t.low_s):.1f}", class_="interval"),
               tag("circle", cx=f"{at:.1f}", cy=f"{height:.1f}", r=4),
               tag("text", number, x=f"{at + 7:.1f}", y=f"{height:.1f}", dy=-4),
               class_="dot unstable" if t.unstable else "dot")


def share_bar(share: float | None) -> Html | None:
    """The share of the roofline as a bar."""
    if share is None:
        return None
    return tag("svg", tag("rect", width=f"{100 * min(share, 1.0):.2f}", height=8), class_="share", viewBox="0 0 100 8",
               preserveAspectRatio="none", role="img", aria_label=share_text(share))
