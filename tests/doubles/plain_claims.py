"""The plain rules for the order of work: they look at everything that waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.adapters.rl.ledger.order import Open, lacking, steps_without
from holdfast.adapters.rl.samples.trajectory import SampleId


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainCandidate:
    """A sample that no worker works on.

    ``urgency`` is how many steps can do without it, ``remaining`` the tokens it is likely to need.
    """

    key: SampleId
    urgency: int
    remaining: float = 0.0


def plain_order(candidates: Iterable[PlainCandidate]) -> list[PlainCandidate]:
    """Return the candidates in the order in which they are given out."""
    return sorted(candidates, key=lambda each: (each.urgency, -each.remaining, each.key))


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
