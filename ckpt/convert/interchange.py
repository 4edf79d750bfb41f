"""The interface to other formats: a source of ``(TensorSpec, Box, bytes)`` and a matching sink.

A format is bridged by a `TensorSource`, a `TensorSink` or both. `transfer` copies any source to any
sink, piece by piece, in bounded memory. Our own checkpoints are `CheckpointSource` and
`CheckpointSink`; ``holdfast.ckpt.convert`` has those of other formats.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Final, Protocol, TypeAlias, runtime_checkable

from holdfast.ckpt import checks
from holdfast.ckpt.errors import ArgumentError, CorruptError, MismatchError, StateError
from holdfast.ckpt.format.wellformed import fault_of_shape
from holdfast.ckpt.geometry.element_types import dtype_of
from holdfast.ckpt.geometry.grid import whole
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.types import Json

Progress: TypeAlias = Callable[[int], None]
"""Called with the number of bytes newly done."""

Piece: TypeAlias = tuple[str, Box]
"""A part of a tensor: the tensor's name and a box."""

MEMORY_BYTES: Final = 2 << 30
MEMORY_LEAST: Final = 8 << 20
PIECE_BYTES: Final = 16 << 20
_MEMORY_PER_THREAD: Final = 64 << 20
_THREADS: Final = 4

_TRANSFER: Final[Mapping[str, checks.Rule]] = {
    "select": checks.optional(checks.texts(remedy="give a glob pattern, as in 'model.*'")),
    "memory_bytes": checks.count(1, remedy="give the bytes as a whole number"),
    "step": checks.optional(checks.count(0, remedy="give the number of a step, or None")),
}


class TensorSource(Protocol):
    """Tensors that can be read box by box, and the plain values beside them.

    ``specs`` holds each stored tensor once, by name; ``aliases`` maps tied names to stored ones;
    ``values`` are plain values by dotted path, as ``holdfast.ckpt.state.plain`` encodes them.
    ``origin`` says in words where the bytes come from.

    A source with a true attribute ``parallel`` may be read by several threads at once, and each
    view that `read` returns stays valid.
    """

    @property
    def origin(self) -> str: ...

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...

    @property
    def aliases(self) -> Mapping[str, str]: ...

    @property
    def values(self) -> Mapping[str, Json]: ...

    def read(self, fqn: str, box: Box) -> memoryview:
        """Return the box's elements: C order, little-endian, valid until the next call.

        Verified where the format has checksums; raises ``CorruptError`` for bytes that are damaged
        or missing.
        """

    def close(self) -> None:
        """Close open files."""


class TensorSink(Protocol):
    """A destination of tensors: `begin`, then every piece once, then `finish`.

    Nothing is visible to readers of the format before `finish`, which publishes everything at once.
    `close` without it leaves nothing visible. Existing files are never overwritten.
    """

    def begin(
        self,
        specs: Mapping[str, TensorSpec],
        *,
        aliases: Mapping[str, str],
        values: Mapping[str, Json],
        step: int | None,
    ) -> None:
        """Prepare for these tensors; refuse them before any byte is read if they do not fit."""

    def write(self, fqn: str, box: Box, data: memoryview) -> None:
        """Write a box's elements; ``data`` belongs to the sink from now on."""

    def finish(self) -> None:
        """Make everything durable and visible, at once."""

    def close(self) -> None:
        """Close open files, and drop unfinished ones."""


