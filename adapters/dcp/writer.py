"""The writer through which torch.distributed.checkpoint saves checkpoints in our format."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from collections.abc import Sequence
from typing import IO, Any

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from typing_extensions import Buffer

from holdfast.adapters.dcp.names import PATHS, Path, to_record
from holdfast.ckpt.checkpoints import redirects
from holdfast.ckpt.checkpoints.attempts import SaveAttempt
from holdfast.ckpt.checkpoints.catalog import step_folder
from holdfast.ckpt.checkpoints.commit import WriterReceipt, commit, new_tag, write_parts
from holdfast.ckpt.errors import CkptError, StateError
from holdfast.ckpt.geometry.grid import common_grid
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.shard_index import Chunk, ChunkRef, ShardIndex, TensorEntry
from holdfast.ckpt.state import plain, torch_dtypes
from holdfast.ckpt.state.copying import copy_out
from holdfast.ckpt.store.places import locate, open_store
from holdfast.ckpt.types import Json

Place = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriterAssignment:
    """The coordinator's message to a rank: its writer number, and its tensors' grids."""

    writer: int
    world_size: int
    grids: dict[str, tuple[int, ...] | None]


class HoldfastWriter(StorageWriter):
    """A `StorageWriter` for ``torch.distributed.checkpoint.save`` and ``async_save``.

    Saves as ``step`` below ``root``, where ``ckpt.open``, ``ckpt.load`` and `HoldfastReader` find
    it. Every rank makes one pack; the coordinator commits, and before that nothing is visible.
    Leaves that are not tensors are stored as plain values, streams of bytes (``io.BytesIO``) with
    what they hold, unread; others are refused with their name. If
    ``save`` gets a ``checkpoint_id``, it is another root, or the directory of a step in one. DCP
    wraps errors in a ``CheckpointException``; the errors of ``holdfast.ckpt`` are in its
    ``failures``.
    """

    def __init__(self, root: Place, *, step: int, run: str = "") -> None:
        self._root, self._step, self._run = _place(root), step, run
        self._rank, self._together = 0, True
        self._attempt: SaveAttempt | None = None

    def reset(self, checkpoint_id: Place | None = None) -> None:
        """Begin another save, at ``checkpoint_id`` if it is given."""
        self._end_attempt()
        if checkpoint_id is not None:
            place, step = locate(os.fspath(checkpoint_id))
            self._root = _place(place)
            self._step = self._step if step is None else step

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Record this rank's number."""
        self._rank = int(kwargs.get("rank", 0))
        self._together = bool(kwargs.get("use_collectives", True))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check that the step can be saved; return the plan unchanged."""
        step_folder(self._step)
        open_store(self._root)
        if not self._together:
            raise StateError(
                "use_collectives=False saves every rank by itself, but a Holdfast checkpoint "
                "belongs to all ranks; leave use_collectives at True"
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the writers and find the grid that their parts of each tensor form.

        The coordinator holds the step's folder from here on: nobody has written yet. With plan
        caching only the changed plans are present; the others keep their assignments.
        """
        self._end_attempt()
        self._attempt = SaveAttempt(self._root, self._step)
        grids = _grids(plans)
        return [
            dataclasses.replace(
                plan,
                storage_data=WriterAssignment(
                    writer=rank,
                    world_size=len(plans),
                    grids={item.index.fqn: grids.get(item.index.fqn) for item in plan.items},
                ),
            )
            if plan.usable
            else plan
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pack and index; both are durable when this returns."""
        shard = _Shard(plan, planner, step=self._step, run=self._run)
        receipt = write_parts(
            self._root,
            index=shard.index,
            payload=shard.payload,
            tag=new_tag(),
            verify=False,
        )
        result = WriteResult(
            index=MetadataIndex(receipt.files.pack.path),
            size_in_bytes=receipt.files.pack.nbytes,
            storage_data=msgspec.to_builtins(receipt),
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result([result])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: publish the checkpoint that all ranks have written."""
        receipts = msgspec.convert(
            [result.storage_data for written in results for result in written],
            tuple[WriterReceipt, ...],
        )
        try:
            commit(
                self._root,
                run=self._run,
                step=self._step,
                generation=0,
                receipts=receipts,
                mesh={"ranks": len(receipts)},
            )
        finally:
            self._end_attempt()
        metadata.storage_meta = self.storage_meta()
        metadata.version = CURRENT_DCP_VERSION

    def _end_attempt(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close()

    def storage_meta(self) -> StorageMeta:
        """Return the checkpoint's directory."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The step's directory."""
        return f"{self._root}/{step_folder(self._step)}"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Place) -> bool:
        """Say whether a checkpoint can lie at ``checkpoint_id``."""
        return can_hold(checkpoint_id)


def can_hold(checkpoint_id: Place) -> bool:
    """Say whether there is a store for ``checkpoint_id``."""
    try:
        open_store(os.fspath(checkpoint_id))
    except CkptError:
        return False
    return True


def _place(root: Place) -> str:
    return os.fspath(redirects.to_write(os.fspath(root)))


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Box(offset=tuple(chunk.offsets), shape=tuple(chunk.sizes))


def _grids(plans: Sequence[SavePlan]) -> dict[str, tuple[int, ...] | None]:
    shapes: dict[str, tuple[int, ...]] = {}
    boxes: dict[str, list[Box]] = {}
    for plan in plans:
        for item in plan.items:
            if item.tensor_data is not None:
                shapes[item.index.fqn] = tuple(item.tensor_data.size)
                boxes.setdefault(item.index.fqn, []).append(_box(item))
    return {fqn: common_grid(shape, boxes[fqn]) for fqn, shape in shapes.items()}


class _Shard:
    """One rank's part of a save: its index, and the bytes of each chunk on request."""

    def __init__(self, plan: SavePlan, planner: SavePlanner, *, step: int, run: str) -> None:
        self._planner = planner
        self._items: dict[tuple[str, int], WriteItem] = {}
        self._assigned = plan.storage_data
        if not isinstance(self._assigned, WriterAssignment):
            raise StateError(
                f"the planner {type(planner).__name__} dropped the storage_data of its SavePlan; "
                "keep it with dataclasses.replace(plan, …)"
            )
        self._at = 0
        self._tensors: dict[str, TensorEntry] = {}
        objects: dict[str, object] = {}
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                objects[item.index.fqn] = _object(planner, item)
            else:
                self._add(item)
        self.index = ShardIndex(
            run=run,
            generation=0,
            step=step,
            writer=self._assigned.writer,
            world_size=self._assigned.world_size,
            payload_bytes=self._at,
            tensors=self._tensors,
            values=_values(objects)
            | {f"{PATHS}{self._assigned.writer}": _paths(plan, objects, self._tensors)},
        )

    def _add(self, item: WriteItem) -> None:
        fqn = item.index.fqn
        assert item.tensor_data is not None
        dtype = item.tensor_data.properties.dtype
        if dtype not in torch_dtypes.NAME_OF:
            raise StateError(
                f"{fqn}: dtype {dtype} cannot be stored; keep its integer values and scales"
            )
        entry = self._tensors.get(fqn) or TensorEntry(
            dtype=torch_dtypes.NAME_OF[dtype],
            shape=tuple(item.tensor_data.size),
            chunks=(),
            grid=self._assigned.grids.get(fqn),
        )
        box = _box(item)
        if box.size:
            nbytes = box.size * dtype.itemsize
            chunk = Chunk(box=box, at=self._at, nbytes=nbytes, crc32c=0)
            entry = msgspec.structs.replace(entry, chunks=(*entry.chunks, chunk))
            self._items[fqn, self._at] = item
            self._at += nbytes
        self._tensors[fqn] = entry

    def payload(self, ref: ChunkRef) -> Buffer:
        """Return the bytes of a chunk; the planner's copy of it is freed with them."""
        tensor = self._planner.resolve_data(self._items[ref.fqn, ref.chunk.at])
        assert isinstance(tensor, torch.Tensor)
        if (torch_dtypes.NAME_OF.get(tensor.dtype), tuple(tensor.shape)) != (
            ref.dtype,
            ref.chunk.box.shape,
        ):
            raise StateError(
                f"{ref.fqn}: the planner gave {tensor.dtype} {tuple(tensor.shape)}, it had planned "
                f"{ref.dtype} {ref.chunk.box.shape}; transform the state dict before it is planned"
            )
        return bytes_of(tensor)


def bytes_of(tensor: torch.Tensor) -> Buffer:
    """Return the elements of a tensor in C order; its own memory if it is so stored on the CPU."""
    local = tensor.detach()
    lazy = local.is_conj() or local.is_neg()
    if local.device.type == "cpu" and local.is_contiguous() and not lazy:
        flat: Buffer = torch_dtypes.as_carrier(local).numpy().reshape(-1).view(np.uint8).data
        return flat
    room = bytearray(local.numel() * local.itemsize)
    copy_out(local, memoryview(room))
    return room


def _paths(
    plan: SavePlan, objects: dict[str, object], tensors: dict[str, TensorEntry]
) -> dict[str, Json]:
    """Return the paths to record for this rank's entries; unflattened names are one part."""
    flattened: dict[str, Path] = plan.planner_data if isinstance(plan.planner_data, dict) else {}
    return to_record({fqn: flattened.get(fqn, (fqn,)) for fqn in (*tensors, *objects)}, objects)


def _values(objects: dict[str, object]) -> dict[str, Json]:
    for fqn in objects:
        if fqn.startswith(PATHS):
            raise StateError(f"{fqn}: names that start with {PATHS} are reserved; rename the entry")
    return {fqn: plain.encode(value, fqn) for fqn, value in objects.items()}


def _object(planner: SavePlanner, item: WriteItem) -> object:
    """Return the object of an item that is no tensor; pickled bytes are never stored.

    The bytes of a planner that makes its own are accepted as far as ``weights_only`` allows.
    """
    if isinstance(planner, DefaultSavePlanner) and _untouched(planner):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    data.seek(0)
    try:
        return load_plain(data)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise StateError(
            f"{item.index.fqn}: {type(planner).__name__} makes bytes of it that are no plain "
            f"value ({str(error).splitlines()[0]}); have it return what torch.save makes of one"
        ) from error


def load_plain(data: IO[bytes]) -> object:
    """Return what ``torch.save`` wrote, as far as ``weights_only`` allows, and streams of bytes.

    A stream, as DCP's users put into a state, comes back as a stream; its content is not read.
    """
    with torch.serialization.safe_globals([io.BytesIO]):
        return torch.load(data, map_location="cpu", weights_only=True)


def _untouched(planner: DefaultSavePlanner) -> bool:
    kind, default = type(planner), DefaultSavePlanner
    return (
        kind.resolve_data is default.resolve_data
        and kind.transform_object is default.transform_object
    )
