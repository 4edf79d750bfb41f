"""Ranks that wait in different calls are found and named, once all of them have told."""

from __future__ import annotations

import msgspec
from doubles import fakes

from holdfast.elastic.decisions.detect import stalled
from holdfast.elastic.decisions.standing import apart, stands_of, where_ranks_wait
from holdfast.elastic.membership.view import JobView

BARRIER, BACKWARD = "dist.barrier at train.py:13", "run.backward at train.py:11"


def view(*places: str, standing: int = 3) -> JobView:
    """Return a view of generation 3 with one rank per node; '' has not told."""
    nodes = [
        msgspec.structs.replace(
            fakes.node(f"n{i}"),
            standing=standing,
            stands={f"trainer/{i}": place} if place else {},
            probed=3,
        )
        for i, place in enumerate(places)
    ]
    ranks = [(f"n{i}", fakes.worker(f"trainer/{i}")) for i in range(len(places))]
    return fakes.view(*nodes, generation=fakes.generation(3, nodes, ranks=ranks))


def test_a_call_of_some_ranks_alone_stalls_the_generation_and_is_named() -> None:
    found = view(BARRIER, BACKWARD, BACKWARD)
    assert apart(found) and stalled(found)
    assert stands_of(found) == {BARRIER: ["trainer/0"], BACKWARD: ["trainer/1", "trainer/2"]}
    assert where_ranks_wait(found) == (
        f"trainer/0 in {BARRIER}; trainer/1, trainer/2 in {BACKWARD}. "
        f"Call {BARRIER} on all ranks alike, or on none"
    )


def test_a_gather_of_one_ranks_is_no_pair_of_a_modules() -> None:
    found = view("a module under fully_shard at train.py:12", "DTensor.full_tensor at train.py:9")
    assert apart(found)
    assert "Call DTensor.full_tensor at train.py:9 on all ranks alike" in where_ranks_wait(found)
    assert apart(view("a module under fully_shard at evaluate.py:3", "run.steps at train.py:9"))


def test_ranks_that_may_still_go_on_are_not_apart() -> None:
    assert not apart(view(BARRIER, "")), "one computes"
    assert not apart(view(BARRIER, BARRIER)), "a slow transfer"
    assert not apart(view(BARRIER, "dist.barrier at train.py:15")), "the same call elsewhere"
    assert not apart(view(BACKWARD, "run.step at train.py:14")), "nothing is the user's"
    assert not apart(view(BARRIER, BACKWARD, standing=2)), "that was another generation"
    assert not apart(fakes.view())


def test_what_is_not_known_is_not_told() -> None:
    assert where_ranks_wait(view("", "")) == ""
    assert where_ranks_wait(view(BACKWARD, BACKWARD)) == f"trainer/0, trainer/1 in {BACKWARD}"
