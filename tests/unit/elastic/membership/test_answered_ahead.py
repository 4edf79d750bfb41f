"""A view computes some answers when it is built, so that they are ready later."""

from __future__ import annotations

from collections.abc import Iterable

from doubles import fakes

from holdfast.elastic.coordinator.base import Entry
from holdfast.elastic.membership.records import GenerationRecord, NodeRecord
from holdfast.elastic.membership.view import JobView, encode, generation_key, node_key
from holdfast.elastic.planning import plan

NAMES = ("a", "b", "c", "d")


def asked_anew(*_: object) -> dict[str, str]:
    raise AssertionError("the answer was not at hand")


def view_of(nodes: Iterable[NodeRecord], generation: GenerationRecord | None = None) -> JobView:
    entries = [
        Entry(key=node_key("run", node.node), value=encode(node), revision=number)
        for number, node in enumerate(nodes, start=1)
    ]
    if generation is not None:
        entries.append(Entry(key=generation_key("run"), value=encode(generation), revision=90))
    return JobView.from_entries(entries, run="run", wanted={"trainer": 4})


def domains_at_hand(view: JobView) -> dict[str, str]:
    return view.findings.by_nodes(f"{plan.__name__}._domains", (), asked_anew, view.nodes)


def knows_groups(view: JobView) -> bool:
    return f"{plan.__name__}._groups" in view.findings._whole


def test_a_view_has_what_a_plan_asks_of_every_node_when_it_is_made() -> None:
    view = view_of(fakes.node(name) for name in NAMES)
    assert list(domains_at_hand(view)) == list(NAMES)


def test_parity_groups_are_found_while_few_nodes_are_still_awaited() -> None:
    workers = [fakes.worker(f"trainer/{rank}") for rank in range(4)]
    ranks = list(zip(NAMES, workers, strict=True))

    def seen(fenced: int) -> JobView:
        """Return the view when so many nodes have fenced generation 1."""
        nodes = [
            fakes.node(name, worker, fenced=1 if number < fenced else 0)
            for number, (name, worker) in enumerate(ranks)
        ]
        return view_of(nodes, fakes.generation(1, nodes, ranks=ranks, parity=1))

    assert [knows_groups(seen(fenced)) for fenced in range(5)] == [False, False, True, True, False]
