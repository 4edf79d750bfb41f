"""Policy weights from snapshots: publishing them *is* the trainer's snapshot."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import msgspec
from torch import Tensor

from adapters.rl.model import weights_hash
from ckpt.errors import NotFoundError, PeerError
from ckpt.memory import MemorySource
from ckpt.restore import read_tensors
from ckpt.sidecar.client import SidecarClient
from ckpt.transport import RunKey
from ckpt.world import RestorePoint
from elastic.records import Roster

_OTHERS_TIMEOUT_S = 2.0

MODEL = "model"
"""The name under which the trainer tracks its policy."""


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """The weights of a policy version, their digest, and what fetching them took."""

    version: int
    tensors: dict[str, Tensor]
    digest: str
    seconds: float
    nbytes: int


def pull(
    names: Iterable[str],
    *,
    version: int,
    client: SidecarClient,
    node: str,
    roster: Roster,
    key: RunKey,
    everywhere: bool = False,
) -> Pulled:
    """Read the weights of ``version`` from the sidecars that have or can rebuild them.

    Every chunk's checksum is verified on the way. Raises ``NotFoundError`` while the version is
    not protected, or when it is no longer kept, as far as this node's sidecar knows; with
    ``everywhere`` the others are asked as well: a node that was lost may have told some of them
    only that the version's parity was complete.
    """
    start = time.perf_counter()
    addresses = _addresses(roster)
    others = addresses.values() if everywhere else ()
    point = _locate(version, client=client, others=others, key=key)
    source = MemorySource(point, local=client, local_node=node, addresses=addresses, key=key)
    try:
        found = read_tensors(source, [f"{MODEL}.{name}" for name in names])
    finally:
        source.close()
    tensors = {name.removeprefix(f"{MODEL}."): tensor for name, tensor in found.items()}
    return Pulled(
        version=version,
        tensors=tensors,
        digest=weights_hash(tensors),
        seconds=time.perf_counter() - start,
        nbytes=sum(tensor.nbytes for tensor in tensors.values()),
    )


def _locate(
    version: int, *, client: SidecarClient, others: Iterable[str], key: RunKey
) -> RestorePoint:
    """Ask this node's sidecar, then the ``others``."""
    try:
        return client.locate(generation=None, step=version)
    except NotFoundError:
        for address in sorted(set(others) - {client.address, ""}):
            other = SidecarClient(address, key, timeout_s=_OTHERS_TIMEOUT_S)
            try:
                return other.locate(generation=None, step=version)
            except (NotFoundError, PeerError):
                continue
            finally:
                other.close()
        raise


def _addresses(roster: Roster) -> Mapping[str, str]:
    members = roster.generation.snapshots.peers if roster.generation else ()
    return {peer.node: peer.address for peer in members} | {
        node.node: node.sidecar for node in roster.nodes
    }
