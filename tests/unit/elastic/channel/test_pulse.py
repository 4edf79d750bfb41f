"""The content of a worker's heartbeat while it waits for others."""

from __future__ import annotations

from typing import cast

import pytest

from holdfast.elastic.channel.base import Channel, WorkerPhase
from holdfast.elastic.channel.pulse import Pulse


class Page:
    """Takes the phases that are shown."""

    def __init__(self) -> None:
        self.shown: list[WorkerPhase] = []

    def beat(self, *, step: int, phase: WorkerPhase, limit_s: float) -> None:
        self.shown.append(phase)


@pytest.mark.parametrize(
    ("phase", "shows"),
    [
        (WorkerPhase.COMPUTE, WorkerPhase.MEET),
        (WorkerPhase.IDLE, WorkerPhase.MEET),
        (WorkerPhase.WAIT, WorkerPhase.WAIT),
        (WorkerPhase.PAUSE, WorkerPhase.WAIT),
    ],
    ids=["in a step", "forming and restoring", "for a snapshot", "beside training"],
)
def test_others_are_met_where_they_cannot_all_wait_for_long(
    phase: WorkerPhase, shows: WorkerPhase
) -> None:
    page = Page()
    pulse = Pulse(cast("Channel", page))
    pulse.set(phase)
    pulse.waiting(True)
    pulse.waiting(False)
    assert page.shown == [phase, shows, phase]
