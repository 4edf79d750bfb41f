"""Pictures of a tensor: a histogram for the terminal and as SVG, a heat map as PNG."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from rich.text import Text

from holdfast.ckpt.inspect.statistics import Bar
from holdfast.tools.report.svg import Scale, drawing, marks, tag, text, titled

Array: TypeAlias = npt.NDArray[Any]

_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_SIZE: Final = (720.0, 320.0)
_STYLE: Final = """
svg { font: 12px system-ui, sans-serif; background: #fff; color: #1a1a1a }
.bar { fill: #3567b0 } .bar:hover { fill: #1d3f75 }
.grid { stroke: #ddd } .mark { fill: #555 } .title { font-weight: 600; fill: #1a1a1a }
@media (prefers-color-scheme: dark) {
  svg { background: #16181d } .grid { stroke: #333 } .mark { fill: #aaa }
  .title { fill: #eee } .bar { fill: #7aa7ea }
}
"""
_PIXELS: Final = 1024
_COLD, _WARM = (33, 102, 172), (178, 24, 43)
"""Below and above zero, white between them: ColorBrewer's RdBu, safe for the colour blind."""


def histogram_text(bars: Sequence[Bar], *, width: int) -> Text:
    """Return one line per bar: its lower bound, the bar, its count."""
    most = max((bar.count for bar in bars), default=0) or 1
    labels = [f"{bar.low:.4g}" for bar in bars]
    counts = [f"{bar.count:,}" for bar in bars]
    edge, number = max(map(len, labels), default=0), max(map(len, counts), default=0)
    room = max(width - edge - number - 5, 8)
    picture = Text()
    for bar, label, count in zip(bars, labels, counts, strict=True):
        eighths = round(bar.count / most * room * 8)
        if bar.count and not eighths:
            eighths = 1
        full, part = divmod(eighths, 8)
        blocks = "█" * full + (_EIGHTHS[part] if part else "")
        picture.append(f"{label:>{edge}} ", "dim").append(f"{blocks:<{room}}", "cyan")
        picture.append(f" {count:>{number}}\n")
    if bars:
        picture.append(f"{bars[-1].high:>{edge}.4g}", "dim")
    return picture


def histogram_svg(bars: Sequence[Bar], *, title: str) -> str:
    """Return the histogram as a self-contained SVG picture with a dark variant."""
    width, height = _SIZE
    left, right, top, bottom = 64.0, 16.0, 36.0, 34.0
    low, high = (bars[0].low, bars[-1].high) if bars else (0.0, 1.0)
    x = Scale(domain=(low, high if high > low else low + 1), range=(left, width - right))
    most = max((bar.count for bar in bars), default=1)
    y = Scale(domain=(0.0, float(most)), range=(height - bottom, top))
    parts = [f"<style>{_STYLE}</style>", text(left, 20, title, class_="title")]
    for mark in marks(0.0, float(most), about=5):
        parts.append(tag("line", x1=left, x2=width - right, y1=y(mark), y2=y(mark), class_="grid"))
        words = f"{mark:,.0f}"
        parts.append(text(left - 6, y(mark) + 4, words, class_="mark", text_anchor="end"))
    for mark in marks(*x.domain, about=8):
        words = f"{mark:.4g}"
        place = height - bottom + 18
        parts.append(text(x(mark), place, words, class_="mark", text_anchor="middle"))
    for bar in bars:
        start, end = x(bar.low), x(bar.high) if high > low else width - right
        parts.append(
            tag(
                "rect",
                titled(f"{bar.low:.6g} … {bar.high:.6g}: {bar.count:,}"),
                x=start,
                y=y(bar.count),
                width=max(end - start - 0.6, 0.6),
                height=height - bottom - y(bar.count),
                class_="bar",
            )
        )
    return drawing(width, height, "".join(parts), label=f"histogram of {title}")


class HeatMap:
    """A picture of a 2-D array with a pixel per element, or per block of elements (their mean).

    Its columns are the last dim, its rows all other dims; a 1-D tensor is folded into a square.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        size = int(np.prod(shape))
        columns = shape[-1] if len(shape) > 1 else max(int(np.ceil(np.sqrt(size))), 1)
        self._columns, self._rows = columns, -(-size // columns)
        self.width, self.height = min(columns, _PIXELS), max(min(self._rows, _PIXELS), 1)
        self._sums = np.zeros(self.width * self.height)
        self._counts = np.zeros(self.width * self.height)
        self._at = 0

    def add(self, numbers: Array) -> None:
        """Add the next elements, in C order; one that is not finite makes its pixel black."""
        flat = (np.abs(numbers) if numbers.dtype.kind == "c" else numbers).reshape(-1)
        for start in range(0, flat.size, 1 << 17):
            self._add(flat[start : start + (1 << 17)].astype(float))

    def _add(self, block: Array) -> None:
        places = np.arange(self._at, self._at + block.size)
        self._at += block.size
        rows, columns = np.divmod(places, self._columns)
        pixel = (
            rows * self.height // self._rows * self.width + columns * self.width // self._columns
        )
        self._sums += np.bincount(pixel, weights=block, minlength=self._sums.size)
        self._counts += np.bincount(pixel, minlength=self._sums.size)

    def png(self) -> bytes:
        """Return the picture as PNG; blue is below zero, red above."""
        with np.errstate(invalid="ignore"):
            mean = self._sums / np.maximum(self._counts, 1)
        known = np.isfinite(mean)
        limit = float(np.abs(mean[known]).max(initial=0.0)) or 1.0
        share = np.clip(np.where(known, mean, 0.0) / limit, -1, 1)[:, None]
        end = np.where(share < 0, np.array(_COLD), np.array(_WARM))
        colour = (255 + (end - 255) * np.abs(share)).astype(np.uint8)
        colour[~known] = 0
        return encode_png(colour.reshape(self.height, self.width, 3))


def encode_png(pixels: Array) -> bytes:
    """Return an RGB picture (height, width, 3; uint8) as PNG."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts: Iterable[tuple[bytes, bytes]] = (
        (b"IHDR", header),
        (b"IDAT", zlib.compress(lines)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in parts
    )
