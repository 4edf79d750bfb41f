"""The weights of policies that other runs train, read from the snapshots of those runs.

The leader of each run writes an offer into a meeting directory (`server.meeting`), with the run's
key and generation and the newest version that can be read. A reader compares a version's digest
with the one that this leader gives before it reads a byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch import Tensor

from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.server.asking import ask_digest
from holdfast.adapters.rl.server.meeting import Meeting, Offer
from holdfast.adapters.rl.weights.pull import Reader, RefusedWeightsError, pull
from holdfast.adapters.rl.weights.setup import require_same
from holdfast.ckpt.errors import CkptError, NotFoundError, PeerError
from holdfast.ckpt.recovery.replica import Replica
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.transport import Client
from holdfast.elastic.membership.records import Roster

_TIMEOUT_S: Final = 2.0


def meeting_of(join: str, policy: str) -> Meeting:
    """Return the meeting directory of the run that trains ``policy``."""
    return Meeting(Path(join) / "runs" / policy)


@dataclass(frozen=True, slots=True)
class _Road:
    """The connections to a run in one generation: to one of its sidecars, and to its leader."""

    offer: Offer
    reader: Reader
    leader: Client

    def close(self) -> None:
        self.reader.client.close()
        self.leader.close()


class OtherPolicy:
    """The policy ``name`` of another run; ``retained`` is as in `pull`.

    ``frozen`` is the digest of all frozen weights here.
    """

    def __init__(
        self, name: str, meeting: Meeting, *, retained: int, frozen: str | None = None
    ) -> None:
        self.name, self._meeting, self._retained = name, meeting, retained
        self._frozen = frozen
        self._replica, self._avoid = Replica(), frozenset[int]()
        self._road: _Road | None = None
        self._failed = 0

    def offer(self) -> Offer | None:
        """Return the newest offer of its run; None while there is none."""
        return self._meeting.offer()

    @property
    def reached(self) -> int:
        """The newest version that can be read; -1 for none, and while nobody leads its run."""
        offer = self.offer()
        return offer.reached if offer is not None and self._meeting.led() else -1

    def pull(self, version: int) -> Mapping[str, Tensor]:
        """Return the tensors of a version, by their names in the module of all policies.

        The next call changes them in place. Raises ``CkptError`` if they cannot be had now, and
        ``ConfigError`` if its run has other frozen weights.
        """
        road = self._follow()
        try:
            pulled = pull(
                road.offer.names,
                version=version,
                reader=road.reader,
                everywhere=True,
                replica=self._replica,
                expected=lambda place: ask_digest(
                    road.leader, place, generation=road.offer.generation.number
                ),
                avoid=self._avoid,
                retained=self._retained,
            )
        except CkptError as error:
            self._avoid = error.ranks if isinstance(error, RefusedWeightsError) else frozenset()
            if isinstance(error, PeerError):
                self._failed += 1  # another sidecar may answer
                self.close()
            raise
        self._avoid = frozenset()
        return pulled.tensors

    def close(self) -> None:
        """Close the connections; the next call of `pull` opens new ones."""
        if self._road is not None:
            self._road.close()
            self._road = None

    def _follow(self) -> _Road:
        offer = self.offer()
        if offer is None:
            raise NotFoundError(f"no run trains policy {self.name} now; start it, or wait for it")
        if self._road is not None and self._road.offer.generation == offer.generation:
            return self._road
        require_same(self._frozen, here=f"the run that reads {self.name}", others=offer.frozen)
        self.close()
        key, peers = self._meeting.key(), offer.generation.snapshots.peers
        peer = peers[self._failed % len(peers)]
        reader = Reader(
            client=SidecarClient(peer.address, key, timeout_s=_TIMEOUT_S),
            node=peer.node,
            roster=Roster(generation=offer.generation),
            key=key,
        )
        self._road = _Road(offer, reader, Client(offer.leader, key, timeout_s=_TIMEOUT_S))
        return self._road


class OtherPolicies:
    """All policies of a job that other runs train; ``frozen`` is as in `OtherPolicy`."""

    def __init__(self, config: RLConfig, *, frozen: str | None) -> None:
        join = config.join or ""
        self.each = {
            name: OtherPolicy(name, meeting_of(join, name), retained=config.retained, frozen=frozen)
            for name in config.elsewhere
        }

    @property
    def reached(self) -> dict[str, int]:
        """The newest version of each that can be read; -1 for none."""
        return {name: each.reached for name, each in self.each.items()}

    def pull(self, version: int) -> dict[str, Tensor]:
        """Return the tensors of a version of all (see `OtherPolicy.pull`)."""
        found: dict[str, Tensor] = {}
        for each in self.each.values():
            found |= each.pull(version)
        return found

    def close(self) -> None:
        """Close all connections."""
        for each in self.each.values():
            each.close()
