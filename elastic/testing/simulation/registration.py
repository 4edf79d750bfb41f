"""The lease and the record of a simulated node at the coordinator, as `elastic.agent` keeps them.

The lease is renewed while the coordinator answers. Before it can run out, the workers end, and the
node registers anew. A record counts as published only once the coordinator has said so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.ckpt.errors import HoldfastError
from holdfast.elastic.coordinator.base import Entry
from holdfast.elastic.errors import LeaseExpiredError
from holdfast.elastic.membership.records import NodeRecord
from holdfast.elastic.membership.view import JobView, encode, node_key
from holdfast.elastic.testing.simulation.calls import CoordinatorCalls

if TYPE_CHECKING:
    from holdfast.elastic.testing.simulation.agent import SimulatedAgent

LEASE_TTL_S = 1.0
KEEP_ALIVE_S = 0.25
SELF_FENCE_S = 0.7


class SimulatedRegistration:
    """A node's lease and its published record; ``lease`` is None while it has none."""

    def __init__(self, agent: SimulatedAgent, calls: CoordinatorCalls) -> None:
        self._agent, self._sim, self._calls = agent, agent.sim, calls
        self._key = node_key(agent.sim.run_id, agent.name)
        self.lease: int | None = None
        self._renewed_s = agent.sim.now_s
        self._published: tuple[NodeRecord, int] | None = None
        self._dirty = False

    @property
    def acts_until_s(self) -> float:
        """The time until which the workers may act without a renewal."""
        return self._renewed_s + SELF_FENCE_S

    # -- the lease -----------------------------------------------------------------------------

    def register(self) -> None:
        """Ask for a lease until there is one, then publish the record."""

        def granted(result: int | HoldfastError) -> None:
            if isinstance(result, HoldfastError):
                self._agent.soon(0.05, 0.1, self.register)
                return
            self.lease, self._renewed_s, self._published = result, asked_s, None
            self.publish()

        asked_s = self._sim.now_s
        self._calls.make("grant", lambda: self._sim.grant(LEASE_TTL_S), granted)

    def beat(self) -> None:
        """Renew the lease; end the workers before it can run out, and then give it up.

        A node that can send but not receive would keep its lease, and the others would wait.
        """
        asked_s = self._sim.now_s
        if self.lease is not None and asked_s - self._renewed_s > SELF_FENCE_S:
            self._lose()
        if self.lease is not None:
            self._renew(self.lease, asked_s)
            if self._agent.follows:
                self._look_at_own()
        is_punctual = asked_s - self._renewed_s < KEEP_ALIVE_S * 1.5
        self._agent.after(KEEP_ALIVE_S if is_punctual else 0.05, self.beat)

    def _renew(self, lease: int, asked_s: float) -> None:
        def renewed(result: object) -> None:
            if lease != self.lease:
                return
            if isinstance(result, HoldfastError):
                self._lose()
            else:
                self._renewed_s = max(self._renewed_s, asked_s)

        self._calls.once(lambda: self._sim.table.keep_alive(lease, now_s=self._sim.now_s), renewed)

    def _lose(self) -> None:
        self.lease = None
        self._agent.lose_lease()
        self.register()

    # -- the record ----------------------------------------------------------------------------

    def publish(self) -> None:
        """Publish the node's record in its state at the time of the call."""

        def put() -> int:
            if lease is None:
                raise LeaseExpiredError("the lease was lost")
            return self._sim.put(self._key, encode(record), lease)

        def done(result: int | HoldfastError) -> None:
            if isinstance(result, HoldfastError):
                self._published = None
                self._agent.soon(0.01, 0.05, self.publish)
                return
            self._published = record, result
            if self._dirty:
                self.publish()
            elif self._agent.follows:
                self._agent.notice()

        self._dirty = True
        if self._calls.is_waiting("publish"):
            return
        record, lease = self._agent.record(), self.lease
        self._dirty = False
        if lease is not None and self._agent.alive and (record, lease) != self._stands():
            self._calls.make("publish", put, done)

    def _stands(self) -> tuple[NodeRecord, int | None] | None:
        return (self._published[0], self.lease) if self._published else None

    def check(self, view: JobView) -> None:
        """Publish again if a view of all nodes shows another record than the last published.

        An older write of this node may take effect after a newer one, and the end of an old lease
        deletes the records written under it.
        """
        if self._published is None:
            return
        record, revision = self._published
        shown = view.decoded.get(self._key)
        if shown is None:
            is_misquoted = view.revision >= revision
        else:
            is_misquoted = shown[0] > revision and shown[1] != record
        if is_misquoted:
            self._published = None
            self.publish()

    def _look_at_own(self) -> None:
        """Read the node's own record, which a follower does not watch."""

        def found(result: Entry | HoldfastError | None) -> None:
            if isinstance(result, HoldfastError) or self._published is None:
                return
            published, at = self._published
            if (result is None and at <= asked_at) or (
                result is not None and result.revision > at and result.value != encode(published)
            ):
                self._published = None
                self.publish()

        asked_at = self._sim.table.revision
        self._calls.once(lambda: self._sim.table.get(self._key), found)
