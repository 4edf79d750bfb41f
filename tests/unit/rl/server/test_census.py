"""The counts of a ledger are told now and then, and only where they changed."""

from __future__ import annotations

from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.plan import BatchPlan
from holdfast.adapters.rl.samples.trajectory import TurnLimits
from holdfast.adapters.rl.server.census import EVERY_S, LedgerCensus

PLAN = BatchPlan(
    groups=2, group=1, eta=1, steps=9, limits=TurnLimits(end=10, context=32, max_new_tokens=8)
)


def test_the_counts_are_those_of_the_ledger_and_come_seldom() -> None:
    ledger, census = Ledger(PLAN), LedgerCensus()
    ledger.admit(0, lambda ordinal: (1, 2))
    first = census.take(ledger, workers=3, now_s=0.0)
    assert first is not None
    assert (first.pending, first.running, first.ready, first.workers) == (4, 0, 0, 3)
    assert first.awaited == 2
    ledger.claim("w", free=1, version=0)
    assert census.take(ledger, workers=3, now_s=EVERY_S / 2) is None
    later = census.take(ledger, workers=3, now_s=EVERY_S)
    assert later is not None
    assert (later.pending, later.running) == (3, 1)
    assert census.take(ledger, workers=3, now_s=3 * EVERY_S) is None
