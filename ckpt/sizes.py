"""Sizes and rates as people write them. Pure."""

from __future__ import annotations

import re
from typing import Final

_BYTES: Final = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*([kmgtp]?)(i?)(b?)", re.IGNORECASE)
_BITS_PER_S: Final = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*([kmgt]?)bit/s", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Parse a size such as ``2GiB``, ``512M`` (both binary), ``1.5GB`` (decimal) or ``4096``.

    Raises ``ValueError`` for anything else, and for less than one byte.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it as in 2GiB or 512MiB")
    number, prefix, binary, unit = match.groups()
    base = 1000 if unit and prefix and not binary else 1024
    nbytes = int(float(number) * base ** " kmgtp".index(prefix.lower() or " "))
    if nbytes < 1:
        raise ValueError(f"{text!r} is less than one byte; write it as in 512MiB")
    return nbytes


def parse_rate(rate: str | int) -> int:
    """Return bytes per second of ``"500MB/s"`` (decimal), ``"1GiB/s"`` (binary) or a number.

    ``"20Mbit/s"`` (decimal) is 2,500,000. Raises ``ValueError`` for anything else, and for less
    than one byte per second.
    """
    text = str(rate).strip()
    if match := _BITS_PER_S.fullmatch(text):
        text = str(int(float(match[1]) * 1000 ** " kmgt".index(match[2].lower() or " ") / 8))
    try:
        return parse_bytes(text[:-2] if text.lower().endswith("/s") else text)
    except ValueError as error:
        raise ValueError(f"{rate!r} is not a rate; write it as in 500MB/s or 1GiB/s") from error
