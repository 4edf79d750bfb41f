"""The channel of a process that another launcher started, next to a standalone sidecar.

torchrun, Slurm or Kubernetes decide which processes run, and restart all of them after a failure;
the sidecars live on. So there is one generation per start: rank 0 asks the sidecars of all nodes
for their inventories, chooses the restore point and sends it to every rank. This uses a store of
rank 0's own, because a launcher's store may still have the keys of an earlier start, and is open to
everybody.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import msgspec

from holdfast.ckpt.errors import CkptError, PeerError
from holdfast.ckpt.memory.records import Inventory, RestorePoint, SidecarPeer, SnapshotWorld
from holdfast.ckpt.parity.groups import form_groups
from holdfast.ckpt.parity.stripes import restore_points
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.torch_private import TCPStore
from holdfast.ckpt.transport import RunKey
from holdfast.ckpt.types import Json, learn
from holdfast.elastic.addresses import checked_host
from holdfast.elastic.channel.shared_key import expanded, shared_key
from holdfast.elastic.channel.sidecar_file import SidecarFile
from holdfast.elastic.channel.surroundings import SIDECAR_ENV, Surroundings, surroundings
from holdfast.elastic.channel.unwatched import Unwatched
from holdfast.elastic.errors import ConfigError, JobFailedError, Stopped
from holdfast.elastic.events import GenerationProposed
from holdfast.elastic.events.log import EventWriter
from holdfast.elastic.meeting.point import MeetingPoint
from holdfast.elastic.meeting.store import MeetingStore
from holdfast.elastic.membership.records import (
    TRAINER,
    GenerationRecord,
    JobSpec,
    Member,
    MeshSize,
    NodeRecord,
    Roster,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.planning.meshes import choose_mesh

_FILE_WAIT_S = 60.0
_MEET_S = 300.0
_CONNECT_S = 3.0
_BOARD_S = 10.0
_POLL_S = 0.05
_LEADER = "holdfast/leader"
_LOOPBACKS = ("localhost", "127.0.0.1")
_starts = itertools.count()


class Joiner(msgspec.Struct, frozen=True, kw_only=True):
    """Each rank's message to rank 0."""

    rank: int
    incarnation: str
    sidecar: SidecarFile
    spec: JobSpec | None
    info: dict[str, Json]


