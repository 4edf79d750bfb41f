"""The command line of a member of a managed etcd. It names files and places, and no secret."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.elastic.coordinator.managed.authority import CA_FILE, CERTIFICATE_FILE, KEY_FILE

FOLDER: Final = "etcd"
"""The folder of a member, in the run directory."""

DATA: Final = "data"
"""The data of etcd, in the member's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberAddress:
    """A member's address: ``host`` for the others, ``listen`` the IPv4 address that it binds.

    Clients come to ``port``, other members to the one above.
    """

    host: str
    listen: str
    port: int

    @property
    def endpoint(self) -> str:
        """The ``host:port`` for clients."""
        return f"{self.host}:{self.port}"

    @property
    def peer(self) -> str:
        """The ``host:port`` for other members."""
        return f"{self.host}:{self.port + 1}"


def member_command(
    program: Path,
    place: MemberAddress,
    folder: Path,
    *,
    token: str,
    others: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Return the argv of a member; ``others`` are the peers by name, None for a new cluster."""
    peers = {**(others or {}), place.host: place.peer}
    files = {
        "cert-file": folder / CERTIFICATE_FILE,
        "key-file": folder / KEY_FILE,
        "trusted-ca-file": folder / CA_FILE,
    }
    options = {
        "name": place.host,
        "data-dir": str(folder / DATA),
        "listen-client-urls": f"https://{place.listen}:{place.port}",
        "advertise-client-urls": f"https://{place.endpoint}",
        "listen-peer-urls": f"https://{place.listen}:{place.port + 1}",
        "initial-advertise-peer-urls": f"https://{place.peer}",
        "initial-cluster": ",".join(f"{name}=https://{peer}" for name, peer in peers.items()),
        "initial-cluster-state": "new" if others is None else "existing",
        "initial-cluster-token": token,
        **{name: str(path) for name, path in files.items()},
        **{f"peer-{name}": str(path) for name, path in files.items()},
        "client-cert-auth": "true",
        "peer-client-cert-auth": "true",
        "pre-vote": "true",
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": "10m",
        "logger": "zap",
        "log-outputs": "stderr",
        "log-level": "warn",
    }
    return (str(program), *(f"--{name}={value}" for name, value in options.items()))
