"""The rounds of a rendezvous under torchrun, as values and one decision. Pure.

A *round* is one rendezvous in torchrun's sense: the nodes of one worker group, in rank order. The
newest round is kept under one key and changed only by compare-and-set, so its number only grows.
Each node publishes under its lease whether it works or waits. The next round is formed as soon as
every living node of the newest waits: nodes whose workers may still run are always waited for,
nodes whose lease has ended never are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from holdfast.ckpt.types import learn
from holdfast.elastic.coordinator.base import Entry
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.membership.view import decode

NODES = "nodes/"
ROUND = "round"
CLOSED = "closed"


class Participant(msgspec.Struct, frozen=True, kw_only=True):
    """The record that a node publishes under its lease.

    ``store`` is the ``host:port`` of a fresh TCPStore for the round it waits for. ``waits_after``
    is the newest round it took part in, whose workers have ended (0: none); None while it works.
    """

    node: str
    host: str
    store: str = ""
    waits_after: int | None = 0


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of a worker group: ``members[r]`` has node rank ``r``; they meet at ``store``."""

    number: int
    members: tuple[str, ...]
    hosts: tuple[str, ...]
    store: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """A rendezvous at one moment; ``revision`` is that of the newest round (0: none)."""

    nodes: Mapping[str, Participant] = field(default_factory=dict)
    newest: Round | None = None
    revision: int = 0
    closed: bool = False

    @classmethod
    def from_entries(cls, entries: Iterable[Entry], *, prefix: str) -> RoundView:
        """Build the view from all entries under ``prefix``.

        Raises ``CoordinatorError`` naming the key of an unknown or corrupt record.
        """
        nodes: dict[str, Participant] = {}
        newest, revision, closed = None, 0, False
        for entry in entries:
            name = entry.key.removeprefix(prefix)
            if name.startswith(NODES):
                found = decode(entry.key, entry.value, Participant)
                nodes[found.node] = found
            elif name == ROUND:
                newest = decode(entry.key, entry.value, Round)
                revision = entry.revision
            elif name == CLOSED:
                closed = True
            else:
                raise CoordinatorError(
                    f"{entry.key}: no record of a rendezvous has this name; choose another "
                    "--rdzv-id"
                )
        return cls(nodes=nodes, newest=newest, revision=revision, closed=closed)

    @property
    def number(self) -> int:
        """The newest round's number, 0 before the first."""
        return self.newest.number if self.newest else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLimits:
    """The number of nodes of a round, and its waits for more of them, in seconds.

    ``last_call_s``: the first round's wait for further nodes once there are enough. ``settle_s``:
    the same for a later round, whose survivors are known, so it is short.
    """

    least: int
    most: int
    last_call_s: float = 30.0
    settle_s: float = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Enter:
    """Take part in ``round`` as node ``rank``."""

    round: Round
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Compare-and-set ``round`` as the newest, against revision ``expected``."""

    round: Round
    expected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitForNodes:
    """Ask again after a change, or once enough nodes have waited for ``seconds`` (None: never)."""

    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """There will be no further round; ``needed``: the newest one included this node."""

    needed: bool


Decision = Enter | Form | WaitForNodes | Closed


def decide(
    view: RoundView, *, node: str, after: int, limits: RoundLimits, settled_s: float
) -> tuple[Decision, str]:
    """Return the next action of a waiting ``node``, and the reason.

    ``after`` is the newest round it took part in; ``settled_s`` is the time for which the same
    nodes have been waiting.
    """
    newest = view.newest
    if view.closed:
        return Closed(needed=bool(newest and node in newest.members)), "the rendezvous is closed"
    if newest and newest.number > after and node in newest.members:
        rank = newest.members.index(node)
        return Enter(round=newest, rank=rank), f"round {newest.number} as node {rank}"
    if working := _working(view):
        return WaitForNodes(), f"waiting for {', '.join(working)} to leave round {view.number}"
    ready = _ready(view)
    if len(ready) < limits.least:
        return WaitForNodes(), f"{len(ready)} of at least {limits.least} nodes are here"
    patience_s = limits.settle_s if newest else limits.last_call_s
    if len(ready) < limits.most and settled_s < patience_s:
        return WaitForNodes(
            seconds=patience_s - settled_s
        ), f"{len(ready)} nodes are here, last call"
    formed = _form(view, ready[: limits.most])
    return Form(round=formed, expected=view.revision), f"{len(formed.members)} nodes are here"


def to_restart_for(view: RoundView, *, node: str, inside: Round, limits: RoundLimits) -> list[str]:
    """Return the nodes because of which ``node`` should leave the round ``inside``.

    These are members that wait for another round or are gone, newcomers as far as there is room,
    and the node itself if a newer round has begun without it. Empty if the rendezvous is closed.
    """
    if view.closed:
        return []
    if view.number > inside.number:
        return [node]
    gone = [name for name in inside.members if name not in view.nodes]
    back = [name for name in inside.members if name in view.nodes and _waits(view, name)]
    new = [name for name in waiting(view) if name not in inside.members]
    room = limits.most - (len(inside.members) - len(gone))
    return [*gone, *back, *new[: max(room, 0)]]


def waiting(view: RoundView) -> tuple[str, ...]:
    """Return the nodes of which a round could be formed now, to detect whether they change."""
    return tuple(participant.node for participant in _ready(view))


def _waits(view: RoundView, node: str) -> bool:
    after = view.nodes[node].waits_after
    return after is not None and after >= view.number


def _working(view: RoundView) -> list[str]:
    """Return the living members of the newest round that have not left it yet."""
    members = view.newest.members if view.newest else ()
    return [name for name in members if name in view.nodes and not _waits(view, name)]


def _ready(view: RoundView) -> list[Participant]:
    """Return the waiting nodes: those of the newest round in their order, then the others."""
    members = view.newest.members if view.newest else ()
    kept = [view.nodes[name] for name in members if name in view.nodes and _waits(view, name)]
    new = [
        participant
        for name, participant in view.nodes.items()
        if name not in members and participant.waits_after is not None
    ]
    return kept + sorted(new, key=lambda one: (one.host, one.node))


def _form(view: RoundView, chosen: list[Participant]) -> Round:
    """Return the next round; if its size is unchanged, newcomers get the lost nodes' ranks.

    A newcomer on the host of a lost node gets its rank, because that rank's memory is there.
    """
    old = view.newest
    order: list[Participant | None] = [None] * len(chosen)
    rest = list(chosen)
    if old and len(old.members) == len(chosen):
        by_name = {participant.node: participant for participant in chosen}
        order = [by_name.get(name) for name in old.members]
        rest = [participant for participant in chosen if participant.node not in old.members]
        for rank, host in enumerate(old.hosts):
            at_home = next((one for one in rest if one.host == host), None)
            if order[rank] is None and at_home:
                order[rank] = at_home
                rest.remove(at_home)
    fill = iter(rest)
    members = [place or next(fill) for place in order]
    return Round(
        number=view.number + 1,
        members=tuple(one.node for one in members),
        hosts=tuple(one.host for one in members),
        store=members[0].store,
    )


learn(globals())
