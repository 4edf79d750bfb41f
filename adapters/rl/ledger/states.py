"""The states of a prompt ordinal, the events that change them, and verdicts on samples. Pure."""

from __future__ import annotations

from enum import StrEnum

from holdfast.ckpt.errors import HoldfastError


class LedgerError(HoldfastError):
    """The ledger was asked for something that its state does not allow."""

    code = "HF024"
    remedy = "Load the state of the same job; if it is the same job, report this."


class OrdinalState(StrEnum):
    """The state of an ordinal; a borrowed one is that of another run's prompt.

    ``SKIPPED``: all its rewards are equal, so its samples teach nothing.
    """

    PENDING = "pending"
    RUNNING = "running"
    READY = "ready"
    TRAINED = "trained"
    DROPPED = "dropped"
    SKIPPED = "skipped"
    BORROWED = "borrowed"


class DeliveryVerdict(StrEnum):
    """The result of delivering a sample."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    ROLLED_BACK = "rolled_back"
    TOO_OLD = "too_old"
    UNKNOWN = "unknown"


class OrdinalEvent(StrEnum):
    """An event that changes an ordinal's state."""

    CLAIM = "claim"
    RELEASE = "release"
    COMPLETE = "complete"
    TRAIN = "train"
    DROP = "drop"
    SKIP = "skip"


TRANSITIONS: dict[tuple[OrdinalState, OrdinalEvent], OrdinalState] = {
    (OrdinalState.PENDING, OrdinalEvent.CLAIM): OrdinalState.RUNNING,
    (OrdinalState.PENDING, OrdinalEvent.COMPLETE): OrdinalState.READY,
    (OrdinalState.PENDING, OrdinalEvent.DROP): OrdinalState.DROPPED,
    (OrdinalState.RUNNING, OrdinalEvent.CLAIM): OrdinalState.RUNNING,
    (OrdinalState.RUNNING, OrdinalEvent.RELEASE): OrdinalState.PENDING,
    (OrdinalState.RUNNING, OrdinalEvent.COMPLETE): OrdinalState.READY,
    (OrdinalState.READY, OrdinalEvent.TRAIN): OrdinalState.TRAINED,
    (OrdinalState.READY, OrdinalEvent.SKIP): OrdinalState.SKIPPED,
    (OrdinalState.DROPPED, OrdinalEvent.TRAIN): OrdinalState.TRAINED,
    (OrdinalState.SKIPPED, OrdinalEvent.TRAIN): OrdinalState.TRAINED,
    (OrdinalState.BORROWED, OrdinalEvent.TRAIN): OrdinalState.TRAINED,
}
"""(state, event) → state.

A dropped or skipped ordinal leaves with its step, having contributed nothing.
"""


def moved(ordinal: int, state: OrdinalState, event: OrdinalEvent) -> OrdinalState:
    """Return the state after ``event``. Raises ``LedgerError`` if the event is not possible."""
    after = TRANSITIONS.get((state, event))
    if after is None:
        raise LedgerError(f"ordinal {ordinal} is {state}: {event} is not possible")
    return after
