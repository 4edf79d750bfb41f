"""The messages between workers, agents and sidecars."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.events import CheckpointNews
from holdfast.ckpt.memory.arena import FixedPart
from holdfast.ckpt.memory.hosts import FileRef
from holdfast.ckpt.memory.records import BlockEntry, ParityEntry, RestorePoint, SnapshotWorld
from holdfast.ckpt.memory.target import CheckpointTarget, DiskTarget
from holdfast.ckpt.types import Json, learn


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every request body."""


class Nothing(Message, frozen=True, kw_only=True):
    """A request without a body."""


class Adopt(Message, frozen=True, kw_only=True):
    """Enter a generation; ``restore`` is the point from which its ranks will start."""

    world: SnapshotWorld
    restore: RestorePoint | None


class Acquire(Message, frozen=True, kw_only=True):
    """Ask for a slot of ``size_bytes`` (payload, padding and index).

    The request waits ``patience_s`` for a regular slot before one more is made. The block begins
    with the ``fixed`` part, if one is named.
    """

    generation: int
    step: int
    rank: int
    size_bytes: int
    timeout_s: float
    patience_s: float = 0.0
    fixed: FixedPart | None = None


class SlotGrant(Message, frozen=True, kw_only=True):
    """A slot to write: map ``path``; the block starts behind its header.

    ``ahead`` are slots that may be granted next: map them while there is time. The fixed part has
    its bytes already where ``has_fixed``. ``before`` is the (generation, step, rank) of the block
    that was written there last, as far as is known.
    """

    slot_id: int
    path: str
    capacity: int
    ahead: tuple[str, ...] = ()
    has_fixed: bool = False
    before: tuple[int, int, int] | None = None


class Seal(Message, frozen=True, kw_only=True):
    """A slot is complete; ``persist`` is the destination of its checkpoint, if any.

    The first frame, if there is one, holds the checksums of its block's runs, four bytes each. The
    second, if there is one, holds the step since which each run is the same, eight bytes each.
    """

    slot_id: int
    entry: BlockEntry
    persist: CheckpointTarget | None = None


class Abandon(Message, frozen=True, kw_only=True):
    """A slot will not be completed."""

    slot_id: int


class FenceSnapshots(Message, frozen=True, kw_only=True):
    """A generation is over: no snapshot of it or of an older one may begin."""

    generation: int


class RolledBack(Message, frozen=True, kw_only=True):
    """The ranks of ``generation`` started from ``restore``, not from the point in its plan."""

    generation: int
    restore: RestorePoint | None


class Await(Message, frozen=True, kw_only=True):
    """Ask for a step count, waiting up to ``timeout_s`` for ``at_least``."""

    generation: int | None = None
    at_least: int | None = None
    timeout_s: float = 0.0


class Locate(Message, frozen=True, kw_only=True):
    """Ask for the sources of the blocks of a protected step."""

    generation: int | None
    step: int


class OpenBlock(Message, frozen=True, kw_only=True):
    """Ask for a block of (world, step), rebuilt from parity where ``rebuilt``.

    With ``in_parts`` it may stay lost: each read then decodes its range.
    """

    world: SnapshotWorld
    step: int
    rank: int
    rebuilt: bool
    in_parts: bool = False


class Opened(Message, frozen=True, kw_only=True):
    """Answer to `OpenBlock`; the index JSON is the one frame.

    ``on_disk`` says that the slot's file is not in shared memory; ``in_parts`` that there is no
    slot, and reads are unverified. ``host`` is the holder's: the slot can be mapped only there.
    """

    path: str
    payload_bytes: int
    host: str = ""
    on_disk: bool = False
    in_parts: bool = False


class Distrust(Message, frozen=True, kw_only=True):
    """A reader found this block damaged: check it, and drop it if so."""

    generation: int
    step: int
    rank: int


class Read(Message, frozen=True, kw_only=True):
    """Ask for ``(offset, length)`` ranges of a block; the answer's body lists their CRCs."""

    generation: int
    step: int
    rank: int
    ranges: tuple[tuple[int, int], ...]


class AskChanged(Message, frozen=True, kw_only=True):
    """Ask for the bytes of a block that differ from the same rank's block of an earlier snapshot.

    The answer lists ``(offset, length)`` ranges; None where the earlier block is gone.
    """

    generation: int
    step: int
    rank: int
    base_generation: int
    base_step: int


