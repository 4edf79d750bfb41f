"""Named shared memory for snapshots: slot files, their headers, and the locks that keep them.

A slot file is ``[header, 4096 bytes][block]``; a *block* is the payload, padding to 8 bytes, and
the index JSON. The first bytes of the block may be a *fixed part*: they lie in a file of their own,
which all slots that need the same bytes name, and a mapping of such a slot shows them in place.
Slots outlive the worker that wrote them and the sidecar that owns them. A header
has two records, written in turn and each with a checksum of its own. So a restarted sidecar can
take the slots over, at whatever point its predecessor died.

Every process that needs a node's directory to stay holds its lock (see `hold`): the sidecar, the
process that started it, and the launcher. The last one to leave removes the directory. `sweep`
removes the directories that a SIGKILL of all of them at once left behind. Neither touches one that
is kept for a job that may come back (`holdfast.ckpt.memory.kept`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import msgspec

from holdfast.ckpt.errors import CapacityError, CorruptError, FencedError
from holdfast.ckpt.geometry.shard_index import ShardIndex, encode_index
from holdfast.ckpt.memory import kept
from holdfast.ckpt.memory.block import SlotState, align, block_bytes, index_offset
from holdfast.ckpt.memory.fixed_files import (
    HEADER_BYTES,
    fixed_name_of,
    make_fixed,
    make_numbered,
    map_numbered,
    numbered,
    sweep_fixed,
)
from holdfast.ckpt.memory.records import BlockEntry
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.native.pages import drop, is_no_room, populate
from holdfast.ckpt.native.sums import SUM_BYTES
from holdfast.ckpt.private import is_private, make_private, plain_name

ARENA_ROOT = Path("/dev/shm")
SLOT_SUFFIX = ".slot"
_MAGIC = b"HFSLOT3\0"
_PREFIX = "holdfast-"
_GRAIN_BYTES = 1 << 16
FIXED_GRAIN_BYTES = SUM_BYTES
"""Fixed parts end where a run of a block's checksums ends: no run has bytes of both parts."""
# magic, run digest, state, number of the record, generation, step, rank, payload, index,
# capacity, fixed bytes, fixed number, index CRC
_FIELDS = struct.Struct("<8s16sB7xqqqqqqqqqI")
_CRC = struct.Struct("<I")
_RECORD_BYTES = HEADER_BYTES // 2
_OWNER_WAIT_S = 10.0
_POLL_S = 0.01


class SlotHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a slot's contents; all zero but ``state`` when EMPTY."""

    state: SlotState
    generation: int = 0
    step: int = 0
    rank: int = 0
    payload_bytes: int = 0
    index_bytes: int = 0
    index_crc32c: int = 0
    fixed_bytes: int = 0
    fixed: int = 0

    @classmethod
    def of(cls, entry: BlockEntry, state: SlotState) -> SlotHeader:
        """Return the header of a slot that holds ``entry``."""
        return cls(
            state=state,
            generation=entry.generation,
            step=entry.step,
            rank=entry.rank,
            payload_bytes=entry.payload_bytes,
            index_bytes=entry.index_bytes,
            index_crc32c=entry.index_crc32c,
            fixed_bytes=entry.fixed_bytes,
            fixed=entry.fixed,
        )

    def entry(self) -> BlockEntry:
        """Return the block this header describes."""
        return BlockEntry(
            generation=self.generation,
            step=self.step,
            rank=self.rank,
            payload_bytes=self.payload_bytes,
            index_bytes=self.index_bytes,
            index_crc32c=self.index_crc32c,
            fixed_bytes=self.fixed_bytes,
            fixed=self.fixed,
        )


