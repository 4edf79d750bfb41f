"""A member of a managed etcd as the cluster lists it. Pure."""

from __future__ import annotations

import msgspec


class ListedMember(msgspec.Struct, frozen=True, kw_only=True):
    """A member as the cluster lists it; it has a ``name`` once it has started."""

    id: int
    name: str = ""
    peer: str
    client: str = ""
    learner: bool = False

    @property
    def machine(self) -> str:
        """The host at which it listens."""
        return self.peer.rpartition(":")[0]
