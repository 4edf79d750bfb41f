"""The census of a ledger: its counts as an event, now and then, where they changed. Pure."""

from __future__ import annotations

from typing import Final

from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.states import OrdinalState
from holdfast.elastic.events import LedgerCounted

EVERY_S: Final = 5.0
"""Seconds between two events at least: a day of them takes about 5 MB."""


class LedgerCensus:
    """Counts a ledger for those who watch the job; the caller holds its lock."""

    def __init__(self, *, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._due_s = float("-inf")
        self._told: LedgerCounted | None = None

    def take(self, ledger: Ledger, *, workers: int, now_s: float) -> LedgerCounted | None:
        """Return the counts if it is time and they changed; ``now_s`` is of a monotonic clock."""
        if now_s < self._due_s:
            return None
        self._due_s = now_s + self._every_s
        counters, states = ledger.counters, ledger.counts()
        found = LedgerCounted(
            pending=states[OrdinalState.PENDING],
            running=states[OrdinalState.RUNNING],
            ready=states[OrdinalState.READY],
            trained=states[OrdinalState.TRAINED],
            dropped=states[OrdinalState.DROPPED],
            skipped=states[OrdinalState.SKIPPED],
            awaited=len(ledger.awaited()),
            samples=counters.samples_accepted,
            duplicates=counters.duplicates_refused,
            held_tokens=ledger.held_tokens,
            workers=workers,
            staleness_most=ledger.staleness_max,
        )
        if found == self._told:
            return None
        self._told = found
        return found
