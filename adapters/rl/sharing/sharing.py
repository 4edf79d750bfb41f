"""One run's part in sharing: the groups it gives, and those that its next step borrows.

`GroupSharing.settle` is called once in each step, on rank 0. It never waits for the store: a turn
of the courier runs beside the training, and its result counts from the next step on.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Final, TypeVar

import msgspec

from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.samples.borrowed import Borrowed, GroupOrigin
from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.adapters.rl.sharing.choosing import (
    Refuses,
    TakingRules,
    chosen,
    fitted,
    shared_group,
)
from holdfast.adapters.rl.sharing.courier import GroupCourier, OutgoingGroup, TurnReport
from holdfast.adapters.rl.sharing.mailbox import GroupMailbox
from holdfast.adapters.rl.sharing.settings import Score, Share
from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import Event, GroupLeftOut, GroupsBorrowed, GroupsShared

_log = logging.getLogger(__name__)

_LINEAGE_BYTES: Final = 8
_LATE_STEPS: Final = 8
"""A group is published so many steps later even if its step is not protected by then."""

_LEFT_OUT_KNOWN: Final = 4096
"""The most groups that are known as left out; one beyond would be looked at again."""

_Result = TypeVar("_Result")


def beside(call: Callable[[], _Result], *, name: str) -> Future[_Result]:
    """Run a call on a thread of its own, which does not keep the process from ending."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - whoever takes the result gets it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def scored(sample: Borrowed, score: Score | None) -> Borrowed:
    """Return a sample with the log-probabilities of ``score`` if it was encoded again.

    Raises ``ConfigError`` if ``score`` is missing, or gives another number of values.
    """
    if not sample.recoded:
        return sample
    if score is None:
        raise ConfigError(
            f"sample {sample.sample} of {sample.origin} was encoded again from its text: give "
            "Share(score=...), as when it was borrowed"
        )
    values = [float(value) for value in score(sample.prompt, sample.tokens)]
    if len(values) != len(sample.tokens) or not all(map(math.isfinite, values)):
        raise ConfigError(
            f"Share(score=...) gave {len(values)} values for {len(sample.tokens)} tokens; give one "
            "finite log-probability for each token of the answer"
        )
    return msgspec.structs.replace(sample, logprobs=tuple(values))


