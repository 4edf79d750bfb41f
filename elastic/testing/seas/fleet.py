"""Seas of many islands on virtual time: production decisions, and no more of an island than works.

An island publishes a work for the tide after a time of its own. Now and then one of them decides,
with what it has read until then, and writes a record where there is none yet. Islands fall silent,
come back, join late and leave.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Final

from holdfast.elastic.sea.decide import Since, decide
from holdfast.elastic.sea.records import (
    Entered,
    Founded,
    Left,
    Merged,
    Parameter,
    Record,
    Work,
    agreed,
)
from holdfast.elastic.sea.settings import Islands
from holdfast.elastic.sea.view import View
from holdfast.elastic.testing.seas.oracle import SeaFaultError

_DECIDERS: Final = 6
"""Islands that look at a tide at the same time, on average."""


@dataclass(slots=True)
class _Ship:
    """An island: its lineage, the seconds between its works, and until when it is silent."""

    name: str
    seconds: float
    lineage: int = 0
    silent_until_s: float = 0.0
    heard_s: float = 0.0
    work: Work | None = None
    arrived_s: float = 0.0


class Fleet:
    """``count`` islands that make ``tides`` merges; ``records`` counts what was written.

    ``lost`` are the records that came second: their numbers were taken.
    """

    def __init__(self, islands: Islands, count: int, *, tides: int, seed: int) -> None:
        self._islands, self._tides, self._draw = islands, tides, Random(f"fleet {seed}")
        self.now_s, self.records, self.lost = 0.0, Counter[str](), 0
        self.view = View()
        self._views = [self.view]
        self._write(
            Founded(
                number=0,
                settings=agreed(islands),
                parameters=(Parameter(name="w", shape=(4,)),),
                digest="0" * 16,
            )
        )
        self.ships = [
            _Ship(f"i{at:04}", self._draw.uniform(8, 12) * (4 if at % 16 == 5 else 1))
            for at in range(count)
        ]
        for ship in self.ships:
            self._enter(ship, weight=round(100 / ship.seconds))
        self._merged: Counter[tuple[str, int, int, int]] = Counter()

    def sail(self) -> None:
        """Run until all tides are merged. Raises ``SeaFaultError`` for a broken promise."""
        events = [(self._draw.uniform(0, ship.seconds), at) for at, ship in enumerate(self.ships)]
        heapq.heapify(events)
        looks = max(1, len(self.ships) // _DECIDERS)
        for count in range(self._tides * len(self.ships) * 40):
            if self.view.tide >= self._tides:
                return
            self.now_s, at = heapq.heappop(events)
            ship = self.ships[at]
            heapq.heappush(events, (self.now_s + ship.seconds, at))
            self._act(ship)
            if count % looks == 0 or self._is_due():
                self._decide()
        raise SeaFaultError(f"{self.view.tide} of {self._tides} tides were merged")

    # -- inside ----------------------------------------------------------------------------------

    def _act(self, ship: _Ship) -> None:
        if self.now_s < ship.silent_until_s:
            return
        ship.heard_s = self.now_s
        if ship.name not in self.view.members:
            self._come_back(ship)
            return
        if self._draw.random() < 0.3 / len(self.ships):
            ship.silent_until_s = self.now_s + self._draw.choice((0.5, 3)) * self._patience_s
        elif self._draw.random() < 0.1 / len(self.ships) and len(self.view.members) > 2:
            self._write(Left(number=self.view.length, island=ship.name, why="done"))
        else:
            self._publish(ship)

    def _come_back(self, ship: _Ship) -> None:
        former = self.view.former.get(ship.name)
        keeps = former is not None and self._draw.random() < 0.5
        self._enter(ship, weight=5, lineage=former.lineage if former and keeps else None)

    def _enter(self, ship: _Ship, *, weight: int, lineage: int | None = None) -> None:
        number = self.view.length
        ship.lineage = number if lineage is None else lineage
        ship.heard_s, ship.work = self.now_s, None
        self._write(
            Entered(
                number=number,
                island=ship.name,
                tide=self.view.tide,
                weight=weight,
                lineage=ship.lineage,
            )
        )

    def _publish(self, ship: _Ship) -> None:
        """Publish a work of the tide, based on what the island has read: all, or not the newest."""
        view = self.view
        base = view.merges(view.portion)
        if ship.work is not None and (ship.work.tide, ship.work.lineage) == (
            view.tide,
            ship.lineage,
        ):
            return
        ship.arrived_s = self.now_s
        ship.work = Work(
            island=ship.name,
            lineage=ship.lineage,
            tide=view.tide,
            portion=view.portion,
            weight=max(1, round(100 / ship.seconds)),
            digest=f"{view.length:016x}",
            nbytes=8,
            base=base,
            state=f"{view.portion:08x}{base:08x}",
        )

    def _is_due(self) -> bool:
        """Return whether all who are not silent have sent their works."""
        return self._draw.random() < 0.01 and len(self.ships) < 100

    def _decide(self) -> None:
        """Let several islands decide at the same time; each knows the newest records or not."""
        able = [s for s in self.ships if s.name in self.view.members]
        able = [s for s in able if self.now_s >= s.silent_until_s]
        deciders = self._draw.sample(able, min(len(able), self._draw.choice((1, 1, 2, 3))))
        view, behind = self.view, self._draw.choice(self._views[-3:])
        works = [ship.work for ship in self.ships if ship.work is not None]
        since = Since(
            heard={ship.name: ship.heard_s for ship in self.ships},
            arrived={ship.name: ship.arrived_s for ship in self.ships},
        )
        for ship in deciders:
            record = decide(
                self._draw.choice((view, behind)),
                works,
                now=self.now_s,
                since=since,
                islands=self._islands,
                me=ship.name,
            )
            if record is None:
                continue
            if record.number != self.view.length:  # that number is taken
                self.lost += 1
                continue
            self._write(record)

    def _write(self, record: Record) -> None:
        if isinstance(record, Merged):
            self._judge(record)
        elif isinstance(record, Left) and record.why == "silent":
            heard = {ship.name: ship.heard_s for ship in self.ships}[record.island]
            if self.now_s - heard <= self._patience_s:
                raise SeaFaultError(f"{record.island} was put out after {self.now_s - heard:.1f} s")
        self.view = self.view.after(record)
        self._views = [*self._views[-3:], self.view]
        self.records[type(record).__name__] += 1

    def _judge(self, record: Merged) -> None:
        members = self.view.members
        here = {part.island: part.weight for part in record.parts}
        whole = sum(here.get(name, member.weight) for name, member in members.items())
        if record.whole != whole:
            raise SeaFaultError(f"tide {record.tide} weighs {record.whole}, its members {whole}")
        if self._islands.wait == "all" and here.keys() != members.keys():
            raise SeaFaultError(f"tide {record.tide} did not wait for all")
        for part in record.parts:
            key = part.island, members[part.island].lineage, record.portion, part.base
            self._merged[key] += 1
            if self._merged[key] > 1:
                raise SeaFaultError(f"tide {record.tide} merges a work of {part.island} again")

    @property
    def _patience_s(self) -> float:
        return self._islands.patience_s
