"""Section plan: planning from one mesh to another at 64 to 16,384 ranks.

One rank's part and the whole plan are timed, on two models of 1,000 tensors: a transformer with
equal layers, whose tables share most columns; and the same with a different width in every layer,
where little can be shared and uneven cuts are the rule. Both are laid out as FSDP2 over tensor
parallelism, and go to a mesh with half the tensor parallelism. The peer is the planner of torch's
DCP, for one rank and only at feasible sizes: each rank examines every saved chunk.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.geometry.layout import Box, Split, TensorSpec
from holdfast.ckpt.geometry.meshplan import MeshPlan, Moves, forget
from holdfast.ckpt.geometry.partition import MeshLayout, Partition, Placed
from holdfast.tools.bench.samples import BenchSetup, Figure

WORLDS: Final = (64, 256, 1024, 4096, 16384)
QUICK_WORLDS: Final = (64, 256, 1024)
PEER_WORLDS: Final = (64, 256)
"""Beyond these the peer needs minutes, and gigabytes of chunk descriptions."""

TENSORS: Final = 1000
MIB: Final = 1 << 20
_MODELS: Final = {"alike": 0, "all different": 8}
"""Name -> difference in width from one layer to the next."""

Wanted: TypeAlias = dict[str, list[ChunkStorageMetadata]]

_SAVED_TP, _WANTED_TP = 8, 4
_WIDTH, _HIDDEN, _KEYS, _WORDS = 8192, 28672, 2048, 131072


def plan(setup: BenchSetup, *, worlds: Sequence[int] | None = None) -> list[Figure]:
    """Measure every world size; only the shapes matter, not the size of the state."""
    worlds = worlds or (QUICK_WORLDS if setup.quick else WORLDS)
    found: list[Figure] = []
    for model, step in _MODELS.items():
        for world in worlds:
            name = f"{world} ranks, {model}"
            saved = transformer((world // _SAVED_TP, _SAVED_TP), step=step)
            wanted = transformer((world // _WANTED_TP, _WANTED_TP), step=step)
            found += _measured(name, saved, wanted, setup)
    return found


def transformer(mesh: tuple[int, int], *, step: int) -> MeshLayout:
    """Return 1,000 parameters on a mesh of FSDP by tensor parallel; layers grow by ``step``."""
    columns = (Split(dim=0, after=mesh[1]), Split(dim=0))
    rows, norms = (Split(dim=0), Split(dim=1)), (Split(dim=0), None)
    shapes: dict[str, tuple[tuple[int, ...], tuple[Split | None, ...]]] = {
        "embed": ((_WORDS, _WIDTH), rows),
        "head": ((_WORDS, _WIDTH), columns),
        "norm": ((_WIDTH,), norms),
        "step": ((), (None, None)),
    }
    layer = 0
    while len(shapes) < TENSORS:
        wide, hidden, keys = (n + step * layer for n in (_WIDTH, _HIDDEN, _KEYS))
        kinds = {
            "query": ((wide, wide), columns),
            "key_value": ((keys, wide), columns),
            "out": ((wide, wide), rows),
            "gate": ((hidden, wide), columns),
            "up": ((hidden, wide + step), columns),
            "down": ((wide, hidden), rows),
            "norm_in": ((wide,), norms),
            "norm_out": ((wide + step,), norms),
        }
        for kind, placed in list(kinds.items())[: TENSORS - len(shapes)]:
            shapes[f"layers.{layer}.{kind}"] = placed
        layer += 1
    return MeshLayout(
        mesh=mesh,
        tensors={
            fqn: Placed(
                spec=TensorSpec(fqn=fqn, dtype="bfloat16", shape=shape),
                axes=axes,
                nested=any(s is not None and s.after > 1 for s in axes),
            )
            for fqn, (shape, axes) in shapes.items()
        },
    )


def _measured(
    name: str, saved: MeshLayout, wanted: MeshLayout, setup: BenchSetup
) -> Iterator[Figure]:
    """Time one rank's part, of another rank each time, and the whole plan, with empty caches."""
    own: list[float] = []
    full: list[float] = []
    written: list[float] = []
    peer: list[float] = []
    dcp = _Peer(saved, wanted) if saved.world_size in PEER_WORLDS else None
    overlaps = 0
    for number in range(setup.repeat + 1):
        rank = number * 7919 % wanted.world_size
        seconds, (ours, _) = _timed(_own, saved, wanted, rank)
        own.append(seconds)
        if dcp is not None:
            seconds, theirs = _timed(dcp.plan, dcp.wanted(rank))
            peer.append(seconds)
            if theirs != ours:
                raise CkptError(f"rank {rank}: {ours} copies, DCP has {theirs}; report this")
        seconds, (overlaps, nbytes) = _timed(_whole, saved, wanted)
        full.append(seconds)
        written.append(_timed(_write, nbytes)[0])
        setup.lap()
    yield _seconds(f"{name}: one rank's plan", own[1:], "DCP's planner", peer[1:])
    yield _seconds(f"{name}: whole plan", full[1:], "writing its columns", written[1:])
    yield _exact(f"{name}: copies", overlaps, "copies")
    yield _exact(f"{name}: copies planned", overlaps / statistics.median(full[1:]), "copies/s")
    yield _exact(f"{name}: peak memory", _peak_mib(saved, wanted), "MiB")


