"""Simulated islands that meet in pairs, and their truth: each has weights of its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from holdfast.elastic.islands.commands import (
    AdoptMerge,
    EnterAnew,
    GoOn,
    LoadWeights,
    MergeLast,
    SendLast,
    SkipTides,
)
from holdfast.elastic.islands.pairs.ending import PairEnding
from holdfast.elastic.sea.pairs import pairs_of
from holdfast.elastic.testing.seas import ledger
from holdfast.elastic.testing.seas.model import SeaLife
from holdfast.elastic.testing.seas.oracle import Oracle, SeaFaultError


class PairOracle(Oracle):
    """As `Oracle`; a merge is a meeting. ``tide`` is the first at which nobody has met."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sea: dict[str, list[dict[str, int]]] = {}
        self._states: dict[tuple[str, int, int], str] = {}
        self._tides: dict[str, int] = {}
        self._pairs: dict[int, dict[str, str]] = {}
        self._last: dict[str, list[bytes]] = {}

    @property
    def final(self) -> str:
        """The digest of the weights of the last merge."""
        payloads = zip(*self._last.values(), strict=True)
        return ledger.digest([ledger.last(each) for each in payloads])

    @property
    def is_over(self) -> bool:
        """True once all islands have ended."""
        return bool(self._last) and not self.members

    def state(self, portion: int, base: int, island: str) -> str:
        """Return the right digest of an island's portion after ``base`` tides of it."""
        return self._states[island, portion, base]

    def place(self, island: str, sea: Sequence[Mapping[str, int]]) -> None:
        """Note the weights with which an island entered."""
        self._sea[island] = copy.deepcopy([dict(each) for each in sea])
        for portion in range(len(sea)):
            self._note(island, portion, self._base(portion, self._tides[island]))

    def check_ends(self, finals: AbstractSet[str | None]) -> None:
        """Judge the weights with which islands ended: those of the last merge, all of them."""
        if finals and finals != {self.final}:
            raise SeaFaultError(f"islands end with {sorted(map(str, finals))}, not {self.final}")

    def check_stride(self, island: str, tide: int, steps: int) -> None:
        """Judge the steps between two tides of an island: all take equally many."""
        if steps != self._settings.every // self._settings.portions:
            raise SeaFaultError(f"{island} took {steps} steps to its tide {tide}")

    def _note(self, island: str, portion: int, base: int) -> None:
        self._states[island, portion, base] = ledger.digest(self._sea[island][portion])

    def _base(self, portion: int, tide: int) -> int:
        return sum(at % self._settings.portions == portion for at in range(tide))

    def _entered(self, record: dict[str, Any]) -> None:
        super()._entered(record)
        island = record["island"]
        if record["tide"] != self.tide:
            raise SeaFaultError(f"{island} enters at tide {record['tide']}, due is {self.tide}")
        if self._last and len(self.members) == 1:
            raise SeaFaultError(f"{island} enters a sea whose islands have all ended")
        self._tides[island] = self.tide
        self._last.pop(island, None)
        if record["lineage"] != record["number"]:  # it has its weights, which count on from here
            for portion in range(self._settings.portions):
                self._note(island, portion, self._base(portion, self.tide))

    def _left(self, record: dict[str, Any]) -> None:
        super()._left(record)
        island, last = record["island"], record.get("last", [])
        if not last:
            return
        if len(last) != self._settings.portions or record["why"] != "done":
            raise SeaFaultError(f"{island} ends with {len(last)} works, and is {record['why']}")
        for portion, part in enumerate(last):
            self._check_state(part, portion)
            self._counted(part, portion)
        self._last[island] = [self.payload(island, part["digest"]) for part in last]

    def _merged(self, record: dict[str, Any]) -> None:
        parts, portion, tide = record["parts"], record["portion"], record["tide"]
        islands = [part["island"] for part in parts]
        if portion != tide % self._settings.portions or len(set(islands)) != len(parts):
            raise SeaFaultError(f"tide {tide} of portion {portion} names {islands}")
        if self.tide == 0 and len(self.members) < self._settings.founders:
            raise SeaFaultError("the first tide did not wait for the founders")
        if any(self._tides[island] != tide or island not in self.members for island in islands):
            raise SeaFaultError(f"{islands} meet at tide {tide}, and are at {self._tides}")
        if tide == self.tide:
            key = self.records[0]["digest"]
            self._pairs[tide] = pairs_of(self.members, key=key, tide=tide)
            self.tide += 1
        for island in islands:
            other = self._pairs[tide].get(island)
            is_there = other in self.members and self._tides[other] <= tide
            if sorted(islands) != sorted({island, other} if is_there and other else {island}):
                raise SeaFaultError(f"{islands} met at tide {tide}, due are {island} and {other}")
        if record["whole"] != sum(part["weight"] for part in parts):
            raise SeaFaultError(f"the meeting of {islands} weighs {record['whole']}")
        payloads = [self.payload(part["island"], part["digest"]) for part in parts]
        for part in parts:
            island = part["island"]
            self._check_state(part, portion)
            self._counted(part, portion)
            self._sea[island][portion] = ledger.met(self._sea[island][portion], payloads)
            self._tides[island] = tide + 1
            self._note(island, portion, part["base"] + 1)

    def _check_state(self, part: dict[str, Any], portion: int) -> None:
        mine = ledger.digest(self._sea[part["island"]][portion])
        if part["state"] != mine:
            raise SeaFaultError(f"{part['island']} states wrong weights of portion {portion}")


class PairLife(SeaLife):
    """One life of a process that meets others in pairs."""

    def _weights(self, portion: int) -> str:
        return ledger.digest(self._s.sea[portion])

    def _moved(self, sums: dict[str, int], data: list[bytes]) -> dict[str, int]:
        return ledger.met(sums, data)

    def _load(self, said: LoadWeights) -> None:
        super()._load(said)
        by = said.root.rpartition("/")[2]
        for portion, sums in enumerate(self._s.sea):
            if ledger.digest(sums) != self._m.oracle.state(portion, said.bases[portion], by):
                raise SeaFaultError(f"{self._m.name} was given other weights than {by} has")

    def _merge_all(self) -> None:
        s, ending = self._s, self._arrival(PairEnding)
        while True:
            said, data = ending.next()
            match said:
                case GoOn():
                    return
                case AdoptMerge():
                    self._adopt(said, data)
                case SkipTides():
                    self._skip(said)
                case EnterAnew():
                    self._enter_anew(keeps=False)
                    ending = self._arrival(PairEnding)
                case SendLast():
                    self._depart(last=True)
                    self._release()
                    s.numbers.sents = []
                case MergeLast():
                    s.sea[said.portion] = ledger.last(data)
