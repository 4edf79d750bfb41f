"""Bugs of the data plane in memory, found by a small job with real sidecars, run as threads.

The job makes a few steps on three or four nodes: captures go into real slots, real sidecars compute
parity, and restores take the path of production, from inventory to the last byte. Under a seed
nodes are lost, bits flip, and writers of an older generation continue. The history is judged
against that of the undisturbed job.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from doubles.blocks import make_world

from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.memory.arena import ARENA_ROOT, SlotFile, arena_path
from holdfast.ckpt.memory.block import block_bytes
from holdfast.ckpt.memory.fixed_files import HEADER_BYTES
from holdfast.ckpt.memory.records import RestorePoint, SnapshotWorld
from holdfast.ckpt.parity.stripes import restore_points
from holdfast.ckpt.recovery.fallback import first_course, next_course
from holdfast.ckpt.recovery.memory_source import MemorySource
from holdfast.ckpt.recovery.replica import Replica, refresh
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.sidecar.config import SidecarConfig
from holdfast.ckpt.sidecar.core.lease_page import LeasePage
from holdfast.ckpt.sidecar.server import Sidecar
from holdfast.ckpt.state.restore import restore
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.tracked.cursor import Cursor
from mutants.bug import Bug
from mutants.training import (
    SmallJobHistory,
    digest_of,
    judged,
    new_state,
    shards,
    steps_of,
    tell_step,
    train,
)

_STEPS: Final = 6
_INDEX_ROOM_BYTES: Final = 4096
_PATIENCE_S: Final = 20.0
_KINDS: Final = ("lose", "flip", "late flip", "old writer", "lease")
_READER: Final = 4
"""The rank under which the reader of weights reports its state."""

_ORDINALS = itertools.count()


def trial(seed: int) -> str:
    """Run the job of a seed; return the defect of its history, or ""."""
    job = _MemoryJob(seed)
    try:
        job.run()
        return judged(
            job.reported, steps=_STEPS, width=job.width, ranks_most=_READER + 1, undone_most=0
        )
    finally:
        job.close()


@dataclass(slots=True, kw_only=True)
class _Node:
    """A node: its sidecar, a client of it, and the page with the end of its lease."""

    sidecar: Sidecar
    client: SidecarClient
    page: LeasePage


@dataclass(slots=True, kw_only=True)
class _OldWriter:
    """A rank of an ended generation, with the slot that it was writing."""

    node: str
    rank: int
    generation: int
    step: int
    file: SlotFile
    nbytes: int


class _MemoryJob:
    """The job of a seed; ``reported`` is its history."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(f"planted memory {seed}")
        self.reported = SmallJobHistory()
        self.width = self._draw.choice((60, 700, 2500))
        self._parity = self._draw.choice((1, 1, 2))
        self._names = "abcd"[: self._draw.choice((3, 3, 4)) + self._parity - 1][:4]
        self._run = f"planted-{os.getpid()}-{next(_ORDINALS)}"
        self._key = RunKey.new()
        self._nodes: dict[str, _Node] = {}
        self._generation = 0
        self._world: SnapshotWorld
        self._state = new_state(self.width)
        self._old: list[_OldWriter] = []
        self._replica = Replica()
        at = self._draw.sample(range(1, _STEPS), 2)
        self._strikes = {step: self._draw.choice(_KINDS) for step in at}
        self._lost = 0

    def run(self) -> None:
        """Train to the end, under all faults."""
        for name in self._names:
            self._nodes[name] = self._start(name)
        self._begin(None)
        while steps_of(self._state) < _STEPS:
            train(self._state, ranks=self._ranks, attempt=self._generation, reported=self.reported)
            self._snapshot()
            tell_step(
                self._state, ranks=self._ranks, attempt=self._generation, reported=self.reported
            )
            self._pull()
            self._go_on_with_old_writers()
            if kind := self._strikes.pop(steps_of(self._state), ""):
                self._hurt(kind)
        self._reform(late=None)  # the snapshot at the end must be restorable as well
        if steps_of(self._state) != _STEPS:
            train(self._state, ranks=self._ranks, attempt=self._generation, reported=self.reported)
            tell_step(
                self._state, ranks=self._ranks, attempt=self._generation, reported=self.reported
            )

    def close(self) -> None:
        """Remove all nodes and arenas."""
        for node in self._nodes.values():
            node.client.close()
            node.sidecar.close(remove=True)
        for left in ARENA_ROOT.glob(f"holdfast-{self._run}-*"):
            shutil.rmtree(left, ignore_errors=True)

    # -- nodes and generations -------------------------------------------------------------------

    def _start(self, name: str) -> _Node:
        page = LeasePage.create(name)
        config = SidecarConfig(
            run=self._run,
            node=name,
            key_file="",
            arena_dir=str(arena_path(self._run, name)),
            lease_fd=page.fd,
        )
        sidecar = Sidecar(config, self._key)
        return _Node(sidecar=sidecar, client=SidecarClient(sidecar.address, self._key), page=page)

    @property
    def _ranks(self) -> int:
        return len(self._world.rank_nodes)

    def _client(self, rank: int) -> SidecarClient:
        return self._nodes[self._world.rank_nodes[rank]].client

    def _begin(self, point: RestorePoint | None) -> None:
        """Begin the next generation on all living nodes."""
        self._generation += 1
        names = sorted(self._nodes)
        ranks = self._draw.randint(max(len(names) - 1, 1), len(names))
        self._world = make_world(
            {name: node.sidecar.address for name, node in sorted(self._nodes.items())},
            run=self._run,
            rank_nodes=sorted(self._draw.sample(names, ranks)),
            generation=self._generation,
            parity=min(self._parity, len(names) - 1),
        )
        for node in self._nodes.values():
            node.client.adopt(self._world, restore=point)

    def _snapshot(self) -> None:
        step = steps_of(self._state)
        for rank, (index, payload) in enumerate(
            shards(self._state, ranks=self._ranks, generation=self._generation)
        ):
            slot_id, file = self._acquire(rank, step, len(payload))
            file.block(len(payload))[:] = payload
            self._client(rank).seal(slot_id=slot_id, entry=file.finish(index))
            file.close()
        for node in self._nodes.values():
            reached = node.client.protected_step(
                generation=self._generation, at_least=step, timeout_s=_PATIENCE_S
            )
            if reached < step:
                raise TimeoutError(f"step {step} is not protected, {reached} is")

    def _pull(self) -> None:
        """Update a reader's copy of the weights, as rollout workers do."""
        step, client = steps_of(self._state), self._nodes[min(self._nodes)].client
        with self._source(client.locate(generation=self._generation, step=step)) as source:
            refresh(self._replica, source, ["w", "frozen"])
        weights = digest_of(self._replica.tensors)
        self.reported.state(step, _READER, self._generation, weights)

    def _acquire(self, rank: int, step: int, nbytes: int) -> tuple[int, SlotFile]:
        grant = self._client(rank).acquire(
            generation=self._generation,
            step=step,
            rank=rank,
            size_bytes=nbytes + _INDEX_ROOM_BYTES,
            timeout_s=_PATIENCE_S,
        )
        return grant.slot_id, SlotFile.open(grant.path)

    def _reform(self, *, late: Callable[[RestorePoint], None] | None) -> None:
        """Take inventories, begin the next generation, and restore as production does.

        ``late`` is called between the plan and the reading.
        """
        inventories = [node.client.inventory() for node in self._nodes.values()]
        points, _ = restore_points(inventories)
        points.sort(key=lambda point: (point.step, point.world.generation), reverse=True)
        self._begin(points[0] if points else None)
        if late is not None and points:
            late(points[0])
        self._state = new_state(self.width)
        course = first_course(points[0] if points else None, points[1:], nodes=self._nodes)
        while course.point is not None:
            source = self._source(course.point)
            with source:
                try:
                    restore(self._state, source, rank=0)
                    break
                except CkptError as error:
                    source.distrust()
                    course = next_course(course, source.faults_of(error))
        if points and course.point is not points[0]:
            for node in self._nodes.values():
                node.client.roll_back(self._generation, restore=course.point)
        self._snapshot()

    def _source(self, point: RestorePoint) -> MemorySource:
        name = min(self._nodes)
        return MemorySource(
            point,
            local=self._nodes[name].client,
            local_node=name,
            addresses={each: node.sidecar.address for each, node in self._nodes.items()},
            key=self._key,
        )

    # -- faults ------------------------------------------------------------------------------------

    def _hurt(self, kind: str) -> None:
        name = self._draw.choice(sorted(self._nodes))
        late: Callable[[RestorePoint], None] | None = None
        if kind == "old writer":
            self._leave_writers()
            self._reform(late=None)
            self._overwrite()
        elif kind == "flip":
            self._flip(self._draw.randrange(self._ranks), self._world, steps_of(self._state))
        elif kind == "late flip":
            late = partial(self._flip_in, self._draw.randrange(self._ranks))
        elif self._lost < self._parity and len(self._nodes) > 1:
            self._lost += 1
            if kind == "lease":
                self._expire(name)
                return
            node = self._nodes.pop(name)
            node.client.close()
            node.sidecar.close(remove=True)
        self._reform(late=late)

    def _flip_in(self, rank: int, point: RestorePoint) -> None:
        self._flip(rank, point.world, point.step)

    def _flip(self, rank: int, world: SnapshotWorld, step: int) -> None:
        """Flip a bit of a block in place."""
        sidecar = self._nodes[world.rank_nodes[rank]].sidecar
        with sidecar.core.lock:
            slot = next(
                slot
                for slot in sidecar.core.slots.all()
                if slot.key == (world.generation, step, rank) and slot.entry is not None
            )
        whole = block_bytes(slot.entry) if slot.entry else 0
        at, bit = HEADER_BYTES + self._draw.randrange(whole), 1 << self._draw.randrange(8)
        with slot.file.path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ bit]))

    def _leave_writers(self) -> None:
        """Begin the next snapshot on all ranks, which they do not finish in this generation."""
        step = steps_of(self._state) + 1
        for rank, (index, payload) in enumerate(
            shards(self._state, ranks=self._ranks, generation=self._generation)
        ):
            _, file = self._acquire(rank, step, len(payload))
            self._old.append(
                _OldWriter(
                    node=self._world.rank_nodes[rank],
                    rank=rank,
                    generation=self._generation,
                    step=step,
                    file=file,
                    nbytes=index.payload_bytes,
                )
            )

    def _overwrite(self) -> None:
        """Let writers of older generations go on writing into their slots."""
        for writer in self._old:
            writer.file.block(writer.file.capacity)[:] = b"\x55" * writer.file.capacity
            writer.file.close()

    def _go_on_with_old_writers(self) -> None:
        """Let writers of older generations go on as if nothing had happened."""
        for writer in self._old:
            if writer.node in self._nodes:
                self._go_on(self._nodes[writer.node].client, writer)
        self._old.clear()

    def _go_on(self, client: SidecarClient, writer: _OldWriter) -> None:
        """Act as a rank that does not know of its generation's end: the sidecar must refuse it."""
        with suppress(CkptError):
            client.acquire(
                generation=writer.generation,
                step=writer.step + 1,
                rank=writer.rank,
                size_bytes=writer.nbytes + _INDEX_ROOM_BYTES,
                timeout_s=0.0,
            )
            self.reported.step(writer.step, writer.rank, writer.generation)

    def _expire(self, name: str) -> None:
        """Stop a node's agent: its lease ends, and the others go on without the node."""
        old, ranks = self._world, self._world.rank_nodes
        writer = next((rank for rank, node in enumerate(ranks) if node == name), None)
        node = self._nodes.pop(name)
        node.page.extend(time.monotonic_ns() - 1)
        step = steps_of(self._state)
        self._reform(late=None)
        train(self._state, ranks=self._ranks, attempt=self._generation, reported=self.reported)
        self._snapshot()
        tell_step(self._state, ranks=self._ranks, attempt=self._generation, reported=self.reported)
        if writer is not None:
            with suppress(CkptError):
                node.client.acquire(
                    generation=old.generation,
                    step=step + 1,
                    rank=writer,
                    size_bytes=_INDEX_ROOM_BYTES,
                    timeout_s=0.0,
                )
                self.reported.step(step + 1, writer, old.generation)
        node.client.close()
        node.sidecar.close(remove=True)


