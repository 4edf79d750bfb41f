"""The outline of a step with a register: everything but the places of its chunks."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass

from holdfast.ckpt.format.manifest import Manifest
from holdfast.ckpt.geometry.layout import TensorSpec
from holdfast.ckpt.register.reading import Register
from holdfast.ckpt.types import Json


class StoredTrees(Mapping[int, Json]):
    """The values of one path by rank, each read when it is asked for.

    The ranks are known beforehand; ``ranges`` are theirs. All values are read at once by ``values``
    and ``items``.
    """

    def __init__(self, register: Register, path: str, ranges: Sequence[tuple[int, int]]) -> None:
        self._register, self._path, self._ranges = register, path, ranges
        self._known: dict[int, Json] = {}

    def __getitem__(self, rank: int) -> Json:
        if rank not in self:
            raise KeyError(rank)
        if rank not in self._known:
            self._read([rank])
        return self._known[rank]

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and any(low <= rank < high for low, high in self._ranges)

    def __iter__(self) -> Iterator[int]:
        for low, high in self._ranges:
            yield from range(low, high)

    def __len__(self) -> int:
        return sum(high - low for low, high in self._ranges)

    def values(self) -> ValuesView[Json]:
        """Return the values of all ranks."""
        return self._all().values()

    def items(self) -> ItemsView[int, Json]:
        """Return all ranks with their values."""
        return self._all().items()

    def _all(self) -> dict[int, Json]:
        if len(self._known) < len(self):
            self._read(None)
        return self._known

    def _read(self, ranks: Sequence[int] | None) -> None:
        found = self._register.trees(self._path, ranks)
        self._known |= {rank: value.tree for rank, value in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOutline:
    """The tensors, names and values of a step; ``ranks`` are the values by path and rank."""

    step: int
    generation: int
    writers: int
    specs: dict[str, TensorSpec]
    aliases: dict[str, str]
    values: dict[str, Json]
    ranks: Mapping[str, Mapping[int, Json]]


def outline_of(head: Manifest, register: Register) -> SavedOutline:
    """Return the outline of a step; nothing more is read for it."""
    return SavedOutline(
        step=head.step,
        generation=head.generation,
        writers=head.world_size,
        specs={
            fqn: TensorSpec(fqn=fqn, dtype=record.dtype, shape=record.shape)
            for fqn, record in head.tensors.items()
        },
        aliases=head.aliases,
        values=head.values,
        ranks={
            path: StoredTrees(register, path, ranges) for path, ranges in register.ranks.items()
        },
    )