class FixedPart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The first ``nbytes`` of blocks, in a file of its own beside the slots.

    ``number`` tells the fixed parts of a rank in a generation apart. The length is a multiple of
    `FIXED_GRAIN_BYTES`.
    """

    generation: int
    rank: int
    number: int
    nbytes: int

    @property
    def name(self) -> str:
        """The name of the file, without its suffix."""
        return f"{self.generation}-{self.rank}-{self.number}"


def run_digest(run: str) -> bytes:
    """Return the 16 bytes that mark slots of ``run``."""
    return hashlib.blake2b(run.encode(), digest_size=16).digest()


class SlotFile:
    """A mapped slot. Writers fill ``payload`` and call ``finish``; the sidecar owns the header."""

    def __init__(self, path: Path, mapping: mmap.mmap, *, fixed_bytes: int = 0) -> None:
        self.path = path
        self._mapping = mapping
        self.capacity = len(mapping) - HEADER_BYTES
        self.fixed_bytes = fixed_bytes
        self.is_warm = False
        self._warm_parts: set[tuple[int, int]] = set()
        self._record = -1

    @property
    def fixed_name(self) -> str:
        """The name of the fixed part, "" for a slot without one."""
        return fixed_name_of(self.path)

    @property
    def file_bytes(self) -> int:
        """The length of the slot's own file."""
        return HEADER_BYTES + self.capacity - self.fixed_bytes

    @classmethod
    def create(
        cls, path: Path, size_bytes: int, *, check: Callable[[], None] = lambda: None
    ) -> SlotFile:
        """Make a slot for a block of ``size_bytes``, with every page allocated now.

        A fixed part that the path names is not part of ``size_bytes``. Calls ``check`` repeatedly
        meanwhile. Raises ``CapacityError`` when shared memory has no room for the slot,
        and any error of ``check``.
        """
        capacity = slot_capacity(size_bytes)
        if (free := shutil.disk_usage(path.parent).free) < HEADER_BYTES + capacity:
            raise _no_room(path, capacity, free=free)  # a failed allocation takes long
        try:
            mapping, fixed_bytes = make_numbered(path, capacity, check=check)
            return cls(path, mapping, fixed_bytes=fixed_bytes)
        except OSError as error:
            if not is_no_room(error):
                raise
            free = shutil.disk_usage(path.parent).free
            raise _no_room(path, capacity, free=free) from error

    @classmethod
    def open(cls, path: str | Path, *, fill: bool = False) -> SlotFile:
        """Map an existing slot; `warm` it before it is copied to.

        With ``fill`` its fixed part can be written to.
        """
        mapping, fixed_bytes = map_numbered(Path(path), fill=fill)
        if len(mapping) - fixed_bytes <= HEADER_BYTES:
            raise CorruptError(f"{path}: too short for a slot; remove the file")
        return cls(Path(path), mapping, fixed_bytes=fixed_bytes)

    def warm(self) -> None:
        """Fill this process's page table, so that the first copy does not fault; no GIL held."""
        self.is_warm = True
        self.warm_part(0, self.capacity)

    def warm_part(self, at: int, nbytes: int) -> None:
        """Do what `warm` does for bytes ``at … at + nbytes`` of the block, once for each part."""
        if (at, nbytes) in self._warm_parts:
            return
        self._warm_parts.add((at, nbytes))
        with contextlib.suppress(OSError):  # if there is no room, the first access raises
            populate(self._mapping, at=HEADER_BYTES + at, nbytes=nbytes)

    def cool(self) -> None:
        """Clear this process's page table of the slot, so that `close` takes no time; no GIL held.

        The next access of each page faults.
        """
        self.is_warm = False
        self._warm_parts.clear()
        with contextlib.suppress(ValueError):  # closed meanwhile
            drop(self._mapping)

    def block(self, nbytes: int) -> memoryview:
        """Return a writable view of the first ``nbytes`` of the block."""
        if nbytes > self.capacity:
            raise CapacityError(
                f"{self.path.name}: {nbytes:,} bytes do not fit in a slot of {self.capacity:,}; "
                "acquire a slot of the full size"
            )
        return memoryview(self._mapping)[HEADER_BYTES : HEADER_BYTES + nbytes]

    payload = block

    def index_view(self, entry: BlockEntry) -> memoryview:
        """Return a view of the index JSON of ``entry``."""
        return self.block(block_bytes(entry))[index_offset(entry.payload_bytes) :]

    def finish(self, index: ShardIndex) -> BlockEntry:
        """Write ``index`` behind the payload and return the entry to seal."""
        text = encode_index(index)
        at = index_offset(index.payload_bytes)
        block = self.block(at + len(text))
        block[index.payload_bytes : at] = bytes(at - index.payload_bytes)
        block[at:] = text
        return BlockEntry(
            generation=index.generation,
            step=index.step,
            rank=index.writer,
            payload_bytes=index.payload_bytes,
            index_bytes=len(text),
            index_crc32c=crc32c(text),
        )

    def write_header(self, header: SlotHeader, *, run: bytes) -> None:
        """Store ``header`` over the older of the two records; a half-written one does not count."""
        if self._record < 0:
            self._record = max((found[0] for found in self._records(run)), default=0)
        self._record += 1
        fields = _FIELDS.pack(
            _MAGIC,
            run,
            header.state,
            self._record,
            header.generation,
            header.step,
            header.rank,
            header.payload_bytes,
            header.index_bytes,
            self.capacity,
            header.fixed_bytes,
            header.fixed,
            header.index_crc32c,
        )
        at = self._record % 2 * _RECORD_BYTES
        self._mapping[at : at + _FIELDS.size + _CRC.size] = fields + _CRC.pack(crc32c(fields))

    def read_header(self, *, run: bytes) -> SlotHeader | None:
        """Return the newest whole header, or None if there is none or it exceeds the slot."""
        found = max(self._records(run), key=lambda each: each[0], default=None)
        return found[1] if found else None

    def _records(self, run: bytes) -> Iterator[tuple[int, SlotHeader]]:
        """Yield the whole records of ``run``, with their numbers."""
        for at in (0, _RECORD_BYTES):
            fields = self._mapping[at : at + _FIELDS.size]
            (stored,) = _CRC.unpack_from(self._mapping, at + _FIELDS.size)
            if stored != crc32c(fields):
                continue
            magic, owner, state, number, *numbers, capacity, fixed_bytes, fixed, crc = (
                _FIELDS.unpack(fields)
            )
            generation, step, rank, payload, index = numbers
            if magic != _MAGIC or owner != run or capacity != self.capacity:
                continue
            if index_offset(payload) + index > capacity:
                continue
            yield (
                number,
                SlotHeader(
                    state=SlotState(state),
                    generation=generation,
                    step=step,
                    rank=rank,
                    payload_bytes=payload,
                    index_bytes=index,
                    index_crc32c=crc,
                    fixed_bytes=fixed_bytes,
                    fixed=fixed,
                ),
            )

    def close(self) -> None:
        """Unmap the slot; where views of it still exist, the last of them unmaps it."""
        try:
            self._mapping.close()
        except BufferError:
            return


