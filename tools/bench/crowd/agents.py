"""The control part of many agents in one process: real clients, real watches, production decisions.

An agent here has no sidecar and no worker process: its worker is READY at once, and leaves a
generation at once. All that goes through the coordinator is as in a job: a connection of its own
with a watch of its own, a record under a lease, with an inventory of one block. The agents of a
process decode a record, and derive what it says of the others, once for all of them: as each would
on a machine of its own.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Final

import msgspec

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.registry import Registry
from holdfast.elastic.agent.watch import KeyWatch
from holdfast.elastic.coordinator.base import Coordinator, Entry, KeyEvent
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.decisions import agree, deciding, seating
from holdfast.elastic.decisions.part import AgentPart, Claim, Tell
from holdfast.elastic.membership.following import following, stand_ins
from holdfast.elastic.membership.records import NodeRecord, WorkerState
from holdfast.elastic.membership.view import JobView, job_prefix, run_prefix
from holdfast.elastic.processes.garbage import collect_rarely
from holdfast.tools.bench.control import Keeper, entered, worker_of

RUN: Final = "bench"
_LEASE_S: Final = 600.0
_CALLS_S: Final = 60.0
_CALLERS: Final = 8
_RETRY_S: Final = 0.1
_SHARED_VIEWS: Final = 16


class CrowdPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The agents of one process: the names of their nodes, out of ``nodes`` in all.

    In a job of more than ``most`` nodes few agents decide.
    """

    coordinator: str
    key: RunKey
    names: tuple[str, ...]
    nodes: int
    most: int = deciding.MOST_WATCHERS


class CrowdCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of the agents of one process so far.

    ``known`` maps a generation to the number of agents that know it, and to the time, on the
    machine's monotonic clock, at which the last of them learned it. ``active`` maps it to the
    number of agents that have published that they are in it. ``deciders`` are the nodes that hold
    a place, as far as the first agent knows.
    """

    events: int
    event_bytes: int
    cpu_s: float
    known: dict[int, tuple[int, float]]
    active: dict[int, int]
    deciders: tuple[str, ...]


class Crowd:
    """The agents of one process, and the threads on which they act."""

    def __init__(self, plan: CrowdPlan) -> None:
        self.plan = plan
        self.pool = ThreadPoolExecutor(_CALLERS)
        self._connections = threading.local()
        self._lock, self._sharing = threading.Lock(), threading.Lock()
        self._shared: dict[int, JobView] = {}
        self._events = self._event_bytes = 0
        self._known: dict[int, tuple[int, float]] = {}
        self._active: dict[int, int] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        threading.Thread(target=self._keep_time, name="timers", daemon=True).start()
        self.agents = {name: CrowdAgent(self, name) for name in plan.names}

    def calls(self) -> Coordinator:
        """Return this thread's connection for calls."""
        found: Coordinator | None = getattr(self._connections, "found", None)
        if found is None:
            found = connect(self.plan.coordinator, self.plan.key, timeout_s=_CALLS_S)
            self._connections.found = found
        return found

    def saw(self, events: int, size_bytes: int) -> None:
        """Count what a watch delivered."""
        with self._lock:
            self._events += events
            self._event_bytes += size_bytes

    def learned(self, generation: int) -> None:
        """Note that an agent knows a generation."""
        with self._lock:
            self._known[generation] = self._known.get(generation, (0, 0.0))[0] + 1, time.monotonic()

    def entered(self, generation: int) -> None:
        """Note that an agent has published that its worker is in a generation."""
        with self._lock:
            self._active[generation] = self._active.get(generation, 0) + 1

    def shared(
        self,
        revision: int,
        after: Callable[[Sequence[KeyEvent]], JobView],
        events: Sequence[KeyEvent],
    ) -> JobView:
        """Return the view of the job's own keys at a revision: the same for all that follow."""
        with self._sharing:
            found = self._shared.get(revision)
            if found is None:
                found = self._shared[revision] = after(events)
                stand_ins(found)
                while len(self._shared) > _SHARED_VIEWS:
                    del self._shared[next(iter(self._shared))]
            return found

    def later(self, at_s: float, act: Callable[[], None]) -> None:
        """Call ``act`` at a time of the monotonic clock."""
        with self._wake:
            heapq.heappush(self._due, (at_s, next(self._numbers), act))
            self._wake.notify()

    def _keep_time(self) -> None:
        with self._wake:
            while True:
                now_s = time.monotonic()
                while self._due and self._due[0][0] <= now_s:
                    heapq.heappop(self._due)[2]()
                self._wake.wait(self._due[0][0] - now_s if self._due else None)

    def counts(self) -> CrowdCounts:
        """Return what was seen so far."""
        first = next(iter(self.agents.values()))
        with self._lock:
            return CrowdCounts(
                events=self._events,
                event_bytes=self._event_bytes,
                cpu_s=time.process_time(),
                known=dict(self._known),
                active=dict(self._active),
                deciders=tuple(each.node for each in first.view.deciders.values()),
            )