class Follow(Message, frozen=True, kw_only=True):
    """Ask to keep a block until the reader of its rank's blocks follows a later one."""

    generation: int
    step: int
    rank: int


class ReadRow(Message, frozen=True, kw_only=True):
    """Ask for bytes of a parity row; the answer's body lists their CRC."""

    generation: int
    step: int
    stripe: int
    row: int
    at: int
    nbytes: int


class Key(Message, frozen=True, kw_only=True):
    """The key of a snapshot."""

    generation: int
    step: int


class SnapshotHoldings(Message, frozen=True, kw_only=True):
    """A sidecar's contents of one snapshot, and its ``host``.

    ``block_files`` and ``row_files`` are the files of each block and row, for mapping on that host.
    """

    blocks: tuple[BlockEntry, ...]
    parities: tuple[ParityEntry, ...]
    sealed: tuple[BlockEntry, ...]
    host: str = ""
    block_files: tuple[FileRef | None, ...] = ()
    row_files: tuple[FileRef | None, ...] = ()


class Sealed(Message, frozen=True, kw_only=True):
    """Gossip: these ranks' blocks are sealed and verified."""

    entries: tuple[BlockEntry, ...]


class AskColumn(Message, frozen=True, kw_only=True):
    """A parity holder asks the owner of a data column for the location of its bytes.

    ``base`` is the step whose sealed row the holder could start from, -1 for none; ``host`` is the
    holder's: if it is the owner's own, nothing is compared. The holder has the first ``start``
    bytes of the row.
    """

    generation: int
    step: int
    stripe: int
    column: int
    base: int = -1
    host: str = ""
    start: int = 0


class ColumnSpan(Message, frozen=True, kw_only=True):
    """Bytes ``at … at+nbytes`` of a sealed block, which go to offset ``into`` of a column.

    The block begins behind the header of ``file``; its sums from run ``first`` on are ``count``
    numbers of the answer's frame.
    """

    entry: BlockEntry
    file: FileRef
    at: int
    nbytes: int
    into: int
    first: int
    count: int


class Column(Message, frozen=True, kw_only=True):
    """Answer to `AskColumn`; the frame holds the sums of all spans, four bytes each.

    ``changed`` are the ranges that differ from the base, None where the base is gone.
    """

    host: str
    spans: tuple[ColumnSpan, ...]
    changed: tuple[tuple[int, int], ...] | None = None


class AskBytes(Message, frozen=True, kw_only=True):
    """A parity holder asks for bytes of a data column; the answer's body lists their CRCs.

    With a ``base`` the bytes are the exclusive or of both steps.
    """

    generation: int
    step: int
    stripe: int
    column: int
    ranges: tuple[tuple[int, int], ...]
    base: int = -1


class RowSealed(Message, frozen=True, kw_only=True):
    """Gossip: a parity row is complete on its holder."""

    entry: ParityEntry


class Persisted(Message, frozen=True, kw_only=True):
    """To the committing node: a rank's pack of (generation, step) is on the store, or cannot be.

    ``sent_in`` is the generation of the sender, ``receipt`` is None when there is an ``error``.
    """

    sent_in: int
    generation: int
    step: int
    rank: int
    receipt: Json = None
    error: str | None = None


class PersistProgress(Message, frozen=True, kw_only=True):
    """To the committing node: the bytes of a checkpoint that a node has written."""

    sent_in: int
    generation: int
    step: int
    node: str
    written_bytes: int


class PersistOrder(Message, frozen=True, kw_only=True):
    """From the committing node: write your packs of (generation, step) now, or never."""

    sent_in: int
    generation: int
    step: int
    begin: bool


class PersistTo(Message, frozen=True, kw_only=True):
    """The destination of the newest protected step for when the job is stopped, or ``now``."""

    target: CheckpointTarget
    now: bool = False


class PersistLate(Message, frozen=True, kw_only=True):
    """From the committing node, as the job is stopped: (generation, step) is wanted after all."""

    sent_in: int
    generation: int
    step: int
    target: CheckpointTarget


class PendingCheckpoint(Message, frozen=True, kw_only=True):
    """A checkpoint that is not durable yet, as far as a node knows.

    ``ranks`` are those whose blocks the node has to write, ``receipts`` those of written packs;
    ``due`` when its snapshot was protected.
    """

    world: SnapshotWorld
    step: int
    target: CheckpointTarget
    ranks: tuple[int, ...]
    receipts: tuple[Json, ...]
    due: bool
    total_bytes: int


