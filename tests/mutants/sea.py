"""Bugs of a sea of islands, found by the simulator of seas in drawn voyages under drawn faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

import msgspec

from holdfast.elastic.islands.commands import AdoptMerge, AwaitNews
from holdfast.elastic.sea import records
from holdfast.elastic.sea.dealing import count, cut
from holdfast.elastic.sea.records import Merged, Part, Record
from holdfast.elastic.sea.view import SeaMember, View
from holdfast.elastic.testing.seas.drawing import Voyage, dealt, voyage
from holdfast.elastic.testing.seas.oracle import SeaFaultError
from holdfast.elastic.testing.seas.sea import SeaStrike, sail
from mutants.bug import Bug


def trial(seed: int) -> str:
    """Run the voyage of a seed; return the promise that was broken, or ""."""
    return _sailed(voyage(seed), seed)


def dealt_trial(seed: int) -> str:
    """Run the same with samples that the logbook deals: each must be in the sea once."""
    return _sailed(dealt(voyage(seed), seed), seed)


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


def _adopts_as_if_not_named(real: Callable[..., Any]) -> Any:
    def adoption(record: Merged, *, own: str = "") -> AdoptMerge:
        found: AdoptMerge = real(record, own="")
        return found

    return adoption


def _adopts_as_if_named(real: Callable[..., Any]) -> Any:
    def adoption(record: Merged, *, own: str = "") -> AdoptMerge:
        found: AdoptMerge = real(record, own=own)
        return found if own else msgspec.structs.replace(found, own=0)

    return adoption


def _renormalises(_real: Any) -> Any:
    return lambda self, parts: sum(part.weight for part in parts)


def _compares_no_digest(_real: Any) -> Any:
    return lambda self, portion, parts: ()


def _lets_the_minority_decide(_real: Any) -> Any:
    def majority(self: View, group: Iterable[Part]) -> str:
        return min(group, key=lambda part: part.weight).state

    return majority


def _forgets_the_merged(real: Callable[..., View]) -> Any:
    def merged(self: View, record: Merged) -> View:
        view = real(self, record)
        kept = {n: replace(m, merged=self.members[n].merged) for n, m in view.members.items()}
        return replace(view, members=kept)

    return merged


def _takes_any_works_for_enough(_real: Any) -> Any:
    return lambda self, parts: bool(parts)


def _overwrites_a_record(_real: Any) -> Any:
    def append(self: Any, record: Record) -> bool:
        name = f"logbook/{record.number:08d}.json"
        self._store.write(name, [records.encode(record)])
        self.poll()
        return True

    return append


def _remembers_old_silence(_real: Any) -> Any:
    def greet(self: Any, now: float) -> None:
        for island in self.logbook.view.members:
            self._heard.setdefault(island, now)

    return greet


def _removes_payloads_early(real: Callable[..., None]) -> Any:
    def forget(self: Any, island: str, tide: int) -> None:
        real(self, island, max(each[1] for each in self.works_of(island)))

    return forget


def _is_no_stranger(_real: Any) -> Any:
    def asked(self: Any) -> AwaitNews:
        self._adopted = self._logbook.view.tide
        return AwaitNews()

    return asked


def _keeps_blocks_of_leavers(_real: Any) -> Any:
    return lambda self, blocks: self


def _returns_what_is_merged(_real: Any) -> Any:
    def after_merge(self: SeaMember, portion: int, trained: int) -> SeaMember:
        found = (*self.trained[:portion], trained, *self.trained[portion + 1 :])
        return replace(self, trained=found)

    return after_merge


def _counts_one_portion(_real: Any) -> Any:
    def after_merge(self: SeaMember, portion: int, trained: int) -> SeaMember:
        found = (*self.trained[:portion], trained, *self.trained[portion + 1 :])
        _, blocks = cut(self.blocks, max(found) - self.dealt + count(self.blocks))
        return replace(self, trained=found, blocks=blocks)

    return after_merge


def _hands_out_again(real: Callable[..., Any]) -> Any:
    return lambda self, _count: real(self, 0)


def _meets_nobody(_real: Any) -> Any:
    return lambda self, tide: {}


def _ends_for_all(_real: Any) -> Any:
    return property(lambda self: bool(self.ended))


def _ends_as_it_meets(_real: Any) -> Any:
    return lambda portion, portions: portion


def _takes_every_meeting(_real: Any) -> Any:
    return lambda self, view, record: True


def _bug(name: str, about: str, where: str, broken: Callable[[Any], Any], seed: int) -> Bug:
    return Bug(name=name, about=about, where=where, broken=broken, trial="sea", seed=seed)


_VIEW: Final = "holdfast.elastic.sea.view:View"
_ISLANDS: Final = "holdfast.elastic.islands"

BUGS: Final = (
    _bug(
        "own-work-kept",
        "an island keeps its own work although the merge names it",
        f"{_ISLANDS}.commands:adoption",
        _adopts_as_if_not_named,
        0,
    ),
    _bug(
        "own-work-dropped",
        "an island drops its own work although the merge does not name it",
        f"{_ISLANDS}.commands:adoption",
        _adopts_as_if_named,
        0,
    ),
    _bug(
        "mean-renormalised",
        "a mean is taken over the islands that are there instead of over all",
        f"{_VIEW}.whole",
        _renormalises,
        6,
    ),
    _bug(
        "merged-again",
        "a work may be merged again",
        f"{_VIEW}._merged",
        _forgets_the_merged,
        12,
    ),
    _bug(
        "too-few",
        "a merge waits for nobody",
        f"{_VIEW}.is_enough",
        _takes_any_works_for_enough,
        0,
    ),
    _bug(
        "record-overwritten",
        "a record is written where there is one",
        f"{_ISLANDS}.logbook:SeaLogbook.append",
        _overwrites_a_record,
        0,
    ),
    _bug(
        "silence-remembered",
        "an island that came back is put out for its silence before",
        f"{_ISLANDS}.courier:Courier._greet",
        _remembers_old_silence,
        30,
    ),
    _bug(
        "payload-removed",
        "an island removes payloads that others still need",
        f"{_ISLANDS}.mailbox:Mailbox.forget_before",
        _removes_payloads_early,
        6,
    ),
    _bug(
        "empty-founder",
        "an island without a state enters with its first weights",
        f"{_ISLANDS}.entering:Entrance._asked",
        _is_no_stranger,
        4,
    ),
    *(
        Bug(name=name, about=about, where=where, broken=broken, trial="pairs", seed=seed)
        for name, about, where, broken, seed in (
            (
                "pairs-not-met",
                "every island is alone at every tide",
                f"{_VIEW}._pairing",
                _meets_nobody,
                0,
            ),
            (
                "pairs-own-work-kept",
                "an island keeps its own work after a meeting",
                f"{_ISLANDS}.arriving:adoption",
                _adopts_as_if_not_named,
                0,
            ),
            (
                "last-merge-early",
                "the last merge does not wait for the islands that still train",
                f"{_VIEW}.is_over",
                _ends_for_all,
                0,
            ),
            (
                "last-work-met",
                "a work for the last merge may be named by a meeting",
                "holdfast.elastic.sea.portions:last_of",
                _ends_as_it_meets,
                11,
            ),
            (
                "others-met",
                "an island adopts the meetings of others",
                f"{_ISLANDS}.logbook:SeaLogbook._is_mine",
                _takes_every_meeting,
                0,
            ),
        )
    ),
    Bug(
        name="digest-uncompared",
        about="the digests of the sea's weights are not compared",
        where=f"{_VIEW}.astray",
        broken=_compares_no_digest,
        trial="damage",
        seed=0,
    ),
    Bug(
        name="minority-right",
        about="the digest of the smallest weight counts",
        where=f"{_VIEW}._majority",
        broken=_lets_the_minority_decide,
        trial="damage",
        seed=0,
    ),
    Bug(
        name="samples-kept",
        about="the samples of an island that is put out are not dealt anew",
        where="holdfast.elastic.sea.dealing:Supply.give_back",
        broken=_keeps_blocks_of_leavers,
        trial="dealt",
        seed=0,
    ),
    Bug(
        name="samples-returned",
        about="merged samples are dealt anew when their island leaves",
        where="holdfast.elastic.sea.view:SeaMember.after_merge",
        broken=_returns_what_is_merged,
        trial="dealt",
        seed=0,
    ),
    Bug(
        name="samples-of-one-portion",
        about="samples count as trained when one portion has merged them",
        where="holdfast.elastic.sea.view:SeaMember.after_merge",
        broken=_counts_one_portion,
        trial="dealt",
        seed=0,
    ),
    Bug(
        name="samples-twice",
        about="an island takes blocks that it has trained for new ones",
        where=f"{_ISLANDS}.logbook:SeaLogbook.dealt_since",
        broken=_hands_out_again,
        trial="dealt",
        seed=0,
    ),
)
