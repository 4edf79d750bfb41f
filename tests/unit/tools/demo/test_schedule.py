"""The schedule and victims of the demo's kills: set by the seed, never the last of a kind."""

from itertools import pairwise

import pytest

from holdfast.tools.demo.schedule import schedule, victims
from holdfast.tools.report.timeline import KILL_NODE, KILL_ROLLOUT, KILL_TRAINER

RUNNING = {"a": ["trainer/0", "rollout/1"], "b": ["trainer/1"], "c": ["rollout/0"]}


def test_a_seed_gives_the_same_kills_again() -> None:
    assert schedule(7, 30) == schedule(7, 30)


@pytest.mark.parametrize("steps", [20, 48, 300])
def test_each_kind_comes_once_early_enough_and_apart(steps: int) -> None:
    for seed in range(200):
        plan = schedule(seed, steps)
        assert plan[1].kind == KILL_ROLLOUT
        assert {plan[0].kind, plan[2].kind} == {KILL_TRAINER, KILL_NODE}
        assert all(later.step - earlier.step >= 1 for earlier, later in pairwise(plan))
        assert plan[0].step >= 2
        assert plan[2].step <= 0.62 * steps
        assert all(0.0 <= kill.delay < 1.0 for kill in plan)


def test_orders_differ_between_seeds() -> None:
    assert len({tuple(kill.kind for kill in schedule(seed, 30)) for seed in range(30)}) == 2


def test_too_few_steps_are_refused_with_the_number_needed() -> None:
    with pytest.raises(ValueError, match="needed: 20"):
        schedule(0, 19)


def test_a_node_is_chosen_that_leaves_a_trainer_and_a_rollout_worker() -> None:
    assert [v.name for v in victims(KILL_NODE, RUNNING, busy=[])] == ["a", "b"]
    both = {"a": ["trainer/0", "rollout/0", "rollout/1"], "b": ["trainer/1"]}
    assert [v.name for v in victims(KILL_NODE, both, busy=[])] == ["b"]


def test_a_node_takes_all_its_seats_with_it() -> None:
    assert victims(KILL_NODE, RUNNING, busy=[])[0].seats == ("rollout/1", "trainer/0")


def test_the_last_trainer_is_spared() -> None:
    assert [v.name for v in victims(KILL_TRAINER, RUNNING, busy=[])] == ["trainer/0", "trainer/1"]
    assert victims(KILL_TRAINER, {"a": ["trainer/0"], "b": []}, busy=[]) == []


def test_only_a_rollout_worker_in_mid_sequence_is_killed() -> None:
    assert victims(KILL_ROLLOUT, RUNNING, busy=[]) == []
    assert [v.name for v in victims(KILL_ROLLOUT, RUNNING, busy=["rollout/0"])] == ["rollout/0"]