def has_little_room(directory: Path) -> bool:
    """Say whether removed files should be unmapped at once: memory is more than half full.

    Otherwise all files fit once more, so a delay in freeing memory does no harm.
    """
    try:
        found = shutil.disk_usage(directory)
    except OSError:
        return True
    return found.free < found.used


def slot_capacity(size_bytes: int) -> int:
    """Return the capacity of the slot that is made for a block of ``size_bytes``."""
    return align(max(size_bytes, 1), _GRAIN_BYTES)


def _no_room(path: Path, capacity: int, *, free: int) -> CapacityError:
    return CapacityError(
        f"no room for a snapshot slot of {capacity:,} bytes: {path.parent.parent} has "
        f"{free:,} bytes free; enlarge it (mount -o remount,size=...), keep fewer "
        "snapshots (keep=1), or run fewer ranks on this machine"
    )


class Arena:
    """A node's directory of slots, owned by one process at a time.

    ``reach`` is called with the name of every point in a slot's life (``"seal.before"``,
    ``"seal.after"``); tests end the process there.
    """

    def __init__(self, directory: Path, lock_fd: int, owner_fd: int, *, run: str) -> None:
        self.directory, self._lock_fd, self._owner_fd = directory, lock_fd, owner_fd
        self.run = run_digest(run)
        self.reach: Callable[[str], None] = lambda point: None
        self._number = 0
        self._making_fixed = threading.Lock()

    @classmethod
    def open(cls, directory: Path, *, run: str) -> Arena:
        """Make or take over ``directory``, hold its lock and own it.

        Waits for an earlier owner that is about to end. Raises ``FencedError`` when it does not
        end.
        """
        lock_fd = hold(directory)
        owner_fd = os.open(directory / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _lock_alone(owner_fd, patience_s=_OWNER_WAIT_S):
            os.close(owner_fd)
            os.close(lock_fd)
            raise FencedError(
                f"{directory}: another sidecar of this node is running; end it, or give this "
                "node another name"
            )
        return cls(directory, lock_fd, owner_fd, run=run)

    def create(
        self,
        size_bytes: int,
        *,
        fixed: FixedPart | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> SlotFile:
        """Make a fresh EMPTY slot, its pages filled; see `SlotFile.create`.

        The file of a ``fixed`` part is made where it is missing.
        """
        self.reach("create.before")
        if fixed is not None:
            self._make_fixed(fixed, check=check)
        name, own_bytes = (fixed.name, size_bytes - fixed.nbytes) if fixed else ("", size_bytes)
        while True:
            self._number += 1
            path = numbered(self.directory, self._number, SLOT_SUFFIX, fixed=name)
            try:
                slot = SlotFile.create(path, own_bytes, check=check)
            except FileExistsError:
                continue
            except FileNotFoundError as error:
                raise FencedError(f"{path.name}: its fixed part was given up meanwhile") from error
            self.reach("create.made")
            slot.write_header(SlotHeader(state=SlotState.EMPTY), run=self.run)
            self.reach("create.after")
            return slot

    def _make_fixed(self, fixed: FixedPart, *, check: Callable[[], None]) -> None:
        try:
            with self._making_fixed:
                make_fixed(self.directory, fixed.name, SLOT_SUFFIX, fixed.nbytes, check=check)
        except OSError as error:
            if not is_no_room(error):
                raise
            path = self.directory / fixed.name
            raise _no_room(path, fixed.nbytes, free=self.free_bytes()) from error

    def sweep_fixed(self, *, named: Collection[str]) -> None:
        """Remove the files of fixed parts that are not ``named``."""
        sweep_fixed(self.directory, SLOT_SUFFIX, named=named)

    def free_bytes(self) -> int:
        """Return the free bytes of the arena's file system."""
        return shutil.disk_usage(self.directory.parent).free

    def scan(self) -> Iterator[tuple[SlotFile, BlockEntry, SlotState]]:
        """Yield the sealed and committed slots left by an earlier owner; remove the others.

        Fixed parts that no slot names are removed as well.
        """
        named = set()
        for path in sorted(self.directory.glob(f"*{SLOT_SUFFIX}")):
            try:
                slot = SlotFile.open(path)
            except (CorruptError, ValueError, FileNotFoundError):
                path.unlink(missing_ok=True)
                continue
            slot.warm()
            header = slot.read_header(run=self.run)
            if header is None or header.state in (SlotState.EMPTY, SlotState.WRITING):
                slot.close()
                path.unlink(missing_ok=True)
                continue
            named.add(slot.fixed_name)
            yield slot, header.entry(), header.state
        sweep_fixed(self.directory, SLOT_SUFFIX, named=named, unfinished=True)

    def remove(self) -> None:
        """Unlink everything, even if other processes hold it, and release the locks."""
        if is_held(self.directory, self._lock_fd):
            shutil.rmtree(self.directory, ignore_errors=True)
        self.release()

    def leave(self, *, patience_s: float = 0.0) -> bool:
        """Release the locks, and remove everything unless another process holds it or it is kept.

        Returns whether it was removed. ``patience_s`` is the time to wait for holders that are
        about to die.
        """
        if kept.is_kept(self.directory):
            self.release()
            return False
        alone = self._lock_fd >= 0 and _lock_alone(self._lock_fd, patience_s=patience_s)
        if alone:
            self.remove()
        self.release()
        return alone

    def release(self) -> None:
        """Release the locks and leave the files."""
        for fd in (self._owner_fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._owner_fd = self._lock_fd = -1


def arena_path(run: str, node: str) -> Path:
    """Return the directory of ``node``'s arenas in ``run``.

    Raises ``UnsafePathError`` for names that could lead elsewhere.
    """
    return ARENA_ROOT / f"{_PREFIX}{plain_name(run, 'the run')}-{plain_name(node, 'the node')}"


def hold(directory: Path) -> int:
    """Make ``directory`` and take a shared lock on it; return the descriptor that holds it.

    Every process that needs the directory to stay (sidecar, agent, launcher) holds one. To close
    the descriptor, or to die, releases it. Raises ``UnsafePathError`` if another user made the
    directory or can write to it.
    """
    for _ in range(100):
        try:
            make_private(directory)
            fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # a sweep took the directory in between
        fcntl.flock(fd, fcntl.LOCK_SH)
        if is_held(directory, fd):
            return fd
        os.close(fd)
    raise FencedError(f"{directory}: removed again and again while being opened; stop the sweeper")


def hold_existing(directory: Path) -> int:
    """Return what `hold` does, -1 if the directory does not exist."""
    if not is_private(directory):
        return -1
    try:
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return -1
    fcntl.flock(fd, fcntl.LOCK_SH)
    if is_held(directory, fd):
        return fd
    os.close(fd)
    return -1


def is_held(directory: Path, fd: int) -> bool:
    """Say whether ``fd``, from `hold`, still holds the directory that lies at ``directory``.

    It does not after the memory was removed, or taken away by `take_away`.
    """
    try:
        return fd >= 0 and os.path.samestat(os.fstat(fd), (directory / "lock").stat())
    except FileNotFoundError:
        return False


def _lock_alone(fd: int, *, patience_s: float) -> bool:
    """Make the lock exclusive once no other process has it; return False when time is up."""
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                return False
        time.sleep(_POLL_S)


@contextlib.contextmanager
def take_away(directory: Path) -> Iterator[None]:
    """Remove a node's memory as the loss of its machine does: unreachable at once, then gone.

    Kill the node's processes in the body: no other process may see the memory gone before the node
    is.
    """
    away = directory.with_name(f"{directory.name}.lost")
    try:
        directory.rename(away)
    except FileNotFoundError:
        yield
        return
    kept.give_up(away)
    try:
        yield
    finally:
        shutil.rmtree(away, ignore_errors=True)


def arenas_of(run: str) -> list[Path]:
    """Return the directories of all nodes of ``run`` on this machine."""
    found = ARENA_ROOT.glob(f"{_PREFIX}{plain_name(run, 'the run')}-*")
    return sorted(directory for directory in found if is_private(directory))


def sweep(root: Path = ARENA_ROOT, *, exactly: str | None = None) -> list[Path]:
    """Remove the arenas (or ``exactly`` the one of that name) that no living process holds.

    Returns the removed directories. Directories that are kept, and those that others made or can
    write to, are left alone.
    """
    removed = []
    for directory in sorted(root.glob(f"{_PREFIX}*") if exactly is None else [root / exactly]):
        if not is_private(directory):
            continue
        try:
            fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileNotFoundError, PermissionError):
            continue
        try:
            alone = not kept.is_kept(directory) and _lock_alone(fd, patience_s=0)
            if alone and is_held(directory, fd):
                shutil.rmtree(directory, ignore_errors=True)
                removed.append(directory)
        finally:
            os.close(fd)
    return removed
