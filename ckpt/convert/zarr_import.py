"""A plain Zarr directory as a source of tensors, read by zarr-python box by box."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import unquote

import msgspec
import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.errors import NodeNotFoundError
from zarr.storage import LocalStore, WrapperStore

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.errors import CorruptError, MismatchError, NotFoundError
from holdfast.ckpt.geometry.element_types import DTYPES
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.store.base import SMALL_FILE_BYTES
from holdfast.ckpt.store.regular import open_regular
from holdfast.ckpt.types import Json, learn
from holdfast.ckpt.zarr.types import register

Array: TypeAlias = "zarr.Array[Any]"
Missing: TypeAlias = Literal["error", "fill"]

_CHUNK_BYTES: Final = 16 << 30
_DAMAGED: Final = (
    ValueError,
    TypeError,
    RuntimeError,
    LookupError,
    AttributeError,
    AssertionError,
    NotImplementedError,
    OverflowError,
    MemoryError,
    OSError,
)
"""Errors of zarr-python, its codecs and NumPy for metadata and chunks that make no sense."""
_DOCUMENTS: Final = {"zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"}

_TORCH_NAMES: Final = {
    dtype.registered or dtype.zarr: dtype.name
    for dtype in DTYPES.values()
    if dtype.native or dtype.registered
}
"""Names of Zarr data types -> torch's."""


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    """Holdfast's own attributes of an exported group."""

    step: int | None = None
    aliases: dict[str, str] = {}


class _Attributes(msgspec.Struct, frozen=True, kw_only=True):
    """The attributes of an exported group."""

    holdfast: _Said
    values: dict[str, Json] = {}


class _Checked(WrapperStore[LocalStore]):
    """A store of regular files, none larger than it can be; a missing chunk may be an error."""

    strict = True
    chunk_bytes = SMALL_FILE_BYTES

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        path, is_document = self._store.root / key, key.rpartition("/")[2] in _DOCUMENTS
        if not path.exists():
            if is_document or not self.strict:
                return None
            raise CorruptError(
                f"{path}: missing; restore it from a copy, or read missing chunks as the fill "
                "value (missing='fill')"
            )
        most = None if byte_range else SMALL_FILE_BYTES if is_document else self.chunk_bytes
        os.close(open_regular(path, most_bytes=most)[0])
        return await super().get(key, prototype, byte_range)


