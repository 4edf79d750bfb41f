"""What a worker's heartbeat says while it waits for others."""

from __future__ import annotations

from typing import cast

import pytest

from holdfast.elastic.channel.base import Channel, Phase
from holdfast.elastic.channel.pulse import Pulse


class Page:
    """Takes the phases that are shown."""

    def __init__(self) -> None:
        self.shown: list[Phase] = []

    def beat(self, *, step: int, phase: Phase, limit_s: float) -> None:
        self.shown.append(phase)


@pytest.mark.parametrize(
    ("phase", "shows"),
    [
        (Phase.COMPUTE, Phase.MEET),
        (Phase.IDLE, Phase.MEET),
        (Phase.WAIT, Phase.WAIT),
        (Phase.PAUSE, Phase.WAIT),
    ],
    ids=["in a step", "forming and restoring", "for a snapshot", "beside training"],
)
def test_others_are_met_where_they_cannot_all_wait_for_long(phase: Phase, shows: Phase) -> None:
    page = Page()
    pulse = Pulse(cast("Channel", page))
    pulse.set(phase)
    pulse.waiting(True)
    pulse.waiting(False)
    assert page.shown == [phase, shows, phase]
