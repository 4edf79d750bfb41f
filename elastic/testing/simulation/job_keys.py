"""The keys of the whole job as one simulated agent reads and writes them.

A follower has no other view of the job: it takes over the difference of each new record from the
one that it has, and reads parts where it has none, as `holdfast.elastic.agent.watch` does. Its
record is then compared with the one that was proposed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from holdfast.ckpt.errors import HoldfastError
from holdfast.elastic.coordinator.base import Entry, EventKind, KeyEvent
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.membership.divided import (
    DividedRecord,
    head_of,
    lacking,
    parts_of,
    superseded,
    whole_text,
)
from holdfast.elastic.membership.records import GenerationRecord, Seating
from holdfast.elastic.membership.view import JobView, decode, generation_key, job_prefix
from holdfast.elastic.testing.simulation.training import require

if TYPE_CHECKING:
    from holdfast.elastic.testing.simulation.agent import SimulatedAgent
    from holdfast.elastic.testing.simulation.simulator import Simulation

_PARTS_S = (0.0, 0.03)
"""Time until parts are read: a newer record may have replaced them by then."""


class SimulatedJobKeys:
    """The keys of `view.job_prefix` as a follower knows them; ``heard`` takes each new state."""

    def __init__(self, agent: SimulatedAgent, heard: Callable[[JobView], None]) -> None:
        self._agent, self._sim, self._heard = agent, agent.sim, heard
        self._prefix = job_prefix(agent.sim.run_id)
        self._view: JobView | None = None
        self._waits = False
        self._readings = 0

    def forget(self) -> None:
        """Begin anew with the next reading: the agent watches all records now."""
        self._view, self._waits = None, False
        self._readings += 1

    def read(self) -> None:
        """Read the changes since the last time, or everything."""
        if self._waits:
            return
        table, revision = self._sim.table, self._sim.table.revision
        if self._view is None:
            entries, revision = table.range(self._prefix)
            self._with_parts(entries, follows=False, revision=revision)
            return
        events = table.events(self._prefix, after=self._view.revision)
        if any(event.kind is EventKind.RESET for event in events):
            self._view = None
            self.read()
        else:
            self._with_parts(events, follows=True, revision=revision)

    def _with_parts(
        self, found: Sequence[Entry] | Sequence[KeyEvent], *, follows: bool, revision: int
    ) -> None:
        needed = lacking(((each.key, each.value) for each in found), follows=follows)
        if not needed:
            self._take(found, [], revision=revision)
            return
        self._waits, reading = True, self._readings

        def fetch() -> None:
            if reading != self._readings:
                return
            if self._sim.is_out:
                self._agent.soon(*_PARTS_S, fetch)
                return
            self._waits = False
            parts = [self._sim.table.get(key) for key in needed]
            there = [part for part in parts if part is not None]
            if len(there) == len(needed):
                self._take(found, there, revision=revision)
            else:
                self._view = None
            self._agent.notice()

        self._agent.soon(*_PARTS_S, fetch)

    def _take(
        self,
        found: Sequence[Entry] | Sequence[KeyEvent],
        parts: Sequence[Entry],
        *,
        revision: int,
    ) -> None:
        told = [
            KeyEvent(kind=EventKind.PUT, key=each.key, value=each.value, revision=each.revision)
            if isinstance(each, Entry)
            else each
            for each in (*parts, *found)
        ]
        view = self._view or JobView(run=self._sim.run_id, nodes={}, wanted=self._sim.config.wanted)
        try:
            self._view = view = view.after(told, revision=revision)
        except CoordinatorError as error:
            require(False, f"{self._agent.name} cannot read {error}")
        proposed = self._sim.generations.get(view.number)
        require(
            view.generation == proposed,
            f"{self._agent.name} reads another generation {view.number} than was proposed",
        )
        self._heard(view)


def check_parts(sim: Simulation, key: str) -> None:
    """Check that a node without any record can read the divided one that stands under ``key``."""
    entry = sim.table.get(key)
    head = None if entry is None else head_of(key, entry.value)
    if entry is None or head is None:
        return
    parts = {each.key: each.value for each in sim.table.range(parts_of(key))[0]}
    kind = GenerationRecord if key == generation_key(sim.run_id) else tuple[Seating, ...]
    try:
        whole = decode(key, whole_text(key, head, parts), kind)
    except CoordinatorError as error:
        require(False, f"nobody new can read {error}")
    require(sim.view().decoded[key][1] == whole, f"{key}: difference and parts are two records")


def set_divided(agent: SimulatedAgent, key: str, record: DividedRecord, *, expected: int) -> None:
    """Write the parts of a record, then its head, then remove the parts that it supersedes."""
    sim, name = agent.sim, f"set {key}"
    if agent.calls.is_waiting(name):
        return
    left = deque(record.parts.items())

    def proceed(result: object) -> None:
        if isinstance(result, HoldfastError):
            agent.notice()
        elif left:
            part, text = left.popleft()
            agent.calls.make(name, lambda: sim.put_part(part, text), proceed)
        else:
            agent.calls.make(
                name, lambda: sim.compare_and_set(key, record.head, expected, by=agent.name), clean
            )

    def clean(result: object) -> None:
        if result is True:
            there = [entry.key for entry in sim.table.range(parts_of(key))[0]]
            for part in superseded(key, there, base=expected, own=record.parts):
                agent.calls.make(f"remove {part}", lambda part=part: sim.remove(part), _ignored)  # type: ignore[misc]
        agent.notice()

    proceed(None)


def _ignored(result: object) -> None:
    """Take no notice: what is not removed now is removed after the next change."""