class ZarrDirectorySource(Closing):
    """The arrays of a Zarr directory by name; a `holdfast.ckpt.convert.interchange.TensorSource`.

    An array's path with dots for slashes is its name. A directory that `ZarrDirectorySink` wrote
    gives back its own names, tied names and plain values. Zarr data types keep their meaning;
    unsigned integers with an attribute ``torch_dtype`` have the type it names. A missing chunk is
    an error unless ``missing`` is ``"fill"``: many writers leave out chunks that hold only the fill
    value.
    (Inside a shard of Zarr's sharding codec only zarr-python sees missing chunks, and fills them.)
    """

    parallel = True

    def __init__(self, path: str | Path, *, missing: Missing = "error") -> None:
        register()
        self._path = Path(path).absolute()
        self.origin = f"Zarr directory {self._path}"
        store = _Checked(LocalStore(self._path, read_only=True))
        store.strict = missing == "error"
        root = _opened(store, self._path)
        ours = "holdfast" in root.attrs
        said = _attributes(root, self.origin) if ours else _Attributes(holdfast=_Said())
        self.step, self.aliases = said.holdfast.step, said.holdfast.aliases
        self.values: Mapping[str, Json] = said.values
        self._arrays: dict[str, Array] = {}
        for name, array in _walk(root, self._path):
            fqn = unquote(name) if ours else name.replace("/", ".")
            if fqn in self._arrays:
                raise MismatchError(
                    f"{self.origin}: {name} and {self._arrays[fqn].path} are both called {fqn}; "
                    "rename one of them"
                )
            self._arrays[fqn] = array
            store.chunk_bytes = max(store.chunk_bytes, 2 * self._chunk_bytes(fqn, array))
        self.specs: Mapping[str, TensorSpec] = {
            fqn: TensorSpec(fqn=fqn, dtype=self._dtype(fqn, array), shape=array.shape)
            for fqn, array in self._arrays.items()
        }
        self._check_aliases()

    def _chunk_bytes(self, fqn: str, array: Array) -> int:
        """Return the bytes of one chunk, which are in memory at once."""
        nbytes = prod(array.chunks) * array.dtype.itemsize
        if nbytes > _CHUNK_BYTES:
            raise MismatchError(
                f"{self.origin}: array {array.path or fqn}: a chunk {list(array.chunks)} has "
                f"{nbytes} bytes, at most {_CHUNK_BYTES} are read: write it with smaller chunks"
            )
        return nbytes

    def _check_aliases(self) -> None:
        for alias, fqn in self.aliases.items():
            if fqn not in self.specs or alias in self.specs:
                raise CorruptError(
                    f"{self.origin}: its attributes tie {alias} to {fqn}, which does not match "
                    f"its {len(self.specs)} arrays; export it again"
                )

    def _dtype(self, fqn: str, array: Array) -> str:
        """Return torch's name of an array's element type."""
        name = array.metadata.dtype.to_json(zarr_format=3)
        recorded = array.attrs.get("torch_dtype")
        if recorded is None and isinstance(name, str) and name in _TORCH_NAMES:
            return _TORCH_NAMES[name]
        dtype = DTYPES.get(recorded) if isinstance(recorded, str) else None
        if dtype is not None and name in (dtype.zarr, dtype.registered):
            return dtype.name
        raise MismatchError(
            f"{self.origin}: array {array.path or fqn}: data type {name!r}"
            + (f" with torch_dtype {recorded!r}" if recorded is not None else "")
            + f" has no counterpart in torch; supported are {', '.join(DTYPES)}"
        )

    def read(self, fqn: str, box: Box) -> memoryview:
        """Return a box's elements: C order, little-endian, decoded (and verified) by its codecs.

        Raises ``NotFoundError`` for an unknown name, ``CorruptError`` if a chunk is missing or
        cannot be decoded.
        """
        if fqn not in self._arrays:
            raise NotFoundError(f"{self.origin}: no tensor {fqn!r}; it holds {len(self.specs)}")
        array = self._arrays[fqn]
        if not box.size:
            return memoryview(b"")
        try:
            found = np.asarray(array[box.slices])
        except _DAMAGED as error:
            raise CorruptError(
                f"{self._path / array.path}: a chunk of {box} cannot be read: {error}; restore "
                "the directory from a copy"
            ) from error
        return _little(found.reshape(box.shape)).reshape(-1).view(np.uint8).data

    def close(self) -> None:
        """Release the arrays."""
        self._arrays.clear()


def _opened(store: Any, path: Path) -> zarr.Group | Array:
    try:
        return zarr.open(store, mode="r")
    except (FileNotFoundError, NodeNotFoundError) as error:
        raise NotFoundError(
            f"{path}: there is no Zarr array or group; check the path, and that it is a "
            "directory with a zarr.json"
        ) from error
    except _DAMAGED as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CorruptError:
    return CorruptError(
        f"{path}: not a Zarr group that can be read ({type(error).__name__}: {error}); restore the "
        "directory from a copy"
    )


def _attributes(root: zarr.Group | Array, origin: str) -> _Attributes:
    try:
        return msgspec.convert(root.attrs.asdict(), _Attributes)
    except msgspec.ValidationError as error:
        raise CorruptError(
            f"{origin}: the attributes that name what was exported were changed: {error}; export "
            "it again"
        ) from error


def _walk(root: zarr.Group | Array, path: Path) -> Iterator[tuple[str, Array]]:
    """Yield every array with its path; a lone array has its directory's name."""
    if isinstance(root, zarr.Group):
        try:
            members = sorted(root.members(max_depth=None))
        except _DAMAGED as error:
            raise _unreadable(path, error) from error
        for name, node in members:
            if isinstance(node, zarr.Array):
                yield name, node
    else:
        yield path.name.removesuffix(".zarr"), root


def _little(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))


learn(globals())
