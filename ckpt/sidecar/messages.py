"""What travels between workers, agents and sidecars. Pure values, sent as JSON."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ckpt.errors import PeerError
from ckpt.target import CheckpointTarget
from ckpt.types import Json, learn
from ckpt.world import BlockEntry, ParityEntry, RestorePoint, SnapshotWorld


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every request body."""


class Nothing(Message, frozen=True, kw_only=True):
    """A request without a body."""


class Adopt(Message, frozen=True, kw_only=True):
    """Enter a generation; ``restore`` is where its ranks will start from."""

    world: SnapshotWorld
    restore: RestorePoint | None


class Acquire(Message, frozen=True, kw_only=True):
    """Ask for a slot of ``size_bytes`` (payload, padding and index)."""

    generation: int
    step: int
    rank: int
    size_bytes: int
    timeout_s: float


class SlotGrant(Message, frozen=True, kw_only=True):
    """A slot to write: map ``path``, the block starts behind its header."""

    slot_id: int
    path: str
    capacity: int


class Seal(Message, frozen=True, kw_only=True):
    """A slot is complete; ``persist`` says where it is to be written to, if anywhere."""

    slot_id: int
    entry: BlockEntry
    persist: CheckpointTarget | None = None


class Abandon(Message, frozen=True, kw_only=True):
    """A slot will not be completed."""

    slot_id: int


class Await(Message, frozen=True, kw_only=True):
    """Ask for a step count, waiting up to ``timeout_s`` for ``at_least``."""

    generation: int | None = None
    at_least: int | None = None
    timeout_s: float = 0.0


class Locate(Message, frozen=True, kw_only=True):
    """Ask where the blocks of a protected step are."""

    generation: int | None
    step: int


class OpenBlock(Message, frozen=True, kw_only=True):
    """Ask for a block of (world, step), rebuilt from parity where ``rebuilt``."""

    world: SnapshotWorld
    step: int
    rank: int
    rebuilt: bool


class Opened(Message, frozen=True, kw_only=True):
    """Answer to `OpenBlock`; the index JSON is the one frame."""

    path: str
    payload_bytes: int


class Read(Message, frozen=True, kw_only=True):
    """Ask for ``(offset, length)`` ranges of a block; the answer's body lists their CRCs."""

    generation: int
    step: int
    rank: int
    ranges: tuple[tuple[int, int], ...]


class ReadRow(Message, frozen=True, kw_only=True):
    """Ask for bytes of a parity row; the answer's body lists their CRC."""

    generation: int
    step: int
    stripe: int
    row: int
    at: int
    nbytes: int


class Key(Message, frozen=True, kw_only=True):
    """Names a snapshot."""

    generation: int
    step: int


class Holdings(Message, frozen=True, kw_only=True):
    """What a sidecar has of one snapshot."""

    blocks: tuple[BlockEntry, ...]
    parities: tuple[ParityEntry, ...]
    sealed: tuple[BlockEntry, ...]


class Sealed(Message, frozen=True, kw_only=True):
    """Gossip: these ranks' blocks are sealed and verified."""

    entries: tuple[BlockEntry, ...]


class Fragment(Message, frozen=True, kw_only=True):
    """A part of a data piece for a parity holder; the bytes are the one frame."""

    generation: int
    step: int
    stripe: int
    row: int
    column: int
    at: int
    crc32c: int


class RowSealed(Message, frozen=True, kw_only=True):
    """Gossip: a parity row is complete on its holder."""

    entry: ParityEntry


class Persisted(Message, frozen=True, kw_only=True):
    """A rank's pack is on the store; for the sidecar that commits."""

    generation: int
    step: int
    rank: int
    root: str
    receipt: Json


class Durable(Message, frozen=True, kw_only=True):
    """Gossip: a checkpoint is committed, or failed for the reason in ``error``."""

    generation: int
    step: int
    error: str | None = None


class LogName(Message, frozen=True, kw_only=True):
    """Names a record log by itself and its writer's node (None: this node)."""

    name: str
    node: str | None = None


class LogTruncate(Message, frozen=True, kw_only=True):
    """Drop the records before index ``keep_from``."""

    name: str
    keep_from: int


class LogCopy(Message, frozen=True, kw_only=True):
    """Records ``at`` and on of a log, for its copy; those before ``base`` are dropped there."""

    node: str
    name: str
    base: int
    at: int


class LogContents(Message, frozen=True, kw_only=True):
    """Answer to a log read: the frame holds the records, one after another."""

    base: int
    lengths: tuple[int, ...]


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
