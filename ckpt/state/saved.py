"""The saved tensors and values of one step, from the indexes of all its writers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from holdfast.ckpt.errors import CorruptError, MismatchError, NotFoundError
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.geometry.reshard import Saved, SavedChunks
from holdfast.ckpt.geometry.scatter import ByChunk
from holdfast.ckpt.geometry.shard_index import ChunkRef, ShardIndex
from holdfast.ckpt.register.outline import SavedOutline
from holdfast.ckpt.state import landing, torch_dtypes
from holdfast.ckpt.state.trees.encoding import stored_names
from holdfast.ckpt.state.trees.per_rank import SavedRanks, by_path
from holdfast.ckpt.types import Json


class ShardSource(Protocol):
    """A source of the shards of one step: the memory of sidecars, a checkpoint, or a test.

    ``origin`` says in words where the bytes come from. ``read`` yields verified bytes only, in the
    order of the request, and raises ``CorruptError`` for others; a view is valid until the next
    one. ``scatter`` reads regions into their destinations, all verified once it returns.
    """

    @property
    def origin(self) -> str: ...

    def indexes(self) -> Sequence[ShardIndex]: ...

    def read(self, refs: Sequence[ChunkRef]) -> Iterator[tuple[ChunkRef, memoryview]]: ...

    def scatter(self, deliveries: ByChunk) -> int: ...


@runtime_checkable
class OutlinedSource(Protocol):
    """A source that may have so many writers that a reader asks for its own part of their indexes.

    ``outline`` is None where it has not. `part` is a source of the chunks that meet boxes of
    tensors, of all chunks of a tensor for None.
    """

    def outline(self) -> SavedOutline | None: ...

    def part(self, want: Mapping[str, Sequence[Box] | None]) -> ShardSource: ...


@dataclass(slots=True, kw_only=True)
class SavedState:
    """All writers' indexes, merged.

    ``indexes`` are empty at first where the source has an outline: `part_of` reads those of the
    wanted tensors. ``places`` is for plans of copies.
    """

    step: int
    generation: int
    writers: int
    indexes: Sequence[ShardIndex]
    specs: dict[str, TensorSpec]
    aliases: dict[str, str]
    values: dict[str, Json] = field(default_factory=dict)
    ranks: SavedRanks = field(default_factory=dict)
    places: Saved = ()
    is_outline: bool = False

    @classmethod
    def of(cls, source: ShardSource) -> SavedState:
        outline = source.outline() if isinstance(source, OutlinedSource) else None
        if outline is not None:
            return cls(
                step=outline.step,
                generation=outline.generation,
                writers=outline.writers,
                indexes=(),
                specs=outline.specs,
                aliases=outline.aliases,
                values=outline.values,
                ranks=outline.ranks,
                is_outline=True,
            )
        indexes = source.indexes()
        if not indexes:
            raise NotFoundError(f"{source.origin}: holds no shard; choose another restore point")
        first, chunks = indexes[0], SavedChunks(indexes)
        saved = cls(
            step=first.step,
            generation=first.generation,
            writers=len(indexes),
            indexes=indexes,
            specs=chunks.specs,
            aliases=chunks.aliases,
            places=chunks,
        )
        for index in indexes:
            if (index.step, index.generation) != (first.step, first.generation):
                raise CorruptError(
                    f"{source.origin}: writer {index.writer} holds step {index.step} of generation "
                    f"{index.generation}, writer {first.writer} step {first.step} of "
                    f"{first.generation}; use another restore point"
                )
            saved.values = index.values | saved.values
        saved.ranks = by_path((index.writer, index.rank_values) for index in indexes)
        return saved

    def part_of(self, source: ShardSource, want: Mapping[str, Sequence[Box] | None]) -> ShardSource:
        """Return the source of wanted tensors, and note their chunks: all of a source without
        an outline.
        """
        if not self.is_outline or not isinstance(source, OutlinedSource):
            return source
        part = source.part({fqn: boxes for fqn, boxes in want.items() if fqn in self.specs})
        self.indexes = part.indexes()
        self.places = SavedChunks(self.indexes, specs=self.specs, aliases=self.aliases)
        return part

    def rank_tensors(self) -> set[str]:
        """Return the names of the tensors that the values of ranks hold."""
        if not self.is_outline:
            return {fqn for trees in self.ranks.values() for fqn in stored_names([*trees.values()])}
        owned = tuple(f"{path}@" for path in self.ranks)
        return {fqn for fqn in self.specs if fqn.startswith(owned)}


def are_equal(source: ShardSource, saved: SavedState, names: Sequence[str]) -> bool:
    """Say whether saved tensors are equal, by their chunks' checksums where they are cut alike."""
    first = saved.specs[names[0]]
    specs = [saved.specs[name] for name in names]
    if any((spec.dtype, spec.shape) != (first.dtype, first.shape) for spec in specs):
        return False
    chunks = [
        {
            (chunk.box, chunk.crc32c)
            for index in saved.indexes
            if name in index.tensors
            for chunk in index.tensors[name].chunks
        }
        for name in names
    ]
    if all({box for box, _ in found} == {box for box, _ in chunks[0]} for found in chunks):
        return all(found == chunks[0] for found in chunks)
    whole = read_tensors(source, names)
    raw = [torch_dtypes.as_carrier(whole[name]).reshape(-1).view(torch.uint8) for name in names]
    return all(torch.equal(other, raw[0]) for other in raw)


def read_tensors(
    source: ShardSource, fqns: Iterable[str], *, boxes: Mapping[str, Box] | None = None
) -> dict[str, torch.Tensor]:
    """Return saved tensors (whole, or their region in ``boxes``) as fresh CPU tensors.

    Raises ``NotFoundError`` where no tensor of a name was saved.
    """
    saved = SavedState.of(source)
    specs, aliases = saved.specs, saved.aliases
    targets: dict[str, tuple[TensorSpec, list[tuple[Box, torch.Tensor]]]] = {}
    result: dict[str, torch.Tensor] = {}
    want: dict[str, list[Box]] = {}
    for fqn in fqns:
        spec = specs.get(aliases.get(fqn, fqn))
        if spec is None:
            raise NotFoundError(f"{source.origin}: no tensor {fqn} was saved; see its keys")
        box = (boxes or {}).get(fqn) or Box(offset=(0,) * len(spec.shape), shape=spec.shape)
        result[fqn] = torch.empty(box.shape, dtype=torch_dtypes.BY_NAME[spec.dtype])
        targets[fqn] = (spec, [(_inside(fqn, box, spec), result[fqn])])
        want.setdefault(spec.fqn, []).append(box)
    landing.fill(saved.part_of(source, want), saved.places, targets)
    return result


def _inside(fqn: str, box: Box, spec: TensorSpec) -> Box:
    ends = [o + n for o, n in zip(box.offset, box.shape, strict=False)]
    if len(ends) != len(spec.shape) or any(e > s for e, s in zip(ends, spec.shape, strict=True)):
        raise MismatchError(f"{fqn}: {box} lies outside its shape {list(spec.shape)}")
    return box
