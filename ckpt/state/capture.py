"""The capture plan of a rank: choose the pieces of the state that this rank writes, and write them.

This is the first stage of the data path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any

import msgspec
import torch

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.geometry.grid import common_grid, fault_of_cover
from holdfast.ckpt.geometry.layout import Box, Holding, Region, TensorSpec, choose_writers
from holdfast.ckpt.geometry.shard_index import Chunk, ShardIndex, TensorEntry, encode_index
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.state.copying import copy_out
from holdfast.ckpt.state.flatten import FlatState, flatten
from holdfast.ckpt.state.local_boxes import Leaf, local_of, regions, spec_of, view_of
from holdfast.ckpt.state.optimizers import merge_groups
from holdfast.ckpt.state.trees.per_rank import PerRank
from holdfast.ckpt.state.trees.stateful import Stateful
from holdfast.ckpt.types import Json

__all__ = [
    "ALIGN_BYTES",
    "CapturePlan",
    "FlatState",
    "PerRank",
    "Stateful",
    "WritePiece",
    "flatten",
    "gather_alone",
    "spec_of",
]

ALIGN_BYTES = 64

# A quote inside a JSON string has a backslash before it, so these patterns never match in a name.
_CRC = re.compile(rb'(?<="crc32c":)(\d+)')
_NO_TENSORS, _TENSORS = b'"tensors":{}', b'"tensors":%b'

Gather = Callable[[Any], list[Any]]


def gather_alone(value: Any) -> list[Any]:
    """Gather in a world of one."""
    return [value]


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePiece:
    """The box of ``region`` of one tensor, which this rank writes at byte ``at`` of its payload."""

    fqn: str
    region: Region
    at: int
    nbytes: int

    @property
    def key(self) -> tuple[str, Box]:
        """The piece, wherever it lies in the payload."""
        return self.fqn, self.region.box


@dataclass(slots=True, kw_only=True)
class _PlannedTensor:
    """The spec, regions and local shape of a tensor at the time the plan was made."""

    leaf: Leaf
    spec: TensorSpec
    regions: tuple[Region, ...]
    local_shape: tuple[int, ...]

    @classmethod
    def of(cls, fqn: str, leaf: Leaf) -> _PlannedTensor:
        return cls(
            leaf=leaf,
            spec=spec_of(fqn, leaf),
            regions=regions(fqn, leaf),
            local_shape=tuple(local_of(leaf).shape),
        )

    def still(self, fqn: str, leaf: Leaf) -> bool:
        """Say whether ``leaf`` has the recorded spec and regions; record the object if so."""
        local = local_of(leaf)
        alike = torch_dtypes.NAME_OF.get(local.dtype) == self.spec.dtype
        if leaf is self.leaf and alike and tuple(local.shape) == self.local_shape:
            return True
        if spec_of(fqn, leaf) != self.spec or regions(fqn, leaf) != self.regions:
            return False
        self.leaf = leaf
        return True


class CapturePlan:
    """The pieces of a state that one rank writes; valid while the state keeps its shape.

    ``payload_bytes`` is the room that the pieces need. ``copied_bytes`` counts the bytes that this
    rank holds and that another rank with the same bytes writes. ``specs`` describes all tensors of
    all ranks, beside those that other ranks have for themselves. ``shared`` are the regions of this
    rank that other ranks hold too, by tensor. One rank writes all buffers and loose tensors of an
    entry that the same ranks hold. The lowest rank that has a plain value, or the name
    of a tied tensor, writes it. The parameters of an optimizer's group are merged from all ranks.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        agreed: _Agreed,
        pieces: Sequence[WritePiece],
        seen: Mapping[str, _PlannedTensor],
        shared: Sequence[tuple[str, Region]] = (),
        copied_bytes: int = 0,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.specs, self.pieces = dict(agreed.specs), tuple(pieces)
        self._agreed = agreed
        end = pieces[-1].at + pieces[-1].nbytes if pieces else 0
        self.payload_bytes = _align(end)
        self.copied_bytes, self.shared = copied_bytes, shared
        self._own = frozenset[str]()
        self._seen = dict(seen)
        self._text: tuple[list[bytes], list[int]] | None = None

    @classmethod
    def build(cls, flat: FlatState, *, rank: int, world_size: int, gather: Gather) -> CapturePlan:
        """Agree with all ranks on the writer of each box; collective through ``gather``.

        ``gather`` takes a plain value and returns every rank's value, in rank order. Raises
        ``StateError`` if the ranks disagree, or if their boxes do not cover a tensor exactly.
        """
        seen = {
            fqn: _PlannedTensor.of(fqn, leaf)
            for fqn, leaf in flat.tensors.items()
            if fqn not in flat.own
        }
        everyone = gather(_offer(flat, seen))
        if len(everyone) != world_size:
            raise ValueError(f"gather returned {len(everyone)} values for {world_size} ranks")
        holdings_by_rank = [list(_holdings(offer["tensors"])) for offer in everyone]
        specs, writes = choose_writers(holdings_by_rank)
        if lost := {item[0] for offer in everyone for item in offer["tensors"]} - specs.keys():
            raise StateError(f"{min(lost)}: no rank holds any of it; leave it out of the state")
        chosen = {(holding.spec.fqn, holding.box): holding.nbytes for holding in writes[rank]}
        pieces = _pieces(seen, chosen, at=0)
        agreed = _Agreed.of(everyone, rank=rank, specs=specs, grids=_grids(specs, writes))
        copied_bytes = sum(holding.nbytes for holding in holdings_by_rank[rank]) - sum(
            chosen.values()
        )
        plan = cls(
            rank=rank,
            world_size=world_size,
            agreed=agreed,
            pieces=pieces,
            seen=seen,
            shared=_shared(seen, holdings_by_rank, rank),
            copied_bytes=copied_bytes,
        )
        return plan.with_own(flat)

    def with_own(self, flat: FlatState) -> CapturePlan:
        """Return this plan with the tensors of ``flat`` that no other rank holds.

        They may change shape at any time and at any rank: nobody else has to know.
        """
        if not flat.own and not self._own:
            return self
        agreed = [piece for piece in self.pieces if piece.fqn not in self._own]
        seen = {fqn: tensor for fqn, tensor in self._seen.items() if fqn not in self._own}
        own = {
            fqn: _PlannedTensor.of(fqn, leaf)
            for fqn, leaf in flat.tensors.items()
            if fqn in flat.own
        }
        sizes = {
            (fqn, region.box): region.box.size * local_of(tensor.leaf).itemsize
            for fqn, tensor in own.items()
            for region in tensor.regions
        }
        end = _align(agreed[-1].at + agreed[-1].nbytes) if agreed else 0
        plan = CapturePlan(
            rank=self.rank,
            world_size=self.world_size,
            agreed=self._agreed,
            pieces=[*agreed, *_pieces(own, sizes, at=end)],
            seen=seen | own,
            shared=self.shared,
            copied_bytes=self.copied_bytes,
        )
        plan.specs |= {fqn: tensor.spec for fqn, tensor in own.items()}
        plan._own = frozenset(own)
        return plan

    def placed(self, at: Mapping[tuple[str, Box], int], *, fixed_bytes: int) -> CapturePlan:
        """Return this plan with the pieces of ``at`` there, the others behind ``fixed_bytes``."""
        fixed = [replace(piece, at=at[piece.key]) for piece in self.pieces if piece.key in at]
        fixed.sort(key=lambda piece: piece.at)
        moving, end = [], fixed_bytes
        for piece in self.pieces:
            if piece.key not in at:
                moving.append(replace(piece, at=end))
                end = _align(end + piece.nbytes)
        plan = CapturePlan(
            rank=self.rank,
            world_size=self.world_size,
            agreed=self._agreed,
            pieces=[*fixed, *moving],
            seen=self._seen,
            shared=self.shared,
            copied_bytes=self.copied_bytes,
        )
        plan.specs, plan._own = self.specs, self._own
        plan.payload_bytes = max(plan.payload_bytes, fixed_bytes)
        return plan

    def is_own(self, piece: WritePiece) -> bool:
        """Return whether no other rank holds any of the piece's tensor."""
        return piece.fqn in self._own

    def change(self, flat: FlatState) -> str:
        """Return in words what of ``flat`` this plan was not made for, nothing where it was.

        All ranks must come to the same answer: their states change shape together.
        """
        mine = self._agreed.mine
        for what, now, before in (
            ("tensor", flat.tensors.keys() - flat.own, self._seen.keys() - self._own),
            ("value", flat.values.keys(), set(mine["values"])),
            ("tied name", flat.aliases.keys(), mine["aliases"].keys()),
        ):
            if new := now - before:
                return f"{what} {min(new)} is new ({len(new)} in all)"
            if gone := before - now:
                return f"{what} {min(gone)} is gone ({len(gone)} in all)"
        for name, stored in flat.aliases.items():
            if mine["aliases"][name] != stored:
                return f"{name} is tied to {stored}, no longer to {mine['aliases'][name]}"
        for key, group in mine["groups"].items():
            if flat.values[f"{key}.params"] != group["params"]:
                return f"the parameters of {key} are others"
        for fqn, leaf in flat.tensors.items():
            if fqn not in flat.own and not self._seen[fqn].still(fqn, leaf):
                return f"{fqn} has another shape, dtype or placement"
        return ""

    def sources(self, flat: FlatState) -> list[torch.Tensor]:
        """Return a view of the live memory of each piece, in order, in the shape of its box."""
        return [view_of(flat.tensors[piece.fqn], piece.region) for piece in self.pieces]

    def index(
        self,
        flat: FlatState,
        crcs: Sequence[int],
        *,
        run: str = "",
        step: int,
        generation: int = 0,
    ) -> ShardIndex:
        """Return the index of the payload; ``crcs`` has the CRC32C of each piece.

        Rank 0 describes every tensor, also those of which it writes nothing.
        """
        described = self.specs if self.rank == 0 else self._own
        chunks: dict[str, list[Chunk]] = {fqn: [] for fqn in described}
        for piece, crc in zip(self.pieces, crcs, strict=True):
            chunk = Chunk(box=piece.region.box, at=piece.at, nbytes=piece.nbytes, crc32c=crc)
            chunks.setdefault(piece.fqn, []).append(chunk)
        tensors = {fqn: self._entry(fqn, tuple(found)) for fqn, found in chunks.items()}
        return self._described(flat, tensors, run=run, step=step, generation=generation)

    def _described(
        self,
        flat: FlatState,
        tensors: dict[str, TensorEntry],
        *,
        run: str,
        step: int,
        generation: int,
    ) -> ShardIndex:
        agreed = self._agreed
        values = {key: flat.values[key] for key in agreed.values if key in flat.values}
        return ShardIndex(
            run=run,
            generation=generation,
            step=step,
            writer=self.rank,
            world_size=self.world_size,
            payload_bytes=self.payload_bytes,
            tensors=tensors,
            values=values | {k: v for k, v in agreed.members.items() if k in values},
            rank_values=flat.rank_values,
            aliases=agreed.aliases,
        )

    def index_text(
        self, flat: FlatState, crcs: Sequence[int], *, run: str, step: int, generation: int
    ) -> bytes:
        """Return the JSON of `index`.

        Only the parts that change from step to step are encoded again.
        """
        if self._text is None:
            numbered = self.index(flat, range(len(self.pieces)), step=step)
            found = _CRC.split(msgspec.json.encode(numbered.tensors))
            self._text = found[0::2], [int(number) for number in found[1::2]]
        between, order = self._text
        sums = [str(crcs[i]).encode() for i in order]
        rest = self._described(flat, {}, run=run, step=step, generation=generation)
        tensors = b"".join(chain.from_iterable(zip(between, [*sums, b""], strict=True)))
        return encode_index(rest).replace(_NO_TENSORS, _TENSORS % tensors, 1)

    def _entry(self, fqn: str, chunks: tuple[Chunk, ...]) -> TensorEntry:
        spec, grid = self.specs[fqn], self._agreed.grids.get(fqn)
        return TensorEntry(dtype=spec.dtype, shape=spec.shape, chunks=chunks, grid=grid)

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
        crcs = [
            copy_out(source, into[piece.at : piece.at + piece.nbytes])
            for piece, source in zip(self.pieces, self.sources(flat), strict=True)
        ]
        return self.index(flat, crcs, run=run, step=step, generation=generation)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agreed:
    """The result of the exchange between all ranks, and this rank's share of the writes.

    ``values`` and ``aliases`` are those that this rank writes. ``members`` are the parameters of
    the optimizers' groups, merged over all ranks. ``mine`` is the offer that this rank sent.
    """

    specs: Mapping[str, TensorSpec]
    grids: Mapping[str, tuple[int, ...] | None]
    values: tuple[str, ...]
    aliases: dict[str, str]
    members: dict[str, list[str]]
    mine: dict[str, Json]

    @classmethod
    def of(
        cls,
        everyone: Sequence[Mapping[str, Json]],
        *,
        rank: int,
        specs: Mapping[str, TensorSpec],
        grids: Mapping[str, tuple[int, ...] | None],
    ) -> _Agreed:
        mine = dict(everyone[rank])
        taken = {key for offer in everyone[:rank] for key in (*offer["values"], *offer["aliases"])}
        return cls(
            specs=specs,
            grids=grids,
            values=tuple(key for key in mine["values"] if key not in taken),
            aliases={
                name: stored
                for name, stored in mine["aliases"].items()
                if name not in taken and name not in specs
            },
            members=merge_groups([offer["groups"] for offer in everyone]),
            mine=mine,
        )


