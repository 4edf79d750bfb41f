"""Leaving the loop: all ranks leave it after the same step, or the job ends and names who did not.

`Run.stop` is agreed at the end of every step, in one small reduction. A `break` or `return` needs
none: a rank whose function is over says so in the generation's store, and makes no collective
before all others have said the same. A rank that goes on waits for it in a collective; after a
moment it looks into the store, where the other says how many collectives it has joined.
"""

from __future__ import annotations

import threading
import time
from typing import NoReturn

import msgspec
import torch

from holdfast.ckpt.errors import PeerError
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.groups.waits import Joined, leave_behind
from holdfast.elastic.loop.user_code import user_line

_POLL_S = 0.02
_POLLERS = 64
"""Ranks that ask one store so often; of more ranks each asks less often, so that it can answer."""
_FIRST, _REFUSED, _SEEN = "first", "refused", "seen"
_REMEDY = "call run.stop(), on any rank; then all ranks leave after that step"


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which a rank left: after how many steps, and the line of a `break` or `return`.

    ``joined`` are the collectives of all ranks that it started, by group.
    """

    rank: int
    step: int
    line: str = ""
    joined: dict[str, int] = {}

    def __str__(self) -> str:
        at = f" ({self.line})" if self.line else ""
        return f"rank {self.rank} left the loop after {self.step} steps{at}"


class Leaving:
    """One rank's part in leaving the loop together."""

    def __init__(self, world: GenerationWorld) -> None:
        self._world, self._store = world, world.board
        self._requested = False
        self._line = ""
        self._over: int | None = None
        self._looking: threading.Thread | None = None
        self._poll_s = _POLL_S * max(1.0, world.size / _POLLERS)
        self._news = ""
        if self._store is not None and world.size > 1:
            world.guard.absent = self._look

    def stop(self) -> None:
        """Ask all ranks to leave the loop at the end of this step."""
        self._requested = True

    def agree(self, *more: float) -> tuple[bool, list[float]]:
        """Return whether a rank has asked to stop, and the largest of all ranks' further values.

        Collective, over all ranks, at the end of every step.
        """
        values = [float(self._requested), *more]
        if self._world.size > 1:
            said = torch.tensor(values, dtype=torch.float64)
            self._world.max_(said)
            values = said.tolist()
        return bool(values[0]), values[1:]

    def left(self, line: str) -> None:
        """Note the line at which the loop was left before its end."""
        self._line = line

    def over(self, step: int | None) -> None:
        """Note that the loop is over after ``step`` steps; None: a loop begins."""
        self._over = step

    def meet(self, step: int) -> None:
        """Wait until the function is over on all ranks.

        Raises ``ConfigError`` if one of them goes on, or has completed another number of steps.
        """
        world, store = self._world, self._store
        if store is None or world.size == 1:
            return
        joined = dict(world.guard.joined)
        mine = Exit(rank=world.rank, step=step, line=self._line, joined=joined)
        store.compare_set(_FIRST, "", msgspec.json.encode(mine).decode())
        same, everyone = f"after/{step}", "everyone"
        store.add(same, 1)
        store.add(everyone, 1)
        world.guard.absent = lambda joined: None
        with world.guard.wait():
            while store.add(same, 0) < world.size:
                world.guard.check()
                if store.check([_REFUSED]):
                    raise ConfigError(store.get(_REFUSED).decode())
                if store.add(everyone, 0) == world.size > store.add(same, 0):
                    self._refuse(mine)
                time.sleep(self._poll_s)
            store.add(_SEEN, 1)
            while world.rank == 0 and store.add(_SEEN, 0) < world.size:
                world.guard.check()  # the others read in this rank's store, which ends with it
                time.sleep(self._poll_s)

    def _refuse(self, mine: Exit) -> NoReturn:
        """Raise the error of ranks that left after different steps."""
        assert self._store is not None
        first = msgspec.json.decode(self._store.get(_FIRST), type=Exit)
        said = f"{first}, {mine}" if first.step != mine.step else f"{first}, others did not"
        raise ConfigError(f"{said}: {_REMEDY}")

    def _look(self, joined: Joined) -> None:
        """Look for a rank whose function is over, on a thread; raise what an earlier look found.

        Called while this rank waits in the collective ``joined`` of all ranks.
        """
        if self._news:
            raise ConfigError(self._news)
        if self._looking is None or not self._looking.is_alive():
            args = (joined, user_line())
            self._looking = threading.Thread(
                target=self._read, args=args, name="who-left", daemon=True
            )
            leave_behind(self._looking)
            self._looking.start()

    def _read(self, joined: Joined, line: str) -> None:
        store, rank = self._store, self._world.rank
        assert store is not None
        try:
            if not store.check([_FIRST]):
                return
            first = msgspec.json.decode(store.get(_FIRST), type=Exit)
            if first.joined.get(joined.group, 0) >= joined.number:
                return  # it came to this one, and another is late
            news = f"{first}, rank {rank} did not: {_REMEDY}"
            if self._over == first.step:
                news = (
                    f"the function is over on rank {first.rank}, and rank {rank} waits for it in a "
                    f"collective at {line}: call it on all ranks alike, or on none"
                )
            store.set(_REFUSED, news)
        except PeerError:  # the store's host is gone, and soon the generation
            return
        self._news = news
