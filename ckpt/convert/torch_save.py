"""Files of ``torch.save``, as source and sink. Loading always uses ``weights_only=True``.

Nested dicts, lists and tuples become dotted names: tensors, and plain values beside them.
"""

from __future__ import annotations

import mmap
import os
import pickle
import re
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

import numpy as np
import torch
from typing_extensions import Buffer

from holdfast.ckpt import python_types
from holdfast.ckpt.closing import Closing
from holdfast.ckpt.convert.box_files import split_place
from holdfast.ckpt.convert.interchange import itemsize_of, nbytes_of
from holdfast.ckpt.errors import CorruptError, MismatchError, StateError, StoreError
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.state import plain, torch_dtypes
from holdfast.ckpt.state.local_boxes import check_tensor
from holdfast.ckpt.state.names import join
from holdfast.ckpt.store.handover import Handover
from holdfast.ckpt.store.places import scheme_of
from holdfast.ckpt.store.refusals import refusals
from holdfast.ckpt.store.regular import open_regular
from holdfast.ckpt.types import Json

_ADMITTED: Final = ("OrderedDict", "Counter", "set", "bytearray", "complex")
"""Standard types that ``torch.load(weights_only=True)`` admits."""

_PART_BYTES: Final = 8 << 20
_PICKLE_BYTES: Final = 1 << 30
"""The most bytes of the part that is unpickled: names and plain values."""
_SPARE_BYTES: Final = 256 << 20
_MOST_ENTRIES: Final = 10_000_000
UNREADABLE: Final = (
    RuntimeError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    MemoryError,
)
"""Errors of ``torch.load`` for bytes that ``torch.save`` did not write."""
ZIP_FAULTS: Final = (
    zipfile.BadZipFile,
    NotImplementedError,
    ValueError,
    OSError,
    RuntimeError,
)
"""Errors of ``zipfile`` for a damaged archive, which has no one of its own for all of them."""
_TYPE: Final = re.compile(r"(?:GLOBAL|class|type) ([A-Za-z_][\w.]*)")


class TorchSaveSource(Closing):
    """A ``torch.save`` file, mapped rather than read. It has no checksums.

    Tensors that share all their memory become tied names. Raises ``StateError`` naming the type or
    the path of an object that is neither a tensor nor a plain value: such objects run code when
    loaded.
    """

    def __init__(self, path: str | Path) -> None:
        self.origin = f"torch.save file {path}"
        self._tensors: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.values: dict[str, Json] = {}
        self._first: dict[object, str] = {}
        if scheme_of(path):
            raise StoreError(f"{path}: torch.save files are read from directories; copy it first")
        content, file_bytes = load_file(Path(path), self.origin)
        # Views of one memory may be stored apart, within reason: a view can claim any size.
        self._most_bytes = self._left_bytes = 2 * file_bytes + _SPARE_BYTES
        self._entries = _Entries(self.origin)
        if self._entries.count(content) > _MOST_ENTRIES:
            raise StateError(
                f"{self.origin}: has more than {_MOST_ENTRIES} entries, where those that occur "
                "several times are counted as often; save it with fewer"
            )
        self._walk("", content)
        self.specs: Mapping[str, TensorSpec] = {
            fqn: TensorSpec(fqn=fqn, dtype=torch_dtypes.NAME_OF[t.dtype], shape=tuple(t.shape))
            for fqn, t in self._tensors.items()
        }

    def _walk(self, name: str, value: object) -> None:
        holds_tensors = self._entries.holds_tensors(value)
        if isinstance(value, torch.Tensor):
            self._tensor(name or "tensor", value)
        elif isinstance(value, Mapping) and (not name or holds_tensors):
            for key, item in value.items():
                if not isinstance(key, str | int) or key == "":
                    raise StateError(
                        f"{self.origin}: {name}: key {key!r} is not a non-empty string or an "
                        "integer"
                    )
                self._walk(join(name, str(key)), item)
        elif name and isinstance(value, list | tuple) and holds_tensors:
            for number, item in enumerate(value):
                self._walk(join(name, str(number)), item)
        elif not name:
            raise StateError(f"{self.origin}: holds a {type(value).__name__}, a dict is needed")
        else:
            self._claim(name)
            self.values[name] = plain.encode(value, f"{self.origin}: {name}")

    def _claim(self, name: str) -> None:
        if name in self._tensors or name in self.values or name in self.aliases:
            raise StateError(f"{self.origin}: two entries are called {name}; rename one")

    def _tensor(self, name: str, tensor: torch.Tensor) -> None:
        self._claim(name)
        check_tensor(f"{self.origin}: {name}", tensor)
        tensor = tensor.detach()
        lazy = (tensor.is_conj(), tensor.is_neg())
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), lazy)
        first = self._first.setdefault(place, name) if tensor.numel() else name
        if first == name:
            self._left_bytes -= tensor.numel() * tensor.itemsize
            if self._left_bytes < 0:
                raise StateError(
                    f"{self.origin}: with {name} {list(tensor.shape)} its tensors have more than "
                    f"{self._most_bytes} bytes, far more than the file: they are views of one "
                    "memory. Save them after .contiguous(), if they are meant to be so large"
                )
            self._tensors[name] = tensor
        else:
            self.aliases[name] = first

    def read(self, fqn: str, box: Box) -> memoryview:
        """Return the box's elements."""
        part = self._tensors[fqn][box.slices].resolve_conj().resolve_neg().contiguous()
        data: memoryview = torch_dtypes.as_carrier(part).reshape(-1).view(torch.uint8).numpy().data
        return data

    def close(self) -> None:
        """Release the file."""
        self._tensors.clear()


