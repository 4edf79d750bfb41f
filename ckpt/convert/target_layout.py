"""The shards that each writer of a target layout holds, by a mesh and the user's rules.

The axis ``dp`` splits dim 0 of every tensor, as FSDP2 does. A rule makes another axis split a dim
of the tensors that its glob names. Replicas are written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product
from math import prod
from typing import Final

from holdfast.ckpt.convert.interchange import cut, itemsize_of
from holdfast.ckpt.errors import MismatchError
from holdfast.ckpt.geometry.grid import PIECE_BYTES, cells, common_grid, split_grid
from holdfast.ckpt.geometry.layout import (
    Box,
    Holding,
    Split,
    TensorSpec,
    choose_writers,
    shard_runs,
)
from holdfast.ckpt.geometry.shard_index import Chunk, TensorEntry

DATA_AXIS: Final = "dp"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """Mesh axis ``axis`` splits dim ``dim`` (negative: from the last) of ``glob``'s tensors."""

    glob: str
    axis: str
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLayout:
    """A mesh, axis names to sizes, and its rules for splits; the last rule that matches counts."""

    mesh: Mapping[str, int] = field(default_factory=lambda: {DATA_AXIS: 1})
    rules: tuple[SplitRule, ...] = ()

    def __post_init__(self) -> None:
        for axis, size in self.mesh.items():
            if size < 1:
                raise ValueError(f"axis {axis} has size {size}, at least 1 is needed")
        for rule in self.rules:
            if rule.axis not in self.mesh:
                raise ValueError(f"rule for axis {rule.axis}, the mesh has {', '.join(self.mesh)}")

    @property
    def ranks(self) -> int:
        """Number of writers."""
        return prod(self.mesh.values())

    def boxes(self, spec: TensorSpec) -> list[Box]:
        """Return each rank's box, as FSDP2 over tensor parallelism cuts; may be empty.

        Raises ``MismatchError`` if a rule does not fit the tensor's shape.
        """
        axes, mesh = tuple(self._splits(spec)), tuple(self.mesh.values())
        found = []
        for at in product(*(range(n) for n in mesh)):
            runs = shard_runs(spec.shape, mesh=mesh, coordinate=at, axes=axes, nested=True)
            spans = [
                each[0] if each else (extent, 0)
                for each, extent in zip(runs, spec.shape, strict=True)
            ]
            found.append(Box(offset=tuple(o for o, _ in spans), shape=tuple(n for _, n in spans)))
        return found

    def _splits(self, spec: TensorSpec) -> Iterator[Split | None]:
        """Yield the split of each axis; where several cut one dim, those to the right cut first."""
        dims = {axis: self._dim(spec, axis) for axis in self.mesh}
        names = list(self.mesh)
        for number, axis in enumerate(names):
            dim = dims[axis]
            after = prod(self.mesh[name] for name in names[number + 1 :] if dims[name] == dim)
            yield None if dim is None else Split(dim=dim, after=after)

    def _dim(self, spec: TensorSpec, axis: str) -> int | None:
        chosen = None
        for rule in self.rules:
            if rule.axis == axis and fnmatchcase(spec.fqn, rule.glob):
                chosen = rule
        if chosen is None:
            return 0 if axis == DATA_AXIS and spec.shape else None
        if not -len(spec.shape) <= chosen.dim < len(spec.shape):
            raise MismatchError(
                f"{spec.fqn} of shape {list(spec.shape)} has no dim {chosen.dim} (rule "
                f"{chosen.glob}={chosen.axis}:{chosen.dim}); name its tensors more narrowly"
            )
        return chosen.dim % len(spec.shape)

    def writers(
        self, specs: Mapping[str, TensorSpec], *, most_bytes: int = PIECE_BYTES
    ) -> list[dict[str, TensorEntry]]:
        """Return each writer's tensors, in chunks of at most ``most_bytes``.

        The first writer lists every tensor. Raises ``MismatchError`` if a rule matches no
        tensor, or does not fit its shape.
        """
        for rule in self.rules:
            if not any(fnmatchcase(fqn, rule.glob) for fqn in specs):
                raise MismatchError(f"no tensor is called {rule.glob}; see `holdfast inspect`")
        boxes = {fqn: self.boxes(spec) for fqn, spec in specs.items()}
        grids = {fqn: _grid(specs[fqn], placed, most_bytes) for fqn, placed in boxes.items()}
        held_by: list[list[Holding]] = [[] for _ in range(self.ranks)]
        for fqn, spec in specs.items():
            itemsize = itemsize_of(spec)
            for holdings, box in zip(held_by, boxes[fqn], strict=True):
                holdings.append(Holding(spec=spec, box=box, nbytes=box.size * itemsize))
        _, chosen = choose_writers(held_by)
        writers: list[dict[str, TensorEntry]] = []
        for holdings in chosen:
            split: dict[str, list[Box]] = {}
            for holding in holdings:
                split.setdefault(holding.spec.fqn, []).append(holding.box)
            writers.append(
                {
                    fqn: _entry(specs[fqn], split[fqn], grids[fqn], most_bytes)
                    for fqn in specs
                    if fqn in split
                }
            )
        for fqn, spec in specs.items():
            writers[0].setdefault(fqn, _entry(spec, [], grids[fqn], most_bytes))
        return writers


def _grid(spec: TensorSpec, boxes: list[Box], most_bytes: int) -> tuple[int, ...] | None:
    """Return the cells that all writers store; None if there are none or they are too large."""
    grid = common_grid(spec.shape, boxes)
    if grid is None:
        return None
    itemsize = itemsize_of(spec)
    fine = split_grid(grid, spec.shape, itemsize, most=min(most_bytes, PIECE_BYTES))
    return fine if prod(fine) * itemsize <= most_bytes else None


def _entry(
    spec: TensorSpec, boxes: list[Box], grid: tuple[int, ...] | None, most_bytes: int
) -> TensorEntry:
    itemsize = itemsize_of(spec)
    chunks = tuple(
        Chunk(box=part, at=0, nbytes=part.size * itemsize, crc32c=0)
        for box in boxes
        for part in (
            cut(box, itemsize=itemsize, most_bytes=most_bytes) if grid is None else cells(box, grid)
        )
    )
    return TensorEntry(dtype=spec.dtype, shape=spec.shape, chunks=chunks, grid=grid)
