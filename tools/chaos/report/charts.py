"""Charts of many recoveries: functions from plain values to SVG text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.tools.chaos.report.summary import Repair
from holdfast.tools.report.charts import WIDTH
from holdfast.tools.report.svg import Scale, drawing, marks, tag, text, titled

_LEFT: Final = 190.0
_RIGHT: Final = 90.0
_ROW: Final = 34.0
_TOP: Final = 10.0


def spreads(repairs: Sequence[Repair]) -> str:
    """Draw every recovery as a dot, one row per class of faults; bars mark p50 and p95."""
    longest = max(repair.total.most_s for repair in repairs) or 1.0
    x = Scale(domain=(0.0, longest), range=(_LEFT, WIDTH - _RIGHT))
    bottom = _TOP + _ROW * len(repairs)
    parts = []
    for mark in marks(0.0, longest, about=8):
        parts.append(tag("line", x1=x(mark), x2=x(mark), y1=4, y2=bottom, class_="grid"))
        parts.append(text(x(mark), bottom + 15, f"{mark:g} s", class_="mark", text_anchor="middle"))
    for number, repair in enumerate(repairs):
        parts += _row(repair, x, _TOP + _ROW * number)
    return drawing(WIDTH, bottom + 22, "".join(parts), label="recoveries by class of faults")


def _row(repair: Repair, x: Scale, y: float) -> list[str]:
    middle, total = y + _ROW / 2 - 3, repair.total
    parts = [
        text(
            _LEFT - 10, middle + 4, repair.fault.replace("_", " "), class_="seat", text_anchor="end"
        )
    ]
    parts += [
        tag("circle", titled(f"{seconds:.3f} s"), cx=x(seconds), cy=middle, r=4, class_="recovery")
        for seconds in repair.samples_s
    ]
    for name, value in (("p50", total.p50_s), ("p95", total.p95_s)):
        words = titled(f"{name} of {repair.count}: {value:.3f} s")
        at = {"x1": x(value), "x2": x(value), "y1": middle - 11, "y2": middle + 11}
        parts.append(tag("line", words, class_=f"percentile {name}", **at))
    parts.append(text(WIDTH - _RIGHT + 14, middle + 4, f"{total.p50_s:.2f} s", class_="value"))
    return parts