class _Entries:
    """The sizes of what a file holds, each object looked at once, however often it occurs."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._counts: dict[int, int] = {}
        self._with_tensors: set[int] = set()

    def count(self, value: object, *, depth: int = 0) -> int:
        """Return the number of entries in a tree. Raises ``StateError`` if it is too deep."""
        if isinstance(value, torch.Tensor):
            self._with_tensors.add(id(value))
            return 1
        if not isinstance(value, Mapping | list | tuple):
            return 1
        if depth > plain.MAX_DEPTH:  # as is one that holds itself
            raise StateError(
                f"{self._origin}: nested deeper than {plain.MAX_DEPTH} levels; flatten it"
            )
        if (known := self._counts.get(id(value))) is None:
            items = list(value.values()) if isinstance(value, Mapping) else value
            known = 1 + sum(self.count(item, depth=depth + 1) for item in items)
            self._counts[id(value)] = known
            if any(map(self.holds_tensors, items)):
                self._with_tensors.add(id(value))
        return known

    def holds_tensors(self, value: object) -> bool:
        """Say whether a tree that was counted is or has a tensor."""
        return id(value) in self._with_tensors


def load_file(
    path: Path, origin: str, *, stand_ins: Sequence[tuple[type, str]] = ()
) -> tuple[object, int]:
    """Return a file's content, its tensors mapped, and its size in bytes.

    ``stand_ins`` are classes without behaviour that take the place of classes which the file names.
    Raises ``StateError`` naming any other class that is not plain, and ``CorruptError``.
    """
    fd, file_bytes = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        _check_archive(file, origin)
    try:
        with torch.serialization.safe_globals(list(stand_ins)):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return found, file_bytes
    except pickle.UnpicklingError as error:
        found = _TYPE.search(str(error))
        what = f"an object of type {found[1]}" if found else "an object that is not a tensor"
        raise StateError(
            f"{origin}: holds {what}, which is refused: only tensors and plain values load without "
            "running code. Save the state dict alone, in the program that wrote the file"
        ) from error
    except UNREADABLE as error:
        raise CorruptError(
            f"{origin}: torch cannot read it ({_first_line(error)}); fetch it again, or, if it is "
            "of the format before torch 1.6, load it and save it again"
        ) from error


def _check_archive(file: IO[bytes], origin: str) -> None:
    """Refuse an archive that is larger in memory than on the disk: torch.save stores bytes as is.

    A file that is no archive is of an older format, or damaged: torch says which.
    """
    try:
        parts = zipfile.ZipFile(file).infolist()
    except ZIP_FAULTS:
        return
    for part in parts:
        if part.compress_type != zipfile.ZIP_STORED or part.file_size != part.compress_size:
            raise CorruptError(
                f"{origin}: its part {part.filename!r} is compressed, which torch.save never does; "
                "fetch it again, or unpack it and pack it without compression"
            )
        if part.filename.endswith(".pkl") and part.file_size > _PICKLE_BYTES:
            raise CorruptError(
                f"{origin}: its part {part.filename!r} has {part.file_size} bytes, at most "
                f"{_PICKLE_BYTES} are read; save fewer plain values with the tensors"
            )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]


class TorchSaveSink(Closing):
    """Writes one ``torch.save`` file: a flat dict of dotted names to tensors and plain values.

    The file loads with ``weights_only=True``; tied names share one storage. The pieces wait in a
    nameless file beside the target, from whose mapping the target is then saved. So twice the bytes
    are written, but no tensor is held in memory. A killed sink leaves nothing visible; the next one
    starts from the beginning.
    """

    def __init__(self, target: str | Path) -> None:
        if scheme_of(target):
            raise StoreError(f"{target}: torch.save files are written to directories; choose one")
        self._target = target
        self._store, self._name = split_place(target)
        self._room: mmap.mmap | None = None
        self._specs: Mapping[str, TensorSpec] = {}
        self._starts: dict[str, int] = {}

    def begin(
        self,
        specs: Mapping[str, TensorSpec],
        *,
        aliases: Mapping[str, str],
        values: Mapping[str, Json],
        step: int | None,
    ) -> None:
        """Allocate disk space. Raises ``StoreError`` if there is none, or the file exists."""
        if self._store.size(self._name) is not None:
            raise StoreError(
                f"{self._target}: already exists and is not overwritten; remove it or choose "
                "another target"
            )
        self._specs, self._aliases, self._values = specs, aliases, values
        at = 0
        for fqn, spec in specs.items():
            if spec.dtype not in torch_dtypes.BY_NAME:
                raise MismatchError(f"{fqn}: this torch has no {spec.dtype}; select other tensors")
            self._starts[fqn] = at
            at += -(-nbytes_of(spec) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._room = _room(Path(self._target).absolute().parent, max(at, mmap.PAGESIZE))

    def write(self, fqn: str, box: Box, data: memoryview) -> None:
        """Write a box at its position."""
        spec, room = self._specs[fqn], self._opened()
        kind = np.dtype((np.void, itemsize_of(spec)))
        tensor = np.ndarray(spec.shape, kind, buffer=room, offset=self._starts[fqn])
        tensor[box.slices] = np.frombuffer(data, kind).reshape(box.shape)
        room.madvise(mmap.MADV_DONTNEED)  # the bytes stay in the file, but not in our memory

    def finish(self) -> None:
        """Save the file from the written boxes, and publish it."""
        tensors = {fqn: self._mapped(spec) for fqn, spec in self._specs.items()}
        tensors |= {name: tensors[stored] for name, stored in self._aliases.items()}
        leaf = _leaf(tensors)
        values = {
            name: plain.decode(value, leaf=leaf, make=_loadable)
            for name, value in self._values.items()
        }
        handover = Handover(lambda parts: self._store.write(self._name, parts))
        try:
            stream = _Stream(handover, self._opened())
            torch.save(tensors | values, cast("IO[bytes]", stream))
            stream.flush()
        except BaseException:
            handover.abandon()
            raise
        handover.finish()

    def _mapped(self, spec: TensorSpec) -> torch.Tensor:
        dtype, nbytes = torch_dtypes.BY_NAME[spec.dtype], nbytes_of(spec)
        if not nbytes:
            return torch.empty(spec.shape, dtype=dtype)
        at = self._starts[spec.fqn]
        raw = torch.frombuffer(self._opened(), dtype=torch.uint8, count=nbytes, offset=at)
        return raw.view(dtype).view(spec.shape)

    def _opened(self) -> mmap.mmap:
        if self._room is None:
            raise StateError("call begin() before bytes")
        return self._room

    def close(self) -> None:
        """Release the disk space (with the last tensor that refers to it)."""
        self._room = None


def _room(folder: Path, nbytes: int) -> mmap.mmap:
    """Return the mapping of a new nameless file in ``folder``."""
    with refusals(folder, f"make a file of {nbytes} bytes in it"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return mmap.mmap(file.fileno(), nbytes)


class _Stream:
    """The file object for ``torch.save``: hands copies over, keeps the mapping out of memory."""

    def __init__(self, handover: Handover, room: mmap.mmap) -> None:
        self._handover, self._room = handover, room
        self._part = bytearray()

    def write(self, data: Buffer) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        for at in range(0, view.nbytes, _PART_BYTES):
            self._part += view[at : at + _PART_BYTES]
            if len(self._part) >= _PART_BYTES:
                self.flush()
        return view.nbytes

    def flush(self) -> None:
        """Hand over the collected bytes."""
        part, self._part = self._part, bytearray()
        if part:
            self._handover.push(memoryview(part))
            self._room.madvise(mmap.MADV_DONTNEED)


def _loadable(name: str, parts: Any) -> Any:
    """Make a value of a type that ``torch.load(weights_only=True)`` admits; others stay as data."""
    if name in _ADMITTED:
        return python_types.make(name, parts)
    return {python_types.TAG: [name, parts]}


def _leaf(tensors: Mapping[str, torch.Tensor]) -> plain.DecodeLeaf:
    """Return a decoder of references to tensors; other references stay unchanged."""

    def decode(tag: str, payload: Any) -> Any:
        if tag in ("$tensor", "$array") and payload in tensors:
            return tensors[payload]
        return {tag: payload}

    return decode
