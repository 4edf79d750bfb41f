"""Bugs of a sea of islands, found by the simulator of seas in drawn voyages under drawn faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final, TypeAlias

import msgspec

from holdfast.elastic.islands.commands import AdoptMerge, AwaitNews
from holdfast.elastic.sea import records
from holdfast.elastic.sea.dealing import count, cut
from holdfast.elastic.sea.member import SeaMember
from holdfast.elastic.sea.records import Merged, Part, Record
from holdfast.elastic.sea.view import View
from holdfast.elastic.testing.seas.drawing import Voyage, dealt, guarded, voyage
from holdfast.elastic.testing.seas.oracle import SeaFaultError
from holdfast.elastic.testing.seas.sea import SeaStrike, sail
from mutants.bug import Bug


def trial(seed: int) -> str:
    """Run the voyage of a seed; return the promise that was broken, or ""."""
    return _sailed(voyage(seed), seed)


def dealt_trial(seed: int) -> str:
    """Run the same with samples that the logbook deals: each must be in the sea once."""
    return _sailed(dealt(voyage(seed), seed), seed)


def guarded_trial(seed: int) -> str:
    """Run the same with faults that loss guards undo: none may be in the sea."""
    return _sailed(guarded(voyage(seed), seed), seed)


def guarded_dealt_trial(seed: int) -> str:
    """Run the same with both: islands go back to before samples that they were dealt."""
    return _sailed(guarded(dealt(voyage(seed), seed), seed), seed)


def _sailed(drawn: Voyage, seed: int) -> str:
    try:
        found = sail(drawn.crews, drawn.strikes, seed=seed, exact=drawn.exact)
        if drawn.is_alike:
            quiet = sail(drawn.crews, (), seed=seed, exact=drawn.exact)
            if found.left.keys() == {"done"} and found.final != quiet.final:
                return "the weights differ from those of the quiet sea"
    except SeaFaultError as fault:
        return str(fault)
    return ""


def damaged_trial(seed: int) -> str:
    """Damage the weights of one island of three: it must be put out, and the sea stay right."""
    draw = random.Random(f"planted damage {seed}")
    drawn = voyage(seed, trio=True)
    name = draw.choice(drawn.crews).islands.name
    strike = SeaStrike(kind="damage", island=name, at_s=draw.uniform(3, 6), seconds=1.0)
    try:
        found = sail(drawn.crews, [strike], seed=seed, exact=drawn.exact)
    except SeaFaultError as fault:
        return str(fault)
    return "" if found.left.get("astray", 0) == 1 else f"{name} was not put out"


def paired_trial(seed: int) -> str:
    """Run the voyage of a seed, with islands that meet in pairs; return the broken promise."""
    drawn = voyage(seed, pairs=True)
    try:
        found = sail(drawn.crews, drawn.strikes, seed=seed, exact=drawn.exact)
        is_alike = drawn.is_alike and found.left.keys() == {"done"}
        if is_alike and found.final != sail(drawn.crews, (), seed=seed).final:
            return "the weights differ from those of the quiet sea"
    except SeaFaultError as fault:
        return str(fault)
    return ""


# -- the bugs --------------------------------------------------------------------------------------

_VIEW: Final = "holdfast.elastic.sea.view:View"
_MEMBER: Final = "holdfast.elastic.sea.member:SeaMember"
_ISLANDS: Final = "holdfast.elastic.islands"

_Broken: TypeAlias = Callable[[Any], Any]
_bugs: list[Bug] = []


def _bug(
    name: str, about: str, where: str, *, seed: int, trial: str = "sea"
) -> Callable[[_Broken], _Broken]:
    """Have a function make the replacement of a bug."""

    def add(broken: _Broken) -> _Broken:
        _bugs.append(
            Bug(name=name, about=about, where=where, broken=broken, trial=trial, seed=seed)
        )
        return broken

    return add


@_bug(
    "pairs-own-work-kept",
    "an island keeps its own work after a meeting",
    f"{_ISLANDS}.arriving:adoption",
    seed=0,
    trial="pairs",
)
@_bug(
    "own-work-kept",
    "an island keeps its own work although the merge names it",
    f"{_ISLANDS}.commands:adoption",
    seed=0,
)
def _adopts_as_if_not_named(real: Callable[..., Any]) -> Any:
    def adoption(record: Merged, *, own: str = "") -> AdoptMerge:
        found: AdoptMerge = real(record, own="")
        return found

    return adoption


@_bug(
    "own-work-dropped",
    "an island drops its own work although the merge does not name it",
    f"{_ISLANDS}.commands:adoption",
    seed=0,
)
def _adopts_as_if_named(real: Callable[..., Any]) -> Any:
    def adoption(record: Merged, *, own: str = "") -> AdoptMerge:
        found: AdoptMerge = real(record, own=own)
        return found if own else msgspec.structs.replace(found, own=0)

    return adoption


@_bug(
    "mean-renormalised",
    "a mean is taken over the islands that are there instead of over all",
    f"{_VIEW}.whole",
    seed=6,
)
def _renormalises(_real: Any) -> Any:
    return lambda self, parts: sum(part.weight for part in parts)


@_bug(
    "digest-uncompared",
    "the digests of the sea's weights are not compared",
    f"{_VIEW}.astray",
    seed=0,
    trial="damage",
)
def _compares_no_digest(_real: Any) -> Any:
    return lambda self, portion, parts: ()


@_bug(
    "minority-right",
    "the digest of the smallest weight counts",
    f"{_VIEW}._majority",
    seed=0,
    trial="damage",
)
def _lets_the_minority_decide(_real: Any) -> Any:
    def majority(self: View, group: Iterable[Part]) -> str:
        return min(group, key=lambda part: part.weight).state

    return majority


@_bug(
    "merged-again",
    "a work may be merged again",
    f"{_VIEW}._merged",
    seed=12,
)
def _forgets_the_merged(real: Callable[..., View]) -> Any:
    def merged(self: View, record: Merged) -> View:
        view = real(self, record)
        kept = {n: replace(m, merged=self.members[n].merged) for n, m in view.members.items()}
        return replace(view, members=kept)

    return merged


@_bug(
    "too-few",
    "a merge waits for nobody",
    f"{_VIEW}.is_enough",
    seed=0,
)
def _takes_any_works_for_enough(_real: Any) -> Any:
    return lambda self, parts: bool(parts)


@_bug(
    "record-overwritten",
    "a record is written where there is one",
    f"{_ISLANDS}.logbook:SeaLogbook.append",
    seed=0,
)
def _overwrites_a_record(_real: Any) -> Any:
    def append(self: Any, record: Record) -> bool:
        name = f"logbook/{record.number:08d}.json"
        self._store.write(name, [records.encode(record)])
        self.poll()
        return True

    return append


@_bug(
    "silence-remembered",
    "an island that came back is put out for its silence before",
    f"{_ISLANDS}.courier:Courier._greet",
    seed=30,
)
def _remembers_old_silence(_real: Any) -> Any:
    def greet(self: Any, now: float) -> None:
        for island in self.logbook.view.members:
            self._heard.setdefault(island, now)

    return greet


@_bug(
    "payload-removed",
    "an island removes payloads that others still need",
    f"{_ISLANDS}.mailbox:Mailbox.forget_before",
    seed=6,
)
def _removes_payloads_early(real: Callable[..., None]) -> Any:
    def forget(self: Any, island: str, tide: int) -> None:
        real(self, island, max(each[1] for each in self.works_of(island)))

    return forget


@_bug(
    "empty-founder",
    "an island without a state enters with its first weights",
    f"{_ISLANDS}.entering:Entrance._asked",
    seed=4,
)
def _is_no_stranger(_real: Any) -> Any:
    def asked(self: Any) -> AwaitNews:
        self._adopted = self._logbook.view.tide
        return AwaitNews()

    return asked


@_bug(
    "samples-kept",
    "the samples of an island that is put out are not dealt anew",
    "holdfast.elastic.sea.dealing:Supply.give_back",
    seed=0,
    trial="dealt",
)
def _keeps_blocks_of_leavers(_real: Any) -> Any:
    return lambda self, blocks: self


@_bug(
    "samples-returned",
    "merged samples are dealt anew when their island leaves",
    f"{_MEMBER}.after_merge",
    seed=0,
    trial="dealt",
)
def _returns_what_is_merged(_real: Any) -> Any:
    def after_merge(self: SeaMember, portion: int, trained: int) -> SeaMember:
        found = (*self.trained[:portion], trained, *self.trained[portion + 1 :])
        return replace(self, trained=found)

    return after_merge


@_bug(
    "samples-of-one-portion",
    "samples count as trained when one portion has merged them",
    f"{_MEMBER}.after_merge",
    seed=0,
    trial="dealt",
)
def _counts_one_portion(_real: Any) -> Any:
    def after_merge(self: SeaMember, portion: int, trained: int) -> SeaMember:
        found = (*self.trained[:portion], trained, *self.trained[portion + 1 :])
        _, blocks = cut(self.blocks, max(found) - self.dealt + count(self.blocks))
        return replace(self, trained=found, blocks=blocks)

    return after_merge


@_bug(
    "samples-twice",
    "an island takes blocks that it has trained for new ones",
    f"{_ISLANDS}.logbook:SeaLogbook.dealt_since",
    seed=0,
    trial="dealt",
)
def _hands_out_again(real: Callable[..., Any]) -> Any:
    return lambda self, _count: real(self, 0)


@_bug(
    "fault-sent",
    "a work is sent before its island's loss guard has judged it",
    f"{_ISLANDS}.held:HeldWorks.due",
    seed=7,
    trial="guarded",
)
def _holds_nothing_back(real: Callable[..., Any]) -> Any:
    return lambda self, _step: real(self, 1 << 30)


@_bug(
    "held-forgotten",
    "a work that was held back is never sent",
    f"{_ISLANDS}.held:HeldWorks.due",
    seed=0,
    trial="guarded",
)
def _forgets_what_is_held(real: Callable[..., Any]) -> Any:
    def due(self: Any, step: int) -> Any:
        found = real(self, step)
        self.clear()
        return found

    return due


@_bug(
    "adopted-ahead",
    "an island that went back adopts merges of its own samples before it has trained them again",
    f"{_ISLANDS}.arriving:Arrival._is_ahead",
    seed=737,
    trial="guarded-dealt",
)
def _adopts_ahead(_real: Any) -> Any:
    return lambda self, _tide: False


@_bug(
    "pairs-not-met",
    "every island is alone at every tide",
    f"{_VIEW}._pairing",
    seed=0,
    trial="pairs",
)
def _meets_nobody(_real: Any) -> Any:
    return lambda self, tide: {}


@_bug(
    "last-merge-early",
    "the last merge does not wait for the islands that still train",
    f"{_VIEW}.is_over",
    seed=0,
    trial="pairs",
)
def _ends_for_all(_real: Any) -> Any:
    return property(lambda self: bool(self.ended))


@_bug(
    "last-work-met",
    "a work for the last merge may be named by a meeting",
    "holdfast.elastic.sea.portions:last_of",
    seed=11,
    trial="pairs",
)
def _ends_as_it_meets(_real: Any) -> Any:
    return lambda portion, portions: portion


@_bug(
    "others-met",
    "an island adopts the meetings of others",
    f"{_ISLANDS}.logbook:SeaLogbook._is_mine",
    seed=0,
    trial="pairs",
)
def _takes_every_meeting(_real: Any) -> Any:
    return lambda self, view, record: True


BUGS: Final = tuple(_bugs)
