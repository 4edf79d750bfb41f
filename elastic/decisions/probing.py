"""Choice of the nodes that a node probes, and when. Pure: the caller probes and has the clock.

Without trouble, no node is probed. If a node's trainers wait for others for too long, or another
node reports that its trainers do, the node probes all others of the group repeatedly until that is
over. A node that did not answer is probed further, in whatever generation, until it answers or is
gone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from holdfast.elastic.membership.view import JobView, identity
from holdfast.elastic.planning.reach import is_wondering

_PAUSES_S = (2.0, 10.0)
_GROWTH = 1.5
_EACH_S = 0.01
"""Least time between rounds, per node: so no sidecar has to answer more than a hundred times a
second, however many nodes wait for one that compiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedNode:
    """A node to probe: the address of its sidecar, and its `membership.identity`."""

    address: str
    mark: str


class Probing:
    """One node's knowledge of the nodes it reaches.

    ``unreachable`` and ``probed`` as in its record.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self.unreachable: dict[str, str] = {}
        self._all_in = 0
        self._under_way: Mapping[str, ProbedNode] | None = None
        self._whole = 0
        self._next_s = 0.0
        self._pause_s = _PAUSES_S[0]
        self._wonders = False

    def probed(self, view: JobView) -> int:
        """Return ``probed`` for the node's record; 0 while no node needs it."""
        wanted = is_wondering(view) or self.unreachable
        return self._all_in if wanted and self._all_in == view.number else 0

    def due(self, view: JobView, *, waits: bool, now_s: float) -> Mapping[str, ProbedNode]:
        """Return the nodes to probe now, possibly none; call `answered` afterwards.

        Probe in this order: every node begins after itself, so that not all probe the same one
        first.

        ``waits``: the node's trainers have waited too long for others.
        """
        self._forget(view)
        wonders = bool(self._inside(view) and (waits or is_wondering(view)))
        if not wonders:
            self._all_in = 0
        elif not self._wonders:
            self._next_s, self._pause_s = now_s, _PAUSES_S[0]
        self._wonders = wonders
        if self._under_way is not None or now_s < self._next_s:
            return {}
        if not wonders and not self.unreachable:
            return {}
        names = {*self.unreachable, *(view.generation.nodes if wonders and view.generation else ())}
        self._under_way = {
            name: ProbedNode(address=node.sidecar, mark=identity(node))
            for name in sorted(names, key=lambda name: (name <= self._node, name))
            if name != self._node and (node := view.nodes.get(name)) is not None and node.sidecar
        }
        self._whole = view.number if wonders else 0
        return self._under_way or self._none_to_ask(now_s)

    def _none_to_ask(self, now_s: float) -> Mapping[str, ProbedNode]:
        self.answered((), now_s=now_s)
        return {}

    def _inside(self, view: JobView) -> bool:
        return view.generation is not None and self._node in view.generation.nodes

    def _forget(self, view: JobView) -> None:
        """Drop nodes that are gone or were restarted since the probe."""
        if self.unreachable:
            self.unreachable = {
                name: mark
                for name, mark in self.unreachable.items()
                if (node := view.nodes.get(name)) is not None and identity(node) == mark
            }

    def answered(self, names: Collection[str], *, now_s: float) -> None:
        """Record that of the nodes probed last only ``names`` have answered.

        If the trouble is over by now, silence is ignored: it then tells more about this node's
        processors than about the network.
        """
        targets, self._under_way = self._under_way or {}, None
        before = self.unreachable
        silent = {name: each.mark for name, each in targets.items() if name not in names}
        self.unreachable = {
            name: mark for name, mark in before.items() if name not in targets or name in silent
        }
        if self._whole and self._wonders:
            self.unreachable = dict(sorted({**self.unreachable, **silent}.items()))
            self._all_in = self._whole
        same = self.unreachable == before
        self._pause_s = min(self._pause_s * _GROWTH, _PAUSES_S[1]) if same else _PAUSES_S[0]
        self._next_s = now_s + max(self._pause_s, _EACH_S * len(targets))
