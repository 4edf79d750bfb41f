"""The state of a sea: the fold of its logbook's records. Pure.

A record that does not follow from those before it is refused, so every island that reads the same
logbook knows the same, and a record that its writer should not have written misleads nobody.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.elastic.errors import SeaError
from holdfast.elastic.sea import dealing
from holdfast.elastic.sea.dealing import Blocks, Supply
from holdfast.elastic.sea.payload import WHOLE_LIMIT
from holdfast.elastic.sea.portions import merges_of
from holdfast.elastic.sea.records import (
    Dealt,
    Entered,
    Founded,
    Left,
    Merged,
    Part,
    Record,
    SeaSettings,
    Work,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeaMember:
    """An island of the sea.

    ``joined`` is the number of its `Entered`; ``weight`` its last known one. ``merged`` has for
    each portion the merges up to the last one that named the island: works of an older base hold
    what was merged already. ``bases`` are the newest bases that it stated, ``step_us`` the last
    microseconds of a step, 0 before.

    If the logbook deals samples, ``dealt`` are those that its lineage got so far, ``blocks`` the
    last of them, which some portion has not merged; ``trained`` has for each portion those that are
    merged. It wants to have ``need`` more than it trained.
    """

    joined: int
    lineage: int
    weight: int
    merged: tuple[int, ...]
    bases: tuple[int, ...]
    step_us: int = 0
    need: int = 0
    dealt: int = 0
    blocks: Blocks = ()
    trained: tuple[int, ...] = ()

    @property
    def merged_samples(self) -> int:
        """The samples of its lineage that every portion has merged."""
        return min(self.trained, default=0)

    def with_more(self, blocks: Blocks) -> SeaMember:
        """Return the member after it was dealt more."""
        dealt = self.dealt + dealing.count(blocks)
        return dataclasses.replace(
            self, dealt=dealt, blocks=dealing.joined((*self.blocks, *blocks))
        )

    def after_merge(self, portion: int, trained: int) -> SeaMember:
        """Return the member after a merge of the samples that it trained until then."""
        found = (*self.trained[:portion], trained, *self.trained[portion + 1 :])
        _, blocks = dealing.cut(self.blocks, min(found) - self.dealt + dealing.count(self.blocks))
        return dataclasses.replace(self, trained=found, blocks=blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A sea after ``length`` records, of which ``tide`` are merges.

    ``members`` are the islands that take part, in the order in which they joined; ``former`` those
    that left. ``states`` has for each portion the digests that were agreed upon, by base.
    ``supply`` are the samples that nobody has, None if islands have their own data.
    """

    founded: Founded | None = None
    length: int = 0
    tide: int = 0
    members: Mapping[str, SeaMember] = field(default_factory=dict)
    former: Mapping[str, SeaMember] = field(default_factory=dict)
    states: tuple[Mapping[int, str], ...] = ()
    supply: Supply | None = None

    @staticmethod
    def of(records: Iterable[Record]) -> View:
        """Return the view after records in order. Raises ``SeaError`` as `after` does."""
        view = View()
        for record in records:
            view = view.after(record)
        return view

    @property
    def settings(self) -> SeaSettings:
        """The settings of the sea. Raises ``SeaError`` before it is founded."""
        if self.founded is None:
            raise SeaError("the logbook is empty: the sea has no settings before it is founded")
        return self.founded.settings

    @property
    def portion(self) -> int:
        """The portion that the next merge is of."""
        return self.tide % self.settings.portions

    @property
    def weights(self) -> dict[str, int]:
        """The last known weights of the members."""
        return {island: member.weight for island, member in self.members.items()}

    @property
    def bases(self) -> tuple[int, ...]:
        """The least base of each portion that a member stated last; () without members."""
        stated = [member.bases for member in self.members.values()]
        return tuple(map(min, zip(*stated, strict=True)))

    def stride(self, island: str) -> int:
        """Return the steps from a tide of an island to its next.

        A slower island takes fewer where the settings allow it (Li et al., "FedCompass", 2023).
        """
        settings = self.settings
        full, least = settings.every // settings.portions, settings.least_every
        own = self.members.get(island)
        if least is None or own is None or not own.step_us:
            return full
        fastest = min(each.step_us for each in self.members.values() if each.step_us)
        nearest = (2 * full * fastest + own.step_us) // (2 * own.step_us)
        return max(least // settings.portions, nearest)

    def merges(self, portion: int) -> int:
        """Return the number of merges of a portion."""
        return merges_of(portion, self.tide, portions=self.settings.portions)

    def is_dead(self, work: Work) -> bool:
        """Return whether a work can never be merged any more: what it holds will be sent anew."""
        island = self.members.get(work.island) or self.former.get(work.island)
        if island is None or island.lineage != work.lineage:
            return island is not None and work.lineage < island.lineage
        least = max(island.merged[work.portion], self.merges(work.portion) - self._oldest)
        return work.base < least

    def fits(self, work: Work) -> bool:
        """Return whether the next merge may name a work."""
        island = self.members.get(work.island)
        if island is None or island.lineage != work.lineage or work.portion != self.portion:
            return False
        fault = self._fault_of_base(island, work.portion, work.base)
        return not (fault or self._fault_of_trained(island, work.portion, work.trained))

    def whole(self, parts: Iterable[Part]) -> int:
        """Return the weight of all members: by the works that are there, else as last known."""
        here = {part.island: part.weight for part in parts}
        whole = sum(here.get(island, member.weight) for island, member in self.members.items())
        if whole >= WHOLE_LIMIT:
            raise SeaError(
                f"the islands weigh {whole} together, needed: below {WHOLE_LIMIT}; a tide's "
                "samples are too many to count one by one"
            )
        return whole

    def is_enough(self, parts: Sequence[Part]) -> bool:
        """Return whether so many works may be merged: those of all members, or of the quorum."""
        share = self.settings.share
        if share is None or len(parts) == len(self.members):
            return len(parts) == len(self.members) > 0
        return bool(parts) and sum(part.weight for part in parts) >= share * self.whole(parts)

    def astray(self, portion: int, parts: Iterable[Part]) -> tuple[str, ...]:
        """Return the islands whose digest differs from the sea's, sorted.

        The sea's digest of a base is the one that was agreed upon before, else that of the largest
        weight; of two as large, that of the island which joined first.
        """
        by_base: defaultdict[int, list[Part]] = defaultdict(list)
        for part in parts:
            by_base[part.base].append(part)
        found = []
        for base, group in by_base.items():
            right = self.states[portion].get(base) or self._majority(group)
            found += [part.island for part in group if part.state != right]
        return tuple(sorted(found))

    def after(self, record: Record) -> View:
        """Return the view after one more record.

        Raises ``SeaError``, which names the record and its fault, for one that does not follow.
        """
        fault = self._fault(record)
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
            case Left(island=island):
                known = self._left(island)
            case Merged(parts=parts):
                known = self._merged(record)
                wanted = {p.island: p.trained + known.members[p.island].need for p in parts}
                known = known._dealt(wanted)
            case Dealt(island=island, upto=upto):
                known = self._dealt({island: upto})
        return dataclasses.replace(known, length=self.length + 1)

    # -- inside ----------------------------------------------------------------------------------

    @property
    def _oldest(self) -> int:
        """The age in merges of the oldest works that are merged."""
        return 0 if self.settings.share is None else self.settings.age_limit

    def _majority(self, group: Sequence[Part]) -> str:
        weights: defaultdict[str, int] = defaultdict(int)
        first: dict[str, int] = {}
        for part in group:
            weights[part.state] += part.weight
            joined = self.members[part.island].joined
            first[part.state] = min(first.get(part.state, joined), joined)
        return max(weights, key=lambda state: (weights[state], -first[state]))

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
        )
        former = {name: each for name, each in self.former.items() if name != record.island}
        members = {**self.members, record.island: member}
        return dataclasses.replace(self, members=members, former=former)

    def _left(self, island: str) -> View:
        """Return the view without an island; what no merge has of its samples is dealt anew."""
        gone, supply = self.members[island], self.supply
        if supply is not None:
            supply = supply.give_back(gone.blocks)
            gone = dataclasses.replace(gone, blocks=())
        members = {name: each for name, each in self.members.items() if name != island}
        former = {**self.former, island: gone}
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

    def _fault(self, record: Record) -> str:
        """Return the reason why a record does not follow, "" if it does."""
        if record.number != self.length:
            return f"it says number {record.number} where {self.length} is next"
        if isinstance(record, Founded) != (self.founded is None):
            return "a logbook begins with Founded, and has only one"
        match record:
            case Founded(settings=settings, dealt=dealt):
                is_dealt = settings.data == "dealt"
                return "" if is_dealt == (dealt is not None) else "it does not say what it deals"
            case Entered():
                return self._fault_of_entered(record)
            case Left():
                return self._fault_of_left(record)
            case Merged():
                return self._fault_of_merged(record)
            case Dealt():
                return self._fault_of_dealt(record)

    def _fault_of_entered(self, record: Entered) -> str:
        if record.island in self.members:
            return f"{record.island} takes part already"
        if record.tide > self.tide:
            return f"{record.island} has adopted {record.tide} merges of {self.tide}"
        if (record.need > 0) != (self.supply is not None):
            return f"{record.island} needs {record.need} samples of the sea's"
        if record.lineage == record.number:
            return ""
        if self.supply is not None:
            return f"{record.island} comes back with work whose samples were given to others"
        former = self.former.get(record.island)
        if former is None or former.lineage != record.lineage:
            return f"{record.island} never left with work of lineage {record.lineage}"
        return ""

    def _fault_of_left(self, record: Left) -> str:
        if record.island not in self.members:
            return f"{record.island} takes no part"
        if record.why != "astray":
            return ""
        if record.portion >= self.settings.portions:
            return f"there is no portion {record.portion}"
        if fault := self._fault_of_parts(record.seen, record.portion):
            return fault
        if record.island not in self.astray(record.portion, record.seen):
            return f"the works that it names do not show {record.island} astray"
        return ""

    def _fault_of_merged(self, record: Merged) -> str:
        if (record.tide, record.portion) != (self.tide, self.portion):
            return (
                f"it merges portion {record.portion} in tide {record.tide} where portion "
                f"{self.portion} in tide {self.tide} is next"
            )
        if self.tide == 0 and len(self.members) < self.settings.founders:
            return f"{len(self.members)} islands are there of {self.settings.founders} founders"
        if fault := self._fault_of_parts(record.parts, record.portion):
            return fault
        for part in record.parts:
            member = self.members[part.island]
            fault = self._fault_of_base(member, record.portion, part.base)
            if fault := fault or self._fault_of_trained(member, record.portion, part.trained):
                return f"the work of {part.island} {fault}"
        if astray := self.astray(record.portion, record.parts):
            return f"it names works of {', '.join(astray)}, whose weights are not the sea's"
        if not self.is_enough(record.parts):
            return f"works of {len(record.parts)} of {len(self.members)} islands are too few"
        whole = self.whole(record.parts)
        if record.whole != whole:
            return f"it says that the sea weighs {record.whole} where it weighs {whole}"
        return ""

    def _fault_of_dealt(self, record: Dealt) -> str:
        member = self.members.get(record.island)
        if self.supply is None or not self.supply.is_open:
            return "the logbook does not deal samples yet"
        if member is None:
            return f"{record.island} takes no part"
        if record.upto <= member.dealt:
            return f"{record.island} has {member.dealt} samples, and wants {record.upto}"
        if self.supply.left == 0:
            return "all samples are dealt"
        return ""

    def _fault_of_parts(self, parts: Sequence[Part], portion: int) -> str:
        islands = [part.island for part in parts]
        if islands != sorted(set(islands)):
            return "its islands are not in order, or one is named twice"
        for part in parts:
            if part.island not in self.members:
                return f"{part.island} takes no part"
            if part.base > self.merges(portion):
                return f"{part.island} says {part.base} merges of {self.merges(portion)}"
        return ""

    def _fault_of_base(self, member: SeaMember, portion: int, base: int) -> str:
        count = self.merges(portion)
        if base > count:
            return f"is based on {base} merges of {count}"
        if base < member.merged[portion]:
            return f"is based on merge {base}: merge {member.merged[portion]} has it already"
        if count - base > self._oldest:
            return f"is {count - base} merges old, allowed are {self._oldest}"
        return ""

    def _fault_of_trained(self, member: SeaMember, portion: int, trained: int) -> str:
        least = member.trained[portion] if member.trained else 0
        if not least <= trained <= member.dealt:
            return f"has {trained} samples, merged are {least}, dealt {member.dealt}"
        return ""


def _supply_of(founded: Founded) -> Supply | None:
    """Return all positions of the data that a sea deals, None if it deals none."""
    dealt = founded.dealt
    if dealt is None:
        return None
    return Supply(end=None if dealt.epochs is None else dealt.epochs * dealt.samples)
