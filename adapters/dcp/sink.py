"""Sink of a conversion: writes a directory that plain torch.distributed.checkpoint loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from holdfast.adapters.dcp.names import DcpView, view_of
from holdfast.ckpt import torch_private
from holdfast.ckpt.checkpoints.commit import new_tag
from holdfast.ckpt.closing import Closing
from holdfast.ckpt.errors import MismatchError
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.store.new_folder import NewFolder
from holdfast.ckpt.store.refusals import refusals
from holdfast.ckpt.types import Json

FILE_BYTES: Final = 256 << 20
"""Approximate size of a file; boxes are held in memory until they fill one."""


class _TorchWriter(FileSystemWriter):
    """Torch's own writer, which records the final directory instead of the temporary one."""

    def __init__(self, path: Path, *, final: Path) -> None:
        super().__init__(path, sync_files=False)  # the whole directory is synced at the end
        self._final = final

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self._final), save_id=self.save_id)


class _GivenPlanner(DefaultSavePlanner):
    """Gives the writer the data of its items."""

    def __init__(self, data: Mapping[MetadataIndex, Any]) -> None:
        super().__init__()
        self._data = data

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._data[index]


class DcpSink(Closing):
    """Writes a DCP directory box by box, as a sink of `holdfast.ckpt.transfer`.

    Names become DCP's (see ``adapters/dcp/names.py``); tied tensors are stored once and found under
    each name. Files of ``file_bytes`` are written through torch's own ``FileSystemWriter``;
    ``finish`` makes the complete directory visible, or nothing. DCP cannot represent a step, nor
    values that belong to one rank.

    Raises ``StoreError`` if ``path`` exists already or cannot be written.
    """

    def __init__(self, path: str | Path, *, file_bytes: int = FILE_BYTES) -> None:
        self._path, self._limit = Path(path).absolute(), file_bytes
        self._folder: NewFolder | None = None
        self._writer: _TorchWriter | None = None
        self._specs: Mapping[str, TensorSpec] = {}
        self._names: dict[str, list[str]] = {}
        self._metadata = Metadata({})
        self._results: list[WriteResult] = []
        self._waiting: dict[MetadataIndex, torch.Tensor] = {}
        self._held_bytes = self._files = 0

    def begin(
        self,
        specs: Mapping[str, TensorSpec],
        *,
        aliases: Mapping[str, str],
        values: Mapping[str, Json],
        step: int | None,
    ) -> None:
        """Start a directory for these tensors; write the plain values."""
        self._folder = NewFolder(self._path, tag=new_tag())
        view = view_of(specs, aliases=aliases, values=values)
        self._specs, self._names = specs, {fqn: [] for fqn in specs}
        for name, stored in view.tensors.items():
            self._names[stored].append(name)
        self._metadata = _describe(specs, view)
        self._writer = _TorchWriter(self._folder.path, final=self._path)
        items = [
            WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO) for name in view.values
        ]
        self._put(items, {MetadataIndex(name): value for name, value in view.values.items()})

    def write(self, fqn: str, box: Box, data: memoryview) -> None:
        """Take the C-order little-endian bytes of a box; this object owns them from now on."""
        spec = self._specs[fqn]
        dtype = torch_dtypes.BY_NAME[spec.dtype]
        if data.nbytes != box.size * dtype.itemsize:
            raise MismatchError(
                f"{fqn}: {data.nbytes} bytes for {box}, {box.size * dtype.itemsize} are needed"
            )
        if not box.size:
            return
        room = bytearray(data) if data.readonly else data
        index = MetadataIndex(self._names[fqn][0], torch.Size(box.offset))
        self._waiting[index] = torch.frombuffer(room, dtype=dtype).view(box.shape)
        chunk = _chunk(box)
        for name in self._names[fqn]:
            found = self._metadata.state_dict_metadata[name]
            assert isinstance(found, TensorStorageMetadata)
            found.chunks.append(chunk)
        self._held_bytes += data.nbytes
        if self._held_bytes >= self._limit:
            self._flush()

    def finish(self) -> None:
        """Write the rest and the metadata, and move the directory to its final path."""
        assert self._writer is not None and self._folder is not None, "call begin() first"
        self._flush()
        with refusals(self._path, "write it"):
            self._writer.finish(self._metadata, [self._results])
        self._folder.publish()

    def close(self) -> None:
        """Remove an unfinished directory."""
        if self._folder is not None:
            self._folder.close()
        self._waiting.clear()

    def _flush(self) -> None:
        waiting, self._waiting, self._held_bytes = self._waiting, {}, 0
        items = [_item(index, self._metadata, tensor) for index, tensor in waiting.items()]
        self._put(items, waiting)

    def _put(self, items: list[WriteItem], data: Mapping[MetadataIndex, Any]) -> None:
        """Have torch write one file, and record every name of each item."""
        assert self._writer is not None, "call begin() first"
        if not items:
            return
        plan = SavePlan(items, storage_data=torch_private.storage_prefix(f"__{self._files}_"))
        self._files += 1
        others = {names[0]: names[1:] for names in self._names.values()}
        with refusals(self._path, "write it"):
            written = self._writer.write_data(plan, _GivenPlanner(data)).wait()
        for result in written:
            self._results.append(result)
            for name in others.get(result.index.fqn, ()):
                alias = MetadataIndex(name, result.index.offset)
                self._results.append(WriteResult(alias, result.size_in_bytes, result.storage_data))


def _describe(specs: Mapping[str, TensorSpec], view: DcpView) -> Metadata:
    found = Metadata({}, planner_data=dict(view.paths))
    for name, stored in view.tensors.items():
        found.state_dict_metadata[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=torch_dtypes.BY_NAME[specs[stored].dtype]),
            size=torch.Size(specs[stored].shape),
            chunks=[],
        )
    for name in view.values:
        found.state_dict_metadata[name] = BytesStorageMetadata()
    return found


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.shape))


def _item(index: MetadataIndex, metadata: Metadata, tensor: torch.Tensor) -> WriteItem:
    found = metadata.state_dict_metadata[index.fqn]
    assert isinstance(found, TensorStorageMetadata) and index.offset is not None
    chunk = ChunkStorageMetadata(offsets=index.offset, sizes=tensor.size())
    data = TensorWriteData(chunk=chunk, properties=found.properties, size=found.size)
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)
