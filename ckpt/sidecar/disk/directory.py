"""Snapshots on a node's own disk: slots and parity rows as in the arena, and a list of them.

``DIR/NUMBER.json`` names the blocks ``DIR/NUMBER-RANK.slot`` and the rows
``DIR/NUMBER-STRIPE-ROW.row`` of one snapshot; it is renamed into place when all of them are
durable. The `KEEP` newest stay, also after the job has ended: a job with the same directory
continues from them. Files of older ones are overwritten, since a disk writes to existing files
faster than to new ones.

A spilled snapshot is offered under a generation of its own: a negative number made from the run and
the generation in which it was taken (`holdfast.ckpt.memory.records.ancestor`). Only the headers of
the files carry it. Blocks and rows stay as captured, so that blocks on lost disks can be rebuilt
from parity as in memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from typing_extensions import Buffer

from holdfast.ckpt.errors import CorruptError, StoreError
from holdfast.ckpt.memory.arena import SLOT_SUFFIX, SlotFile, SlotHeader, run_digest
from holdfast.ckpt.memory.block import SlotState, block_bytes, verify_block
from holdfast.ckpt.memory.fixed_files import HEADER_BYTES
from holdfast.ckpt.memory.records import BlockEntry, ParityEntry, SnapshotWorld, ancestor
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.parity.row_file import ROW_SUFFIX, RowFile
from holdfast.ckpt.private import is_private, make_private
from holdfast.ckpt.store import direct
from holdfast.ckpt.store.refusals import remedy_of
from holdfast.ckpt.types import learn

_log = logging.getLogger(__name__)
KEEP: Final = 2
_PIECE_BYTES: Final = 8 << 20
_NUMBERED: Final = re.compile(r"([0-9]{8})[-.]")
_LIST: Final = re.compile(r"([0-9]{8})\.json")


_T = TypeVar("_T", BlockEntry, ParityEntry, SnapshotWorld)


class SpilledSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of one node for a snapshot: ``blocks`` of its ranks, ``parities`` of its rows.

    ``sealed`` are the blocks of all ranks. ``run`` and ``generation`` are those in which it was
    taken; ``world`` and all entries carry the generation under which it is offered. ``number``
    orders the snapshots of a directory.
    """

    number: int
    run: str
    generation: int
    world: SnapshotWorld
    step: int
    blocks: tuple[BlockEntry, ...]
    parities: tuple[ParityEntry, ...]
    sealed: tuple[BlockEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpilledHoldings:
    """A node's blocks and rows of a protected snapshot, in memory.

    ``blocks`` by rank, ``rows`` with their bytes; ``sealed`` are the blocks of all ranks.
    """

    world: SnapshotWorld
    step: int
    blocks: Mapping[int, tuple[SlotFile, BlockEntry]]
    rows: Sequence[tuple[ParityEntry, memoryview]]
    sealed: Sequence[BlockEntry]


class SpillDirectory:
    """A node's directory of spilled snapshots; one process at a time writes to it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def snapshots(self) -> list[SpilledSnapshot]:
        """Return the committed snapshots, newest first; none of a directory that others made.

        A snapshot whose list the disk does not return is left out, with a warning.
        """

        def warn(path: Path, error: OSError) -> None:
            _log.warning(
                "%s: cannot be read: %s; recovery goes on without it", path, error.strerror or error
            )

        return self._listed(warn)

    def _listed(self, refused: Callable[[Path, OSError], None]) -> list[SpilledSnapshot]:
        found: list[SpilledSnapshot] = []
        if not is_private(self._directory):
            return found
        for path in self._directory.glob("*.json"):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=SpilledSnapshot))
            except (FileNotFoundError, msgspec.DecodeError):
                continue
            except OSError as error:
                refused(path, error)
        return sorted(found, key=lambda each: each.number, reverse=True)

    def open(self, snapshot: SpilledSnapshot, entry: BlockEntry) -> SlotFile:
        """Map a block, every byte of it verified. Raises ``CorruptError``."""
        path = self._slot(snapshot.number, entry.rank)
        try:
            _read_through(path)
            slot = SlotFile.open(path)
        except (OSError, ValueError) as error:
            raise CorruptError(f"{path}: cannot be read ({error}); use another copy") from error
        try:
            header = slot.read_header(run=run_digest(snapshot.run))
            if header is None or header.entry() != entry:
                raise CorruptError(f"{path}: it contains another block; use another copy")
            verify_block(slot.block(block_bytes(entry)), entry, origin=str(path))
        except CorruptError:
            slot.close()
            raise
        return slot

    def open_row(self, snapshot: SpilledSnapshot, entry: ParityEntry) -> RowFile:
        """Map a parity row that has bytes, all of them verified. Raises ``CorruptError``."""
        path = self._row(snapshot.number, entry)
        try:
            _read_through(path)
            file = RowFile.open(path)
        except (OSError, ValueError) as error:
            raise CorruptError(
                f"{path}: cannot be read ({error}); recovery goes on without it"
            ) from error
        file.borrowed = True
        label = file.read_label(run=run_digest(snapshot.run))
        if label is None or label.entry != entry or crc32c(file.row(entry.nbytes)) != entry.crc32c:
            file.close()
            raise CorruptError(f"{path}: it contains another row; recovery goes on without it")
        return file

    def write(self, holdings: SpilledHoldings, *, pace: Callable[[int], None]) -> SpilledSnapshot:
        """Spill a node's contents of a snapshot; ``pace`` is called after every few bytes.

        Existing snapshots stay readable, except those older than the newest. Raises ``StoreError``
        when the disk refuses.
        """
        world = holdings.world
        snapshot = SpilledSnapshot(
            number=self._next_number(),
            run=world.run,
            generation=world.generation,
            world=_offered(world, world),
            step=holdings.step,
            blocks=tuple(
                _offered(entry, world) for _, (_, entry) in sorted(holdings.blocks.items())
            ),
            parities=tuple(_offered(entry, world) for entry, _ in holdings.rows),
            sealed=tuple(_offered(entry, world) for entry in holdings.sealed),
        )
        try:
            make_private(self._directory)
            old = self._retire()
            for entry in snapshot.blocks:
                source = holdings.blocks[entry.rank][0].block(block_bytes(entry))
                self._write_slot(snapshot, entry, source, old=old, pace=pace)
            for parity, (_, row) in zip(snapshot.parities, holdings.rows, strict=True):
                if parity.nbytes:
                    self._write_row(snapshot, parity, row, old=old, pace=pace)
            for path in old:
                path.unlink(missing_ok=True)
            self._publish(snapshot)
        except OSError as error:
            raise StoreError(
                f"{self._directory}: step {holdings.step} cannot be spilled: "
                f"{error.strerror or error}; {remedy_of(error)}"
            ) from error
        return snapshot

    def _next_number(self) -> int:
        """Return a number that no file has, not even one that a killed process left."""
        taken = (_NUMBERED.match(path.name) for path in self._directory.glob("*"))
        return max((int(match[1]) for match in taken if match), default=0) + 1

    def _slot(self, number: int, rank: int) -> Path:
        return self._directory / f"{number:08d}-{rank:05d}{SLOT_SUFFIX}"

    def _row(self, number: int, entry: ParityEntry) -> Path:
        return self._directory / f"{number:08d}-{entry.stripe:05d}-{entry.row:02d}{ROW_SUFFIX}"

    def _retire(self) -> list[Path]:
        """Give up all snapshots but the newest; return the files that may be overwritten.

        Gives up none if a list cannot be read: it may be the newest.
        """

        def refuse(path: Path, error: OSError) -> None:
            raise error

        there = self._listed(refuse)
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
        snapshot: SpilledSnapshot,
        entry: BlockEntry,
        block: memoryview,
        *,
        old: list[Path],
        pace: Callable[[int], None],
    ) -> None:
        def label(part: Path) -> None:
            with contextlib.closing(SlotFile.open(part)) as made:
                header = SlotHeader.of(entry, SlotState.COMMITTED)
                made.write_header(header, run=run_digest(snapshot.run))

        path = self._slot(snapshot.number, entry.rank)
        _write_file(path, block, over=_pick(old, SLOT_SUFFIX), pace=pace, label=label)

    def _write_row(
        self,
        snapshot: SpilledSnapshot,
        entry: ParityEntry,
        row: memoryview,
        *,
        old: list[Path],
        pace: Callable[[int], None],
    ) -> None:
        def label(part: Path) -> None:
            with contextlib.closing(RowFile.open(part)) as made:
                made.label(entry, run=run_digest(snapshot.run))
                made.mark_protected()

        path = self._row(snapshot.number, entry)
        _write_file(path, row, over=_pick(old, ROW_SUFFIX), pace=pace, label=label)

    def _publish(self, snapshot: SpilledSnapshot) -> None:
        """Commit: before this, no reader sees the new files."""
        part = self._directory / f"{snapshot.number:08d}.new"
        with part.open("wb") as file:
            file.write(msgspec.json.encode(snapshot))
            file.flush()
            os.fsync(file.fileno())
        _fsync(self._directory)
        part.rename(part.with_suffix(".json"))
        _fsync(self._directory)


def _read_through(path: Path) -> None:
    """Read a file to its end. Raises ``OSError`` if the disk does not return all of it.

    A page that cannot be read ends a process that finds it in a mapping.
    """
    part = bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(part):
            pass


def _offered(what: _T, world: SnapshotWorld) -> _T:
    """Return a world or an entry with the generation under which it is offered."""
    return msgspec.structs.replace(what, generation=ancestor(world.run, world.generation))


def _pick(old: list[Path], suffix: str) -> Path | None:
    """Take a file to overwrite, one of the same kind if there is one."""
    if not old:
        return None
    alike = [path for path in old if path.suffix == suffix]
    path = (alike or old)[0]
    old.remove(path)
    return path


def _write_file(
    path: Path,
    data: memoryview,
    *,
    over: Path | None,
    pace: Callable[[int], None],
    label: Callable[[Path], None],
) -> None:
    """Write a file with room for a header, make it durable, label it, and give it its name."""
    part = path.with_suffix(".part")
    if over is not None:
        over.rename(part)
    with part.open("w+b" if over is None else "r+b", buffering=0) as file:
        fd = file.fileno()
        direct.write_all(fd, _paced(data, pace))
        os.ftruncate(fd, HEADER_BYTES + len(data))
        os.fsync(fd)
        label(part)
        os.fsync(fd)
    part.rename(path)


def _paced(data: memoryview, pace: Callable[[int], None]) -> Iterator[Buffer]:
    """Yield room for a header, then ``data`` piece by piece."""
    yield bytes(HEADER_BYTES)
    for start in range(0, len(data), _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        yield piece
        pace(len(piece))


def _fsync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


learn(globals())
