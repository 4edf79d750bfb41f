"""The picture of a plan: goodput over the checkpoint interval, and where the rest goes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from holdfast.tools.plan.forecast import Forecast, goodputs
from holdfast.tools.plan.reasons import chance, share, span
from holdfast.tools.report.svg import Scale, drawing, marks, tag, text, titled

_WIDTH, _HEIGHT, _LEFT, _RIGHT = 1000.0, 700.0, 84.0, 24.0
_TOP, _BOTTOM, _BARS = 84.0, 380.0, 470.0
_ROW: Final = 34.0
_POINTS: Final = 60
_STYLE: Final = """
svg { font: 13px system-ui, "DejaVu Sans", sans-serif; background: #fff; color-scheme: light dark }
text { fill: #1b1f24 } .mark { fill: #5b6572; font-size: 12px } .grid { stroke: #e3e6ea }
.head { font-size: 16px; font-weight: 600 } .best { fill: #fff; stroke-width: 2.5 }
.curve { fill: none; stroke-width: 2.25 } .own { stroke-width: 3.5 }
.p0 { stroke: #b2433f } .p1 { stroke: #2f6fc1 } .p2 { stroke: #23845c } .p3 { stroke: #8a5cb8 }
.preplicate { stroke: #b9770e }
rect.p0 { fill: #b2433f } rect.p1 { fill: #2f6fc1 } rect.p2 { fill: #23845c }
rect.p3 { fill: #8a5cb8 } rect.preplicate { fill: #b9770e }
.snapshots { fill: #5b8def } .checkpoints { fill: #e0a23a }
.from-memory { fill: #2f9e92 } .from-store { fill: #c8313c }
@media (prefers-color-scheme: dark) {
  svg { background: #16181d } text { fill: #e8eaed } .mark { fill: #a2acb9 }
  .grid { stroke: #323842 }
  .best { fill: #16181d }
}
"""
_PARTS: Final = (
    ("snapshots", "snapshots", "taking snapshots"),
    ("checkpoints", "checkpoints", "writing checkpoints"),
    ("from_memory", "from-memory", "recoveries from memory"),
    ("from_store", "from-store", "recoveries from the store"),
)


def picture(forecasts: Sequence[Forecast], *, chosen: Forecast) -> str:
    """Return an SVG document of forecasts with different parities; one of them is ``chosen``."""
    job = chosen.job
    words = f"{job.nodes} nodes, one fails every {span(job.node_mtbf_s / job.nodes)}"
    parts = [
        tag("style", _STYLE),
        text(_LEFT, 30, f"Goodput by the time between checkpoints: {words}", class_="head"),
        *_legend(forecasts, chosen),
        *_curves(forecasts, chosen),
        text(_LEFT, _BARS - 40, "Where the rest of the time goes, at the best", class_="head"),
        *_bars(forecasts, chosen),
    ]
    height = max(_HEIGHT, _BARS + _ROW * len(forecasts) + 50)
    return drawing(_WIDTH, height, "".join(parts), label="plan of a job")


def _chance(found: Forecast) -> str:
    return chance(found.chance_of_loss(found.wall_s))


def name(found: Forecast) -> str:
    """Return the name of a forecast's parity."""
    parity = found.job.parity
    return "whole copies" if parity == "replicate" else f"parity {parity}"


def _class(found: Forecast) -> str:
    return f"p{found.job.parity}"


def _legend(forecasts: Sequence[Forecast], chosen: Forecast) -> list[str]:
    parts, at = [], _LEFT
    for each in forecasts:
        own = " (this plan)" if each is chosen else ""
        parts.append(tag("rect", x=at, y=49.0, width=14, height=14, rx=3, class_=_class(each)))
        words = name(each) + own
        parts.append(text(at + 20, 61, words))
        at += 44 + 7.6 * len(words)
    return parts


def _curves(forecasts: Sequence[Forecast], chosen: Forecast) -> list[str]:
    lines = [_points(each, chosen) for each in forecasts]
    low = min(goodput for line in lines for _, goodput in line)
    high = max(goodput for line in lines for _, goodput in line)
    at_best = [each.intervals.checkpoint * each.job.step_s for each in forecasts]
    low = max(low, min(each.goodput for each in forecasts) - 3 * (1 - high) - 0.01, 0.0)
    times = [at_s for line in lines for at_s, _ in line]
    x = Scale(
        domain=(math.log10(min(times)), math.log10(max(times))), range=(_LEFT, _WIDTH - _RIGHT)
    )
    y = Scale(domain=(low, high + 0.04 * (high - low or 0.01)), range=(_BOTTOM, _TOP))
    parts = []
    for mark in marks(*y.domain, about=5):
        parts.append(
            tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y(mark), y2=y(mark), class_="grid")
        )
        words = f"{mark * 100:.4g} %"
        parts.append(text(_LEFT - 8, y(mark) + 4, words, class_="mark", text_anchor="end"))
    for at_s in _ticks(min(times), max(times)):
        at = x(math.log10(at_s))
        parts.append(tag("line", x1=at, x2=at, y1=_TOP, y2=_BOTTOM, class_="grid"))
        parts.append(text(at, _BOTTOM + 18, span(at_s), class_="mark", text_anchor="middle"))
    both = sorted(zip(forecasts, lines, strict=True), key=lambda pair: pair[0] is chosen)
    for each, line in both:  # the plan's own lies on top
        shown = [(x(math.log10(at_s)), y(goodput)) for at_s, goodput in line if goodput >= low]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in shown)
        own = " own" if each is chosen else ""
        parts.append(tag("path", d=path, class_=f"curve {_class(each)}{own}"))
    for each, best_s in zip(forecasts, at_best, strict=True):
        words = f"{name(each)}: best {span(best_s)}, goodput {each.goodput:.2%}"
        place = {"cx": x(math.log10(best_s)), "cy": y(each.goodput)}
        parts.append(tag("circle", titled(words), r=5, class_=f"best {_class(each)}", **place))
    return parts


def _points(found: Forecast, chosen: Forecast) -> list[tuple[float, float]]:
    """Return goodputs over useful seconds between checkpoints, around the best of all plans."""
    job, every = found.job, found.intervals.snapshot
    best_s = chosen.intervals.checkpoint * job.step_s
    low, high = best_s / 30.0, best_s * 100.0
    wanted = (low * (high / low) ** (at / _POINTS) for at in range(_POINTS + 1))
    counts = sorted({max(round(each / job.step_s / every), 1) * every for each in wanted})
    times = [count * job.step_s for count in counts]
    return list(zip(times, goodputs(job, every, counts), strict=True))


def _ticks(low_s: float, high_s: float) -> list[float]:
    known = (1, 10, 60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 30 * 86400, 365.25 * 86400)
    return [float(at_s) for at_s in known if low_s <= at_s <= high_s]


def _bars(forecasts: Sequence[Forecast], chosen: Forecast) -> list[str]:
    left, right = _LEFT + 60.0, 330.0
    most = max(1.0 - each.goodput for each in forecasts) or 1.0
    x = Scale(domain=(0.0, most), range=(left, _WIDTH - right))
    parts, at = [], _LEFT
    for _, kind, words in _PARTS:
        parts.append(tag("rect", x=at, y=_BARS - 26, width=14, height=14, rx=3, class_=kind))
        parts.append(text(at + 20, _BARS - 14, words))
        at += 44 + 7.4 * len(words)
    for row, each in enumerate(forecasts):
        y = _BARS + _ROW * row
        weight = 650 if each is chosen else None
        label = {"text_anchor": "end", "font_weight": weight}
        parts.append(text(left - 10, y + 18, name(each), **label))
        done = 0.0
        for field, kind, what in _PARTS:
            value = getattr(each.costs, field)
            start, end = x(done), x(done + value)
            words = titled(f"{what}: {share(value)}")
            place = {"x": start, "y": y, "width": max(end - start, 0.0), "height": 24}
            parts.append(tag("rect", words, class_=kind, **place))
            done += value
        words = f"{share(1.0 - each.goodput)} of the time; memory loses steps: {_chance(each)}"
        parts.append(text(x(done) + 8, y + 17, words, class_="mark"))
    return parts
