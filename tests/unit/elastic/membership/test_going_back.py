"""Trainers that left a generation to roll back get a snapshot that is old enough."""

from __future__ import annotations

import msgspec
import pytest
from doubles import fakes

from holdfast.elastic.membership.records import RESTORE_AT_MOST, NodeRecord, Origin
from holdfast.elastic.membership.view import JobView
from holdfast.elastic.planning.plan import choose_restore

NUMBER = 4
STEPS = (7, 8, 9)


def view(*wishes: int | None, left: int = NUMBER) -> JobView:
    """Nodes whose trainers are parked, some of which ask to go back; all hold the same steps."""
    nodes: list[NodeRecord] = []
    for i, most in enumerate(wishes):
        worker = msgspec.structs.replace(
            fakes.worker(f"trainer/{i}", ready_after=left),
            info={} if most is None else {RESTORE_AT_MOST: most},
        )
        nodes.append(fakes.node(f"n{i}", worker, fenced=NUMBER))
    ranks = [(node.node, node.workers[0]) for node in nodes]
    record = fakes.generation(
        NUMBER, nodes, ranks=ranks, timeline=(Origin(generation=NUMBER, step=0),)
    )
    holding = [
        msgspec.structs.replace(
            node, inventory=fakes.inventory(node.node, record.snapshots, *STEPS)
        )
        for node in nodes
    ]
    return fakes.view(*holding, generation=record)


def restored(at: JobView) -> int:
    return choose_restore(at)[0][0].step


def test_without_a_wish_the_newest_is_restored() -> None:
    assert restored(view(None, None)) == 9


@pytest.mark.parametrize(("wishes", "step"), [((8, 8), 8), ((8, None), 8), ((9, 7), 7)])
def test_the_oldest_wish_counts_for_all(wishes: tuple[int | None, ...], step: int) -> None:
    at = view(*wishes)
    assert restored(at) == step
    assert all(point.step <= step for point in choose_restore(at)[0]), "the fallbacks too"


def test_where_nothing_is_so_old_the_oldest_is_taken() -> None:
    assert restored(view(3, 3)) == 7


def test_a_wish_of_an_earlier_generation_is_over() -> None:
    assert restored(view(7, 7, left=NUMBER - 1)) == 9
