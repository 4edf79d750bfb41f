"""The plain rule for groups that steps take as they arrive: how many steps can do without each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from holdfast.adapters.rl.ledger.order import Open, lacking, steps_without


def urgency(open_: Sequence[Open], *, step: int, groups: int) -> dict[int, int]:
    """Return, for every group that is not complete, how many steps can still do without it."""
    ready = [each for each in open_ if each.arrived is not None]
    missing = sorted(
        (each for each in open_ if each.arrived is None),
        key=lambda each: (each.due is None, each.due or 0, each.ordinal),
    )
    wanted = lacking(
        Counter(each.due for each in open_ if each.due is not None),
        Counter(each.due for each in ready if each.due is not None),
        complete=len(ready),
        step=step,
        groups=groups,
    )
    return {
        each.ordinal: steps_without(place, lacking=wanted, groups=groups)
        for place, each in enumerate(missing)
    }
