"""Named shared memory for snapshots: slot files, their headers, and who may remove them.

A slot file is ``[header, 4096 bytes][block]``; a *block* is the payload, padding to 8 bytes, and
the index JSON. Slots outlive the worker that wrote them and the sidecar that owns them; a header
with a checksum of its own lets a restarted sidecar take them over.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ckpt.block import SlotState, align, block_bytes, index_offset
from ckpt.errors import CapacityError, CorruptError, FencedError
from ckpt.index import ShardIndex, encode_index
from ckpt.isal import crc32c
from ckpt.world import BlockEntry

ARENA_ROOT = Path("/dev/shm")
HEADER_BYTES = 4096
SLOT_SUFFIX = ".slot"
_MAGIC = b"HFSLOT1\0"
_PREFIX = "holdfast-"
_GRAIN_BYTES = 1 << 16
# magic, run digest, state, generation, step, rank, payload, index, capacity, index CRC
_FIELDS = struct.Struct("<8s16sB7xqqqqqqI")
_CRC = struct.Struct("<I")


class SlotHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a slot says of its contents; all zero but ``state`` when EMPTY."""

    state: SlotState
    generation: int = 0
    step: int = 0
    rank: int = 0
    payload_bytes: int = 0
    index_bytes: int = 0
    index_crc32c: int = 0

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
        )


def run_digest(run: str) -> bytes:
    """Return the 16 bytes that mark slots of ``run``."""
    return hashlib.blake2b(run.encode(), digest_size=16).digest()


class SlotFile:
    """A mapped slot. Writers fill ``payload`` and call ``finish``; the sidecar owns the header."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping = mapping
        self.capacity = len(mapping) - HEADER_BYTES

    @classmethod
    def create(cls, path: Path, size_bytes: int) -> SlotFile:
        """Make a slot for a block of ``size_bytes``, with every page allocated now.

        Raises ``CapacityError`` when shared memory has no room for it.
        """
        capacity = align(max(size_bytes, 1), _GRAIN_BYTES)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, HEADER_BYTES + capacity)
            return cls(path, _map(fd))
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            free = shutil.disk_usage(path.parent).free
            raise CapacityError(
                f"no room for a snapshot slot of {capacity:,} bytes: {path.parent.parent} has "
                f"{free:,} bytes free; enlarge it (mount -o remount,size=...), keep fewer "
                "snapshots (keep=1), or run fewer ranks on this machine"
            ) from error
        finally:
            os.close(fd)

    @classmethod
    def open(cls, path: str | Path) -> SlotFile:
        """Map an existing slot."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size <= HEADER_BYTES:
                raise CorruptError(f"{path}: too short for a slot; remove the file")
            return cls(Path(path), _map(fd))
        finally:
            os.close(fd)

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
        """Write ``index`` behind the payload and return what to seal."""
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
        """Store ``header``; a half-written one is recognised by its checksum."""
        fields = _FIELDS.pack(
            _MAGIC,
            run,
            header.state,
            header.generation,
            header.step,
            header.rank,
            header.payload_bytes,
            header.index_bytes,
            self.capacity,
            header.index_crc32c,
        )
        self._mapping[: _FIELDS.size + _CRC.size] = fields + _CRC.pack(crc32c(fields))

    def read_header(self, *, run: bytes) -> SlotHeader | None:
        """Return the header, or None when it is torn, of another run, or claims too much."""
        fields = self._mapping[: _FIELDS.size]
        (stored,) = _CRC.unpack_from(self._mapping, _FIELDS.size)
        if stored != crc32c(fields):
            return None
        magic, owner, state, generation, step, rank, payload, index, capacity, crc = _FIELDS.unpack(
            fields
        )
        if magic != _MAGIC or owner != run or capacity != self.capacity:
            return None
        if index_offset(payload) + index > capacity:
            return None
        return SlotHeader(
            state=SlotState(state),
            generation=generation,
            step=step,
            rank=rank,
            payload_bytes=payload,
            index_bytes=index,
            index_crc32c=crc,
        )

    def close(self) -> None:
        """Unmap; where views are still out, the last of them unmaps."""
        try:
            self._mapping.close()
        except BufferError:
            return


def _map(fd: int) -> mmap.mmap:
    """Map all of ``fd`` with its page table filled, so that the first copy does not fault."""
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if sys.platform == "linux" else 0)
    return mmap.mmap(fd, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


class Arena:
    """A node's directory of slots, held by a shared lock while its owner lives."""

    def __init__(self, directory: Path, lock_fd: int, *, run: str) -> None:
        self.directory, self._lock_fd = directory, lock_fd
        self.run = run_digest(run)
        self._number = 0

    @classmethod
    def open(cls, directory: Path, *, run: str) -> Arena:
        """Make or take over ``directory`` and hold its lock."""
        return cls(directory, hold(directory), run=run)

    def create(self, size_bytes: int) -> SlotFile:
        """Make a fresh EMPTY slot. Raises ``CapacityError``."""
        while True:
            self._number += 1
            try:
                slot = SlotFile.create(self.directory / f"{self._number:06d}.slot", size_bytes)
            except FileExistsError:
                continue
            slot.write_header(SlotHeader(state=SlotState.EMPTY), run=self.run)
            return slot

    def scan(self) -> Iterator[tuple[SlotFile, BlockEntry, SlotState]]:
        """Yield the sealed and committed slots left by an earlier owner; remove the others."""
        for path in sorted(self.directory.glob(f"*{SLOT_SUFFIX}")):
            try:
                slot = SlotFile.open(path)
            except (CorruptError, ValueError):
                path.unlink(missing_ok=True)
                continue
            header = slot.read_header(run=self.run)
            if header is None or header.state in (SlotState.EMPTY, SlotState.WRITING):
                slot.close()
                path.unlink(missing_ok=True)
                continue
            yield slot, header.entry(), header.state

    def remove(self) -> None:
        """Unlink everything and let go of the lock."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Let go of the lock and leave the files."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def arena_path(run: str, node: str) -> Path:
    """Return the directory of ``node``'s arenas in ``run``."""
    return ARENA_ROOT / f"{_PREFIX}{run}-{node}"


def hold(directory: Path) -> int:
    """Make ``directory`` and take a shared lock on it; return the descriptor that holds it.

    Every process that needs the directory to stay (sidecar, agent) holds one; closing the
    descriptor or dying gives it up.
    """
    for _ in range(100):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # a sweep took the directory in between
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)
    raise FencedError(f"{directory}: removed again and again while being opened; stop the sweeper")


def sweep(root: Path = ARENA_ROOT, *, exactly: str | None = None) -> list[Path]:
    """Remove the arenas (or ``exactly`` the one of that name) that no living process holds.

    Returns what was removed. Directories of other users are left alone.
    """
    removed = []
    for directory in sorted(root.glob(exactly or f"{_PREFIX}*")):
        if not directory.is_dir() or not os.access(directory, os.W_OK):
            continue
        try:
            fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileNotFoundError, PermissionError):
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
    return removed
