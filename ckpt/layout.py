"""Where every piece of every tensor lies: boxes and layouts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import msgspec

from ckpt.errors import StateError


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """A half-open n-D region of a tensor's global index space; 0-D for scalars.

    An empty box (some extent 0) is legal: uneven shards leave ranks without data.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise ValueError(f"box offset {self.offset} and shape {self.shape} differ in rank")
        if any(o < 0 for o in self.offset):
            raise ValueError(f"box offset {self.offset} has a negative extent")
        if any(s < 0 for s in self.shape):
            raise ValueError(f"box shape {self.shape} has a negative extent")

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the common region, or None where there is none."""
        lo = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        hi = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(h - o for o, h in zip(lo, hi, strict=True))
        return None if any(n <= 0 for n in shape) else Box(offset=lo, shape=shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a tensor is, whoever holds it: name, dtype (torch's name, ``"bfloat16"``), shape."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which rank holds which boxes of which tensor.

    ``specs`` maps FQN to spec; ``boxes`` maps FQN to one tuple of boxes per rank (replicas show
    as equal boxes at several ranks; a rank without a part has an empty tuple).
    """

    specs: Mapping[str, TensorSpec]
    boxes: Mapping[str, tuple[tuple[Box, ...], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A mesh axis that cuts tensor dim ``dim``; ``after`` counts shards cut before it (strided).

    ``after`` is 1 for an ordinary shard. FSDP over tensor parallelism writes ``after=2`` on its
    axis: the axes to its right, with 2 ranks in all, cut that dim first (torch's
    ``_StridedShard``).
    """

    dim: int
    after: int = 1


def chunk_range(extent: int, *, parts: int, index: int) -> tuple[int, int]:
    """Return (start, length) of part ``index`` as ``torch.chunk`` cuts; the last may be empty."""
    full = -(-extent // parts)
    start = min(full * index, extent)
    return start, min(full, extent - start)


def shard_box(
    shape: Sequence[int],
    *,
    mesh: Sequence[int],
    coordinate: Sequence[int],
    axes: Sequence[Split | None],
) -> Box:
    """Return the box that the rank at ``coordinate`` of ``mesh`` holds of a tensor.

    ``axes`` says per mesh axis what it does to the tensor: cut a dim, or replicate (None).
    Raises ``ValueError`` where a strided cut is uneven or does not match the mesh.
    """
    order = [a for a, split in enumerate(axes) if split is not None and split.after == 1]
    order += [a for a in reversed(range(len(axes))) if (s := axes[a]) is not None and s.after > 1]
    offset, local = [0] * len(shape), list(shape)
    done: list[int] = []
    for axis in order:
        split = axes[axis]
        assert split is not None
        if split.after > 1:
            _check_strided(shape, mesh=mesh, axes=axes, axis=axis, done=done)
        start, length = chunk_range(local[split.dim], parts=mesh[axis], index=coordinate[axis])
        offset[split.dim] += start
        local[split.dim] = length
        done.append(axis)
    return Box(offset=tuple(offset), shape=tuple(local))


def _check_strided(
    shape: Sequence[int],
    *,
    mesh: Sequence[int],
    axes: Sequence[Split | None],
    axis: int,
    done: Sequence[int],
) -> None:
    split = axes[axis]
    assert split is not None
    same = [a for a in range(len(axes)) if (s := axes[a]) is not None and s.dim == split.dim]
    before = prod(mesh[a] for a in done if a > axis and a in same)
    if before != split.after:
        raise ValueError(
            f"strided shard after {split.after} on a mesh that cuts {before} before it"
        )
    if shape[split.dim] % prod(mesh[a] for a in same):
        raise ValueError(f"strided shard cuts extent {shape[split.dim]} unevenly")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One box of a tensor that a rank holds, and so could write; ``nbytes`` balances the work."""

    spec: TensorSpec
    box: Box
    nbytes: int


def choose_writers(
    holdings: Sequence[Iterable[Holding]],
) -> tuple[dict[str, TensorSpec], list[list[Holding]]]:
    """Decide which rank writes which box, so that replicas are written once and bytes balance.

    ``holdings[rank]`` is what that rank holds. Every rank that calls this with the same argument
    gets the same answer. Raises ``StateError`` where ranks disagree on what a tensor is or
    together hold less or more than all of it.
    """
    specs: dict[str, TensorSpec] = {}
    holders: dict[tuple[str, Box], tuple[Holding, list[int]]] = {}
    for rank, held in enumerate(holdings):
        for holding in held:
            spec = specs.setdefault(holding.spec.fqn, holding.spec)
            if spec != holding.spec:
                raise StateError(
                    f"{spec.fqn}: rank {rank} holds {holding.spec.dtype} {holding.spec.shape}, "
                    f"another rank {spec.dtype} {spec.shape}; wrap per-rank values in PerRank"
                )
            holders.setdefault((spec.fqn, holding.box), (holding, []))[1].append(rank)
    _check_whole(specs, [holding for holding, _ in holders.values()])
    writes: list[list[Holding]] = [[] for _ in holdings]
    load = [0] * len(holdings)
    replicated = []
    for key, (holding, ranks) in holders.items():
        if len(ranks) == 1:
            writes[ranks[0]].append(holding)
            load[ranks[0]] += holding.nbytes
        elif holding.box.size:
            replicated.append((-holding.nbytes, key[0], holding.box.offset, holding, ranks))
    for _, _, _, holding, ranks in sorted(replicated, key=lambda item: item[:3]):
        rank = min(ranks, key=lambda r: (load[r], r))
        writes[rank].append(holding)
        load[rank] += holding.nbytes
    return specs, [[h for h in part if h.box.size] for part in writes]


def _check_whole(specs: Mapping[str, TensorSpec], held: Iterable[Holding]) -> None:
    cells = dict.fromkeys(specs, 0)
    for holding in held:
        cells[holding.spec.fqn] += holding.box.size
    for fqn, count in cells.items():
        if count != (needed := prod(specs[fqn].shape)):
            raise StateError(
                f"{fqn}: the ranks hold {count} elements of shape {specs[fqn].shape}, which has "
                f"{needed}; shard it over the whole group, or keep it whole on every rank"
            )
