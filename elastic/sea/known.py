"""A sea as its records tell it, and the questions to it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.elastic.errors import SeaError
from holdfast.elastic.sea.dealing import Supply
from holdfast.elastic.sea.member import SeaMember
from holdfast.elastic.sea.pairs import pairs_of
from holdfast.elastic.sea.payload import WHOLE_LIMIT
from holdfast.elastic.sea.portions import merges_of
from holdfast.elastic.sea.records import Founded, Part, SeaSettings, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSea:
    """A sea after ``length`` records, of which ``tide`` are merges.

    ``members`` are the islands that take part, in the order in which they joined; ``former`` those
    that left. ``states`` has for each portion the digests that were agreed upon, by base.
    ``supply`` are the samples that nobody has, None if islands have their own data.

    If islands meet in pairs, ``tide`` is the first at which nobody has met yet, and ``pairings``
    has the partners at older ones that some island has before it.
    """

    founded: Founded | None = None
    length: int = 0
    tide: int = 0
    members: Mapping[str, SeaMember] = field(default_factory=dict)
    former: Mapping[str, SeaMember] = field(default_factory=dict)
    states: tuple[Mapping[int, str], ...] = ()
    supply: Supply | None = None
    pairings: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

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

    @property
    def is_paired(self) -> bool:
        """True if islands meet in pairs."""
        return self.settings.topology == "pairs"

    @property
    def oldest(self) -> int:
        """The first tide that some member has before it."""
        return min([self.tide, *(m.tide for m in self.members.values() if self.is_paired)])

    @property
    def ended(self) -> tuple[str, ...]:
        """The islands whose works are in the last merge, in the order in which they left."""
        return tuple(island for island, former in self.former.items() if former.last)

    @property
    def is_over(self) -> bool:
        """True once all islands that met in pairs have ended: there is nobody to meet any more."""
        return bool(self.ended) and not self.members

    def partner(self, island: str) -> str | None:
        """Return whom a member meets next, None if it is alone: then it waits for nobody."""
        tide = self.members[island].tide
        other = self._pairing(tide).get(island)
        found = None if other is None else self.members.get(other)
        return other if found is not None and found.tide <= tide else None

    def awaited(self, island: str) -> tuple[str, ...]:
        """Return the members whose works matter to one of them, that one included."""
        if not self.is_paired:
            return tuple(self.members)
        return (island, *filter(None, [self.partner(island)])) if island in self.members else ()

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

    def fits(self, work: Work) -> bool:
        """Return whether the next merge may name a work."""
        island = self.members.get(work.island)
        if island is None or island.lineage != work.lineage:
            return False
        if self.is_paired:
            return (work.tide, work.portion) == (island.tide, self.portion_of(island.tide))
        if work.portion != self.portion:
            return False
        fault = self.fault_of_base(island, work.portion, work.base)
        return not (fault or self.fault_of_trained(island, work.portion, work.trained))

    def whole(self, parts: Iterable[Part]) -> int:
        """Return the weight of all members: by the works that are there, else as last known.

        If islands meet in pairs, it is that of the works.
        """
        here = {part.island: part.weight for part in parts}
        weights = here if self.is_paired else {**self.weights, **here}
        whole = sum(weights.values())
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

    def portion_of(self, tide: int) -> int:
        """Return the portion of a tide."""
        return tide % self.settings.portions

    def base_of(self, tide: int, portion: int) -> int:
        """Return the number of merges of a portion before a tide."""
        return merges_of(portion, tide, portions=self.settings.portions)

    def fault_of_base(self, member: SeaMember, portion: int, base: int) -> str:
        """Return the reason why no merge takes a member's work of this base, "" if one may."""
        count = self.merges(portion)
        if base > count:
            return f"is based on {base} merges of {count}"
        if base < member.merged[portion]:
            return f"is based on merge {base}: merge {member.merged[portion]} has it already"
        if count - base > self._oldest:
            return f"is {count - base} merges old, allowed are {self._oldest}"
        return ""

    def fault_of_trained(self, member: SeaMember, portion: int, trained: int) -> str:
        """Return the reason why a member's work cannot have so many samples, "" if it can."""
        least = member.trained[portion] if member.trained else 0
        if not least <= trained <= member.dealt:
            return f"has {trained} samples, merged are {least}, dealt {member.dealt}"
        return ""

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

    def _pairing(self, tide: int) -> Mapping[str, str]:
        """Return the partners at a tide; while nobody has met there, all members take part."""
        if tide < self.tide:
            return self.pairings[tide]
        assert self.founded is not None
        return pairs_of(self.members, key=self.founded.digest, tide=tide)