@runtime_checkable
class OrderedSink(Protocol):
    """A sink that needs its pieces cut in its own way and order (files that it streams)."""

    def pieces(self, most_bytes: int) -> Iterable[Piece]:
        """Yield the pieces to send, after `begin`; each at most ``most_bytes`` (or one element)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transferred:
    """The totals of a `transfer`; ``values`` counts the plain values that were handed over."""

    tensors: int
    aliases: int
    values: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferBudget:
    """The division of memory: the size of pieces, the bytes read ahead, the number of threads.

    At most half of the memory is for bytes read ahead. A source needs as much again for the chunks
    of its pieces, a sink for bytes it has not written yet.
    """

    piece_bytes: int
    ahead_bytes: int
    threads: int

    @classmethod
    def of(cls, memory_bytes: int) -> TransferBudget:
        """Divide ``memory_bytes``. Raises ``StateError`` if that is too little to work with."""
        if memory_bytes < MEMORY_LEAST:
            raise StateError(
                f"{memory_bytes} bytes of memory are too little; give at least "
                f"{MEMORY_LEAST >> 20} MiB"
            )
        threads = min(max(memory_bytes // _MEMORY_PER_THREAD, 1), _THREADS)
        piece = min(memory_bytes // 16, PIECE_BYTES)
        ahead = 2 * threads * piece
        return cls(piece_bytes=piece, ahead_bytes=ahead, threads=threads)


def cut(box: Box, *, itemsize: int, most_bytes: int) -> Iterator[Box]:
    """Cut a box into runs of its rows, in C order, each at most ``most_bytes`` or one element.

    Larger rows are cut in the same way. Empty boxes have no pieces.
    """
    if not box.size:
        return
    dim, run = len(box.shape), itemsize
    while dim and run * box.shape[dim - 1] <= most_bytes:
        dim -= 1
        run *= box.shape[dim]
    if not dim:
        yield box
        return
    along, rows = dim - 1, max(most_bytes // run, 1)
    for outer in product(*(range(n) for n in box.shape[:along])):
        for start in range(0, box.shape[along], rows):
            at = (*outer, start, *(0 for _ in box.shape[dim:]))
            extent = min(rows, box.shape[along] - start)
            yield Box(
                offset=tuple(o + i for o, i in zip(box.offset, at, strict=True)),
                shape=(*(1 for _ in outer), extent, *box.shape[dim:]),
            )


def itemsize_of(spec: TensorSpec) -> int:
    """Return the bytes of one element. Raises ``CorruptError`` for an unknown dtype."""
    return dtype_of(spec.dtype, origin=f"tensor {spec.fqn}").itemsize


def nbytes_of(spec: TensorSpec) -> int:
    """Return the bytes of the whole tensor."""
    return whole(spec.shape).size * itemsize_of(spec)


def matches(name: str, patterns: Sequence[str] | None) -> bool:
    """Say whether any glob of ``patterns`` matches a name; None matches every name."""
    return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSelection:
    """The selection to transfer; ``stored`` maps its tensors to their names at the source."""

    specs: Mapping[str, TensorSpec]
    aliases: Mapping[str, str]
    values: Mapping[str, Json]
    stored: Mapping[str, str]


def choose(source: TensorSource, select: Sequence[str] | None) -> TransferSelection:
    """Return the selection of the globs.

    A tied name replaces its stored name where that is not selected. Raises ``MismatchError`` where
    the globs select no tensor.
    """
    stored = {fqn: fqn for fqn in source.specs if matches(fqn, select)}
    names = {fqn: fqn for fqn in stored}
    aliases = {}
    for name, first in source.aliases.items():
        if matches(name, select):
            if first in names:
                aliases[name] = names[first]
            else:
                names[first], stored[name] = name, first
    if select is not None and not stored:
        raise MismatchError(
            f"{source.origin}: {', '.join(select)} selects none of its {len(source.specs)} "
            f"tensors; it has {', '.join(list(source.specs)[:6]) or 'none'}"
        )
    specs = {
        name: TensorSpec(fqn=name, dtype=source.specs[at].dtype, shape=source.specs[at].shape)
        for name, at in stored.items()
    }
    values = {name: value for name, value in source.values.items() if matches(name, select)}
    return TransferSelection(specs=specs, aliases=aliases, values=values, stored=stored)


def transfer(
    source: TensorSource,
    sink: TensorSink,
    *,
    select: str | Sequence[str] | None = None,
    memory_bytes: int = MEMORY_BYTES,
    progress: Progress = lambda _: None,
    step: int | None = None,
) -> Transferred:
    """Copy the tensors that the globs ``select`` from ``source`` to ``sink``, and finish it.

    Bytes in flight stay within ``memory_bytes``, however large a tensor is. The caller closes both
    ends in any case. Raises ``ArgumentError`` for an argument of a wrong type.
    """
    given = {"select": select, "memory_bytes": memory_bytes, "step": step}
    checks.check("transfer", given, _TRANSFER, error=ArgumentError)
    select = [select] if isinstance(select, str) else select
    started, budget = time.perf_counter(), TransferBudget.of(memory_bytes)
    chosen = choose(source, select)
    _check_shapes(chosen, origin=source.origin)
    sink.begin(chosen.specs, aliases=chosen.aliases, values=chosen.values, step=step)
    if isinstance(sink, OrderedSink):
        pieces = sink.pieces(budget.piece_bytes)
    else:
        pieces = in_order(chosen.specs, most_bytes=budget.piece_bytes)
    nbytes = 0
    with closing(_read_ahead(source, chosen, pieces, budget)) as ready:
        for (fqn, box), data in ready:
            done = data.nbytes
            sink.write(fqn, box, data)
            del data
            nbytes += done
            progress(done)
    sink.finish()
    return Transferred(
        tensors=len(chosen.specs),
        aliases=len(chosen.aliases),
        values=len(chosen.values),
        bytes=nbytes,
        seconds=time.perf_counter() - started,
    )


def _check_shapes(chosen: TransferSelection, *, origin: str) -> None:
    """Refuse tensors that cannot exist, whatever their source says, before anything is made."""
    for fqn, spec in chosen.specs.items():
        if fault := fault_of_shape(spec.shape, None, itemsize=itemsize_of(spec)):
            raise CorruptError(
                f"{origin}: tensor {chosen.stored[fqn]}: {fault}; restore it from a copy"
            )


def in_order(specs: Mapping[str, TensorSpec], *, most_bytes: int) -> Iterator[Piece]:
    """Yield the pieces of one tensor after the other."""
    for fqn, spec in specs.items():
        for box in cut(whole(spec.shape), itemsize=itemsize_of(spec), most_bytes=most_bytes):
            yield fqn, box


def _read_ahead(
    source: TensorSource, chosen: TransferSelection, pieces: Iterable[Piece], budget: TransferBudget
) -> Generator[tuple[Piece, memoryview], None, None]:
    """Yield the pieces in order with their bytes, while threads read the next ones."""
    parallel = bool(getattr(source, "parallel", False))
    sizes = {fqn: itemsize_of(spec) for fqn, spec in chosen.specs.items()}

    def load(fqn: str, box: Box) -> memoryview:
        data = source.read(chosen.stored[fqn], box)
        needed = box.size * sizes[fqn]
        if data.nbytes != needed:
            raise CorruptError(
                f"{source.origin}: tensor {chosen.stored[fqn]}: {data.nbytes} bytes came for "
                f"{box}, {needed} are needed; check the source"
            )
        return data if parallel else memoryview(bytearray(data))

    ahead: deque[tuple[Piece, int, Future[memoryview]]] = deque()
    waiting, flying = iter(pieces), 0
    with ThreadPoolExecutor(budget.threads if parallel else 1, thread_name_prefix="read") as pool:
        try:
            while True:
                while not ahead or flying < budget.ahead_bytes:
                    if (piece := next(waiting, None)) is None:
                        break
                    nbytes = piece[1].size * sizes[piece[0]]
                    ahead.append((piece, nbytes, pool.submit(load, *piece)))
                    flying += nbytes
                if not ahead:
                    return
                piece, nbytes, future = ahead.popleft()
                data = future.result()
                del future
                yield piece, data
                del data
                flying -= nbytes
        finally:
            for _, _, future in ahead:
                future.cancel()
