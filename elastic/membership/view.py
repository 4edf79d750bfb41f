"""The view: the state of a job at one moment, from which agents make every decision. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar, cast

import msgspec
from msgspec.structs import force_setattr

from holdfast.ckpt.errors import HoldfastError
from holdfast.ckpt.memory.records import BlockEntry
from holdfast.elastic.coordinator.base import Entry, EventKind, KeyEvent
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.membership.differences import Divisible, with_difference
from holdfast.elastic.membership.divided import head_of, parts_prefix, whole_text
from holdfast.elastic.membership.findings import Findings, answer_ahead
from holdfast.elastic.membership.packed import pack, unpack
from holdfast.elastic.membership.records import (
    Bulletin,
    Decider,
    GenerationRecord,
    JobOutcome,
    JobSpec,
    NodeRecord,
    Roster,
    Seating,
    WorkerRecord,
)

Record: TypeAlias = (
    NodeRecord | GenerationRecord | tuple[Seating, ...] | JobOutcome | Bulletin | Decider
)
"""The record types stored under a run's keys."""

_Kind = TypeVar("_Kind")

_SEATS_REMEMBERED = 1 << 17
_GROUPS_REMEMBERED = 1 << 12


def run_prefix(run: str) -> str:
    """Return the prefix of every key of the run."""
    return f"{run}/"


def node_key(run: str, node: str) -> str:
    """Return the key of a node's `NodeRecord`, which is held under its agent's lease."""
    return f"{run}/nodes/{node}"


def job_prefix(run: str) -> str:
    """Return the prefix of the keys that concern all nodes, without those of single nodes."""
    return f"{run}/job/"


def generation_key(run: str) -> str:
    """Return the key of the newest `GenerationRecord`, changed only by compare-and-set."""
    return f"{run}/job/generation"


def seating_key(run: str) -> str:
    """Return the key of the tuple of `Seating`, changed only by compare-and-set."""
    return f"{run}/job/seating"


def outcome_key(run: str) -> str:
    """Return the key of the job's `JobOutcome`, written once (compare-and-set from absent)."""
    return f"{run}/job/outcome"


def bulletin_key(run: str) -> str:
    """Return the key of the newest `Bulletin`, changed only by compare-and-set."""
    return f"{run}/job/bulletin"


def decider_prefix(run: str) -> str:
    """Return the prefix of the keys of all deciders."""
    return f"{run}/job/deciders/"


def decider_key(run: str, place: int) -> str:
    """Return the key of a `Decider`, which is held under its agent's lease."""
    return f"{decider_prefix(run)}{place}"


def encode(record: object) -> str:
    """Return the text under which a record is stored: its JSON, compressed if it is long."""
    return pack(msgspec.json.encode(record).decode())


def decode(key: str, value: str, kind: type[_Kind]) -> _Kind:
    """Return the record that was stored under ``key``; `encode` is the other way.

    Raises ``CoordinatorError``, which names the key, for anything else than such a record.
    """
    try:
        return msgspec.json.decode(unpack(value), type=kind)
    except (ValueError, RecursionError, HoldfastError) as error:  # msgspec's are ValueErrors
        raise CoordinatorError(
            f"{key}: not a readable record: {error}; do all nodes run the same version of Holdfast?"
        ) from None


def identity(record: NodeRecord) -> str:
    """Return an identity that changes with the node's agent and sidecar."""
    return f"{record.incarnation}/{record.sidecar_starts}"


@lru_cache(_SEATS_REMEMBERED)
def role_of(seat: str) -> str:
    """Return the role of a seat: ``"trainer"`` of ``"trainer/0"``."""
    return seat.partition("/")[0]


@lru_cache(_SEATS_REMEMBERED)
def seat_order(seat: str) -> tuple[str, int, str]:
    """Return a sort key that puts ``trainer/10`` after ``trainer/9``."""
    role, _, number = seat.partition("/")
    return role, int(number) if number.isdecimal() else 0, seat


def slot_of(seating: Seating) -> str:
    """Return the role whose slot a seat has: mostly its own."""
    return seating.slot or role_of(seating.seat)


