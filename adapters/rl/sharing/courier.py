"""The courier of a run: publishes its groups and fetches those of others, one turn at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.adapters.rl.samples.borrowed import GroupOrigin, SharedGroup
from holdfast.adapters.rl.sharing.mailbox import GroupMailbox
from holdfast.adapters.rl.sharing.settings import Share
from holdfast.ckpt.errors import CorruptError, NotFoundError
from holdfast.elastic.errors import ConfigError

_ISLANDS_A_TURN: Final = 16
"""The most runs whose groups are looked at in one turn; the others have the next turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingGroup:
    """A group of this run that waits to be published: ``text`` is its JSON, ``step`` trained it."""

    step: int
    ordinal: int
    text: str


@dataclass(slots=True, kw_only=True)
class TurnReport:
    """The result of a turn.

    ``published`` are ordinals of this run that are in the pool now, ``bytes`` were written for
    them. ``newest`` has the newest groups of each run that was looked at, ``fetched`` those among
    them that are new here, or the reason why one cannot be read; ``islands`` are all runs.
    """

    published: list[int] = field(default_factory=list)
    bytes: int = 0
    islands: list[str] = field(default_factory=list)
    newest: dict[str, list[GroupOrigin]] = field(default_factory=dict)
    fetched: dict[GroupOrigin, SharedGroup | str] = field(default_factory=dict)


class GroupCourier:
    """Makes the turns of a run in the pool; ``is_new``: its ``lineage`` has not been there yet."""

    def __init__(self, mailbox: GroupMailbox, share: Share, *, lineage: str, is_new: bool) -> None:
        self._mailbox, self._share = mailbox, share
        self._lineage, self._is_new = lineage, is_new
        self._next = 0

    def turn(
        self,
        outgoing: Sequence[OutgoingGroup],
        *,
        may_take: Callable[[GroupOrigin], bool],
        have: Collection[GroupOrigin],
    ) -> TurnReport:
        """Publish ``outgoing`` groups; look for those that ``may_take`` allows, beyond ``have``.

        Raises ``ConfigError`` if another run has this one's name by now, and the store's errors.
        """
        self._check_name()
        report = TurnReport()
        self._publish(outgoing, report)
        if self._share.others:
            self._look(report, may_take, have)
        return report

    def _check_name(self) -> None:
        name, mailbox = self._share.name, self._mailbox
        owner = mailbox.owner(name)
        if owner == self._lineage:
            return
        if owner and not self._is_new:
            raise ConfigError(
                f"Share(name={name!r}): another run shares under this name at {self._share.meet} "
                f"since this one began; give each run a name of its own, or remove "
                f"{mailbox.store.where(f'sharing/owners/{name}')} if the other run is over"
            )
        mailbox.claim(name, self._lineage)
        self._is_new = False

    def _publish(self, outgoing: Sequence[OutgoingGroup], report: TurnReport) -> None:
        name = self._share.name
        for each in outgoing:
            origin = GroupOrigin(island=name, lineage=self._lineage, ordinal=each.ordinal)
            report.bytes += self._mailbox.publish(each.text, origin)
            report.published.append(each.ordinal)
        if outgoing:
            self._mailbox.retain(name, self._lineage, keep=self._share.keep)

    def _look(
        self,
        report: TurnReport,
        may_take: Callable[[GroupOrigin], bool],
        have: Collection[GroupOrigin],
    ) -> None:
        """Fetch the newest groups of each run, twice as many as a step takes."""
        islands = [each for each in self._mailbox.islands() if each != self._share.name]
        first = self._next % max(1, len(islands))
        turned = (islands[first:] + islands[:first])[:_ISLANDS_A_TURN]
        self._next = first + len(turned)
        report.islands = islands
        for island in turned:
            there = [each for each in self._mailbox.origins(island) if may_take(each)]
            newest = report.newest[island] = there[-2 * self._share.others :]
            for origin in list(newest):
                if origin not in have:
                    self._fetch(origin, report)

    def _fetch(self, origin: GroupOrigin, report: TurnReport) -> None:
        try:
            report.fetched[origin] = self._mailbox.read(origin)
        except NotFoundError:
            report.newest[origin.island].remove(origin)  # its owner removed it meanwhile
        except CorruptError as error:
            report.fetched[origin] = str(error)