def _offer(flat: FlatState, seen: Mapping[str, _PlannedTensor]) -> dict[str, Json]:
    """Return the offer that this rank sends to the other ranks, as JSON."""
    return {
        "tensors": [
            (
                fqn,
                t.spec.dtype,
                t.spec.shape,
                [(r.box.offset, r.box.shape) for r in t.regions],
                fqn.partition(".")[0] if fqn in flat.volatile else "",
            )
            for fqn, t in seen.items()
        ],
        "values": sorted(flat.values),
        "aliases": flat.aliases,
        "groups": {
            key: hypers
            for parts in flat.optimizers.values()
            for key, hypers in parts.described(flat.values)
        },
    }


def _pieces(
    tensors: Mapping[str, _PlannedTensor], sizes: Mapping[tuple[str, Box], int], *, at: int
) -> list[WritePiece]:
    """Return the pieces of the boxes that have a size, one behind the other from ``at`` on."""
    found = []
    for fqn, tensor in tensors.items():
        for region in tensor.regions:
            if nbytes := sizes.get((fqn, region.box), 0):
                found.append(WritePiece(fqn=fqn, region=region, at=at, nbytes=nbytes))
                at = _align(at + nbytes)
    return found


def _shared(
    seen: Mapping[str, _PlannedTensor], holdings_by_rank: Sequence[Sequence[Holding]], rank: int
) -> list[tuple[str, Region]]:
    """Return the regions of ``rank`` whose boxes another rank holds, too."""
    others = {
        (holding.spec.fqn, holding.box)
        for other, holdings in enumerate(holdings_by_rank)
        if other != rank
        for holding in holdings
    }
    return [
        (fqn, region)
        for fqn, tensor in seen.items()
        for region in tensor.regions
        if (fqn, region.box) in others
    ]


