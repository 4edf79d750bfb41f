"""The states of a prompt ordinal, and what moves it from one to another: a table. Pure."""

from __future__ import annotations

from enum import StrEnum

from holdfast.elastic.errors import ElasticError


class LedgerError(ElasticError):
    """The ledger was asked for what its state does not allow: a bug, or a state of another job."""


class State(StrEnum):
    """Where an ordinal is."""

    PENDING = "pending"
    RUNNING = "running"
    READY = "ready"
    TRAINED = "trained"
    DROPPED = "dropped"


class Event(StrEnum):
    """What happens to an ordinal."""

    CLAIM = "claim"
    RELEASE = "release"
    COMPLETE = "complete"
    TRAIN = "train"
    DROP = "drop"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.PENDING, Event.CLAIM): State.RUNNING,
    (State.PENDING, Event.COMPLETE): State.READY,
    (State.PENDING, Event.DROP): State.DROPPED,
    (State.RUNNING, Event.CLAIM): State.RUNNING,
    (State.RUNNING, Event.RELEASE): State.PENDING,
    (State.RUNNING, Event.COMPLETE): State.READY,
    (State.READY, Event.TRAIN): State.TRAINED,
    (State.DROPPED, Event.TRAIN): State.TRAINED,
}
"""(state, event) → state. A dropped ordinal leaves with its step, having contributed nothing."""


def moved(ordinal: int, state: State, event: Event) -> State:
    """Return the state after ``event``. Raises ``LedgerError`` for one that is not possible."""
    after = TRANSITIONS.get((state, event))
    if after is None:
        raise LedgerError(f"ordinal {ordinal} is {state}: {event} is not possible")
    return after
