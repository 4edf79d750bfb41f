"""Source of a conversion: a directory that torch.distributed.checkpoint wrote."""

from __future__ import annotations

import mmap
import os
import pickle
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from holdfast.adapters.dcp import names
from holdfast.adapters.dcp.megatron import is_disposable, is_megatron, read_common
from holdfast.adapters.dcp.metadata import read_metadata
from holdfast.adapters.dcp.writer import load_plain
from holdfast.ckpt import torch_private
from holdfast.ckpt.closing import Closing
from holdfast.ckpt.convert.interchange import nbytes_of
from holdfast.ckpt.convert.torch_save import UNREADABLE
from holdfast.ckpt.errors import CorruptError, NotFoundError, StateError
from holdfast.ckpt.geometry.element_types import DTYPES
from holdfast.ckpt.geometry.grid import fault_of_cover
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.state import plain, torch_dtypes
from holdfast.ckpt.store.regular import opened
from holdfast.ckpt.types import Json

if TYPE_CHECKING:
    from holdfast.ckpt.torch_private import StorageInfo

Array: TypeAlias = npt.NDArray[Any]

_SHOWN = 4
_UNREADABLE = (pickle.UnpicklingError, *UNREADABLE)


@dataclass(frozen=True, slots=True)
class _Stored:
    """One item of a ``.distcp`` file: a box of a tensor, or an object."""

    box: Box
    info: StorageInfo


