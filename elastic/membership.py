"""What all agents know of a job at one moment: the view every decision is made from. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any, TypeAlias, TypeVar, cast

import msgspec

from elastic.coordinator.base import Entry
from elastic.errors import CoordinatorError
from elastic.records import (
    TRAINER,
    GenerationRecord,
    NodeRecord,
    Outcome,
    Roster,
    Seating,
    WorkerRecord,
    WorkerState,
)

Record: TypeAlias = NodeRecord | GenerationRecord | tuple[Seating, ...] | Outcome
"""What the keys of a run hold."""

_T = TypeVar("_T")
_SEATS_REMEMBERED = 1 << 17


def run_prefix(run: str) -> str:
    """Return what every key of the run starts with."""
    return f"{run}/"


def node_key(run: str, node: str) -> str:
    """Return the key of a node's `NodeRecord`, which is held under its agent's lease."""
    return f"{run}/nodes/{node}"


def generation_key(run: str) -> str:
    """Return the key of the newest `GenerationRecord`, changed only by compare-and-set."""
    return f"{run}/generation"


def seating_key(run: str) -> str:
    """Return the key of the tuple of `Seating`, changed only by compare-and-set."""
    return f"{run}/seating"


def outcome_key(run: str) -> str:
    """Return the key of the job's `Outcome`, written once (compare-and-set from absent)."""
    return f"{run}/outcome"


def encode(record: object) -> str:
    """Return the JSON under which a record is stored."""
    return msgspec.json.encode(record).decode()


def identity(record: NodeRecord) -> str:
    """Return what tells a node from itself with another agent or sidecar."""
    return f"{record.incarnation}/{record.sidecar_starts}"


@lru_cache(_SEATS_REMEMBERED)
def role_of(seat: str) -> str:
    """Return the role of a seat: ``"trainer"`` of ``"trainer/0"``."""
    return seat.partition("/")[0]


