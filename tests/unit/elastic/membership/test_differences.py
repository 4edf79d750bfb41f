"""A generation is told as its difference from the one before, of the same size in any job."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from doubles import fakes

from holdfast.ckpt.memory.records import BlockSource, RestorePoint
from holdfast.elastic.membership.differences import (
    Divisible,
    GenerationDifference,
    difference_text,
    with_difference,
)
from holdfast.elastic.membership.records import (
    GenerationRecord,
    NodeRecord,
    Origin,
    Seating,
    Setback,
)

PER_NODE = 2


def nodes_of(count: int) -> list[NodeRecord]:
    return [
        fakes.node(
            f"n{number:05}",
            *(fakes.worker(f"trainer/{PER_NODE * number + each}") for each in range(PER_NODE)),
        )
        for number in range(count)
    ]


def generation(
    number: int, nodes: list[NodeRecord], restore: RestorePoint | None = None
) -> GenerationRecord:
    ranks = [(node.node, each) for node in nodes for each in node.workers]
    found = fakes.generation(number, nodes, ranks=ranks, restore=restore)
    grouped: dict[int, list[str]] = {}
    for node in nodes:
        grouped.setdefault(int(node.node[1:]) // 8, []).append(node.node)
    groups = tuple(map(tuple, grouped.values()))
    world = msgspec.structs.replace(found.snapshots, groups=groups)
    return msgspec.structs.replace(found, snapshots=world)


def after_a_loss(count: int) -> tuple[GenerationRecord, GenerationRecord]:
    """Return two generations: in the second one a node is lost, and its blocks are rebuilt."""
    nodes = nodes_of(count)
    before = generation(1, nodes)
    held = fakes.held(before.snapshots, 7)
    lost = nodes.pop(5)
    sources = tuple(
        BlockSource(rank=source.rank, node="n00004", rebuilt=True)
        if source.node == lost.node
        else source
        for source in held.sources
    )
    restore = msgspec.structs.replace(held, sources=sources)
    record = generation(2, nodes, restore)
    older = msgspec.structs.replace(restore, step=5)
    return before, msgspec.structs.replace(
        record, fallbacks=(older,), setbacks={lost.node: Setback(losses=1)}
    )


@pytest.mark.parametrize("count", [16, 800])
def test_generation_comes_back_from_its_difference(count: int) -> None:
    before, record = after_a_loss(count)
    text = difference_text(record, before)
    assert text is not None
    assert with_difference(text, before) == record
    assert len(text) < 2048, "whatever the size of the job"
    again = generation(3, nodes_of(count), record.fallbacks[0])
    text = difference_text(again, record)
    assert text is not None
    assert with_difference(text, record) == again, "the restore point's world is known, and older"
    assert len(text) < 2048


def test_everything_of_a_generation_is_told() -> None:
    told = {"snapshots": "worlds"}
    of_difference = set(GenerationDifference.__struct_fields__)
    assert {told.get(name, name) for name in GenerationRecord.__struct_fields__} == of_difference


def test_every_field_may_differ() -> None:
    before, record = after_a_loss(16)
    others: dict[str, Any] = {
        "shares": (3, 1),
        "before": (Origin(generation=1, step=2),),
        "timeline": (Origin(generation=2, step=9),),
        "restore": None,
        "setbacks": {},
        "snapshots": msgspec.structs.replace(record.snapshots, run="other", keep=5, stage=2),
    }
    for name, value in others.items():
        changed = msgspec.structs.replace(record, **{name: value})
        text = difference_text(changed, before)
        assert text is not None and with_difference(text, before) == changed, name


def test_a_rank_that_nobody_has_stays_lost() -> None:
    before, record = after_a_loss(16)
    point = record.restore
    assert point is not None
    cut = msgspec.structs.replace(point, sources=point.sources[:3] + point.sources[4:])
    record = msgspec.structs.replace(record, restore=cut)
    text = difference_text(record, before)
    assert text is not None
    found = with_difference(text, before)
    assert isinstance(found, GenerationRecord) and found.restore is not None
    assert found.restore.lost == (3,)


def test_a_record_that_a_difference_cannot_tell_has_none() -> None:
    before, record = after_a_loss(16)
    members = tuple(msgspec.structs.replace(each, rank=each.rank + 1) for each in record.members)
    assert difference_text(msgspec.structs.replace(record, members=members), before) is None


def test_seating_comes_back_from_its_difference() -> None:
    seats = tuple(
        Seating(seat=f"trainer/{number}", node=f"n{number}", attempt=1) for number in range(500)
    )
    moved = msgspec.structs.replace(seats[7], node="n3", attempt=2)
    after = (*seats[:7], moved, *seats[8:])
    text = difference_text(after, seats)
    assert text is not None and len(text) < 256
    assert with_difference(text, seats) == after


def worlds_changed(**others: object) -> str:
    before, record = after_a_loss(16)
    told = msgspec.json.decode(difference_text(record, before) or "")
    told["worlds"][0]["others"] = others
    return msgspec.json.encode(told).decode()


@pytest.mark.parametrize(
    "wrong",
    [
        "{}",
        "not JSON",
        worlds_changed(generation="two"),
        worlds_changed(secret=1),
        worlds_changed(peers="none"),
        worlds_changed(parity=99),
    ],
)
def test_other_text_is_refused(wrong: str) -> None:
    before, _ = after_a_loss(16)
    with pytest.raises(ValueError, match=r".+"):
        with_difference(wrong, before)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("restore", {"world": 7, "step": 1}),
        ("restore", {"world": 0, "step": 1, "lost": [32]}),
        ("restore", {"world": 0, "step": 1, "elsewhere": [{"rank": -1, "node": "n00000"}]}),
        ("worlds", []),
        ("members", [[0, 33, []]]),
    ],
)
def test_a_difference_from_another_record_is_refused(field: str, value: object) -> None:
    before, record = after_a_loss(16)
    told = msgspec.json.decode(difference_text(record, before) or "")
    told[field] = value
    with pytest.raises(ValueError, match=r"of \d+|without a world"):
        with_difference(msgspec.json.encode(told), before)


def test_a_seating_is_no_difference_of_a_generation() -> None:
    before, record = after_a_loss(16)
    seats: Divisible = ()
    assert difference_text(record, seats) is None
    text = difference_text(record, before) or ""
    with pytest.raises(ValueError, match="array"):
        with_difference(text, seats)
