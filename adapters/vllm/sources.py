"""The weights that a worker of vLLM reads: from a root of checkpoints, or from a job's snapshots.

Only chunks whose checksums differ from those of the last version are read, and every chunk is
verified.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec
from torch import Tensor

from holdfast.adapters.rl.server.meeting import Meeting, Offer
from holdfast.adapters.rl.server.messages import DIGEST, AskDigest, ToldDigest
from holdfast.adapters.rl.weights.places import WeightsPlace
from holdfast.adapters.rl.weights.pull import Reader, RefusedWeightsError, pull
from holdfast.ckpt.checkpoints import redirects
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import CkptError, NotFoundError, PeerError
from holdfast.ckpt.recovery.replica import Replica, digest, refresh
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.transport import Client, RunKey
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.membership.records import Roster

_LEADER_S: Final = 2.0
_LIMIT_S: Final = 10.0
_RETRY_S: Final = 0.02


class PlacedWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place where a server finds weights: ``additional-config`` of vLLM, under ``holdfast``.

    Either a root of ``checkpoints``, or the directory by which a training job is met (``meeting``,
    see `Rollouts.serve`). ``prefix`` is taken off the names, and names without it are left out;
    ``node`` names the node of the job whose sidecar is asked, where nodes are machines.
    """

    checkpoints: str = ""
    meeting: str = ""
    prefix: str = ""
    node: str = ""

    def __post_init__(self) -> None:
        if bool(self.checkpoints) == bool(self.meeting):
            raise ValueError("give checkpoints, a root of checkpoints, or meeting, a directory")


class WantedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """A policy version, and the checkpoint that has it: ``step`` of ``folder`` in the root."""

    version: int
    folder: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedWeights:
    """Weights by the names that vLLM knows, in buffers that the next fetch overwrites."""

    version: int
    digest: str
    tensors: Mapping[str, Tensor]
    read_bytes: int
    kept_bytes: int


class WeightsSource(Protocol):
    """Reads a version of the weights."""

    def fetch(self, wanted: WantedWeights) -> FetchedWeights:
        """Return the wanted weights. Raises ``CkptError`` if they are unavailable."""


def source_of(config: Any) -> WeightsSource:
    """Return the source that ``additional-config`` of vLLM names.

    Raises ``ConfigError`` if it names none.
    """
    try:
        place = msgspec.convert((config or {}).get("holdfast"), PlacedWeights)
    except (msgspec.ValidationError, AttributeError) as error:
        raise ConfigError(
            f"--additional-config of vLLM has no place of weights ({error}): give "
            '\'{"holdfast": {"checkpoints": "DIRECTORY"}}\' or {"meeting": "DIRECTORY"}'
        ) from error
    return SavedWeights(place) if place.checkpoints else PublishedWeights(place)


@dataclass(slots=True)
class SavedWeights:
    """Weights in checkpoints below a root."""

    place: PlacedWeights
    _replica: Replica = field(default_factory=Replica)
    _folder: str = ""

    def fetch(self, wanted: WantedWeights) -> FetchedWeights:
        """Return the weights of a checkpoint (see `WeightsSource`)."""
        step = wanted.version if wanted.step is None else wanted.step
        root = "/".join(each for each in (self.place.checkpoints, wanted.folder) if each)
        with StoreSource.chosen(redirects.to_read(root, step), step) as source:
            prefix = self.place.prefix
            fqns = sorted(name for name in source.names() if name.startswith(prefix))
            if not fqns:
                raise NotFoundError(f"{root}, step {step}: no name begins with {prefix!r}")
            part = source.tensors(fqns)
            took = refresh(self._replica, part, fqns)
            found = digest(part.indexes(), fqns)
        tensors = {fqn[len(prefix) :]: self._replica.tensors[fqn] for fqn in fqns}
        return FetchedWeights(
            version=wanted.version,
            digest=found,
            tensors=tensors,
            read_bytes=took.read_bytes,
            kept_bytes=max(0, took.kept_bytes),  # bytes that are read have bytes between them
        )


@dataclass(slots=True)
class PublishedWeights:
    """Weights in the snapshots of a job that lives, compared with the digest that it publishes."""

    place: PlacedWeights
    _replica: Replica = field(default_factory=Replica)

    def fetch(self, wanted: WantedWeights) -> FetchedWeights:
        """Return a version, once the job has protected it (see `WeightsSource`)."""
        meeting, deadline_s = Meeting(self.place.meeting), time.monotonic() + _LIMIT_S
        avoid = frozenset[int]()
        while True:
            try:
                return self._fetched(meeting, wanted.version, avoid)
            except CkptError as error:
                if time.monotonic() > deadline_s:
                    raise
                avoid = error.ranks if isinstance(error, RefusedWeightsError) else avoid
                time.sleep(_RETRY_S)

    def _fetched(self, meeting: Meeting, version: int, avoid: frozenset[int]) -> FetchedWeights:
        offer = meeting.offer()
        if offer is None:
            raise NotFoundError(f"{self.place.meeting}: no job offers weights there (yet)")
        key, node = meeting.key(), self.place.node
        peers = {peer.node: peer.address for peer in offer.generation.snapshots.peers}
        if node and node not in peers:
            raise NotFoundError(f"node {node!r} is not one of the job's: {', '.join(peers)}")
        node = node or next(iter(peers))
        client = SidecarClient(peers[node], key)
        reader = Reader(
            client=client, node=node, roster=Roster(generation=offer.generation), key=key
        )
        try:
            pulled = pull(
                offer.names,
                version=version,
                reader=reader,
                everywhere=True,
                replica=self._replica,
                expected=lambda place: _published(place, offer, key),
                avoid=avoid,
            )
        finally:
            client.close()
        prefix = self.place.prefix
        return FetchedWeights(
            version=version,
            digest=pulled.digest,
            tensors={
                name[len(prefix) :]: tensor
                for name, tensor in pulled.tensors.items()
                if name.startswith(prefix)
            },
            read_bytes=pulled.nbytes,
            kept_bytes=max(0, pulled.saved),
        )


def _published(place: WeightsPlace, offer: Offer, key: RunKey) -> str:
    """Ask the job's leader for the digest of the weights at a place."""
    leader = Client(offer.leader, key, timeout_s=_LEADER_S)
    ask = AskDigest(generation=offer.generation.number, place=place)
    try:
        body, _ = leader.call(DIGEST, msgspec.to_builtins(ask))
    finally:
        leader.close()
    reply = msgspec.convert(body, ToldDigest)
    if not reply.digest:
        raise PeerError(f"the leader reports no digest of version {place.version}: {reply.why}")
    return reply.digest
