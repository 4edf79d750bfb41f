"""Decide what this rank writes of a state, and write it: the start of the data path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt import dtypes
from ckpt.copying import copy_out, local_of
from ckpt.errors import StateError
from ckpt.flatten import FlatState, PerRank, Stateful, flatten
from ckpt.grid import common_grid
from ckpt.index import Chunk, ShardIndex, TensorEntry
from ckpt.layout import Box, Holding, Split, TensorSpec, choose_writers, shard_box

__all__ = [
    "ALIGN_BYTES",
    "CapturePlan",
    "FlatState",
    "PerRank",
    "Piece",
    "Stateful",
    "box_of",
    "flatten",
    "gather_alone",
    "spec_of",
]

ALIGN_BYTES = 64

Gather = Callable[[Any], list[Any]]


def gather_alone(value: Any) -> list[Any]:
    """Gather in a world of one."""
    return [value]


def spec_of(fqn: str, tensor: torch.Tensor) -> TensorSpec:
    """Return what a tensor is globally."""
    return TensorSpec(fqn=fqn, dtype=dtypes.NAME_OF[tensor.dtype], shape=tuple(tensor.shape))


def box_of(fqn: str, tensor: torch.Tensor) -> Box:
    """Return the region this rank holds of a tensor, without communication.

    Raises ``StateError`` for placements that are not regions (Partial, uneven strided shards).
    """
    if not isinstance(tensor, DTensor):
        return Box(offset=(0,) * tensor.ndim, shape=tuple(tensor.shape))
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Box(offset=(0,) * tensor.ndim, shape=(0,) * tensor.ndim)
    axes = [_axis(fqn, placement) for placement in tensor.placements]
    try:
        box = shard_box(tensor.shape, mesh=mesh.shape, coordinate=coordinate, axes=axes)
    except ValueError as error:
        raise StateError(f"{fqn}: {tensor.placements}: {error}; shard it evenly") from error
    if box.shape != (held := tuple(tensor._local_tensor.shape)):
        raise StateError(
            f"{fqn}: holds {held}, but {tensor.placements} over {tuple(mesh.shape)} gives "
            f"{box.shape}; its sharding is not what its placements say"
        )
    return box


def _axis(fqn: str, placement: object) -> Split | None:
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, _StridedShard):
        return Split(dim=placement.dim, after=int(placement.split_factor))
    if isinstance(placement, Shard):
        return Split(dim=placement.dim)
    raise StateError(
        f"{fqn}: placement {placement} cannot be captured; redistribute it to Shard or Replicate"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What this rank writes of one tensor: ``box``, at byte ``at`` of the payload."""

    fqn: str
    box: Box
    at: int
    nbytes: int


