"""The checks of a sea: one logbook, own work once, the same weights everywhere. Pure.

They judge what the islands did, told by their events, and the records that they left, beside the
repetition of these records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from holdfast.elastic.errors import SeaError
from holdfast.elastic.sea.records import Entered, Founded, Merged, Part, Record
from holdfast.elastic.sea.view import View
from holdfast.tools.chaos.judging.checker import HistoryVerdict, Violation

_GOOD: Final = ("verified", "repeated")


class RepeatedTide(msgspec.Struct, frozen=True, kw_only=True):
    """A tide of the replay: its outcome, and the digest of its portion after it."""

    tide: int
    outcome: str
    digest: str


class SeaStory(msgspec.Struct, frozen=True, kw_only=True):
    """A sea that is over.

    ``records`` are those of its logbook. ``adopted`` has for each island the digests with which it
    came out of each tide, more than one only if they differ. ``ends`` are the digests of weights
    that islands told at their end. ``repeated`` is empty if nobody kept the first weights.
    """

    records: tuple[Record, ...]
    adopted: Mapping[str, Mapping[int, frozenset[str]]]
    ends: Mapping[str, frozenset[str]] = {}
    repeated: tuple[RepeatedTide, ...] = ()

    @property
    def merges(self) -> list[Merged]:
        """The merges, in order."""
        return [each for each in self.records if isinstance(each, Merged)]


_Told: TypeAlias = Iterator[str]
_Check: TypeAlias = Callable[[SeaStory, SeaStory | None], _Told]


def check_sea(story: SeaStory, *, reference: SeaStory | None = None) -> HistoryVerdict:
    """Return the verdict on a sea alone; ``reference`` is an undisturbed one of the same bits."""
    checked, violations = [], []
    for name, (wants, find) in _FINDERS.items():
        if wants(story, reference):
            checked.append(name)
            violations += [Violation(check=name, message=text) for text in find(story, reference)]
    return HistoryVerdict(
        attempts=0,
        steps=0,
        executed=0,
        undone=0,
        undone_most=0,
        samples=0,
        checked=tuple(checked),
        violations=tuple(violations),
    )


def _one_chain(story: SeaStory, reference: SeaStory | None) -> _Told:
    """Yield the first record that does not follow from those before it, and empty logbooks."""
    if not story.merges:
        yield "the logbook has no merge"
    view = View()
    for record in story.records:
        try:
            view = view.after(record)
        except SeaError as error:
            yield str(error)
            return


def _once(story: SeaStory, reference: SeaStory | None) -> _Told:
    """Yield works that hold what a merge has already: their base is older than that merge."""
    lineages: dict[str, int] = {}
    merged: dict[tuple[str, int, int], int] = {}
    counts: defaultdict[int, int] = defaultdict(int)
    for record in story.records:
        if isinstance(record, Entered):
            lineages[record.island] = record.lineage
        if not isinstance(record, Merged):
            continue
        counts[record.portion] += 1
        for part in record.parts:
            key = part.island, lineages.get(part.island, -1), record.portion
            if part.base < merged.get(key, 0):
                yield (
                    f"tide {record.tide} merges a work of {part.island} that is based on merge "
                    f"{part.base} of portion {record.portion}: merge {merged[key]} has it already"
                )
            merged[key] = counts[record.portion]


def _same_tides(story: SeaStory, reference: SeaStory | None) -> _Told:
    """Yield the first tide after which islands have different weights, and tides of no record."""
    known = {record.tide for record in story.merges}
    by_tide: defaultdict[int, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for island, tides in story.adopted.items():
        for tide, digests in tides.items():
            for digest in digests:
                by_tide[tide][digest].add(island)
    for tide, found in sorted(by_tide.items()):
        if tide not in known:
            yield f"tide {tide} was adopted, and no record has it"
        if len(found) > 1:
            sides = (f"{', '.join(sorted(names))} have {digest}" for digest, names in found.items())
            yield f"after tide {tide} {' and '.join(sides)}; this is the first difference"
            return


def _same_ends(story: SeaStory, reference: SeaStory | None) -> _Told:
    """Yield islands that end after the same tide with different weights."""
    groups: defaultdict[int, dict[str, frozenset[str]]] = defaultdict(dict)
    for island, digests in story.ends.items():
        groups[max(story.adopted.get(island, {}), default=-1)][island] = digests
    for tide, found in sorted(groups.items()):
        if len(frozenset[str]().union(*found.values())) > 1:
            told = (f"{name} with {', '.join(sorted(d))}" for name, d in sorted(found.items()))
            yield f"after tide {tide} islands end with different weights: {'; '.join(told)}"


def _repeats(story: SeaStory, reference: SeaStory | None) -> _Told:
    """Yield tides that a replay of the logbook does not repeat with the digest of the islands."""
    adopted: defaultdict[int, set[str]] = defaultdict(set)
    for tides in story.adopted.values():
        for tide, digests in tides.items():
            adopted[tide] |= digests
    for each in story.repeated:
        if each.outcome not in _GOOD:
            yield f"tide {each.tide} cannot be repeated: {each.outcome}"
        elif adopted[each.tide] - {each.digest}:
            yield (
                f"the replay comes out of tide {each.tide} with {each.digest}, islands with "
                f"{', '.join(sorted(adopted[each.tide]))}"
            )


def _as_undisturbed(story: SeaStory, reference: SeaStory | None) -> _Told:
    """Yield the first merge, and an end, that is not that of the reference."""
    assert reference is not None
    ours, theirs = story.merges, reference.merges
    for mine, its in zip(ours, theirs, strict=False):
        if _works(mine.parts) != _works(its.parts):
            yield f"tide {mine.tide} merges other works than the reference"
            break
    if len(ours) != len(theirs):
        yield f"{len(ours)} merges, and {len(theirs)} of the reference"
    begun = (each for s in (story, reference) for each in s.records[:1])
    firsts = [each.digest for each in begun if isinstance(each, Founded)]
    if len(set(firsts)) > 1:
        yield f"the sea begins with weights {firsts[0]}, the reference with {firsts[1]}"
    ends = {d for s in (story, reference) for digests in s.ends.values() for d in digests}
    if story.ends and reference.ends and len(ends) > 1:
        yield f"the islands and the reference end with different weights: {', '.join(sorted(ends))}"


def _works(parts: Sequence[Part]) -> list[tuple[str, int, str, str]]:
    return [(part.island, part.weight, part.digest, part.state) for part in parts]


# -- the checks ------------------------------------------------------------------------------------

_Wants: TypeAlias = Callable[[SeaStory, SeaStory | None], bool]

_FINDERS: Final[dict[str, tuple[_Wants, _Check]]] = {
    "one logbook": (lambda s, r: True, _one_chain),
    "own work once": (lambda s, r: True, _once),
    "equal weights after every tide": (lambda s, r: True, _same_tides),
    "equal weights at the end": (lambda s, r: bool(s.ends), _same_ends),
    "replay of the logbook": (lambda s, r: bool(s.repeated), _repeats),
    "sea of the reference": (lambda s, r: r is not None, _as_undisturbed),
}

SEA_CHECKS: Final = tuple(_FINDERS)
"""The names of all checks of a sea."""


def together(islands: Mapping[str, HistoryVerdict], sea: HistoryVerdict) -> HistoryVerdict:
    """Return the verdict on all islands, each by its own history, and on their sea."""
    each = [*islands.values(), sea]
    return HistoryVerdict(
        attempts=sum(one.attempts for one in each),
        steps=sum(one.steps for one in each),
        executed=sum(one.executed for one in each),
        undone=sum(one.undone for one in each),
        undone_most=max(one.undone_most for one in each),
        samples=sum(one.samples for one in each),
        checked=tuple(dict.fromkeys(name for one in each for name in one.checked)),
        violations=(
            *(
                Violation(check=found.check, message=f"{name}: {found.message}")
                for name, one in islands.items()
                for found in one.violations
            ),
            *sea.violations,
        ),
    )
