"""The view: its construction from entries, and its refusals."""

from __future__ import annotations

import pytest
from doubles import fakes

from holdfast.elastic.coordinator.base import Entry, EventKind, KeyEvent
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.launch.joint import SharedJobRecord
from holdfast.elastic.membership.readiness import fenced_nodes, ready_trainers
from holdfast.elastic.membership.records import JobOutcome, Seating, WorkerState
from holdfast.elastic.membership.view import (
    JobView,
    decode,
    encode,
    generation_key,
    node_key,
    outcome_key,
    seat_order,
    seating_key,
)
from holdfast.elastic.rendezvous.rounds import Participant, Round

WANTED = {"trainer": 1}


def entry(key: str, value: object, revision: int = 1) -> Entry:
    text = value if isinstance(value, str) else encode(value)
    return Entry(key=key, value=text, revision=revision)


def test_view_has_every_record_and_its_revision() -> None:
    trainer = fakes.worker("trainer/0")
    nodes = [fakes.node("b"), fakes.node("a", trainer)]
    record = fakes.generation(3, nodes, ranks=[("a", trainer)])
    seats = (Seating(seat="trainer/0", node="a", attempt=2),)
    outcome = JobOutcome(ok=True, message="done", result={"loss": 1.5})
    view = JobView.from_entries(
        [
            entry(node_key("run", "b"), nodes[0], 4),
            entry(node_key("run", "a"), nodes[1], 5),
            entry(generation_key("run"), record, 6),
            entry(seating_key("run"), seats, 7),
            entry(outcome_key("run"), outcome, 8),
        ],
        run="run",
        wanted=WANTED,
        revision=9,
    )
    assert list(view.nodes) == ["a", "b"]
    assert view.nodes["a"] == nodes[1]
    assert (view.generation, view.generation_revision, view.number) == (record, 6, 3)
    assert (view.seating, view.seating_revision) == (seats, 7)
    assert (view.outcome, view.revision) == (outcome, 9)
    assert view.roster().nodes == (nodes[1], nodes[0])


def test_empty_store_is_an_empty_view() -> None:
    view = JobView.from_entries([], run="run", wanted=WANTED)
    assert (view.number, view.generation_revision, view.seating_revision) == (0, 0, 0)


GARBAGE = [
    "",
    "{",
    "[]",
    '{"node": 3}',
    '{"node": "a"}',
    "null",
    "\x00\x1b[2J",
    '"\ud800"',
    "[" * 100_000,
    '{"settings":' * 100_000,
    "9" * 10_000,
]


@pytest.mark.parametrize("kind", [JobOutcome, Participant, Round, SharedJobRecord])
@pytest.mark.parametrize("value", GARBAGE)
def test_garbage_of_any_kind_is_named_by_its_key(value: str, kind: type) -> None:
    with pytest.raises(CoordinatorError, match=r"^a/key: not a readable record"):
        decode("a/key", value, kind)


@pytest.mark.parametrize("value", GARBAGE)
def test_garbled_record_is_named_by_its_key(value: str) -> None:
    with pytest.raises(CoordinatorError, match="run/nodes/a: not a readable record"):
        JobView.from_entries([entry("run/nodes/a", value)], run="run", wanted=WANTED)


def test_record_with_impossible_values_is_refused() -> None:
    text = encode(fakes.node("a", fakes.worker("trainer/0"))).replace('"keep":2', '"keep":0')
    with pytest.raises(CoordinatorError, match=r"run/nodes/a.*keep is 0"):
        JobView.from_entries([entry("run/nodes/a", text)], run="run", wanted=WANTED)


def test_unknown_record_is_named_by_its_key() -> None:
    with pytest.raises(CoordinatorError, match="run/weather: no record of this name"):
        JobView.from_entries([entry("run/weather", "{}")], run="run", wanted=WANTED)


def test_record_under_another_nodes_key_is_refused() -> None:
    with pytest.raises(CoordinatorError, match="run/nodes/a: holds the record of node b"):
        JobView.from_entries([entry("run/nodes/a", fakes.node("b"))], run="run", wanted=WANTED)


