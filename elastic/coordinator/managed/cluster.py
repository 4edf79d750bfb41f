"""Requests of an administrator to a managed etcd: its members, their health, one change."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from holdfast.elastic.coordinator.etcd.address import EtcdAddress
from holdfast.elastic.coordinator.etcd.link import (
    ClientIdentity,
    EtcdLink,
    Line,
    Metadata,
    credentials,
)
from holdfast.elastic.coordinator.etcd.stubs import grpc, rpc
from holdfast.elastic.coordinator.managed.listed import ListedMember

_HEALTH_S = 1.0


def new_token() -> str:
    """Return the token of a new cluster: no other has it. It is a name, and no secret."""
    return secrets.token_hex(8)


class MembersAdmin:
    """Lists and changes the members. For one thread; every call ends within ``timeout_s``."""

    def __init__(self, address: EtcdAddress, identity: ClientIdentity, *, timeout_s: float) -> None:
        self._identity = identity
        self._link = EtcdLink(address, timeout_s=timeout_s, identity=identity)
        self._credentials = credentials(address, identity)
        self._probed: dict[str, Line] = {}

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The members' addresses for clients, as far as known."""
        return self._link.endpoints

    def members(self) -> list[ListedMember]:
        """Return the members that a majority agrees on. Raises ``CoordinatorError``."""

        def ask(line: Line, timeout_s: float, metadata: Metadata) -> Any:
            # a read that needs a majority first: before 3.5 a member lists what it knows itself
            newest = rpc.RangeRequest(key=b"\0", count_only=True)
            line.kv.Range(newest, timeout=timeout_s, metadata=metadata)
            request = rpc.MemberListRequest()
            return line.cluster.MemberList(request, timeout=timeout_s, metadata=metadata)

        found = [_listed(each) for each in self._link.call(ask, repeatable=True).members]
        self._link.follow([each.client for each in found if each.client and not each.learner])
        return sorted(found, key=lambda each: each.id)

    def add_learner(self, peer: str) -> None:
        """List a new member at ``peer``. Raises ``CoordinatorError``, also for a refusal."""
        request = rpc.MemberAddRequest(peerURLs=[f"https://{peer}"], isLearner=True)
        self._ask(lambda line: line.cluster.MemberAdd, request)

    def promote(self, id: int) -> None:
        """Give a learner a vote. Raises ``CoordinatorError``, also until it has the data."""
        self._ask(lambda line: line.cluster.MemberPromote, rpc.MemberPromoteRequest(ID=id))

    def remove(self, id: int) -> None:
        """Take a member off the list. Raises ``CoordinatorError``, also for a refusal."""
        self._ask(lambda line: line.cluster.MemberRemove, rpc.MemberRemoveRequest(ID=id))

    def answers(self, member: ListedMember) -> bool:
        """Return whether a member answers and knows a leader."""
        if not member.client:
            return False
        line = self._probed.get(member.client)
        if line is None:
            name = self._identity.server_name
            line = Line(member.client, self._credentials, server_name=name)
            self._probed[member.client] = line
        try:
            status = line.maintenance.Status(rpc.StatusRequest(), timeout=_HEALTH_S)
        except grpc.RpcError:
            self._probed.pop(member.client).retire()
            return False
        return bool(status.leader and status.header.member_id == member.id)

    def close(self) -> None:
        """Close every connection."""
        for line in self._probed.values():
            line.retire()
        self._probed.clear()
        self._link.close()

    def _ask(self, pick: Callable[[Line], Any], request: Any) -> None:
        def ask(line: Line, timeout_s: float, metadata: Metadata) -> Any:
            return pick(line)(request, timeout=timeout_s, metadata=metadata)

        self._link.call(ask, repeatable=False)


def _listed(member: Any) -> ListedMember:
    def place(urls: Any) -> str:
        return str(urls[0]).rpartition("/")[2] if urls else ""

    return ListedMember(
        id=member.ID,
        name=member.name,
        peer=place(member.peerURLs),
        client=place(member.clientURLs),
        learner=member.isLearner,
    )
