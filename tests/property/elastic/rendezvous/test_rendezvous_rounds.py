"""Rounds of a rendezvous under any order of starts, crashes, late messages and lost leases."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.elastic.rendezvous.rounds import (
    Enter,
    Form,
    Participant,
    Round,
    RoundLimits,
    RoundView,
    decide,
    to_restart_for,
)

LIMITS = RoundLimits(least=2, most=3)
ACTIONS = ("start", "see", "look", "meet", "meet", "check", "hear", "crash", "expire")


@dataclass
class Node:
    """A running node: its view may be old."""

    view: RoundView = field(default_factory=RoundView)
    after: int = 0
    inside: Round | None = None
    alive: bool = True


@dataclass
class World:
    """The coordinator's table, and the nodes around it."""

    table: RoundView = field(default_factory=RoundView)
    nodes: dict[str, Node] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)

    def say(self, name: str, waits_after: int | None) -> None:
        said = Participant(node=name, host=name, store=f"{name}:1", waits_after=waits_after)
        self.table = replace(self.table, nodes={**self.table.nodes, name: said})

    def start(self, name: str) -> None:
        if name not in self.nodes:
            self.nodes[name] = Node()
            self.say(name, 0)

    def see(self, name: str) -> None:
        self.nodes[name].view = self.table

    def look(self, name: str) -> None:
        """A waiting node decides by its last view, and acts on the present records."""
        node = self.nodes[name]
        if node.inside or name not in node.view.nodes:
            return
        decision, _ = decide(
            node.view, node=name, after=node.after, limits=LIMITS, settled_s=float("inf")
        )
        if isinstance(decision, Enter):
            node.inside = decision.round
            self.say(name, None)
        elif isinstance(decision, Form) and decision.expected == self.table.revision:
            self.numbers.append(decision.round.number)
            revision = self.table.revision + 1
            self.table = replace(self.table, newest=decision.round, revision=revision)

    def meet(self, name: str) -> None:
        self.see(name)
        self.look(name)

    def hear(self, name: str) -> None:
        self.see(name)
        self.check(name)

    def check(self, name: str) -> None:
        """A working node ends its workers where the round should end."""
        node = self.nodes[name]
        if node.inside and to_restart_for(node.view, node=name, inside=node.inside, limits=LIMITS):
            node.after, node.inside = node.inside.number, None
            self.say(name, node.after)

    def crash(self, name: str) -> None:
        self.nodes[name].alive = False

    def expire(self, name: str) -> None:
        if not self.nodes[name].alive:
            left = {key: value for key, value in self.table.nodes.items() if key != name}
            self.table = replace(self.table, nodes=left)

    def act(self, action: str, name: str) -> None:
        if action == "start":
            self.start(name)
        elif name in self.nodes and (self.nodes[name].alive or action == "expire"):
            getattr(self, action)(name)
            self.examine()

    def examine(self) -> None:
        """No two nodes that live work in different rounds, and numbers only grow."""
        inside = {node.inside.number for node in self.nodes.values() if node.alive and node.inside}
        assert len(inside) <= 1, inside
        assert self.numbers == sorted(set(self.numbers))
        newest = self.table.newest
        assert newest is None or len(set(newest.members)) == len(newest.members) <= LIMITS.most

    def settle(self) -> None:
        """Let everybody hear and act until nothing is left to do."""
        for _ in range(12):
            for name in self.nodes:
                for action in ("hear", "meet", "expire"):
                    self.act(action, name)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from("abcd")), min_size=20, max_size=80)
)
def test_one_round_works_at_a_time_and_the_living_meet_when_faults_stop(
    history: list[tuple[str, str]],
) -> None:
    world = World()
    for name in "abc":
        world.start(name)
    for action, name in history:
        world.act(action, name)
    world.settle()
    alive = [name for name, node in world.nodes.items() if node.alive]
    working = [name for name in alive if world.nodes[name].inside]
    if len(alive) >= LIMITS.least:
        assert len(working) == min(len(alive), LIMITS.most)
        assert sorted(working) == sorted(world.table.newest.members if world.table.newest else ())


@given(st.lists(st.sampled_from("abcdef"), unique=True, min_size=2, max_size=3), st.data())
def test_a_survivor_keeps_its_rank_where_the_size_stays(
    old: list[str], data: st.DataObject
) -> None:
    lost = data.draw(st.sampled_from(old))
    newest = Round(number=1, members=tuple(old), hosts=tuple(old), store="x:1")
    said = {
        name: Participant(node=name, host=name, store="s:1", waits_after=1 if name in old else 0)
        for name in [*(name for name in old if name != lost), "z"]
    }
    view = RoundView(nodes=said, newest=newest, revision=1)
    limits = RoundLimits(least=1, most=len(old))
    decision, _ = decide(view, node="z", after=0, limits=limits, settled_s=1e9)
    assert isinstance(decision, Form)
    expected = tuple("z" if name == lost else name for name in old)
    assert decision.round.members == expected
    assert msgspec.json.decode(msgspec.json.encode(decision.round), type=Round) == decision.round
