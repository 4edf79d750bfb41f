"""Section plan: a step of up to 16,384 writers is committed, opened and planned for one rank.

A transformer of 1,000 tensors, as saved by pipeline stages of FSDP × TP: each stage has a part of
the layers, and each of its ranks a piece of every tensor there. The packs are empty files of the
right size; indexes, receipts and the commit are those of a real step. One rank of a job with half
the tensor parallelism opens the step and plans its copies. At the smallest size the same step is
also committed without a register, and opened by reading the index of every writer.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

from rich.console import Console

from holdfast.ckpt.checkpoints.catalog import step_folder
from holdfast.ckpt.checkpoints.commit import WriterReceipt, commit
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.format.manifest import (
    ALIGN,
    CRC_BYTES,
    FORMAT,
    MANIFEST,
    FileRecord,
    PackedChunk,
    PackedTensor,
    PackIndex,
    WriterRecord,
)
from holdfast.ckpt.format.sealed import seal
from holdfast.ckpt.geometry.grid import common_grid
from holdfast.ckpt.geometry.layout import (
    Box,
    Split,
    TensorSpec,
    is_nested,
    regions_of,
    shard_runs,
)
from holdfast.ckpt.geometry.reshard import Wanted
from holdfast.ckpt.geometry.reshard import plan as plan_copies
from holdfast.ckpt.native.crc import BLOCK_BYTES
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.state.saved import SavedState
from holdfast.tools.bench.samples import BenchSetup, Figure, by_line, stopwatch
from holdfast.tools.environment import resident_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedJob:
    """A job of pipeline ``stages``, each a mesh of ``dp`` × ``tp`` ranks."""

    stages: int
    dp: int
    tp: int

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.stages * self.dp * self.tp


JOBS: Final = (
    StagedJob(stages=4, dp=32, tp=8),
    StagedJob(stages=8, dp=64, tp=8),
    StagedJob(stages=16, dp=128, tp=8),
)
QUICK_JOBS: Final = (StagedJob(stages=4, dp=8, tp=8),)
TENSORS: Final = 1000
MIB: Final = 1 << 20
_STEP: Final = 1
_RUN: Final = "bench"
_EVERY: Final = 1 << 30
_WIDTH, _HIDDEN, _KEYS, _WORDS = 8192, 28672, 2048, 131072
_COLUMNS: Final = {
    "commit": "commit",
    "memory of the commit": "its memory",
    "open and plan one rank": "one rank",
    "bytes read": "reads",
    "of its tensors' entries": "of its tensors' entries",
    "register": "register",
    "chunks": "chunks",
}


def plan(setup: BenchSetup, *, jobs: Sequence[StagedJob] | None = None) -> list[Figure]:
    """Measure every size of a job; only the shapes matter, not the size of the state."""
    found: list[Figure] = []
    for number, job in enumerate(jobs or (QUICK_JOBS if setup.quick else JOBS)):
        setup.say(f"{job.world_size:,} writers: their files are made")
        step = SyntheticStep(setup.directory / "writers", job)
        found += _measured(step, setup, with_peer=number == 0)
        shutil.rmtree(step.root)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTensor:
    """A tensor, and the axes that cut it."""

    spec: TensorSpec
    axes: tuple[Split | None, ...]

    def boxes(self, mesh: tuple[int, int], rank: int) -> tuple[Box, ...]:
        """Return the boxes that a rank of the mesh holds."""
        runs = shard_runs(
            self.spec.shape,
            mesh=mesh,
            coordinate=divmod(rank, mesh[1]),
            axes=self.axes,
            nested=is_nested(mesh=mesh, axes=self.axes),
        )
        return tuple(region.box for region in regions_of(runs) if region.box.size)


def transformer(tp: int) -> dict[str, PlacedTensor]:
    """Return 1,000 parameters of equal layers, cut by FSDP and by ``tp`` tensor parallel ranks."""
    columns = (Split(dim=0, after=tp), Split(dim=0))
    rows, norms = (Split(dim=0), Split(dim=1)), (Split(dim=0), None)
    shapes: dict[str, tuple[tuple[int, ...], tuple[Split | None, ...]]] = {
        "embed": ((_WORDS, _WIDTH), rows),
        "head": ((_WORDS, _WIDTH), columns),
        "norm": ((_WIDTH,), norms),
        "step": ((), (None, None)),
    }
    layer = 0
    while len(shapes) < TENSORS:
        kinds = {
            "query": ((_WIDTH, _WIDTH), columns),
            "key_value": ((_KEYS, _WIDTH), columns),
            "out": ((_WIDTH, _WIDTH), rows),
            "gate": ((_HIDDEN, _WIDTH), columns),
            "up": ((_HIDDEN, _WIDTH), columns),
            "down": ((_WIDTH, _HIDDEN), rows),
            "norm_in": ((_WIDTH,), norms),
            "norm_out": ((_WIDTH,), norms),
        }
        for kind, placed in list(kinds.items())[: TENSORS - len(shapes)]:
            shapes[f"layers.{layer}.{kind}"] = placed
        layer += 1
    return {
        fqn: PlacedTensor(spec=TensorSpec(fqn=fqn, dtype="bfloat16", shape=shape), axes=axes)
        for fqn, (shape, axes) in shapes.items()
    }


_Cut = tuple[dict[int, tuple[Box, ...]], tuple[int, ...] | None]


class SyntheticStep:
    """A step whose packs are written, and empty: its files below ``root``, and the receipts."""

    def __init__(self, root: Path, job: StagedJob) -> None:
        self.root, self.job = root, job
        self.folder = root / step_folder(_STEP)
        self._random = Random(0)
        for part in ("data", "index"):
            (self.folder / part).mkdir(parents=True)
        self._saved = transformer(job.tp)
        self._cuts: dict[object, _Cut] = {}
        self.chunks = [0] * job.stages
        """The chunks of each stage's tensors."""
        self.receipts = [
            receipt for stage in range(job.stages) for receipt in self._stage_receipts(stage)
        ]

    def names(self, stage: int) -> list[str]:
        """Return the tensors of a stage."""
        names = list(self._saved)
        return [fqn for n, fqn in enumerate(names) if n * self.job.stages // len(names) == stage]

    def wanted(self, rank: int) -> Wanted:
        """Return the boxes of a rank of the same job with half the tensor parallelism."""
        job = self.job
        mesh, tensors = (2 * job.dp, job.tp // 2), transformer(job.tp // 2)
        stage, inner = divmod(rank, job.dp * job.tp)
        return {
            fqn: (tensors[fqn].spec, tensors[fqn].boxes(mesh, inner)) for fqn in self.names(stage)
        }

    def commit(self, *, register_from: int) -> None:
        """Commit the step, as if it had not been."""
        for path in (self.folder / MANIFEST, *self.folder.glob("index/register-*")):
            path.unlink(missing_ok=True)
        commit(
            self.root,
            run=_RUN,
            step=_STEP,
            generation=1,
            receipts=self.receipts,
            mesh={"pp": self.job.stages, "dp": self.job.dp, "tp": self.job.tp},
            register_from=register_from,
        )

    def _stage_receipts(self, stage: int) -> Iterator[WriterReceipt]:
        """Write the files of a stage's ranks; of equal pieces the first rank writes one."""
        ranks = self.job.dp * self.job.tp
        first = stage * ranks
        pieces: dict[int, dict[str, tuple[Box, ...]]] = {rank: {} for rank in range(ranks)}
        grids: dict[str, tuple[int, ...] | None] = {}
        for fqn in self.names(stage):
            boxes_of, grids[fqn] = self._cut(self._saved[fqn])
            self.chunks[stage] += sum(map(len, boxes_of.values()))
            for rank, boxes in boxes_of.items():
                pieces[rank][fqn] = boxes
        for rank, held in pieces.items():
            yield self._receipt(first + rank, held, grids)

    def _cut(self, placed: PlacedTensor) -> _Cut:
        """Return a tensor's boxes by the first rank of a stage that has them, and their grid.

        It is the same for all tensors of this shape.
        """
        key = placed.spec.shape, placed.axes
        if key not in self._cuts:
            own: dict[tuple[Box, ...], int] = {}
            for rank in range(self.job.dp * self.job.tp):
                own.setdefault(placed.boxes((self.job.dp, self.job.tp), rank), rank)
            every = [box for boxes in own for box in boxes]
            grid = common_grid(placed.spec.shape, every)
            self._cuts[key] = {rank: boxes for boxes, rank in own.items()}, grid
        return self._cuts[key]

    def _receipt(
        self,
        writer: int,
        held: Mapping[str, tuple[Box, ...]],
        grids: Mapping[str, tuple[int, ...] | None],
    ) -> WriterReceipt:
        at, tensors = 0, {}
        for fqn, boxes in held.items():
            chunks = []
            for box in boxes:
                chunk = self._chunk(box, at)
                chunks.append(chunk)
                at += -(-(chunk.nbytes + CRC_BYTES) // ALIGN) * ALIGN
            spec = self._saved[fqn].spec
            tensors[fqn] = PackedTensor(
                dtype=spec.dtype, shape=spec.shape, cell=grids[fqn], chunks=tuple(chunks)
            )
        tag = self._random.randbytes(6).hex()
        pack = FileRecord(path=f"data/{writer:05d}-g1-{tag}.pack", nbytes=at, crc32c=0)
        with (self.folder / pack.path).open("wb") as file:
            file.truncate(at)
        index = PackIndex(
            format=FORMAT,
            run=_RUN,
            step=_STEP,
            generation=1,
            writer=writer,
            world_size=self.job.world_size,
            pack=pack.path,
            pack_bytes=at,
            tensors=tensors,
        )
        data = seal(index)
        path = f"index/{writer:05d}-g1-{tag}.json"
        (self.folder / path).write_bytes(data)
        described = FileRecord(path=path, nbytes=len(data), crc32c=crc32c(data))
        return WriterReceipt(
            run=_RUN,
            generation=1,
            step=_STEP,
            world_size=self.job.world_size,
            files=WriterRecord(writer=writer, pack=pack, index=described),
        )

    def _chunk(self, box: Box, at: int) -> PackedChunk:
        nbytes = box.size * 2
        blocks = -(-nbytes // BLOCK_BYTES)
        return PackedChunk(
            box=box,
            at=at,
            nbytes=nbytes,
            crc32c=self._random.getrandbits(32),
            crc64=self._random.getrandbits(63),
            blocks=self._random.randbytes(4 * blocks) if blocks > 1 else b"",
        )


def _measured(step: SyntheticStep, setup: BenchSetup, *, with_peer: bool) -> Iterator[Figure]:
    """Time commits and openings, each of another rank; the first round is not counted."""
    commits: list[float] = []
    peer_commits: list[float] = []
    opens: list[float] = []
    peer_opens: list[float] = []
    peaks: list[float] = []
    read = own = 0.0
    world = step.job.world_size
    for number in range(setup.repeat + 1):
        wanted = step.wanted(number * 7919 % world)
        stage = number * 7919 % world // (step.job.dp * step.job.tp)
        if with_peer:
            peer_commits.append(_timed(lambda: step.commit(register_from=_EVERY)))
            peer_opens.append(_timed(partial(_open_and_plan, step, wanted)))
        with _peak_memory() as grown:
            commits.append(_timed(lambda: step.commit(register_from=1)))
        peaks.append(grown[0])
        opens.append(_timed(partial(_open_and_plan, step, wanted)))
        read, nbytes = _open_and_plan(step, wanted)
        own = nbytes * step.chunks[stage] / sum(step.chunks)
        setup.say(
            f"{world:,} writers: committed in {commits[-1]:.1f} s, "
            f"opened and planned in {opens[-1]:.2f} s"
        )
        setup.lap()
    name = f"{world} writers"
    yield _seconds(f"{name}: commit", commits[1:], peer_commits[1:])
    yield _seconds(f"{name}: open and plan one rank", opens[1:], peer_opens[1:])
    yield _exact(f"{name}: memory of the commit", max(peaks) / MIB, "MiB")
    yield _exact(f"{name}: bytes read", read / MIB, "MiB")
    yield _exact(f"{name}: of its tensors' entries", read / own, "×")
    yield _exact(f"{name}: register", nbytes / MIB, "MiB")
    yield _exact(f"{name}: chunks", sum(step.chunks), "chunks")


def _timed(work: Callable[[], object]) -> float:
    with stopwatch() as seconds:
        work()
    return seconds[0]


def _open_and_plan(step: SyntheticStep, wanted: Wanted) -> tuple[int, int]:
    """Open the step and plan the copies of one rank; return the bytes read and the register's."""
    with StoreSource(step.root, _STEP) as source:
        saved = SavedState.of(source)
        saved.part_of(source, {fqn: boxes for fqn, (_, boxes) in wanted.items()})
        copies = plan_copies(saved.places, wanted, strict=False).copies
        register = source.register
    filled = sum(copy.dst.size for copy in copies)
    if filled != (needed := sum(box.size for _, boxes in wanted.values() for box in boxes)):
        raise CkptError(f"{filled} of {needed} elements are planned; report this")
    if register is None:
        return 0, 0
    head = (step.folder / MANIFEST).stat().st_size
    return head + register.bytes_read, register.record.file.nbytes


@contextmanager
def _peak_memory() -> Iterator[list[float]]:
    """Yield a list that holds the growth of the process in bytes after the block, at its most."""
    Path("/proc/self/clear_refs").write_text("5")
    before, grown = resident_bytes(), list[float]()
    yield grown
    grown.append(resident_bytes("VmHWM") - before)


def _seconds(name: str, samples: Sequence[float], others: Sequence[float]) -> Figure:
    value = statistics.median(samples)
    return Figure(
        section="plan",
        name=name,
        value=value,
        unit="s",
        low=min(samples),
        high=max(samples),
        versus="every writer's index" if others else None,
        ratio=value / statistics.median(others) if others else None,
    )


def _exact(name: str, value: float, unit: str) -> Figure:
    return Figure(section="plan", name=name, value=value, unit=unit, low=value, high=value)


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print one line per number of writers."""
    console.print(by_line(figures, columns=_COLUMNS, cell=_cell))


def _cell(figure: Figure) -> str:
    if figure.unit == "s":
        ratio = "" if figure.ratio is None else f", {figure.ratio:.2g} × without"
        return f"{figure.value:.3f} s ({figure.low:.3f}–{figure.high:.3f}{ratio})"
    return (
        f"{figure.value:,.0f}" if figure.unit == "chunks" else f"{figure.value:.3g} {figure.unit}"
    )
