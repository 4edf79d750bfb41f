"""Bugs of the sharing of samples, found by three small runs that die, go back and share."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any, Final

from doubles.sharing_runs import STEPS, SharedPool, SharingRun

from holdfast.adapters.rl.ledger.borrowing import Borrowing
from holdfast.adapters.rl.samples.borrowed import GroupOrigin
from holdfast.adapters.rl.sharing.courier import GroupCourier
from holdfast.adapters.rl.sharing.mailbox import GroupMailbox
from mutants.bug import Bug

_NAMES: Final = ("oslo", "lyon", "rome")
_TURNS: Final = 60


def trial(seed: int) -> str:
    """Run the runs of a seed; return the first thing that is wrong with them, or ""."""
    draw = random.Random(f"planted sharing {seed}")
    pool = SharedPool()
    runs = [SharingRun(pool, name, others=draw.randint(1, 2)) for name in _NAMES]
    for turn in range(_TURNS):
        open_ = [run for run in runs if run.done < STEPS]
        if not open_:
            break
        run, lag = draw.choice(open_), draw.randint(0, 1)
        if draw.random() < 0.25:
            run.die_in_step(lag=lag)
        else:
            run.step(lag=lag)
        if draw.random() < 0.1 and turn < _TURNS // 2:
            run.go_back(draw.randint(1, 3))
    return "; ".join([what for run in runs for what in run.judge()][:1])


# -- the bugs --------------------------------------------------------------------------------------


def _forgets_the_taken(real: Callable[[Borrowing], dict[str, Any]]) -> Any:
    return lambda self: {**real(self), "taken": []}


def _forgets_the_recorded(real: Callable[[Borrowing], dict[str, Any]]) -> Any:
    return lambda self: {**real(self), "groups": []}


def _looks_at_its_own(real: Callable[..., None]) -> Any:
    def look(self: GroupCourier, *arguments: Any) -> None:
        share = self._share
        self._share = dataclasses.replace(share, name="nobody")
        try:
            real(self, *arguments)
        finally:
            self._share = share

    return look


def _overwrites(_real: Any) -> Any:
    def publish(self: GroupMailbox, group: str, origin: GroupOrigin) -> int:
        from holdfast.adapters.rl.samples.sealed import sealed
        from holdfast.adapters.rl.sharing import mailbox

        return self.store.write(mailbox._file(origin), [sealed(group.encode())])

    return publish


def _bug(name: str, about: str, where: str, broken: Callable[[Any], Any], seed: int) -> Bug:
    return Bug(name=name, about=about, where=where, broken=broken, trial="sharing", seed=seed)


BUGS: Final = (
    _bug(
        "borrowed-again",
        "a restored run has forgotten which groups it took",
        "holdfast.adapters.rl.ledger.borrowing:Borrowing.state_dict",
        _forgets_the_taken,
        0,
    ),
    _bug(
        "borrowed-late",
        "a snapshot lacks the groups that the next step borrows",
        "holdfast.adapters.rl.ledger.borrowing:Borrowing.state_dict",
        _forgets_the_recorded,
        0,
    ),
    _bug(
        "own-group-back",
        "a run takes its own groups from the pool",
        "holdfast.adapters.rl.sharing.courier:GroupCourier._look",
        _looks_at_its_own,
        0,
    ),
    _bug(
        "group-overwritten",
        "a run that went back replaces a group that others may have",
        "holdfast.adapters.rl.sharing.mailbox:GroupMailbox.publish",
        _overwrites,
        3,
    ),
)