# -- the bugs --------------------------------------------------------------------------------------


def _counts_as_fetched_what_is_not(real: Callable[..., Any]) -> Any:
    def refresh(replica: Replica, source: MemorySource, fqns: Iterable[str]) -> Any:
        for index in source.indexes() if replica.sums else ():
            for ref in index.chunks():
                replica.sums.setdefault(ref.fqn, {})[ref.chunk.box] = ref.chunk.crc32c
        return real(replica, source, fqns)

    return refresh


def _finds_everything_intact(_real: Any) -> Any:
    return lambda slot: True


def _checks_nothing_it_restores(_real: Any) -> Any:
    return lambda self, ref, crc: None


def _gives_slots_of_old_writers_away(_real: Any) -> Any:
    from holdfast.ckpt.memory.block import SlotState

    def adopted(self: Any) -> None:
        for slot in self._core.slots.all():
            if slot.state is SlotState.WRITING:
                self._core.slots.release(slot)

    return adopted


def _ignores_the_lease(_real: Any) -> Any:
    return property(lambda self: False)


def _checks_no_generation(_real: Any) -> Any:
    def check(self: Any, generation: int, rank: int) -> SnapshotWorld:
        self._check_lease(generation)
        return self._core.book.world  # type: ignore[no-any-return]

    return check