def _holdings(tensors: Sequence[Sequence[Any]]) -> Iterator[Holding]:
    for fqn, dtype, shape, boxes, group in tensors:
        spec = TensorSpec(fqn=fqn, dtype=dtype, shape=tuple(shape))
        itemsize = torch_dtypes.BY_NAME[dtype].itemsize
        nothing = ((0,) * len(shape), (0,) * len(shape))
        for offset, extent in boxes or ([nothing] if shape else ()):
            box = Box(offset=tuple(offset), shape=tuple(extent))
            yield Holding(spec=spec, box=box, nbytes=prod(extent) * itemsize, group=group)


def _grids(
    specs: Mapping[str, TensorSpec], writes: Sequence[Sequence[Holding]]
) -> dict[str, tuple[int, ...] | None]:
    boxes: dict[str, list[Box]] = {fqn: [] for fqn in specs}
    for holdings in writes:
        for holding in holdings:
            boxes[holding.spec.fqn].append(holding.box)
    grids = {}
    for fqn, spec in specs.items():
        grids[fqn] = common_grid(spec.shape, boxes[fqn])
        if grids[fqn] is None and (fault := fault_of_cover(spec.shape, boxes[fqn])):
            raise StateError(
                f"{fqn}: what the ranks hold of shape {list(spec.shape)} is not the whole tensor, "
                f"each element once or in equal boxes: {fault}; shard it in one way on all ranks"
            )
    return grids


def _align(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
