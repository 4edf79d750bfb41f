"""Nodes that leave and are lost in any order: only losses hold a node off."""

from __future__ import annotations

from collections import Counter
from enum import Enum

import msgspec
from doubles import fakes
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.elastic.decisions.agree import FirstSeen, Propose, decide, observe
from holdfast.elastic.membership.records import GenerationRecord, NodeRecord, Setback
from holdfast.elastic.membership.view import JobView

NAMES = ("b", "c", "d")


class End(Enum):
    """The end of a node's stay."""

    LEFT = "left"
    LOST = "lost"
    LOST_AND_BACK = "lost and back before the others have gone on"
    LEFT_AND_BACK = "left and back before the others have gone on"


LEFT = (End.LEFT, End.LEFT_AND_BACK)
BACK = (End.LOST_AND_BACK, End.LEFT_AND_BACK)


class Group:
    """Node a, which decides, and others that come and go."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.seen = FirstSeen()
        self.starts = Counter[str]()
        self.number = 0
        self.setbacks: dict[str, Setback] = {}
        self.form()

    def node(self, name: str) -> NodeRecord:
        start = self.starts[name]
        worker = fakes.worker(
            f"trainer/{name}", incarnation=f"{name}-{start}", ready_after=self.number
        )
        return fakes.node(name, worker, fenced=self.number, incarnation=f"{name}#{start}")

    def look(self, *nodes: NodeRecord) -> JobView:
        self.now_s += 0.01
        view = fakes.view(*nodes, generation=self.record, wanted={"trainer": 9})
        self.seen = observe(view, self.seen, now_s=self.now_s)
        return view

    def propose(self, *nodes: NodeRecord) -> GenerationRecord:
        """Have node a propose, as soon as it would, to go on with these nodes."""
        view = self.look(*nodes)
        decision, reason = decide(view, self.seen, node="a", now_s=self.now_s)
        assert isinstance(decision, Propose), reason
        return decision.record

    def form(self) -> None:
        """Begin a generation with all nodes, also excluded ones."""
        self.number += 1
        nodes = [self.node(name) for name in ("a", *NAMES)]
        ranks = [(node.node, worker) for node in nodes for worker in node.workers]
        fresh = fakes.generation(self.number, nodes, ranks=ranks)
        self.record = msgspec.structs.replace(fresh, setbacks=self.setbacks)

    def end(self, name: str, how: End) -> GenerationRecord:
        """End a node's stay, have the others go on and the node come back afterwards."""
        inside = {each: self.node(each) for each in ("a", *NAMES)}
        if how in LEFT:
            self.look(*{**inside, name: msgspec.structs.replace(inside[name], leaving=1)}.values())
        else:
            self.look(*inside.values())
        self.starts[name] += 1
        del inside[name]
        back = [self.node(name)] if how in BACK else []
        proposed = self.propose(*inside.values(), *back)
        self.setbacks = proposed.setbacks
        self.form()
        return proposed


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(End)), max_size=12))
def test_only_losses_count_against_a_node(ends: list[tuple[str, End]]) -> None:
    group, losses = Group(), Counter[str]()
    for name, how in ends:
        proposed = group.end(name, how)
        losses[name] += how not in LEFT
        assert {each: found.losses for each, found in proposed.setbacks.items()} == +losses
        if how is End.LEFT_AND_BACK and losses[name] <= 3:
            assert name in proposed.nodes, "it is let in at once"
        if how is End.LOST_AND_BACK:
            assert (name in proposed.nodes) == (losses[name] <= 3)
