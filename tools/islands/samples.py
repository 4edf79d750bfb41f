"""The proof that the samples which a logbook deals are each merged once, by one island. Pure.

The records say which blocks every lineage was dealt, and how many of its samples all portions have
merged. Histories of runs say which samples an island really trained.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from holdfast.elastic.data.sampler import Permutation
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.sea import dealing
from holdfast.elastic.sea.dealing import Block, Blocks
from holdfast.elastic.sea.records import DealtData, Founded, Record
from holdfast.elastic.sea.view import View

_NAMED: Final = 5


class EpochSamples(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of an epoch: ``merged`` are in the sea, ``held`` islands have in hand.

    ``free`` are dealt to nobody, or were given back. ``twice`` are merged more than once, and
    ``lost`` none of these.
    """

    epoch: int
    samples: int
    merged: int
    held: int
    free: int
    twice: int
    lost: int


class LineageSamples(msgspec.Struct, frozen=True, kw_only=True):
    """A lineage of an island: the samples that it was dealt, and those that are merged."""

    island: str
    lineage: int
    dealt: int
    merged: int
    takes_part: bool


class SamplesVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on the samples of a sea; ``is_over``: all islands have left it.

    ``wrong`` says what is wrong, one sentence each. ``trained`` has, for each island whose history
    was given, the samples that it trained without a merge that has them in all portions.
    """

    epochs: tuple[EpochSamples, ...]
    lineages: tuple[LineageSamples, ...]
    is_over: bool
    wrong: tuple[str, ...]
    trained: dict[str, int]


@dataclass(slots=True, kw_only=True)
class _Lineage:
    """A lineage as the records make it: all blocks that it was dealt, in order."""

    island: str
    lineage: int
    blocks: list[Block] = field(default_factory=list)
    merged: int = 0
    takes_part: bool = True

    @property
    def in_sea(self) -> Blocks:
        """The blocks that all portions have merged."""
        return dealing.cut(self.blocks, self.merged)[0]


def samples_of(
    records: Sequence[Record],
    trained: Mapping[str, Iterable[tuple[int, int]]],
) -> SamplesVerdict:
    """Return the verdict on a logbook.

    ``trained`` has the samples that islands report, each by its epoch and its number in the data
    set. Raises ``ConfigError`` for a sea whose islands have their own data, and for an order that
    the logbook does not tell.
    """
    founded = records[0]
    assert isinstance(founded, Founded)
    if (data := founded.dealt) is None:
        raise ConfigError(
            "the islands of this sea have their own data: its logbook deals no samples; there is "
            "nothing to check"
        )
    found, view = _lineages(records)
    wrong: list[str] = []
    epochs = _epochs(found, view, data)
    for each in epochs:
        if each.twice:
            wrong.append(f"{each.twice} samples of epoch {each.epoch} are merged more than once")
        if each.lost:
            wrong.append(f"{each.lost} samples of epoch {each.epoch} are with nobody")
        if not view.members and data.epochs is not None and each.free:
            wrong.append(
                f"{each.free} samples of epoch {each.epoch} are not merged, and all islands have "
                "left"
            )
    more: dict[str, int] = {}
    for island, reported in trained.items():
        own = [each for each in found if each.island == island]
        if not own:
            raise ConfigError(f"{island} is no island of this sea: give the name that it has there")
        here, there = set(reported), set(_named(own, data))
        more[island] = len(here - there)
        if missing := sorted(there - here):
            wrong.append(
                f"{len(missing)} samples of {island} are merged, and it did not train them: "
                f"{', '.join(f'{name} of epoch {epoch}' for epoch, name in missing[:_NAMED])}"
            )
    return SamplesVerdict(
        epochs=epochs,
        lineages=tuple(_told(each) for each in found),
        is_over=bool(found) and not view.members,
        wrong=tuple(wrong),
        trained=more,
    )


def _lineages(records: Sequence[Record]) -> tuple[list[_Lineage], View]:
    """Return all lineages by the records, and the view at their end."""
    view, found = View(), dict[tuple[str, int], _Lineage]()
    for record in records:
        view = view.after(record)
        for name, member in view.members.items():
            key = name, member.lineage
            each = found.setdefault(key, _Lineage(island=name, lineage=member.lineage))
            known = dealing.count(each.blocks)
            held = dealing.count(member.blocks)
            each.blocks += dealing.cut(member.blocks, known - member.dealt + held)[1]
            each.merged = member.merged_samples
    for (name, lineage), each in found.items():
        now = view.members.get(name)
        each.takes_part = now is not None and now.lineage == lineage
    return list(found.values()), view


def _epochs(found: Sequence[_Lineage], view: View, data: DealtData) -> tuple[EpochSamples, ...]:
    supply = view.supply
    assert supply is not None
    end = supply.fresh if supply.end is None else supply.end
    merged: Counter[int] = Counter()
    held, free, twice = Counter[int](), Counter[int](), Counter[int]()
    for each in found:
        _count(each.in_sea, data, merged)
    for member in view.members.values():
        _count(member.blocks, data, held)
    _count((*supply.returned, (supply.fresh, end)), data, free)
    before = 0
    for start, stop in sorted(block for each in found for block in each.in_sea):
        _count([(start, min(stop, max(start, before)))], data, twice)
        before = max(before, stop)
    return tuple(
        EpochSamples(
            epoch=epoch,
            samples=(size := min(data.samples, end - epoch * data.samples)),
            merged=merged[epoch] - twice[epoch],
            held=held[epoch],
            free=free[epoch],
            twice=twice[epoch],
            lost=max(0, size - merged[epoch] + twice[epoch] - held[epoch] - free[epoch]),
        )
        for epoch in range(-(-end // data.samples))
    )


def _count(blocks: Iterable[Block], data: DealtData, into: Counter[int]) -> None:
    """Count the samples of blocks by epoch."""
    for first, stop in blocks:
        start = first
        while start < stop:
            epoch = start // data.samples
            middle = min(stop, (epoch + 1) * data.samples)
            into[epoch] += middle - start
            start = middle


def _named(found: Iterable[_Lineage], data: DealtData) -> Iterable[tuple[int, int]]:
    """Yield epoch and number in the data set of the samples that are merged."""
    order = json.loads(data.order)
    if order not in ("shuffled", "sequential"):
        raise ConfigError(
            f"the samples have an order of their own ({data.order}), of which the logbook does not "
            "tell the numbers: check the records alone"
        )
    for start, stop in (block for each in found for block in each.in_sea):
        for position in range(start, stop):
            epoch, at = divmod(position, data.samples)
            if order == "sequential":
                yield epoch, at
            else:
                yield epoch, Permutation(data.samples, seed=data.seed, epoch=epoch)[at]


def _told(each: _Lineage) -> LineageSamples:
    return LineageSamples(
        island=each.island,
        lineage=each.lineage,
        dealt=dealing.count(each.blocks),
        merged=each.merged,
        takes_part=each.takes_part,
    )