class LaunchedChannel(Unwatched):
    """Agent and coordinator of a world whose size a launcher decides (see `Channel`)."""

    def __init__(self) -> None:
        """Find the sidecar. Raises ``ConfigError`` if the environment is contradictory."""
        self._where = surroundings(os.environ)
        if self._where.size > 1:
            checked_host(self._where.master.rpartition(":")[0], given="MASTER_ADDR")
        self._start = next(_starts)  # the same on every rank: the number of calls of connect()
        self._parent = os.getppid()
        self._file = expanded(os.environ[SIDECAR_ENV])
        self._found = found = SidecarFile.read(self._file, wait_s=_FILE_WAIT_S)
        super().__init__(node=found.node, seat=f"{TRAINER}/{self._where.rank}")
        self.run, self.sidecar = found.run, found.address
        self.incarnation = uuid.uuid4().hex
        self.settings: dict[str, Json] = {}
        self.key: RunKey = shared_key(Path(found.key_file))
        self._spec: JobSpec | None = None
        self._info: dict[str, Json] = {}
        self._nodes: tuple[NodeRecord, ...] = ()
        self._closed = False

    def ready(self, *, after: int, spec: JobSpec | None, info: dict[str, Json]) -> None:
        """Store the values to send to the other ranks."""
        self._spec, self._info = spec, info

    def await_generation(self, *, after: int) -> GenerationRecord:
        """Meet all ranks and return the generation that they form.

        Raises ``ConfigError`` if they contradict each other, ``JobFailedError`` if not all come.
        """
        if self.stopped():
            raise Stopped("the launcher of this process has ended")
        if self._record is None or self._record.number <= after:
            self._found = SidecarFile.read(self._file, wait_s=_FILE_WAIT_S)
            self.sidecar = self._found.address  # a new address if the sidecar was restarted
            self._record = self._meet(after)
            self._nodes = _nodes(self._record)
        return self._record

    def _meet(self, after: int) -> GenerationRecord:
        mine = Joiner(
            rank=self._where.rank,
            incarnation=self.incarnation,
            sidecar=self._found,
            spec=self._spec,
            info=self._info,
        )
        if self._where.size == 1:
            return form([mine], key=self.key, events=self._events)
        meeting = f"{self._start}/{after}"
        with _explained(self._where):
            store = self._lead(meeting) if mine.rank == 0 else self._follow(meeting)
        try:
            with _explained(self._where):
                store.set(f"{meeting}/rank/{mine.rank}", msgspec.json.encode(mine))
            if mine.rank == 0:
                return self._answer(store, meeting)
            with _explained(self._where):
                text, refused = store.multi_get([f"{meeting}/record", f"{meeting}/refused"])
        finally:
            store.close()
        if refused:
            raise ConfigError(refused.decode())
        return msgspec.json.decode(text, type=GenerationRecord)

    def _answer(self, store: MeetingStore, meeting: str) -> GenerationRecord:
        with _explained(self._where):
            said = store.multi_get([f"{meeting}/rank/{rank}" for rank in range(self._where.size)])
        joiners = [msgspec.json.decode(text, type=Joiner) for text in said]
        answers = [f"{meeting}/record", f"{meeting}/refused"]
        try:
            record = form(joiners, key=self.key, events=self._events)
        except (ConfigError, CkptError) as error:
            store.multi_set(answers, ["", str(error)])
            raise
        store.multi_set(answers, [msgspec.json.encode(record), ""])
        return record

    def _lead(self, meeting: str) -> MeetingStore:
        """Publish the address of this meeting's store: the worker's own, as new as the process."""
        address = str(self._info.get("store", ""))
        store = MeetingStore(address, self.key, timeout=timedelta(seconds=_MEET_S))
        store.set(meeting, "")
        if self._where.served:
            self._launchers_board().set(_LEADER, address)
        else:
            board(self._where.master, self.key).set(_LEADER, address.encode())
        return store

    def _follow(self, meeting: str) -> MeetingStore:
        """Return the store of the living rank 0; skip stale addresses of an earlier one."""
        deadline_s = time.monotonic() + _MEET_S
        while time.monotonic() < deadline_s and not self.stopped():
            with contextlib.suppress(RuntimeError, PeerError):  # of torch's store, and of ours
                leader = self._leader()
                if self._serves(leader, meeting):
                    return MeetingStore(leader, self.key, timeout=timedelta(seconds=_MEET_S))
            time.sleep(_POLL_S)
        raise JobFailedError(
            f"rank 0 cannot be found through {self._where.master}: look at its output"
        )

    def _serves(self, leader: str, meeting: str) -> bool:
        store = MeetingStore(leader, self.key, answer_s=_CONNECT_S)
        try:
            return store.check([meeting])
        finally:
            store.close()

    def _leader(self) -> str:
        """Return the address that rank 0 published. Raises ``RuntimeError`` or ``PeerError``."""
        if self._where.served:
            return self._launchers_board().get(_LEADER).decode(errors="replace")
        limit = timedelta(seconds=_BOARD_S)
        master = MeetingStore(self._where.master, self.key, timeout=limit, answer_s=_BOARD_S)
        try:
            return master.get(_LEADER).decode()
        finally:
            master.close()

    def _launchers_board(self) -> TCPStore:
        """Return the store that the launcher serves; only an address is read from it."""
        host, _, port = self._where.master.rpartition(":")
        return TCPStore(
            host, int(port), is_master=False, timeout=timedelta(seconds=_BOARD_S), multi_tenant=True
        )

    def fenced(self, generation: int) -> bool:
        """Return whether the launcher is gone.

        Otherwise the launcher itself ends a generation's processes.
        """
        return self.stopped()

    def stopped(self) -> bool:
        """Return whether this channel is closed, or torchrun's agent ended before its worker."""
        return self._closed or (self._where.tied and os.getppid() != self._parent)

    def roster(self) -> Roster:
        """Return the nodes with ranks, and the generation."""
        return Roster(nodes=self._nodes, generation=self._record)

    def close(self) -> None:
        """Close the event file; the sidecar stays."""
        self._closed = True
        if self._events:
            self._events.close()