def _timed(work: Callable[..., Any], *given: object) -> tuple[float, Any]:
    forget()
    started = time.perf_counter()
    found = work(*given)
    return time.perf_counter() - started, found


def _own(saved: MeshLayout, wanted: MeshLayout, rank: int) -> tuple[int, int]:
    return _rows(MeshPlan(saved=saved, wanted=wanted).of(rank))


def _whole(saved: MeshLayout, wanted: MeshLayout) -> tuple[int, int]:
    return _rows(MeshPlan(saved=saved, wanted=wanted).stream())


def _rows(tables: Iterator[Moves]) -> tuple[int, int]:
    """Return the number of rows in the tables, and the bytes of columns that they do not share."""
    rows = nbytes = 0
    last: Moves | None = None
    for table in tables:
        rows += len(table)
        if table.source is not (last.source if last else None):
            nbytes += table.source.nbytes
        if table.target is not (last.target if last else None):
            nbytes += sum(c.nbytes for c in (table.target, table.cell, table.box))
            nbytes += sum(c.nbytes for c in (table.src, table.dst, table.shape))
        last = table
    return rows, nbytes


def _write(nbytes: int) -> None:
    """Write that many bytes in the way tables are written: repeatedly, one column at a time."""
    column = np.empty(min(nbytes, 1 << 19) or 1, dtype=np.uint8)
    for at in range(0, nbytes, len(column)):
        column[: min(len(column), nbytes - at)] = 1


def _peak_mib(saved: MeshLayout, wanted: MeshLayout) -> float:
    """Return the peak memory while planning, as Python's tracemalloc counts it."""
    forget()
    tracemalloc.start()
    try:
        _whole(saved, wanted)
        return tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()


class _Peer:
    """DCP's planning for one rank: its own arithmetic on the descriptions of all chunks."""

    def __init__(self, saved: MeshLayout, wanted: MeshLayout) -> None:
        self._wanted = wanted
        self._saved: dict[str, TensorStorageMetadata] = {}
        known: dict[object, list[ChunkStorageMetadata]] = {}
        for fqn, placed in saved.tensors.items():
            key = (placed.spec.shape, placed.axes)
            if key not in known:
                known[key] = _chunks(saved.partition(fqn))
            self._saved[fqn] = TensorStorageMetadata(
                properties=TensorProperties(dtype=torch.bfloat16),
                size=torch.Size(placed.spec.shape),
                chunks=known[key],
            )

    def wanted(self, rank: int) -> Wanted:
        """Return the chunks that a rank wants of each tensor, none for an empty shard."""
        return {
            fqn: [_chunk(box) for box in self._wanted.boxes(fqn, rank)]
            for fqn in self._wanted.tensors
        }

    def plan(self, wanted: Wanted) -> int:
        """Return the number of items to read."""
        return sum(
            len(create_read_items_for_chunk_list(fqn, self._saved[fqn], chunks))
            for fqn, chunks in wanted.items()
        )


def _chunks(partition: Partition) -> list[ChunkStorageMetadata]:
    return [_chunk(partition.box(cell)) for cell in range(partition.cells)]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.shape))


def _seconds(name: str, samples: Sequence[float], versus: str, others: Sequence[float]) -> Figure:
    value = statistics.median(samples)
    return Figure(
        section="plan",
        name=name,
        value=value,
        unit="s",
        low=min(samples),
        high=max(samples),
        versus=versus if others else None,
        ratio=value / statistics.median(others) if others else None,
    )


def _exact(name: str, value: float, unit: str) -> Figure:
    return Figure(section="plan", name=name, value=value, unit=unit, low=value, high=value)


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print one line per world size and model."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in ("one rank", "min–max", "× DCP", "whole", "min–max", "× writing"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("copies", "copies/s", "peak MiB"):
        table.add_column(title, justify="right", no_wrap=True)
    lines: dict[str, dict[str, Figure]] = {}
    for figure in figures:
        line, _, what = figure.name.partition(": ")
        lines.setdefault(line, {})[what] = figure
    for line, found in lines.items():
        table.add_row(line, *_cells(found))
    console.print(table)


def _cells(found: Mapping[str, Figure]) -> Iterator[str]:
    for what in ("one rank's plan", "whole plan"):
        figure = found[what]
        yield f"{figure.value:.3f} s"
        yield f"{figure.low:.3f}–{figure.high:.3f}"
        yield "" if figure.ratio is None else f"{figure.ratio:.3g}"
    yield f"{found['copies'].value:,.0f}"
    yield f"{found['copies planned'].value / 1e6:.1f} M"
    yield f"{found['peak memory'].value:.1f}"