class CapturePlan:
    """What this rank writes of a state: made once, used while the state keeps its shape.

    ``payload_bytes`` is the room the pieces need; ``specs`` are all tensors of all ranks.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        specs: Mapping[str, TensorSpec],
        grids: Mapping[str, tuple[int, ...] | None],
        pieces: Sequence[Piece],
        seen: Mapping[str, tuple[torch.Tensor, TensorSpec, Box]],
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.specs, self.pieces = dict(specs), tuple(pieces)
        self._grids = dict(grids)
        end = pieces[-1].at + pieces[-1].nbytes if pieces else 0
        self.payload_bytes = _align(end)
        self._seen = dict(seen)

    @classmethod
    def build(cls, flat: FlatState, *, rank: int, world_size: int, gather: Gather) -> CapturePlan:
        """Agree with all ranks on who writes what; collective through ``gather``.

        ``gather`` takes a plain value and returns every rank's, in rank order.
        """
        seen = {
            fqn: (tensor, spec_of(fqn, tensor), box_of(fqn, tensor))
            for fqn, tensor in flat.tensors.items()
        }
        mine = [(s.fqn, s.dtype, s.shape, box.offset, box.shape) for _, s, box in seen.values()]
        everyone = gather(mine)
        if len(everyone) != world_size:
            raise ValueError(f"gather returned {len(everyone)} values for {world_size} ranks")
        specs, writes = choose_writers([[_holding(*item) for item in held] for held in everyone])
        chosen = {holding.spec.fqn: holding for holding in writes[rank]}
        pieces, at = [], 0
        for fqn in flat.tensors:
            if fqn in chosen:
                holding = chosen[fqn]
                pieces.append(Piece(fqn=fqn, box=holding.box, at=at, nbytes=holding.nbytes))
                at = _align(at + holding.nbytes)
        return cls(
            rank=rank,
            world_size=world_size,
            specs=specs,
            grids=_grids(specs, writes),
            pieces=pieces,
            seen=seen,
        )

    def still_valid(self, flat: FlatState) -> bool:
        """Say whether ``flat`` has the tensors this plan was made for, lying as they did."""
        if flat.tensors.keys() != self._seen.keys():
            return False
        for fqn, tensor in flat.tensors.items():
            before, spec, box = self._seen[fqn]
            same = tensor is before and dtypes.NAME_OF.get(tensor.dtype) == spec.dtype
            if same and tuple(local_of(tensor).shape) == box.shape:
                continue
            if spec_of(fqn, tensor) != spec or box_of(fqn, tensor) != box:
                return False
            self._seen[fqn] = (tensor, spec, box)
        return True

    def index(
        self,
        flat: FlatState,
        crcs: Mapping[str, int],
        *,
        run: str = "",
        step: int,
        generation: int = 0,
    ) -> ShardIndex:
        """Describe the payload; ``crcs`` has each piece's CRC32C by FQN.

        Rank 0 describes every tensor, also those it writes nothing of, and the plain values.
        """
        tensors = {fqn: self._entry(fqn) for fqn in self.specs} if self.rank == 0 else {}
        for piece in self.pieces:
            chunk = Chunk(box=piece.box, at=piece.at, nbytes=piece.nbytes, crc32c=crcs[piece.fqn])
            tensors[piece.fqn] = self._entry(piece.fqn, chunk)
        leader = self.rank == 0
        return ShardIndex(
            run=run,
            generation=generation,
            step=step,
            writer=self.rank,
            world_size=self.world_size,
            payload_bytes=self.payload_bytes,
            tensors=tensors,
            values=flat.values if leader else {},
            rank_values=flat.rank_values,
            aliases=flat.aliases if leader else {},
        )

    def _entry(self, fqn: str, *chunks: Chunk) -> TensorEntry:
        spec = self.specs[fqn]
        return TensorEntry(dtype=spec.dtype, shape=spec.shape, chunks=chunks, grid=self._grids[fqn])

    def write(
        self,
        flat: FlatState,
        into: memoryview,
        *,
        run: str = "",
        step: int,
        generation: int = 0,
    ) -> ShardIndex:
        """Copy the pieces into ``into`` (at least ``payload_bytes``) now; return their index."""
        crcs = {
            piece.fqn: copy_out(
                local_of(flat.tensors[piece.fqn]), into[piece.at : piece.at + piece.nbytes]
            )
            for piece in self.pieces
        }
        return self.index(flat, crcs, run=run, step=step, generation=generation)


def _grids(
    specs: Mapping[str, TensorSpec], writes: Sequence[Sequence[Holding]]
) -> dict[str, tuple[int, ...] | None]:
    boxes: dict[str, list[Box]] = {fqn: [] for fqn in specs}
    for held in writes:
        for holding in held:
            boxes[holding.spec.fqn].append(holding.box)
    return {fqn: common_grid(spec.shape, boxes[fqn]) for fqn, spec in specs.items()}


def _align(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def _holding(
    fqn: str,
    dtype: str,
    shape: Sequence[int],
    offset: Sequence[int],
    extent: Sequence[int],
) -> Holding:
    box = Box(offset=tuple(offset), shape=tuple(extent))
    return Holding(
        spec=TensorSpec(fqn=fqn, dtype=dtype, shape=tuple(shape)),
        box=box,
        nbytes=prod(extent) * dtypes.BY_NAME[dtype].itemsize,
    )