@functools.cache
def board(master: str, key: RunKey) -> MeetingPoint:
    """Serve the place where ranks look for rank 0, at the address of its machine.

    It stays until the process ends: other ranks come later. Raises ``ConfigError``.
    """
    host, _, port = master.rpartition(":")
    try:
        return MeetingPoint(key, host=bindable(host), port=int(port))
    except (OSError, PeerError) as error:
        raise ConfigError(
            f"rank 0 cannot serve MASTER_ADDR:MASTER_PORT {master}: {error}; set them to an "
            "address of rank 0's machine and a free port"
        ) from error


def bindable(host: str) -> str:
    """Return the address to listen at for ``host``; all, if its name means the loopback.

    Others then reach the machine by another address of that name. Raises ``OSError``.
    """
    address = socket.gethostbyname(host)
    return "*" if address.startswith("127.") and host not in _LOOPBACKS else address


def form(
    joiners: Sequence[Joiner], *, key: RunKey, events: EventWriter | None = None
) -> GenerationRecord:
    """Make the ranks' sidecars enter one generation, and return it.

    It follows the newest generation that any of them knows, and restores the newest step that they
    can serve together. Raises ``ConfigError`` for ranks that contradict each other, ``CkptError``
    if a sidecar does not answer.
    """
    spec, files = _agreed(joiners)
    mesh = _mesh(spec, len(joiners))
    clients = {file.node: SidecarClient(file.address, key) for file in files}
    try:
        newest = max(_generation(client) for client in clients.values())
        for client in clients.values():
            client.fence(newest)
        inventories = [client.inventory() for client in clients.values()]
        points, why = choose(inventories, stage=spec.stage)
        record = _record(
            joiners, files, spec=spec, mesh=mesh, number=newest + 1, points=points, why=why
        )
        for client in clients.values():
            client.adopt(record.snapshots, restore=record.restore)
    finally:
        for client in clients.values():
            client.close()
    if events:
        proposed = GenerationProposed(
            generation=record.number,
            ranks=tuple(member.seat for member in record.members),
            restore_step=record.restore.step if record.restore else None,
            reason=record.reason,
        )
        events.write(proposed, source="launched")
    return record


def choose(inventories: Sequence[Inventory], *, stage: int = 0) -> tuple[list[RestorePoint], str]:
    """Return the restore points, newest first, and the reason; none that a roll-back abandoned.

    Points of another ``stage`` of the script are left out.

    Steps of an older generation beyond a younger one's newest step are abandoned: the younger
    generation continued from before them, on other nodes than those that still hold them.
    """
    found, why = restore_points(inventories)
    valid: list[RestorePoint] = []
    for point in found:  # younger generations come first
        mine = point.world.stage == stage
        if mine and (not valid or point.step <= valid[0].step):
            valid.append(point)
    return valid, why