def _counts_pieces_from_one(_real: Any) -> Any:
    def piece_of(self: Any, stripe: int, column: int) -> int:
        k = int(self._rings[stripe].k)
        return (k - column) % k

    return piece_of


def _takes_any_step(_real: Any) -> Any:
    def holding(self: Any, key: tuple[int, int, int]) -> Any:
        for slot in self._table.values():
            alike = slot.key is not None and (slot.key[0], slot.key[2]) == (key[0], key[2])
            if alike and slot.entry is not None and not slot.leaving:
                return slot
        return None

    return holding


def _cursor_is_ahead(real: Callable[[Cursor], dict[str, Any]]) -> Any:
    def state_dict(self: Cursor) -> dict[str, Any]:
        state = real(self)
        return {**state, "step": state["step"] + 1}

    return state_dict


def _weighs_by_one_less(real: Callable[..., Any]) -> Any:
    return lambda self, total, grid, *, terms: real(self, total, grid, terms=terms - 1)


def _leaves_the_remainder_out(_real: Any) -> Any:
    def part(
        microbatches: int, *, rank: int, ranks: int, shares: tuple[int, ...] = (), abreast: int = 1
    ) -> range:
        each = microbatches // ranks
        return range(rank * each, (rank + 1) * each)

    return part


def _skips_the_end_of_an_epoch(real: Callable[..., list[int]]) -> Any:
    def sample_indices(wanted: range, *, samples: int, seed: int) -> list[int]:
        return real(wanted, samples=samples - 1, seed=seed)

    return sample_indices


