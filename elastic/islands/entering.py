"""The way of an island without a state into the sea, as rank 0 decides it.

The first island founds the sea. Islands that build the same first weights join before the first
merge. Every other is given the weights by a member: nobody without a state founds or heals a sea.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from holdfast.ckpt.errors import NotFoundError
from holdfast.elastic.errors import ConfigError, SeaError
from holdfast.elastic.islands.commands import (
    AwaitNews,
    Command,
    EnterAnew,
    GoOn,
    LoadWeights,
    adoption,
)
from holdfast.elastic.islands.courier import beat_s
from holdfast.elastic.islands.logbook import SeaLogbook
from holdfast.elastic.islands.mailbox import Mailbox
from holdfast.elastic.islands.messages import Asked, Sign
from holdfast.elastic.sea.records import (
    DealtData,
    Entered,
    Founded,
    Left,
    Parameter,
    agreed,
    difference,
)
from holdfast.elastic.sea.settings import Islands

_BEATS: Final = 3
"""An island that lives shows it within so many beats."""


def returning(
    logbook: SeaLogbook,
    islands: Islands,
    *,
    lineage: int,
    run: str,
    sign: Callable[[], Sign | None],
) -> EnterAnew | GoOn:
    """Return how a run goes on whose state has this lineage; ``sign()`` is its island's last one.

    It enters anew if it did so before, in a step that its state has not: that was lost, or its loss
    guard went back before it. Raises ``SeaError`` if the logbook is not the one that the state is
    from.
    """
    view, me = logbook.view, islands.name
    known = view.members.get(me) or view.former.get(me)
    if known is None or known.lineage < lineage:
        raise SeaError(
            f"the state of the island {me} belongs to another sea than that at {islands.meet}: "
            "give the meeting place that it had, or begin with another checkpoint directory"
        )
    if known.lineage == lineage:
        return GoOn()
    last = None if islands.is_dealt else sign()
    is_own = islands.is_dealt or (last is not None and last.run == run)
    return EnterAnew(keeps=True) if is_own else GoOn()


class Entrance:
    """One island on its way in. ``first`` is the digest of its first weights.

    ``adopted`` are the merges in the sea's weights that it has, None if it has none. If the
    logbook deals samples, ``dealt`` is their data set and ``need`` the number that it wants; it
    trains once it got them.
    """

    def __init__(  # noqa: PLR0913 - made in one place, all by keyword
        self,
        logbook: SeaLogbook,
        mailbox: Mailbox,
        islands: Islands,
        *,
        parameters: Sequence[Parameter],
        first: str,
        weight: int,
        run: str,
        clock: Callable[[], float],
        adopted: int | None = None,
        dealt: DealtData | None = None,
        need: int = 0,
    ) -> None:
        self._dealt, self._need = dealt, need
        self._lineage: int | None = None
        self._logbook, self._mailbox, self._islands = logbook, mailbox, islands
        self._parameters, self._first, self._weight = tuple(parameters), first, weight
        self._run, self._clock, self._began_s = run, clock, clock()
        self._request: Asked | None = None
        self._asked_s = self._began_s
        self._adopted = adopted
        self._sign: Sign | None = None
        self._seen_s: float | None = None
        self._stirred_s = self._began_s
        self._signs: dict[str, Sign | None] = {}

    def next(self) -> tuple[Command, list[bytes]]:
        """Return what all ranks do next, and the payloads of an `AdoptMerge`.

        Raises ``ConfigError`` for settings that are not the sea's, and for a name that another
        living island has; ``SeaError`` where nobody can give the sea's weights.
        """
        if self._adopted is None and not self._logbook.view.length:
            self._logbook.begin_late()
        self._logbook.poll()
        view, me = self._logbook.view, self._islands.name
        if view.founded is None:
            self._found()
            return AwaitNews(), []
        if self._lineage is not None:
            return self._entered(self._lineage), []
        if wrong := difference(view.founded, self._islands, self._parameters, dealt=self._dealt):
            raise ConfigError(
                f"the sea at {self._islands.meet} has other settings: {wrong}; give all islands "
                "the same, or meet elsewhere"
            )
        if me in view.members and self._is_alive():
            return AwaitNews(), []
        if self._adopted is None:
            if view.tide or view.founded.digest != self._first:
                return self._asked(), []
            self._adopted = 0
        if self._adopted < view.tide and not view.is_paired:  # a pair's merge is nobody else's
            return self._follow(self._adopted)
        if me in view.members:  # only now: the others wait for a member
            self._logbook.append(Left(number=view.length, island=me, why="lost"))
        number, tide = self._logbook.view.length, self._logbook.view.tide
        if (tide > view.tide and not view.is_paired) or not self._logbook.append(
            Entered(
                number=number,
                island=me,
                tide=tide,
                weight=self._weight,
                lineage=number,
                need=self._need,
            )
        ):
            return AwaitNews(), []
        if self._request is not None:
            self._mailbox.close_request(self._request)
        self._lineage = number
        return self._entered(number), []

    def _entered(self, lineage: int) -> Command:
        """Begin to train, or wait until all founders are there, who are dealt their samples."""
        view, me = self._logbook.view, self._islands.name
        member = view.members.get(me)
        if member is None or member.lineage != lineage:
            self._lineage = None  # it was put out meanwhile
            return AwaitNews()
        if view.supply is not None and not view.supply.is_open:
            return AwaitNews()
        assert self._adopted is not None
        tide = member.tide if view.is_paired else self._adopted
        return GoOn(
            lineage=lineage,
            tide=tide if view.is_paired else 0,
            place=self._logbook.place(tide),
            dealt=self._logbook.dealt_since(0),
        )

    def _found(self) -> None:
        self._logbook.append(
            Founded(
                number=0,
                settings=agreed(self._islands),
                parameters=self._parameters,
                digest=self._first,
                dealt=self._dealt,
            )
        )

    def _is_alive(self) -> bool:
        """Return whether it is still open if another run with this name lives.

        Raises ``ConfigError`` if one does.
        """
        sign, now = self._mailbox.sign(self._islands.name), self._clock()
        if sign is None or sign.run == self._run:
            return False
        if self._seen_s is None:
            self._sign, self._seen_s = sign, now
        if sign != self._sign:
            raise ConfigError(
                f"another run is the island {self._islands.name!r} of {self._islands.meet}: give "
                "each island a name of its own"
            )
        return now - self._seen_s < _BEATS * beat_s(self._islands)

    def _asked(self) -> Command:
        """Ask for the sea's weights; return what to do until they are here, and then."""
        view, me = self._logbook.view, self._islands.name
        if not view.members.keys() - {me}:
            raise SeaError(
                f"the sea at {self._islands.meet} has no island any more that could give its "
                "weights: start one of them with its checkpoints, or meet elsewhere"
            )
        request = self._ask()
        if (given := self._mailbox.given(request)) is not None:
            root = self._mailbox.given_root(request, by=given.by)
            self._adopted = given.tide
            return LoadWeights(root=root, tide=given.tide, bases=given.bases)
        self._watch()
        return AwaitNews()

    def _ask(self) -> Asked:
        """Ask, and show from time to time that this island waits; return the request.

        Members remove the request of an island that was silent for long: it asks anew.
        """
        now, me = self._clock(), self._islands.name
        due = now - self._asked_s >= beat_s(self._islands)
        if self._request is None or (due and not self._mailbox.is_open(self._request)):
            self._request = Asked(island=me, id=f"{me}-{secrets.token_hex(8)}")
            self._stirred_s = now
        elif not due:
            return self._request
        else:
            beat = self._request.beat + 1
            self._request = msgspec.structs.replace(self._request, beat=beat)
        self._asked_s = now
        self._mailbox.ask(self._request)
        return self._request

    def _watch(self) -> None:
        """Raise ``SeaError`` if no member has shown any life for as long as one is waited for."""
        now = self._clock()
        others = self._logbook.view.members.keys() - {self._islands.name}
        signs = {island: self._mailbox.sign(island) for island in others}
        if signs != self._signs:
            self._signs, self._stirred_s = signs, now
        if now - self._stirred_s > self._islands.patience_s:
            raise SeaError(
                f"none of {', '.join(sorted(signs))} answers in the sea at {self._islands.meet}: "
                "start one of them with its checkpoints, or meet elsewhere"
            )

    def _follow(self, tide: int) -> tuple[Command, list[bytes]]:
        """Return the next merge, or ask anew if its payloads are gone."""
        if tide not in self._logbook.merged:  # the weights are older than the place of the begin
            self._logbook.reread()
        record = self._logbook.merged[tide]
        try:
            data = [self._mailbox.payload(part.island, part.digest) for part in record.parts]
        except NotFoundError:
            self._adopted = None
            if self._request is not None:
                self._mailbox.close_request(self._request)
                self._request = None
            return AwaitNews(), []
        self._adopted = tide + 1
        return adoption(record), data