def _agreed(joiners: Sequence[Joiner]) -> tuple[JobSpec, list[SidecarFile]]:
    first = joiners[0]
    spec = first.spec or JobSpec()
    files: dict[str, SidecarFile] = {}
    for joiner in joiners:
        if joiner.spec != first.spec:
            raise ConfigError(
                f"rank {first.rank} asks for {first.spec}, rank {joiner.rank} for {joiner.spec}: "
                "run the same script with the same settings everywhere"
            )
        file = files.setdefault(joiner.sidecar.node, joiner.sidecar)
        if file.run != first.sidecar.run or file.address != joiner.sidecar.address:
            raise ConfigError(
                f"rank {joiner.rank} belongs to {joiner.sidecar}, others to {file} and "
                f"{first.sidecar}: give all sidecars one --run, and each node one --node"
            )
    return spec, [files[node] for node in sorted(files)]


def _mesh(spec: JobSpec, processes: int) -> MeshSize:
    """Return the mesh of all processes; a launcher has no spares among them."""
    mesh, _ = choose_mesh(spec, trainers=processes)
    if mesh is None or mesh.ranks != processes:
        best = f", of which a mesh of {mesh.text} would use {mesh.ranks}" if mesh else ""
        wanted = spec.most if spec.dp is not None else f"at least {spec.least}"
        raise ConfigError(
            f"the launcher started {processes} processes{best}, and the script needs {wanted}: "
            "change one of them"
        )
    return mesh


def _generation(client: SidecarClient) -> int:
    number = client.status().get("generation", 0)
    return number if isinstance(number, int) else 0


def _record(
    joiners: Sequence[Joiner],
    files: Sequence[SidecarFile],
    *,
    spec: JobSpec,
    mesh: MeshSize,
    number: int,
    points: Sequence[RestorePoint],
    why: str,
) -> GenerationRecord:
    parity = min(spec.parity, len(files) - 1)
    columns = min(spec.columns, len(files) - parity) if parity else 0
    domains = {file.node: file.domain for file in files}
    groups, survives = form_groups(domains, parity=parity, size=spec.parity_group, columns=columns)
    world = SnapshotWorld(
        run=files[0].run,
        generation=number,
        peers=tuple(
            SidecarPeer(node=file.node, address=file.address, domain=file.domain) for file in files
        ),
        rank_nodes=tuple(joiner.sidecar.node for joiner in joiners),
        parity=parity,
        keep=spec.keep,
        groups=groups,
        columns=columns,
        memory_bytes=spec.memory_bytes,
        stage=spec.stage,
    )
    members = tuple(
        Member(
            rank=joiner.rank,
            seat=f"{TRAINER}/{joiner.rank}",
            node=joiner.sidecar.node,
            incarnation=joiner.incarnation,
            info=joiner.info,
        )
        for joiner in joiners
    )
    return GenerationRecord(
        number=number,
        members=members,
        snapshots=world,
        restore=points[0] if points else None,
        fallbacks=tuple(points[1:]),
        reason=f"{len(joiners)} processes of a launcher on {len(files)} nodes; {survives}; {why}",
        mesh=mesh,
    )


def _nodes(record: GenerationRecord) -> tuple[NodeRecord, ...]:
    """Return the nodes as roster entries."""
    return tuple(
        NodeRecord(
            node=peer.node,
            incarnation=peer.address,
            domain=peer.domain,
            sidecar=peer.address,
            slots={TRAINER: record.snapshots.rank_nodes.count(peer.node)},
            workers=tuple(
                WorkerRecord(
                    seat=member.seat,
                    incarnation=member.incarnation,
                    pid=0,
                    state=WorkerState.ACTIVE,
                    info=member.info,
                )
                for member in record.members
                if member.node == peer.node
            ),
        )
        for peer in record.snapshots.peers
    )


@contextmanager
def _explained(where: Surroundings) -> Iterator[None]:
    """Turn errors of the stores, torch's and ours, into errors that explain their cause here."""
    try:
        yield
    except (RuntimeError, PeerError) as error:
        raise JobFailedError(
            f"rank {where.rank} of {where.size} did not meet the others through {where.master} "
            f"within {_MEET_S:g} s ({error}): check that all of them started"
        ) from error


learn(globals())
