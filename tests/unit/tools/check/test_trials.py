"""The plan of a check: its runs, and where ranks die."""

from __future__ import annotations

import pytest

from holdfast.elastic.loop.trace.records import KEPT
from holdfast.tools.check.trials import PROPERTIES, StageShape, deaths, trials

ALL = tuple(PROPERTIES)


def stage(phases: int = 1, steps: int = 6, name: str = "train") -> StageShape:
    return StageShape(name=name, phases=phases, steps=steps)


def test_every_property_has_a_run() -> None:
    made = trials(ALL, ranks=(1, 2, 3), microbatches=4, stages=[stage()])
    assert [(t.name, t.ranks) for t in made] == [
        ("again", 1), ("ranks", 2), ("ranks", 3), ("shares", 2), ("kills", 2), ("disk", 2)
    ]  # fmt: skip


def test_ranks_without_a_microbatch_are_left_out() -> None:
    made = trials(ALL, ranks=(1, 2, 3), microbatches=1, stages=[stage()])
    assert {trial.ranks for trial in made} == {1}
    assert "shares" not in {trial.name for trial in made}


def test_where_results_depend_on_the_ranks_each_run_has_one_to_be_compared_with() -> None:
    made = trials(("kills",), ranks=(1, 2, 3), microbatches=4, stages=[stage()], by_world=True)
    assert [(t.name, t.ranks) for t in made] == [("again", 1), ("ranks", 2), ("kills", 2)]
    every = trials(ALL, ranks=(1, 2), microbatches=4, stages=[stage()], by_world=True)
    assert [t.name for t in every] == ["again", "ranks", "kills", "disk"]


@pytest.mark.parametrize("phases", [1, 2, 3, 5])
@pytest.mark.parametrize("steps", [1, 2, 4, 6])
def test_ranks_die_at_every_point_and_in_every_phase_in_steps_that_are_made(
    phases: int, steps: int
) -> None:
    planned = deaths([stage(phases, steps)])
    assert len({(death.point, death.phase) for death in planned}) == len(planned) == 4 + phases
    assert len({death.point for death in planned}) == 5
    assert {death.phase for death in planned} == set(range(phases))
    assert all(min(1, steps - 1) <= death.step < steps for death in planned)
    assert {death.who for death in planned} == {"first", "last"}


def test_of_many_phases_some_are_met_and_the_last_is() -> None:
    planned = deaths([stage(33)])
    assert len(planned) == 9
    assert max(death.phase for death in planned) == 32


def test_a_rank_dies_in_every_stage() -> None:
    planned = deaths([stage(name="a"), stage(name="b"), stage(steps=1, name="c")])
    assert [death.stage for death in planned] == ["a"] * 5 + ["b", "c"]
    assert planned[-1].step == 0


@pytest.mark.parametrize("steps", [3, 6])
def test_the_death_after_a_snapshot_is_followed_by_a_step(steps: int) -> None:
    (kept,) = [death for death in deaths([stage(2, steps)]) if death.point == KEPT]
    assert kept.step + 1 < steps
