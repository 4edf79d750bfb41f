"""Policy weights from snapshots: publishing them *is* the trainer's snapshot.

The leader of the trainers gives a version's digest, which it reads from the indexes of the sealed
snapshot, while training continues (`published`). A consumer compares that digest with the one it
finds before it reads a byte, and checks every chunk's checksum as it reads. Readers never delay the
trainer: they map sealed slots and pin nothing; if a slot was reused meanwhile, the reader gets an
error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from torch import Tensor

from holdfast import elastic
from holdfast.adapters.rl.weights.places import VERSIONS, WeightsPlace, candidates
from holdfast.ckpt.errors import CkptError, CorruptError, NotFoundError, PeerError
from holdfast.ckpt.memory.records import BlockSource, RestorePoint
from holdfast.ckpt.recovery.memory_source import MemorySource
from holdfast.ckpt.recovery.replica import Replica, digest, refresh
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.membership.records import Roster

_OTHERS_TIMEOUT_S = 2.0
_RETRY_S = 0.05

Expected: TypeAlias = Callable[[WeightsPlace], str]
"""Returns the digest that was published for the weights at a place."""


class RefusedWeightsError(CorruptError):
    """The weights of a version are damaged, or are not those that were published.

    ``ranks`` are those whose blocks are to be avoided.
    """

    code = "HF025"
    remedy = "Fetch them from other ranks."

    def __init__(self, message: str, *, version: int, ranks: frozenset[int]) -> None:
        super().__init__(message)
        self.version, self.ranks = version, ranks


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """The weights of a policy version, and the cost of fetching them.

    ``generation`` is that of the snapshot they came from; ``nbytes`` were read, ``saved`` bytes
    were here already and had not changed.
    """

    version: int
    generation: int
    tensors: Mapping[str, Tensor]
    digest: str
    seconds: float
    nbytes: int
    saved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """The reader's connections: its node's sidecar client, the job's roster, the run's key."""

    client: SidecarClient
    node: str
    roster: Roster
    key: RunKey

    def addresses(self) -> dict[str, str]:
        """Return the address of every node's sidecar."""
        roster = self.roster
        members = roster.generation.snapshots.peers if roster.generation else ()
        return {peer.node: peer.address for peer in members} | {
            node.node: node.sidecar for node in roster.nodes
        }

    def source(self, point: RestorePoint) -> MemorySource:
        """Return a source that reads the point's blocks."""
        return MemorySource(
            point,
            local=self.client,
            local_node=self.node,
            addresses=self.addresses(),
            key=self.key,
        )


def pull(
    names: Iterable[str],
    *,
    version: int,
    reader: Reader,
    everywhere: bool = False,
    replica: Replica | None = None,
    expected: Expected | None = None,
    avoid: Collection[int] = (),
    retained: int = 0,
) -> Pulled:
    """Read the weights of ``version`` from the sidecars that have or can rebuild them.

    They are in the version's own snapshot, or in a later one of a job whose snapshots have the
    ``retained`` versions before them. With a ``replica`` only what differs from it is read, and the
    replica's tensors are returned; retained versions are read whole.

    Raises `RefusedWeightsError` if their digest is not the ``expected`` one, or a block is damaged.
    The next attempt may ``avoid`` the blocks of these ranks, which other nodes then rebuild from
    parity. Raises ``NotFoundError`` while the version is not protected, or when it is no longer
    kept, as far as this node's sidecar knows. With ``everywhere`` the other sidecars are asked as
    well: a node that was lost may have told only some of them that the version's parity was
    complete.
    """
    start, names = time.perf_counter(), list(names)
    place, point = _locate(version, reader, everywhere=everywhere, retained=retained)
    fqns = place.fqns(names)
    if replica is None or place.slot is not None:
        replica = Replica()
    with reader.source(_rebuilt(point, frozenset(avoid), reader)) as source:
        found = digest(source.indexes(), fqns)
        if expected is not None and (wanted := expected(place)) != found:
            raise RefusedWeightsError(
                f"{source.origin}: the weights have the digest {found}, and the leader published "
                f"{wanted}",
                version=version,
                ranks=frozenset(range(len(point.sources))),
            )
        try:
            took = refresh(replica, source, fqns)
        except CorruptError as error:
            reader.client.locate(generation=place.generation, step=place.step)  # gone?
            with suppress(CkptError):
                source.distrust()
            ranks = frozenset(fault.rank for fault in source.faults)
            raise RefusedWeightsError(str(error), version=version, ranks=ranks) from error
        if place.slot is not None:
            _require(place, replica.tensors[VERSIONS], origin=source.origin)
    return Pulled(
        version=version,
        generation=place.generation,
        tensors={name: replica.tensors[fqn] for name, fqn in zip(names, fqns, strict=False)},
        digest=found,
        seconds=time.perf_counter() - start,
        nbytes=took.read_bytes,
        saved=took.kept_bytes,
    )


