"""The time of `--since`: how long ago, a clock time, a date, or seconds since 1970. Pure."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Final

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_CLOCK: Final = re.compile(r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?")
_SECONDS: Final = re.compile(r"\d{9,}(\.\d+)?")


def parse_since(text: str, *, now_s: float) -> float:
    """Return a time in seconds since 1970: of ``10m``, ``14:30``, ``2026-01-31T09:00`` and others.

    ``now_s`` is the present. A time without a zone is the machine's own; a clock time that is still
    to come is yesterday's. Raises ``ValueError`` that names the forms.
    """
    if found := _AGO.fullmatch(text):
        return now_s - float(found[1]) * _UNITS_S[found[2]]
    if _SECONDS.fullmatch(text):
        return float(text)
    try:
        if _CLOCK.fullmatch(text):
            return _of_today(text, now_s=now_s)
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is no time: give how long ago (90s, 10m, 2h, 1d), a clock time (14:30), a "
            "date with or without one (2026-01-31T09:00), or seconds since 1970"
        ) from None


def _of_today(text: str, *, now_s: float) -> float:
    today = datetime.fromtimestamp(now_s)
    hour, minute, *rest = text.split(":")
    second, _, part = (rest[0] if rest else "0").partition(".")
    found = today.replace(
        hour=int(hour),
        minute=int(minute),
        second=int(second),
        microsecond=int(f"{part or 0:0<6}"[:6]),
    )
    if found.timestamp() > now_s:
        found -= timedelta(days=1)
    return found.timestamp()
