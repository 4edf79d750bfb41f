"""The training of a simulated job, and the oracle that checks it.

The content of a step names the step before it and the generation that executed it. So a restored
snapshot of an abandoned timeline is recognized by its content, as real weights would show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.ckpt.errors import FencedError, InternalError
from holdfast.ckpt.sidecar.core.book import SnapshotKey
from holdfast.elastic.events import StateRestored, StepDone, StepProtected, TrainingResumed
from holdfast.elastic.membership.records import GenerationRecord, Member, WorkerState
from holdfast.elastic.testing.simulation.sidecar import SimulatedSidecar

if TYPE_CHECKING:
    from holdfast.elastic.testing.simulation.agent import SimulatedAgent
    from holdfast.elastic.testing.simulation.simulator import Simulation
    from holdfast.elastic.testing.simulation.worker import SimulatedWorker

_POLL_S = 0.01
_HOLD_S = 10.0
_CUT_POLL_S = 0.05
_PROTECTED_KEPT = 256  # of which only the newest counts; messages about others may come late


class InvariantError(InternalError):
    """The control plane did what it must never do."""


def require(condition: bool, text: str) -> None:
    """Raise ``InvariantError`` unless the condition holds."""
    if not condition:
        raise InvariantError(text)


class SimulatedTraining:
    """Executes steps while every member of the newest generation acts; keeps the true history."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.history: list[int] = [0]
        self.progress = -1
        self._contents: dict[SnapshotKey, int] = {}
        self._protected: dict[SnapshotKey, dict[str, str]] = {}
        self._durable = 0
        self._begun = 0
        self._stalled = 0
        self._cut, self._cut_s = 0, 0.0
        self.restores = {"memory": 0, "rebuilt": 0, "nothing": 0}

    def start_at(self, step: int) -> None:
        """Let the job begin with a checkpoint of ``step``, for jobs that have lived long."""
        self.history = [0] * (step + 1)
        self._durable = step

    # -- generations -----------------------------------------------------------------------------

    def accepted(self, record: GenerationRecord) -> None:
        """Check a generation when it is accepted, and roll the true history back to its origin."""
        for agent in self._sim.agents.values():
            for worker in agent.crew.workers.values():
                acting = agent.alive and worker.state is WorkerState.ACTIVE
                require(
                    not acting,
                    f"{worker.seat} on {agent.name} acts in generation {worker.active_in} while "
                    f"{record.number} is born",
                )
        origin = self._judge_restore(record)
        del self.history[origin + 1 :]
        self._protected = {k: v for k, v in self._protected.items() if k[1] <= origin}

    def _judge_restore(self, record: GenerationRecord) -> int:
        point = record.restore
        newest = max(self._protected, key=lambda key: (key[1], key[0]), default=None)
        if newest is not None:
            were, world = self._protected[newest], self._sim.generations[newest[0]].snapshots
            lost = {name for name, was in were.items() if record.nodes.get(name) != was}
            if all(len(lost & set(each)) <= world.parity for each in world.parity_groups()):
                require(
                    point is not None and point.step >= newest[1],
                    f"generation {record.number} restores {point and point.step}, but step "
                    f"{newest[1]} of {newest[0]} was protected and only {sorted(lost)} are lost",
                )
        if point is None:
            self.restores["nothing"] += 1
            self._protected.clear()
            self._durable = min(self._durable, len(self.history) - 1)
            return self._durable
        self.restores["rebuilt" if any(s.rebuilt for s in point.sources) else "memory"] += 1
        key = (point.world.generation, point.step)
        require(key in self._contents, f"{key} was never sealed")
        require(
            point.step < len(self.history) and self._contents[key] == self.history[point.step],
            f"generation {record.number} restores {key}: a future that was rolled back",
        )
        self._durable = min(self._durable, point.step)
        if newest and point.step < newest[1]:
            self._protected.clear()  # older steps may have been released where newer ones were lost
        return point.step

    def entered(self, number: int) -> None:
        """Note that a member has entered; once all have, the generation trains."""
        if number > self._begun and self._all_act(number):
            self._begun = number
            self._sim.schedule.soon(0.01, 0.05, lambda: self._begin(number))

    def _begin(self, number: int) -> None:
        if not self._all_act(number):
            if self._begun == number:
                self._begun = number - 1  # a member hangs, and may continue
        elif self._is_cut(number):
            self._sim.schedule.after(_CUT_POLL_S, lambda: self._begin(number))
        else:
            done = len(self.history) - 1
            self._sim.log(f"generation {number} goes on from step {done}")
            point = self._sim.generations[number].restore
            if point is not None:
                rebuilt = any(source.rebuilt for source in point.sources)
                tier = "parity" if rebuilt else "peer"
                self._sim.tell(StateRestored(generation=number, step=done, tier=tier))
            self._sim.tell(TrainingResumed(generation=number, step=done))
            self._snapshot(number)
            self._next(number)

    def _player(self, member: Member) -> tuple[SimulatedAgent, SimulatedWorker] | None:
        agent = self._sim.agents.get(member.node)
        worker = agent.crew.workers.get(member.seat) if agent and agent.alive else None
        if agent is None or worker is None or worker.incarnation != member.incarnation:
            return None
        return agent, worker

    def _all_act(self, number: int) -> bool:
        players = [self._player(member) for member in self._sim.generations[number].members]
        return all(p and p[1].active_in == number and not p[1].hung for p in players)

    # -- steps -----------------------------------------------------------------------------------

    def _next(self, number: int) -> None:
        self._sim.schedule.soon(*self._sim.config.step_s, lambda: self._step(number))

    def _step(self, number: int) -> None:
        if not self._all_act(number):
            self._stalled = number
            return
        if self._is_cut(number):
            self._sim.schedule.after(_CUT_POLL_S, lambda: self._step(number))
            return
        config = self._sim.config
        done = len(self.history) - 1
        if done >= config.steps:
            self._close(number)
            return
        newest = max((k[1] for k in self._protected), default=0)
        if done - newest > (config.spec.keep + 1) * config.snapshot_every:
            self._sim.schedule.after(_POLL_S, lambda: self._step(number))
            return
        require(self._sim.newest == number, f"a step of {number} while {self._sim.newest} is born")
        self.history.append(hash((self.history[-1], number, done + 1)))
        self._sim.tell(StepDone(generation=number, step=done + 1))
        halting = self._halting(number)
        if halting or (done + 1) % config.snapshot_every == 0:
            self._snapshot(number)
        if halting:
            self._sim.schedule.soon(*config.copy_s, lambda: self._stand(number))
        else:
            self._next(number)

    def _is_cut(self, number: int) -> bool:
        """Return whether two nodes of the group cannot connect.

        Then no member can train or begin.
        """
        record = self._sim.generations[number]
        if not self._sim.network.parts(record.nodes.keys()):
            self._cut = 0
            return False
        if self._cut != number:
            self._cut, self._cut_s = number, self._sim.now_s
            for node in dict.fromkeys(member.node for member in record.members):
                if (agent := self._sim.agents.get(node)) is not None:
                    agent.stand_by()
        return True

    def waited_s(self, number: int) -> float:
        """Return the time for which the members of a generation have waited for each other."""
        return self._sim.now_s - self._cut_s if self._cut == number > 0 else 0.0

    def _halting(self, number: int) -> list[SimulatedAgent]:
        """Return the agents that request the generation to halt after this step."""
        players = [self._player(member) for member in self._sim.generations[number].members]
        return [agent for agent, _ in filter(None, players) if agent.part.halting == number]

    def _stand(self, number: int) -> None:
        """Halt all members after their step until the generation is over."""
        for agent in self._halting(number):
            agent.stand(number)
        self._sim.schedule.after(
            _HOLD_S, lambda: self._next(number) if self._sim.newest == number else None
        )

    def woke(self, number: int) -> None:
        """Continue a member that hung, and its generation if nothing else is wrong."""
        if number > self._begun:
            self.entered(number)
        elif number == self._stalled and self._all_act(number):
            self._stalled = 0
            self._next(number)

    def _snapshot(self, number: int) -> None:
        step = len(self.history) - 1
        key = (number, step)
        self._contents[key] = self.history[step]
        for member in self._sim.generations[number].members:
            if player := self._player(member):
                self._write(key, member.rank, player=player)

    def _write(
        self, key: SnapshotKey, rank: int, *, player: tuple[SimulatedAgent, SimulatedWorker]
    ) -> None:
        agent, worker = player
        sidecar = agent.sidecar
        try:
            granted = sidecar.acquire(key)
        except FencedError:
            return
        if not granted and worker.active_in == key[0]:
            self._sim.schedule.after(_POLL_S, lambda: self._write(key, rank, player=player))
        elif granted:
            # a parked worker finishes its copy, a dead one does not
            self._sim.schedule.soon(
                *self._sim.config.copy_s,
                lambda: None if worker.state is WorkerState.DEAD else sidecar.seal(key, rank),
            )

    def protected(self, sidecar: SimulatedSidecar, key: SnapshotKey) -> None:
        """Note that a sidecar sees a snapshot as protected; from now on it must not be lost."""
        record = self._sim.generations[key[0]]
        step = key[1]
        valid = step < len(self.history) and self.history[step] == self._contents[key]
        if not valid or key in self._protected:
            return
        self._protected[key] = dict(record.nodes)
        if len(self._protected) > _PROTECTED_KEPT:
            del self._protected[next(iter(self._protected))]
        self._sim.tell(StepProtected(generation=key[0], step=step))
        self.progress = max(self.progress, step)
        if step % self._sim.config.checkpoint_every == 0:
            self._durable = max(self._durable, step)

    def _close(self, number: int) -> None:
        """Run the barrier after the last step: all members pass it, and each reports by itself."""
        for member in self._sim.generations[number].members:
            player = self._player(member)
            if player is None:
                continue
            agent, worker = player

            def report(agent: SimulatedAgent = agent, worker: SimulatedWorker = worker) -> None:
                if worker.active_in == number:
                    worker.state, worker.active_in = WorkerState.DONE, 0
                    agent.publish()

            self._sim.schedule.soon(0.005, 0.05, report)