def _bug(name: str, about: str, where: str, broken: Callable[[Any], Any], seed: int) -> Bug:
    return Bug(name=name, about=about, where=where, broken=broken, trial="memory", seed=seed)


BUGS: Final = (
    _bug(
        "damage-denied",
        "a block that a reader found damaged is still served",
        "holdfast.ckpt.sidecar.reading.operations:is_intact",
        _finds_everything_intact,
        3,
    ),
    _bug(
        "restore-unchecked",
        "restored bytes are not compared with their checksum",
        "holdfast.ckpt.recovery.memory_source:MemorySource._require",
        _checks_nothing_it_restores,
        3,
    ),
    _bug(
        "buffer-reused",
        "a slot that an old writer still maps is given to another writer",
        "holdfast.ckpt.sidecar.writing.operations:WriteOperations.adopted",
        _gives_slots_of_old_writers_away,
        6,
    ),
    _bug(
        "self-fence-skipped",
        "a sidecar accepts snapshots after its node's lease has expired",
        "holdfast.ckpt.sidecar.core.lease_page:LeasePage.expired",
        _ignores_the_lease,
        2,
    ),
    _bug(
        "old-writer-served",
        "a writer of an ended generation gets a slot",
        "holdfast.ckpt.sidecar.writing.operations:WriteOperations._check",
        _checks_no_generation,
        0,
    ),
    _bug(
        "stripe-off-by-one",
        "the pieces of a node's block are counted from one",
        "holdfast.ckpt.parity.stripes:Geometry.piece_of",
        _counts_pieces_from_one,
        0,
    ),
    _bug(
        "steps-mixed",
        "a rank's block of any step is served",
        "holdfast.ckpt.sidecar.core.slots:Slots.holding",
        _takes_any_step,
        0,
    ),
    _bug(
        "weights-early",
        "published weights count as fetched before they are read",
        "holdfast.ckpt.recovery.replica:refresh",
        _counts_as_fetched_what_is_not,
        0,
    ),
    _bug(
        "cursor-early",
        "the saved cursor is a step ahead of the weights",
        "holdfast.elastic.tracked.cursor:Cursor.state_dict",
        _cursor_is_ahead,
        0,
    ),
    _bug(
        "wrong-weight",
        "the mean omits one microbatch",
        "holdfast.elastic.gradients.exact:Method.mean",
        _weighs_by_one_less,
        0,
    ),
    _bug(
        "remainder-lost",
        "the remainder of microbatches that do not divide evenly is omitted",
        "holdfast.elastic.planning.shares:part",
        _leaves_the_remainder_out,
        0,
    ),
    _bug(
        "epoch-short",
        "the last sample of every epoch is skipped",
        "holdfast.elastic.data.sampler:sample_indices",
        _skips_the_end_of_an_epoch,
        0,
    ),
)
