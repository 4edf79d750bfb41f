"""Bugs of workers that move between roles, found by the simulator in jobs whose rank 0 asks.

The trial is a job of two or three nodes with trainers and rollout workers, under drawn faults and
drawn asks. Beside the simulator's own invariants it judges every seating that is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import msgspec

from holdfast.elastic.decisions.seating import ChangeSeats
from holdfast.elastic.membership.records import JobSpec, NodeRecord, Seating, WorkerState
from holdfast.elastic.membership.view import role_of
from holdfast.elastic.testing.simulation.agent import SimulatedAgent
from holdfast.elastic.testing.simulation.simulator import Simulation, SimulationConfig
from holdfast.elastic.testing.simulation.training import InvariantError, require
from mutants.bug import Bug

_LONG_S: Final = 2.5


class MovingSimulation(Simulation):
    """A simulation that judges seatings: roles change only where that was asked for, or needed."""

    seated_s = 0.0

    def judge_seats(self, agent: SimulatedAgent, decision: ChangeSeats) -> None:
        super().judge_seats(agent, decision)
        view = agent.view
        before, roles = _roles(view.seating), _roles(decision.seats)
        self.seated_s = self.now_s
        if not view.seating or roles == before:
            return
        starved = any(not order.node for order in view.seating)
        asked = roles in [dict(counts) for _, counts in self.config.asks]
        require(asked or starved, f"{roles} are seated, and nobody asked for that")
        if starved:
            return
        orders = {order.seat: (order.node, order.attempt) for order in view.seating}
        busy = {
            worker.seat: (node.node, worker.attempt)
            for node, worker in view.workers()
            if worker.state in (WorkerState.READY, WorkerState.ACTIVE)
        }
        require(busy == orders, f"workers move while others come and go: {orders}, {busy}")

    def without_worker(self) -> list[str]:
        """Return the seats whose worker has not come, though all is long as it is."""
        if self.now_s < max(self.seated_s, self.config.calm_s) + _LONG_S:
            return []
        came = {
            (agent.name, worker.seat)
            for agent in self.agents.values()
            for worker in agent.crew.workers.values()
            if agent.alive and worker.state not in (WorkerState.STARTING, WorkerState.DEAD)
        }
        seats = [(order.node, order.seat) for order in self.view().seating]
        return [seat for node, seat in seats if (node, seat) not in came]


def _roles(seats: Sequence[Seating]) -> dict[str, int]:
    return dict(Counter(role_of(order.seat) for order in seats))


def moving_config(seed: int, *, faults: int = 1) -> SimulationConfig:
    """Draw a job with one or two slots of each role on a node, and asks in its time."""
    random = Random(f"moving {seed}")
    nodes = random.choice((2, 3, 3))
    trainers, rollouts = random.randint(1, nodes), random.randint(1, nodes)
    total = trainers + rollouts
    asks: list[tuple[float, dict[str, int]]] = []
    for _ in range(random.randint(1, 5)):
        count = random.randint(1, total - 1)
        at_s = round(random.uniform(0.8, 6.0), 3)
        asks.append((at_s, {"trainer": count, "rollout": total - count}))
    return SimulationConfig(
        nodes=nodes,
        wanted={"trainer": trainers, "rollout": rollouts},
        slots={"trainer": 1, "rollout": random.choice((1, 1, 2))},
        spec=JobSpec(min_dp=random.choice((1, 1, min(2, trainers)))),
        steps=260,
        startup_s=(0.1, 0.6),
        faults=faults,
        calm_s=6.0,
        expect_nodes=nodes,
        asks=tuple(sorted(asks, key=lambda ask: ask[0])),
    )


def trial(seed: int) -> str:
    """Run the job of a seed under its faults and asks; return the broken invariant, or ""."""
    simulation = MovingSimulation(moving_config(seed), seed=seed)
    try:
        report = simulation.run()
    except InvariantError as error:
        return str(error).rpartition("\n")[2].strip()
    if not report.outcome.ok:
        return f"the job failed: {report.outcome.message}"
    late = simulation.without_worker()
    return f"{', '.join(late)} has no worker, long after it was seated" if late else ""


def _forgets_the_slot(real: Callable[..., Seating]) -> Any:
    def retry(order: Seating, worker: Any, *, progress: int) -> Seating:
        return msgspec.structs.replace(real(order, worker, progress=progress), slot="")

    return retry


def _moves_at_any_time(_real: Any) -> Any:
    return lambda view: True


def _takes_who_moved(real: Callable[..., Any]) -> Any:
    def parked(node: NodeRecord, orders: Any) -> Any:
        seats = {worker.seat for worker in node.workers} - orders.keys()
        here = {worker.seat: (node.node, worker.attempt) for worker in node.workers}
        return real(node, {**orders, **{seat: here[seat] for seat in seats}})

    return parked


def _keeps_who_moved(_real: Any) -> Any:
    return lambda view: {}


def _bug(name: str, about: str, where: str, broken: Callable[[Any], Any], seed: int) -> Bug:
    return Bug(name=name, about=about, where=where, broken=broken, trial="moving", seed=seed)


BUGS: Final = (
    _bug(
        "slot-forgotten",
        "a worker that moved to another role and died comes back in a slot of its own",
        "holdfast.elastic.decisions.seating:_retry",
        _forgets_the_slot,
        5,
    ),
    _bug(
        "restless-roles",
        "workers move between roles while another change is under way",
        "holdfast.elastic.decisions.moving:_is_quiet",
        _moves_at_any_time,
        0,
    ),
    _bug(
        "moved-member",
        "a trainer that moved to another role is a member of the next generation",
        "holdfast.elastic.membership.readiness:_parked",
        _takes_who_moved,
        0,
    ),
    _bug(
        "unmoved-member",
        "a generation does not end for a trainer that moves to another role",
        "holdfast.elastic.decisions.moving:moved_away",
        _keeps_who_moved,
        21,
    ),
)
