"""Snapshots on a node's own disk: slot files as in the arena, and a list that commits them.

``DIR/NUMBER.json`` names the slot files ``DIR/NUMBER-RANK.slot`` of one snapshot; it is renamed
into place when all of them are durable. The `KEEP` newest stay, also when the job has ended: a
job that is given the same directory goes on from them. The files of older ones are written over,
since a disk takes new bytes for old files faster than new files.

A spilled block belongs to a generation of its own, a negative number made from the run and the
generation that it was taken in: older than every generation of any run that reads it, and the
same on all nodes. Only the index of the block says so; the payload is what was captured.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

from ckpt.arena import HEADER_BYTES, SLOT_SUFFIX, SlotFile, SlotHeader, run_digest
from ckpt.block import SlotState, block_bytes, index_offset, verify_block
from ckpt.errors import CorruptError, StoreError
from ckpt.index import decode_index, encode_index
from ckpt.isal import crc32c
from ckpt.store import writeback
from ckpt.types import learn
from ckpt.world import BlockEntry, SnapshotWorld

KEEP: Final = 2
_PIECE_BYTES: Final = 8 << 20
_NUMBERED: Final = re.compile(r"([0-9]{8})[-.]")
_LIST: Final = re.compile(r"([0-9]{8})\.json")


class SpilledSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What one node has of a snapshot: ``blocks`` of the ranks of its own.

    ``run`` and ``generation`` are those it was taken in; ``world`` carries the generation under
    which it is offered, and no parity. ``number`` orders the snapshots of a directory.
    """

    number: int
    run: str
    generation: int
    world: SnapshotWorld
    step: int
    blocks: tuple[BlockEntry, ...]


def ancestor(run: str, generation: int) -> int:
    """Return the negative number under which blocks of a generation are offered later."""
    digest = blake2b(f"{run}/{generation}".encode(), digest_size=6).digest()
    return -1 - int.from_bytes(digest, "little")


class SpillDirectory:
    """A node's directory of spilled snapshots; one process at a time writes to it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def snapshots(self) -> list[SpilledSnapshot]:
        """Return what is committed here, newest first."""
        found = []
        for path in self._directory.glob("*.json"):
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                found.append(msgspec.json.decode(path.read_bytes(), type=SpilledSnapshot))
        return sorted(found, key=lambda each: each.number, reverse=True)

    def open(self, snapshot: SpilledSnapshot, entry: BlockEntry) -> SlotFile:
        """Map a block, every byte of it verified. Raises ``CorruptError``."""
        path = self._slot(snapshot.number, entry.rank)
        try:
            slot = SlotFile.open(path)
        except (OSError, ValueError) as error:
            raise CorruptError(f"{path}: cannot be read ({error}); use another copy") from error
        try:
            header = slot.read_header(run=run_digest(snapshot.run))
            if header is None or header.entry() != entry:
                raise CorruptError(f"{path}: is not the block it should be; use another copy")
            verify_block(slot.block(block_bytes(entry)), entry, origin=str(path))
        except CorruptError:
            slot.close()
            raise
        return slot

    def write(
        self,
        world: SnapshotWorld,
        step: int,
        blocks: Mapping[int, tuple[SlotFile, BlockEntry]],
        *,
        pace: Callable[[int], None],
    ) -> SpilledSnapshot:
        """Spill the blocks of a snapshot by rank; ``pace`` is told of every few bytes.

        What is there stays readable but for what is older than the newest. Raises ``StoreError``
        when the disk refuses.
        """
        number = self._next_number()
        offered = msgspec.structs.replace(
            world,
            generation=ancestor(world.run, world.generation),
            parity=0,
            groups=(),
            columns=0,
        )
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            old = self._retire()
            entries = [
                self._write_slot(number, rank, source, offered, old=old, pace=pace)
                for rank, source in sorted(blocks.items())
            ]
            for path in old:
                path.unlink(missing_ok=True)
            snapshot = SpilledSnapshot(
                number=number,
                run=world.run,
                generation=world.generation,
                world=offered,
                step=step,
                blocks=tuple(entries),
            )
            self._publish(snapshot)
        except OSError as error:
            raise StoreError(
                f"{self._directory}: step {step} cannot be spilled: {error.strerror or error}; "
                "make room there or choose another disk"
            ) from error
        return snapshot

    def _next_number(self) -> int:
        """Return a number that no file has, not even one that a killed process left."""
        taken = (_NUMBERED.match(path.name) for path in self._directory.glob("*"))
        return max((int(match[1]) for match in taken if match), default=0) + 1

    def _slot(self, number: int, rank: int) -> Path:
        return self._directory / f"{number:08d}-{rank:05d}{SLOT_SUFFIX}"

    def _retire(self) -> list[Path]:
        """Give up all but the newest; return the files that may be written over."""
        there = self.snapshots()
        kept = {each.number for each in there[: KEEP - 1]}
        for path in self._directory.glob("*.[jn]*"):
            match = _LIST.fullmatch(path.name)
            if match is None or int(match[1]) not in kept:
                path.unlink()
        _fsync(self._directory)
        return [
            path
            for path in sorted(self._directory.glob("*-*"))
            if not any(path.name.startswith(f"{number:08d}-") for number in kept)
        ]

    def _write_slot(
        self,
        number: int,
        rank: int,
        source: tuple[SlotFile, BlockEntry],
        world: SnapshotWorld,
        *,
        old: list[Path],
        pace: Callable[[int], None],
    ) -> BlockEntry:
        slot, entry = source
        index = decode_index(slot.index_view(entry), origin=slot.path.name)
        text = encode_index(msgspec.structs.replace(index, generation=world.generation))
        entry = BlockEntry(
            generation=world.generation,
            step=entry.step,
            rank=rank,
            payload_bytes=entry.payload_bytes,
            index_bytes=len(text),
            index_crc32c=crc32c(text),
        )
        part = self._slot(number, rank).with_suffix(".part")
        if old:
            old.pop(0).rename(part)
        with part.open("r+b" if part.exists() else "w+b", buffering=0) as file:
            fd = file.fileno()
            os.pwrite(fd, bytes(HEADER_BYTES), 0)
            _write_all(fd, slot.block(entry.payload_bytes), HEADER_BYTES, pace)
            os.pwrite(fd, text, HEADER_BYTES + index_offset(entry.payload_bytes))
            os.ftruncate(fd, HEADER_BYTES + block_bytes(entry))
            os.fsync(fd)
            with contextlib.closing(SlotFile.open(part)) as made:
                header = SlotHeader.of(entry, SlotState.COMMITTED)
                made.write_header(header, run=run_digest(world.run))
            os.fsync(fd)
        part.rename(self._slot(number, rank))
        return entry

    def _publish(self, snapshot: SpilledSnapshot) -> None:
        """Commit: until now nobody sees the new files."""
        part = self._directory / f"{snapshot.number:08d}.new"
        with part.open("wb") as file:
            file.write(msgspec.json.encode(snapshot))
            file.flush()
            os.fsync(file.fileno())
        _fsync(self._directory)
        part.rename(part.with_suffix(".json"))
        _fsync(self._directory)


def _write_all(fd: int, data: memoryview, at: int, pace: Callable[[int], None]) -> None:
    for start in range(0, len(data), _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        done = 0
        while done < len(piece):
            done += os.pwrite(fd, piece[done:], at + start + done)
        writeback.start(fd, at + start, len(piece))
        pace(len(piece))


def _fsync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


learn(globals())
