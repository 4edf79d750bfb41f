"""The reports of a simulated job: the history of its ranks and the events of its agents.

A snapshot carries a digest of all samples that led to it, as weights would. Production code decides
which microbatches a rank runs and where their samples lie.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from holdfast.elastic.data.sampler import positions
from holdfast.elastic.events import (
    Event,
    FaultInjected,
    JobStarted,
    StateRestored,
    StepDone,
    TrainingResumed,
    encode,
)
from holdfast.elastic.events.log import events_file
from holdfast.elastic.planning.shares import part
from holdfast.elastic.testing.simulation.simulator import Simulation
from holdfast.tools.chaos.judging.history import of_events
from holdfast.tools.chaos.judging.record import Consumed, History, HookLine, Stated, StepCommit
from holdfast.tools.chaos.scenarios.strikes import Strike

_FILE: Final = "history-simulated.jsonl"


class Telling:
    """Records the events of a simulation; ``names`` are the nodes' names in the scenario."""

    def __init__(self, sim: Simulation, *, microbatches: int, names: tuple[str, ...]) -> None:
        self._sim, self._microbatches, self._names = sim, microbatches, names
        self._lines: list[HookLine] = []
        self._events: list[Event] = []
        self._line, self._begun_s = [""], 0.0
        self._digests: dict[tuple[int, int], str] = {}
        self._note(JobStarted(node="launcher", source="launcher", nodes=names))

    @property
    def history(self) -> History:
        """The history that the ranks reported."""
        return of_events(self._lines)

    def write(self, folder: Path) -> None:
        """Write the history and the events as real jobs do: JSON lines, in two files."""
        folder.mkdir(parents=True, exist_ok=True)
        hooks = (msgspec.json.encode(each) + b"\n" for each in self._lines)
        (folder / _FILE).write_bytes(b"".join(hooks))
        events = (encode(each) + b"\n" for each in self._events)
        events_file(folder, "simulated").write_bytes(b"".join(events))

    def saw(self, event: Event) -> None:
        """Record an event of the simulation."""
        if isinstance(event, StepDone):
            self._step(event.generation, event.step)
            return
        if isinstance(event, TrainingResumed):
            self._resume(event.generation, event.step)
        node = self._names[int(event.node[1:])] if event.node else ""
        self._note(msgspec.structs.replace(event, node=node, source="agent"))

    def strike(self, strike: Strike, victim: str, node: str) -> None:
        """Record a strike that hit."""
        self._note(
            FaultInjected(
                node="chaos",
                source="chaos",
                what=strike.kind,
                victim=victim,
                on=node,
                number=strike.number,
            )
        )

    def _note(self, event: Event) -> None:
        time_s = round(self._sim.now_s, 6)
        self._events.append(msgspec.structs.replace(event, time_s=time_s))

    def _resume(self, generation: int, step: int) -> None:
        """Continue from the restored snapshot, or from the newest checkpoint."""
        point = self._sim.generations[generation].restore
        if point is not None:
            digest = self._digests[point.world.generation, point.step]
            self._line[point.step :] = [digest]
        else:
            del self._line[step + 1 :]
            tier = "checkpoint" if step else "none"
            self._note(StateRestored(source="agent", generation=generation, step=step, tier=tier))
        self._begun_s = self._sim.now_s
        self._digests[generation, step] = self._line[-1]

    def _step(self, generation: int, step: int) -> None:
        record = self._sim.generations[generation]
        ranks = len(record.members)
        ids = {
            rank: [
                position
                for microbatch in part(
                    self._microbatches, rank=rank, ranks=ranks, shares=record.shares
                )
                for position in positions(
                    step=step - 1, microbatch=microbatch, microbatches=self._microbatches, size=1
                )
            ]
            for rank in range(ranks)
        }
        used = sorted(each for own in ids.values() for each in own)
        text = f"{self._line[-1]} {step} {used}"
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._line.append(digest)
        self._digests[generation, step] = digest
        begun_s, self._begun_s = self._begun_s, self._sim.now_s
        began_t, t = round(begun_s, 6), round(self._sim.now_s, 6)
        for rank, own in ids.items():
            at = {"step": step, "rank": rank, "attempt": generation}
            self._lines.append(Consumed(t=began_t, epoch=0, ids=tuple(own), **at))
            self._lines.append(StepCommit(t=t, **at))
            self._lines.append(Stated(t=t, digest=digest, **at))
