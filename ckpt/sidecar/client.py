"""Talk to a sidecar: what agents, workers and readers call. Needs no torch.

A `SidecarClient` may be shared between threads; each call under way has a connection of its own,
so one that waits does not hold up the others. Errors that the sidecar raised come back as their
own kind where that is one of `ckpt.errors`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from ckpt import errors
from ckpt.errors import CkptError, CorruptError, PeerError
from ckpt.sidecar.messages import (
    Abandon,
    Acquire,
    Adopt,
    Await,
    Locate,
    LogContents,
    LogName,
    LogTruncate,
    Message,
    Nothing,
    OpenBlock,
    Opened,
    Read,
    Seal,
    SlotGrant,
    unparse,
)
from ckpt.sidecar.wire import PART_BYTES, split_checked
from ckpt.target import CheckpointTarget
from ckpt.transport import Client, RunKey
from ckpt.types import Json
from ckpt.world import BlockEntry, BlockSource, Inventory, RestorePoint, SnapshotWorld

__all__ = ["BlockHandle", "SidecarClient", "SlotGrant"]

_T = TypeVar("_T")
_LONG_S = 60.0
"""Deadline of calls whose work grows with the state: verify, rebuild, read."""

_KINDS: dict[str, Callable[[str], CkptError]] = {
    kind.__name__: kind
    for kind in (
        errors.StateError,
        errors.MismatchError,
        errors.CorruptError,
        errors.NotFoundError,
        errors.StoreError,
        errors.CapacityError,
        errors.GivenUpError,
    )
}


class BlockHandle(msgspec.Struct, frozen=True, kw_only=True):
    """An opened block: its index JSON, its length, and the slot file for readers on the host.

    In the file the payload begins at ``ckpt.arena.HEADER_BYTES``; a mapped reader verifies chunk
    CRCs after copying, for the slot may be written again once the snapshot is superseded.
    """

    index: bytes
    path: str
    payload_bytes: int


class SidecarClient:
    """One sidecar, seen from outside."""

    def __init__(self, address: str, key: RunKey, *, timeout_s: float = 10.0) -> None:
        self.address, self._key, self._timeout_s = address, key, timeout_s
        self._idle: list[Client] = []
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def _connection(self) -> Iterator[Client]:
        with self._lock:
            if self._closed:
                raise PeerError(f"{self.address}: this client is closed")
            client = self._idle.pop() if self._idle else None
        if client is None:
            client = Client(self.address, self._key, timeout_s=self._timeout_s, watch=True)
        try:
            yield client
        finally:
            with self._lock:
                keep = not self._closed
                if keep:
                    self._idle.append(client)
            if not keep:
                client.close()

    def call(
        self,
        op: str,
        body: Message | None = None,
        frames: Sequence[Any] = (),
        *,
        timeout_s: float | None = None,
    ) -> tuple[Json, list[memoryview]]:
        """Send a request and return the answer. Raises what the sidecar raised."""
        with self._connection() as client:
            try:
                return client.call(op, unparse(body or Nothing()), frames, timeout_s=timeout_s)
            except PeerError as error:
                if (kind := _KINDS.get(error.kind)) is not None:
                    raise kind(str(error)) from error
                raise

    def _ask(
        self, op: str, body: Message | None, kind: type[_T], *, timeout_s: float | None = None
    ) -> _T:
        answer, _ = self.call(op, body, timeout_s=timeout_s)
        return _convert(answer, kind, origin=f"{self.address}: {op}")

    # -- control ---------------------------------------------------------------------------------

    def adopt(self, world: SnapshotWorld, *, restore: RestorePoint | None) -> None:
        """Enter a generation: older ones are fenced, what ``restore`` rolled back is dropped."""
        self.call("adopt", Adopt(world=world, restore=restore))

    def inventory(self) -> Inventory:
        """Return what the sidecar can serve, every byte of it verified just now.

        Nothing of it is released until a generation is adopted or training goes on in this one.
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
        self, *, generation: int, step: int, rank: int, size_bytes: int, timeout_s: float
    ) -> SlotGrant:
        """Get a slot for ``size_bytes`` (payload, padding, index), waiting while all are in use.

        Raises ``FencedError`` for an older generation, ``GivenUpError`` for a step that another
        rank gave up, ``CapacityError`` when none became free in time or shared memory is full.
        """
        body = Acquire(
            generation=generation,
            step=step,
            rank=rank,
            size_bytes=size_bytes,
            timeout_s=timeout_s,
        )
        return self._ask("acquire", body, SlotGrant, timeout_s=timeout_s + self._timeout_s)

    def seal(
        self, *, slot_id: int, entry: BlockEntry, persist: CheckpointTarget | None = None
    ) -> None:
        """Hand a written slot over; returns when its checksums were verified.

        ``persist`` says where this step is to be written to once protected. Raises
        ``CorruptError`` when the bytes are not what the index says, ``FencedError`` when late,
        ``GivenUpError`` when another rank gave the step up meanwhile.
        """
        self.call("seal", Seal(slot_id=slot_id, entry=entry, persist=persist), timeout_s=_LONG_S)

    def abandon(self, slot_id: int) -> None:
        """Give a slot back unwritten; its step is then given up by every rank."""
        self.call("abandon", Abandon(slot_id=slot_id))

    def protected_step(
        self, *, generation: int, at_least: int | None = None, timeout_s: float = 0.0
    ) -> int:
        """Return the newest protected step of the generation, -1 for none.

        With ``at_least`` waits up to ``timeout_s`` for it, then returns what there is.
        """
        body = Await(generation=generation, at_least=at_least, timeout_s=timeout_s)
        return self._ask("protected_step", body, int, timeout_s=timeout_s + self._timeout_s)

    def durable_step(self, *, at_least: int | None = None, timeout_s: float = 0.0) -> int:
        """Return the newest step committed to the store in this run, -1 for none.

        With ``at_least`` waits for it; raises ``StoreError`` when writing that step failed.
        """
        body = Await(at_least=at_least, timeout_s=timeout_s)
        return self._ask("durable_step", body, int, timeout_s=timeout_s + self._timeout_s)

    # -- reading ---------------------------------------------------------------------------------

    def locate(self, *, generation: int | None, step: int) -> RestorePoint:
        """Return where the blocks of a protected step are. Raises ``NotFoundError``."""
        return self._ask("locate", Locate(generation=generation, step=step), RestorePoint)

    def open_block(self, world: SnapshotWorld, step: int, source: BlockSource) -> BlockHandle:
        """Open a block at this sidecar, which has to be the one of ``source.node``.

        Where ``source.rebuilt``, the sidecar first rebuilds the block from parity; callers at the
        same time wait for the same rebuild.
        """
        body = OpenBlock(world=world, step=step, rank=source.rank, rebuilt=source.rebuilt)
        wait_s = _LONG_S if source.rebuilt else self._timeout_s
        answer, frames = self.call("open", body, timeout_s=wait_s)
        opened = _convert(answer, Opened, origin=f"{self.address}: open")
        if len(frames) != 1:
            raise CorruptError(f"{self.address}: open: the answer carries no index; retry")
        return BlockHandle(
            index=bytes(frames[0]), path=opened.path, payload_bytes=opened.payload_bytes
        )

    def read(
        self, world: SnapshotWorld, step: int, rank: int, ranges: Sequence[tuple[int, int]]
    ) -> list[memoryview]:
        """Return payload bytes ``(offset, length)``, checked against the sender's checksums."""
        parts: list[memoryview] = []
        for batch in _batches(ranges):
            body = Read(generation=world.generation, step=step, rank=rank, ranges=tuple(batch))
            answer, frames = self.call("read", body)
            lengths = [nbytes for _, nbytes in batch]
            parts += split_checked(answer, frames, lengths, origin=f"{self.address}: read")
        return _rejoin(ranges, parts)

    # -- logs ------------------------------------------------------------------------------------

    def log_open(self, name: str) -> int:
        """Make a record log of this node, or find it; return the index of its next record."""
        return self._ask("log_open", LogName(name=name), int)

    def log_append(self, name: str, records: Sequence[bytes]) -> int:
        """Append records; returns the next index once they are in this node's memory.

        The copy on the next node follows at once but is not waited for.
        """
        answer, _ = self.call("log_append", LogName(name=name), list(records))
        return _convert(answer, int, origin=f"{self.address}: log_append")

    def log_read(self, name: str, *, node: str) -> list[bytes]:
        """Return the records of the log that a worker on ``node`` wrote, oldest first.

        Any sidecar answers: from the writer's node, or from a copy where that is gone.
        """
        answer, frames = self.call("log_read", LogName(name=name, node=node), timeout_s=_LONG_S)
        contents = _convert(answer, LogContents, origin=f"{self.address}: log_read")
        records, at = [], 0
        for nbytes in contents.lengths:
            records.append(bytes(frames[0][at : at + nbytes]))
            at += nbytes
        return records

    def log_truncate(self, name: str, keep_from: int) -> None:
        """Drop the records before index ``keep_from``, here and in the copy."""
        self.call("log_truncate", LogTruncate(name=name, keep_from=keep_from))

    def close(self) -> None:
        """Close the connections; calls under way end first."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for client in idle:
            client.close()


def _convert(answer: Json, kind: type[_T], *, origin: str) -> _T:
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise PeerError(f"{origin}: malformed answer: {error}") from error


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