def own_reader(run: elastic.Run) -> Reader:
    """Return the `Reader` of a trainer rank."""
    session = elastic.session_of(run)
    node = session.members[run.rank].node
    return Reader(client=session.sidecar, node=node, roster=session.roster(), key=session.key)


def weights_of(
    run: elastic.Run,
    names: Iterable[str],
    version: int,
    *,
    limit_s: float = 10.0,
    retained: int = 0,
) -> Mapping[str, Tensor]:
    """Return the tensors of a version that snapshots still hold, to a rank of the trainers.

    ``retained`` as in `pull`. Raises ``CkptError`` if they are unavailable for ``limit_s``: right
    after a loss their parity may still be on its way to new holders.
    """
    names, avoid = list(names), frozenset[int]()
    deadline_s = time.monotonic() + limit_s
    while True:
        run.check()
        try:
            return pull(
                names,
                version=version,
                reader=own_reader(run),
                everywhere=True,
                avoid=avoid,
                retained=retained,
            ).tensors
        except CkptError as error:
            if time.monotonic() > deadline_s:
                raise
            avoid = error.ranks if isinstance(error, RefusedWeightsError) else avoid
            time.sleep(_RETRY_S)


def published(names: Iterable[str], place: WeightsPlace, *, reader: Reader) -> str:
    """Return the digest of the weights at a place, from the indexes: no tensor is read.

    Raises ``NotFoundError`` for a snapshot that is not kept any more.
    """
    point = reader.client.locate(generation=place.generation, step=place.step)
    with reader.source(point) as source:
        return digest(source.indexes(), place.fqns(names))


def _locate(
    version: int, reader: Reader, *, everywhere: bool, retained: int
) -> tuple[WeightsPlace, RestorePoint]:
    """Locate a version: ask this node's sidecar, then the others."""
    client, addresses = reader.client, reader.addresses().values() if everywhere else ()
    try:
        return _located(version, client, retained=retained)
    except NotFoundError:
        for address in sorted(set(addresses) - {client.address, ""}):
            other = SidecarClient(address, reader.key, timeout_s=_OTHERS_TIMEOUT_S)
            try:
                return _located(version, other, retained=retained)
            except (NotFoundError, PeerError):
                continue
            finally:
                other.close()
        raise


def _located(
    version: int, client: SidecarClient, *, retained: int
) -> tuple[WeightsPlace, RestorePoint]:
    """Return the place of a version that one sidecar knows. Raises ``NotFoundError``."""
    missing: NotFoundError | None = None
    for step, slot in candidates(version, retained=retained):
        try:
            point = client.locate(generation=None, step=step)
        except NotFoundError as error:
            missing = missing or error  # that of its own snapshot
            continue
        generation = point.world.generation
        return WeightsPlace(generation=generation, step=step, version=version, slot=slot), point
    assert missing is not None
    raise missing


def _require(place: WeightsPlace, versions: Tensor, *, origin: str) -> None:
    """Raise ``NotFoundError`` unless the retained slot has the wanted version."""
    slots = versions.tolist()
    if place.slot is None or slots[place.slot] != place.version:
        raise NotFoundError(f"{origin}: versions {slots} are retained, not {place.version}")


def _rebuilt(point: RestorePoint, ranks: frozenset[int], reader: Reader) -> RestorePoint:
    """Have the blocks of ``ranks`` rebuilt by a node that does not hold them, if there is one."""
    if not ranks or not point.world.parity:
        return point
    living = {node.node for node in reader.roster.nodes}
    nodes = [peer.node for peer in point.world.peers if peer.node in living]

    def elsewhere(source: BlockSource) -> BlockSource:
        others = [node for node in nodes if node != source.node]
        if source.rank not in ranks or not others:
            return source
        return BlockSource(rank=source.rank, node=others[0], rebuilt=True)

    return msgspec.structs.replace(point, sources=tuple(map(elsewhere, point.sources)))
