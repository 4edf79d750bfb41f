"""Reader of a DCP directory's ``.metadata`` that runs no code from it.

The file is a pickle. This unpickler accepts the few classes that DCP itself puts there and refuses
every other name. It returns subclasses made for the one file, so that a hostile pickle can change
nothing but those.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch
from torch.distributed.checkpoint import metadata as dcp

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import CorruptError, NotFoundError, StateError

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

_PATHS: Final = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}

_FAULTS: Final = (
    pickle.UnpicklingError,
    EOFError,
    ImportError,
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    RecursionError,
    MemoryError,
)
"""Errors that reading a broken pickle may raise."""


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
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(
            f"{directory}: no {METADATA}; a DCP checkpoint that was finished has one. Give the "
            "directory that was passed to dcp.save as checkpoint_id"
        ) from error
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except StateError as error:
        raise StateError(f"{path}: {error}") from None
    except _FAULTS as error:
        raise CorruptError(
            f"{path}: cannot be read ({type(error).__name__}: {error}); restore it from a copy"
        ) from error
    if not isinstance(found, dcp.Metadata) or not isinstance(found.storage_data, dict):
        raise CorruptError(f"{path}: holds no DCP metadata; restore it from a copy")
    return found
