"""Small pieces of SVG: elements, linear scales and round axis marks. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import floor, log10


def tag(name: str, content: str = "", /, **attributes: object) -> str:
    """Return one element; ``class_`` becomes ``class``, underscores in names become dashes."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def _value(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else escape(str(value))


def text(x: float, y: float, words: str, /, **attributes: object) -> str:
    """Return escaped text at a place."""
    return tag("text", escape(words), x=x, y=y, **attributes)


def titled(words: str) -> str:
    """Return a tooltip, to be placed inside the element that it explains."""
    return tag("title", escape(words))


def drawing(width: float, height: float, content: str, *, label: str) -> str:
    """Return a whole picture that scales to the available width."""
    return tag(
        "svg",
        content,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
        xmlns="http://www.w3.org/2000/svg",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A linear map from values to places on the page."""

    domain: tuple[float, float]
    range: tuple[float, float]

    def __call__(self, value: float) -> float:
        """Return the place of ``value``."""
        low, high = self.domain
        start, end = self.range
        return start + (value - low) / ((high - low) or 1.0) * (end - start)


def marks(low: float, high: float, *, about: int = 6) -> list[float]:
    """Return round values between ``low`` and ``high``, approximately ``about`` of them."""
    if high <= low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** floor(log10(raw))
    pace = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = -floor(-low / pace + 1e-9)
    return [at * pace for at in range(first, floor(high / pace + 1e-9) + 1)]
