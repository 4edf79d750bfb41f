"""safetensors files and Hugging Face's sharded directories of them, as source and sink.

This module, not the library, reads files by ranges and writes them as streams. The library's writer
needs a whole file in memory. Its reader maps files, so it cannot read object stores, and the pages
it touches count as the process's memory. The format is simple: eight bytes, a JSON header and raw
elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.convert.box_files import RawTensor, split_place
from holdfast.ckpt.convert.filling import Filler, Piece
from holdfast.ckpt.convert.interchange import cut, itemsize_of, nbytes_of
from holdfast.ckpt.convert.safetensors_header import (
    LENGTH_BYTES,
    SafetensorsHeader,
    build_header,
    by_alignment,
    header_length,
    parse_header,
)
from holdfast.ckpt.errors import CorruptError, MismatchError, NotFoundError, StateError, StoreError
from holdfast.ckpt.geometry.grid import whole
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.store.base import Readable, Store
from holdfast.ckpt.store.places import open_store
from holdfast.ckpt.types import Json, learn

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
INDEX: Final = f"model{INDEX_SUFFIX}"
FILE_BYTES: Final = 4 << 30
"""The most bytes of a file, unless one tensor is larger."""

_CONTENT: Final = "holdfast.content"
_OWN_METADATA: Final = ("format", _CONTENT)
"""Metadata that says something else than a tied name."""
_INDEX_MOST: Final = 256 << 20
_SHOWN: Final = 6


class _Index(msgspec.Struct, frozen=True, kw_only=True):
    weight_map: dict[str, str]


class SafetensorsSource(Closing):
    """One file, or a directory with ``model.safetensors`` or a sharded index.

    Tied names are those that a file's metadata maps to a tensor (as ``safetensors.torch``'s
    ``save_model`` writes them) and ``ties`` (name to stored name). The format has no checksums and
    no plain values. Raises ``NotFoundError`` if there is no such file, ``CorruptError`` for a
    header or an index that contradicts its file.
    """

    parallel = True

    def __init__(self, path: str | Path, *, ties: Mapping[str, str] | None = None) -> None:
        self.origin = f"safetensors {path}"
        self.specs: Mapping[str, TensorSpec] = {}
        self.aliases: Mapping[str, str] = {}
        self.values: Mapping[str, Json] = {}
        self._tensors: dict[str, tuple[RawTensor, str]] = {}
        self._files: list[Readable] = []
        try:
            self._open(path, dict(ties or {}))
        except BaseException:
            self.close()
            raise

    def _open(self, path: str | Path, ties: dict[str, str]) -> None:
        if str(path).endswith(SUFFIX):
            store, name = split_place(path)
            names, expected = [name], dict[str, str]()
        else:
            store = open_store(path)
            names, expected = _files_of(store)
        specs: dict[str, TensorSpec] = {}
        tied: dict[str, str] = {}
        for name in names:
            header = self._add(store, name, expected)
            tied |= {
                k: v
                for k, v in header.metadata.items()
                if v in header.specs and k not in _OWN_METADATA
            }
            specs |= {k: spec for k, spec in header.specs.items() if k not in specs}
        self.specs = specs
        self.aliases = {k: v for k, v in (tied | ties).items() if k not in specs}
        self._check(ties, expected)

    def _add(self, store: Store, name: str, expected: Mapping[str, str]) -> SafetensorsHeader:
        """Open a file and record its tensors. Raises ``CorruptError``."""
        origin = store.where(name)
        file = store.open(name)
        self._files.append(file)
        head = bytearray(LENGTH_BYTES)
        got = file.read_into([head], 0)
        length = header_length(bytes(head[:got]), file_bytes=file.nbytes, origin=origin)
        raw = bytearray(length)
        file.read_into([raw], LENGTH_BYTES)
        header = parse_header(bytes(raw), file_bytes=file.nbytes, origin=origin)
        for fqn, spec in header.specs.items():
            if fqn in self._tensors:
                raise CorruptError(
                    f"{origin}: tensor {fqn} is in {self._tensors[fqn][1]} too; the files do not "
                    "belong together"
                )
            if expected.get(fqn, name) != name:
                raise CorruptError(f"{origin}: has {fqn}, the index says {expected[fqn]} has it")
            tensor = RawTensor(
                file, start=header.starts[fqn], shape=spec.shape, itemsize=itemsize_of(spec)
            )
            self._tensors[fqn] = (tensor, origin)
        return header

    def _check(self, ties: Mapping[str, str], expected: Mapping[str, str]) -> None:
        for name, stored in ties.items():
            if stored not in self.specs:
                raise MismatchError(
                    f"{self.origin}: no tensor {stored} that {name} could be tied to"
                )
        lost = [n for n in expected if n not in self.specs and n not in self.aliases]
        if lost:
            raise CorruptError(
                f"{self.origin}: the index lists {', '.join(lost[:_SHOWN])} ({len(lost)} in all), "
                "which no file has; name the tensors they are tied to (--tie name=stored)"
            )

    def read(self, fqn: str, box: Box) -> memoryview:
        """Return the box's elements, read by ranges."""
        tensor, origin = self._tensors[fqn]
        return tensor.read(box, origin=origin)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.pop().close()


