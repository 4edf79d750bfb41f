"""The state of a running job, folded from its events."""

from synthetic_run import hurt_job

from holdfast.elastic.events import FaultInjected, SamplingChanged
from holdfast.tools.show.live_state import LiveState


def state_at(seconds: float) -> LiveState:
    events = sorted(hurt_job(), key=lambda event: event.time_s)
    state = LiveState()
    state.apply(event for event in events if event.time_s <= events[0].time_s + seconds)
    return state


def test_workers_take_part_once_their_generation_is_restored() -> None:
    state = state_at(5.0)
    assert state.generation == 1
    assert state.participants() == {
        "a": ["rollout/1", "trainer/0"],
        "b": ["trainer/1"],
        "c": ["rollout/0"],
    }


def test_a_killed_trainer_is_out_until_it_joined_again() -> None:
    assert state_at(8.305).count("trainer") == 1
    assert state_at(8.305).unrecovered == {"trainer/1"}
    assert state_at(10.0).participants()["b"] == []
    assert state_at(12.0).count("trainer") == 2
    assert state_at(12.0).unrecovered == set()


def test_a_killed_node_is_gone_with_all_its_workers() -> None:
    state = state_at(17.5)
    assert "a" not in state.alive
    assert state.count("rollout") == 1


def test_the_newest_step_and_its_pace_are_known() -> None:
    state = state_at(8.2)
    assert state.step == 5
    assert abs(state.step_seconds - 0.9) < 1e-6


def test_a_rollout_worker_is_busy_from_when_it_began_until_it_says_so() -> None:
    state = LiveState()
    at = {"node": "a", "seat": "rollout/0"}
    state.apply([SamplingChanged(time_s=10.0, samples=8, **at)])
    assert state.busy(since=9.9) == ["rollout/0"]
    assert state.busy(since=10.1) == []
    state.apply([SamplingChanged(time_s=10.2, samples=0, **at)])
    assert state.busy(since=9.9) == []


def test_what_a_lost_rollout_worker_was_at_is_known_until_it_is_lost_again() -> None:
    state = state_at(13.1)
    assert state.salvaged == {"rollout/0": 5}
    seats = ("rollout/0",)
    state.apply([FaultInjected(what="kill_rollout", victim="rollout/0", on="c", seats=seats)])
    assert state.salvaged == {}
