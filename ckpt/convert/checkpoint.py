"""Our own checkpoints as a source and a sink of tensors, without torch.

The sink writes as the ranks of any layout would have. If the content of the source is known, the
files are named by content and layout. So a restart recognises the writers that are complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from holdfast.ckpt.checkpoints import redirects
from holdfast.ckpt.checkpoints.boxes import BoxReader
from holdfast.ckpt.checkpoints.catalog import load_manifest, step_folder
from holdfast.ckpt.checkpoints.commit import (
    PackOptions,
    WriterReceipt,
    commit,
    new_tag,
    write_parts,
)
from holdfast.ckpt.checkpoints.source import PackSource, StoreSource
from holdfast.ckpt.closing import Closing
from holdfast.ckpt.convert.filling import Filler, Piece
from holdfast.ckpt.convert.interchange import PIECE_BYTES
from holdfast.ckpt.convert.target_layout import TargetLayout
from holdfast.ckpt.errors import CorruptError, NotFoundError, StateError, StoreError
from holdfast.ckpt.format.manifest import FileRecord, PackIndex, WriterRecord, read_index
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.geometry.shard_index import ShardIndex, TensorEntry
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.local import FolderHold, LocalStore
from holdfast.ckpt.store.places import open_store
from holdfast.ckpt.types import Json

_READ_BYTES: Final = 4 << 20
_TAG_LENGTH: Final = 12


class CheckpointSource(Closing):
    """A committed checkpoint as a ``TensorSource``; every byte that is read is verified."""

    parallel = True

    def __init__(self, source: StoreSource) -> None:
        self._source, self._reader = source, BoxReader(source)
        manifest = source.manifest
        self.origin, self.step = source.origin, manifest.step
        self.specs: Mapping[str, TensorSpec] = {
            fqn: TensorSpec(fqn=fqn, dtype=tensor.dtype, shape=tensor.shape)
            for fqn, tensor in manifest.tensors.items()
        }
        self.aliases: Mapping[str, str] = manifest.aliases
        self.values: Mapping[str, Json] = manifest.values

    @classmethod
    def open(cls, root: str | Path, step: int | None = None) -> CheckpointSource:
        """Return the source of ``step`` below ``root``; None: the newest that can be trusted."""
        return cls(StoreSource.chosen(redirects.to_read(root, step), step))

    @property
    def identity(self) -> Identity:
        """The identity of this state, which a copy of it inherits."""
        manifest = self._source.manifest
        files = msgspec.json.encode([manifest.run, manifest.generation, manifest.writers])
        return Identity(
            run=manifest.run,
            generation=manifest.generation,
            content=sha256(files).hexdigest(),
            rank_values={w: index.rank_values for w, index in self._source.packs.items()},
            compression={
                fqn: str(tensor.codec)
                for fqn, tensor in manifest.tensors.items()
                if tensor.codec is not None
            },
        )

    def read(self, fqn: str, box: Box) -> memoryview:
        """Return the box's verified elements."""
        return self._reader.box(fqn, box).reshape(-1).view(np.uint8).data

    def close(self) -> None:
        """Close its files."""
        self._source.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The identity of a checkpoint's state. ``content`` is a digest of it, or None if unknown.

    ``rank_values`` are the plain values that belong to one writer, by its number; ``compression``
    is the compression of its tensors (see ``holdfast.ckpt.format.codecs``).
    """

    run: str = ""
    generation: int = 0
    content: str | None = None
    rank_values: Mapping[int, Mapping[str, Json]] = field(default_factory=dict)
    compression: Mapping[str, str] = field(default_factory=dict)


class CheckpointSink(Closing):
    """Writes tensors as step ``step`` of the checkpoints below ``root``, in any layout.

    It never touches a step that is committed there already. A killed sink leaves nothing visible;
    started again with the same ``Identity.content`` it continues. Files that it left and that no
    sink continues stay in the step's directory until that is removed.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        layout: TargetLayout | None = None,
        identity: Identity | None = None,
    ) -> None:
        self._root = root = redirects.to_write(root)
        self._layout, self._identity = layout or TargetLayout(), identity or Identity()
        self._store: Store = open_store(root)
        self._writers: list[_PackWriter] = []
        self._filler: Filler | None = None
        self._specs: Mapping[str, TensorSpec] = {}
        self._finished = False
        self._hold: FolderHold | None = None

    def begin(
        self,
        specs: Mapping[str, TensorSpec],
        *,
        aliases: Mapping[str, str],
        values: Mapping[str, Json],
        step: int | None,
    ) -> None:
        """Refuse an existing step. Raises ``StoreError``, or ``MismatchError`` for the layout."""
        self._step, self._specs = step or 0, specs
        self._aliases, self._values = aliases, values
        self._folder = step_folder(self._step)
        self.where = self._store.where(self._folder)
        try:
            load_manifest(self._store, self._folder)
        except NotFoundError:
            return
        raise StoreError(
            f"{self.where}: a checkpoint of step {self._step} already exists and is not "
            "overwritten; choose another target or step"
        )

    def pieces(self, most_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
        """Yield the pieces still to be written, writer by writer."""
        if isinstance(self._store, LocalStore):  # so that nobody removes what is written there
            self._hold = self._store.hold(self._folder)
        tensors = self._layout.writers(self._specs, most_bytes=most_bytes)
        there = self._there() if self._identity.content is not None else {}
        options = PackOptions(compression=self._identity.compression, ahead_bytes=2 * most_bytes)
        for writer, entries in enumerate(tensors):
            index, tag = self._index(writer, entries), self._tag(writer, entries)
            left = there.get((f"{writer:05d}", tag), [])
            receipt = _standing(self._store, self._folder, left)
            self._writers.append(
                _PackWriter(self._root, index, tag=tag, receipt=receipt, options=options)
            )
        self._filler = Filler(self._writers)
        return self._filler.pieces()

    def _there(self) -> dict[tuple[str, str], list[str]]:
        """Return the packs and indexes of the step, by the writer and the tag in their names."""
        found: dict[tuple[str, str], list[str]] = {}
        for part in ("data", "index"):
            for name in self._store.names(f"{self._folder}/{part}"):
                words = name.partition(".")[0].split("-")
                found.setdefault((words[0], words[-1]), []).append(f"{part}/{name}")
        return found

    def _index(self, writer: int, tensors: dict[str, TensorEntry]) -> ShardIndex:
        leader, own = writer == 0, self._identity.rank_values.get(writer, {})
        return ShardIndex(
            run=self._identity.run,
            generation=self._identity.generation,
            step=self._step,
            writer=writer,
            world_size=self._layout.ranks,
            payload_bytes=0,
            tensors=tensors,
            values=dict(self._values) if leader else {},
            rank_values=dict(own),
            aliases=dict(self._aliases) if leader else {},
        )

    def _tag(self, writer: int, tensors: dict[str, TensorEntry]) -> str:
        if self._identity.content is None:
            return new_tag()
        how = (dict(self._layout.mesh), dict(self._identity.compression))
        what = (self._identity.content, how, self._index(writer, tensors))
        return sha256(msgspec.json.encode(what)).hexdigest()[:_TAG_LENGTH]

    def write(self, fqn: str, box: Box, data: memoryview) -> None:
        """Write the next piece."""
        if self._filler is None:
            raise StateError("call pieces() first: they are written in its order")
        self._filler.push(fqn, box, data)

    def finish(self) -> None:
        """Commit the step."""
        if self._filler is None:
            for _ in self.pieces():
                break
        assert self._filler is not None
        self._filler.finish()
        commit(
            self._root,
            run=self._identity.run,
            step=self._step,
            generation=self._identity.generation,
            receipts=[writer.receipt for writer in self._writers if writer.receipt],
            mesh=self._layout.mesh,
        )
        self._finished = True

    def close(self) -> None:
        """Stop writing; complete files stay, invisible, and a restart can recognise them."""
        if self._filler is not None:
            self._filler.abandon()
        if self._hold is not None:
            self._hold.close()
        if self._finished or self._identity.content is not None:
            return
        tags = {writer.tag for writer in self._writers}
        for (_, tag), names in self._there().items() if tags else ():
            if tag in tags:
                self._store.delete(f"{self._folder}/{name}" for name in names)


class _PackWriter:
    """One writer's pack and index, to be filled; with a ``receipt`` they are complete."""

    def __init__(
        self,
        root: str | Path,
        index: ShardIndex,
        *,
        tag: str,
        receipt: WriterReceipt | None,
        options: PackOptions,
    ) -> None:
        self._root, self._index, self._options = root, index, options
        self.tag, self.receipt = tag, receipt

    def pieces(self) -> Iterator[Piece]:
        """Yield the chunks; none if they are written already."""
        if self.receipt is None:
            for ref in self._index.chunks():
                yield ref.fqn, ref.chunk.box

    def fill(self, parts: Iterator[memoryview]) -> None:
        """Write pack and index."""
        if self.receipt is None:
            self.receipt = write_parts(
                self._root,
                index=self._index,
                payload=lambda _: next(parts),
                tag=self.tag,
                verify=False,
                options=self._options,
            )


def _standing(store: Store, folder: str, names: Sequence[str]) -> WriterReceipt | None:
    """Return the receipt of files that an earlier attempt completed, if they are sound.

    The index is written when its pack is durable; both are named by their content.
    """
    for name in names:
        if not name.startswith("index/"):
            continue
        try:
            data = store.read(f"{folder}/{name}")
            index = read_index(data, origin=store.where(f"{folder}/{name}"))
        except (NotFoundError, CorruptError):
            continue
        pack = f"{folder}/{index.pack}"
        if store.size(pack) != index.pack_bytes or not _is_sound(store, index):
            continue
        record = WriterRecord(
            writer=index.writer,
            pack=FileRecord(
                path=index.pack, nbytes=index.pack_bytes, crc32c=_checksum(store, pack)
            ),
            index=FileRecord(path=name, nbytes=len(data), crc32c=crc32c(data)),
        )
        return WriterReceipt(
            run=index.run,
            generation=index.generation,
            step=index.step,
            world_size=index.world_size,
            files=record,
        )
    return None


def _is_sound(store: Store, index: PackIndex) -> bool:
    """Read every chunk of a pack and say whether all are undamaged."""
    with PackSource(store, step_folder(index.step), {index.writer: index}) as source:
        try:
            for shard in source.indexes():
                for ref in shard.chunks():
                    source.read_into(ref, memoryview(bytearray(ref.chunk.nbytes)))
        except CorruptError:
            return False
    return True


def _checksum(store: Store, name: str) -> int:
    file, found, at = store.open(name), 0, 0
    room = memoryview(bytearray(_READ_BYTES))
    try:
        while got := file.read_into([room], at):
            found = crc32c(room[:got], found)
            at += got
    finally:
        file.close()
    return found
