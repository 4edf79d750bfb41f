"""Detection of stragglers, and no false alarms."""

from __future__ import annotations

import msgspec
import pytest
from doubles import fakes

from holdfast.elastic.decisions.stragglers import StepTimes, outliers, pace, stragglers
from holdfast.elastic.membership.records import WorkerState
from holdfast.elastic.membership.view import JobView


def step(seconds: float, *, count: int = 2, **spent: float) -> StepTimes:
    nothing = {"waited_s": 0.0, "stalled_s": 0.0, "data_s": 0.0, "cpu_s": 0.0}
    return StepTimes(seconds=seconds, microbatches=count, **{**nothing, **spent})


def view(**microbatch_s: float) -> JobView:
    """A node for each rank, which has the name of the node."""
    nodes, ranks = [], []
    for name, seconds in microbatch_s.items():
        worker = msgspec.structs.replace(
            fakes.worker(f"trainer/{name}", WorkerState.ACTIVE),
            speed=1.0 / seconds if seconds else 0.0,
            waits=0.25,
            data=0.8 if name == "e" else 0.0,
            busy=0.1 if name == "d" else 0.9,
        )
        nodes.append(fakes.node(name, worker))
        ranks.append((name, worker))
    return fakes.view(*nodes, generation=fakes.generation(1, nodes, ranks=ranks))


def test_a_slow_rank_is_named_with_its_node_and_what_it_does() -> None:
    (found,) = stragglers(view(a=0.1, b=0.11, c=0.25))
    assert (found.seat, found.node, found.computes) == ("trainer/c", "c", True)
    assert str(found) == (
        "trainer/c on c takes 2.4 times as long as the others for a microbatch (0.25 s against "
        "0.105 s); it computes all that time; it waits for others 25% of a step"
    )


def test_a_rank_that_waits_for_its_data_is_told_from_one_that_computes() -> None:
    (found,) = stragglers(view(a=0.1, b=0.1, d=0.3))
    assert not found.computes
    assert "its processor is idle 90% of it: look at its device" in str(found)
    (found,) = stragglers(view(a=0.1, b=0.1, e=0.3))
    assert not found.computes
    assert "it waits for its data 80% of it" in str(found)


def test_of_two_ranks_the_slower_can_be_named() -> None:
    assert [each.seat for each in stragglers(view(a=0.1, b=0.2))] == ["trainer/b"]
    assert stragglers(view(a=0.1)) == []


def test_a_rank_that_was_not_measured_counts_for_nothing() -> None:
    assert stragglers(view(a=0.1, b=0.0, c=0.11)) == []
    assert stragglers(fakes.view()) == []


def test_several_slow_ranks_are_named_slowest_first() -> None:
    found = stragglers(view(a=0.1, b=0.1, c=0.3, d=0.5, f=0.1, g=0.1, h=0.1))
    assert [each.seat for each in found] == ["trainer/d", "trainer/c"]


def test_among_many_ranks_one_is_found_as_well() -> None:
    seconds = {f"r{i}": 0.1 + (i % 7) / 500 for i in range(1000)} | {"slow": 0.2}
    assert list(outliers(seconds)) == ["slow"]


def test_a_pace_leaves_waiting_out() -> None:
    found = pace([step(1.0, waited_s=0.5, stalled_s=0.1, data_s=0.1, cpu_s=0.3)] * 6)
    assert found is not None
    assert found.speed == pytest.approx(5.0)
    assert (found.waits, found.data, found.busy) == pytest.approx((0.5, 0.25, 0.75))


def test_one_slow_step_changes_no_pace_and_few_steps_have_none() -> None:
    found = pace([step(1.0)] * 5 + [step(60.0)])
    assert found is not None and found.speed == pytest.approx(2.0)
    assert pace([step(1.0)] * 4) is None
    assert pace([step(1.0, count=0)] * 9) is None
