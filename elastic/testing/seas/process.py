"""A model of an island's process: what is left of it after a kill, and how it goes on."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from random import Random
from typing import Final, Protocol

from holdfast.ckpt.errors import StoreError
from holdfast.elastic.errors import SeaError
from holdfast.elastic.islands.counters import NONE, IslandCounters, IslandNumbers
from holdfast.elastic.sea.records import DealtData
from holdfast.elastic.sea.settings import Islands
from holdfast.elastic.testing.seas.guarding import ModelGuard
from holdfast.elastic.testing.seas.ledger import Units
from holdfast.elastic.testing.seas.oracle import Oracle
from holdfast.elastic.testing.seas.store import SimulatedStore
from holdfast.elastic.testing.seas.tasks import Tasks

TURNED_AWAY: Final = "turned away"
"""In place of final weights: the island came without a state when the sea was over."""

_HALT_S: Final = 1000.0


@dataclass(slots=True, kw_only=True)
class RunState:
    """The tracked state of a run after ``step`` steps; the last tide began after ``departed``.

    ``trained`` are the positions of the samples that the lineage has trained, where they are dealt.
    ``seen`` is the number of complete steps at which the loss guard sees a fault in own work.
    """

    step: int
    numbers: IslandNumbers
    sea: list[dict[str, int]]
    own: list[Units]
    payloads: dict[int, bytes] = field(default_factory=dict)
    expected: list[int] = field(default_factory=list)
    departed: int | None = None
    trained: list[int] = field(default_factory=list)
    seen: int | None = None


class ModelLife(Protocol):
    """One life of the process."""

    def __init__(self, model: ModelIsland, state: RunState) -> None: ...

    def main(self) -> None:
        """Train to the end."""
        ...

    def damage(self, random: Random) -> None:
        """Change a number of the sea's weights."""
        ...


class ModelIsland:
    """An island that trains ``steps`` steps; kills and restores are the simulation's.

    With ``data`` the logbook deals it samples, and it trains as long as there are some.

    ``seconds`` is the time of a step. With ``exact`` a step that is executed again makes the same
    work. With a notice, since ``noticed_s``, it hands over at the end of a step, and waits for
    nobody before that; ``handed_over`` has the seconds that it took. ``guard`` watches its loss.
    """

    def __init__(  # noqa: PLR0913 - made in one place, all by keyword
        self,
        islands: Islands,
        *,
        steps: int,
        seconds: float,
        tasks: Tasks,
        store: SimulatedStore,
        oracle: Oracle,
        random: Random,
        exact: bool,
        guard: ModelGuard,
        data: DealtData | None = None,
        life: type[ModelLife],
    ) -> None:
        self.data = data
        self._kind = life
        self.islands, self.steps, self.seconds = islands, steps, seconds
        self.tasks, self.store, self.oracle, self.random = tasks, store, oracle, random
        self.exact, self.guard = exact, guard
        self.name = islands.name
        self.runs = self.attempts = self.crashes = 0
        self.noticed_s: float | None = None
        self.handed_over: list[float] = []
        self.final: str | None = None
        self.snapshots: dict[int, tuple[RunState, float, float]] = {}
        self._life: ModelLife | None = None

    # -- the process -----------------------------------------------------------------------------

    def start(self, *, after_s: float = 0.0, run: bool = True) -> None:
        """Start the process; it continues from the newest snapshot that is left."""
        self.attempts += 1
        self.runs += run
        self.tasks.start(self._main, group=self.name, after_s=after_s)

    def newest(self, *, durable: bool) -> int | None:
        """Return the newest step that is protected, or that is in a checkpoint."""
        now_s = self.tasks.now_s
        found = [s for s, (_, p, d) in self.snapshots.items() if (d if durable else p) <= now_s]
        return max(found, default=None)

    def lose(self, *, from_step: int | None) -> None:
        """Lose the snapshots after a step, None for all."""
        kept = {s: x for s, x in self.snapshots.items() if from_step is not None and s <= from_step}
        self.snapshots = kept

    def damage(self) -> None:
        """Change a number of the sea's weights in the memory of the process."""
        if self._life is not None:
            self._life.damage(self.random)
            self.oracle.astray.add(self.name)

    def _main(self) -> None:
        newest = max(self.snapshots, default=None)
        if newest is None:
            self.oracle.stateless.add(self.name)
            portions = range(self.islands.portions)
            counters = IslandCounters(self.name, portions=len(portions))
            state = RunState(
                step=0, numbers=counters.now, sea=[{} for _ in portions], own=[{} for _ in portions]
            )
        else:
            state = copy.deepcopy(self.snapshots[newest][0])
        try:
            self._life = self._kind(self, state)
            self._life.main()
        except StoreError:
            self.crashes += 1
            self.tasks.start(self._restart, group="nature")
        except SeaError:
            if self.name in self.oracle.astray:
                self.lose(from_step=None)
                self.tasks.start(self._restart, group="nature")
            elif self.oracle.is_over:
                self.final = TURNED_AWAY
            elif state.numbers.lineage != NONE:
                raise
            elif self.oracle.is_lost(self.name):
                self.final = TURNED_AWAY
            else:  # nobody answered it for long
                self.tasks.start(self._restart, group="nature")

    def hand_over(self) -> None:
        """Let the next generation go on from the step that was just kept."""
        noticed_s, self.noticed_s = self.noticed_s, None
        self.handed_over.append(self.tasks.now_s - (noticed_s or 0.0))
        self.tasks.start(self._go_on, group="nature")
        self.tasks.sleep(_HALT_S)

    def go_back(self, *, at_most: int) -> None:
        """Let the next generation go on from an older step, as the loss guard wants it.

        If no snapshot is as old, it is the oldest; if that has the fault too, nothing is left.
        """
        now_s = self.tasks.now_s
        kept = sorted(step for step, (_, p, _) in self.snapshots.items() if p <= now_s)
        old = [step for step in kept if step <= at_most] or kept[:1]
        clean = [step for step in old if self.snapshots[step][0].seen is None]
        target = max(clean, default=None)
        self.tasks.start(functools.partial(self._went_back, target), group="nature")
        self.tasks.sleep(_HALT_S)

    def _went_back(self, target: int | None) -> None:
        self.tasks.kill(self.name)
        self.lose(from_step=target)
        self.start(after_s=1.0, run=False)

    def _go_on(self) -> None:
        self.tasks.kill(self.name)
        self.start(after_s=1.0, run=False)

    def _restart(self) -> None:
        """Start the process again from what it keeps in memory, as an agent does."""
        self.tasks.kill(self.name)
        self.lose(from_step=self.newest(durable=False))
        self.start(after_s=2.0, run=False)