class GroupSharing:
    """The sharing of a run whose groups have ``group`` samples of ``context`` tokens at most.

    ``refuses`` says which groups of others to leave out. Its state is part of the run's: the groups
    that wait to be published.
    """

    def __init__(
        self,
        share: Share,
        *,
        mailbox: GroupMailbox,
        group: int,
        context: int,
        emit: Callable[[Event], None],
        refuses: Refuses = lambda _ordinal, _prompt: "",
    ) -> None:
        self.share, self._emit = share, emit
        self._rules = TakingRules(
            group=group,
            context=context,
            family=share.digest,
            tokenizer=share.tokenizer,
            recodes=share.score is not None,
            refuses=refuses,
        )
        self._mailbox = mailbox
        self._lineage, self._is_new = "", False
        self._outbox: deque[OutgoingGroup] = deque(maxlen=share.keep)
        self._courier: GroupCourier | None = None
        self._turn: Future[TurnReport] | None = None
        self._stock: dict[GroupOrigin, tuple[Borrowed, ...]] = {}
        self._left_out: dict[GroupOrigin, str] = {}
        self._failed = ""

    def settle(
        self,
        step: int,
        ledger: Ledger,
        *,
        samples: Iterable[Trajectory],
        borrowed: Sequence[Borrowed],
        protected: int,
    ) -> None:
        """Give the groups of ``step``, which ``ledger`` counts as trained, and borrow for the next.

        ``samples`` are its own samples, fresh and reused ones; ``borrowed`` are those of others.
        ``protected`` is the newest protected step. Raises ``ConfigError`` if another run has this
        one's name by now.
        """
        if not self._lineage:
            self._lineage, self._is_new = secrets.token_hex(_LINEAGE_BYTES), True
        self._collect()
        self._give(step, samples, fresh=ledger.taken(step) or ())
        self._tell(step, ledger, borrowed)
        if step + 1 < ledger.plan.steps:
            self._borrow(step + 1, ledger)
        if self._turn is None:
            outgoing = [
                each
                for each in self._outbox
                if each.step < protected or each.step + _LATE_STEPS <= step
            ]
            self._begin(outgoing, ledger)

    def await_turn(self, timeout_s: float) -> None:
        """Wait for the end of the courier's turn, for those who want what it brings."""
        if self._turn is not None:
            wait([self._turn], timeout_s)

    def state_dict(self) -> dict[str, Json]:
        """Return the groups that wait to be published, as JSON values."""
        return {
            "lineage": self._lineage,
            "outbox": [[each.step, each.ordinal, each.text] for each in self._outbox],
        }

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Replace them by what ``state_dict`` returned."""
        self._lineage, self._is_new = state["lineage"], False
        self._outbox = deque(
            (
                OutgoingGroup(step=step, ordinal=ordinal, text=text)
                for step, ordinal, text in state["outbox"]
            ),
            maxlen=self.share.keep,
        )
        self._courier = None

    # -- inside ----------------------------------------------------------------------------------

    def _give(self, step: int, samples: Iterable[Trajectory], *, fresh: Sequence[int]) -> None:
        groups: dict[int, list[Trajectory]] = {}
        for sample in samples:
            if sample.ordinal in fresh:
                groups.setdefault(sample.ordinal, []).append(sample)
        for ordinal, group in groups.items():
            made = shared_group(
                group,
                island=self.share.name,
                lineage=self._lineage,
                family=self.share.digest,
                tokenizer=self.share.tokenizer,
            )
            text = msgspec.json.encode(made).decode()
            self._outbox.append(OutgoingGroup(step=step, ordinal=ordinal, text=text))

    def _tell(self, step: int, ledger: Ledger, borrowed: Sequence[Borrowed]) -> None:
        origins = {sample.origin for sample in borrowed}
        wished = self.share.others if step else 0  # before the first step nothing can be recorded
        ledger.counters.groups_missed += max(0, wished - len(origins))
        self._emit(
            GroupsBorrowed(
                step=step + 1,
                groups=len(origins),
                wished=self.share.others,
                origins=tuple(sorted(map(str, origins))),
                failed=self._failed,
            )
        )

    def _borrow(self, step: int, ledger: Ledger) -> None:
        borrowing, count = ledger.borrowing, self.share.others
        origins = chosen(self._stock, count=count, turn=step, may_take=borrowing.may_take)
        borrowing.record([self._stock.pop(origin) for origin in origins], step=step)

    def _begin(self, outgoing: Sequence[OutgoingGroup], ledger: Ledger) -> None:
        if self._courier is None:
            self._courier = GroupCourier(
                self._mailbox, self.share, lineage=self._lineage, is_new=self._is_new
            )
        courier, borrowing, left_out = self._courier, ledger.borrowing, self._left_out
        have = frozenset(self._stock)

        def may_take(origin: GroupOrigin) -> bool:
            return borrowing.may_take(origin) and origin not in left_out

        self._turn = beside(
            lambda: courier.turn(outgoing, may_take=may_take, have=have), name="share-groups"
        )

    def _collect(self) -> None:
        """Take the result of the turn that was made, if it is over."""
        if self._turn is None or not self._turn.done():
            return
        turn, self._turn = self._turn, None
        try:
            report = turn.result()
        except (CkptError, OSError) as error:
            if not self._failed:
                _log.warning("samples cannot be shared; trying again: %s", error)
            self._failed = str(error)
            return
        self._failed = ""
        published = set(report.published)
        kept = (each for each in self._outbox if each.ordinal not in published)
        self._outbox = deque(kept, maxlen=self.share.keep)
        if published:
            self._emit(GroupsShared(groups=len(published), bytes=report.bytes))
        self._fit(report)

    def _fit(self, report: TurnReport) -> None:
        """Add the groups that came to the stock; drop those that are gone, or no longer new."""
        for origin, group in report.fetched.items():
            samples = group if isinstance(group, str) else fitted(group, self._rules)
            if isinstance(samples, str):
                self._left_out[origin] = samples
                self._emit(GroupLeftOut(island=origin.island, ordinal=origin.ordinal, why=samples))
            else:
                self._stock[origin] = samples
        while len(self._left_out) > _LEFT_OUT_KNOWN:
            del self._left_out[next(iter(self._left_out))]
        for origin in list(self._stock):
            newest = report.newest.get(origin.island)
            is_gone = origin.island not in report.islands
            if is_gone or (newest is not None and origin not in newest):
                del self._stock[origin]
