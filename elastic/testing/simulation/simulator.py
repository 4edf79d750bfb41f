"""The simulator: a whole job on virtual time, with production decisions, faults and invariants.

`Simulation(config, seed=…).run()` returns a report or raises ``InvariantError``. Equal seeds give
equal runs on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TypeAlias

from holdfast.ckpt.sidecar.core.book import SnapshotKey
from holdfast.elastic.coordinator.memory import KeyValueTable
from holdfast.elastic.decisions import agree, seating
from holdfast.elastic.decisions.deciding import MOST_WATCHERS, PLACES
from holdfast.elastic.events import Event, GenerationProposed, JobEnded, RankReformed
from holdfast.elastic.membership.records import (
    TRAINER,
    Decider,
    GenerationRecord,
    JobOutcome,
    JobSpec,
    RoleAsk,
    WorkerState,
)
from holdfast.elastic.membership.view import (
    JobView,
    decider_key,
    decode,
    encode,
    generation_key,
    outcome_key,
    role_of,
    run_prefix,
    seating_key,
    slot_of,
)
from holdfast.elastic.testing.simulation.agent import SimulatedAgent
from holdfast.elastic.testing.simulation.faults import SimulatedFault, draw_faults
from holdfast.elastic.testing.simulation.injection import Injection
from holdfast.elastic.testing.simulation.job_keys import check_parts
from holdfast.elastic.testing.simulation.network import SimulatedNetwork
from holdfast.elastic.testing.simulation.reading import unreadable
from holdfast.elastic.testing.simulation.schedule import Schedule
from holdfast.elastic.testing.simulation.sidecar import PAYLOAD_BYTES, SimulatedSidecar
from holdfast.elastic.testing.simulation.training import InvariantError, SimulatedTraining, require
from holdfast.elastic.testing.simulation.worker import SimulatedWorker

_EXPIRY_TICK_S = 0.02
_RESEND_S = 0.2
_MAX_RESENDS = 200
_MAX_EVENTS_SHOWN = 80

Watch: TypeAlias = Callable[[Event], None]
"""Called with the kind of an event, the node ("" for the whole job) and its fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """A job and its faults. Pairs of seconds are bounds of a random delay.

    ``notice_s`` is the time that an agent takes to see a change at the coordinator, besides the
    network delay. ``domains`` is the number of failure domains of the nodes (0: each its own);
    ``slots_of`` and ``domains_of`` set slots and domains of single nodes. A rank's block has about
    ``payload_bytes``. With more than ``most_watchers`` nodes ``deciders`` agents decide
    and the others follow.

    ``faults`` bursts of one to three faults each happen before ``calm_s``; then all faults end, and
    the job must end within ``patience_s``.

    At each time of ``asks`` rank 0 asks for the numbers of workers given there, by role.
    """

    nodes: int = 3
    wanted: dict[str, int] = field(default_factory=lambda: {"trainer": 3})
    slots: dict[str, int] = field(default_factory=lambda: {"trainer": 2, "rollout": 1})
    spec: JobSpec = field(default_factory=JobSpec)
    steps: int = 120
    snapshot_every: int = 1
    checkpoint_every: int = 10
    step_s: tuple[float, float] = (0.03, 0.06)
    copy_s: tuple[float, float] = (0.002, 0.03)
    startup_s: tuple[float, float] = (0.2, 2.0)
    notice_s: tuple[float, float] = (0.0, 0.015)
    domains: int = 0
    slots_of: dict[str, dict[str, int]] = field(default_factory=dict)
    domains_of: dict[str, str] = field(default_factory=dict)
    faults: int = 8
    calm_s: float = 15.0
    patience_s: float = 60.0
    expect_nodes: int = 0
    max_attempts: int = 10_000
    payload_bytes: int = PAYLOAD_BYTES
    most_watchers: int = MOST_WATCHERS
    deciders: int = PLACES
    asks: tuple[tuple[float, dict[str, int]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """The results of a run, for assertions of tests and to judge whether a seed is useful."""

    outcome: JobOutcome
    ended_s: float
    generations: int
    faults: dict[str, int]
    restores: dict[str, int]


class Simulation:
    """One run; also the network of the sidecars and the coordinator of the agents."""

    def __init__(
        self, config: SimulationConfig, *, seed: int, faults: Sequence[SimulatedFault] | None = None
    ) -> None:
        """Prepare a run with the given faults, or with those of ``seed``."""
        self.config, self.run_id = config, "sim"
        self.schedule = Schedule(seed)
        self.network = SimulatedNetwork(self.schedule.random)
        self.faults = faults_of(config, seed=seed) if faults is None else tuple(faults)
        self.is_out = False
        self.injection = Injection(self)
        self.watch: Watch | None = None
        self.table = KeyValueTable()
        self.agents: dict[str, SimulatedAgent] = {}
        self.addresses: dict[str, SimulatedSidecar] = {}
        self.generations: dict[int, GenerationRecord] = {}
        self.training = SimulatedTraining(self)
        self.outcome: JobOutcome | None = None
        self.looks = {"watcher": 0, "follower": 0}
        self._view = JobView(run=self.run_id, nodes={}, wanted=config.wanted, revision=-1)
        self._fresh = 0
        self._starts: dict[str, int] = {}

    # -- calls of agents and sidecars ------------------------------------------------------------

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self.schedule.now_s

    @property
    def newest(self) -> int:
        """The newest generation's number."""
        return len(self.generations)

    @property
    def progress(self) -> int:
        """The newest protected step."""
        return self.training.progress

    def fresh(self) -> int:
        """Return a number not used before."""
        self._fresh += 1
        return self._fresh

    def log(self, text: str) -> None:
        """Add a line to the trace."""
        self.schedule.log(text)

    def tell(self, event: Event) -> None:
        """Report an event to the watcher, as a real job's event files would.

        Events common to all ranks of a generation are reported once, as of rank 0 and of no node.
        """
        if self.watch is not None:
            self.watch(event)

    def view(self) -> JobView:
        """Return the view at the table's present revision; all callers share it."""
        if self._view.revision != self.table.revision:
            entries, revision = self.table.range(run_prefix(self.run_id))
            self._view = JobView.from_entries(
                entries,
                run=self.run_id,
                wanted=self.config.wanted,
                revision=revision,
                before=self._view,
            )
        return self._view

    def grant(self, ttl_s: float) -> int:
        """Grant a lease."""
        return self.table.grant(ttl_s, now_s=self.now_s)

    def put(self, key: str, value: str, lease: int) -> int:
        """Write a node's record and notify every agent that watches."""
        revision = self.table.put(key, value, lease=lease)
        self._changed(job=False)
        return revision

    def put_part(self, key: str, value: str) -> None:
        """Write a part of a record; no agent looks because of it."""
        self.table.put(key, value)

    def remove(self, key: str) -> bool:
        """Delete a part of a record, which nobody may need any more."""
        done = self.table.delete(key)
        for each in (generation_key(self.run_id), seating_key(self.run_id)):
            check_parts(self, each)
        return done

    def claim(self, place: int, decider: Decider, lease: int) -> bool:
        """Give a free place of a decider to an agent, and notify every agent."""
        key = decider_key(self.run_id, place)
        done = self.table.compare_and_set(key, encode(decider), expected=0, lease=lease)
        if done:
            self.log(f"{decider.incarnation} is decider {place}")
            self._changed()
        return done

    def compare_and_set(self, key: str, value: str, expected: int, *, by: str) -> bool:
        """Write a record if the revision is the expected one; check generations and outcomes."""
        if not self.table.compare_and_set(key, value, expected=expected):
            return False
        check_parts(self, key)
        if key == generation_key(self.run_id):
            record = self.view().generation
            assert record is not None
            self.log(f"{by} proposed: {record.reason}")
            require(record.number == self.newest + 1, f"{record.number} follows {self.newest}")
            self.training.accepted(record)
            self.generations[record.number] = record
            self.tell(
                GenerationProposed(
                    node=by,
                    generation=record.number,
                    ranks=tuple(member.seat for member in record.members),
                    restore_step=record.restore.step if record.restore else None,
                    reason=record.reason,
                )
            )
        elif key == outcome_key(self.run_id):
            self.outcome = decode(key, value, JobOutcome)
            self.log(f"{by} ended the job: {self.outcome.message}")
            self.tell(JobEnded(node=by, ok=self.outcome.ok, message=self.outcome.message))
        self._changed()
        return True

    def judge(self, agent: SimulatedAgent, decision: agree.Decision, reason: str) -> None:
        """Check a decision against the view it was made from."""
        require(bool(reason), f"{decision} has no reason")
        if not isinstance(decision, agree.Propose):
            return
        view, record = agent.view, decision.record
        ready = {w.incarnation for _, w in view.workers() if w.state is WorkerState.READY}
        seats = {order.seat for order in view.seating}
        for member in record.members:
            require(member.incarnation in ready, f"{member.seat} was not READY when proposed")
            require(member.seat in seats, f"{member.seat} is a member without a seat")
        living = {name: each.sidecar for name, each in self.agents.items() if each.alive}
        size = self.config.payload_bytes
        if record.restore and (
            lack := unreadable(record.restore, view=view, sidecars=living, payload_bytes=size)
        ):
            require(False, f"generation {record.number} restores what cannot be read: {lack}")
        spec = self.config.spec
        require(len(record.members) >= spec.least, f"{len(record.members)} members are too few")

    def judge_seats(self, agent: SimulatedAgent, decision: seating.ChangeSeats) -> None:
        """Check a new seating against the view it was made from."""
        wanted, view = self.config.wanted, agent.view
        roles = Counter(role_of(order.seat) for order in decision.seats)
        require(
            roles.total() == sum(wanted.values()) and roles.keys() == wanted.keys(),
            f"{dict(roles)} are seated, {wanted} were configured",
        )
        used = Counter((order.node, slot_of(order)) for order in decision.seats if order.node)
        for (name, role), count in used.items():
            has = view.nodes[name].slots.get(role, 0) if name in view.nodes else count
            require(count <= has, f"{name} has {has} slots of {role} and is to use {count}")

    def entered(self, agent: SimulatedAgent, worker: SimulatedWorker) -> None:
        """Note that a worker has entered a generation."""
        require(
            worker.active_in > agent.fenced,
            f"{worker.seat} enters {worker.active_in}, fenced by {agent.name} up to {agent.fenced}",
        )
        self.tell(RankReformed(node=agent.name, seat=worker.seat, generation=worker.active_in))
        if role_of(worker.seat) == TRAINER:
            self.training.entered(worker.active_in)

    def post(
        self, source: SimulatedSidecar, address: str, act: Callable[[SimulatedSidecar], None]
    ) -> None:
        """See `Network.post`: lost messages are sent again, so their order is arbitrary."""
        self._post(source, self.addresses[address], act, resends=0)

    def _post(
        self,
        source: SimulatedSidecar,
        target: SimulatedSidecar,
        act: Callable[[SimulatedSidecar], None],
        *,
        resends: int,
    ) -> None:
        copies = self.network.fate(source.node, target.node)
        for delay_s in copies:
            self.schedule.after(delay_s, lambda: act(target) if target.alive else None)
        if not copies and source.alive and target.alive and resends < _MAX_RESENDS:
            again = partial(self._post, source, target, act, resends=resends + 1)
            self.schedule.after(_RESEND_S, again)

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """See `Network.later`."""
        self.schedule.after(delay_s, act)

    def sealed(self, sidecar: SimulatedSidecar, key: SnapshotKey) -> None:
        """Check that a sidecar does not accept a block of a generation that it knows to be over."""
        group = self.generations[self.newest].nodes.get(sidecar.node)
        over = key[0] < self.newest and group is not None
        owner = next((a for a in self.agents.values() if a.sidecar is sidecar), None)
        require(
            not (over and owner is not None and owner.fenced >= key[0]),
            f"{sidecar.address} takes a block of generation {key[0]}, which it has fenced",
        )

    def domain_of(self, node: str) -> str:
        """Return the failure domain of a node."""
        if node in self.config.domains_of:
            return self.config.domains_of[node]
        return f"d{int(node[1:]) % self.config.domains}" if self.config.domains else node

    def protected(self, sidecar: SimulatedSidecar, key: SnapshotKey) -> None:
        """See `Network.protected`."""
        self.training.protected(sidecar, key)

    def _changed(self, *, job: bool = True) -> None:
        for agent in self.agents.values():
            if job or not agent.follows:
                agent.notice()

    # -- the run ---------------------------------------------------------------------------------

    def run(self) -> SimulationReport:
        """Run the job to its end. Raises ``InvariantError`` with the trace's end."""
        config = self.config
        for number in range(config.nodes):
            self.schedule.soon(0.0, 0.2, partial(self.start_node, f"n{number}"))
        self.injection.begin(self.faults)
        for at_s, roles in config.asks:
            self.schedule.after(at_s, partial(self._ask, roles))
        self.schedule.after(config.calm_s + 0.5, self.injection.mend)
        self._expire()
        try:
            limit_s = config.calm_s + config.patience_s
            self.schedule.run(limit_s, stop=lambda: self.outcome is not None)
            require(self.outcome is not None, f"the job did not end by {limit_s} s")
        except InvariantError as error:
            lines = list(self.schedule.trace)[-_MAX_EVENTS_SHOWN:]
            raise InvariantError("\n".join([*lines, f"{self.now_s:9.3f} {error}"])) from error
        assert self.outcome is not None
        complete = len(self.training.history) - 1 >= config.steps
        require(complete or not self.outcome.ok, f"ended well at {len(self.training.history) - 1}")
        return SimulationReport(
            outcome=self.outcome,
            ended_s=self.now_s,
            generations=self.newest,
            faults=dict(sorted(self.injection.counts.items())),
            restores=self.training.restores,
        )

    def _ask(self, roles: dict[str, int]) -> None:
        """Let rank 0 ask for other numbers of workers, if it acts."""
        record = self.generations.get(self.newest)
        first = record.members[0] if record else None
        agent = self.agents.get(first.node) if first else None
        if first is None or agent is None or not agent.alive:
            return
        worker = agent.crew.workers.get(first.seat)
        if worker is not None and worker.incarnation == first.incarnation and worker.acts:
            self.log(f"{first.seat} on {first.node} asks for {roles}")
            worker.asks = RoleAsk(generation=self.newest, roles=roles, reason="a test")
            agent.publish()

    def start_node(self, name: str) -> None:
        """Start a node, unless it lives."""
        if (agent := self.agents.get(name)) and agent.alive:
            return
        number = self._starts[name] = self._starts.get(name, 0) + 1
        self.log(f"{name} starts (#{number})")
        slots = self.config.slots_of.get(name, self.config.slots)
        self.agents[name] = SimulatedAgent(self, name, slots=slots, number=number)

    def outage(self, seconds: float) -> None:
        """Make the coordinator unreachable.

        No lease ends meanwhile, because none could be renewed.
        """
        if self.is_out:
            return
        self.is_out = True

        def back() -> None:
            self.is_out = False
            self.table.postpone(seconds)
            self._changed()

        self.schedule.after(seconds, back)

    def _expire(self) -> None:
        if not self.is_out and self.table.expire(self.now_s):
            self._changed()
        next_s = self.table.next_expiry_s()
        wait_s = _EXPIRY_TICK_S if next_s is None else next_s - self.now_s
        self.schedule.after(max(wait_s, _EXPIRY_TICK_S), self._expire)


def faults_of(config: SimulationConfig, *, seed: int) -> tuple[SimulatedFault, ...]:
    """Return the faults of a job under this seed."""
    return draw_faults(
        Random(f"faults of {seed}"),
        bursts=config.faults,
        nodes=config.nodes,
        until_s=config.calm_s,
    )
