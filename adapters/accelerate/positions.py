"""The position of a data loader, and the samples to skip so that another loader goes on from it.

Pure. A position counts batches of each process, and samples in the order of the sampler, which is
one for all processes. So processes of another number, or with another batch size, can go on from
it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from holdfast.ckpt import StateError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderShares:
    """The sharing out of batches; the batch size is None where batches differ in size.

    With ``is_split`` a batch is divided among the processes, else each process has its own.
    """

    processes: int
    batch_size: int | None
    is_split: bool

    @property
    def samples_of_round(self) -> int | None:
        """The samples that all processes consume while each gets one batch; None if unknown."""
        if self.batch_size is None:
            return None
        return self.batch_size * (1 if self.is_split else self.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPosition:
    """The place in an epoch at which a save happened.

    Each process had got ``batches`` since the loader's iterator was made, which began after
    ``begun_at`` samples. In all ``samples`` were consumed, in an order with ``checksum``; these
    three are 0 for an iterable data set, whose order nobody sees (``has_order``). ``is_over`` is
    true if these were all batches of the epoch, whose last one was in work.
    """

    epoch: int
    batches: int = 0
    begun_at: int = 0
    samples: int = 0
    checksum: int = 0
    has_order: bool = True
    is_over: bool = False
    shares: LoaderShares

    def saved(self) -> dict[str, Any]:
        """Return the position as plain values."""
        return asdict(self)

    @classmethod
    def of_saved(cls, saved: dict[str, Any]) -> LoaderPosition:
        """Return the position that `saved` described."""
        return cls(**{**saved, "shares": LoaderShares(**saved["shares"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipPlan:
    """The skip: ``samples`` of the common order, then ``batches`` of each process; None: all."""

    samples: int = 0
    batches: int | None = 0


def plan_skip(position: LoaderPosition, shares: LoaderShares, *, name: str) -> SkipPlan | None:
    """Return the skip by which a loader with ``shares`` goes on; None for a begun epoch.

    Raises ``StateError`` if the position lies inside a batch of an iterable data set.
    """
    if position.is_over:
        return SkipPlan(batches=None)
    if not position.batches and not position.begun_at:
        return None
    if shares == position.shares:
        return SkipPlan(samples=position.begun_at, batches=position.batches)
    if position.has_order:
        return SkipPlan(samples=position.samples)
    before, now = position.shares.samples_of_round, shares.samples_of_round
    if before is None or now is None or (position.batches * before) % now:
        raise StateError(
            f"{name}: {position.batches} batches of {position.shares.processes} processes with "
            f"batch size {position.shares.batch_size} cannot be skipped by {shares.processes} "
            f"processes with batch size {shares.batch_size}, because the data set is iterable: "
            f"start {position.shares.processes} processes, or begin the epoch anew by "
            "load(data=False)"
        )
    return SkipPlan(batches=position.batches * before // now)