@lru_cache(_SEATS_REMEMBERED)
def seat_order(seat: str) -> tuple[str, int, str]:
    """Return a sort key that puts ``trainer/10`` behind ``trainer/9``."""
    role, _, number = seat.partition("/")
    return role, int(number) if number.isdecimal() else 0, seat


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A job at one store revision: live nodes, newest generation, seating, outcome.

    ``wanted`` is how many seats the job is to have of each role. The revisions are those the
    next compare-and-set of that record must expect (0: absent).
    """

    run: str
    nodes: Mapping[str, NodeRecord]
    wanted: Mapping[str, int]
    generation: GenerationRecord | None = None
    generation_revision: int = 0
    seating: tuple[Seating, ...] = ()
    seating_revision: int = 0
    outcome: Outcome | None = None
    revision: int = 0
    decoded: Mapping[str, tuple[int, Record]] = field(default_factory=dict, repr=False)
    _found: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_entries(
        cls,
        entries: Iterable[Entry],
        *,
        run: str,
        wanted: Mapping[str, int],
        revision: int = 0,
        before: View | None = None,
    ) -> View:
        """Build the view from all entries under `run_prefix`.

        What ``before`` has decoded of the same revisions is taken from there. Raises
        ``CoordinatorError`` naming the key of a record that is unknown or garbled.
        """
        known = before.decoded if before else {}
        decoded: dict[str, tuple[int, Record]] = {}
        for entry in entries:
            same = known.get(entry.key)
            record = same[1] if same and same[0] == entry.revision else _decode(entry, run=run)
            decoded[entry.key] = entry.revision, record
        records = [record for _, record in decoded.values()]
        nodes = {record.node: record for record in records if isinstance(record, NodeRecord)}
        of_generation = decoded.get(generation_key(run), (0, None))
        of_seating = decoded.get(seating_key(run), (0, ()))
        outcome = decoded.get(outcome_key(run), (0, None))[1]
        return cls(
            run=run,
            nodes=dict(sorted(nodes.items())),
            wanted=wanted,
            generation=cast("GenerationRecord | None", of_generation[1]),
            generation_revision=of_generation[0],
            seating=cast("tuple[Seating, ...]", of_seating[1]),
            seating_revision=of_seating[0],
            outcome=cast("Outcome | None", outcome),
            revision=revision,
            decoded=decoded,
        )

    @property
    def number(self) -> int:
        """Number of the newest generation, 0 before the first."""
        return self.generation.number if self.generation else 0

    def workers(self) -> Iterator[tuple[NodeRecord, WorkerRecord]]:
        """Yield every worker of every live node."""
        for record in self.nodes.values():
            for worker in record.workers:
                yield record, worker

    def worker_of(self, seating: Seating) -> WorkerRecord | None:
        """Return the newest record of the seat at its node, of the ordered attempt or older."""
        record = self.nodes.get(seating.node)
        newest: WorkerRecord | None = None
        for worker in record.workers if record else ():
            if worker.seat == seating.seat and (newest is None or worker.attempt > newest.attempt):
                newest = worker
        return newest

    def roster(self) -> Roster:
        """Return what the workers are told."""
        return Roster(nodes=tuple(self.nodes.values()), generation=self.generation)


def once(find: Callable[[View], _T]) -> Callable[[View], _T]:
    """Have a pure function of a view look at each view once; what it returns is not changed."""
    name = f"{find.__module__}.{find.__qualname__}"

    @wraps(find)
    def found(view: View) -> _T:
        known = view._found
        if name not in known:
            known[name] = find(view)
        return cast("_T", known[name])

    return found


@once
def identities(view: View) -> dict[str, str]:
    """Return what tells the live nodes from themselves with another agent or sidecar."""
    return {name: identity(node) for name, node in view.nodes.items()}


@once
def fenced_nodes(view: View) -> dict[str, NodeRecord]:
    """Return the live nodes of which no worker acts in the newest generation any more."""
    number = view.number
    return {name: node for name, node in view.nodes.items() if node.fenced >= number}


@once
def parked_trainers(view: View) -> list[tuple[NodeRecord, WorkerRecord]]:
    """Return the READY trainers of live nodes whose sidecar serves.

    Left out is a worker whose seat was given to another: its agent is about to end it.
    """
    ready = [
        (node, worker)
        for node in view.nodes.values()
        if node.sidecar
        for worker in node.workers
        if worker.state is WorkerState.READY and role_of(worker.seat) == TRAINER
    ]
    orders = {order.seat: (order.node, order.attempt) for order in view.seating} if ready else {}
    return [
        (node, worker)
        for node, worker in ready
        if orders.get(worker.seat) in (None, (node.node, worker.attempt))
    ]


@once
def ready_trainers(view: View) -> list[tuple[NodeRecord, WorkerRecord]]:
    """Return who can enter the next generation, in seat order.

    These are the parked trainers of the nodes that have fenced the newest generation.
    """
    number = view.number
    found = [pair for pair in parked_trainers(view) if pair[0].fenced >= number]
    return sorted(found, key=lambda pair: (seat_order(pair[1].seat), pair[1].incarnation))


def _decode(entry: Entry, *, run: str) -> Record:
    kinds: dict[str, Any] = {
        generation_key(run): GenerationRecord,
        seating_key(run): tuple[Seating, ...],
        outcome_key(run): Outcome,
    }
    is_node = entry.key.startswith(node_key(run, ""))
    kind = NodeRecord if is_node else kinds.get(entry.key)
    if kind is None:
        raise CoordinatorError(
            f"{entry.key}: no record of this name is known; do all nodes run the same version of "
            "Holdfast?"
        )
    try:
        record = msgspec.json.decode(entry.value, type=kind)
    except msgspec.DecodeError as error:
        raise CoordinatorError(
            f"{entry.key}: not a readable record: {error}; do all nodes run the same version of "
            "Holdfast?"
        ) from error
    if is_node and node_key(run, record.node) != entry.key:
        raise CoordinatorError(f"{entry.key}: holds the record of node {record.node}")
    return cast("Record", record)