def _files_of(store: Store) -> tuple[list[str], dict[str, str]]:
    """Return a directory's safetensors files and, if it has an index, its map of names to files."""
    names = store.names("")
    indexes = [n for n in names if n.endswith(INDEX_SUFFIX)]
    if not indexes:
        files = [n for n in names if n.endswith(SUFFIX)]
        if len(files) != 1:
            raise NotFoundError(
                f"{store.where('')}: {len(files)} *{SUFFIX} files and no *{INDEX_SUFFIX}; "
                "name one file, or a directory that is complete"
            )
        return files, {}
    chosen = INDEX if INDEX in indexes else indexes[0]
    if len(indexes) > 1 and INDEX not in indexes:
        raise NotFoundError(f"{store.where('')}: {', '.join(indexes)}; keep one of them there")
    origin = store.where(chosen)
    try:
        data = store.read(chosen, most_bytes=_INDEX_MOST)
        expected = msgspec.json.decode(data, type=_Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptError(f"{origin}: not an index of safetensors files: {error}") from error
    files = sorted(set(expected.values()))
    for name in files:
        if not name or "/" in name or "\\" in name or name.startswith("."):
            raise CorruptError(f"{origin}: {name!r} is not a file beside the index; refused")
        if store.size(name) is None:
            raise CorruptError(f"{store.where(name)}: missing, the index lists it; fetch it again")
    return files, expected


class SafetensorsSink(Closing):
    """Writes ``X.safetensors``, or a directory with ``model.safetensors`` or files with an index.

    A tied tensor is written once, with its other names in the metadata, or with ``duplicate_tied``
    under every name. Files appear complete, the index last. Plain values have no place in the
    format. Nothing is overwritten. Where ``content`` (a digest of the source) is given, a restart
    recognises by it the files that a killed attempt completed, and does not write them again.
    """

    def __init__(
        self,
        target: str | Path,
        *,
        file_bytes: int = FILE_BYTES,
        duplicate_tied: bool = False,
        content: str | None = None,
    ) -> None:
        self._file_bytes, self._duplicate_tied = file_bytes, duplicate_tied
        self._single = str(target).endswith(SUFFIX)
        if self._single:
            self._store, self._name = split_place(target)
        else:
            self._store, self._name = open_store(target), f"model{SUFFIX}"
        self._content = {} if content is None else {_CONTENT: content}
        self._files: list[_File] = []
        self._filler: Filler | None = None
        self._begun = self._finished = False

    def begin(
        self,
        specs: Mapping[str, TensorSpec],
        *,
        aliases: Mapping[str, str],
        values: Mapping[str, Json],
        step: int | None,
    ) -> None:
        """Plan the files.

        Raises ``MismatchError`` for an element type or a name that the format lacks.
        """
        for name in () if self._duplicate_tied else aliases:
            if name in _OWN_METADATA:
                raise MismatchError(
                    f"safetensors: the name {name}, tied to {aliases[name]}, has another meaning "
                    "in this format; store tied tensors under every name (--duplicate-tied)"
                )
        stored = {fqn: fqn for fqn in specs} | (dict(aliases) if self._duplicate_tied else {})
        wanted = [
            TensorSpec(fqn=name, dtype=specs[at].dtype, shape=specs[at].shape)
            for name, at in stored.items()
        ]
        groups = [wanted] if self._single else _groups(wanted, self._file_bytes)
        for number, group in enumerate(groups, start=1):
            name = self._name
            if len(groups) > 1:
                name = f"model-{number:05d}-of-{len(groups):05d}{SUFFIX}"
            here = {spec.fqn for spec in group}
            tied = {k: v for k, v in aliases.items() if v in here and not self._duplicate_tied}
            metadata = {**tied, "format": "pt", **self._content}
            file = _File(self._store, name, group, metadata=metadata, stored=stored)
            file.complete = bool(self._content) and file.is_there()
            self._files.append(file)
        self._refuse_what_is_there()
        self._begun, self._filler = True, Filler(self._files)

    def _refuse_what_is_there(self) -> None:
        """Raise ``StoreError`` for any safetensors file or index that this sink did not write."""
        ours = {file.name for file in self._files if file.complete}
        if self._single:
            there = [self._name] if self._store.size(self._name) is not None else []
        else:
            ends = (SUFFIX, INDEX_SUFFIX)
            there = [name for name in self._store.names("") if name.endswith(ends)]
        finished = len(ours) == len(self._files) and (len(ours) == 1 or INDEX in there)
        for name in there:
            if finished or name not in ours:
                raise StoreError(
                    f"{self._store.where(name)}: already exists and is not overwritten; remove "
                    "it or choose another target"
                )

    def pieces(self, most_bytes: int) -> Iterator[Piece]:
        """Yield the pieces still to be written, file by file."""
        for file in self._files:
            file.most_bytes = most_bytes
        return self._started().pieces()

    def _started(self) -> Filler:
        if self._filler is None:
            raise StateError("call begin() before pieces and bytes")
        return self._filler

    def write(self, fqn: str, box: Box, data: memoryview) -> None:
        """Write the next piece."""
        self._started().push(fqn, box, data)

    def finish(self) -> None:
        """Complete the last file; several files become one model by their index."""
        self._started().finish()
        if len(self._files) > 1:
            places = {spec.fqn: file.name for file in self._files for spec in file.specs}
            total = sum(nbytes_of(spec) for file in self._files for spec in file.specs)
            index = {"metadata": {"total_size": total}, "weight_map": places}
            data = msgspec.json.format(msgspec.json.encode(index), indent=2)
            if not self._store.replace(INDEX, data, expected=None):
                raise StoreError(f"{self._store.where(INDEX)}: another process wrote it meanwhile")
        self._finished = True

    @property
    def files(self) -> list[str]:
        """The paths or URLs of the files, the index last."""
        names = [file.name for file in self._files]
        return [self._store.where(n) for n in ([*names, INDEX] if len(names) > 1 else names)]

    def close(self) -> None:
        """Stop writing; without `finish`, remove the completed files, too."""
        if self._filler is not None:
            self._filler.abandon()
        if self._begun and not self._finished:
            self._store.delete(file.name for file in self._files if file.complete)


def _groups(specs: Sequence[TensorSpec], file_bytes: int) -> list[list[TensorSpec]]:
    groups: list[list[TensorSpec]] = [[]]
    room = file_bytes
    for spec in specs:
        size = nbytes_of(spec)
        if size > room and groups[-1]:
            groups.append([])
            room = file_bytes
        groups[-1].append(spec)
        room -= size
    return groups


class _File:
    """One file to be filled; ``complete`` when it exists."""

    def __init__(
        self,
        store: Store,
        name: str,
        specs: Sequence[TensorSpec],
        *,
        metadata: Mapping[str, str],
        stored: Mapping[str, str],
    ) -> None:
        self.name, self.specs = name, by_alignment(specs)
        self.complete, self.most_bytes = False, FILE_BYTES
        self._store, self._stored = store, stored
        self._header = build_header(self.specs, metadata)

    def is_there(self) -> bool:
        """Say whether the file exists with this very content."""
        size = len(self._header) + sum(nbytes_of(spec) for spec in self.specs)
        if self._store.size(self.name) != size:
            return False
        file, head = self._store.open(self.name), bytearray(len(self._header))
        try:
            file.read_into([head], 0)
        finally:
            file.close()
        return head == self._header

    def pieces(self) -> Iterator[Piece]:
        """Yield the tensors in runs, by their stored names at the source."""
        for spec in () if self.complete else self.specs:
            boxes = cut(whole(spec.shape), itemsize=itemsize_of(spec), most_bytes=self.most_bytes)
            for box in boxes:
                yield self._stored[spec.fqn], box

    def fill(self, parts: Iterator[memoryview]) -> None:
        """Write the file."""
        if not self.complete:
            self._store.write(self.name, chain([self._header], parts))
            self.complete = True


learn(globals())
