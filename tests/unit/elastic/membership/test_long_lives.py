"""A view forgets the nodes and the steps that are long gone."""

from __future__ import annotations

from doubles import fakes
from doubles.sizes import deep_bytes

from holdfast.ckpt.memory.records import BlockEntry, Inventory
from holdfast.elastic.coordinator.base import EventKind, KeyEvent
from holdfast.elastic.membership import view as views
from holdfast.elastic.membership.incremental import by_nodes
from holdfast.elastic.membership.records import NodeRecord
from holdfast.elastic.membership.view import JobView, encode, generation_key, node_key


@by_nodes()
def rarely_asked(nodes: list[NodeRecord]) -> dict[str, bool]:
    return {node.node: True for node in nodes}


def put(key: str, record: object, revision: int) -> KeyEvent:
    return KeyEvent(kind=EventKind.PUT, key=key, value=encode(record), revision=revision)


def gone(key: str, revision: int) -> KeyEvent:
    return KeyEvent(kind=EventKind.DELETE, key=key, value="", revision=revision)


def test_nodes_with_ever_new_names_are_forgotten() -> None:
    """So machines are named that a cloud lends for an hour."""
    view = JobView(run="run", nodes={}, wanted={"trainer": 2})
    view = view.after([put(node_key("run", "n0"), fakes.node("n0"), 1)], revision=1)
    assert rarely_asked(view) == {"n0": True}
    sizes = []
    for number in range(400):
        name, revision = f"lent-{number:04}", 2 * number + 2
        view = view.after([put(node_key("run", name), fakes.node(name), revision)])
        view = view.after([gone(node_key("run", name), revision + 1)])
        sizes.append(deep_bytes([view]))
    assert sizes[-1] <= max(sizes[:100])
    assert rarely_asked(view) == {"n0": True}


def test_the_blocks_of_steps_long_gone_are_forgotten_with_their_generation() -> None:
    view = JobView(run="run", nodes={}, wanted={"trainer": 2})
    views._shared_entries.cache_clear()
    for number in range(1, 40):
        entries = tuple(
            BlockEntry(
                generation=number,
                step=number,
                rank=rank,
                payload_bytes=1,
                index_bytes=1,
                index_crc32c=0,
            )
            for rank in range(2)
        )
        nodes = [
            fakes.node(
                name,
                fenced=number,
                inventory=Inventory(node=name, worlds=(), blocks=(), parities=(), sealed=entries),
            )
            for name in ("a", "b")
        ]
        events = [put(node_key("run", node.node), node, 9 * number) for node in nodes]
        view = view.after(events)
        first, second = (view.nodes[name].inventory for name in ("a", "b"))
        assert first is not None
        assert second is not None
        assert first.sealed is second.sealed
        record = fakes.generation(number, nodes, ranks=[("a", fakes.worker("trainer/0"))])
        view = view.after([put(generation_key("run"), record, 9 * number + 1)])
    assert views._shared_entries.cache_info().currsize <= 1
