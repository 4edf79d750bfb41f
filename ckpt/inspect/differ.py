"""Compare two checkpoints, box by box, in bounded memory; their layouts may differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from holdfast.ckpt.checkpoints.assemble import TensorChunks
from holdfast.ckpt.checkpoints.boxes import BoxReader, budget, largest_chunk
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.slicing import Selection, everything, tiles
from holdfast.ckpt.inspect.compare import Tally, Tolerance, merge, tally
from holdfast.ckpt.store.parallel import parallel
from holdfast.ckpt.types import learn

Progress = Callable[[int], None]

DEFAULT_MEMORY: Final = 512 << 20


class KindDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A name whose tensors cannot be compared: they differ in dtype or shape."""

    name: str
    dtype_a: str
    dtype_b: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]


class TensorComparison(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison of one tensor; ``read`` is False where recorded checksums replaced the bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tally: Tally
    read: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A tensor under one name; each side may store it under another (tied) name."""

    name: str
    a: TensorChunks
    b: TensorChunks

    @property
    def nbytes(self) -> int:
        """The bytes of one of the two tensors."""
        return everything(self.a.shape).size * self.a.dtype.itemsize


def kind_difference(name: str, a: TensorChunks, b: TensorChunks) -> KindDifference | None:
    """Return the difference in dtype or shape of two tensors, None if they can be compared."""
    if (a.dtype, a.shape) == (b.dtype, b.shape):
        return None
    return KindDifference(
        name=name,
        dtype_a=a.dtype.name,
        dtype_b=b.dtype.name,
        shape_a=a.shape,
        shape_b=b.shape,
    )


def equal_by_checksums(a: TensorChunks, b: TensorChunks) -> bool:
    """Say whether both were written in equal boxes with equal recorded checksums.

    That is no proof of equality: nothing is read, and CRC32C has 32 bits.
    """

    def recorded(parts: TensorChunks) -> set[tuple[Box, int, int]]:
        return {(ref.chunk.box, ref.chunk.nbytes, ref.chunk.crc32c) for ref in parts.chunks}

    return recorded(a) == recorded(b)


def compare_tensors(
    a: BoxReader,
    b: BoxReader,
    pairs: Sequence[Pair],
    *,
    tolerance: Tolerance,
    memory_bytes: int = DEFAULT_MEMORY,
    threads: int = 4,
    progress: Progress = lambda _: None,
) -> Iterator[TensorComparison]:
    """Yield the comparison of each pair, in order; ``progress`` is called with bytes of A compared.

    Raises ``CorruptError`` if the bytes of either side are damaged.
    """
    chunk = largest_chunk(parts for pair in pairs for parts in (pair.a, pair.b))
    limits = budget(memory_bytes, threads=threads, largest_chunk=chunk, sources=2)

    def cut() -> Iterator[tuple[Pair, Selection | None]]:
        for pair in pairs:
            parts = tiles(
                everything(pair.a.shape),
                itemsize=pair.a.dtype.itemsize,
                most_bytes=limits.tile_bytes,
                cell=a.cell(pair.a.fqn),
            )
            yield from ((pair, part) for part in parts)
            yield pair, None

    def compare(item: tuple[Pair, Selection | None]) -> tuple[Pair, Tally | None]:
        pair, part = item
        if part is None:
            return pair, None
        box = part.box
        one, other = a.box(pair.a.fqn, box), b.box(pair.b.fqn, box)
        found = tally(one, other, pair.a.dtype, tolerance=tolerance, offset=box.offset)
        progress(one.nbytes)
        return pair, found

    so_far = Tally()
    for pair, found in parallel(compare, cut(), threads=limits.threads):
        if found is not None:
            so_far = merge(so_far, found)
            continue
        yield TensorComparison(
            name=pair.name, dtype=pair.a.dtype.name, shape=pair.a.shape, tally=so_far
        )
        so_far = Tally()


learn(globals())
