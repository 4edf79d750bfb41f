"""A simulated sea: islands that train, faults drawn from a seed, and the judgement at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal, TypeAlias

from holdfast.elastic.sea.records import DealtData, agreed, decode_record
from holdfast.elastic.sea.settings import Islands
from holdfast.elastic.sea.view import View
from holdfast.elastic.testing.seas.guarding import ModelGuard
from holdfast.elastic.testing.seas.model import SeaLife
from holdfast.elastic.testing.seas.oracle import Oracle, SeaFaultError
from holdfast.elastic.testing.seas.pairs import PairLife, PairOracle
from holdfast.elastic.testing.seas.process import TURNED_AWAY, ModelIsland
from holdfast.elastic.testing.seas.store import Files, SimulatedStore, Way
from holdfast.elastic.testing.seas.tasks import Tasks

Kind: TypeAlias = Literal[
    "kill", "wipe", "lose", "vanish", "notice", "freeze", "cut", "slow", "flaky", "damage", "spoil"
]
"""Of an island: its workers die; all its memory is lost, and the newest steps; its checkpoints too;
it is gone for good; a node of it has a notice; it is stopped; its way to the store is cut; slow;
fails, loses replies and doubles writes; a number of the sea's weights changes in its memory; its
own work is wrong from a step on, until its loss guard sees that and goes back."""

_LIMIT_S: Final = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeaStrike:
    """A fault of an island, ``at_s``, for ``seconds``."""

    kind: Kind
    island: str
    at_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SeaCrew:
    """An island's plan: it begins ``after_s``, and trains ``steps`` steps of ``seconds``.

    With ``data`` it trains those samples of them that it is dealt. Its loss guard goes back
    ``steps_back`` steps; 0: it has none.
    """

    islands: Islands
    steps: int
    seconds: float
    after_s: float = 0.0
    data: DealtData | None = None
    steps_back: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeaReport:
    """The end of a sea: its weights, the reasons to leave, tides, files, and virtual seconds.

    ``open`` are files of requests and of answers that are left. ``handed_over`` are the seconds
    from notices to hand-overs.
    """

    final: str
    left: dict[str, int]
    tides: int
    files: int
    open: tuple[str, ...]
    crashes: int
    handed_over: tuple[float, ...]
    seconds: float


@dataclass(slots=True)
class _Outages:
    """Times at which islands could not act."""

    tasks: Tasks
    spans: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def note(self, island: str, seconds: float) -> None:
        """Note that an island cannot act from now on for so long."""
        now_s = self.tasks.now_s
        self.spans.setdefault(island, []).append((now_s, now_s + seconds))

    def within(self, island: str, last_s: float) -> float:
        """Return for how many of the last seconds an island could not act."""
        now_s = self.tasks.now_s
        cut = [(max(a, now_s - last_s), min(b, now_s)) for a, b in self.spans.get(island, [])]
        return sum(max(0.0, b - a) for a, b in cut)


def sail(
    crews: Sequence[SeaCrew], strikes: Sequence[SeaStrike], *, seed: int, exact: bool = True
) -> SeaReport:
    """Run a sea to its end. Raises ``SeaFaultError`` for a promise that it broke.

    With ``exact`` a step that is executed again makes the same work.
    """
    tasks, files = Tasks(limit_s=_LIMIT_S), Files()
    try:
        return _Sea(tasks, files, crews, seed=seed, exact=exact).sail(strikes)
    finally:
        tasks.end()


class _Sea:
    def __init__(
        self, tasks: Tasks, files: Files, crews: Sequence[SeaCrew], *, seed: int, exact: bool
    ) -> None:
        self._tasks, self._files, self._crews = tasks, files, crews
        self._outages = _Outages(tasks)
        patience_s = crews[0].islands.patience_s
        is_paired = crews[0].islands.topology == "pairs"
        self._oracle = (PairOracle if is_paired else Oracle)(
            files,
            agreed(crews[0].islands),
            exact=exact,
            unable_s=lambda island: self._outages.within(island, 2 * patience_s),
            patience_s=patience_s,
            clock=tasks.clock,
        )
        self._ways = {crew.islands.name: Way() for crew in crews}
        self._models = {
            crew.islands.name: ModelIsland(
                crew.islands,
                steps=crew.steps,
                seconds=crew.seconds,
                tasks=tasks,
                store=SimulatedStore(
                    files,
                    tasks,
                    self._ways[crew.islands.name],
                    island=crew.islands.name,
                    random=Random(f"store {seed} {crew.islands.name}"),
                ),
                oracle=self._oracle,
                random=Random(f"island {seed} {crew.islands.name}"),
                exact=exact,
                guard=ModelGuard(
                    steps_back=crew.steps_back,
                    random=Random(f"guard {seed} {crew.islands.name}"),
                ),
                data=crew.data,
                life=PairLife if is_paired else SeaLife,
            )
            for crew in crews
        }

        self._oracle.is_lost = self._is_lost

    def _is_lost(self, island: str) -> bool:
        if self._crews[0].data is not None and not self._oracle.members:
            return True  # one that was put out gave its samples up, so the sea went on to its end
        others = (model for name, model in self._models.items() if name != island)
        return not any(model.final is None and model.snapshots for model in others)

    def sail(self, strikes: Sequence[SeaStrike]) -> SeaReport:
        for crew in self._crews:
            self._models[crew.islands.name].start(after_s=crew.after_s)
        for each in strikes:
            self._tasks.start(self._striking(each), group="nature", after_s=each.at_s)
        models = self._models.values()
        while any(model.final is None for model in models):
            if not self._tasks.step() or self._tasks.now_s >= _LIMIT_S:
                stuck = [model.name for model in models if model.final is None]
                raise SeaFaultError(f"{', '.join(stuck)} never come to the end")
        return self._judged()

    def _judged(self) -> SeaReport:
        oracle = self._oracle
        over = {name for name, model in self._models.items() if model.final != TURNED_AWAY}
        if oracle.members.keys() & over:
            raise SeaFaultError(f"{sorted(oracle.members)} are at the end, but did not leave")
        if (data := self._crews[0].data) is not None:
            oracle.check_samples(data.samples * (data.epochs or 0), free=self._free())
        oracle.check_ends({m.final for m in self._models.values()} - {TURNED_AWAY})
        return SeaReport(
            final=oracle.final,
            left=dict(oracle.left),
            tides=oracle.tide,
            files=sum(not name.startswith("logbook/") for name in self._files.data),
            open=tuple(n for n in sorted(self._files.data) if n.startswith(("asked/", "given/"))),
            crashes=sum(model.crashes for model in self._models.values()),
            handed_over=tuple(s for model in self._models.values() for s in model.handed_over),
            seconds=self._tasks.now_s,
        )

    def _free(self) -> set[int]:
        """Return the samples that the records say nobody has, at the end."""
        names = sorted(name for name in self._files.data if name.startswith("logbook/"))
        records = (decode_record(self._files.data[name], origin=name) for name in names)
        view = View.of(records)
        held = [block for member in view.members.values() for block in member.blocks]
        assert view.supply is not None
        end = view.supply.end or view.supply.fresh
        blocks = (*held, *view.supply.returned, (view.supply.fresh, end))
        return {at for start, stop in blocks for at in range(start, stop)}

    def _striking(self, strike: SeaStrike) -> Callable[[], None]:
        return lambda: self._strike(strike)

    def _strike(self, strike: SeaStrike) -> None:
        model, tasks, name = self._models[strike.island], self._tasks, strike.island
        way, seconds = self._ways[name], strike.seconds
        if model.final is not None or model.attempts == 0:
            return
        match strike.kind:
            case "kill" | "wipe" | "lose":
                self._outages.note(name, seconds + 3)
                tasks.kill(name)
                newest = model.newest(durable=strike.kind == "wipe")
                model.lose(from_step=None if strike.kind == "lose" else newest)
                model.start(after_s=seconds, run=strike.kind != "kill")
            case "vanish":
                tasks.kill(name)
                model.final = TURNED_AWAY
            case "notice":
                self._outages.note(name, 3)
                model.noticed_s = tasks.now_s
            case "freeze":
                self._outages.note(name, seconds)
                tasks.freeze(name, seconds)
            case "cut":
                self._outages.note(name, seconds)
                way.cut_s = tasks.now_s + seconds
            case "slow":
                self._outages.note(name, seconds)
                way.slow = 30.0
                tasks.sleep(seconds)
                way.slow = 1.0
            case "damage":
                model.damage()
            case "spoil":
                self._outages.note(name, 10)
                model.guard.strike()
            case "flaky":
                way.fails = way.loses = way.doubles = 0.1
                tasks.sleep(seconds)
                way.fails = way.loses = way.doubles = 0.0