class CrowdAgent:
    """One agent; its work runs on one thread of the pool at a time."""

    def __init__(self, crowd: Crowd, name: str) -> None:
        self._crowd, self._name = crowd, name
        plan = crowd.plan
        self._lock = threading.Lock()
        self._inbox: list[Callable[[], None]] = []
        self._scheduled = self._ended = False
        self._follows = True
        self._base = self.view = JobView(run=RUN, nodes={}, wanted={"trainer": plan.nodes})
        self._known = 0
        self._published: NodeRecord | None = None
        self._record = NodeRecord(
            node=name,
            incarnation=uuid.uuid4().hex,
            domain=f"rack{int(name[1:]) // 8}",
            sidecar="tcp://10.0.0.1:7000",
            slots={"trainer": 1},
        )
        self._part = AgentPart(
            name, incarnation=self._record.incarnation, expected=plan.nodes, most=plan.most
        )
        self.lease = crowd.calls().grant(_LEASE_S)
        self._own = connect(plan.coordinator, plan.key)
        self._watch: KeyWatch | None = None
        self._mode: bool | None = None
        self._look_after()

    # -- inputs --------------------------------------------------------------------------------

    def _look_after(self) -> None:
        """Watch what the agent's part wants."""
        whole = self._part.watches
        if whole is self._mode:
            return
        self._mode = whole
        if self._watch is not None:
            self._watch.close()

        def start(entries: Sequence[Entry]) -> None:
            self._count(entries)
            self._post(lambda: self._look(entries, whole=whole))

        def change(events: Sequence[KeyEvent]) -> None:
            self._count(events)
            self._post(lambda: self._look_at_changes(events, whole=whole))

        prefix = run_prefix(RUN) if whole else job_prefix(RUN)
        self._watch = KeyWatch(self._own, prefix, start=start, change=change)

    def _count(self, found: Sequence[Entry] | Sequence[KeyEvent]) -> None:
        self._crowd.saw(len(found), sum(len(each.key) + len(each.value) for each in found))

    def _post(self, act: Callable[[], None]) -> None:
        with self._lock:
            self._inbox.append(act)
            if self._scheduled or self._ended:
                return
            self._scheduled = True
        self._crowd.pool.submit(self._work)

    def _work(self) -> None:
        while True:
            with self._lock:
                inbox, self._inbox = self._inbox, []
                if not inbox or self._ended:
                    self._scheduled = False
                    return
            for act in inbox:
                act()
            self._carry_on()

    def end(self) -> None:
        """Lose the node: nothing is heard of it any more, and its lease ends."""
        with self._lock:
            self._ended = True
        if self._watch is not None:
            self._watch.close()
        self._crowd.calls().revoke(self.lease)

    def _look(self, entries: Sequence[Entry], *, whole: bool) -> None:
        if whole is self._mode:
            self._follows = not whole
            view = JobView(run=RUN, nodes={}, wanted=self.view.wanted)
            self._take(JobView.from_entries(entries, run=RUN, wanted=view.wanted, before=view))

    def _look_at_changes(self, events: Sequence[KeyEvent], *, whole: bool) -> None:
        if whole is self._mode and self._follows is not whole:
            newest = max(event.revision for event in events)
            after = self._base.after
            self._take(after(events) if whole else self._crowd.shared(newest, after, events))

    def _take(self, view: JobView) -> None:
        self._base = view
        self.view = following(view, self._record) if self._follows else view

    # -- decisions -----------------------------------------------------------------------------

    def _carry_on(self) -> None:
        registry = Registry(self._crowd.calls(), run=RUN, lease=lambda: self.lease)
        now_s = time.monotonic()
        self._follow_seating()
        self._enter()
        if not self._follows and self._part.decides(self.view):
            seats, _ = seating.seat(self.view, expect_nodes=self._crowd.plan.nodes)
            if isinstance(seats, seating.ChangeSeats):
                registry.seat(seats.seats, expected=seats.expected, beside=self._beside)
        self._decide(registry, now_s)
        self._publish(registry)
        self._take_part(registry, now_s)
        self._look_after()

    @property
    def _beside(self) -> JobView | None:
        return self.view if self._part.is_crowd else None

    def _follow_seating(self) -> None:
        for order in seating.seated_at(self._base).get(self._name, ()):
            attempts = [each.attempt for each in self._record.workers]
            if order.attempt > max(attempts, default=0):
                started = worker_of(order)
                self._record = msgspec.structs.replace(self._record, workers=(started,))

    def _enter(self) -> None:
        generation = self.view.generation
        if generation is None or generation.number <= max(self._known, self._part.fencing):
            return
        self._known = generation.number
        self._crowd.learned(generation.number)
        members = {member.incarnation for member in generation.members}
        self._record = entered(self._record, members)

    def _decide(self, registry: Registry, now_s: float) -> None:
        decision, reason = self._part.decide(
            self.view, own=lambda: self._record, follows=self._follows, now_s=now_s
        )
        match decision:
            case agree.Halt(generation=generation):
                self._part.begin_halt(generation, reason)
                self._part.standing = generation
                self._again(now_s)
            case agree.FenceWorkers(generation=generation):
                self._part.begin_fence(generation, reason)
                keeper = _keeper(self.view)
                self._record = keeper.fenced(self._record, generation)
            case agree.Propose(record=record, expected=expected):
                registry.propose(record, expected=expected, beside=self._beside)
                self._again(now_s + _RETRY_S)
            case agree.Idle(until_s=until_s) | agree.WaitForFences(until_s=until_s):
                self._again(until_s)

    def _publish(self, registry: Registry) -> None:
        if self._record == self._published:
            return
        if not registry.publish(self._record):
            self._again(time.monotonic() + _RETRY_S)
            return
        was, self._published = self._published, self._record
        if was is None or was.workers != self._record.workers:
            for worker in self._record.workers:
                if worker.state is WorkerState.ACTIVE:
                    self._crowd.entered(self._known)

    def _take_part(self, registry: Registry, now_s: float) -> None:
        move, again_s = self._part.next_move(
            self.view,
            own=lambda: self._record,
            follows=self._follows,
            leaves=False,
            waits=False,
            now_s=now_s,
        )
        match move:
            case Claim(place=place, decider=decider):
                registry.claim(place, decider)
            case Tell(bulletin=bulletin, expected=expected):
                registry.tell(bulletin, expected=expected)
        self._again(again_s)

    def _again(self, at_s: float | None) -> None:
        if at_s is not None:
            self._crowd.later(at_s, lambda: self._post(lambda: None))


_keepers: dict[int, Keeper] = {}


def _keeper(view: JobView) -> Keeper:
    """Return the blocks of the newest generation's sidecars: the same for all agents here."""
    found = _keepers.get(view.number)
    if found is None:
        found = Keeper(view.generation, step=view.number)
        _keepers.clear()
        _keepers[view.number] = found
    return found


def serve(plan: CrowdPlan, pipe: Connection) -> None:
    """Run the agents until the pipe ends; answer ``None`` with counts, a name with its loss."""
    collect_rarely()
    crowd = Crowd(plan)
    pipe.send(crowd.counts())
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        if order is not None:
            crowd.agents.pop(order).end()
        pipe.send(crowd.counts())
