"""The reader through which torch.distributed.checkpoint loads checkpoints in our format.

Every byte is verified against its checksum.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.adapters.dcp.names import DcpView, view_of
from holdfast.adapters.dcp.places import Array, StoredPlaces
from holdfast.adapters.dcp.writer import Place, can_hold
from holdfast.ckpt.checkpoints import redirects
from holdfast.ckpt.checkpoints.catalog import step_folder
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import CkptError, MismatchError
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.reshard import Copy
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.state.local_boxes import local_of, overlaps_itself
from holdfast.ckpt.store.places import locate

_STAGED_BYTES: Final = 64 << 20
"""Bytes read at once for targets that need a staging copy: on a device, or of another dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class _OpenedCheckpoint:
    """The checkpoint that a rank has opened: its step, and a checksum over its files."""

    step: int
    files: int


class HoldfastReader(StorageReader):
    """A `StorageReader` for ``torch.distributed.checkpoint.load``.

    Loads ``step`` below ``root`` (None: the newest that can be trusted), whether it was written
    through DCP or by ``ckpt.save``. ``root`` may also be the directory of one step. Bytes go from
    the packs straight into the tensors, and are verified on the way. A tensor saved with another
    dtype is refused unless ``cast`` asks for the conversion.

    DCP wraps errors in a ``CheckpointException``; the errors of ``holdfast.ckpt`` are in its
    ``failures``: ``NotFoundError``, ``CorruptError`` with the tensor and file, and
    ``MismatchError``. Tensors may then be overwritten in part.
    """

    def __init__(self, root: Place, *, step: int | None = None, cast: bool = False) -> None:
        self._root, named = locate(os.fspath(root))
        self._step = named if step is None else step
        self._cast = cast
        self._opened: tuple[StoreSource, DcpView] | None = None
        self._fault: CkptError | None = None
        self._places: StoredPlaces | None = None

    def reset(self, checkpoint_id: Place | None = None) -> None:
        """Begin another load, from ``checkpoint_id`` if it is given."""
        self._close()
        if checkpoint_id is not None:
            self._root, named = locate(os.fspath(checkpoint_id))
            self._step = self._step if named is None else named

    def _close(self) -> None:
        if self._opened is not None:
            self._opened[0].close()
        self._opened, self._fault = None, None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open the checkpoint and describe it as DCP does.

        DCP turns an error raised here into an ``AssertionError``, after calling once more with a
        rank. That call gets empty metadata, and `set_up_storage_reader` raises the error.
        """
        if "rank" in kwargs and self._fault is not None:
            return Metadata({})
        self._close()
        try:
            root = redirects.to_read(self._root, self._step)
            source = StoreSource.chosen(root, self._step)
        except CkptError as error:
            self._fault = error
            raise
        head = source.head
        view = view_of(head.tensors, aliases=head.aliases, values=head.values)
        self._opened = source, view
        return _metadata(source, view)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the metadata that `read_metadata` returned."""
        if self._fault is not None:
            raise self._fault
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the checkpoint that this rank has opened to the plan."""
        head = self._source.head
        files = head.writers if head.register is None else head.register
        seen = _OpenedCheckpoint(head.step, crc32c(msgspec.json.encode(files)))
        return dataclasses.replace(plan, storage_data=seen)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks have opened the same save of the same step."""
        seen = [plan.storage_data for plan in plans]
        if len(set(seen)) > 1:
            steps = [found.step for found in seen]
            raise MismatchError(
                f"{self._root}: the ranks found the steps {steps}, or different saves of one "
                "step, because a save ended meanwhile; load again, and name the step"
            )
        return plans

    @property
    def _source(self) -> StoreSource:
        assert self._opened is not None, "read_metadata comes first"
        return self._opened[0]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the regions of the plan. Raises ``CorruptError`` if bytes are damaged."""
        assert self._opened is not None, "read_metadata comes first"
        assert self._places is not None, "set_up_storage_reader comes first"
        source, view = self._opened
        try:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    value = view.values[item.storage_index.fqn]
                    planner.load_bytes(item, _as_torch_saves(value))
            tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
            _Fill(self._places, planner, cast=self._cast).run(tensors)
        finally:
            source.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def checkpoint_id(self) -> str:
        """The step's directory; the root if the newest step is to be loaded."""
        return self._root if self._step is None else f"{self._root}/{step_folder(self._step)}"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Place) -> bool:
        """Say whether a checkpoint can lie at ``checkpoint_id``."""
        return can_hold(os.fspath(checkpoint_id))