def with_moves(configured: Mapping[str, int], seats: Iterable[Seating]) -> Mapping[str, int]:
    """Return the numbers of workers by role, with the workers that were moved between roles.

    It is ``configured`` itself if none was.
    """
    moved = [order for order in seats if order.slot]
    if not moved:
        return configured
    wanted = dict(configured)
    for order in moved:
        role = role_of(order.seat)
        wanted[role] = wanted.get(role, 0) + 1
        wanted[order.slot] = wanted.get(order.slot, 0) - 1
    return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job at one store revision: live nodes, newest generation, seating, outcome.

    ``wanted`` is the number of seats that the job needs of each role, ``configured`` the one that
    it was started with (None: the same): workers may move between roles. The revisions are those
    that the next compare-and-set of each record must expect (0: absent). ``deciders`` are the
    agents that decide for all, by place.
    """

    run: str
    nodes: Mapping[str, NodeRecord]
    wanted: Mapping[str, int]
    configured: Mapping[str, int] | None = None
    generation: GenerationRecord | None = None
    generation_revision: int = 0
    seating: tuple[Seating, ...] = ()
    seating_revision: int = 0
    outcome: JobOutcome | None = None
    bulletin: Bulletin | None = None
    bulletin_revision: int = 0
    deciders: Mapping[int, Decider] = field(default_factory=dict)
    revision: int = 0
    decoded: Mapping[str, tuple[int, Record]] = field(default_factory=dict, repr=False)
    findings: Findings = field(default_factory=Findings, init=False, repr=False, compare=False)

    @classmethod
    def from_entries(
        cls,
        entries: Iterable[Entry],
        *,
        run: str,
        wanted: Mapping[str, int],
        revision: int = 0,
        before: JobView | None = None,
    ) -> JobView:
        """Build the view from all entries under `run_prefix`.

        Records of the same revisions, and cached answers, are taken over from ``before``. Raises
        ``CoordinatorError`` naming the key of an unknown or corrupt record, or of a divided one
        whose parts are not among the entries.
        """
        known = before.decoded if before else {}
        decoded: dict[str, tuple[int, Record]] = {}
        changed = set(known)
        entries, parts = _apart(entries, run=run)
        for entry in entries:
            same = known.get(entry.key)
            if same and same[0] == entry.revision:
                decoded[entry.key] = same
                changed.discard(entry.key)
            else:
                record = _read(entry.key, entry.value, run=run, before=same, parts=parts)
                decoded[entry.key] = entry.revision, record
                changed.add(entry.key)
        start = before or cls(run=run, nodes={}, wanted=wanted)
        return start._with(decoded, changed, wanted=wanted, revision=revision)

    def after(self, events: Iterable[KeyEvent], *, revision: int = 0) -> JobView:
        """Return the view after changes of the run's keys, in order.

        A change older than the known record is ignored. Raises like `from_entries`.
        """
        events, parts = _apart(events, run=self.run)
        decoded = dict(self.decoded)
        changed = set()
        for event in _telling(events):
            key, known = event.key, decoded.get(event.key)
            if known and known[0] > event.revision:
                continue
            if event.kind == EventKind.PUT:
                if known and known[0] == event.revision:
                    continue
                record = _read(key, event.value, run=self.run, before=known, parts=parts)
                decoded[key] = event.revision, record
            else:
                decoded.pop(key, None)
            changed.add(key)
        wanted = self.wanted if self.configured is None else self.configured
        return self._with(decoded, changed, wanted=wanted, revision=revision)

    def _with(
        self,
        decoded: Mapping[str, tuple[int, Record]],
        changed: Iterable[str],
        *,
        wanted: Mapping[str, int],
        revision: int,
    ) -> JobView:
        """Return the view of the ``decoded`` records; ``wanted`` as configured.

        The keys ``changed`` differ from this view.
        """
        prefix = node_key(self.run, "")
        names = {key[len(prefix) :] for key in changed if key.startswith(prefix)}
        nodes = dict(self.nodes)
        added = False
        for name in names:
            if (found := decoded.get(prefix + name)) is None:
                nodes.pop(name, None)
            else:
                added = added or name not in nodes
                nodes[name] = _as_before(cast("NodeRecord", found[1]), nodes.get(name))
        of_generation = decoded.get(generation_key(self.run), (0, None))
        of_seating = decoded.get(seating_key(self.run), (0, ()))
        outcome = decoded.get(outcome_key(self.run), (0, None))[1]
        of_bulletin = decoded.get(bulletin_key(self.run), (0, None))
        seats = cast("tuple[Seating, ...]", of_seating[1])
        same = seats is self.seating and wanted is self.configured
        view = JobView(
            run=self.run,
            nodes={name: nodes[name] for name in sorted(nodes)} if added else nodes,
            wanted=self.wanted if same else with_moves(wanted, seats),
            configured=wanted,
            generation=cast("GenerationRecord | None", of_generation[1]),
            generation_revision=of_generation[0],
            seating=seats,
            seating_revision=of_seating[0],
            outcome=cast("JobOutcome | None", outcome),
            bulletin=cast("Bulletin | None", of_bulletin[1]),
            bulletin_revision=of_bulletin[0],
            deciders=self._deciders(decoded, changed),
            revision=revision,
            decoded=decoded,
        )
        view.findings.inherit(self.findings, changed=names, nodes=len(nodes))
        if view.number != self.number:
            _shared_entries.cache_clear()  # those of steps long gone; the live ones stay shared
        answer_ahead(view)
        return view

    def _deciders(
        self, decoded: Mapping[str, tuple[int, Record]], changed: Iterable[str]
    ) -> Mapping[int, Decider]:
        prefix = decider_prefix(self.run)
        places = {key for key in changed if key.startswith(prefix)}
        if not places:
            return self.deciders
        found = dict(self.deciders)
        for key in places:
            place = int(key[len(prefix) :])
            found.pop(place, None)
            if (record := decoded.get(key)) is not None:
                found[place] = cast("Decider", record[1])
        return {place: found[place] for place in sorted(found)}

    def without(self, names: Set[str]) -> JobView:
        """Return the view without these nodes; cached answers about the others stay."""
        nodes = {name: node for name, node in self.nodes.items() if name not in names}
        view = replace(self, nodes=nodes)
        view.findings.inherit(self.findings, changed=names, nodes=len(nodes))
        return view

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
        """Return the newest record of the seat on its node, of the ordered attempt or older."""
        record = self.nodes.get(seating.node)
        return None if record is None else newest_worker(record, seating.seat)

    def roster(self) -> Roster:
        """Return the roster for the workers."""
        return Roster(nodes=tuple(self.nodes.values()), generation=self.generation)


def newest_worker(node: NodeRecord, seat: str) -> WorkerRecord | None:
    """Return the node's newest worker of a seat."""
    newest: WorkerRecord | None = None
    for worker in node.workers:
        if worker.seat == seat and (newest is None or worker.attempt > newest.attempt):
            newest = worker
    return newest


