"""Connection to a coordinator by its address."""

from __future__ import annotations

import functools
import logging

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.coordinator.base import Coordinator
from holdfast.elastic.coordinator.embedded import EmbeddedCoordinator
from holdfast.elastic.coordinator.etcd.address import MANAGED, PLAIN, SECURE, EtcdAddress

_log = logging.getLogger(__name__)


def connect(address: str, key: RunKey, *, timeout_s: float = 5.0) -> Coordinator:
    """Return a connection to the etcd or the embedded coordinator at ``address``.

    etcd's addresses are ``etcd://…``, ``etcds://…`` and ``managed://…`` (see `EtcdAddress`). The
    embedded coordinator's is that of its server. It and a managed etcd admit clients with the run's
    ``key``. Raises ``ConfigError`` for an invalid address, a file that cannot be read, and a client
    library that is not installed.
    """
    if not is_etcd(address):
        return EmbeddedCoordinator(address, key, timeout_s=timeout_s)
    from holdfast.elastic.coordinator.etcd.coordinator import EtcdCoordinator

    found = EtcdAddress.parse(address)
    if found.exposed:
        _warn_once(str(found))
    identity = None
    if found.managed:
        from holdfast.elastic.coordinator.managed.authority import Authority

        identity = Authority.of(key).client(found.token)
    return EtcdCoordinator(found, timeout_s=timeout_s, identity=identity)


@functools.cache
def _warn_once(etcd: str) -> None:
    _log.warning(
        "%s is reached without TLS: whoever is on the network reads and changes the job's records; "
        "write etcds://HOST:PORT?ca=FILE, and give etcd --cert-file and --key-file",
        etcd,
    )


def is_etcd(address: str) -> bool:
    """Return whether the address is one of etcd."""
    return address.startswith((f"{PLAIN}://", f"{SECURE}://", f"{MANAGED}://"))


def is_managed(address: str) -> bool:
    """Return whether the address is one of an etcd that the job's launchers run."""
    return address.startswith(f"{MANAGED}://")
