"""The result of a restore."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.ckpt.state.trees.per_rank import Inheritance
from holdfast.elastic.neighbors.marks import ApproximateMark


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The source of the restored state: its ``step``, and the farthest ``tier`` of its bytes.

    ``tier`` is ``arena``, ``prefetched``, ``peer``, ``parity``, ``disk``, ``checkpoint`` or
    ``none``; ``tiers`` gives the bytes of each tier and the seconds that threads spent on them.
    ``sent_bytes`` were sent by sidecars while the other ranks waited. ``ranks`` says what became
    of per-rank values. ``mark``, if not None, is that of stages that were set from others.
    """

    tier: str
    how: str
    step: int
    bytes: int = 0
    sent_bytes: int = 0
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)
    ranks: Inheritance = field(default_factory=Inheritance)
    mark: ApproximateMark | None = None
