"""Section control: a control plane of 10 to 10,000 nodes with a fault every virtual second.

The decisions are the production code, on production records in the coordinator's own table; only
time is virtual. A fault is the loss of a node, the death of a worker, or the return of a lost node.
After it every node publishes that it has fenced, one node proposes, and all enter. All agents
decide from equal views, so one agent is timed: each time it looks, it updates its view and decides.
A watch delivers all changes since the last look in one message, so the messages of a change are the
writes of all nodes plus the looks of each node. The bytes written are counted as well, and what
the watches deliver: a change of a key reaches every agent that watches it, as one event. Beside it
stands what they would deliver if every agent watched every node. In a large job a generation is
divided (`holdfast.elastic.membership.divided`): its whole size stands beside what an agent reads of
it that has the one before.
"""

from __future__ import annotations

import gc
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

import msgspec
from rich.console import Console

from holdfast.ckpt.errors import HoldfastError
from holdfast.ckpt.memory.records import BlockEntry, Inventory, ParityEntry
from holdfast.ckpt.parity.stripes import Geometry
from holdfast.elastic.coordinator.base import EventKind
from holdfast.elastic.coordinator.memory import KeyValueTable
from holdfast.elastic.decisions import agree, deciding, seating
from holdfast.elastic.membership.differences import Divisible
from holdfast.elastic.membership.divided import divided, parts_of, superseded
from holdfast.elastic.membership.records import (
    Decider,
    GenerationRecord,
    JobSpec,
    NodeRecord,
    Seating,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.membership.view import (
    JobView,
    bulletin_key,
    decider_key,
    encode,
    generation_key,
    job_prefix,
    node_key,
    run_prefix,
    seating_key,
)
from holdfast.elastic.processes.garbage import collect_rarely
from holdfast.tools.bench.samples import BenchSetup, Figure, by_line

WORLDS: Final = (10, 100, 1_000, 10_000)
QUICK_WORLDS: Final = (10, 100, 1_000)
TARGET_S: Final = 0.1
_FAULTS: Final = 6
_LOOKS: Final = 4
"""Looks of an agent while all nodes publish."""

_RUN: Final = "bench"
_BLOCK_BYTES: Final = 1 << 30
_RACK: Final = 8
_COLUMNS: Final = {
    "decision": "decide",
    "proposal": "propose",
    "slowest decision": "slowest",
    "view": "view",
    "writes": "writes/change",
    "messages per node": "messages/node",
    "written": "MiB written",
    "events per node": "events/node",
    "events per node, all watching": "all watching",
    "delivered per node": "KiB/node",
    "events per node, following": "following",
    "delivered per node, following": "KiB following",
    "generation's record": "record KiB",
    "read of it": "KiB read of it",
}


def control(setup: BenchSetup, *, worlds: Sequence[int] | None = None) -> list[Figure]:
    """Measure every number of nodes; the size of the state does not matter."""
    for _ in range(setup.repeat):
        setup.lap()
    found: list[Figure] = []
    for nodes in worlds or (QUICK_WORLDS if setup.quick else WORLDS):
        found += _Plane(nodes).run(max(_FAULTS, setup.repeat)).figures()
    setup.lap()
    return found


@dataclass(slots=True)
class _Changes:
    """Changes of keys, and the bytes of keys and values in them."""

    events: int = 0
    size_bytes: int = 0


class _Costs:
    """Costs of changes; times are seconds of one agent's processor time."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.decisions_s: list[float] = []
        self.proposals_s: list[float] = []
        self.views_s: list[float] = []
        self.generations = self.writes = self.looks = self.written_bytes = 0
        self.faults = self.record_bytes = self.read_bytes = 0
        self.by_key = {True: _Changes(), False: _Changes()}

    def changed(self, key: str, text: str, *, writes: int = 1) -> None:
        """Count a change of a key; one that a lease's end makes is nobody's write."""
        self.writes += writes
        self.written_bytes += len(text)
        changes = self.by_key[key.startswith(job_prefix(_RUN))]
        changes.events += 1
        changes.size_bytes += len(key) + len(text)

    def figures(self) -> Iterator[Figure]:
        """Yield the figures of this number of nodes."""
        messages = (self.writes + self.looks * self.nodes) / self.faults
        yield self._figure("decision", self.decisions_s, against=TARGET_S)
        yield self._figure("proposal", self.proposals_s, against=TARGET_S)
        yield self._figure("slowest decision", [max(self.decisions_s)], against=TARGET_S)
        yield self._figure("view", self.views_s)
        yield self._figure("generations", [self.generations], unit="")
        yield self._figure("writes", [self.writes / self.faults], unit="writes")
        yield self._figure("messages", [messages], unit="messages")
        yield self._figure("messages per node", [messages / self.nodes], unit="messages")
        yield self._figure("written", [self.written_bytes / self.faults / (1 << 20)], unit="MiB")
        crowd = self.nodes > deciding.MOST_WATCHERS
        yield from self._delivered("", watchers=deciding.PLACES if crowd else self.nodes)
        yield from self._delivered(", all watching", watchers=self.nodes)
        if crowd:
            yield from self._delivered(", following", watchers=0)
        yield self._figure("generation's record", [self.record_bytes / 1024], unit="KiB")
        yield self._figure("read of it", [self.read_bytes / 1024], unit="KiB")

    def _delivered(self, how: str, *, watchers: int) -> Iterator[Figure]:
        """Yield what the watches deliver for a change, per node."""
        job, node = self.by_key[True], self.by_key[False]
        share = watchers / self.nodes
        events = (job.events + node.events * share) / self.faults
        size_bytes = (job.size_bytes + node.size_bytes * share) / self.faults
        yield self._figure(f"events per node{how}", [events], unit="events")
        yield self._figure(f"delivered per node{how}", [size_bytes / 1024], unit="KiB")

    def _figure(
        self, name: str, samples: Sequence[float], *, unit: str = "s", against: float = 0.0
    ) -> Figure:
        value = statistics.median(samples)
        return Figure(
            section="control",
            name=f"{self.nodes} nodes: {name}",
            value=value,
            unit=unit,
            low=min(samples),
            high=max(samples),
            versus="the target of 100 ms" if against else None,
            ratio=value / against if against else None,
        )


class _Plane:
    """The records of all nodes, the coordinator's table, and one agent that looks and decides."""

    def __init__(self, nodes: int) -> None:
        self._random = Random(nodes)
        self._table = KeyValueTable()
        self._names = [f"n{number:05}" for number in range(nodes)]
        self._wanted = {"trainer": nodes}
        self._records: dict[str, NodeRecord] = {}
        self._lost: list[str] = []
        self._view = JobView(run=_RUN, nodes={}, wanted=self._wanted)
        self._seen, self._standing_generation = agree.FirstSeen(), 0
        self._deciders: dict[int, str] = {}
        self._seats: tuple[Seating, ...] = ()
        self._crowd = nodes > deciding.MOST_WATCHERS
        self._fencing = 0
        self._now_s, self._step = 0.0, 0
        self._costs = _Costs(nodes)

    def run(self, faults: int) -> _Costs:
        """Form the first generation, then inject the faults, one every virtual second."""
        for name in self._names:
            self._start(name)
        self._elect()
        self._settle()
        self._costs = _Costs(len(self._names))
        began = self._view.number
        before = gc.get_threshold()
        collect_rarely()  # as an agent does
        try:
            for number in range(faults):
                self._now_s, self._step = self._now_s + 1.0, self._step + 1
                self._strike(number)
                self._elect()
                self._settle()
        finally:
            gc.unfreeze()
            gc.set_threshold(*before)
        self._costs.faults = faults
        self._costs.generations = self._view.number - began
        return self._costs

    def _strike(self, number: int) -> None:
        name = self._random.choice(sorted(self._records))
        if number % 3 == 2 and self._lost:
            self._start(self._lost.pop())
        elif number % 3 == 1:
            self._publish(name, lambda record: moved(record, WorkerState.DEAD))
        else:
            del self._records[name]
            self._lost.append(name)
            self._delete(node_key(_RUN, name))
            for place in [place for place, at in self._deciders.items() if at == name]:
                del self._deciders[place]
                self._delete(decider_key(_RUN, place))

    def _start(self, name: str) -> None:
        number = int(name[1:])
        record = NodeRecord(
            node=name,
            incarnation=uuid.uuid4().hex,
            domain=f"rack{number // _RACK}",
            sidecar=f"tcp://10.{number >> 16}.{number >> 8 & 255}.{number & 255}:7000",
            slots={"trainer": 1},
        )
        self._records[name] = record
        self._publish(name, lambda _: record, always=True)

    def _elect(self) -> None:
        """Give every free place of a decider to a node, as in a job of this size."""
        for place in range(deciding.PLACES if self._crowd else 0):
            if place not in self._deciders:
                name = min(self._records.keys() - self._deciders.values())
                self._deciders[place] = name
                decider = Decider(node=name, incarnation=self._records[name].incarnation)
                self._write(decider_key(_RUN, place), decider, expected=0)

    # -- the coordinator -----------------------------------------------------------------------

    def _publish(
        self, name: str, change: Callable[[NodeRecord], NodeRecord], *, always: bool = False
    ) -> None:
        record = change(self._records[name])
        if always or record != self._records[name]:
            self._records[name] = record
            self._write(node_key(_RUN, name), record, expected=None)

    def _publish_all(self, change: Callable[[NodeRecord], NodeRecord]) -> None:
        """Publish from every node; the agent looks a few times meanwhile."""
        names = sorted(self._records)
        size = -(-len(names) // _LOOKS)
        for at in range(0, len(names), size):
            for name in names[at : at + size]:
                self._publish(name, change)
            if at + size < len(names):
                self._look()

    def _write(self, key: str, value: object, *, expected: int | None) -> bool:
        return self._write_text(key, encode(value), expected=expected)

    def _write_text(self, key: str, text: str, *, expected: int | None) -> bool:
        if expected is None:
            self._table.put(key, text)
        elif not self._table.compare_and_set(key, text, expected=expected):
            return False
        self._costs.changed(key, text)
        return True

    def _write_for_all(self, key: str, record: Divisible, *, expected: int) -> None:
        """Write a record that names all nodes; in a large job divided, as an agent does."""
        is_generation = isinstance(record, GenerationRecord)
        whole = encode(record)
        if not self._crowd:
            self._write_text(key, whole, expected=expected)
        else:
            before = self._view.generation if is_generation else self._view.seating
            found = divided(key, record, base=expected, before=before)
            for part, text in found.parts.items():
                self._write_text(part, text, expected=None)
            if self._write_text(key, found.head, expected=expected):
                there = [entry.key for entry in self._table.range(parts_of(key))[0]]
                for part in superseded(key, there, base=expected, own=found.parts):
                    self._delete(part, writes=1)
        if is_generation:
            entry = self._table.get(key)
            self._costs.record_bytes = len(whole)
            self._costs.read_bytes = len(entry.value) if entry else 0

    def _delete(self, key: str, *, writes: int = 0) -> None:
        self._table.delete(key)
        self._costs.changed(key, "", writes=writes)

    # -- an agent's work -----------------------------------------------------------------------

    def _settle(self) -> None:
        """Carry out decisions until there is nothing left to do or to wait for."""
        for _ in range(1000):
            decision = self._look()
            match decision:
                case agree.Halt(generation=generation):
                    self._standing_generation = generation
                    self._tell()
                case agree.FenceWorkers(generation=generation):
                    self._fencing = generation
                    self._tell()
                    keeper = Keeper(self._view.generation, self._step)
                    self._publish_all(lambda r: keeper.fenced(r, generation))  # noqa: B023
                case agree.Propose(record=record, expected=expected):
                    self._write_for_all(generation_key(_RUN), record, expected=expected)
                    members = {member.incarnation for member in record.members}
                    self._publish_all(lambda r: entered(r, members))  # noqa: B023
                case agree.Finish(outcome=outcome):
                    raise HoldfastError(f"the simulated job ended: {outcome.message}")
                case agree.Idle(until_s=until_s) | agree.WaitForFences(until_s=until_s):
                    if not self._follow():
                        if until_s is None:
                            return
                        self._now_s = max(self._now_s, until_s)
        raise HoldfastError("the simulated control plane does not settle; report this")

    def _tell(self) -> None:
        """Publish a decider's bulletin, if the job has deciders."""
        if self._deciders:
            bulletin = deciding.tell(
                self._view,
                fencing=self._fencing,
                halting=self._standing_generation,
                reason=f"a fault of generation {self._view.number}",
            )
            if bulletin is not None:
                revision = self._view.bulletin_revision
                self._write(bulletin_key(_RUN), bulletin, expected=revision)

    def _look(self) -> agree.Decision:
        """Read the changes, decode them and decide, as an agent does."""
        prefix, revision = run_prefix(_RUN), self._table.revision
        events = self._table.events(prefix, after=self._view.revision)
        missed = any(event.kind is EventKind.RESET for event in events)
        entries, _ = self._table.range(prefix) if missed else ((), 0)
        started_s = time.process_time()
        if missed:
            self._view = JobView.from_entries(
                entries, run=_RUN, wanted=self._wanted, revision=revision, before=self._view
            )
        else:
            self._view = self._view.after(events, revision=revision)
        viewed_s = time.process_time()
        seats, _ = seating.seat(self._view, progress=self._step)
        self._seen = agree.observe(self._view, self._seen, now_s=self._now_s)
        node = self._deciders.get(0) or min(self._view.nodes)
        decision, _ = agree.decide(
            self._view,
            self._seen,
            node=node,
            now_s=self._now_s,
            stand=self._standing_generation == self._view.number > 0,
        )
        self._costs.decisions_s.append(time.process_time() - viewed_s)
        if isinstance(decision, agree.Propose):
            self._costs.proposals_s.append(self._costs.decisions_s[-1])
        self._costs.views_s.append(viewed_s - started_s)
        self._costs.looks += 1
        if isinstance(seats, seating.ChangeSeats):
            self._seats = seats.seats
            self._write_for_all(seating_key(_RUN), seats.seats, expected=seats.expected)
        return decision

    def _follow(self) -> bool:
        """Start the seated workers that are not running yet; return whether there were any."""
        found, orders = self._table.get(seating_key(_RUN)), self._seats
        attempts = {w.seat: w.attempt for r in self._records.values() for w in r.workers}
        due = [
            order
            for order in orders
            if order.node in self._records and attempts.get(order.seat, 0) < order.attempt
        ]
        for order in due:
            worker = worker_of(order)
            self._publish(order.node, lambda r: msgspec.structs.replace(r, workers=(worker,)))  # noqa: B023
        return bool(due) or bool(found and found.revision > self._view.revision)


def worker_of(order: Seating) -> WorkerRecord:
    """Return the record of the worker that an order starts, once it is READY."""
    return WorkerRecord(
        seat=order.seat,
        incarnation=uuid.uuid4().hex,
        pid=1,
        state=WorkerState.READY,
        attempt=order.attempt,
        spec=JobSpec(),
        info={"store": "10.0.0.1:29500"},
    )


def moved(record: NodeRecord, state: WorkerState, *, after: int | None = None) -> NodeRecord:
    """Return the record with its workers in another state."""
    moved = [
        msgspec.structs.replace(
            worker, state=state, ready_after=worker.ready_after if after is None else after
        )
        for worker in record.workers
    ]
    return msgspec.structs.replace(record, workers=tuple(moved))


def entered(record: NodeRecord, members: set[str]) -> NodeRecord:
    inside = all(worker.incarnation in members for worker in record.workers)
    return moved(record, WorkerState.ACTIVE) if inside else record


class Keeper:
    """The blocks and parity rows of the newest step that the sidecars of a generation hold."""

    def __init__(self, record: GenerationRecord | None, step: int) -> None:
        world = record.snapshots if record else None
        self._world, self._step = world, step
        self._ranks: dict[str, list[int]] = defaultdict(list)
        self._groups: dict[str, tuple[str, ...]] = {}
        if world is not None:
            for rank, node in enumerate(world.rank_nodes):
                self._ranks[node].append(rank)
            self._groups = {node: group for group in world.parity_groups() for node in group}
            entries = {rank: self._entry(rank) for rank in range(len(world.rank_nodes))}
            self._geometry = Geometry(world, entries)

    def fenced(self, record: NodeRecord, generation: int) -> NodeRecord:
        """Return the record of a node that has left ``generation``."""
        working = [w for w in record.workers if w.state is WorkerState.ACTIVE]
        left = moved(record, WorkerState.READY, after=generation) if working else record
        return msgspec.structs.replace(
            left, fenced=generation, inventory=self._inventory(record.node)
        )

    def _inventory(self, node: str) -> Inventory | None:
        """Return the node's own blocks, and of others' blocks the entries that `compact` keeps."""
        if self._world is None or node not in self._groups:
            return None
        rows = self._geometry.rows_of(node)
        sealed = [self._entry(r) for n in self._groups[node] for r in self._ranks.get(n, ())]
        return Inventory(
            node=node,
            worlds=(),
            blocks=tuple(self._entry(rank) for rank in self._ranks.get(node, ())),
            parities=tuple(self._row(stripe, row) for stripe, row in rows),
            sealed=tuple(sealed),
        )

    def _row(self, stripe: int, row: int) -> ParityEntry:
        assert self._world is not None
        return ParityEntry(
            generation=self._world.generation,
            step=self._step,
            stripe=stripe,
            row=row,
            nbytes=self._geometry.row_bytes(stripe),
            crc32c=stripe,
        )

    def _entry(self, rank: int) -> BlockEntry:
        assert self._world is not None
        return BlockEntry(
            generation=self._world.generation,
            step=self._step,
            rank=rank,
            payload_bytes=_BLOCK_BYTES,
            index_bytes=4096,
            index_crc32c=rank,
        )


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print one line per number of nodes."""
    console.print(by_line(figures, columns=_COLUMNS, cell=_cell))


def _cell(figure: Figure) -> str:
    if figure.unit == "s":
        return f"{figure.value * 1e3:.2f} ms"
    return f"{figure.value:,.0f}" if figure.value >= 100 else f"{figure.value:,.1f}"
