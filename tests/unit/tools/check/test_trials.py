"""The plan of a check: its runs, and where ranks die."""

from __future__ import annotations

import pytest

from holdfast.elastic.loop.trace.records import KEPT
from holdfast.tools.check.trials import PROPERTIES, deaths, trials

ALL = tuple(PROPERTIES)


def test_every_property_has_a_run() -> None:
    made = trials(ALL, ranks=(1, 2, 3), microbatches=4, phases=1, steps=6)
    assert [(t.name, t.ranks) for t in made] == [
        ("again", 1), ("ranks", 2), ("ranks", 3), ("shares", 2), ("kills", 2), ("disk", 2)
    ]  # fmt: skip


def test_ranks_without_a_microbatch_are_left_out() -> None:
    made = trials(ALL, ranks=(1, 2, 3), microbatches=1, phases=1, steps=6)
    assert {trial.ranks for trial in made} == {1}
    assert "shares" not in {trial.name for trial in made}


@pytest.mark.parametrize("phases", [1, 2, 3])
@pytest.mark.parametrize("steps", [2, 4, 6])
def test_ranks_die_at_every_point_of_every_phase_and_in_steps_that_are_made(
    phases: int, steps: int
) -> None:
    planned = deaths(phases=phases, steps=steps)
    assert len({(death.point, death.phase) for death in planned}) == len(planned) == 4 * phases + 1
    assert all(1 <= death.step < steps for death in planned)
    assert {death.who for death in planned} == {"first", "last"}


@pytest.mark.parametrize("steps", [3, 6])
def test_the_death_after_a_snapshot_is_followed_by_a_step(steps: int) -> None:
    (kept,) = [death for death in deaths(phases=2, steps=steps) if death.point == KEPT]
    assert kept.step + 1 < steps