def _as_torch_saves(value: object) -> io.BytesIO:
    """Return the bytes that load planners expect, made here from a value stored as JSON."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def _metadata(source: StoreSource, view: DcpView) -> Metadata:
    """Describe tensors in DCP's names; ``storage_data`` knows the places of their chunks."""
    places = StoredPlaces(source, view.tensors)
    found = Metadata({**places.described()}, planner_data=dict(view.paths), storage_data=places)
    found.version = CURRENT_DCP_VERSION
    found.storage_meta = StorageMeta(checkpoint_id=source.store.where(source.folder))
    for name in view.values:
        found.state_dict_metadata[name] = BytesStorageMetadata()
    return found


class _Fill:
    """Reads the regions of a load plan into the tensors that the planner gives for them."""

    def __init__(self, places: StoredPlaces, planner: LoadPlanner, *, cast: bool) -> None:
        self._places, self._planner, self._cast = places, planner, cast

    def run(self, items: Sequence[ReadItem]) -> None:
        """Fill the directly readable targets at once, then the rest through a bounded buffer."""
        wanted = [(item, *self._target(item)) for item in items]
        direct = [one for one in wanted if _readable_into(one[2], one[1].ref.dtype)]
        self._places.scatter([(copy, _array(target)) for _, copy, target in direct])
        for item, _, target in direct:
            self._planner.commit_tensor(item, target)
        taken = {id(item) for item, _, _ in direct}
        staged = [one for one in wanted if id(one[0]) not in taken]
        for batch in _batches(sorted(staged, key=lambda one: _order(one[1]))):
            rooms = [_room(copy) for _, copy, _ in batch]
            copies = [copy for _, copy, _ in batch]
            self._places.scatter([(c, _array(r)) for c, r in zip(copies, rooms, strict=True)])
            for (item, _, target), room in zip(batch, rooms, strict=True):
                target.copy_(room)
                self._planner.commit_tensor(item, target)

    def _target(self, item: ReadItem) -> tuple[Copy, torch.Tensor]:
        """Return the copy to read for an item, and its target tensor."""
        fqn, shape = item.dest_index.fqn, tuple(item.lengths)
        ref = self._places.ref(item.storage_index)
        target = self._planner.resolve_tensor(item).detach()
        if tuple(target.shape) != shape:
            raise MismatchError(
                f"{fqn}: the planner gave a target of shape {tuple(target.shape)} for a region of "
                f"shape {shape}; have resolve_tensor return the region that the item names"
            )
        if torch_dtypes.NAME_OF.get(target.dtype) != ref.dtype and not self._cast:
            raise MismatchError(
                f"{fqn}: was saved as {ref.dtype}, is to be loaded as {target.dtype}; give a "
                "tensor of the saved dtype, or HoldfastReader(…, cast=True) to convert it"
            )
        if overlaps_itself(local_of(target)):
            raise MismatchError(
                f"{fqn}: several elements of the tensor to fill share memory, as after expand(); "
                "load into a copy, such as clone() of it"
            )
        copy = Copy(
            fqn=fqn,
            ref=ref,
            src=Box(offset=tuple(item.storage_offsets), shape=shape),
            box=0,
            dst=Box(offset=(0,) * len(shape), shape=shape),
        )
        return copy, target


_Wanted: TypeAlias = tuple[ReadItem, Copy, torch.Tensor]


def _batches(wanted: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
    batch: list[_Wanted] = []
    nbytes = 0
    for one in wanted:
        size = one[1].src.size * torch_dtypes.BY_NAME[one[1].ref.dtype].itemsize
        if batch and nbytes + size > _STAGED_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(one)
        nbytes += size
    if batch:
        yield batch


def _readable_into(target: torch.Tensor, dtype: str) -> bool:
    as_it_lies = not (target.is_conj() or target.is_neg())
    here = target.device.type == "cpu" and target.layout == torch.strided
    return here and as_it_lies and torch_dtypes.NAME_OF.get(target.dtype) == dtype


def _array(tensor: torch.Tensor) -> Array:
    array: Array = torch_dtypes.as_carrier(tensor).numpy()
    return array


def _room(copy: Copy) -> torch.Tensor:
    return torch.empty(copy.src.shape, dtype=torch_dtypes.BY_NAME[copy.ref.dtype])


def _order(copy: Copy) -> tuple[int, int, str]:
    return copy.ref.writer, copy.ref.chunk.at, copy.ref.fqn
