"""Talk to a sidecar: what agents, workers and readers call. Needs no torch.

A `SidecarClient` may be shared between threads; each call under way has a connection of its own,
so one that waits does not hold up the others. Errors that the sidecar raised come back as their
own class, which their code names (`holdfast.ckpt.errors.from_peer`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from typing_extensions import Buffer

from holdfast.ckpt.errors import CorruptError, PeerError, from_peer
from holdfast.ckpt.memory.arena import FixedPart
from holdfast.ckpt.memory.records import (
    BlockEntry,
    BlockSource,
    Inventory,
    RestorePoint,
    SnapshotWorld,
)
from holdfast.ckpt.memory.target import CheckpointTarget, DiskTarget
from holdfast.ckpt.native.crc import to_bytes
from holdfast.ckpt.native.sums import Lengths, Sums
from holdfast.ckpt.sidecar.core.messages import (
    Abandon,
    Acquire,
    Adopt,
    AskChanged,
    AskNews,
    Await,
    Distrust,
    FenceSnapshots,
    Follow,
    Key,
    Locate,
    LogAppend,
    LogAwait,
    LogName,
    LogRead,
    LogTruncate,
    Message,
    NewsItem,
    Nothing,
    OpenBlock,
    Opened,
    PersistTo,
    Read,
    RolledBack,
    Seal,
    SlotGrant,
    SnapshotHoldings,
    Spill,
    Spilled,
    unparse,
)
from holdfast.ckpt.sidecar.core.wire import PART_BYTES, split_checked
from holdfast.ckpt.sidecar.logs.reading import page_of
from holdfast.ckpt.transport import ClientPool, RunKey
from holdfast.ckpt.types import Json

__all__ = ["BlockHandle", "SidecarClient", "SlotGrant"]

_T = TypeVar("_T")
_LONG_S = 60.0
"""Deadline of calls whose work grows with the state: verify, rebuild, read."""


class BlockHandle(msgspec.Struct, frozen=True, kw_only=True):
    """An opened block: its index JSON, its length, and the slot file for readers on the host.

    In the file the payload begins at ``holdfast.ckpt.memory.arena.HEADER_BYTES``. A mapped reader
    verifies chunk CRCs after copying, for the slot may be written again once the snapshot is
    superseded. ``on_disk`` says that the file is not in shared memory; ``in_parts`` that there is
    no file. ``host`` is the holder's host (`holdfast.ckpt.memory.hosts`), "" if it is unknown.
    """

    index: bytes
    path: str
    payload_bytes: int
    host: str = ""
    on_disk: bool = False
    in_parts: bool = False


class SidecarClient:
    """A connection to one sidecar."""

    def __init__(self, address: str, key: RunKey, *, timeout_s: float = 10.0) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._pool = ClientPool(address, key, timeout_s=timeout_s, watch=True)

    def call(
        self,
        op: str,
        body: Message | None = None,
        frames: Sequence[Any] = (),
        *,
        timeout_s: float | None = None,
        bulk: bool | None = None,
    ) -> tuple[Json, list[memoryview]]:
        """Send a request and return the answer. Raises the sidecar's error."""
        with self._pool.lend() as client:
            try:
                return client.call(
                    op, unparse(body or Nothing()), frames, timeout_s=timeout_s, bulk=bulk
                )
            except PeerError as error:
                found = from_peer(error.peer_code, str(error))
                if isinstance(found, PeerError):
                    raise
                raise found from error

    def _ask(
        self, op: str, body: Message | None, kind: type[_T], *, timeout_s: float | None = None
    ) -> _T:
        answer, _ = self.call(op, body, timeout_s=timeout_s)
        return _convert(answer, kind, origin=f"{self.address}: {op}")

    # -- control ---------------------------------------------------------------------------------

    def adopt(self, world: SnapshotWorld, *, restore: RestorePoint | None) -> None:
        """Enter a generation: fence older ones, and drop snapshots that ``restore`` rolled back."""
        self.call("adopt", Adopt(world=world, restore=restore))

    def fence(self, generation: int) -> None:
        """End a generation: requests that wait for a slot in it are refused at once."""
        self.call("fence", FenceSnapshots(generation=generation))

    def roll_back(self, generation: int, *, restore: RestorePoint | None) -> None:
        """Report that ``generation`` started from ``restore``, not from the point in its plan.

        Later snapshots of older generations are dropped: their steps were rolled back.
        """
        self.call("roll_back", RolledBack(generation=generation, restore=restore))

    def inventory(self) -> Inventory:
        """Return the contents that the sidecar can serve, without a check of the bytes.

        The sidecar accepts no more snapshots of this generation afterwards, until it adopts a new
        one.
        """
        return self._ask("inventory", None, Inventory, timeout_s=_LONG_S)

    def status(self) -> dict[str, Json]:
        """Return counts, sizes, progress and the last errors."""
        return self._ask("status", None, dict)

    def stop(self) -> None:
        """Have the sidecar remove its shared memory and exit."""
        self.call("stop")

    # -- writing ---------------------------------------------------------------------------------

    def acquire(
        self,
        *,
        generation: int,
        step: int,
        rank: int,
        size_bytes: int,
        timeout_s: float,
        patience_s: float = 0.0,
        fixed: FixedPart | None = None,
    ) -> SlotGrant:
        """Get a slot for ``size_bytes`` (payload, padding, index), waiting while all are in use.

        The block begins with the ``fixed`` part, which is part of its size. After ``patience_s``
        the sidecar lends a slot more than the regular ones, where the memory allows it.

        Raises ``FencedError`` for an older generation, ``GivenUpError`` for a step that another
        rank gave up, ``CapacityError`` when none became free in time or shared memory is full.
        """
        body = Acquire(
            generation=generation,
            step=step,
            rank=rank,
            size_bytes=size_bytes,
            timeout_s=timeout_s,
            patience_s=patience_s,
            fixed=fixed,
        )
        return self._ask("acquire", body, SlotGrant, timeout_s=timeout_s + self._timeout_s)

    def seal(
        self,
        *,
        slot_id: int,
        entry: BlockEntry,
        sums: Sums | None = None,
        since: Lengths | None = None,
        persist: CheckpointTarget | None = None,
    ) -> None:
        """Hand a written slot over; return when it is checked and kept.

        ``sums`` are the checksums of the block's runs (`holdfast.ckpt.native.sums`), computed while
        it was written. With them the sidecar checks a sample now, and every reader checks the bytes
        it reads. Without them every byte is checked now. ``since`` are the steps since which each
        run is the same in all blocks of this rank; with them the sidecar need not compare blocks.
        ``persist`` is the destination to which
        this step is written once protected. Raises ``CorruptError`` when the bytes contradict the
        index or the sums, ``FencedError`` when late, ``GivenUpError`` when another rank gave up the
        step meanwhile.
        """
        body = Seal(slot_id=slot_id, entry=entry, persist=persist)
        frames: list[Buffer] = [] if sums is None else [to_bytes(sums.tolist())]
        if sums is not None and since is not None:
            frames.append(since.astype("<i8").tobytes())
        self.call("seal", body, frames, timeout_s=_LONG_S)

    def abandon(self, slot_id: int) -> None:
        """Give a slot back unwritten; every rank then gives up its step."""
        self.call("abandon", Abandon(slot_id=slot_id))

    def protected_step(
        self, *, generation: int, at_least: int | None = None, timeout_s: float = 0.0
    ) -> int:
        """Return the newest protected step of the generation, -1 for none.

        With ``at_least``, wait up to ``timeout_s`` for that step, then return the newest one. A
        generation that the sidecar has not adopted yet is waited for as long. Raises
        ``FencedError`` when the generation is over, ``NotFoundError`` when it did not come.
        """
        body = Await(generation=generation, at_least=at_least, timeout_s=timeout_s)
        return self._ask("protected_step", body, int, timeout_s=timeout_s + self._timeout_s)

    def durable_step(self, *, at_least: int | None = None, timeout_s: float = 0.0) -> int:
        """Return the newest step committed to the store in this run, -1 for none.

        With ``at_least``, wait for that step; raises ``StoreError`` when writing it failed.
        """
        body = Await(at_least=at_least, timeout_s=timeout_s)
        return self._ask("durable_step", body, int, timeout_s=timeout_s + self._timeout_s)

    def news(self, *, after: int = 0, timeout_s: float = 0.0) -> list[NewsItem]:
        """Return the checkpoint events since number ``after``; wait for one if there is none.

        An item that any caller has acknowledged by ``after`` is not returned again.
        """
        body = AskNews(after=after, timeout_s=timeout_s)
        return self._ask("news", body, list[NewsItem], timeout_s=timeout_s + self._timeout_s)

    def persist_to(self, target: CheckpointTarget, *, now: bool = False) -> None:
        """Set the destination of the newest protected step for when the job is stopped.

        With ``now`` its checkpoint begins at once. Call it on all nodes; one of them acts.
        """
        self.call("persist_to", PersistTo(target=target, now=now))

    def spill(self, target: DiskTarget) -> None:
        """Spill protected snapshots to the node's own disk from now on."""
        self.call("spill", Spill(target=target))

    def spilled(self, target: DiskTarget) -> list[Spilled]:
        """Return the snapshots on the node's disk, verified; their blocks can be opened."""
        body = Spill(target=target)
        return self._ask("spilled", body, list[Spilled], timeout_s=_LONG_S)

    # -- reading ---------------------------------------------------------------------------------

    def locate(self, *, generation: int | None, step: int) -> RestorePoint:
        """Return the sources of the blocks of a protected step. Raises ``NotFoundError``."""
        return self._ask("locate", Locate(generation=generation, step=step), RestorePoint)

    def holdings(self, *, generation: int, step: int) -> SnapshotHoldings:
        """Return what the sidecar holds of a snapshot; nothing changes there by it."""
        return self._ask("holdings", Key(generation=generation, step=step), SnapshotHoldings)

    def open_block(
        self, world: SnapshotWorld, step: int, source: BlockSource, *, in_parts: bool = False
    ) -> BlockHandle:
        """Open a block at this sidecar, which must be the one of ``source.node``.

        Where ``source.rebuilt``, the sidecar first rebuilds the block from parity; simultaneous
        callers wait for the same rebuild. With ``in_parts`` the block may stay lost: the handle
        then says so, and each read decodes its range, which is not verified.
        """
        body = OpenBlock(
            world=world, step=step, rank=source.rank, rebuilt=source.rebuilt, in_parts=in_parts
        )
        wait_s = _LONG_S if source.rebuilt else self._timeout_s
        answer, frames = self.call("open", body, timeout_s=wait_s)
        opened = _convert(answer, Opened, origin=f"{self.address}: open")
        if len(frames) != 1:
            raise CorruptError(f"{self.address}: open: the answer carries no index; retry")
        return BlockHandle(
            index=bytes(frames[0]),
            path=opened.path,
            payload_bytes=opened.payload_bytes,
            host=opened.host,
            on_disk=opened.on_disk,
            in_parts=opened.in_parts,
        )

    def distrust(self, world: SnapshotWorld, step: int, rank: int) -> bool:
        """Report a damaged block; return whether the sidecar found it damaged and dropped it.

        The next `open_block` of it with ``rebuilt`` then rebuilds it from parity.
        """
        body = Distrust(generation=world.generation, step=step, rank=rank)
        return self._ask("distrust", body, bool, timeout_s=_LONG_S)

    def read(
        self, world: SnapshotWorld, step: int, rank: int, ranges: Sequence[tuple[int, int]]
    ) -> list[memoryview]:
        """Return payload bytes ``(offset, length)``, checked against the sender's checksums."""
        parts: list[memoryview] = []
        for batch in _batches(ranges):
            body = Read(generation=world.generation, step=step, rank=rank, ranges=tuple(batch))
            answer, frames = self.call("read", body, bulk=True)
            lengths = [nbytes for _, nbytes in batch]
            parts += split_checked(answer, frames, lengths, origin=f"{self.address}: read")
        return _rejoin(ranges, parts)

    def changed(
        self, world: SnapshotWorld, step: int, rank: int, *, base: tuple[int, int]
    ) -> tuple[tuple[int, int], ...] | None:
        """Return the ranges of a block that differ from the same rank's block of snapshot ``base``.

        They are ``(offset, length)``; None if that (generation, step) is not held any more.
        """
        body = AskChanged(
            generation=world.generation,
            step=step,
            rank=rank,
            base_generation=base[0],
            base_step=base[1],
        )
        answer, _ = self.call("changed", body)
        if answer is None:
            return None
        kind = tuple[tuple[int, int], ...]
        return _convert(answer, kind, origin=f"{self.address}: changed")

    def follow(self, world: SnapshotWorld, step: int, rank: int) -> None:
        """Have the holder keep a block, as `changed` needs it, until a later one is followed."""
        self.call("follow", Follow(generation=world.generation, step=step, rank=rank))

    # -- logs ------------------------------------------------------------------------------------

    def log_open(self, name: str) -> int:
        """Make a record log of this node, or find it; return the index of its next record."""
        return self._ask("log_open", LogName(name=name), int)

    def log_append(self, name: str, records: Sequence[bytes]) -> int:
        """Append records; return the next index once they are in this node's memory.

        The copies on other nodes follow at a bounded delay, see `log_protected`. Raises
        ``NotFoundError`` for a log that was not opened, or dropped since, and ``CapacityError``
        when it must be truncated first.
        """
        batches = _log_batches(records)
        for batch in batches:
            body = LogAppend(name=name, lengths=tuple(map(len, batch)))
            answer, _ = self.call("log_append", body, [b"".join(batch)])
        return _convert(answer, int, origin=f"{self.address}: log_append")

    def log_read(self, name: str, *, node: str) -> list[bytes]:
        """Return the records of the log that a worker on ``node`` wrote, oldest first.

        Any sidecar answers: from the writer's node, or from a copy where that node is gone. Every
        record is verified; raises ``CorruptError`` for one that is damaged in every copy.
        """
        records: list[bytes] = []
        start, end = 0, 1
        while start < end:
            body = LogRead(name=name, node=node, start=start)
            answer, frames = self.call("log_read", body, timeout_s=_LONG_S, bulk=True)
            page = page_of(answer, frames, origin=f"{self.address}: log_read")
            records += [record for _, record in page.frames.records() if record is not None]
            start, end = page.frames.end, page.end
            if not page.frames.starts:
                break
        return records

    def log_truncate(self, name: str, keep_from: int) -> None:
        """Drop the records before index ``keep_from``, here and in the copies."""
        self.call("log_truncate", LogTruncate(name=name, keep_from=keep_from))

    def log_protected(
        self, name: str, *, at_least: int | None = None, timeout_s: float = 0.0
    ) -> int:
        """Return the index up to which the records of this node's log are on all its copies.

        With ``at_least``, wait up to ``timeout_s`` for it, then return the index reached.
        """
        body = LogAwait(name=name, at_least=at_least, timeout_s=timeout_s)
        return self._ask("log_protected", body, int, timeout_s=timeout_s + self._timeout_s)

    def log_drop(self, name: str, *, node: str) -> None:
        """Drop a log and all its copies: its worker is gone and its content was taken over."""
        self.call("log_drop", LogName(name=name, node=node), timeout_s=_LONG_S)

    def close(self) -> None:
        """Close the connections; calls in progress end first."""
        self._pool.close()


