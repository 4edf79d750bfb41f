"""The state of a sea: the fold of its logbook's records. Pure.

A record that does not follow from those before it is refused, so every island that reads the same
logbook knows the same, and a record that its writer should not have written misleads nobody.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from holdfast.elastic.errors import SeaError
from holdfast.elastic.sea import dealing
from holdfast.elastic.sea.dealing import Supply
from holdfast.elastic.sea.following import fault_of
from holdfast.elastic.sea.known import KnownSea
from holdfast.elastic.sea.member import SeaMember
from holdfast.elastic.sea.portions import merges_of
from holdfast.elastic.sea.records import Dealt, Entered, Founded, Left, Merged, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class View(KnownSea):
    """A sea after so many records; each record makes another view."""

    @staticmethod
    def of(records: Iterable[Record]) -> View:
        """Return the view after records in order. Raises ``SeaError`` as `after` does."""
        view = View()
        for record in records:
            view = view.after(record)
        return view

    def after(self, record: Record) -> View:
        """Return the view after one more record.

        Raises ``SeaError``, which names the record and its fault, for one that does not follow.
        """
        fault = fault_of(self, record)
        if fault:
            kind = type(record).__name__
            raise SeaError(f"record {record.number} ({kind}) does not follow: {fault}")
        match record:
            case Founded():
                states: Mapping[int, str] = {}
                known = dataclasses.replace(
                    self,
                    founded=record,
                    states=(states,) * record.settings.portions,
                    supply=_supply_of(record),
                )
            case Entered():
                known = self._entered(record)._opened(record.island)
            case Left():
                known = self._left(record)
            case Merged() if self.is_paired:
                known = self._met(record)
            case Merged(parts=parts):
                known = self._merged(record)
                wanted = {p.island: p.trained + known.members[p.island].need for p in parts}
                known = known._dealt(wanted)
            case Dealt(island=island, upto=upto):
                known = self._dealt({island: upto})
        return dataclasses.replace(known, length=self.length + 1)

    # -- inside ----------------------------------------------------------------------------------

    def _entered(self, record: Entered) -> View:
        portions = self.settings.portions
        bases = tuple(merges_of(p, record.tide, portions=portions) for p in range(portions))
        is_new = record.lineage == record.number
        member = SeaMember(
            joined=record.number,
            lineage=record.lineage,
            weight=record.weight,
            merged=bases if is_new else self.former[record.island].merged,
            bases=bases,
            need=record.need,
            trained=() if self.supply is None else (0,) * portions,
            tide=record.tide,
        )
        former = {name: each for name, each in self.former.items() if name != record.island}
        members = {**self.members, record.island: member}
        return dataclasses.replace(self, members=members, former=former)

    def _left(self, record: Left) -> View:
        """Return the view without an island; what no merge has of its samples is dealt anew."""
        island, supply = record.island, self.supply
        gone = dataclasses.replace(self.members[island], last=record.last)
        if supply is not None:
            supply = supply.give_back(gone.blocks)
            gone = dataclasses.replace(gone, blocks=())
        members = {name: each for name, each in self.members.items() if name != island}
        former = {name: each for name, each in self.former.items() if name != island}
        former = {**former, island: gone}
        return dataclasses.replace(self, members=members, former=former, supply=supply)

    def _opened(self, island: str) -> View:
        """Return the view after the founders, or one that entered later, were dealt samples.

        The founders are dealt theirs when all are there, so the order of their records is no
        matter.
        """
        supply = self.supply
        if supply is None or (
            not supply.is_open and len(self.members) < self.settings.founders and self.tide == 0
        ):
            return self
        wanted = {island: self.members[island].need}
        if not supply.is_open:
            supply = msgspec.structs.replace(supply, is_open=True)
            wanted = {name: member.need for name, member in self.members.items()}
        return dataclasses.replace(self, supply=supply)._dealt(wanted)

    def _dealt(self, wanted: Mapping[str, int]) -> View:
        """Return the view after islands were dealt samples up to a number in their lineage."""
        supply, members = self.supply, dict(self.members)
        if supply is None:
            return self
        islands = sorted(wanted)
        missing = [max(0, wanted[each] - members[each].dealt) for each in islands]
        for island, most in zip(islands, dealing.shares(missing, supply.left), strict=True):
            blocks, supply = supply.take(most)
            members[island] = members[island].with_more(blocks)
        return dataclasses.replace(self, members=members, supply=supply)

    def _merged(self, record: Merged) -> View:
        at, count = record.portion, self.merges(record.portion) + 1
        members = dict(self.members)
        states = {b: d for b, d in self.states[at].items() if b >= count - 1 - self._oldest}
        for part in record.parts:
            old = members[part.island]
            members[part.island] = dataclasses.replace(
                old,
                weight=part.weight,
                step_us=part.step_us or old.step_us,
                merged=(*old.merged[:at], count, *old.merged[at + 1 :]),
                bases=(*old.bases[:at], max(part.base, old.bases[at]), *old.bases[at + 1 :]),
            )
            if self.supply is not None:
                members[part.island] = members[part.island].after_merge(at, part.trained)
            states[part.base] = part.state
        known = (*self.states[:at], states, *self.states[at + 1 :])
        return dataclasses.replace(self, members=members, tide=self.tide + 1, states=known)

    def _met(self, record: Merged) -> View:
        """Return the view after a meeting; the first of its tide fixes the pairs of that tide."""
        at, members = record.tide, dict(self.members)
        for part in record.parts:
            island = members[part.island]
            members[part.island] = dataclasses.replace(island, weight=part.weight, tide=at + 1)
        oldest = min(each.tide for each in members.values())
        pairings = {**self.pairings, at: self._pairing(at)}
        return dataclasses.replace(
            self,
            members=members,
            tide=max(self.tide, at + 1),
            pairings={tide: each for tide, each in pairings.items() if tide >= oldest},
        )


def _supply_of(founded: Founded) -> Supply | None:
    """Return all positions of the data that a sea deals, None if it deals none."""
    dealt = founded.dealt
    if dealt is None:
        return None
    return Supply(end=None if dealt.epochs is None else dealt.epochs * dealt.samples)