class DcpSource(Closing):
    """Reads a DCP directory box by box, as a source of `holdfast.ckpt.transfer`.

    Names are DCP's flattened ones; ``values`` are the plain objects, and DCP's paths
    (see ``adapters/dcp/names.py``). Tensors are mapped, so that a box costs its own size in memory,
    however large DCP's shards are. Nothing is unpickled but DCP's own classes and types that
    ``weights_only`` allows. DCP's files have no checksums to verify: verification starts with the
    converted copy.

    A directory of Megatron-core has in ``values`` its common values too, and its iteration as
    ``step``. The states of its generators and of Transformer Engine are left out where they are
    not plain, and ``told`` says so.

    Raises ``NotFoundError``, ``CorruptError`` for files that are cut off or not DCP's, and
    ``StateError`` naming an object that is not plain.
    """

    parallel = True

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.origin = f"DCP directory {self._path}"
        metadata = read_metadata(self._path)
        self._maps: dict[str, mmap.mmap] = {}
        self._arrays: dict[tuple[str, int], Array] = {}
        self._mapping = threading.Lock()
        self._items = self._sort(metadata)
        self.specs: Mapping[str, TensorSpec] = {
            fqn: self._spec(fqn, found)
            for fqn, found in metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }
        self.aliases: Mapping[str, str] = {}
        self.step: int | None = None
        self.told: tuple[str, ...] = ()
        self.values: Mapping[str, Json]
        if is_megatron(self._path):
            self.values = self._megatron_values(metadata)
        else:
            self.values = self._values(metadata)

    def _sort(self, metadata: Metadata) -> dict[str, list[_Stored]]:
        """Return the stored items of each name; tensors with the boxes of their metadata."""
        shapes = {
            (fqn, tuple(chunk.offsets)): tuple(chunk.sizes)
            for fqn, found in metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
            for chunk in found.chunks
        }
        items: dict[str, list[_Stored]] = {fqn: [] for fqn in metadata.state_dict_metadata}
        for index, info in metadata.storage_data.items():
            offset = tuple(index.offset or ())
            shape = shapes.get((index.fqn, offset), (0,) * len(offset))
            self._check(index.fqn, info)
            items.setdefault(index.fqn, []).append(_Stored(Box(offset=offset, shape=shape), info))
        return items

    def _check(self, fqn: str, info: object) -> None:
        if not isinstance(info, torch_private.storage_info_class()):
            raise StateError(
                f"{self.origin}: {fqn}: stored in a format that only its writer can read"
            )
        path = getattr(info, "relative_path", None)
        place = getattr(info, "offset", None), getattr(info, "length", None)
        if not isinstance(path, str) or path in ("", ".", "..") or Path(path).name != path:
            raise CorruptError(f"{self.origin}: {fqn}: lies at {path!r}, outside it")
        if not all(isinstance(each, int) and 0 <= each < 1 << 62 for each in place):
            raise CorruptError(f"{self.origin}: {fqn}: lies at {place} of {path}; save again")
        if getattr(info, "transform_descriptors", None):
            raise StateError(
                f"{self.origin}: {fqn}: stored through the extension "
                f"{info.transform_descriptors}; save it again without extensions"
            )

    def _spec(self, fqn: str, found: TensorStorageMetadata) -> TensorSpec:
        name, shape = torch_dtypes.NAME_OF.get(found.properties.dtype), tuple(found.size)
        if name is None:
            raise StateError(
                f"{self.origin}: {fqn}: dtype {found.properties.dtype} cannot be stored; "
                "keep its integer values and scales"
            )
        if fault := fault_of_cover(shape, [item.box for item in self._items[fqn]]):
            raise CorruptError(
                f"{self.origin}: {fqn}: its chunks are not the whole tensor: {fault}; save again"
            )
        spec = TensorSpec(fqn=fqn, dtype=name, shape=shape)
        stored_bytes = sum(item.info.length for item in self._items[fqn])
        if stored_bytes < nbytes_of(spec):
            raise CorruptError(
                f"{self.origin}: {fqn}: {nbytes_of(spec)} bytes, {stored_bytes} are stored; save "
                "again"
            )
        return spec

    def _values(self, metadata: Metadata) -> dict[str, Json]:
        objects = {
            fqn: self._object(fqn)
            for fqn, found in metadata.state_dict_metadata.items()
            if isinstance(found, BytesStorageMetadata)
        }
        planned = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        paths = {fqn: tuple(planned.get(fqn, (fqn,))) for fqn in metadata.state_dict_metadata}
        values = {fqn: plain.encode(value, fqn) for fqn, value in objects.items()}
        return values | {f"{names.PATHS}0": names.to_record(paths, objects)}

    def _megatron_values(self, metadata: Metadata) -> dict[str, Json]:
        """Return the common values and the objects that are plain; note the others."""
        common = read_common(self._path)
        values, left = dict(common.values), []
        for fqn, found in metadata.state_dict_metadata.items():
            if isinstance(found, BytesStorageMetadata):
                try:
                    values[fqn] = plain.encode(self._object(fqn), fqn)
                except StateError as error:
                    if not is_disposable(fqn):
                        raise StateError(
                            f"{error}. Megatron-core keeps tensors in objects in old formats: save "
                            "again with --ckpt-format torch_dist and the optimizer's format "
                            "fully_reshardable"
                        ) from error
                    left.append(fqn)
        self.step, self.told = common.iteration, common.told
        if left:
            shown = ", ".join(left[:_SHOWN]) + (", …" if len(left) > _SHOWN else "")
            words = f"{len(left)} objects of Megatron that are not plain were left out: {shown}"
            self.told = (*self.told, f"{self.origin}: {words}")
        return values

    def _object(self, fqn: str) -> object:
        if not self._items[fqn]:
            raise CorruptError(f"{self.origin}: {fqn}: no file stores it; save again")
        info = self._items[fqn][0].info
        try:
            with self._opened(fqn, info) as file:
                return load_plain(_slice(file, info))
        except _UNREADABLE as error:
            raise StateError(
                f"{self.origin}: {fqn}: is no plain value that torch.load(weights_only=True) "
                f"admits ({_first_line(error)}); turn it into tensors or plain values and "
                "save again"
            ) from error

    def _opened(self, fqn: str, info: StorageInfo) -> IO[bytes]:
        """Open an item's file. Raises ``CorruptError`` if it is missing or ends before the item."""
        path = self._path / info.relative_path
        try:
            file = opened(path)
        except NotFoundError as error:
            raise CorruptError(
                f"{path}: the file is missing, and the metadata lists {fqn} in it; restore the "
                "file from a copy"
            ) from error
        if info.offset + info.length > os.fstat(file.fileno()).st_size:
            file.close()
            raise self._damaged(fqn, info, "is cut off")
        return file

    def read(self, fqn: str, box: Box) -> memoryview:
        """Return the C-order little-endian bytes of a box of a tensor.

        Raises ``NotFoundError`` for a name that is not in ``specs``.
        """
        if fqn not in self.specs:
            raise NotFoundError(f"{self.origin}: no tensor {fqn!r}; see its specs")
        out: Array = np.empty(box.shape, dtype=DTYPES[self.specs[fqn].dtype].numpy)
        for item in self._items[fqn]:
            common = box.intersect(item.box) if box.size and item.box.size else None
            if common is not None:
                found = self._array(fqn, item)[common.within(item.box).slices]
                out[common.within(box).slices] = found
        return memoryview(out.reshape(-1).view(np.uint8).data)

    def _array(self, fqn: str, item: _Stored) -> Array:
        """Return an item's elements as stored in the file, mapped."""
        key = (item.info.relative_path, item.info.offset)
        with self._mapping:
            if key not in self._arrays:
                self._arrays[key] = self._map_array(fqn, item)
            return self._arrays[key]

    def _map_array(self, fqn: str, item: _Stored) -> Array:
        data, info = self._map(fqn, item.info), item.info
        try:
            with self._opened(fqn, info) as file, torch_private.without_data():
                tensor = torch.load(_slice(file, info), weights_only=True)  # gives their place
            start = info.offset + torch_private.offset_in_file(tensor)
        except _UNREADABLE as error:
            raise self._damaged(fqn, info, _first_line(error)) from error
        spec = self.specs[fqn]
        found = (torch_dtypes.NAME_OF.get(tensor.dtype), tuple(tensor.shape))
        if found != (spec.dtype, item.box.shape):
            raise self._damaged(fqn, info, f"holds {found}, not {(spec.dtype, item.box.shape)}")
        itemsize = tensor.dtype.itemsize
        if tensor.numel() * itemsize > info.length:
            raise self._damaged(fqn, info, f"has {info.length} bytes for {found}")
        last = sum(n * (extent - 1) for n, extent in zip(tensor.stride(), found[1], strict=True))
        first = start + tensor.storage_offset() * itemsize
        if first + (last + 1) * itemsize > len(data):
            raise self._damaged(fqn, info, "is cut off")
        return np.ndarray(
            tuple(tensor.shape),
            dtype=DTYPES[spec.dtype].numpy,
            buffer=data,
            offset=first,
            strides=tuple(n * itemsize for n in tensor.stride()),
        )

    def _damaged(self, fqn: str, info: StorageInfo, fault: str) -> CorruptError:
        return CorruptError(
            f"{self._path / info.relative_path}: tensor {fqn} at offset {info.offset}: {fault}; "
            "restore the file from a copy"
        )

    def _map(self, fqn: str, info: StorageInfo) -> mmap.mmap:
        if info.relative_path not in self._maps:
            try:
                with self._opened(fqn, info) as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:  # an empty file
                raise self._damaged(fqn, info, "is cut off") from error
            self._maps[info.relative_path] = mapped
        return self._maps[info.relative_path]

    def close(self) -> None:
        """Close the files."""
        self._arrays.clear()
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _slice(file: IO[bytes], info: StorageInfo) -> IO[bytes]:
    return torch_private.part_of_file(file, offset=info.offset, length=info.length)