def _convert(answer: Json, kind: type[_T], *, origin: str) -> _T:
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise PeerError(f"{origin}: malformed answer: {error}") from error


def _log_batches(records: Sequence[bytes]) -> list[Sequence[bytes]]:
    """Cut records into requests of at most some megabytes; one empty request for no records."""
    batches: list[list[bytes]] = [[]]
    size = 0
    for record in records:
        if size and size + len(record) > PART_BYTES // 2:
            batches.append([])
            size = 0
        batches[-1].append(record)
        size += len(record)
    return list(batches)


def _batches(ranges: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Cut ranges into requests of at most `PART_BYTES`."""
    batch: list[tuple[int, int]] = []
    size = 0
    for at, nbytes in ranges:
        for start in range(0, max(nbytes, 1), PART_BYTES):
            part = min(PART_BYTES, nbytes - start)
            if batch and size + part > PART_BYTES:
                yield batch
                batch, size = [], 0
            batch.append((at + start, part))
            size += part
    if batch:
        yield batch


def _rejoin(ranges: Sequence[tuple[int, int]], parts: list[memoryview]) -> list[memoryview]:
    """Undo the cutting of `_batches`."""
    whole, taken = [], 0
    for _, nbytes in ranges:
        count = max(1, -(-nbytes // PART_BYTES))
        pieces = parts[taken : taken + count]
        taken += count
        whole.append(pieces[0] if count == 1 else memoryview(b"".join(pieces)))
    return whole
