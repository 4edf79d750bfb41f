"""Reader of a DCP directory's ``.metadata`` that runs no code from it.

The file is a pickle. This unpickler accepts the few classes that DCP itself puts there, has inert
stand-ins for those of DCP's plans, which Megatron-core adds, and refuses every other name. It
returns subclasses made for the one file, so that a hostile pickle can change nothing but those.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import CorruptError, NotFoundError, StateError
from holdfast.ckpt.store.base import SMALL_FILE_BYTES
from holdfast.ckpt.store.regular import read_regular

METADATA: Final = ".metadata"

_CLASSES: Final[Mapping[tuple[str, str], type]] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        dcp.Metadata,
        dcp.MetadataIndex,
        dcp.TensorStorageMetadata,
        dcp.BytesStorageMetadata,
        dcp.ChunkStorageMetadata,
        dcp.TensorProperties,
        dcp.StorageMeta,
        torch_private.storage_info_class(),
        OrderedDict,
    )
}

_UNUSED: Final = {
    (planner.__name__, name)
    for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
}
"""Classes of DCP's plans, which Megatron-core keeps in its metadata for later saves."""

_PATHS: Final = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}

_PUTS: Final = {"PUT", "BINPUT", "LONG_BINPUT"}

PICKLE_FAULTS: Final = (
    pickle.UnpicklingError,
    EOFError,
    ImportError,
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    RuntimeError,
    MemoryError,
)
"""Errors that reading a broken pickle may raise."""


class InertObject:
    """A stand-in for an object of a class that is not loaded: it keeps attributes, does nothing."""

    origin = "a tensor"

    def __new__(cls, *_: Any) -> InertObject:
        """Return a new one, whatever the class would have been called with."""
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None: ...

    def __setitem__(self, key: Any, item: Any) -> None: ...

    def append(self, item: Any) -> None:
        """Do nothing; the class may have been a list."""

    def extend(self, items: Any) -> None:
        """Do nothing."""

    def add(self, item: Any) -> None:
        """Do nothing; the class may have been a set."""


def _layout(name: str) -> torch.layout:
    """Return the only layout that can be stored; the field is deprecated."""
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"layout {name!r}")
    return torch.strided


def _path(*parts: str) -> PurePosixPath:
    return PurePosixPath(*parts)


def _size(*extents: Any) -> torch.Size:
    return torch.Size(*extents)


_FUNCTIONS: Final[Mapping[tuple[str, str], Callable[..., Any]]] = {
    ("torch.serialization", "_get_layout"): _layout,
    (dcp.__name__, torch_private.MEMORY_FORMAT): torch_private.memory_format,
    ("torch", "Size"): _size,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._known: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key not in self._known:
            self._known[key] = _admitted(module, name)
        return self._known[key]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"a reference to {pid!r}")


def _admitted(module: str, name: str) -> Any:
    if kind := _CLASSES.get((module, name)):
        return type(name, (kind,), {})
    if (module, name) in _UNUSED:
        return type(name, (InertObject,), {"origin": f"{module}.{name}"})
    if function := _FUNCTIONS.get((module, name)):
        return partial(function)
    if module in ("pathlib", "pathlib._local") and name in _PATHS:
        return partial(_path)
    if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
        return dtype
    raise StateError(
        f"its pickle names {module}.{name}, which is not a class of DCP's own metadata; only "
        "directories that torch's FileSystemWriter wrote are read, with the default planner. Load "
        "this one with the code that wrote it and save it with HoldfastWriter"
    )


def read_metadata(directory: Path) -> dcp.Metadata:
    """Return the metadata of a DCP directory.

    Raises ``NotFoundError`` if there is none, ``StateError`` if it names a class that is not DCP's,
    and ``CorruptError`` if it cannot be read.
    """
    path = directory / METADATA
    if not path.exists():
        raise NotFoundError(
            f"{directory}: no {METADATA}; a DCP checkpoint that was finished has one. Give the "
            "directory that was passed to dcp.save as checkpoint_id"
        )
    data = read_regular(path, most_bytes=SMALL_FILE_BYTES)
    try:
        check_memo(data)
        found = _Unpickler(io.BytesIO(data)).load()
    except StateError as error:
        raise StateError(f"{path}: {error}") from None
    except PICKLE_FAULTS as error:
        raise CorruptError(
            f"{path}: cannot be read ({type(error).__name__}: {error}); restore it from a copy"
        ) from error
    if not isinstance(found, dcp.Metadata):
        raise CorruptError(f"{path}: holds no DCP metadata; restore it from a copy")
    try:
        fault = next(_faults(found), None)
    except AttributeError as error:  # of an object that was made without one of its fields
        fault = str(error)
    if fault:
        raise CorruptError(f"{path}: {fault}; restore it from a copy")
    return found


def check_memo(data: bytes) -> None:
    """Refuse numbers of memo entries that leave gaps: nine bytes would claim a table of 64 GiB."""
    entries = 0
    for opcode, number, _ in pickletools.genops(data):
        if opcode.name == "MEMOIZE":
            entries += 1
        elif opcode.name in _PUTS:
            if not isinstance(number, int) or number > entries:
                raise pickle.UnpicklingError(f"memo entry {number} of {entries}")
            entries = max(entries, number + 1)


def _faults(metadata: dcp.Metadata) -> Iterator[str]:
    """Yield what is not of the type that DCP gives it; its classes check nothing themselves."""
    entries, storage = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(entries, dict) or not all(isinstance(fqn, str) for fqn in entries):
        yield "its entries are not a dict of names"
        return
    if not isinstance(storage, dict) or not all(map(_is_index, storage)):
        yield "its places are not a dict of indices"
        return
    for fqn, entry in entries.items():
        if isinstance(entry, dcp.TensorStorageMetadata):
            if not isinstance(getattr(entry, "properties", None), dcp.TensorProperties):
                yield f"{fqn!r}: has no properties"
            elif not isinstance(entry.properties.dtype, torch.dtype):
                yield f"{fqn!r}: dtype {entry.properties.dtype!r} is none of torch's"
            elif not _are_extents(entry.size):
                yield f"{fqn!r}: size {entry.size!r} is not a shape"
            elif not _are_chunks(entry.chunks, dims=len(entry.size)):
                yield f"{fqn!r}: its chunks are not boxes of its {len(entry.size)} dims"
        elif not isinstance(entry, dcp.BytesStorageMetadata):
            yield f"{fqn!r}: is neither a tensor nor an object"
    paths = metadata.planner_data
    for fqn, path in paths.items() if isinstance(paths, dict) else ():
        if fqn in entries and not _is_path(path):
            yield f"{fqn!r}: its path is not of names and numbers"


def _is_index(index: object) -> bool:
    if not isinstance(index, dcp.MetadataIndex) or not isinstance(index.fqn, str):
        return False
    return index.offset is None or _are_extents(index.offset)


def _are_extents(extents: object) -> bool:
    return isinstance(extents, tuple | list) and all(
        isinstance(each, int) and 0 <= each < 1 << 63 for each in extents
    )


def _are_chunks(chunks: object, *, dims: int) -> bool:
    return isinstance(chunks, list) and all(
        isinstance(each, dcp.ChunkStorageMetadata)
        and _are_extents(each.offsets)
        and _are_extents(each.sizes)
        and len(each.offsets) == len(each.sizes) == dims
        for each in chunks
    )


def _is_path(path: object) -> bool:
    return isinstance(path, tuple | list) and all(isinstance(each, str | int) for each in path)