def test_unchanged_records_are_not_decoded_again() -> None:
    entries = [entry(node_key("run", name), fakes.node(name), 1) for name in ("a", "b")]
    before = JobView.from_entries(entries, run="run", wanted=WANTED)
    entries[1] = entry(node_key("run", "b"), fakes.node("b", fenced=1), 2)
    after = JobView.from_entries(entries, run="run", wanted=WANTED, before=before)
    assert after.nodes["a"] is before.nodes["a"]
    assert after.nodes["b"].fenced == 1


def test_ready_trainers_are_those_of_fenced_nodes_with_a_sidecar() -> None:
    member = fakes.worker("trainer/9")
    nodes = [
        fakes.node("a", fakes.worker("trainer/10"), fakes.worker("rollout/0"), fenced=1),
        fakes.node("b", fakes.worker("trainer/2"), fenced=0),
        fakes.node("c", fakes.worker("trainer/3"), fenced=1, sidecar=False),
        fakes.node("d", fakes.worker("trainer/4", WorkerState.STARTING), member, fenced=2),
    ]
    view = fakes.view(*nodes, generation=fakes.generation(1, nodes, ranks=[("d", member)]))
    assert list(fenced_nodes(view)) == ["a", "c", "d"]
    assert [worker.seat for _, worker in ready_trainers(view)] == ["trainer/9", "trainer/10"]


def test_seats_sort_by_number() -> None:
    names = ["trainer/10", "trainer/9", "rollout/1"]
    assert sorted(names, key=seat_order) == ["rollout/1", "trainer/9", "trainer/10"]


def put(key: str, value: object, revision: int) -> KeyEvent:
    found = entry(key, value, revision)
    return KeyEvent(kind=EventKind.PUT, key=key, value=found.value, revision=revision)


def test_a_view_takes_changes_and_leaves_what_is_older_than_it_knows() -> None:
    a, b = node_key("run", "a"), node_key("run", "b")
    view = JobView.from_entries([entry(a, fakes.node("a"), 5)], run="run", wanted=WANTED)
    late = put(a, fakes.node("a", fenced=9), 4)
    twice = [put(b, fakes.node("b", fenced=1), 6), put(b, fakes.node("b", fenced=2), 7)]
    after = view.after([late, *twice], revision=7)
    assert after.revision == 7
    assert {name: node.fenced for name, node in after.nodes.items()} == {"a": 0, "b": 2}
    assert after.nodes["a"] is view.nodes["a"]
    gone = after.after([KeyEvent(kind=EventKind.DELETE, key=a, value="", revision=8)])
    assert list(gone.nodes) == ["b"]
    assert list(view.nodes) == ["a"], "a view is a value"


def test_nodes_stay_in_order_when_others_come() -> None:
    view = JobView(run="run", nodes={}, wanted=WANTED)
    for revision, name in enumerate(("m", "z", "a"), start=1):
        view = view.after([put(node_key("run", name), fakes.node(name), revision)])
    assert list(view.nodes) == ["a", "m", "z"]


def test_a_garbled_change_is_named_by_its_key() -> None:
    view = JobView(run="run", nodes={}, wanted=WANTED)
    with pytest.raises(CoordinatorError, match="run/nodes/a: not a readable record"):
        view.after([put("run/nodes/a", "{", 1)])


def test_records_name_the_same_object_for_what_all_nodes_repeat() -> None:
    nodes = [fakes.node(name, fakes.worker(f"trainer/{name}")) for name in ("a", "b")]
    world = fakes.generation(1, nodes, ranks=[(n.node, n.workers[0]) for n in nodes]).snapshots
    records = [
        fakes.node(n.node, *n.workers, inventory=fakes.inventory(n.node, world, 3)) for n in nodes
    ]
    entries = [entry(node_key("run", node.node), node) for node in records]
    a, b = JobView.from_entries(entries, run="run", wanted=WANTED).nodes.values()
    assert a.workers[0].spec is b.workers[0].spec
    assert a.inventory is not None
    assert b.inventory is not None
    assert a.inventory.sealed is b.inventory.sealed
    assert a.inventory.blocks[0] in a.inventory.sealed
    assert any(a.inventory.blocks[0] is each for each in b.inventory.sealed)