_Told = TypeVar("_Told", Entry, KeyEvent)


def _apart(found: Iterable[_Told], *, run: str) -> tuple[list[_Told], Mapping[str, str]]:
    """Return what was told of records, and by key the parts of divided ones."""
    prefix = parts_prefix(run)
    rest: list[_Told] = []
    parts: dict[str, str] = {}
    for each in found:
        if each.key.startswith(prefix):
            parts[each.key] = each.value
        else:
            rest.append(each)
    return rest, parts


def _telling(events: Iterable[KeyEvent]) -> Iterator[KeyEvent]:
    """Yield the newest change of each key; before a head, the earlier changes that it builds on."""
    of_keys: dict[str, list[KeyEvent]] = {}
    for event in events:
        of_keys.setdefault(event.key, []).append(event)
    for changes in of_keys.values():
        changes.sort(key=lambda event: event.revision)
        yield from changes if head_of(changes[-1].key, changes[-1].value) else changes[-1:]


def _read(
    key: str,
    value: str,
    *,
    run: str,
    before: tuple[int, Record] | None,
    parts: Mapping[str, str],
) -> Record:
    """Return the record of a key; a divided one from the one ``before`` it, or from its parts."""
    head = head_of(key, value)
    if head is None:
        return _decode(key, value, run=run)
    if head.difference and before is not None and before[0] == head.base:
        try:
            return with_difference(unpack(head.difference), cast("Divisible", before[1]))
        except (ValueError, RecursionError, HoldfastError) as error:  # msgspec's are ValueErrors
            raise CoordinatorError(
                f"{key}: no difference from the record before it: {error}"
            ) from None
    return _decode(key, whole_text(key, head, parts), run=run)


def _decode(key: str, value: str, *, run: str) -> Record:
    kinds: dict[str, Any] = {
        generation_key(run): GenerationRecord,
        seating_key(run): tuple[Seating, ...],
        outcome_key(run): JobOutcome,
        bulletin_key(run): Bulletin,
    }
    prefix = node_key(run, "")
    is_node = key.startswith(prefix)
    kind = NodeRecord if is_node else kinds.get(key)
    if key.removeprefix(decider_prefix(run)).isdecimal():
        kind = Decider
    if kind is None:
        raise CoordinatorError(
            f"{key}: no record of this name is known; do all nodes run the same version of "
            "Holdfast?"
        )
    record: Any = decode(key, value, kind)
    if is_node:
        if prefix + record.node != key:
            raise CoordinatorError(f"{key}: holds the record of node {record.node}")
        _share(record)
    return cast("Record", record)


def _share(record: NodeRecord) -> None:
    """Make a newly decoded record share equal objects with other records.

    All trainers repeat the job's spec, and the nodes of a parity group repeat its sealed blocks.
    """
    for worker in record.workers:
        if worker.spec is not None:
            force_setattr(worker, "spec", _shared_spec(worker.spec))
    if (inventory := record.inventory) is not None and inventory.sealed:
        sealed = _shared_entries(inventory.sealed)
        force_setattr(inventory, "sealed", sealed)
        blocks = tuple([_among(sealed, entry) for entry in inventory.blocks])
        force_setattr(inventory, "blocks", blocks)


def _as_before(record: NodeRecord, before: NodeRecord | None) -> NodeRecord:
    """Make a record share the inventory of the one before it if they are equal.

    Then cached answers about all inventories stay valid.
    """
    if before is not None and before is not record and record.inventory == before.inventory:
        force_setattr(record, "inventory", before.inventory)
    return record


def _among(entries: tuple[BlockEntry, ...], entry: BlockEntry) -> BlockEntry:
    rank = entry.rank
    return next((each for each in entries if each.rank == rank and each == entry), entry)


@lru_cache(64)
def _shared_spec(spec: JobSpec) -> JobSpec:
    return spec


@lru_cache(_GROUPS_REMEMBERED)
def _shared_entries(entries: tuple[BlockEntry, ...]) -> tuple[BlockEntry, ...]:
    return entries
