"""When silence counts as a hang. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

_STEPS = 20


def silence_limit_s(step_seconds: Sequence[float], *, min_hang_s: float) -> float:
    """Return how long a computing worker may be silent, learned from its own step times."""
    learned = _STEPS * median(step_seconds) if step_seconds else 0.0
    return max(min_hang_s, learned)