class PendingCheckpoints(Message, frozen=True, kw_only=True):
    """To the committing node: all undurable checkpoints of a node that enters ``sent_in``."""

    sent_in: int
    node: str
    checkpoints: tuple[PendingCheckpoint, ...]


class Durable(Message, frozen=True, kw_only=True):
    """Gossip: a checkpoint is committed, or failed for the reason in ``error``.

    ``given_up`` when the store is not the cause.
    """

    generation: int
    step: int
    error: str | None = None
    given_up: bool = False


class AskNews(Message, frozen=True, kw_only=True):
    """Ask for events, waiting up to ``timeout_s``; numbers up to ``after`` are known."""

    after: int = 0
    timeout_s: float = 0.0


class NewsItem(Message, frozen=True, kw_only=True):
    """Something that happened to a checkpoint, by number."""

    number: int
    event: CheckpointNews


class Spill(Message, frozen=True, kw_only=True):
    """Spill protected snapshots to ``target`` from now on; or list those spilled there."""

    target: DiskTarget


class Spilled(Message, frozen=True, kw_only=True):
    """A snapshot on a node's disk, offered under the generation of ``world``.

    ``run`` and ``generation`` are those in which it was taken; ``blocks`` and ``parities`` are this
    node's contents of it, ``sealed`` the blocks of all ranks.
    """

    run: str
    generation: int
    world: SnapshotWorld
    step: int
    blocks: tuple[BlockEntry, ...]
    parities: tuple[ParityEntry, ...]
    sealed: tuple[BlockEntry, ...]


class LogName(Message, frozen=True, kw_only=True):
    """The name of a record log and its writer's node (None: this node)."""

    name: str
    node: str | None = None


class LogAppend(Message, frozen=True, kw_only=True):
    """Append records of these lengths, which lie one after another in the one frame."""

    name: str
    lengths: tuple[int, ...]


class LogTruncate(Message, frozen=True, kw_only=True):
    """Drop the records before index ``keep_from``."""

    name: str
    keep_from: int


class LogAwait(Message, frozen=True, kw_only=True):
    """Ask for the index up to which a log is on all copies, waiting for ``at_least``."""

    name: str
    at_least: int | None = None
    timeout_s: float = 0.0


class LogRead(Message, frozen=True, kw_only=True):
    """Ask for a page of a log from record ``start`` on, of at most ``count`` records."""

    name: str
    node: str | None = None
    start: int = 0
    count: int | None = None


class LogPage(Message, frozen=True, kw_only=True):
    """Answer to `LogRead`: the frame holds frames of ``count`` records from ``at`` on."""

    base: int
    end: int
    at: int
    count: int


class LogCopy(Message, frozen=True, kw_only=True):
    """Frames of ``count`` records from ``at`` on, for a copy; those before ``base`` are dropped.

    ``owner``: sent by the node of the log's writer, which is authoritative.
    """

    node: str
    name: str
    base: int
    at: int
    count: int = 0
    birth: int = 0
    generation: int = 0
    owner: bool = False


class LogState(Message, frozen=True, kw_only=True):
    """A sidecar's state of a log; it has none where ``birth`` is 0.

    ``last_crc`` is of the last record's frame. ``dropped`` is the birth of the newest dropped log
    of that name. ``settled``: every copy was complete in this generation.
    """

    birth: int = 0
    base: int = 0
    end: int = 0
    last_crc: int | None = None
    dropped: int = 0
    settled: bool = False


class LogForget(Message, frozen=True, kw_only=True):
    """Drop a log whose content was taken over; one born later than ``birth`` stays."""

    node: str
    name: str
    birth: int


M = TypeVar("M", bound=Message)


def parse(body: Json, kind: type[M], *, op: str) -> M:
    """Return ``body`` as ``kind``. Raises ``PeerError`` naming the op and the field at fault."""
    try:
        return msgspec.convert({} if body is None else body, kind)
    except msgspec.ValidationError as error:
        raise PeerError(f"{op}: malformed request: {error}") from error


def unparse(message: msgspec.Struct) -> Json:
    """Return ``message`` as JSON-typed values."""
    return msgspec.to_builtins(message)


learn(globals())
