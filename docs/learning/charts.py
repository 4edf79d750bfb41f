"""Self-contained pictures of learning curves, and statistical tests of paired values. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, combinations, product
from statistics import fmean
from typing import Final, TypeAlias

from holdfast.tools.report.charts import CURVE_HEIGHT, CURVE_WIDTH, plot
from holdfast.tools.report.svg import drawing, tag, text

Points: TypeAlias = Sequence[tuple[float, float]]

_COLOURS: Final = (
    "#3567b0", "#c8313c", "#1d8a55", "#b26a00", "#7a4fb5", "#0f8a93", "#6b7280",
)  # fmt: skip
_STYLE: Final = """
svg { font: 12px system-ui, sans-serif; background: #fff; color: #1a1a1a }
.title { font-weight: 600 } .mark { fill: #555; font-size: 11px } .grid { stroke: #ddd }
.deathline { stroke: #c8313c; stroke-dasharray: 2 3; opacity: .6 }
.curve { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  svg { background: #16181d } text { fill: #eee } .grid { stroke: #333 } .mark { fill: #aaa }
}
"""
_TOP: Final = 28.0
_LINE: Final = 16.0


def picture(lines: Mapping[str, Points], *, title: str, faults: Sequence[float] = ()) -> str:
    """Draw named lines over steps, with a legend; at most seven. ``faults``: steps to mark."""
    classes = {name: f"c{at}" for at, name in enumerate(lines)}
    colours = "".join(
        f".curve.{kind} {{ stroke: {colour} }} .dot.{kind}, .key.{kind} {{ fill: {colour} }}\n"
        for kind, colour in zip(classes.values(), _COLOURS, strict=False)
    )
    plotted = plot({classes[name]: line for name, line in lines.items()}, faults=faults)
    parts = [
        tag("style", _STYLE + colours),
        text(8, 18, title, class_="title"),
        tag("g", plotted, transform=f"translate(0 {_TOP:g})"),
    ]
    bottom = _TOP + CURVE_HEIGHT
    for at, (name, kind) in enumerate(classes.items()):
        y = bottom + _LINE * (at + 0.5)
        parts.append(tag("rect", x=44, y=y - 6, width=14, height=4, class_=f"key {kind}"))
        parts.append(text(66, y, name, class_="mark"))
    height = bottom + _LINE * (len(lines) + 0.5)
    return drawing(CURVE_WIDTH, height, "".join(parts), label=title)


def mean_line(lines: Sequence[Points]) -> list[tuple[float, float]]:
    """Return the mean of lines over the same steps."""
    return [
        (points[0][0], fmean(value for _, value in points)) for points in zip(*lines, strict=True)
    ]


def paired_p_value(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the probability of a mean difference as large if no pair prefers a side.

    This is the exact, two-sided sign-flip permutation test of paired values; with n pairs it is
    never below 2 / 2**n. Raises ``ValueError`` if the two lengths differ.
    """
    differences = [a - b for a, b in zip(left, right, strict=True)]
    seen = abs(sum(differences))
    flips = [
        abs(sum(sign * each for sign, each in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    return sum(flip >= seen - 1e-12 for flip in flips) / len(flips)


def paired_interval(
    left: Sequence[float], right: Sequence[float], *, confidence: float
) -> tuple[float, float]:
    """Return the interval of the mean difference with at least this ``confidence``.

    It contains the differences that the test of `paired_p_value` does not reject: the means of all
    subsets of the n differences divide the line into 2**n pieces of equal probability (Hartigan,
    "Using subsample values as typical values", 1969). Raises ``ValueError`` if the two lengths
    differ, or if there are too few pairs.
    """
    differences = [a - b for a, b in zip(left, right, strict=True)]
    count = len(differences)
    outside = int((1 - confidence) * 2**count / 2 + 1e-9)
    if outside < 1:
        raise ValueError(f"{count} pairs give no interval of confidence {confidence}")
    subsets = chain.from_iterable(combinations(differences, n) for n in range(1, count + 1))
    means = sorted(fmean(subset) for subset in subsets)
    return means[outside - 1], means[-outside]
