"""Rare garbage collection for agents, which make almost no cyclic garbage."""

from __future__ import annotations

import gc

_YOUNG_MOST = 400_000
"""About forty megabytes. A change of ten thousand nodes makes as many objects; all are kept, or
freed by their reference counts."""


def collect_rarely() -> None:
    """Exclude existing objects from collection, and look for cycles only rarely.

    Records hold no cycles. At the interpreter's default thresholds, the search for cycles takes a
    sixth of the time of a decision about a large world.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_MOST, 10, 100)
