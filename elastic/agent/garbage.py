"""How an agent's garbage is collected: rarely, for it makes next to none that needs collecting."""

from __future__ import annotations

import gc

_YOUNG_MOST = 400_000
"""Some forty megabytes; a change of ten thousand nodes makes as many objects, all to be kept or
freed by their counts."""


def collect_rarely() -> None:
    """Leave what is there now to no collection, and look for cycles only once in a long while.

    Records hold no cycles, and at the interpreter's own pace a sixth of a decision about a large
    world is spent on looking for them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_MOST, 10, 100)
