"""The point that does without lost places of a pipeline."""

from __future__ import annotations

import pytest
from doubles.fakes import held
from msgspec.structs import replace

from holdfast.ckpt.memory.records import RestorePoint, SidecarPeer, SnapshotWorld
from holdfast.elastic.planning.neighbors import announced, lost_places, needs_of, without_lost

NEEDS = {1: {0, 2}, 2: {1, 3}, 3: {2}}
"""Of four places of one stage each; the first has the progress of the run."""


def world(*, dp: int = 1, tp: int = 1, generation: int = 2) -> SnapshotWorld:
    nodes = tuple(f"n{rank}" for rank in range(4 * dp * tp))
    return SnapshotWorld(
        run="r",
        generation=generation,
        peers=tuple(SidecarPeer(node=node, address="tcp://a:1") for node in nodes),
        rank_nodes=nodes,
        parity=0,
        keep=1,
        pp=4,
        tp=tp,
    )


def left(step: int, *lost: int, of: SnapshotWorld | None = None) -> RestorePoint:
    whole = held(of or world(), step)
    return replace(whole, sources=tuple(s for s in whole.sources if s.rank not in lost))


def test_a_point_that_lacks_an_inner_place_is_taken_if_all_others_are_old() -> None:
    found, _ = without_lost([], [left(200, 1)], needs=NEEDS, beyond=100)
    assert found is not None
    assert (found.step, found.lost, lost_places(found)) == (200, (1,), [1])


@pytest.mark.parametrize("step", [100, 150])
def test_a_complete_point_that_is_near_comes_first(step: int) -> None:
    points = [held(world(generation=1), step)]
    assert without_lost(points, [left(200, 1)], needs=NEEDS, beyond=100)[0] is None
    assert without_lost(points, [left(251, 1)], needs=NEEDS, beyond=100)[0] is not None


def test_what_a_living_rank_has_not_yet_written_is_not_lost() -> None:
    points = [held(world(), 10)]
    assert without_lost(points, [left(200, 1)], needs=NEEDS, beyond=1) == (None, "")


def test_so_does_the_beginning() -> None:
    assert without_lost([], [left(100, 1)], needs=NEEDS, beyond=100)[0] is None
    assert without_lost([], [left(101, 1)], needs=NEEDS, beyond=100)[0] is not None


def test_a_place_that_lost_one_of_its_ranks_is_left_out_as_a_whole() -> None:
    point = left(200, 5, of=world(dp=2))
    found, _ = without_lost([], [point], needs=NEEDS, beyond=1)
    assert found is not None
    assert found.lost == (1, 5)
    point = left(200, 3, of=world(tp=2))
    found, _ = without_lost([], [point], needs=NEEDS, beyond=1)
    assert found is not None
    assert found.lost == (2, 3)


def test_places_side_by_side_have_no_neighbours_and_the_reason_says_so() -> None:
    found, why = without_lost([], [left(9, 1, 2), left(7, 0)], needs=NEEDS, beyond=1)
    assert found is None
    assert why == "step 9: places 1 and 2 of the pipeline are lost, which lie side by side"
    found, why = without_lost([], [left(9, 0)], needs=NEEDS, beyond=1)
    assert why.endswith("the stages of place 0 of the pipeline are lost, and nothing is like them")


def test_places_apart_are_both_set() -> None:
    found, _ = without_lost([], [left(9, 1, 3)], needs=NEEDS, beyond=1)
    assert found is not None
    assert lost_places(found) == [1, 3]


def test_a_step_that_a_living_place_has_not_come_to_is_not_taken() -> None:
    found, _ = without_lost([], [left(10, 1, 3), left(9, 1), left(8, 1)], needs=NEEDS, beyond=1)
    assert found is not None
    assert (found.step, lost_places(found)) == (9, [1])


def test_needs_are_read_as_they_were_announced() -> None:
    assert needs_of(announced(NEEDS)) == NEEDS
    assert needs_of(None) == needs_of({"x": [1]}) == needs_of({"1": "y"}) == {}
