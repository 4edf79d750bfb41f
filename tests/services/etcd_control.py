"""Operations of an etcd administrator: find the leader, compact, turn authentication on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etcd import Cluster, Member

from holdfast.elastic.coordinator.etcd.address import EtcdAddress
from holdfast.elastic.coordinator.etcd.stubs import grpc, rpc

_DEADLINE_S = 10.0


@contextlib.contextmanager
def _channel(cluster: Cluster, member: Member) -> Iterator[Any]:
    if cluster.certificates is None:
        channel = grpc.insecure_channel(member.endpoint)
    else:
        files = [cluster.certificates.file(n) for n in ("ca.crt", "client.key", "client.crt")]
        ca, key, certificate = (Path(file).read_bytes() for file in files)
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        channel = grpc.secure_channel(member.endpoint, credentials)
    try:
        yield channel
    finally:
        channel.close()


def leader_of(cluster: Cluster) -> Member:
    """Return the member that leads; waits until there is one."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        for member in cluster.members:
            if member.process is None:
                continue
            with _channel(cluster, member) as channel, contextlib.suppress(grpc.RpcError):
                status = rpc.MaintenanceStub(channel).Status(rpc.StatusRequest(), timeout=2.0)
                if status.leader and status.leader == status.header.member_id:
                    return member
    raise AssertionError("nobody leads")


def compact(cluster: Cluster, revision: int) -> None:
    """Compact the store: drop everything before ``revision``."""
    with _channel(cluster, cluster.members[0]) as channel:
        request = rpc.CompactionRequest(revision=revision, physical=True)
        rpc.KVStub(channel).Compact(request, timeout=_DEADLINE_S)


def write_bytes(url: str, key: str, value: bytes) -> None:
    """Put bytes that are no text below the prefix of an address, as another program might."""
    address = EtcdAddress.parse(url)
    channel = grpc.insecure_channel(address.endpoints[0])
    request = rpc.PutRequest(key=(address.prefix + key).encode(), value=value)
    rpc.KVStub(channel).Put(request, timeout=_DEADLINE_S)
    channel.close()


def require_password(cluster: Cluster, *, user: str, password: str, prefix: str) -> None:
    """Turn authentication on; ``user`` may read and write keys that start with ``prefix``."""
    with _channel(cluster, cluster.members[0]) as channel:
        auth = rpc.AuthStub(channel)
        key = prefix.encode()
        rights = rpc.Permission(
            permType=rpc.Permission.READWRITE, key=key, range_end=key[:-1] + bytes([key[-1] + 1])
        )
        for call, request in (
            (auth.RoleAdd, rpc.AuthRoleAddRequest(name="job")),
            (auth.RoleGrantPermission, rpc.AuthRoleGrantPermissionRequest(name="job", perm=rights)),
            (auth.RoleAdd, rpc.AuthRoleAddRequest(name="root")),
            (auth.UserAdd, rpc.AuthUserAddRequest(name="root", password="root")),
            (auth.UserGrantRole, rpc.AuthUserGrantRoleRequest(user="root", role="root")),
            (auth.UserAdd, rpc.AuthUserAddRequest(name=user, password=password)),
            (auth.UserGrantRole, rpc.AuthUserGrantRoleRequest(user=user, role="job")),
            (auth.AuthEnable, rpc.AuthEnableRequest()),
        ):
            call(request, timeout=_DEADLINE_S)
